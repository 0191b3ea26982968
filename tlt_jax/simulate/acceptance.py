"""What simulated drafters accept: by depth and drafter, rising with the tokens learned and falling as the policy moves.

Acceptance at a depth is the probability that the best draft of that depth is the policy's token, given that those before
were, as drafter/hf/acceptance.json has it. Knows no scheduler. No JAX.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path

import numpy as np

from tlt_jax.errors import ConfigError, DataError
from tlt_jax.simulate import scenarios
from tlt_jax.simulate.scenarios import Trees
from tlt_jax.spec_decode.strategy import NGRAM, Strategy

GRID = 0.01  # levels are rounded to this, so that few trees are drawn
ROUNDS = 2000  # drawn rounds of a strategy


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
            quality, agreement = zip(*map(scenarios.quality_of, levels), strict=True)
            self.drawn[key] = scenarios.drafts(self.seed, ROUNDS, quality, agreement, shape)
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
    """What --acceptance gives: a JSON file, an acceptance.json of a drafter, or a preset; "": the preset new.

    Raises ConfigError or DataError.
    """
    if not text:
        return NEW
    path = Path(text)
    if path.is_file():
        return from_file(path)
    if text not in PRESETS:
        raise ConfigError(
            f"--acceptance {text}: no file or preset: presets are {', '.join(PRESETS)}"
        )
    return PRESETS[text]


def from_file(path: Path) -> Acceptances:
    """The acceptance of a file: {"acceptance": [...]} of a drafter, or the fields of Acceptances. Raises DataError."""
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise DataError(f'{path}: write {{"acceptance": [...]}}, or the fields ngram, learned')
    if "acceptance" in found:
        levels = probabilities(path, "acceptance", found["acceptance"])
        return Acceptances(NEW.ngram, Curve(levels, levels), source=str(path))
    unknown = sorted(found.keys() - {"ngram", "learned", "pretrained", "source"})
    if unknown:
        raise DataError(
            f"{path}: unknown field {unknown[0]!r}: use ngram, learned, pretrained, source"
        )
    curve = dict(found.get("learned") or {})
    names = {one.name for one in fields(Curve)}
    if wrong := sorted(curve.keys() - names):
        raise DataError(f"{path}: unknown field learned.{wrong[0]}: use {', '.join(sorted(names))}")
    for name in ("start", "best"):
        curve[name] = probabilities(path, f"learned.{name}", curve.get(name))
    ngram = probabilities(path, "ngram", found.get("ngram", list(NEW.ngram)))
    numbers = {f"learned.{name}": value for name, value in curve.items() if name not in ("start", "best")}  # fmt: skip
    for name, value in (numbers | {"pretrained": found.get("pretrained", 0.0)}).items():
        is_number = isinstance(value, int | float) and math.isfinite(value) and value >= 0
        if not is_number or (name == "learned.scale" and not value):
            raise DataError(f"{path}: {name} {value!r}: give a number above 0")
    return Acceptances(
        ngram, Curve(**curve), found.get("pretrained", 0.0), found.get("source", str(path))
    )


def probabilities(path: Path, name: str, values: object) -> tuple[float, ...]:
    """The probabilities in a list. Raises DataError."""
    is_list = isinstance(values, list) and len(values) > 0
    if not is_list or not all(isinstance(one, int | float) and 0 <= one <= 1 for one in values):
        raise DataError(
            f"{path}: {name} {values!r}: give probabilities by depth, such as [0.8, 0.7]"
        )
    return tuple(float(np.clip(one, 0.001, 0.995)) for one in values)
