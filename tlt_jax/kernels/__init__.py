"""Attention kernels, and their choice by device; knows no network. Public: packed_attention, tree_attention, numerics."""
