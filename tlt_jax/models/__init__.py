"""Networks, arrays in and arrays out; the hf modules alone know Hugging Face names.

Public: transformer, eagle, kv_cache, token_logprobs, hf, hf_drafter, and from_config, which names the policy and
the drafter of a configuration.
"""
