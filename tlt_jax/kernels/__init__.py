"""Attention, products of few rows and writes to a cache, and their choice by device; knows no network.

Public: packed_attention, tree_attention, projections, cache_rows, numerics.
"""
