"""Configurations of older versions: renamed sections, values with new names, and knobs that became constants."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from tlt_jax.config import parse as parsing
from tlt_jax.config.inputs import OLDER
from tlt_jax.config.learning import AUTO, NONE, SEQUENCE, TOKEN
from tlt_jax.config.schema import Config
from tlt_jax.errors import ConfigError

RENAMED = {"warmup": "drafter_training"}  # sections: old name -> new name
# Values with new names: knob -> old value -> new value.
VALUES: dict[str, dict[Any, Any]] = {"model.remat": {True: "full", False: "none"}}
# Knobs that became constants: name -> value of the constant, which was the knob's default.
CONSTANTS: dict[str, Any] = {
    "rollout.in_flight": 2,
    "speculation.coupling": 0.75,
    "speculation.sharpness": 1.0,
    "speculation.min_match": 1,
    "speculation.max_match": 12,
    "speculation.pool": 2048,
    "speculation.memory": 4_000_000,
    "reward.max_failed": 3,
    "train.max_nonfinite": 3,
    "sft.weight_decay": 0.0,
    "drafter_training.weight_decay": 0.0,
    "drafter_training.decay": 0.8,
    "drafter_training.loss": "cross_entropy",
    "drafter_training.top_loss": 0.0,
    "drafter_training.detach": False,
    "drafter_training.noise": 0.0,
    "drafter_training.fc_norm": True,
    "drafter_training.norm_output": True,
    "idle_training.warmup_steps": 20,
    "idle_training.grad_clip": 1.0,
    "idle_training.weight_decay": 0.0,
    "idle_training.micro_step_ms": 250.0,
    "idle_training.window": 512,
    "idle_training.windows": 2,
    "log.every": 1,
}


def refuse(names: Iterable[str]) -> None:
    """Raises ConfigError for a renamed section, with its new name, and for a knob that became a constant."""
    for name in names:
        section, dot, knob = name.partition(".")
        if section in RENAMED:
            raise ConfigError(f"{name} has a new name: write {RENAMED[section]}{dot}{knob}")
        if name in CONSTANTS:
            raise ConfigError(f"{name} is a constant now, {CONSTANTS[name]!r}: remove it")


def renamed(tree: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of a configuration with the new names of its values."""

    def section(name: str, knobs: Mapping[str, Any]) -> dict[str, Any]:
        return {knob: value(f"{name}.{knob}", one) for knob, one in knobs.items()}

    def value(name: str, one: Any) -> Any:
        return VALUES[name].get(one, one) if name in VALUES and isinstance(one, bool) else one

    current = {
        name: section(name, knobs) if isinstance(knobs, Mapping) else value(name, knobs)
        for name, knobs in tree.items()
    }
    algorithm = current.get("algorithm")
    if isinstance(algorithm, Mapping) and "importance_cap" in algorithm:
        current["algorithm"] = with_importance(algorithm)
    return current


def with_importance(algorithm: Mapping[str, Any], default: str = NONE) -> dict[str, Any]:
    """The section algorithm with the knob importance. In older versions its cap was 0 for none (`default`), else token."""
    if "importance" in algorithm:
        return dict(algorithm)
    cap = {name: one for name, one in algorithm.items() if name == "importance_cap" and one}
    others = {name: one for name, one in algorithm.items() if name != "importance_cap"}
    return {**others, "importance": TOKEN if cap else default, **cap}


def with_veto(algorithm: Mapping[str, Any]) -> dict[str, Any]:
    """The section algorithm with the knob importance_veto. In older versions importance_mask was one, but at level sequence."""
    mask = algorithm.get("importance_mask")
    if "importance_veto" in algorithm or not mask or algorithm.get("importance") == SEQUENCE:
        return dict(algorithm)
    return {**algorithm, "importance_mask": 0.0, "importance_veto": mask}


def update(tree: Mapping[str, Any], path: str | Path) -> dict[str, Any]:
    """The mapping of an older run folder's config.yaml with the names and values of this version, without constants.

    Raises ConfigError, with their names, for constants with another value and for knobs that no longer exist.
    """
    updated: dict[str, Any] = {}
    changed = []
    for old, value in tree.items():
        section = RENAMED.get(old, old)
        if isinstance(value, Mapping):
            constants = {knob for knob in value if f"{section}.{knob}" in CONSTANTS}
            for knob in sorted(constants):
                if value[knob] != CONSTANTS[f"{section}.{knob}"]:
                    constant = CONSTANTS[f"{section}.{knob}"]
                    changed.append(
                        f"{section}.{knob} {value[knob]!r} (now the constant {constant!r})"
                    )
            value = {knob: one for knob, one in value.items() if knob not in constants}
        updated[section] = value
    missing = [*changed, *parsing.unknown(Config, updated)]
    if missing:
        raise ConfigError(
            f"{path}: the run was made by an older version of tlt_jax, with {', '.join(missing)}, "
            "which this version does not have: continue it with that version, or start another run folder"
        )
    # Importance weights were off by default, as auto still is in float32.
    is_narrow = updated.get("model", {}).get("compute_dtype") == "bfloat16"
    off = NONE if is_narrow else AUTO
    updated["algorithm"] = with_veto(with_importance(updated.get("algorithm", {}), off))
    updated["data"] = {"split_seed": OLDER, **updated.get("data", {})}
    return renamed(updated)
