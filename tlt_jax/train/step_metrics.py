"""Seconds of an RL step by phase, its metrics, and the lines of its speculation file."""

from __future__ import annotations

import json
import math
import resource
import sys
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path

import jax
import numpy as np
from jax import monitoring

from tlt_jax.config import Config, schema, validate
from tlt_jax.data.dataset import Dataset
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.distributed.job import Job
from tlt_jax.metrics import (
    ChunkRecord,
    GroupSeconds,
    group_seconds,
    idle_share,
    timeline,
)
from tlt_jax.metrics.timeline import covered
from tlt_jax.rewards import Score
from tlt_jax.rollout.executables.background import WAIT
from tlt_jax.rollout.recorder import LENGTH, NONFINITE, RolloutResult
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.train import losses
from tlt_jax.train.advantages import zero_variance
from tlt_jax.train.policy_update import EMPTY
from tlt_jax.tuner.interface import Measurement

OTHER = "other"
# Events that JAX reports for each program: tracing, lowering, and compilation by XLA or a read from the persistent cache; and
# a wait for one of these in another thread.
COMPILATION = "/jax/core/compile/backend_compile_duration"
COMPILING = (
    "/jax/core/compile/jaxpr_trace_duration",
    "/jax/core/compile/jaxpr_to_mlir_module_duration",
    COMPILATION,
    WAIT,
)
# Metrics of an optimizer step, and not of its tokens or answers.
OF_STEPS = ("loss", "pg_loss", "grad_norm", "reward_kl_penalty")


