"""Knows how ways of decoding race: each answers the same prompts in turn, in one process, and is compared with plain decoding.

A turn in which anything was compiled, or in which a hypervisor gave more than 2 % of the processors to others, is abandoned and
repeated with other noise. A figure is the median over the turns of an arm over plain decoding in the same turn, with the
lower end of a 95 % interval of the mean. "all live" is the first part of a turn, prefills, admissions and the host's gaps
included, until no answer waits for a row and one ended; "whole" goes on to the last token.
"""

from __future__ import annotations

import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from benchmarks.common.timing import lower_end
from benchmarks.speculation.arm import Arm, stolen
from tlt_jax.config import Config
from tlt_jax.config.schema import Speculation
from tlt_jax.data.dataset import Prompt
from tlt_jax.errors import Interrupted
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode.strategy import PLAIN

TURNS = 15  # fewer give no interval
STOLEN = 0.02  # share of the processors that others may have during a turn
COLUMNS = (
    "arm", "all_live_tokens_per_s", "all_live_over_plain", "all_live_lower_95", "whole_tokens_per_s", "whole_over_plain",
    "whole_lower_95", "accept_length",
)  # fmt: skip
Turn = dict[str, tuple[RolloutResult, float]]  # by arm, with tokens per second while all are live


@dataclass
class Measured:
    """An arm's rollouts in the turns that count, and their tokens per second while all are live."""

    results: list[RolloutResult] = field(default_factory=list)
    full: list[float] = field(default_factory=list)

    @property
    def whole(self) -> list[float]:
        """Tokens per second of the whole rollouts."""
        return [one.stats["tokens"] / one.stats["seconds"] for one in self.results]

    def accept_length(self) -> float:
        """Tokens of a drafting round of a sequence; 0 where nothing drafted."""
        chunks = [one for result in self.results for one in result.measurements]
        rounds = sum(one.row_rounds for one in chunks if one.strategy != PLAIN)
        return sum(one.stats["speculated_tokens"] for one in self.results) / max(rounds, 1)

    def cells(self, name: str, plain: Measured) -> list:
        """The cells of COLUMNS."""
        found: list = [name]
        for speeds, plain_speeds in ((self.full, plain.full), (self.whole, plain.whole)):
            ratios = np.divide(speeds, plain_speeds).tolist()
            found += [round(statistics.median(speeds), 1), statistics.median(ratios)]
            found.append(lower_end(ratios, TURNS))
        return [*found, self.accept_length()]


def race(
    config: Config, arms: Mapping[str, Speculation], prompts: Sequence[Prompt], live: int, turns: tuple[int, int],
    each: int, buckets: Sequence[int] = (),
) -> Iterator[list]:  # fmt: skip
    """The cells of COLUMNS of every arm; `turns`: untimed and timed ones; `each`: answers of a turn."""
    engines = {name: Arm(config, one, live, buckets) for name, one in arms.items()}
    measured = {name: Measured() for name in arms}
    turn, usual, cores = -turns[0], math.inf, os.cpu_count() or 1
    for step in itertools.count():
        chosen = [prompts[(max(turn, 0) * each + i) % len(prompts)] for i in range(each)]
        clock, before = time.perf_counter(), stolen()
        most = before + STOLEN * cores * usual if turn >= 0 else math.inf
        try:
            done = take_turn(engines, chosen, live, step, most)
        except Interrupted:
            print(f"turn {turn} was abandoned", file=sys.stderr, flush=True)
            continue
        seconds = time.perf_counter() - clock
        usual, theirs = min(usual, seconds), (stolen() - before) / seconds / cores
        compiled = sum(result.stats["compiles"] for result, _ in done.values())
        tell(turn, compiled, theirs, done)
        counts = not compiled and theirs <= STOLEN
        if turn >= 0 and counts:
            for name, (result, speed) in done.items():
                measured[name].results.append(result)
                measured[name].full.append(speed)
        turn += turn < 0 or counts
        if turn == turns[1]:
            break
    for name in arms:
        yield measured[name].cells(name, measured["plain"])


def take_turn(
    engines: Mapping[str, Arm], prompts: Sequence[Prompt], live: int, step: int, most: float
) -> Turn:
    """Every arm's rollout, and its speed while all are live; the order of the arms alternates."""
    done, order = {}, list(engines.items())
    for name, arm in order if step % 2 else order[::-1]:
        begin = time.perf_counter()
        result = arm.decode(prompts, step=step, most=most)
        done[name] = (result, arm.full_speed(begin, live))
    return done


def tell(turn: int, compiled: int, theirs: float, done: Turn) -> None:
    """Reports a turn on stderr."""
    taken = ", ".join(
        f"{name} {result.stats['seconds']:.2f} s ({speed:.1f})"
        for name, (result, speed) in done.items()
    )
    print(f"turn {turn}, {compiled} programs compiled, {theirs:.1%} stolen; whole (tokens/s while all are live): {taken}",
          file=sys.stderr, flush=True)  # fmt: skip
