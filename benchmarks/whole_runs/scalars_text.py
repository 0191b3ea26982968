"""Reads the scalars of a run from a text file with a line for each, and makes inputs of a simulated run of them; no clock.

Such a file has no answers and no chunks: lengths are drawn from the mean and the share of cut answers of each step, and the
seconds of a round come from `speculation/plain_round_ms@rows`, or else from the seconds and rounds of whole rollouts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import yaml

from tlt_jax.config import Config, load as loading
from tlt_jax.data import packing
from tlt_jax.errors import DataError
from tlt_jax.rollout.executables.compile_cost import RELATIVE
from tlt_jax.rollout.executables.programs import Resize
from tlt_jax.simulate.cost_table import MEASURED, CostTable, Row
from tlt_jax.simulate.lengths import Drawn
from tlt_jax.spec_decode.strategy import NGRAM, parse

SIGMAS = np.geomspace(0.05, 6.0, 200)
PLAIN_ROUND = "speculation/plain_round_ms@"  # and the rows

Scalars = Mapping[str, np.ndarray]  # by name, a value for each step


def read(path: Path) -> dict[str, np.ndarray]:
    """The scalars that have a value for every step. Raises DataError for a line that is none."""
    lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    try:
        found = {name: np.array(values, float) for name, *values in lines}
    except ValueError as error:
        raise DataError(f"{path}: write a name and the numbers of its steps: {error}") from error
    steps = len(found.get("timing_s/step", ()))
    if not steps:
        raise DataError(f"{path}: no timing_s/step: give the scalars of a run")
    return found


def quiet(scalars: Scalars) -> np.ndarray:
    """Whether a step [S] compiled nothing, and had not to wait for what compiled in the background."""
    return (scalars["perf/compiles"] == 0) & (scalars["group/compile_wait_s@0"] < 0.01)


def step(scalars: Scalars, index: int) -> dict[str, float]:
    """The scalars of a step that every step has; the rollout without its waits for compilations."""
    count = len(scalars["timing_s/step"])
    found = {name: float(values[index]) for name, values in scalars.items() if len(values) == count}
    found["timing_s/rollout"] -= found["group/compile_wait_s@0"]
    return found


# Lengths


@dataclass(frozen=True)
class Summarised:
    """Log-normal answers with the mean and the share of cut ones of each step; implements lengths.Lengths."""

    scalars: Scalars
    limit: int

    def draw(self, step: int, prompts: int, samples: int, seed: int) -> Drawn:
        """The quantiles of the step's distribution, in a random order; a cut answer is longer than the limit."""
        step %= len(self.scalars["timing_s/step"])
        answers = quantiles(
            self.scalars["response_length/mean"][step], self.scalars["response_length/clip_ratio"][step],
            self.limit, prompts * samples,
        )  # fmt: skip
        np.random.default_rng([seed, step]).shuffle(answers)
        total = self.scalars["perf/total_num_tokens"][step] / (prompts * samples)
        prompt = round(float(total - self.scalars["response_length/mean"][step]))
        return Drawn(np.full(prompts, prompt), answers.reshape(prompts, samples))

    def describe(self) -> str:
        return "log-normal with the recorded mean and share of cut answers of each step"


def quantiles(mean: float, cut: float, limit: int, count: int) -> np.ndarray:
    """`count` answer lengths, this share of them longer than the limit, and this mean where those count as the limit."""
    kept = count - round(cut * count)
    normal = normals(kept, count)

    def lengths(sigma: float) -> np.ndarray:
        """With the first cut answer just beyond the limit."""
        edge = normals(count, count)[kept] if kept < count else 3.0
        return np.clip(limit * np.exp(sigma * (normal - edge)), 1, limit)

    means = [(lengths(sigma).sum() + limit * (count - kept)) / count for sigma in SIGMAS]
    best = lengths(SIGMAS[int(np.argmin(np.abs(np.array(means) - mean)))])
    return np.concatenate([np.rint(best).astype(int), np.full(count - kept, limit + 1)])


def normals(first: int, count: int) -> np.ndarray:
    """The first of `count` quantiles of a normal distribution, ascending."""
    grid = np.linspace(-6, 6, 4001)
    below = 0.5 * (1 + np.array([math.erf(x / math.sqrt(2)) for x in grid]))
    return np.interp((np.arange(first) + 0.5) / count, below, grid)


# Costs


