"""The `adaptive` drafter (speculation.drafter) in the RL loop: initialization, replay configuration, metrics, export."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import numpy as np

from tlt_jax import atomic, keys, run_folder
from tlt_jax.config import Config
from tlt_jax.data import packing
from tlt_jax.drafter import recipe as drafter_recipe
from tlt_jax.drafter.recipe import DrafterState, Recipe
from tlt_jax.drafter.replay import ReplayConfig
from tlt_jax.errors import ConfigError
from tlt_jax.metrics import GroupSeconds, group_seconds
from tlt_jax.models import drafter as drafters, hf_drafter
from tlt_jax.models.drafter import DrafterConfig, DrafterParams
from tlt_jax.rollout.recorder import Completion, RolloutResult

WINDOW = 512  # most tokens of a finished sequence that are stored together
WIDTH_MULTIPLE = 16  # of a window
HELD_OUT = 8  # every 8th sequence is held out from training, to measure on


def replay_config(config: Config, recipe: Recipe) -> ReplayConfig:
    """The replay buffer of each data group. Raises ConfigError when one window exceeds idle_training.replay_mib."""
    knobs, longest = config.idle_training, packing.longest(config)
    width = min(WINDOW, -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE)
    numbers = (len(recipe.drafter.captures) + 1) * recipe.model.hidden_size  # features and states
    mib = width * numbers * np.dtype(recipe.compute_dtype).itemsize / 2**20
    if mib > knobs.replay_mib:
        raise ConfigError(
            f"idle_training.replay_mib {knobs.replay_mib}: a window of {width} tokens takes {mib:.1f} MiB: raise it"
        )
    return ReplayConfig(
        width=width,
        max_bytes=knobs.replay_mib * 2**20,
        place=knobs.replay_place,
        seed=config.train.seed,
        held_out=HELD_OUT,
    )


def create(
    config: Config,
    recipe: Recipe,
    start: DrafterParams | None = None,
    answers: Sequence[Completion] = (),
) -> DrafterState:
    """The drafter before its first update: `start`, or a new one.

    The draft vocabulary of a new one, if smaller than the policy's, has the most frequent tokens of the answers;
    ties go to the lower ids.
    """
    drafter, dtype = recipe.drafter, config.model.param_dtype
    if start is not None:
        return drafter_recipe.create(start, recipe)
    ids = None
    if not drafter.has_full_vocab:
        texts = (one.tokens for one in answers)
        ids = drafters.frequent_ids(texts, drafter.draft_vocab_size, recipe.model.vocab_size)
    init_key = keys.stream_key(config.train.seed, keys.DRAFTER_WEIGHTS)
    return drafter_recipe.create(drafters.init(drafter, recipe.mesh, init_key, dtype, ids), recipe)


def decoding_seconds(rollout: RolloutResult, groups: int, kind: str) -> list[GroupSeconds]:
    """Busy, idle and compile-wait seconds of each data group; spans of `kind` (idle work) count as idle."""
    spans = [span for span in rollout.spans if span.kind != kind]
    return group_seconds(spans, rollout.compile_waits, groups, (0.0, rollout.stats["seconds"]))


def idle_metrics(rollout: RolloutResult, groups: Sequence[GroupSeconds]) -> dict[str, float]:
    """The metrics idle/*: idle share of the groups' rollout time, and the share of it that idle work used."""
    idle, used = sum(group.idle for group in groups), rollout.stats.get("idle_used", 0.0)
    return {
        "idle/ratio": idle / (len(groups) * rollout.stats["seconds"]),
        "idle/used_ratio": min(used / idle, 1.0) if idle > 0 else 0.0,
        "idle/delay_s": rollout.stats.get("idle_delay", 0.0),
    }


def export(
    config: Config,
    drafter: DrafterConfig,
    params: DrafterParams,
    acceptance: Sequence[float],
    step: int,
) -> None:
    """Writes the drafter after a step to its directory in the run folder."""
    dtype = config.model.param_dtype
    atomic.write_directory(
        run_folder.drafter_export(config),
        lambda at: hf_drafter.save(params, drafter, at, dtype, acceptance),
        jax.process_index() == 0,
        run_folder.of_step(step),
    )
    if caveat := hf_drafter.caveat(drafter):
        print(caveat)
