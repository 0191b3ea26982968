"""Speculative decoding on devices, over an abstract Target and Drafter; knows no network, host or clock.

Public: decode (decode_chunk, catch_up), admission (admit, resize), interface (Target, Drafter, Network, Context), strategy
(Strategy), decoding_params (Sampling, DecodingParams).
"""
