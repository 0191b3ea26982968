"""What the drafters of a real run accepted, and how that rose with the tokens learned: fitted to its folder. No JAX."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import median_high

import numpy as np

from tlt_jax import atomic
from tlt_jax.config import load as loading
from tlt_jax.config.schema import RESOLVED
from tlt_jax.errors import DataError
from tlt_jax.metrics.run import Run, open_run
from tlt_jax.simulate.acceptance import Acceptances, Curve
from tlt_jax.spec_decode.strategy import LEARNED, NGRAM, PLAIN, parse

LEAST_STEPS = 4  # steps with a measured acceptance from which a curve is fitted
SCALES = np.geomspace(1e2, 1e9, 57)
POWERS = (0.25, 0.5, 1.0, 2.0)
LEAST, MOST = 0.001, 0.995  # probabilities


def of_run(folder: Path, otherwise: Acceptances) -> Acceptances:
    """The acceptance of a run's drafters; `otherwise`: for one of which the run measured nothing.

    Raises DataError for a run without a drafter.
    """
    run, config = open_run(folder), loading.read_resolved(folder / RESOLVED)
    is_ngram = config.speculation.drafter == NGRAM  # the only drafter has no name
    ngram = of_chains(chain(*chains(folder, {NGRAM, "" if is_ngram else NGRAM}).values()))
    curve = of_learned(run, chains(folder, {LEARNED, LEARNED if is_ngram else ""}))
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


def chains(folder: Path, drafters: Collection[str]) -> dict[int, list[Sequence[float]]]:
    """How many rounds accepted 0, 1, ... nodes of each chunk that drafted chains of these drafters, by step."""
    counts: dict[int, list[Sequence[float]]] = {}
    for path in sorted(folder.glob("speculation/*.jsonl")):
        for line in atomic.lines(path):
            one = json.loads(line)
            strategy = parse(one["strategy"])
            if strategy != PLAIN and strategy.drafter in drafters and strategy.topk == 1:
                counts.setdefault(int(path.stem), []).append(one["accepted"])
    return counts


def of_chains(chunks: Iterable[Sequence[float]]) -> tuple[float, ...] | None:
    """Acceptance by depth, given the depths before, of chunks whose rounds accepted 0, 1, ... nodes so often; None without any.

    Chains may differ in depth: each counts for the depths that it has.
    """
    tried, accepted = Counter(), Counter()
    for counts in chunks:
        reached = np.cumsum(counts[::-1])[::-1].tolist()  # rounds that accepted at least this many
        tried.update(dict(enumerate(reached[:-1])))
        accepted.update(dict(enumerate(reached[1:])))
    levels = [accepted[depth] / tried[depth] for depth in sorted(tried) if tried[depth]]
    return tuple(clipped(levels)) if accepted[0] else None


def of_learned(run: Run, chunks: Mapping[int, Sequence[Sequence[float]]]) -> Curve | None:
    """The learning curve of a run's drafter by the tokens that it had learned from; None without measurements.

    Of what its chains accepted in rollouts, by step; where these are of less than LEAST_STEPS steps, of the metrics of its
    training, if they have as many. Of less steps the mean, which does not rise.
    """
    levels = {step: found for step, each in chunks.items() if (found := of_chains(each))}
    weights = {step: sum(map(sum, chunks[step])) for step in levels}
    trained = levels_of_metrics(run)
    if len(levels) < LEAST_STEPS <= len(trained) or not levels:
        levels, weights = trained, dict.fromkeys(trained, 1.0)
    if not levels:
        return None
    metrics, learned, so_far = run.metrics, {}, 0.0
    added = [by_step(metrics[name]) for name in ("drafter/update_tokens", "drafter/tokens") if name in metrics]  # fmt: skip
    for step in range(1, max(levels) + 1):
        learned[step] = so_far  # measured before the step's own update
        so_far += sum(one.get(step, 0.0) for one in added)
    depth = median_high(map(len, levels.values()))  # which half of the steps have, or more
    kept = [step for step, each in levels.items() if len(each) >= depth]
    tokens_S, weight_S = (np.array([of[step] for step in kept]) for of in (learned, weights))
    levels_SD = np.array([levels[step][:depth] for step in kept])
    if len(kept) < LEAST_STEPS:
        mean = tuple(clipped(weight_S @ levels_SD / weight_S.sum()))
        return Curve(mean, mean)
    return fit(tokens_S, levels_SD, weight_S)


def levels_of_metrics(run: Run) -> dict[int, tuple[float, ...]]:
    """Acceptance by depth of the steps whose metrics have it."""
    metrics, depths = run.metrics, []
    while (name := f"drafter/acceptance@{len(depths) + 1}") in metrics:
        depths.append(by_step(metrics[name]))
    measured = sorted(depths[0]) if depths else []
    return {
        step: tuple(one[step] for one in depths)
        for step in measured
        if all(np.isfinite(one.get(step, np.nan)) for one in depths)
    }


def by_step(series: Sequence) -> dict[int, float]:
    """A metric by step."""
    steps, values = series
    return dict(zip(steps.tolist(), values.tolist(), strict=True))


def fit(tokens: np.ndarray, levels_SD: np.ndarray, weight_S: np.ndarray) -> Curve:
    """The curve with the least weighted squares from levels [S, D] measured after `tokens`[S]: one scale and power for all."""
    best: tuple[float, Mapping] = (np.inf, {})
    root_S1 = np.sqrt(weight_S)[:, None]
    for power in POWERS:
        for scale in SCALES:
            missing_S = (1 + tokens / scale) ** -power
            terms_S2 = np.stack([1 - missing_S, missing_S], axis=1)  # of best, and of start
            ends_2D = np.linalg.lstsq(root_S1 * terms_S2, root_S1 * levels_SD, rcond=None)[0]
            ends_2D = np.clip(ends_2D, LEAST, MOST)
            error = float((weight_S @ (terms_S2 @ ends_2D - levels_SD) ** 2).sum())
            if error < best[0]:
                ends = {"best": tuple(ends_2D[0].tolist()), "start": tuple(ends_2D[1].tolist())}
                best = error, ends | {"scale": float(scale), "power": power}
    return Curve(**best[1])


def clipped(levels: Sequence[float]) -> list[float]:
    """The levels within LEAST and MOST."""
    return np.clip(levels, LEAST, MOST).tolist()