def cost_table(config: Config, runs: Sequence[Scalars]) -> CostTable:
    """The costs of runs of this configuration, all of whose rows have the most slots, from the scalars of their quiet steps."""
    rollout = config.rollout
    batch = rollout.prompts * rollout.samples
    slots = config.data.max_prompt_tokens + rollout.max_new_tokens
    rows = [*rounds(runs, batch, slots), *drafted(runs, batch, slots)]
    calls = {"publish": ("update_weights",), "reward": ("reward",), "other": ("metrics", "other")}
    for program, parts in calls.items():
        taken = sum(of_quiet_steps(runs, f"timing_s/{part}") for part in parts)
        rows.append(Row(program, float(np.median(taken)), MEASURED))
    rows.append(Row("begin", float(np.median(of_quiet_steps(runs, "group/idle_s@0"))), MEASURED))
    for run in runs:
        answers = Summarised(run, rollout.max_new_tokens)
        for at in np.flatnonzero(quiet(run)).tolist():
            drawn = answers.draw(at, rollout.prompts, rollout.samples, config.train.seed)
            lengths = np.minimum(drawn.answers, rollout.max_new_tokens) + drawn.prompts[:, None]
            tokens = packing.steps(config, lengths.ravel().tolist()) * packing.step_tokens(config)
            rows.append(Row("update", float(run["timing_s/update"][at]), MEASURED, tokens=tokens))
    return CostTable((*rows, compiling(runs)), {"device": "h200", "devices": "1"})


def of_quiet_steps(runs: Sequence[Scalars], name: str) -> np.ndarray:
    """A scalar of all quiet steps of all runs."""
    return np.concatenate([run[name][quiet(run)] for run in runs])


def compiling(runs: Sequence[Scalars]) -> Row:
    """Seconds to compile a chunk: the median of the steps after the first that compiled a chunk and a resize.

    A first step also starts the device's compilers. Raises DataError when no run compiled later.
    """
    found = [
        float(run["perf/compile_s"][step])
        for run in runs
        for step in np.flatnonzero(run["perf/compiles"] == 2)
    ]
    if not found:
        raise DataError("no step compiled two programs: give a run that changed to a smaller batch")
    return Row("compile", float(np.median(found)) / (1 + RELATIVE[Resize]), MEASURED)


def rounds(runs: Sequence[Scalars], batch: int, slots: int) -> list[Row]:
    """Plain rounds: the medians of the chunks where a run kept them, else from whole rollouts."""
    kept: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for name in run:
            if name.startswith(PLAIN_ROUND):
                kept[int(name.removeprefix(PLAIN_ROUND))] += (run[name] / 1e3).tolist()
    found = {rows: float(np.median(each)) for rows, each in kept.items()}
    found = found or of_rollouts(runs, batch)
    return [Row("round", seconds, MEASURED, rows, slots) for rows, seconds in found.items()]


def of_rollouts(runs: Sequence[Scalars], batch: int) -> dict[int, float]:
    """Seconds of a round of `batch` rows and of half as many: the least squares of the quiet rollouts.

    What precedes the first program is taken off. A rollout that never had half the rows has `batch` of them in all rounds.
    """
    seconds, count, rows, idle = (
        of_quiet_steps(runs, name)
        for name in ("timing_s/rollout", "perf/rounds", "perf/row_rounds", "group/idle_s@0")
    )
    halved = np.maximum(batch * count - rows, 0) / (batch / 2)
    terms = np.stack([count - halved, halved], axis=1)
    found = np.linalg.lstsq(terms, seconds - np.median(idle), rcond=None)[0]
    return {batch: float(found[0]), batch // 2: float(found[1])}


def drafted(runs: Sequence[Scalars], batch: int, slots: int) -> list[Row]:
    """Rounds of `batch` rows that drafted one token with n-grams, where a run kept their seconds."""
    name = f"speculation/round_ms@{batch}"
    kept = [float(one) / 1e3 for run in runs for one in run.get(name, ())]
    strategy = parse("1_1_2")
    return [Row("round", float(np.median(kept)), MEASURED, batch, slots, 0.0, strategy, NGRAM)] if kept else []  # fmt: skip


def configuration(path: Path) -> Config:
    """The configuration of a YAML file, where an empty value is a default; the policy's directory need not be here."""
    tree = yaml.safe_load(path.read_text(encoding="utf-8"))
    for section in tree.values():
        if isinstance(section, dict):
            for name in [name for name, value in section.items() if value is None]:
                del section[name]
    return loading.build(tree, [])
