"""The configuration with all its sections; defines those of the rollout and the drafter. Imports no JAX."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_jax.config.inputs import Data, Mesh, Model, Reward
from tlt_jax.config.knobs import knob, section
from tlt_jax.config.learning import Algorithm, Optim, Sft, Train
from tlt_jax.config.outputs import Checkpoint, Eval, Log, Processes, Profile

# The most used knobs, shown by --help.
COMMON = (
    "run", "model.path", "mesh.data", "mesh.model", "data.train", "data.eval", "rollout.prompts", "rollout.samples",
    "rollout.max_new_tokens", "speculation.drafter", "reward.terms", "optim.learning_rate", "train.steps",
)  # fmt: skip
# Values of speculation.drafter; any other value is a directory.
NONE, NGRAM, ADAPTIVE = "none", "ngram", "adaptive"
AUTO = "auto"  # value of drafter_training.share
KEEP = "keep"  # value of rollout.unused


@dataclass(frozen=True)
class Rollout:
    prompts: int = knob(8, "prompts of one RL step", at_least=1)
    max_prompts: int = knob(
        0,
        "dynamic sampling (DAPO): prompts whose answers all score alike are replaced by further ones while the rollout runs, "
        "until rollout.prompts are left that do not, or this many were tried; 0: none is replaced",
        at_least=0,
    )
    unused: str = knob(
        KEEP,
        "prompts of rollout.max_prompts that a step did not need. keep: the next step starts with them, with new answers | "
        "drop: it starts after them",
        one_of=(KEEP, "drop"),
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
    batch_buckets: list[int] = knob(
        [],
        "batch sizes to compile when the payback exceeds the compile cost; empty: powers of two, and slots",
        at_least=1,
    )
    cache_buckets: list[int] = knob(
        [],
        "cache lengths to compile in the same way; empty: doubling from 256 to prompt + answer",
        at_least=1,
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
        "none | ngram: prompt lookup | directory of an EAGLE, EAGLE-3, DFlash or DSpark drafter | adaptive: n-grams, and the "
        "drafter of `drafter_training`, which the run trains; only for training runs",
    )
    tuner: str = knob(
        "goodput",
        "policy that chooses the strategy of the next chunk. goodput: highest predicted tokens per second | threshold: "
        "drafts when few sequences are live | beg_mab: the paper's bandit | fixed: always the first strategy | "
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
    threshold: int = knob(
        32,
        "with speculation.tuner threshold: maximum live sequences of a data group that drafts",
        at_least=1,
    )
    time_drafting: bool = knob(
        False,
        "measure speculation/draft_ms and verify_ms: times the drafting of each step's most used shape by itself. Costs one "
        "compilation and a few rounds for each new shape",
    )


@dataclass(frozen=True)
class DrafterTraining:
    """The learned drafter: training by `python -m tlt_jax.train.drafter`, and start and loss of an adaptive one."""

    kind: str = knob(
        "eagle3",
        "architecture of a new drafter: eagle3 and eagle draft one level a pass, dflash and dspark all levels in one",
        one_of=("eagle3", "eagle", "dflash", "dspark"),
    )
    start: str = knob("", "drafter directory to start from; empty: a new drafter")
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
    unroll: int = knob(0, "draft steps trained at every position (training-time test); 0: 1 for eagle, 5 for eagle3",
                       at_least=0)  # fmt: skip
    vocab: int = knob(
        0,
        "draft vocabulary of a new eagle3, dflash or dspark drafter: the most frequent tokens; 0: all, at most 32000",
        at_least=0,
    )
    layers: int = knob(0, "layers of a new dflash or dspark drafter; 0: 2", at_least=0)
    block_size: int = knob(
        0,
        "queries of a pass of a new dflash or dspark drafter: the tokens that dspark drafts, one more than dflash; 0: 8",
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
    least_idle_s: float = knob(
        0.5, "minimum expected idle seconds of a data group to start training", at_least=0
    )
    floor: int = knob(
        0,
        "minimum micro-steps of every data group in every RL step, also without idle time",
        at_least=0,
    )
    rescue: int = knob(
        8,
        "micro-steps of every data group in a step without idle training, when the mean accept length of the last 8 steps "
        "is a tenth below its best",
        at_least=0,
    )
    replay_mib: int = knob(
        512, "replay buffer of a data group, in MiB: features of finished sequences", at_least=1
    )
    replay_place: str = knob(
        "host", "memory of the replay buffer: host | device", one_of=("host", "device")
    )


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
