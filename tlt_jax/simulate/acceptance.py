"""What simulated drafters accept: by depth and drafter, rising with the tokens learned and falling as the policy moves.

Acceptance at a depth is the probability that the best draft of that depth is the policy's token, given that those before
were, as drafter/hf/acceptance.json has it.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path
from statistics import median_high

import numpy as np

from tlt_jax import atomic
from tlt_jax.config import load as loading
from tlt_jax.config.schema import RESOLVED
from tlt_jax.errors import ConfigError, DataError
from tlt_jax.metrics.run import Run, open_run
from tlt_jax.simulate.record import by_step
from tlt_jax.simulate.trees import Trees, drafts, quality_of
from tlt_jax.spec_decode.strategy import LEARNED, NGRAM, PLAIN, Strategy, parse

GRID = 0.01  # levels are rounded to this, so that few trees are drawn
ROUNDS = 2000  # drawn rounds of a strategy
LEAST_STEPS = 4  # steps with a measured acceptance from which a curve is fitted
SCALES = np.geomspace(1e2, 1e9, 57)
POWERS = (0.25, 0.5, 1.0, 2.0)
LEAST, MOST = 0.001, 0.995  # probabilities
# Metrics of what a drafter learned from in a step.
TOKENS = "drafter/update_tokens", "drafter/tokens"


@dataclass(frozen=True)
class Curve:
    """Acceptance by depth of a learned drafter after it has learned from some tokens.

    best - (best - start) (1 + tokens / scale) ** -power: `start` untrained, `best` in the end. Every update of the policy
    takes the share `forget` of the tokens learned. The last entry of each holds for all deeper depths.
    """

    start: tuple[float, ...]
    best: tuple[float, ...]
    scale: float = 1e6
    power: float = 0.5
    forget: float = 0.0

    def levels(self, learned: float, depth: int) -> tuple[float, ...]:
        """Acceptance at depths 1 to `depth` after `learned` tokens."""
        missing = (1 + learned / self.scale) ** -self.power
        ends = (padded(one, depth) for one in (self.start, self.best))
        return tuple(best - (best - start) * missing for start, best in zip(*ends, strict=True))


@dataclass(frozen=True)
class Acceptances:
    """What n-grams and the learned drafter accept; merged trees accept as much as the learned drafter's.

    `pretrained`: tokens that a drafter has learned from before the run, where it starts from one. `source`: of the figures.
    """

    ngram: tuple[float, ...]
    learned: Curve
    pretrained: float = 0.0
    source: str = ""
    seed: int = 0
    drawn: dict = field(default_factory=dict, compare=False, repr=False)

    def levels(self, drafter: str, learned: float, depth: int) -> tuple[float, ...]:
        """Acceptance at depths 1 to `depth` of the drafter that a strategy names ("": the learned one)."""
        if drafter == NGRAM:
            return padded(self.ngram, depth)
        return self.learned.levels(learned, depth)

    def trees(self, strategy: Strategy, learned: float) -> Trees:
        """A sample of rounds of the strategy after the drafter has learned from `learned` tokens."""
        exact = self.levels(strategy.drafter, learned, strategy.depth)
        levels = tuple(round(level / GRID) * GRID for level in exact)
        key = strategy.depth, strategy.topk, strategy.nodes, levels
        if key not in self.drawn:
            shape = Strategy(*key[:3])
            quality, agreement = zip(*map(quality_of, levels), strict=True)
            self.drawn[key] = drafts(self.seed, ROUNDS, quality, agreement, shape)
        return self.drawn[key]


def padded(levels: tuple[float, ...], depth: int) -> tuple[float, ...]:
    """The first `depth` levels; the last one holds for all deeper ones."""
    return (*levels, *levels[-1:] * depth)[:depth]


# Depths 1 and 8 of figure 16 of arXiv 2511.16665, read from the picture (adaptive about 0.96 and 0.26 of all rounds, static
# 0.92 and 0.06), with equal acceptance at the depths between. Accept lengths of n-grams alone are not published.
PAPER = Acceptances(
    ngram=(0.45, 0.55, 0.6),
    learned=Curve(start=(0.92, 0.68), best=(0.96, 0.83), scale=2e6, power=0.5, forget=0.02),
    source="arXiv 2511.16665, figure 16, read from the picture; n-grams and the learning curve are assumptions",
)
NEW = Acceptances(
    ngram=(0.2, 0.45, 0.5),
    learned=Curve(start=(0.02, 0.02), best=(0.8, 0.8), scale=1e6, power=0.5, forget=0.02),
    pretrained=1e7,
    source="an assumption: text of high entropy, a drafter that starts untrained, a frozen one after 10 million tokens",
)
# Chains of EAGLE-3 drafters of Qwen3-8B in NeMo-RL: tokens a round of a chain of 3 are published. Acceptance falls with depth
# as in vLLM's test of such a drafter (0.65, 0.40 and 0.20 of all rounds reach depths 1, 2 and 3), and stays so from 3 on.
NEMO_SHAPE = (1.0, 0.40 / 0.65 / 0.65, 0.20 / 0.40 / 0.65)


def nemo(first: float, length: float) -> Acceptances:
    """Of chains that accept `first` at depth 1, which makes `length` tokens a round of a chain of 3."""
    levels = tuple(first * share for share in NEMO_SHAPE)
    return Acceptances(
        NEW.ngram, Curve(levels, levels),
        source=f"arXiv 2604.26779: {length} tokens a round of a chain of 3; by depth as in vLLM's test of Qwen3-8B",
    )  # fmt: skip


PRESETS: Mapping[str, Acceptances] = {
    "paper": PAPER, "new": NEW, "nemo_rl_zero": nemo(0.7164, 2.47), "nemo_rl_think": nemo(0.5833, 2.05),
}  # fmt: skip


def of(text: str) -> Acceptances:
    """What --acceptance gives: a run's folder, an acceptance.json of a drafter, or a preset; "": the preset new.

    Raises ConfigError or DataError.
    """
    path = Path(text)
    if not text:
        return NEW
    if (path / RESOLVED).is_file():
        return of_run(path)
    if path.is_file():
        return from_file(path)
    if text not in PRESETS:
        raise ConfigError(
            f"--acceptance {text}: no run folder, file or preset: presets are {', '.join(PRESETS)}"
        )
    return PRESETS[text]


def from_file(path: Path) -> Acceptances:
    """The acceptance of a drafter, of its acceptance.json; or the fields of Curve, and `pretrained`. Raises DataError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    found = found if isinstance(found, dict) else {}
    start, best = (found.get(name, found.get("acceptance")) for name in ("start", "best"))
    numbers = {
        name: found[name] for name in ("scale", "power", "forget", "pretrained") if name in found
    }
    are_amounts = all(isinstance(one, int | float) and one >= 0 for one in numbers.values())
    if not (are_levels(start) and are_levels(best) and are_amounts):
        raise DataError(
            f'{path}: write {{"acceptance": [...]}}, probabilities by depth, such as [0.8, 0.7]; or the lists start and best, '
            "and any of the numbers scale, power, forget and pretrained"
        )
    pretrained = numbers.pop("pretrained", 0.0)
    curve = Curve(tuple(clipped(start)), tuple(clipped(best)), **numbers)
    return Acceptances(NEW.ngram, curve, pretrained, source=str(path))


