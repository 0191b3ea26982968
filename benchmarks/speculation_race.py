"""Knows how ways of decoding race: each answers the same prompts in turn, in one process, and is compared with plain decoding.

A turn in which anything was compiled, or in which a hypervisor gave more than 2 % of the processors to others, is given up and
taken again, with other noise. A figure is the median over the turns of an arm over plain decoding in the same turn, with the
lower end of a 95 % interval of the mean. "all live" is the first part of a turn, prefills, admissions and the host's gaps
included, until no answer waits for a row and one ended; "whole" goes on to the last token.

With --peer PYTHON, the python of a virtual environment with google-tunix, tunix's own sampler takes its turn too, on the same
weights and prompts, in batches of as many as are live.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace

import numpy as np
from speculation_setup import Arm, label, stolen

from tlt_jax.config import Config
from tlt_jax.config.schema import Speculation
from tlt_jax.data.dataset import Prompt
from tlt_jax.errors import Interrupted
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode.strategy import PLAIN

T_975, TURNS = (
    2.145,
    15,
)  # Student's t with 14 degrees of freedom, two-sided 95 %: too small for fewer turns
STOLEN = 0.02  # share of the processors that others may have during a turn
COLUMNS = (
    "arm", "all_live_tokens_per_s", "all_live_over_plain", "all_live_lower_95", "whole_tokens_per_s", "whole_over_plain",
    "whole_lower_95", "accept_length",
)  # fmt: skip


class Peer:
    """tunix's sampler in a process of its own, with the same weights."""

    def __init__(self, python: str, config: Config, live: int):
        self.live, self.limit = live, config.rollout.max_new_tokens
        script = str(Path(__file__).parent / "tunix_sampler.py")
        command = [python, "-W", "ignore", script, config.model.path, str(self.limit)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def decode(
        self, prompts: Sequence[Prompt], temperature: float, step: int, most: float
    ) -> SimpleNamespace:
        """One answer to each prompt, what of a RolloutResult the race reads."""
        stats = {"seconds": 0.0, "tokens": 0, "compiles": 0, "speculated_tokens": 0}
        for first in range(0, len(prompts), self.live):
            texts = [prompt.text for prompt in prompts[first : first + self.live]]
            request = {"prompts": texts, "limit": self.limit, "seed": 100 * step + first}
            self.process.stdin.write(json.dumps(request) + "\n")
            self.process.stdin.flush()
            result = json.loads(self.process.stdout.readline())
            stats |= {name: stats[name] + result[name] for name in ("seconds", "tokens")}
        return SimpleNamespace(stats=stats, measurements=[])

    def full_speed(self, begin: float, live: int) -> float:
        """Unknown: it decodes a batch to its end."""
        return math.nan

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()


@dataclass
class Sound:
    """What an arm did in the turns that count: tokens per second while all are live, and of the whole; its rollouts."""

    full: list[float] = field(default_factory=list)
    whole: list[float] = field(default_factory=list)
    results: list[RolloutResult] = field(default_factory=list)

    def add(self, result: RolloutResult, full: float) -> None:
        """Another turn."""
        self.full.append(full)
        self.whole.append(result.stats["tokens"] / result.stats["seconds"])
        self.results.append(result)

    def accept_length(self) -> float:
        """Tokens of a drafting round of a sequence; 0 where nothing drafted."""
        measured = [one for result in self.results for one in result.measurements]
        rounds = sum(one.row_rounds for one in measured if one.strategy != PLAIN)
        return sum(one.stats["speculated_tokens"] for one in self.results) / max(rounds, 1)

    def cells(self, name: str, plain: Sound) -> list:
        """The cells of COLUMNS."""
        found: list = [name]
        for speeds, plain_speeds in ((self.full, plain.full), (self.whole, plain.whole)):
            ratios = np.divide(speeds, plain_speeds).tolist()
            found += [
                round(statistics.median(speeds), 1), statistics.median(ratios), lower(ratios),
            ]  # fmt: skip
        return [*found, self.accept_length()]


def race(
    config: Config,
    arms: Mapping[str, Speculation | str],
    prompts: Sequence[Prompt],
    live: int,
    turns: tuple[int, int],
    each: int,
    buckets: Sequence[int] = (),
) -> Iterator[list]:
    """Of every arm the cells of COLUMNS; `turns` that are not timed, and that are; `each`: answers of a turn.

    The settings of a peer are its python.
    """
    engines = {name: engine_of(one, config, live, buckets) for name, one in arms.items()}
    sound = {name: Sound() for name in arms}
    turn, usual, cores = -turns[0], math.inf, os.cpu_count() or 1
    for step in itertools.count():
        chosen = [prompts[(max(turn, 0) * each + i) % len(prompts)] for i in range(each)]
        clock, before = time.perf_counter(), stolen()
        most = before + STOLEN * cores * usual if turn >= 0 else math.inf
        try:
            done = take_turn(engines, chosen, live, step, most)
        except Interrupted:
            print(f"turn {turn} was given up", file=sys.stderr, flush=True)
            continue
        seconds = time.perf_counter() - clock
        usual, theirs = min(usual, seconds), (stolen() - before) / seconds / cores
        compiled = sum(result.stats["compiles"] for result, _ in done.values())
        tell(turn, compiled, theirs, done)
        is_sound = not compiled and theirs <= STOLEN
        if turn >= 0 and is_sound:
            for name, (result, speed) in done.items():
                sound[name].add(result, speed)
        turn += turn < 0 or is_sound
        if turn == turns[1]:
            break
    for arm in engines.values():
        if isinstance(arm, Peer):
            arm.close()
    for name in arms:
        yield sound[name].cells(name, sound["plain"])


def engine_of(
    settings: Speculation | str, config: Config, live: int, buckets: Sequence[int]
) -> Arm | Peer:
    """What decodes by these settings."""
    if isinstance(settings, str):
        return Peer(settings, config, live)
    return Arm(config, settings, live, buckets)


def take_turn(
    engines: Mapping[str, Arm | Peer], prompts: Sequence[Prompt], live: int, step: int, most: float
) -> dict[str, tuple[RolloutResult, float]]:
    """Every arm's rollout, and its speed while all are live; the order of the arms alternates."""
    done, order = {}, list(engines.items())
    for name, arm in order if step % 2 else order[::-1]:
        begin = time.perf_counter()
        result = arm.decode(prompts, 1.0, step, most)
        done[name] = (result, arm.full_speed(begin, live))
    return done


def tell(
    turn: int, compiled: int, theirs: float, done: Mapping[str, tuple[RolloutResult, float]]
) -> None:
    """Says what a turn was like, outside the report."""
    taken = ", ".join(
        f"{name} {result.stats['seconds']:.2f} s ({speed:.1f})"
        for name, (result, speed) in done.items()
    )
    print(f"turn {turn}, {compiled} programs compiled, {theirs:.1%} stolen; whole (tokens/s while all are live): {taken}",
          file=sys.stderr, flush=True)  # fmt: skip


def lower(ratios: Sequence[float]) -> float:
    """The lower end of a 95 % interval of the mean; nan below 15 turns."""
    spread = float(np.std(ratios, ddof=1)) if len(ratios) >= TURNS else math.nan
    return statistics.mean(ratios) - T_975 * spread / math.sqrt(len(ratios))


def add_turns(parser: argparse.ArgumentParser) -> None:
    """The arguments for how often arms race."""
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--warm-up", type=int, default=2, help="turns that are not timed")


def add_tuners(parser: argparse.ArgumentParser) -> None:
    """The arguments for what races."""
    parser.add_argument("--strategies", default="2_1_3,3_1_4,5_1_6,4_2_8,6_4_16")
    parser.add_argument("--tuners", default="goodput,threshold,beg_mab", help="'' for none")
    parser.add_argument(
        "--peer", default="", help="python of a virtual environment with google-tunix"
    )


def tuned(drafter: str, tuners: Sequence[str], texts: Sequence[str]) -> dict[str, Speculation]:
    """Arms of a drafter, each with a tuner that chooses among the strategies."""
    return {f"{label(drafter)} {one}": Speculation(drafter, one, list(texts)) for one in tuners}
