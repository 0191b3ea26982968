"""Which knobs a resumed run may change: always, only with --override, or never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tlt_jax.config import parse as parsing
from tlt_jax.config.schema import Config
from tlt_jax.errors import ConfigError

# Knobs that a resumed run may always change: they affect devices, memory, speed, length and output of the run, but, apart from
# rounding, no token and no update of a step.
FREE = ("run", "override", "model.remat", "mesh.", "log.", "profile.", "processes.", "eval.", "checkpoint.", "speculation.",
        "idle_training.", "drafter_training.share", "drafter_training.shelf", "rollout.slots",
        "rollout.chunk", "rollout.compile_cache", "sft.cache", "reward.workers",
        "reward.environment", "environment.workers", "train.steps", "train.epochs")  # fmt: skip
# Knobs that a resumed run may change with --override: they affect later steps.
OVERRIDABLE = ("optim.", "algorithm.", "reward.terms", "reward.timeout_s", "reward.failure_score", "reward.overlong_",
               "environment.path", "environment.args", "environment.t", "environment.reward",
               "rollout.temperature", "rollout.top_k", "rollout.top_p", "rollout.max_new_tokens", "rollout.stop",
               "rollout.max_prompts", "train.row_tokens", "train.rows", "drafter_training.steps",
               "drafter_training.learning_rate")  # fmt: skip
LENGTH = ("train.steps", "train.epochs")
EVALUATION = "eval."  # knobs that may always change, and whose changes are named and recorded
# Knobs without whose values two evaluations cannot be compared.
JUDGING = ("eval.prompts", "eval.samples", "eval.temperature", "eval.top_", "eval.max_new_tokens", "eval.correct_at",
           "reward.terms", "reward.timeout_s", "reward.failure_score", "environment.path", "environment.args",
           "environment.t", "environment.reward", "rollout.max_new_tokens", "rollout.stop")  # fmt: skip
SHOWN, WIDTH = 4, 60  # changes that an error names, and characters of a value


class Change(NamedTuple):
    """A knob whose value differs from the run folder's."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} ({short(self.old)} there, {short(self.new)} here)"


def changes(ours: Config, theirs: Config) -> list[Change]:
    """The knobs with different values, except those that may always change."""
    # The learning rate of a step depends on the number of steps.
    is_scheduled = {ours.optim.schedule, theirs.optim.schedule} != {"constant"}
    free = tuple(name for name in FREE if name not in LENGTH or not is_scheduled)
    return [one for one in differences(ours, theirs) if not one.name.startswith(free)]


def differences(ours: Config, theirs: Config) -> list[Change]:
    """All knobs with different values."""
    mine, other = parsing.flatten(ours), parsing.flatten(theirs)
    return [Change(name, other[name], mine[name]) for name in mine if mine[name] != other[name]]


def allowed(ours: Config, theirs: Config, run: str, path: str, step: int) -> list[Change]:
    """The changes with which the run of a folder resumes from a step, those of evaluations among them.

    Raises ConfigError, with the old and new values, for knobs that may never change, and without
    --override for knobs that affect later steps.
    """
    found = changes(ours, theirs)
    never = [one for one in found if not is_overridable(one)]
    if never:
        raise ConfigError(
            f"{run} holds a run with other values of {listed(never)}: use those of {path}, or another run folder"
        )
    if found and not ours.override:
        schedule = (
            f" (optim.schedule {theirs.optim.schedule} takes the learning rate of every step from it)"
            if any(one.name in LENGTH for one in found)
            else ""
        )
        raise ConfigError(
            f"{run} holds a run with other values of {listed(found)}{schedule}: use those of {path}, or --override to resume "
            f"with these from step {step}"
        )
    return found + [one for one in differences(ours, theirs) if one.name.startswith(EVALUATION)]


def is_overridable(change: Change) -> bool:
    """Whether --override allows the change. A KL term cannot be added: the start policy was not saved."""
    if change.name == "algorithm.kl_coef" and not change.old:
        return False
    return change.name.startswith((*OVERRIDABLE, *LENGTH))


def identity(config: Config) -> dict[str, Any]:
    """Values of the knobs that a run may not change without --override, by dotted name."""
    values = parsing.flatten(config).items()
    return {name: value for name, value in values if not name.startswith(FREE)}


def listed(found: Sequence[Change]) -> str:
    """The first SHOWN changes as text, and the number of others."""
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(map(str, found[:SHOWN])) + more


def short(value: Any) -> str:
    """A value as text of a bounded length."""
    text = repr(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
