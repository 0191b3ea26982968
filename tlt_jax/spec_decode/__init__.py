"""Speculative decoding on devices, over an abstract Target and Drafter.

Public: decode (decode_chunk, catch_up), decode_state (admit, resize), interface (Target, Drafter, Context, Sampling,
DecodingParams), strategy (Strategy).
"""