class Stopwatch:
    """Context that counts every second for one phase, and records every compilation of the process.

    Seconds of an inner phase do not count for the outer one; seconds outside of all phases count for
    `other`. Seconds of compiling are those of the thread that made it, and its waits for other threads. A lap is the time
    since the previous lap; `lapped` has the phases of the last one that ended, in order of time. `tell` is called with every
    phase that starts.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.perf_counter,
        tell: Callable[[str], None] = lambda name: None,
    ):
        self.tell = tell
        self.clock, self.phase_name, self.since = clock, OTHER, clock()
        self.phases: list[timeline.Phase] = []
        self.lapped: list[timeline.Phase] = []
        self.compiling: list[tuple[float, float]] = []
        self.programs, self.thread = 0, threading.get_ident()

    def __enter__(self) -> Stopwatch:
        monitoring.register_event_duration_secs_listener(self.on_event)
        return self

    def __exit__(self, *_) -> None:
        monitoring.unregister_event_duration_listener(self.on_event)

    def on_event(self, event: str, seconds: float, **_) -> None:
        """JAX's listener: an event that took `seconds` has just ended."""
        self.programs += event == COMPILATION
        if event in COMPILING and threading.get_ident() == self.thread:
            now = self.clock()
            self.compiling.append((now - seconds, now))

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Context whose seconds count for timing_s/name. On an error `tell` is not called: its last call names the phase."""
        outer = self.switch_to(name)
        try:
            yield
        except BaseException:
            self.switch_to(outer, reports=False)
            raise
        self.switch_to(outer)

    def switch_to(self, name: str, reports: bool = True) -> str:
        """Ends the current phase and starts the named one; returns the name of the ended one."""
        before, now = self.phase_name, self.clock()
        self.phases.append(timeline.Phase(before, self.since, now))
        self.phase_name, self.since = name, now
        if reports:
            self.tell(name)
        return before

    def lap(self) -> dict[str, float]:
        """Ends the lap and returns its seconds as metrics.

        timing_s/* of the phases add up to timing_s/step. A second in which several programs compiled
        counts once, for the phase that it was in.
        """
        self.switch_to(self.phase_name)
        phases, compiling, programs = self.phases, self.compiling, self.programs
        self.phases, self.compiling, self.programs = [], [], 0
        self.lapped = phases

        seconds: dict[str, float] = defaultdict(float)
        spent: dict[str, float] = defaultdict(float)
        for name, start, end in phases:
            seconds[f"timing_s/{name}"] += end - start
            clipped = [(max(start, begun), min(end, ended)) for begun, ended in compiling]
            spent[f"perf/compile_s/{name}"] += covered(clipped)
        step = {"timing_s/step": sum(seconds.values()), "perf/compiles": programs}
        step["perf/compile_s"] = sum(spent.values())
        return {**seconds, **{name: value for name, value in spent.items() if value}, **step}


def of_rollout(
    config: Config, prompts: Sequence[Prompt], rollout: RolloutResult, scores: Mapping[int, Score]
) -> dict[str, float]:
    """Metrics of rewards, lengths and speed of a step's rollout."""
    ordered = [scores[answer.uid] for answer in rollout.completions]
    values = np.array([score.value for score in ordered])
    lengths = np.array([len(answer.tokens) for answer in rollout.completions])
    prompt_lengths = np.array([len(prompt.tokens) for prompt in prompts])

    terms: dict[str, list[float]] = defaultdict(list)
    for score in ordered:
        for term, value in score.parts.items():
            terms[term].append(value)

    return {
        **statistics("reward", values, ("mean", "std", "min", "max")),
        **{f"reward/terms/{term}": float(np.mean(part)) for term, part in terms.items()},
        **{
            f"reward/failures/{kind}": sum(score.failure == kind for score in ordered)
            for kind in ("timeout", "crash", "error")
        },
        **statistics("prompt_length", prompt_lengths, ("mean", "max")),
        **statistics(
            "response_length", lengths, ("mean", "min", "max", "p50", "p75", "p90", "p99")
        ),
        "response_length/clip_ratio": float(
            np.mean([answer.finish == LENGTH for answer in rollout.completions])
        ),
        "response_length/nonfinite": sum(
            answer.finish == NONFINITE for answer in rollout.completions
        ),
        "perf/tokens_per_second": rollout.stats["tokens_per_second"],
        "perf/total_num_tokens": int(lengths.sum() + prompt_lengths.sum() * config.rollout.samples),
        "perf/idle_ratio": idle_share(rollout.spans, config.mesh.data, rollout.compile_waits),
        **of_groups(rollout, config.mesh.data),
        "perf/rounds": rollout.stats["rounds"],
        "perf/row_rounds": rollout.stats["row_rounds"],
        "perf/padding_ratio": padding(rollout),
        "perf/programs": rollout.stats["programs"],
        "perf/taken_ratio": taken(rollout.measurements),
        "perf/max_memory_gib": peak_memory() / 2**30,
    }


def taken(measurements: Sequence[Measurement]) -> float:
    """The mean share of the processors that others took, by the chunks' seconds; 0 without a chunk."""
    seconds = sum(one.seconds for one in measurements)
    return sum(one.seconds * one.taken for one in measurements) / seconds if seconds else 0.0


def of_groups(rollout: RolloutResult, groups: int) -> dict[str, float]:
    """Busy, idle and compile-wait seconds of every data group; the three add up to the rollout's seconds.

    With more than MOST_GROUPS groups: min, mean and max of each, and the group that ended last. With environments also the
    share of their seconds in which groups waited for replies alone.
    """
    window = 0.0, rollout.stats["seconds"]
    seconds = group_seconds(rollout.spans, rollout.compile_waits, groups, window)
    found = {}
    if (awaited := rollout.stats.get("awaited")) is not None:
        found["idle/environment"] = awaited / (groups * window[1])
    if groups <= timeline.MOST_GROUPS:
        return found | {
            f"group/{name}_s@{group}": value
            for group, one in enumerate(seconds)
            for name, value in one._asdict().items()
        }
    found["group/latest"] = timeline.latest(rollout.spans, groups)[0]
    for name, values in zip(GroupSeconds._fields, np.array(seconds).T, strict=True):
        found |= statistics(f"group/{name}_s", values, ("min", "mean", "max"))
    return found


def of_update(
    updates: Sequence[Mapping[str, float]], rewards: np.ndarray, advantages: np.ndarray, fill: float
) -> dict[str, float]:
    """Metrics of the optimizer steps on one rollout; `fill`: filled share of the packed rows.

    Means over tokens or answers are over those of all steps. Of the steps that had targets: means of OF_STEPS, the maximum
    of maxima, and the last counter and learning rate.
    """
    learned = [update for update in updates if update[losses.TOKENS]] or updates

    def merge(name: str) -> float:
        values = [float(update[name]) for update in learned]
        if name in ("nonfinite", "lr"):
            return values[-1]
        if name.endswith("_max"):
            return max(values)
        counts = [float(update[losses.divisor(name)]) for update in learned]
        is_weighted = name not in OF_STEPS and any(counts)
        return float(np.average(values, weights=counts if is_weighted else None))

    counts = (losses.TOKENS, losses.ANSWERS, EMPTY)
    merged = {name: merge(name) for name in updates[0] if name not in counts}
    return {
        **{name if "/" in name else f"actor/{name}": value for name, value in merged.items()},
        f"actor/{EMPTY}": sum(bool(update[EMPTY]) for update in updates),
        "actor/packed_ratio": fill,
        "groups/zero_variance": float(zero_variance(rewards).mean()),
        **statistics("advantages", advantages, ("mean", "min", "max")),
    }


def of_step(
    dataset: Dataset,
    position: int,
    scalars: Mapping[str, float],
    watch: Stopwatch,
    job: Job,
) -> dict[str, float]:
    """Ends the step's lap; its seconds, throughput in tokens per second, and epochs so far; `position`: of the data.

    A collective of all processes: compile seconds are those of the process that compiled longest.
    """
    seconds = watch.lap()
    seconds |= most_compiling([json.loads(lap) for lap in job.gather(json.dumps(seconds).encode())])
    training = seconds["timing_s/step"] - seconds.get("timing_s/eval", 0.0)
    rows = {}
    if dataset.rows:
        rows = {
            "training/epoch": position / dataset.rows,
            "training/rows_dropped": dataset.dropped,
        }
    return seconds | rows | {"perf/throughput": scalars["perf/total_num_tokens"] / training}


def phases(watch: Stopwatch, began: float) -> list[timeline.Phase]:
    """The phases of the step that has just ended, in seconds since its rollout `began`."""
    return [
        timeline.Phase(name, start - began, end - began)
        for name, start, end in watch.lapped
        if name != OTHER
    ]


def seconds_without(scalars: Mapping[str, float], *phases: str) -> float:
    """Seconds of a step without compiling and without these phases."""

    def of(phase: str) -> float:
        compiling = scalars.get(f"perf/compile_s/{phase}", 0.0)
        return max(scalars.get(f"timing_s/{phase}", 0.0) - compiling, 0.0)

    whole = scalars["timing_s/step"] - scalars["perf/compile_s"]
    return max(whole - sum(of(phase) for phase in phases), 0.0)


def most_compiling(laps: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The perf/compile* metrics of the process that compiled longest, from the laps of all processes."""
    longest = max(laps, key=lambda lap: lap["perf/compile_s"])
    parts = {name for lap in laps for name in lap if name.startswith("perf/compile")}
    return {name: longest.get(name, 0.0) for name in parts}


def of_drafting(drafter_kind: str, rollout: RolloutResult) -> dict[str, float]:
    """The metrics speculation/* of a rollout; empty when no chunk drafted.

    `drafter_kind`: drafter of strategies that name none.
    """
    drafted = [one for one in rollout.measurements if one.strategy != PLAIN]
    if not drafted:
        return {}

    stats, tokens, row_rounds = rollout.stats, Counter(), Counter()
    for one in drafted:
        tokens[one.strategy.drafter] += one.tokens
        row_rounds[one.strategy.drafter] += one.row_rounds
    named = {name: tokens[name] / row_rounds[name] for name in tokens if name}  # by a strategy
    found = {
        "accept_length": stats["accept_length"],
        **{f"accept_length/{name}": value for name, value in named.items()},
        "share": stats["speculated_tokens"] / stats["tokens"],
        "declined": stats["declined"] / sum(one.row_rounds for one in drafted),
        "pool_programs": stats["pool_programs"],
        "pool_mib": stats["pool_bytes"] / 2**20,
        "switches": switches(rollout.measurements),
        "catch_up_s": sum(one.end - one.start for one in rollout.spans if one.kind == "catch_up"),
        "explored_s": sum(one.seconds for one in rollout.measurements if one.is_exploring),
    }
    if not named:
        found[f"accept_length/{drafter_kind}"] = stats["accept_length"]

    # Share of the rounds with a tree at least so deep that accept a node of this depth.
    for depth in range(1, max(one.strategy.depth for one in drafted) + 1):
        deep = [one for one in drafted if one.strategy.depth >= depth]
        hits = sum(int(one.hits[depth - 1].sum()) for one in deep)
        found[f"accept_rate@{depth}"] = hits / sum(one.row_rounds for one in deep)

    for batch in sorted({one.batch for one in rollout.measurements}):
        same = [one for one in rollout.measurements if one.batch == batch]
        nodes = sum(one.strategy.nodes * one.rounds for one in same)
        found[f"nodes@{batch}"] = nodes / sum(one.rounds for one in same)
        for name, is_plain in (("plain_round_ms", True), ("round_ms", False)):
            times = [
                1e3 * one.seconds / one.rounds
                for one in same
                if (one.strategy == PLAIN) == is_plain
            ]
            if times:
                found[f"{name}@{batch}"] = float(np.median(times))

    errors = [
        abs(math.log(one.promised * one.seconds / one.tokens))
        for one in rollout.measurements
        if one.promised > 0 and one.is_timed
    ]
    if errors:
        found["prediction_error"] = float(np.median(errors))
    return {f"speculation/{name}": value for name, value in found.items()}


def switches(measurements: Sequence[Measurement]) -> int:
    """How often a data group decoded a chunk with another strategy than the chunk before."""
    by_group = defaultdict(list)
    for one in sorted(measurements, key=lambda one: one.number):
        by_group[one.group].append(one.strategy)
    return sum(a != b for strategies in by_group.values() for a, b in pairwise(strategies))


def chunks(drafter_kind: str, rollout: RolloutResult) -> list[ChunkRecord]:
    """The lines of the speculation file, one per chunk, in the order in which results arrived.

    Empty when speculation.drafter is none.
    """
    return [line(one) for one in rollout.measurements] if drafter_kind != schema.NONE else []


def line(one: Measurement) -> ChunkRecord:
    """A measurement as a line of the file; `accepted` is empty for plain decoding."""
    held, accepted = [int(one.row_rounds), *one.hits.sum((1, 2)).astype(int).tolist(), 0], []
    if one.strategy != PLAIN:
        accepted = [more - less for more, less in zip(held, held[1:], strict=False)]
    return ChunkRecord(
        one.group, one.number, one.batch, one.live, one.slots, strategies.name(one.strategy), one.reason,
        None if math.isnan(one.promised) else one.promised, one.tokens / one.seconds, one.tokens, one.rounds,
        one.seconds, accepted, one.is_timed, one.taken,
    )  # fmt: skip


class Profiler:
    """Context that writes a jax.profiler trace of the steps profile.steps to the run folder."""

    def __init__(self, config: Config):
        self.steps = validate.profile_steps(config)
        self.folder = str(Path(config.run) / "profile")
        self.is_on = False

    def __enter__(self) -> Profiler:
        return self

    def __exit__(self, *_) -> None:
        self.stop()

    def enter(self, step: int) -> None:
        """Starts the trace before the first of the steps."""
        if step in self.steps and not self.is_on:
            jax.profiler.start_trace(self.folder)
            self.is_on = True

    def leave(self, step: int) -> None:
        """Ends the trace after the last of consecutive steps."""
        if step + 1 not in self.steps:
            self.stop()

    def stop(self) -> None:
        """Writes the trace, if one is running."""
        if self.is_on:
            jax.profiler.stop_trace()
            self.is_on = False


def padding(rollout: RolloutResult) -> float:
    """Share of the row rounds that no live sequence used."""
    rows = sum(one.batch * one.rounds for one in rollout.measurements)
    return 1.0 - sum(one.row_rounds for one in rollout.measurements) / rows if rows else 0.0


def statistics(prefix: str, values: np.ndarray, names: Sequence[str]) -> dict[str, float]:
    """Named statistics of the values: mean, std, min, max, or pNN for a percentile."""
    return {
        f"{prefix}/{name}": float(
            np.percentile(values, int(name[1:]))
            if name[1:].isdigit()
            else getattr(np, name)(values)
        )
        for name in names
    }


def peak_memory() -> int:
    """Peak bytes in use of the first device, or of this process where devices do not report it."""
    memory = jax.local_devices()[0].memory_stats() or {}
    if "peak_bytes_in_use" in memory:
        return memory["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
