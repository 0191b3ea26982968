"""The sections algorithm, optim, train and sft."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_jax.config.knobs import knob

PPO = "ppo"  # value of algorithm.loss


@dataclass(frozen=True)
class Algorithm:
    advantage: str = knob(
        "grpo",
        "grpo: (r - mean) / std of the group | rloo: leave-one-out baseline | dr_grpo: r - mean",
        one_of=("grpo", "rloo", "dr_grpo"),
    )
    loss: str = knob(
        PPO,
        "policy-gradient loss of a token. ppo: clipped surrogate | module:function: a function of log-probs, old log-probs, "
        "advantages, clip_low and clip_high",
        one_of=(PPO,),
        or_own=True,
    )
    aggregation: str = knob(
        "token_mean",
        "token_mean | sequence_mean | dr_grpo: sum / (sequences x max_new_tokens)",
        one_of=("token_mean", "sequence_mean", "dr_grpo"),
    )
    clip_low: float = knob(
        0.2, "PPO clip: lower bound 1 - clip_low of the ratio", at_least=0, at_most=1
    )
    clip_high: float = knob(0.2, "PPO clip: upper bound 1 + clip_high of the ratio", at_least=0)
    kl_coef: float = knob(
        0.0, "weight of the k3 KL to the frozen start policy; 0: no reference policy", at_least=0
    )
    entropy_coef: float = knob(0.0, "weight of the entropy bonus")
    minibatches: int = knob(1, "optimizer steps per rollout", at_least=1)
    importance_cap: float = knob(
        0.0,
        "upper bound of truncated importance weights between sampler and trainer; 0: off. They use the recorded "
        "log-probs, whose last bits depend on the rollout's shape",
        at_least=0,
    )


@dataclass(frozen=True)
class Optim:
    learning_rate: float = knob(1e-6, "peak learning rate", at_least=0)
    schedule: str = knob(
        "constant",
        "learning rate schedule: constant | linear | cosine; the last two reach 0 at the last step",
        one_of=("constant", "linear", "cosine"),
    )
    warmup_steps: int = knob(0, "steps of linear warm-up", at_least=0)
    beta1: float = knob(0.9, "Adam's first moment", at_least=0, below=1)
    beta2: float = knob(0.95, "Adam's second moment", at_least=0, below=1)
    weight_decay: float = knob(0.0, "decoupled weight decay (matrices only)", at_least=0)
    grad_clip: float = knob(1.0, "clip the gradient's global norm; 0: off", at_least=0)


@dataclass(frozen=True)
class Train:
    steps: int = knob(100, "RL steps; 0: train.epochs sets them", at_least=0)
    epochs: int = knob(0, "passes over the training rows, when train.steps is 0", at_least=0)
    seed: int = knob(0, "seed of all random numbers", at_least=0, at_most=2**32 - 1)
    row_tokens: int = knob(
        0,
        "tokens of a packed row; 0: the longest prompt + answer, rounded up to 128, and twice that when train.rows is 0",
        at_least=0,
    )
    rows: int = knob(
        0,
        "packed rows of one gradient accumulation step on the whole mesh; 0: one per data group",
        at_least=0,
    )
    logits_chunk: int = knob(
        1024,
        "targets per chunk of the update's logits, in each data group, and at most a quarter of its tokens; in the "
        "drafter's update tokens",
        at_least=1,
    )
    attention_block: int = knob(
        128,
        "queries per block of attention scores in the update, where no library kernel is used: on CPUs, in float32, "
        "and in the drafter's update",
        at_least=1,
    )


@dataclass(frozen=True)
class Sft:
    steps: int = knob(
        0,
        "supervised steps on worked solutions before RL; 0: none. The result is cached by configuration",
        at_least=0,
    )
    batch: int = knob(64, "solutions per step", at_least=1)
    learning_rate: float = knob(
        1e-3, "peak learning rate, cosine to a tenth, 5 % warm-up", at_least=0
    )
    solution_column: str = knob("solution", "column with the worked solution")
    cache: str = knob(
        "", "cache folder of finished warm starts; empty: ~/.cache/tlt_jax/sft; 'off': none"
    )
