"""Does drafting with the learned drafter pay in the rest of a run? Answers from what the engine measured and compiled."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from tlt_jax.rollout.executables.programs import Decode
from tlt_jax.rollout.request import FIRST_CACHE_BUCKET
from tlt_jax.rollout.scheduler.payback import MARGIN, smallest
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, PLAIN
from tlt_jax.tuner.interface import Cell, State as TunerState

if TYPE_CHECKING:
    from tlt_jax.rollout.engine import Engine

FEATURES = 0.02  # share of the rollouts' seconds that capturing features for the drafter costs
DETERMINISTIC_GAIN = 0.1  # log speedup that drafting must reach where no clock takes part


def is_usable(engine: Engine, tuner: TunerState) -> bool:
    """Whether the tuner may choose strategies of the learned drafter in this state."""
    return any(arm.drafter in (LEARNED, MERGED) for arm in engine.tuner.usable(tuner, 1, 1))


def payback(engine: Engine, tuner: TunerState, depths: Sequence[float]) -> tuple[float, float]:
    """Seconds that drafting with the learned drafter saves in the rest of the run, and seconds that starting it costs.

    `depths`: the drafter's acceptance at depth 1, 2, ..., each given the depths before. Returns (0, 0) while no chunk has
    been measured, and when the drafter is used already. In a deterministic run starting costs nothing, and the saving is
    positive where drafting is faster by DETERMINISTIC_GAIN when a quarter of the rows is live.
    """
    arms = [arm for arm in engine.arms if arm.drafter in (LEARNED, MERGED)]
    if engine.drafter or not arms:
        return 0.0, 0.0
    speeds = partial(engine.tuner.predict, engine.tuner.update_prior(tuner, {LEARNED: depths}))
    if engine.cost_table:
        usual = smallest(engine.batches, engine.capacity / 4), FIRST_CACHE_BUCKET
        plain, *drafted = speeds([Cell(*usual, arm) for arm in (PLAIN, *arms)])[0]
        return 1 - math.exp(DETERMINISTIC_GAIN + plain - max(drafted)), 0.0

    most = max(engine.payback.values(), key=lambda one: sum(one.tokens.values()), default=None)
    chunks = [one for one in engine.programs.executables if isinstance(one, Decode)]
    if most is None or not most.tokens or not chunks:
        return 0.0, 0.0
    strategies = {PLAIN, *(one.strategy for one in chunks)}
    compiled = [Cell(*where, strategy) for where in most.tokens for strategy in strategies]
    cells = [Cell(*where, arm) for where in most.tokens for arm in arms]
    if not np.isfinite(speeds([*cells, *compiled])[1]).all():
        return 0.0, 0.0
    seconds_S, share_SC, _ = most.shares(cells, compiled, speeds)
    saved = seconds_S @ share_SC.max(axis=1) - FEATURES * seconds_S.sum()
    best = cells[int(np.argmax(seconds_S @ share_SC))].strategy
    chunk = engine.programs.compile_costs.of(replace(chunks[-1], strategy=best))
    return float(saved), engine.learned_compile_cost() + MARGIN * chunk
