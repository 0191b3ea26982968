"""RL of reasoning language models in JAX, with adaptive speculative rollout (TLT, arXiv 2511.16665)."""
