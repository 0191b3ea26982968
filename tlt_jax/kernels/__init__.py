"""Attention, in every form that a device has a faster way for; knows no network.

Public: packed_attention, tree_attention, numerics.
"""
