"""What of its configuration a run may change when it goes on: freely, when it is told to, or never."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from tlt_jax.config import parse as parsing
from tlt_jax.config.schema import Config
from tlt_jax.errors import ConfigError

# Knobs that may differ when a run goes on: they change where, how fast and how long it computes, and what it shows, but
# neither a token nor an update of a step.
FREE = ("run", "override", "mesh.", "log.", "profile.", "processes.", "eval.", "checkpoint.", "speculation.",
        "idle_training.", "drafter_training.share", "rollout.slots", "rollout.batch_buckets", "rollout.cache_buckets",
        "rollout.chunk", "rollout.in_flight", "rollout.compile_cache", "sft.cache", "reward.workers", "reward.memory_mib",
        "reward.environment", "reward.max_failed", "data.max_too_long", "train.steps", "train.epochs",
        "train.max_nonfinite")  # fmt: skip
# Those that change the steps to come, and leave the run the same one: with --override.
OVERRIDABLE = ("optim.", "algorithm.", "reward.terms", "reward.timeout_s", "reward.failure_score", "rollout.temperature",
               "rollout.top_k", "rollout.top_p", "rollout.max_new_tokens", "rollout.stop", "train.row_tokens", "train.rows",
               "train.logits_chunk", "train.attention_block", "drafter_training.steps",
               "drafter_training.learning_rate", "drafter_training.weight_decay")  # fmt: skip
LENGTH = ("train.steps", "train.epochs")
SHOWN, WIDTH = 4, 60  # changes that a refusal names, and characters of a value


class Change(NamedTuple):
    """A knob that has another value than the run folder's."""

    name: str
    old: Any
    new: Any

    def __str__(self) -> str:
        return f"{self.name} ({short(self.old)} there, {short(self.new)} here)"


def changes(ours: Config, theirs: Config) -> list[Change]:
    """The knobs that differ, but for those that always may."""
    mine, other = parsing.flatten(ours), parsing.flatten(theirs)
    free = tuple(name for name in FREE if name not in LENGTH or not is_scheduled(ours, theirs))
    return [
        Change(name, other[name], mine[name])
        for name in mine
        if mine[name] != other[name] and not name.startswith(free)
    ]


def allowed(ours: Config, theirs: Config, run: str, path: str, step: int) -> list[Change]:
    """The changes with which the run of a folder goes on from a step, because it is told to.

    Raises ConfigError, with the old and new values, for others: those that make another run, and
    without --override those that change the steps to come.
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
            f"{run} holds a run with other values of {listed(found)}{schedule}: use those of {path}, or --override to go on "
            f"with these from step {step}"
        )
    return found


def is_overridable(change: Change) -> bool:
    """Whether a run may go on with it; a KL term cannot begin without the start policy, which is gone by then."""
    if change.name == "algorithm.kl_coef" and not change.old:
        return False
    return change.name.startswith((*OVERRIDABLE, *LENGTH))


def is_scheduled(ours: Config, theirs: Config) -> bool:
    """Whether the learning rate of a step depends on how many there are."""
    return {ours.optim.schedule, theirs.optim.schedule} != {"constant"}


def identity(config: Config) -> dict[str, Any]:
    """The values of the knobs that do not differ within a run unless it is told so, by dotted name."""
    values = parsing.flatten(config)
    return {name: value for name, value in values.items() if not name.startswith(FREE)}


def listed(found: Sequence[Change]) -> str:
    """The changes, as many as a line holds."""
    more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
    return ", ".join(map(str, found[:SHOWN])) + more


def short(value: Any) -> str:
    """A value as text of a bounded length."""
    text = repr(value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."
