"""The sections algorithm, optim, train and sft."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_jax.config.knobs import knob

PPO, GSPO, CISPO = "ppo", "gspo", "cispo"  # values of algorithm.loss
REINFORCE_PP = "reinforce_pp"  # value of algorithm.advantage
LOSS, REWARD = "loss", "reward"  # values of algorithm.kl_in
AUTO, NONE, TOKEN, SEQUENCE = "auto", "none", "token", "sequence"  # values of algorithm.importance
KEPT, FILTERED = "kept", "filtered"  # values of algorithm.overlong


@dataclass(frozen=True)
class Algorithm:
    advantage: str = knob(
        "grpo",
        "grpo: (r - mean) / std of the group | rloo: leave-one-out baseline | dr_grpo: r - mean | reinforce_pp: (r - mean) / "
        "std over all answer tokens of the step",
        one_of=("grpo", "rloo", "dr_grpo", REINFORCE_PP),
    )
    loss: str = knob(
        PPO,
        "policy-gradient loss of a token. ppo: clipped surrogate | gspo: the same with the ratio of the whole answer | cispo: "
        "log-prob weighted by the clipped ratio | module:function: a function of the tokens' arrays, clip_low and clip_high",
        one_of=(PPO, GSPO, CISPO),
        or_own=True,
    )
    aggregation: str = knob(
        "token_mean",
        "token_mean | sequence_mean | dr_grpo: sum / (sequences x max_new_tokens)",
        one_of=("token_mean", "sequence_mean", "dr_grpo"),
    )
    clip_low: float = knob(
        0.2, "clip: lower bound 1 - clip_low of the ratio", at_least=0, at_most=1
    )
    clip_high: float = knob(0.2, "clip: upper bound 1 + clip_high of the ratio", at_least=0)
    clip_dual: float = knob(
        0.0,
        "dual clip of ppo and gspo: the loss of a negative advantage A is at most -clip_dual A (above 1); 0: off",
        at_least=0,
    )
    kl_coef: float = knob(
        0.0, "weight of the KL to the frozen start policy; 0: no reference policy", at_least=0
    )
    kl_in: str = knob(
        LOSS,
        "where the KL is. loss: the k3 estimate of a token is added to its loss | reward: log-prob - reference of each token "
        "is subtracted from the reward, before advantages",
        one_of=(LOSS, REWARD),
    )
    entropy_coef: float = knob(0.0, "weight of the entropy bonus")
    minibatches: int = knob(1, "optimizer steps per rollout", at_least=1)
    overlong: str = knob(
        KEPT,
        "answers cut at rollout.max_new_tokens. kept: as any other | filtered: left out of the loss and of its means, "
        "but not of the advantages of their group",
        one_of=(KEPT, FILTERED),
    )
    importance: str = knob(
        AUTO,
        "importance weights between rollout and update: none | token: of each token | sequence: the product over the answer | "
        "auto: token when model.compute_dtype is bfloat16, else none. They use the recorded log-probs, whose last bits depend "
        "on the rollout's shape",
        one_of=(AUTO, NONE, TOKEN, SEQUENCE),
    )
    importance_cap: float = knob(2.0, "upper bound of the importance weights, at least 1")
    importance_mask: float = knob(
        0.0,
        "a token (importance token) or an answer (importance sequence) gets no policy gradient when its importance ratio is "
        "above this or below its inverse (above 1); 0: off",
        at_least=0,
    )
    importance_veto: float = knob(
        0.0,
        "an answer gets no policy gradient when the importance ratio of any of its tokens is above this or below its inverse "
        "(above 1); 0: off",
        at_least=0,
    )


@dataclass(frozen=True)
class Optim:
    learning_rate: float = knob(1e-6, "peak learning rate", at_least=0)
    schedule: str = knob(
        "constant",
        "learning rate of an RL step, for all of its optimizer steps: constant | linear | cosine; the last two reach 0 after "
        "the last one",
        one_of=("constant", "linear", "cosine"),
    )
    warmup_steps: int = knob(0, "RL steps of linear warm-up", at_least=0)
    beta1: float = knob(0.9, "Adam's first moment", at_least=0, below=1)
    beta2: float = knob(0.95, "Adam's second moment", at_least=0, below=1)
    weight_decay: float = knob(0.0, "decoupled weight decay (matrices only)", at_least=0)
    grad_clip: float = knob(1.0, "clip the gradient's global norm; 0: off", at_least=0)


@dataclass(frozen=True)
class Train:
    steps: int = knob(100, "RL steps; 0: train.epochs sets them", at_least=0)
    epochs: int = knob(0, "passes over the training rows, when train.steps is 0", at_least=0)
    seed: int = knob(
        0, "seed of all random numbers but data.split_seed's", at_least=0, at_most=2**32 - 1
    )
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
        "supervised steps on worked solutions before RL; 0: none. The result is cached by configuration and solutions",
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