def are_levels(found: object) -> bool:
    """Whether this is a list of probabilities, with at least one."""
    is_list = isinstance(found, list) and len(found) > 0
    return is_list and all(isinstance(one, int | float) and 0 <= one <= 1 for one in found)


# What the drafters of a real run accepted, and how that rose with the tokens learned


def of_run(folder: Path) -> Acceptances:
    """The acceptance of a run's drafters; of one of which the run measured nothing that of the preset new.

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
    what = "n-grams" if ngram is None else "the learned drafter" if curve is None else ""
    rest = f"; {what} as in the preset" if what else ""
    return Acceptances(
        ngram or NEW.ngram, curve or NEW.learned, source=f"measured in {folder}{rest}"
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
    added, learned, so_far = [by_step(run, name) for name in TOKENS], {}, 0.0
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
    depths: list[dict[int, float]] = []
    while found := by_step(run, f"drafter/acceptance@{len(depths) + 1}"):
        depths.append(found)
    measured = sorted(depths[0]) if depths else []
    return {
        step: tuple(one[step] for one in depths)
        for step in measured
        if all(np.isfinite(one.get(step, np.nan)) for one in depths)
    }


def fit(tokens: np.ndarray, levels_SD: np.ndarray, weight_S: np.ndarray) -> Curve:
    """The curve with the least weighted squares from levels [S, D] measured after `tokens`[S]: one scale and power for all."""
    root_S1, tried = np.sqrt(weight_S)[:, None], []
    for power, scale in product(POWERS, SCALES.tolist()):
        missing_S = (1 + tokens / scale) ** -power
        terms_S2 = np.stack([1 - missing_S, missing_S], axis=1)  # of best, and of start
        ends_2D = np.linalg.lstsq(root_S1 * terms_S2, root_S1 * levels_SD, rcond=None)[0]
        ends_2D = np.clip(ends_2D, LEAST, MOST)
        error = float((weight_S @ (terms_S2 @ ends_2D - levels_SD) ** 2).sum())
        best, start = map(tuple, ends_2D.tolist())
        tried.append((error, Curve(start, best, scale, power)))
    return min(tried, key=lambda one: one[0])[1]


def clipped(levels: Sequence[float]) -> list[float]:
    """The levels within LEAST and MOST."""
    return np.clip(levels, LEAST, MOST).tolist()
