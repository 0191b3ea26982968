"""Speculative decoding on devices, over an abstract Target and Drafter: no network, no host, no clock.

Public: decode (decode_chunk, admit, resize, catch_up), interface (Target, Drafter, Network, Context), strategy,
sampling.Sampling, stopping.DecodingParams.
"""
