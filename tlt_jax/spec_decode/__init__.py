"""Speculative decoding on devices, over an abstract Target and Drafter.

It knows no network, host or clock. Public: decode (decode_chunk, admit, resize, catch_up),
interface (Target, Drafter, Network, Context), strategy, sampling.Sampling, stopping.DecodingParams.
"""
