"""Published numbers, with their sources; computes nothing.

TLT: "Taming the Long-Tail", arXiv 2511.16665. Its engine is a fork of SGLang 0.5.3.
"""

from __future__ import annotations

# TLT, figure 13 (left): tokens a round by depth, for 16, 32, 48, 64, 96 and 128 nodes. Qwen2.5-32B on 4 H100, one
# sequence, topk 8.
NODES = 16, 32, 48, 64, 96, 128
ACCEPT_LENGTH = {
    4: (4.63, 4.74, 4.78, 4.81, 4.81, 4.82),
    6: (5.71, 6.08, 6.16, 6.31, 6.31, 6.36),
    8: (6.34, 7.01, 7.24, 7.39, 7.49, 7.51),
    10: (6.80, 7.63, 7.97, 8.21, 8.31, 8.39),
    12: (7.02, 8.05, 8.49, 8.76, 8.86, 9.06),
    16: (7.25, 8.44, 8.97, 9.23, 9.51, 9.78),
}
# TLT, figure 13 (right): tokens per second over plain decoding, of the same strategies.
SPEEDUP = {
    4: (2.71, 2.67, 2.63, 2.60, 2.51, 2.40),
    6: (3.09, 3.16, 3.15, 3.17, 3.08, 2.94),
    8: (3.19, 3.40, 3.43, 3.47, 3.39, 3.29),
    10: (3.22, 3.46, 3.56, 3.62, 3.56, 3.46),
    12: (3.12, 3.47, 3.58, 3.66, 3.59, 3.54),
    16: (2.94, 3.26, 3.41, 3.48, 3.49, 3.45),
}
# TLT, table 4: the same by running requests and nodes, at depth 10 (its first column is that row of figure 13).
REQUESTS = 1, 2, 4, 8, 16, 32
SPEEDUP_BY_REQUESTS = {
    16: (3.22, 3.08, 3.01, 2.73, 2.67, 2.48),
    32: (3.46, 3.28, 3.09, 2.63, 2.52, 2.23),
    48: (3.56, 3.39, 3.13, 2.51, 2.24, 1.90),
    64: (3.62, 3.38, 2.98, 2.27, 1.91, 1.70),
}
# TLT, table 1: (accept length, speed-up) by topk.
BY_TOPK = {
    4: (8.29, 3.51), 6: (8.66, 3.65), 8: (8.67, 3.64), 10: (8.67, 3.64), 12: (8.60, 3.56), 16: (8.42, 3.47),
}  # fmt: skip
# TLT, table 2: tokens per second of one sequence of Qwen2.5-7B, plain and drafted.
BY_GPU = {
    "b200": (259.71, 605.05), "h100": (164.65, 430.24), "a100": (92.83, 259.01),
    "rtx5090": (100.89, 293.84), "rtx4090": (65.28, 187.44), "rtx3090": (51.75, 166.41),
}  # fmt: skip
# TLT, table 6: accept length of a drafter trained for the base policy, and of one that was trained along.
STATIC, ADAPTIVE = 4.59, 6.53
# fastrl issue 13: 8_4_48 with the released drafter of Qwen2.5-7B, two runs, by a third party; answers of 32 prompts in tokens.
RELEASED, RELEASED_TOKENS = (6.358, 6.567), (27_136, 30_942)
# TLT, figure 14: 128 requests, drafting once at most 32 run: the rollout, and the phase with one request.
TAIL, TAIL_ONE = 2.44, 3.46
# TLT, figure 11: training throughput over VeRL, 64 H100: with n-grams alone (TLT-Base), and with the adaptive drafter (TLT).
END_TO_END = {"Qwen2.5-7B": (1.41, 1.76), "DeepSeek-R1-7B": (1.31, 1.71), "Qwen2.5-32B": (1.54, 2.12)}  # fmt: skip
# TLT, table 3: TLT over VeRL by nodes of 8 H100; those of 8 nodes are figure 11's.
BY_CLUSTER = {"Qwen2.5-7B": {1: 1.21, 2: 1.45, 4: 1.62}, "Qwen2.5-32B": {4: 1.83}}  # fmt: skip
ROLLOUT_SHARE = 0.85  # TLT, section 2: the rollout's part of a step of VeRL
# fastrl issue 7, by a third party: milliseconds of a drafted round (2_2_2) and of a plain one of the paper's engine, by
# running requests: Qwen2.5-7B on two H20.
ENGINE_ROUNDS = {1: (8.45, 3.9), 6: (8.85, 4.5), 12: (8.99, 4.9)}
# NeMo-RL, arXiv 2604.26779: Qwen3-8B, 32 GB200, GRPO, an EAGLE-3 chain of 3: accept length, and seconds of generation plain
# and drafted. Chains of 5 and 7 are slower than that of 3.
NEMO = {"RL-Zero": (2.47, 100.0, 56.6), "RL-Think": (2.05, 133.6, 87.0)}
# Tokens per second of vLLM, Qwen3-8B on an H100, of 1 and 32 sequences: huggingface.co/Dogacel/Qwen3-8B-DSpark.
VLLM = {1: 147.0, 32: 2995.0}
