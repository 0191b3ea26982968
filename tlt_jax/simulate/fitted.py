"""What the drafters of a real run accepted, and how that rose with the tokens learned: fitted to its folder. No JAX."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path

import numpy as np

from tlt_jax.config import load as loading
from tlt_jax.config.outputs import RESOLVED
from tlt_jax.errors import DataError
from tlt_jax.metrics.run import Run, open_run
from tlt_jax.simulate.acceptance import Acceptances, Curve
from tlt_jax.spec_decode.strategy import NGRAM, parse

LEAST_STEPS = 4  # steps with a measured acceptance that a curve is fitted to
SCALES = np.geomspace(1e2, 1e9, 57)
POWERS = (0.25, 0.5, 1.0, 2.0)
LEAST, MOST = 0.001, 0.995  # probabilities


def of_run(folder: Path, otherwise: Acceptances) -> Acceptances:
    """The acceptance of a run's drafters; `otherwise`: for one of which the run measured nothing.

    Raises DataError for a run without a drafter.
    """
    run, config = open_run(folder), loading.read_resolved(folder / RESOLVED)
    drafters = (NGRAM, "") if config.speculation.drafter == NGRAM else (NGRAM,)
    ngram, curve = of_ngrams(folder, drafters), of_learned(run)
    if ngram is None and curve is None:
        raise DataError(
            f"{folder} measured no drafter: give a run with --speculation.drafter ngram or adaptive that drafted"
        )
    what = [
        name
        for name, found in (("n-grams", ngram), ("the learned drafter", curve))
        if found is None
    ]
    rest = f"; {what[0]} as in the preset" if what else ""
    return Acceptances(
        ngram or otherwise.ngram, curve or otherwise.learned, source=f"measured in {folder}{rest}"
    )


def of_ngrams(folder: Path, drafters: Collection[str]) -> tuple[float, ...] | None:
    """Acceptance of chains of these drafters by depth, given the depths before; None when none was drafted."""
    counts: dict[int, float] = defaultdict(float)
    for path in sorted(folder.glob("speculation/*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            one = json.loads(line)
            strategy = parse(one["strategy"])
            is_ngram = strategy.drafter in drafters and strategy.topk == 1
            for accepted, rounds in enumerate(one["accepted"] if is_ngram else ()):
                counts[accepted] += rounds
    if not counts:
        return None
    rounds = np.array([counts[accepted] for accepted in range(max(counts) + 1)])
    reached = np.cumsum(rounds[::-1])[::-1]  # rounds that accepted at least this many
    levels = [after / before for before, after in zip(reached, reached[1:], strict=False) if before]
    return tuple(clipped(levels)) if levels and reached[1] else None


def of_learned(run: Run) -> Curve | None:
    """The learning curve of a run's drafter by the tokens that it had learned from; None with too few measurements."""
    metrics, depths = run.metrics, []
    while (name := f"drafter/acceptance@{len(depths) + 1}") in metrics:
        depths.append(by_step(metrics[name]))
    if not depths:
        return None
    learned, so_far = {}, 0.0
    added = [by_step(metrics[name]) for name in ("drafter/update_tokens", "drafter/tokens") if name in metrics]  # fmt: skip
    for step in range(1, max(depths[0], default=0) + 1):
        learned[step] = so_far  # measured before the step's own update
        so_far += sum(one.get(step, 0.0) for one in added)
    steps = [step for step in sorted(depths[0]) if all(np.isfinite(one.get(step, np.nan)) for one in depths)]  # fmt: skip
    if len(steps) < LEAST_STEPS:
        return None
    levels_SD = np.array([[one[step] for one in depths] for step in steps])
    return fit(np.array([learned[step] for step in steps]), levels_SD)


def by_step(series: Sequence) -> dict[int, float]:
    """A metric by step."""
    steps, values = series
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def fit(tokens: np.ndarray, levels_SD: np.ndarray) -> Curve:
    """The curve with the least squares from levels [S, D] that were measured after `tokens`[S]: one scale and power for all."""
    best: tuple[float, Mapping] = (np.inf, {})
    for power in POWERS:
        for scale in SCALES:
            missing_S = (1 + tokens / scale) ** -power
            terms_S2 = np.stack([1 - missing_S, missing_S], axis=1)  # of best, and of start
            ends_2D = np.linalg.lstsq(terms_S2, levels_SD, rcond=None)[0]
            ends_2D = np.clip(ends_2D, LEAST, MOST)
            error = float(((terms_S2 @ ends_2D - levels_SD) ** 2).sum())
            if error < best[0]:
                ends = {"best": tuple(ends_2D[0].tolist()), "start": tuple(ends_2D[1].tolist())}
                best = error, ends | {"scale": float(scale), "power": power}
    return Curve(**best[1])


def clipped(levels: Sequence[float]) -> list[float]:
    """The levels within LEAST and MOST."""
    return np.clip(levels, LEAST, MOST).tolist()
