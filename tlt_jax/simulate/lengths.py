"""Lengths of simulated answers: recorded in a run's folder, or log-normal.

Presets state what is published of the jobs that they are named after, and what is assumed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tlt_jax.config.schema import RESOLVED
from tlt_jax.errors import ConfigError
from tlt_jax.metrics.run import open_run
from tlt_jax.simulate.record import by_step


class Drawn(NamedTuple):
    """Tokens of the prompts [P] and of their answers [P, R], EOS included; longer than the limit: the answer is cut."""

    prompts: np.ndarray
    answers: np.ndarray


@dataclass(frozen=True)
class LogNormal:
    """Log-normal lengths with this median and standard deviation of their logs.

    `alike`: the share of that variance that the answers of a prompt have in common. `prompt`: tokens of a prompt. `source`:
    what is published, and what is assumed.
    """

    median: float
    sigma: float
    alike: float = 0.5
    prompt: int = 256
    source: str = ""

    def draw(self, step: int, prompts: int, samples: int, seed: int) -> Drawn:
        random = np.random.default_rng([seed, step])
        shared = random.standard_normal((prompts, 1)) * math.sqrt(self.alike)
        own = random.standard_normal((prompts, samples)) * math.sqrt(1 - self.alike)
        tokens = self.median * np.exp(self.sigma * (shared + own))
        answers = np.clip(tokens, 1, 1 << 30).astype(np.int64)
        return Drawn(np.full(prompts, self.prompt), answers)

    def describe(self) -> str:
        source = f" ({self.source})" if self.source else ""
        return f"log-normal, median {self.median:g}, sigma {self.sigma:g}{source}"


@dataclass(frozen=True)
class Recorded:
    """The answers of a run, step by step; after its last step they begin again. A cut answer stays cut."""

    steps: tuple[Drawn, ...]
    folder: str

    def draw(self, step: int, prompts: int, samples: int, seed: int) -> Drawn:
        """The recorded answers; of other numbers of prompts and samples, drawn from the step's with replacement."""
        found = self.steps[step % len(self.steps)]
        if found.answers.shape == (prompts, samples):
            return found
        random = np.random.default_rng([seed, step])
        chosen = random.integers(0, len(found.answers), prompts)
        sampled = random.integers(0, found.answers.shape[1], (prompts, samples))
        return Drawn(found.prompts[chosen], found.answers[chosen[:, None], sampled])

    def describe(self) -> str:
        return f"recorded in {len(self.steps)} steps of {self.folder}"


Lengths = LogNormal | Recorded

# arXiv 2511.16665 states the limits; neither medians nor spreads are published.
PAPER = "the limit is the paper's (arXiv 2511.16665); median and spread are assumptions"
PRESETS: Mapping[str, LogNormal] = {
    # A trace of ByteDance: the longest answer reaches the limit of 20,480 at almost every step, the upper quartile is far
    # below. With these numbers the upper quartile is 4,500 and 2 % of the answers are cut.
    "bytedance_32b": LogNormal(2300, 1.0, source=f"{PAPER}; limit 20,480"),
    "paper_7b": LogNormal(2300, 1.0, source=f"{PAPER}; limit 32,768"),
    "paper_32b": LogNormal(2300, 1.0, source=f"{PAPER}; limit 32,768"),
    # The paper's benchmark of strategies: 32 prompts, at most 2,048 tokens. A third party counted 848 and 967 tokens an answer
    # in two runs (fastrl issue 13); with these numbers the mean of the cut answers is 906.
    "paper_bench": LogNormal(
        740,
        0.8,
        source="the mean is that of fastrl issue 13; the spread is an assumption; limit 2,048",
    ),
}


def of(text: str, limit: int) -> Lengths:
    """The lengths of --lengths: a run's folder, a preset, or log-normal with this median and sigma.

    "": log-normal, with 2 % of the answers beyond the `limit`. Raises ConfigError.
    """
    if not text:
        return LogNormal(limit / math.exp(2.054), 1.0, source="an assumption: 2 % are cut")
    if given := re.fullmatch(r"(\d+(?:\.\d+)?),(\d+(?:\.\d+)?)", text):
        return LogNormal(*map(float, given.groups()))
    path = Path(text)
    if (path / RESOLVED).is_file():
        return recorded(path)
    if text not in PRESETS:
        raise ConfigError(
            f"--lengths {text}: no run folder, MEDIAN,SIGMA or preset: presets are {', '.join(PRESETS)}"
        )
    return PRESETS[text]


def recorded(folder: Path) -> Recorded:
    """The lengths of a run's answers, one more for those that were cut. Raises ConfigError for a run without answers."""
    run, steps = open_run(folder), []
    if not run.steps:
        raise ConfigError(f"{folder} has no answers yet: no step is done")
    known = by_step(run, "prompt_length/mean")
    for step in range(1, run.steps + 1):
        try:
            answers = run.completions(step)
        except ConfigError:
            continue  # a step whose answers were not kept
        answers.sort(key=lambda one: one["uid"])
        tokens = [one["length"] + (one["finish"] == "length") for one in answers]
        prompts = len({one["group"] for one in answers})
        prompt = np.full(prompts, round(known.get(step, 256)))
        steps.append(Drawn(prompt, np.array(tokens).reshape(prompts, -1)))
    return Recorded(tuple(steps), str(folder))
