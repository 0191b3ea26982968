"""Every knob of the system by section, with its meaning, default and range; knows nothing of JAX and imports none of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tlt_jax.config.parse import knob, section

DTYPES = ("float32", "float64", "bfloat16")
REWARDS = ("task", "math", "math_flexible", "gsm8k", "gsm8k_flexible", "exact", "format")
# The knobs that people touch first.
COMMON = (
    "run", "model.path", "mesh.data", "mesh.model", "data.train", "data.eval", "rollout.prompts", "rollout.samples",
    "rollout.max_new_tokens", "speculation.drafter", "reward.terms", "optim.learning_rate", "train.steps",
)  # fmt: skip
RENAMED = {"warmup": "drafter_training"}  # sections, by the names that older versions gave them
# Of speculation.drafter; other values name a directory.
NONE, NGRAM, ADAPTIVE = "none", "ngram", "adaptive"
AUTO = "auto"  # of drafter_training.share
DROP = "drop"  # of data.duplicates
LOG = "log.txt"  # of a run folder: every message, each compilation too
TENSORBOARD, WANDB = "tensorboard", "wandb"  # of log.trackers
LATEST, LAST_GOOD = "latest", "last_good"  # of checkpoint.resume
PPO = "ppo"  # of algorithm.loss


@dataclass(frozen=True)
class Model:
    path: str = knob(
        "", "HF model directory or hub id; empty: a new model with the sizes in model.init"
    )
    tokenizer: str = knob(
        "", "tokenizer directory or hub id; empty: model.path, or the task's own tokenizer"
    )
    init: dict[str, Any] = knob(
        {},
        "fields of an HF config.json (model_type, hidden_size, ...) for a new model; the vocabulary and EOS come from "
        "the tokenizer when not given. Beside model.path: the sizes that `plan` uses without the model's files",
    )
    param_dtype: str = knob(
        "float32",
        "dtype of the trained master weights: float32 | float64; in bfloat16 small updates would round to nothing",
        one_of=("float32", "float64"),
    )
    compute_dtype: str = knob(
        "float32",
        f"dtype of matrix products and of the rollout's weights and cache: {' | '.join(DTYPES)}",
        one_of=DTYPES,
    )
    matmul_precision: str = knob(
        "default",
        "jax_default_matmul_precision: default | high | highest",
        one_of=("default", "high", "highest"),
    )
    remat: bool = knob(
        False, "recompute each layer in the backward pass (less memory, about a third more time)"
    )


@dataclass(frozen=True)
class Mesh:
    data: int = knob(1, "data groups: rollout replicas, and FSDP shards of the update", at_least=1)
    model: int = knob(1, "devices of one data group: tensor parallelism", at_least=1)
    fake_devices: int = knob(
        0,
        "split the host CPU into this many devices (0: use the devices that are there)",
        at_least=0,
    )
    xla_flags: str = knob("", "appended to XLA_FLAGS before JAX starts")


@dataclass(frozen=True)
class Data:
    task: str = knob(
        "fold",
        "generated task, used when data.train is empty: fold | scan | ledger | module:function, which makes your own",
    )
    task_args: dict[str, Any] = knob({}, "arguments of the generated task (difficulty)")
    train: str = knob(
        "",
        "JSONL or Parquet file, directory of them, or hub data set (owner/name); where there are several splits, "
        "directory:SPLIT or owner/name:SUBSET/SPLIT; owner/name@REVISION for a revision; $NAME and ${NAME} are read from the "
        "environment. Or module:function, whose rows are dicts",
    )
    eval: str = knob(
        "",
        "evaluation file, as data.train; empty: data.eval_size rows are split from the training rows",
    )
    eval_size: int = knob(128, "rows of the evaluation split", at_least=0)
    prompt_column: str = knob("prompt", "column with the prompt: text, or a list of chat messages")
    answer_column: str = knob("answer", "column with the reference answer")
    id_column: str = knob("", "column with a unique id; empty: the row number")
    chat_template: bool = knob(False, "wrap the prompt with the tokenizer's chat template")
    chat_template_kwargs: dict[str, Any] = knob(
        {}, "keyword arguments of the chat template (for example enable_thinking)"
    )
    system: str = knob("", "system message, with the chat template")
    prompt_suffix: str = knob("", "text appended to each prompt")
    max_prompt_tokens: int = knob(512, "longer prompts are dropped and counted", at_least=1)
    max_too_long: float = knob(
        0.2, "largest share of rows that may be dropped so; more is an error", at_least=0, at_most=1
    )
    duplicates: str = knob(
        DROP,
        "rows of data.train whose prompt is there twice, or in the evaluation too. drop: counted and dropped | keep",
        one_of=(DROP, "keep"),
    )
    shuffle: bool = knob(True, "reshuffle the rows in every epoch")


@dataclass(frozen=True)
class Rollout:
    prompts: int = knob(8, "prompts of one RL step", at_least=1)
    samples: int = knob(8, "answers per prompt (the group of GRPO)", at_least=1)
    temperature: float = knob(1.0, "sampling temperature; 0 is greedy", at_least=0)
    top_k: int = knob(0, "keep the k likeliest tokens; 0 keeps all", at_least=0)
    top_p: float = knob(
        1.0,
        "keep the smallest set of likeliest tokens whose probability reaches p; 1 keeps all",
        above=0,
        at_most=1,
    )
    max_new_tokens: int = knob(
        256, "longest answer, EOS included; a longer one is cut and flagged", at_least=1
    )
    stop: list[str] = knob([], "answers also end after one of these texts")
    slots: int = knob(
        0, "sequences decoded at once by a data group; 0: all of its share", at_least=0
    )
    batch_buckets: list[int] = knob(
        [], "batch sizes to compile when they pay; empty: powers of two, and slots", at_least=1
    )
    cache_buckets: list[int] = knob(
        [],
        "cache lengths to compile when they pay; empty: doubling from 256 to prompt + answer",
        at_least=1,
    )
    chunk: int = knob(16, "most decoding rounds between two looks of the host", at_least=1)
    in_flight: int = knob(2, "chunks a data group may have queued", at_least=1)
    deterministic: bool = knob(
        False,
        "decide from counts and a table of costs and never from a clock: with the same settings and devices a run in "
        "bfloat16 repeats and resumes bit for bit; slower, since no group helps another and programs are waited for",
    )
    compile_cache: str = knob(
        "",
        "folder of the persistent compilation cache; empty: ~/.cache/tlt_jax/xla; 'off': none. What nobody has used for 30 "
        "days is deleted, and beyond 8 GiB what was used longest ago",
    )


@dataclass(frozen=True)
class Speculation:
    """Drafting ahead of the policy in the rollout; it changes no token, only the speed."""

    drafter: str = knob(
        ADAPTIVE,
        "none | ngram: repeats what followed before | directory of an EAGLE or EAGLE-3 drafter; or, where a run trains, "
        "adaptive: n-grams, and the drafter of `drafter_training`, which learns during the run",
    )
    tuner: str = knob(
        "goodput",
        "who picks the strategy of the next chunk. goodput: predicted tokens per second | threshold: on when few "
        "sequences are live | beg_mab: the paper's bandit | fixed: always the first strategy | module:function: makes your "
        "own of the strategies. With drafter adaptive goodput alone of these waits until the learned drafter is worth trying",
        one_of=("goodput", "threshold", "beg_mab", "fixed"),
        or_own=True,
    )
    strategies: list[str] = knob(
        ["3_1_4", "7_1_8", "6_4_16", "1_1_2"],
        "trees to choose from besides none, as depth_topk_nodes (nodes with the root); where a full batch is bound by "
        "arithmetic a single draft token (1_1_2) may pay though no deeper tree does. With drafter adaptive n-grams draft "
        "those of topk 1, the learned drafter all, both in one tree those of topk 2 or more; ngram:3_1_4, learned:3_1_4 or "
        "merged:6_4_16 is one of these alone",
    )
    threshold: int = knob(
        32, "speculation.tuner threshold: most live sequences of a data group", at_least=1
    )
    coupling: float = knob(
        0.75,
        "how much of the policy's own noise orders a learned drafter's siblings; 0: none",
        at_least=0,
        at_most=1,
    )
    sharpness: float = knob(
        1.0, "how sharply a learned drafter's scores follow that order", above=0
    )
    min_match: int = knob(
        1, "ngram: least number of equal tokens that make a place worth repeating", at_least=1
    )
    max_match: int = knob(12, "ngram: most tokens that are compared", at_least=1)
    pool: int = knob(
        2048,
        "ngram: tokens of other answers to the prompt that each sequence can look into",
        at_least=16,
    )
    memory: int = knob(
        4_000_000, "ngram: tokens of answers that are remembered in all", at_least=16
    )
    time_drafting: bool = knob(
        False,
        "time the drafting of each step's most used shape alone, for the metrics speculation/draft_ms and verify_ms: a "
        "compilation and a few rounds whenever that shape was not timed yet",
    )


@dataclass(frozen=True)
class Reward:
    terms: dict[str, float] = knob(
        {"task": 1.0}, f"reward name -> weight. Names: {', '.join(REWARDS)}, or module:function"
    )
    workers: int = knob(1, "scoring processes", at_least=1)
    timeout_s: float = knob(10.0, "seconds one score may take before its worker is killed", above=0)
    failure_score: float = knob(0.0, "score of an answer whose reward timed out, crashed or raised")
    memory_mib: int = knob(
        8192,
        "memory that a scoring process may take, in MiB; a score that needs more fails; 0: any",
        at_least=0,
    )
    environment: list[str] = knob(
        [],
        "environment variables that scoring processes get, beside PATH, HOME, PYTHON*, LC_* and such",
    )
    max_failed: int = knob(
        3, "stop after this many steps in a row in which every reward failed", at_least=1
    )


@dataclass(frozen=True)
class Algorithm:
    advantage: str = knob(
        "grpo",
        "grpo: (r - mean) / std of the group | rloo: leave-one-out baseline | dr_grpo: r - mean",
        one_of=("grpo", "rloo", "dr_grpo"),
    )
    loss: str = knob(
        PPO,
        "policy-gradient loss of a token. ppo: the clipped surrogate | module:function: your own, of log-probs, old log-probs, "
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
        0.2, "PPO clip: the ratio is kept above 1 - clip_low", at_least=0, at_most=1
    )
    clip_high: float = knob(0.2, "PPO clip: the ratio is kept below 1 + clip_high", at_least=0)
    kl_coef: float = knob(
        0.0, "weight of the k3 KL to the frozen start policy; 0 holds no reference", at_least=0
    )
    entropy_coef: float = knob(0.0, "weight of the entropy bonus")
    minibatches: int = knob(1, "optimizer steps per rollout", at_least=1)
    importance_cap: float = knob(
        0.0,
        "truncated importance weight between trainer and sampler, at most this; 0: off. Reads the recorded log-probs, "
        "so it gives up bit-exact independence of the rollout's shape",
        at_least=0,
    )


@dataclass(frozen=True)
class Optim:
    learning_rate: float = knob(1e-6, "peak learning rate", at_least=0)
    schedule: str = knob(
        "constant",
        "constant | linear | cosine, to zero at the last step",
        one_of=("constant", "linear", "cosine"),
    )
    warmup_steps: int = knob(0, "steps of linear warm-up", at_least=0)
    beta1: float = knob(0.9, "Adam's first moment", at_least=0, below=1)
    beta2: float = knob(0.95, "Adam's second moment", at_least=0, below=1)
    weight_decay: float = knob(0.0, "decoupled weight decay (matrices only)", at_least=0)
    grad_clip: float = knob(1.0, "clip the gradient's global norm; 0: off", at_least=0)


@dataclass(frozen=True)
class Train:
    steps: int = knob(100, "RL steps; 0: as many as train.epochs give", at_least=0)
    epochs: int = knob(0, "passes over the training rows, when train.steps is 0", at_least=0)
    seed: int = knob(0, "the root of all randomness", at_least=0, at_most=2**32 - 1)
    row_tokens: int = knob(
        0,
        "length of a packed row; 0: the longest prompt + answer, rounded up to 128, and twice that when train.rows is 0 too",
        at_least=0,
    )
    rows: int = knob(
        0,
        "packed rows of one gradient accumulation step over the whole mesh; 0: one per data group",
        at_least=0,
    )
    logits_chunk: int = knob(
        1024, "tokens of a data group whose logits exist at once in the update", at_least=1
    )
    attention_block: int = knob(
        128,
        "queries whose attention scores exist at once in the update, where attention is not a library's: on CPUs, "
        "in float32, and in the drafter's update",
        at_least=1,
    )
    max_nonfinite: int = knob(
        3, "stop after this many non-finite updates in a row (each one is skipped)", at_least=1
    )


@dataclass(frozen=True)
class Sft:
    steps: int = knob(
        0,
        "supervised steps on worked solutions before RL; 0: none. The result is cached by its configuration",
        at_least=0,
    )
    batch: int = knob(64, "solutions per step", at_least=1)
    learning_rate: float = knob(
        1e-3, "peak learning rate, cosine to a tenth, 5 % warm-up", at_least=0
    )
    weight_decay: float = knob(0.0, "decoupled weight decay (matrices only)", at_least=0)
    solution_column: str = knob("solution", "column with the worked solution")
    cache: str = knob(
        "", "folder for finished warm starts; empty: ~/.cache/tlt_jax/sft; 'off': none"
    )


@dataclass(frozen=True)
class DrafterTraining:
    """The learned drafter: what `python -m tlt_jax.train.drafter` does, and what an adaptive one begins as and minimizes."""

    kind: str = knob(
        "eagle3", "architecture of a new drafter: eagle | eagle3", one_of=("eagle", "eagle3")
    )
    start: str = knob("", "drafter directory to go on from; empty: a new drafter")
    texts: str = knob(
        "",
        "JSONL or Parquet files with columns prompt and response (text or token ids); empty: the policy answers "
        "the data's prompts",
    )
    rollouts: int = knob(
        16,
        "RL-sized rollouts that the policy answers, when drafter_training.texts is empty",
        at_least=1,
    )
    steps: int = knob(1000, "optimizer steps, each on train.rows packed rows", at_least=1)
    share: float | str = knob(
        AUTO,
        "with speculation.drafter adaptive: share of each RL step's packed rows that the drafter learns from before the "
        "policy's update, on any mesh, beside what idle data groups learn. A number from 0 to 1, or auto: a fifth of a step "
        "at most while the rest of the run is expected to repay it, 3 % of the steps' seconds otherwise, nothing where the "
        "run is too short to gain; with rollout.deterministic 0.05",
        one_of=(AUTO,),
        at_least=0,
        at_most=1,
    )
    learning_rate: float = knob(
        1e-4, "peak learning rate, cosine to a tenth, 5 % warm-up", at_least=0
    )
    weight_decay: float = knob(0.0, "decoupled weight decay (matrices only)", at_least=0)
    unroll: int = knob(0, "draft steps learned at every position (training-time test); 0: 1 for eagle, 5 for eagle3",
                       at_least=0)  # fmt: skip
    decay: float = knob(
        0.8,
        "weight of each further draft step's loss, over that of the one before",
        above=0,
        at_most=1,
    )
    loss: str = knob(
        "cross_entropy",
        "cross_entropy: to the policy's distribution | acceptance: turns to 1 - the expected acceptance as that grows",
        one_of=("cross_entropy", "acceptance"),
    )
    top_loss: float = knob(
        0.0,
        "weight of a further loss on the policy's ten most likely tokens alone; with kind eagle, unroll 3, decay 1, "
        "detach true and a weight of 1 the training is that of HASS",
        at_least=0,
    )
    detach: bool = knob(
        False, "what a draft step hands to the next is given, and not learned from there"
    )
    noise: float = knob(0.0, "uniform noise up to this size is added to the features", at_least=0)
    fc_norm: bool = knob(
        True, "a new eagle3 drafter norms each hidden state that it reads (EAGLE-3.1)"
    )
    norm_output: bool = knob(
        True,
        "a new eagle3 drafter hands its normed hidden state to the next draft step (EAGLE-3.1)",
    )
    vocab: int = knob(
        0,
        "tokens that a new eagle3 drafter can propose, the most frequent; 0: all, but 32000 at most",
        at_least=0,
    )


@dataclass(frozen=True)
class IdleTraining:
    """How data groups that have nothing left to decode train the drafter of speculation.drafter `adaptive`."""

    learning_rate: float = knob(
        3e-4,
        "learning rate of a micro-step of 2048 tokens or more; of fewer tokens less, by the root of their share",
        at_least=0,
    )
    warmup_steps: int = knob(20, "micro-steps of linear warm-up", at_least=0)
    grad_clip: float = knob(1.0, "clip the gradient's global norm; 0: off", at_least=0)
    weight_decay: float = knob(0.0, "decoupled weight decay (matrices only)", at_least=0)
    micro_step_ms: float = knob(
        250.0,
        "longest micro-step, for which RL work may have to wait: tokens of a micro-step are halved and doubled by it",
        above=0,
    )
    least_idle_s: float = knob(
        0.5, "least expected idle time of a data group for which training begins", at_least=0
    )
    floor: int = knob(
        0, "micro-steps of every data group in every RL step, idle time or not", at_least=0
    )
    rescue: int = knob(
        8,
        "micro-steps of every data group in a step without idle time, when the accept length of the last 8 steps is a tenth "
        "below its best",
        at_least=0,
    )
    window: int = knob(512, "tokens of a finished sequence that are kept together", at_least=16)
    windows: int = knob(2, "windows kept of one sequence; shorter ones fit one", at_least=1)
    replay_mib: int = knob(
        512, "features of finished sequences that a data group keeps, in MiB", at_least=1
    )
    replay_place: str = knob(
        "host", "where they are kept: host | device", one_of=("host", "device")
    )


@dataclass(frozen=True)
class Eval:
    every: int = knob(
        20, "evaluate before step 0, then every n steps and at the end; 0: never", at_least=0
    )
    prompts: int = knob(0, "evaluation prompts; 0: all of the split", at_least=0)
    samples: int = knob(1, "answers per evaluation prompt", at_least=1)
    temperature: float = knob(1.0, "sampling temperature of the evaluation", at_least=0)
    top_k: int = knob(0, "top-k of the evaluation", at_least=0)
    top_p: float = knob(1.0, "top-p of the evaluation", above=0, at_most=1)
    max_new_tokens: int = knob(0, "longest answer; 0: rollout.max_new_tokens", at_least=0)
    correct_at: float = knob(
        1.0, "an answer counts as correct when its reward is at least this (for pass@k)"
    )


@dataclass(frozen=True)
class Checkpoint:
    every: int = knob(
        50, "save every n steps; the last step is always saved; 0: only the last", at_least=0
    )
    keep: int = knob(2, "checkpoints kept", at_least=1)
    resume: str = knob(
        LATEST,
        "what a run goes on from. latest: the newest checkpoint, and an error when it is damaged | last_good: the newest one "
        "that is whole; damaged ones are moved to checkpoints/damaged",
        one_of=(LATEST, LAST_GOOD),
    )
    best_metric: str = knob(
        "",
        "also keep the checkpoint that is best by this evaluation metric (for example eval/mean@1)",
    )
    export: bool = knob(True, "write the final policy as an HF directory to <run>/hf")


@dataclass(frozen=True)
class Log:
    trackers: list[str] = knob(
        [TENSORBOARD],
        "where metrics go, any of: tensorboard: <run>/tensorboard | wandb: Weights & Biases, with the extra wandb installed; "
        "WANDB_MODE=offline keeps them in <run>/wandb for `wandb sync`",
        one_of=(TENSORBOARD, WANDB),
    )
    wandb_project: str = knob("tlt_jax", "project at Weights & Biases")
    wandb_entity: str = knob(
        "", "team or user at Weights & Biases; empty: the default of the API key"
    )
    wandb_name: str = knob(
        "", "name of the run at Weights & Biases; empty: the last two parts of `run`"
    )
    every: int = knob(1, "write scalars every n steps", at_least=1)
    texts: int = knob(
        4,
        "sample completions written to the trackers, per step that is a multiple of log.texts_every",
        at_least=0,
    )
    texts_every: int = knob(
        10, "steps between sample texts, histograms and timeline images", at_least=1
    )
    level: str = knob(
        "info",
        "what is printed. info: steps, and how much was compiled | debug: every program too; <run>/log.txt has all",
        one_of=("info", "debug"),
    )
    progress: bool = knob(True, "live progress display on a terminal; plain lines elsewhere")


@dataclass(frozen=True)
class Processes:
    """When a job of many processes ends, because one of them is gone."""

    lost_s: float = knob(
        20.0, "seconds without a sign of life after which a process counts as dead", at_least=5
    )
    stuck_s: float = knob(
        1800.0,
        "seconds without progress (a look at the rollout, the end of a phase) after which a living process counts as hung",
        at_least=10,
    )


@dataclass(frozen=True)
class Profile:
    steps: str = knob("", "a-b: write a jax.profiler trace of these steps; empty: none")


@dataclass(frozen=True)
class Config:
    """The whole configuration of a run."""

    run: str = knob(
        "runs/default", "folder of the run: checkpoints, TensorBoard, completions, resolved config"
    )
    override: bool = knob(
        False,
        "--override: a run goes on with other values of optim.*, algorithm.* and the like; <run>/changes.jsonl notes it",
    )
    model: Model = section(Model)
    mesh: Mesh = section(Mesh)
    data: Data = section(Data)
    rollout: Rollout = section(Rollout)
    speculation: Speculation = section(Speculation)
    reward: Reward = section(Reward)
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
