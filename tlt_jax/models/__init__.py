"""Networks, arrays in and arrays out; only the hf modules know Hugging Face names.

Public: transformer, drafter, eagle, block_drafter, kv_cache, targets, hf, hf_drafter, and
from_config: the policy and the drafter of a configuration.
"""
