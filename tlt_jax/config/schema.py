"""The sections of a configuration but those of `task`, with names of values and of files of a run. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tlt_jax.config.knobs import knob, section
from tlt_jax.config.task import Data, Environment, Eval, Reward

# The most used knobs, shown by --help.
COMMON = (
    "run", "model.path", "mesh.data", "mesh.model", "data.train", "data.eval", "rollout.prompts", "rollout.samples",
    "rollout.max_new_tokens", "speculation.drafter", "reward.terms", "optim.learning_rate", "train.steps",
)  # fmt: skip
# Values of model.remat, drafter_training.share, speculation.drafter and algorithm.importance.
AUTO, NONE, HUB = "auto", "none", "hub"
ALWAYS, NEVER = "always", "never"
DTYPES = ("float32", "float64", "bfloat16")
# Values of model.lora.targets: peft's names of a layer's matrices, in the order of a layer, and all of them.
LORA_TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
ALL_LINEAR = "all-linear"
NGRAM, ADAPTIVE = "ngram", "adaptive"  # values of speculation.drafter; any other one is a directory
PPO, GSPO, CISPO, DPPO, SAPO = "ppo", "gspo", "cispo", "dppo", "sapo"  # values of algorithm.loss
REINFORCE_PP, MAXRL = "reinforce_pp", "maxrl"  # values of algorithm.advantage
SELF = "self"  # value of algorithm.teacher.path
PROMPT_MEAN = "prompt_mean"  # value of algorithm.aggregation
LOSS, REWARD = "loss", "reward"  # values of algorithm.kl_in
TOKEN, SEQUENCE, GEOMETRIC = "token", "sequence", "geometric"  # values of algorithm.importance
KEPT, FILTERED = "kept", "filtered"  # values of algorithm.overlong
TENSORBOARD, WANDB = "tensorboard", "wandb"  # values of log.trackers
# Names in the run folder: the configuration, all messages with compilations, the scalars by step of the run and of its
# supervised warm start, the answers, and the final policy.
RESOLVED, LOG, METRICS, WARM_START = "config.yaml", "log.txt", "metrics.jsonl", "warm_start.jsonl"
COMPLETIONS, EXPORT = "completions", "hf"


@dataclass(frozen=True)
class Lora:
    rank: int = knob(
        0,
        "LoRA: adapters of this rank are trained, and every other weight of the start policy stays as it is; 0: all weights "
        "are trained",
        at_least=0,
    )
    alpha: float = knob(
        16.0, "an adapter's change is multiplied with alpha / rank (peft's lora_alpha)", above=0
    )
    targets: list[str] = knob(
        [ALL_LINEAR],
        f"matrices with an adapter, in every layer (peft's target_modules): {', '.join(LORA_TARGETS)}, or {ALL_LINEAR}: all "
        "of them",
        one_of=(*LORA_TARGETS, ALL_LINEAR),
    )


@dataclass(frozen=True)
class Model:
    path: str = knob(
        "",
        "HF model directory or hub id, or that of adapters (peft), which are merged into the base that they name unless "
        "model.lora trains them further; empty: a new model with the sizes in model.init",
    )
    tokenizer: str = knob(
        "", "tokenizer directory or hub id; empty: model.path, or the task's own tokenizer"
    )
    init: dict[str, Any] = knob(
        {},
        "fields of an HF config.json (model_type, hidden_size, ...) for a new model; vocabulary and EOS default to those "
        "of the tokenizer. With model.path: the sizes that `plan` uses when the model's files are missing",
    )
    param_dtype: str = knob(
        "float32",
        "dtype of the master weights: float32 | float64; bfloat16 would lose small updates",
        one_of=("float32", "float64"),
    )
    compute_dtype: str = knob(
        "float32",
        f"dtype of matrix products, rollout weights and KV cache: {' | '.join(DTYPES)}",
        one_of=DTYPES,
    )
    remat: str = knob(
        AUTO,
        "gradient checkpointing: what a layer computes again in the backward pass of the policy update. none: nothing | full: "
        "everything (least memory, up to a third more time) | auto: layer by layer as little as the memory of the devices "
        "allows",
        one_of=("none", "full", AUTO),
    )
    lora: Lora = section(Lora)


@dataclass(frozen=True)
class Mesh:
    data: int = knob(
        1,
        "data parallelism: rollout replicas (data groups), and FSDP shards of the update",
        at_least=1,
    )
    model: int = knob(1, "tensor parallelism: devices of one data group", at_least=1)
    fake_devices: int = knob(
        0,
        "split the host CPU into this many devices; 0: use the available devices",
        at_least=0,
    )


@dataclass(frozen=True)
class Rollout:
    prompts: int = knob(8, "prompts of one RL step", at_least=1)
    max_prompts: int = knob(
        0,
        "dynamic sampling (DAPO): prompts whose answers all score alike are replaced by further ones while the rollout runs, "
        "until rollout.prompts are left that do not, or this many were tried; 0: none is replaced",
        at_least=0,
    )
    samples: int = knob(8, "answers per prompt (the group of GRPO)", at_least=1)
    temperature: float = knob(1.0, "sampling temperature; 0 is greedy", at_least=0)
    top_k: int = knob(0, "sample from the k likeliest tokens; 0: from all", at_least=0)
    top_p: float = knob(
        1.0,
        "sample from the smallest set of likeliest tokens with total probability p; 1: from all",
        above=0,
        at_most=1,
    )
    max_new_tokens: int = knob(
        256,
        "longest answer in tokens, EOS included; longer ones are truncated and counted",
        at_least=1,
    )
    stop: list[str] = knob([], "stop strings: an answer also ends after one of them")
    slots: int = knob(
        0, "sequences that a data group decodes at once; 0: all of its share", at_least=0
    )
    chunk: int = knob(16, "maximum decoding rounds between two polls by the host", at_least=1)
    deterministic: bool = knob(
        False,
        "schedule without a clock, by counts and a table of costs: with the same settings and devices a bfloat16 run "
        "repeats and resumes bit for bit; slower, because groups do not share work and the host waits for compilations",
    )
    compile_cache: str = knob(
        "",
        "folder of the persistent compilation cache; empty: ~/.cache/tlt_jax/xla; 'off': none. Entries unused for 30 days "
        "are deleted; beyond 8 GiB the least recently used ones too",
    )


@dataclass(frozen=True)
class Speculation:
    """Speculative decoding in the rollout; it changes the speed and no token."""

    drafter: str = knob(
        ADAPTIVE,
        "none | ngram: prompt lookup | directory of a drafter of a kind of drafter_training.kind | adaptive: n-grams, and the "
        "drafter of `drafter_training`, which the run trains; only for training runs",
    )
    tuner: str = knob(
        "goodput",
        "policy that chooses the strategy of the next chunk. goodput: highest predicted tokens per second | threshold or "
        "threshold:N: drafts when at most N (32) sequences of a data group are live | beg_mab: the paper's bandit | fixed: "
        "always the first strategy | "
        "module:function: returns your Tuner of the strategies. With drafter adaptive, only goodput waits until the learned "
        "drafter pays",
        one_of=("goodput", "threshold", "beg_mab", "fixed"),
        or_own=True,
    )
    strategies: list[str] = knob(
        ["3_1_4", "7_1_8", "6_4_16", "1_1_2"],
        "draft trees to choose from, as depth_topk_nodes (nodes includes the root); plain decoding is always a choice. In "
        "large, compute-bound batches a single draft token (1_1_2) can be the only one that pays. With drafter adaptive, "
        "n-grams draft trees of topk 1, the learned drafter all trees, and both together (merged) those of topk 2 or more; "
        "ngram:3_1_4, learned:3_1_4 or merged:6_4_16 selects one of them",
    )


@dataclass(frozen=True)
class Teacher:
    """On-policy distillation: a teacher's log-probs of the policy's own tokens."""

    path: str = knob(
        "",
        "Hugging Face directory or hub id of a model with the policy's tokenizer, or self: the policy with a hint; empty: none",
    )
    weight: float = knob(
        1.0,
        "weight of log-prob of the teacher - log-prob of the policy in a token's advantage",
        above=0,
    )
    top_k: int = knob(
        0,
        "above 0: instead, the KL to the teacher over so many tokens that it finds most likely, and the rest as one, is added "
        "to the loss",
        at_least=0,
        at_most=256,
    )
    temperature: float = knob(
        0.0, "temperature of the teacher's log-probs; 0: rollout.temperature", at_least=0
    )
    hint: str = knob(
        "", "column of the data, for example a solution, that follows the prompt for the teacher"
    )
    drafter: float = knob(
        0.0,
        "with top_k: share of the teacher's distribution in what the adaptive drafter learns from the rows of a policy update; "
        "the rest is the policy's",
        at_least=0,
        at_most=1,
    )


@dataclass(frozen=True)
class Algorithm:
    advantage: str = knob(
        "grpo",
        "grpo: (r - mean) / std of the group | rloo: leave-one-out baseline | dr_grpo: r - mean | maxrl: (r - mean) / mean | "
        "reinforce_pp: (r - mean) / std over all answer tokens of the step | none: 0, for a teacher alone",
        one_of=("grpo", "rloo", "dr_grpo", MAXRL, REINFORCE_PP, NONE),
    )
    loss: str = knob(
        PPO,
        "policy-gradient loss of a token. ppo: clipped surrogate | gspo: the same with the ratio of the whole answer | cispo: "
        "log-prob weighted by the clipped ratio | dppo: masked where the token's probability has moved by more than clip_low "
        "or clip_high | sapo: a soft gate in place of the clip | module:function: a function of the tokens' arrays, clip_low "
        "and clip_high",
        one_of=(PPO, GSPO, CISPO, DPPO, SAPO),
        or_own=True,
    )
    aggregation: str = knob(
        "token_mean",
        "token_mean | sequence_mean | prompt_mean: mean over prompts of the mean over the tokens of their answers | dr_grpo: "
        "sum / (sequences x max_new_tokens)",
        one_of=("token_mean", "sequence_mean", PROMPT_MEAN, "dr_grpo"),
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
    sapo_positive: float = knob(
        1.0, "temperature of sapo's gate for advantages above 0: larger is narrower", above=0
    )
    sapo_negative: float = knob(1.05, "the same for advantages below 0", above=0)
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
    teacher: Teacher = section(Teacher)
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
        "geometric: the geometric mean over the answer | auto: token when model.compute_dtype is bfloat16, else none. They use "
        "the recorded log-probs, whose last bits depend on the rollout's shape",
        one_of=(AUTO, NONE, TOKEN, SEQUENCE, GEOMETRIC),
    )
    importance_cap: float = knob(2.0, "upper bound of the importance weights, at least 1")
    importance_mask: float = knob(
        0.0,
        "a token, or an answer, gets no policy gradient when its importance ratio is above this (above 1); 0: off",
        at_least=0,
    )
    importance_mask_low: float = knob(
        0.0,
        "the same when the ratio is below this (below 1); 0: the inverse of importance_mask",
        at_least=0,
        below=1,
    )
    importance_mask_level: str = knob(
        AUTO,
        "ratios of importance_mask: token | sequence | geometric | auto: those of importance",
        one_of=(AUTO, TOKEN, SEQUENCE, GEOMETRIC),
    )
    router_replay: str = knob(
        AUTO,
        "whether the update gives each token the experts that it had in the rollout: always | never | auto: with a "
        "model.compute_dtype of bfloat16, in which the routers of both differ. Of a mixture of experts",
        one_of=(AUTO, ALWAYS, NEVER),
    )
    support_replay: bool = knob(
        False,
        "with rollout.top_k (at most 256), with or without top_p: all log-probs of training are of the tokens from which the "
        "rollout drew each token, whose ids it records",
    )
    router_balance: float = knob(
        0.0,
        "weight of the load-balancing loss of a mixture of experts (1 for each expert of a token at best)",
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


@dataclass(frozen=True)
class DrafterTraining:
    """The learned drafter: training by `python -m tlt_jax.train.drafter`, and start and loss of an adaptive one."""

    kind: str = knob(
        "eagle3",
        "architecture of a new drafter: eagle3 and eagle draft one level a pass, dflash, dflash2 and dspark all levels in one",
        one_of=("eagle3", "eagle", "dflash", "dflash2", "dspark"),
    )
    start: str = knob(
        AUTO,
        "drafter to start from: auto: the best of drafter_training.shelf for the same policy, or for one that was trained from "
        "it, else a new one, as always with rollout.deterministic; none: a new one; a directory; a hub id; hub: the published "
        "one of model.path (`tlt drafters` lists both)",
    )
    shelf: str = knob(
        "",
        "folder of the drafters that runs leave for later ones; empty: ~/.cache/tlt_jax/drafters; 'off': none. Beyond 16 GiB "
        "those go that were not used for longest",
    )
    texts: str = knob(
        "",
        "JSONL, JSON, CSV or Parquet files with columns prompt and response (text or token ids); empty: the policy answers "
        "the data's prompts",
    )
    rollouts: int = knob(
        16,
        "rollouts of RL size that generate training texts, when drafter_training.texts is empty",
        at_least=1,
    )
    steps: int = knob(1000, "optimizer steps, each on train.rows packed rows", at_least=1)
    share: float | str = knob(
        AUTO,
        "with speculation.drafter adaptive: share of each RL step's packed rows that train the drafter before the policy "
        "update, on any mesh, in addition to idle training. A number from 0 to 1, or auto: at most a fifth of a step "
        "while the rest of the run is expected to repay it, otherwise 3 % of the run's time, and 0 when the run is too short "
        "to gain; with rollout.deterministic 0.05",
        one_of=(AUTO,),
        at_least=0,
        at_most=1,
    )
    learning_rate: float = knob(
        1e-4, "peak learning rate, cosine to a tenth, 5 % warm-up", at_least=0
    )
    unroll: int = knob(
        0,
        "draft steps trained at every position (training-time test); 0: 1 for eagle, 5 for eagle3",
        at_least=0,
    )
    vocab: int = knob(
        0,
        "draft vocabulary of a new drafter, except eagle's: the most frequent tokens; 0: all, at most 32000",
        at_least=0,
    )


@dataclass(frozen=True)
class IdleTraining:
    """Training of the adaptive drafter by data groups that have finished decoding."""

    learning_rate: float = knob(
        3e-4,
        "learning rate of a micro-step of at least 2048 tokens; smaller micro-steps scale it by sqrt(tokens / 2048)",
        at_least=0,
    )


@dataclass(frozen=True)
class Checkpoint:
    every: int = knob(
        50, "save every n steps and after the last one; 0: only after the last one", at_least=0
    )
    keep: int = knob(2, "number of latest checkpoints to keep", at_least=1)
    best_metric: str = knob(
        "",
        "also keep the best checkpoint by this evaluation metric (for example eval/mean@1); it is chosen anew when a resumed "
        "run changes its evaluations",
    )
    export: bool = knob(True, "write the final policy as an HF directory to <run>/hf")


@dataclass(frozen=True)
class Log:
    trackers: list[str] = knob(
        [TENSORBOARD],
        "destinations of the metrics. tensorboard: <run>/tensorboard | wandb: Weights & Biases, which needs the extra "
        "wandb; WANDB_MODE=offline writes to <run>/wandb for `wandb sync`",
        one_of=(TENSORBOARD, WANDB),
    )


@dataclass(frozen=True)
class Processes:
    """When a job of several processes ends because one of them died or hangs."""

    lost_s: float = knob(
        20.0, "seconds without a heartbeat after which a process counts as dead", at_least=5
    )
    stuck_s: float = knob(
        1800.0,
        "seconds without progress (a poll of the rollout, the end of a phase) after which a live process counts as hung",
        at_least=10,
    )


@dataclass(frozen=True)
class Profile:
    steps: str = knob("", "a-b: write a jax.profiler trace of these steps; empty: none")


@dataclass(frozen=True)
class Config:
    """The configuration of a run."""

    run: str = knob(
        "runs/default", "run folder: checkpoints, TensorBoard, completions, resolved configuration"
    )
    override: bool = knob(
        False,
        "--override: resume with changed values of optim.*, algorithm.* and similar; <run>/changes.jsonl records them",
    )
    model: Model = section(Model)
    mesh: Mesh = section(Mesh)
    data: Data = section(Data)
    rollout: Rollout = section(Rollout)
    speculation: Speculation = section(Speculation)
    reward: Reward = section(Reward)
    environment: Environment = section(Environment)
    algorithm: Algorithm = section(Algorithm)
    optim: Optim = section(Optim)
    train: Train = section(Train)
    sft: Sft = section(Sft)
    drafter_training: DrafterTraining = section(DrafterTraining)
    idle_training: IdleTraining = section(IdleTraining)
    eval: Eval = section(Eval)
    checkpoint: Checkpoint = section(Checkpoint)
    log: Log = section(Log)
    processes: Processes = section(Processes)
    profile: Profile = section(Profile)
