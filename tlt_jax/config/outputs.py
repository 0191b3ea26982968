"""The sections eval, checkpoint, log, processes and profile; names in the run folder."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tlt_jax.config.knobs import knob

RESOLVED = "config.yaml"  # file in the run folder with its configuration
LOG = "log.txt"  # file in the run folder with all messages, compilations included
# Files of scalars by step, of the run and of its supervised warm start.
METRICS, WARM_START = "metrics.jsonl", "warm_start.jsonl"
RESOLVED, COMPLETIONS, EXPORT = "config.yaml", "completions", "hf"
TENSORBOARD, WANDB = "tensorboard", "wandb"  # values of log.trackers
LATEST, LAST_GOOD = "latest", "last_good"  # values of checkpoint.resume
TOLERANCE = (
    1e-9  # rewards, and metrics of them, that differ by less are equal: their sums are rounded
)


def is_at_least(value: Any, limit: float) -> Any:
    """Whether a reward or metric, or each of an array of them, reaches a limit, within TOLERANCE."""
    return value >= limit - TOLERANCE


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
    correct_at: float = knob(1.0, "minimum reward of a correct answer (for pass@k)")


@dataclass(frozen=True)
class Checkpoint:
    every: int = knob(
        50, "save every n steps and after the last one; 0: only after the last one", at_least=0
    )
    keep: int = knob(2, "number of latest checkpoints to keep", at_least=1)
    resume: str = knob(
        LATEST,
        "checkpoint to resume from. latest: the newest one; a damaged one is an error | last_good: the newest intact one; "
        "damaged ones are moved to checkpoints/damaged",
        one_of=(LATEST, LAST_GOOD),
    )
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
    wandb_project: str = knob("tlt_jax", "project at Weights & Biases")
    wandb_entity: str = knob(
        "", "team or user at Weights & Biases; empty: the default of the API key"
    )
    wandb_name: str = knob(
        "", "name of the run at Weights & Biases; empty: the last two parts of `run`"
    )
    texts: int = knob(
        4,
        "sample completions sent to the trackers at the first, the last and every log.texts_every-th step",
        at_least=0,
    )
    texts_every: int = knob(
        10,
        "steps between sample texts, histograms and timelines; the first and the last step have them too",
        at_least=1,
    )
    level: str = knob(
        "info",
        "console output. info: steps, and a summary of compilations | debug: every program too. <run>/log.txt has all",
        one_of=("info", "debug"),
    )
    progress: bool = knob(
        True,
        "live progress display on a terminal, and a table that grows in a notebook; plain lines elsewhere",
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
