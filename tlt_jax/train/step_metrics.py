"""Metrics, timings and records of an RL step, and the lines of its speculation file."""

from __future__ import annotations

import json
import math
import resource
import sys
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import jax
import numpy as np

from tlt_jax.config import Config, schema, validate
from tlt_jax.data.dataset import Dataset
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.distributed.job import Job
from tlt_jax.metrics import (
    ChunkRecord,
    GroupSeconds,
    Record,
    group_seconds,
    idle_share,
    timeline,
)
from tlt_jax.rewards import Score
from tlt_jax.rollout.recorder import LENGTH, NONFINITE, RolloutResult
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.train import losses
from tlt_jax.train.accounts import OTHER, Stopwatch
from tlt_jax.train.advantages import zero_variance
from tlt_jax.train.policy_update import EMPTY
from tlt_jax.tuner.interface import Measurement

# Of an optimizer step, and not of its tokens or answers.
OF_STEPS = ("loss", "pg_loss", "grad_norm", "reward_kl_penalty")


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
        "perf/max_memory_gib": peak_memory() / 2**30,
    }


def of_groups(rollout: RolloutResult, groups: int) -> dict[str, float]:
    """Busy, idle and compile-wait seconds of every data group; the three add up to the rollout's seconds.

    With more than MOST_LANES groups: min, mean and max of each, and the group that ended last.
    """
    window = 0.0, rollout.stats["seconds"]
    seconds = group_seconds(rollout.spans, rollout.compile_waits, groups, window)
    if groups <= timeline.MOST_GROUPS:
        return {
            f"group/{name}_s@{group}": value
            for group, one in enumerate(seconds)
            for name, value in one._asdict().items()
        }
    found = {"group/latest": timeline.latest(rollout.spans, groups)[0]}
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
        timeline.Phase(name, span.begin - began, span.end - began)
        for name, span in watch.lapped
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

    whole = {f"accept_length/{drafter_kind}": rollout.stats["accept_length"]}
    found = {
        "accept_length": rollout.stats["accept_length"],
        **(accept_lengths(drafted) or whole),
        "share": rollout.stats["speculated_tokens"] / rollout.stats["tokens"],
        "declined": rollout.stats["declined"] / sum(one.row_rounds for one in drafted),
        "pool_programs": rollout.stats["pool_programs"],
        "pool_mib": rollout.stats["pool_bytes"] / 2**20,
        **rates(drafted),
        **by_batch(rollout.measurements),
    }

    errors = [
        abs(math.log(one.promised * one.seconds / one.tokens))
        for one in rollout.measurements
        if one.promised > 0 and one.is_timed
    ]
    if errors:
        found["prediction_error"] = float(np.median(errors))
    return {f"speculation/{name}": value for name, value in found.items()}


def accept_lengths(drafted: Sequence[Measurement]) -> dict[str, float]:
    """accept_length/DRAFTER of each drafter that strategies name: tokens per sequence and drafting round."""
    tokens, row_rounds = Counter(), Counter()
    for one in drafted:
        if drafter := one.strategy.drafter:
            tokens[drafter] += one.tokens
            row_rounds[drafter] += one.row_rounds
    return {f"accept_length/{drafter}": tokens[drafter] / row_rounds[drafter] for drafter in tokens}


def rates(drafted: Sequence[Measurement]) -> dict[str, float]:
    """accept_rate@d: share of the rounds with a tree at least d deep that accept a node of depth d."""
    found = {}
    for depth in range(1, max(one.strategy.depth for one in drafted) + 1):
        deep = [one for one in drafted if one.strategy.depth >= depth]
        hits = sum(int(one.hits[depth - 1].sum()) for one in deep)
        found[f"accept_rate@{depth}"] = hits / sum(one.row_rounds for one in deep)
    return found


def by_batch(measurements: Sequence[Measurement]) -> dict[str, float]:
    """Mean tree nodes, and median milliseconds of a round, by batch bucket."""
    found = {}
    for batch in sorted({one.batch for one in measurements}):
        same = [one for one in measurements if one.batch == batch]
        found[f"nodes@{batch}"] = sum(one.strategy.nodes * one.rounds for one in same) / sum(
            one.rounds for one in same
        )

        plain = [1e3 * one.seconds / one.rounds for one in same if one.strategy == PLAIN]
        drafting = [1e3 * one.seconds / one.rounds for one in same if one.strategy != PLAIN]
        for name, times in (("plain_round_ms", plain), ("round_ms", drafting)):
            if times:
                found[f"{name}@{batch}"] = float(np.median(times))
    return found


def chunks(drafter_kind: str, rollout: RolloutResult) -> list[ChunkRecord]:
    """The lines of the speculation file, one per chunk, in the order in which results arrived.

    Empty when speculation.drafter is none.
    """
    return [line(one) for one in rollout.measurements] if drafter_kind != schema.NONE else []


def line(one: Measurement) -> ChunkRecord:
    """A measurement as a line of the file."""
    return ChunkRecord(
        one.group,
        one.number,
        one.batch,
        one.live,
        one.slots,
        strategies.name(one.strategy),
        one.reason,
        None if math.isnan(one.promised) else one.promised,
        one.tokens / one.seconds,
        one.tokens,
        one.rounds,
        one.seconds,
        accepted(one),
        one.is_timed,
    )


def accepted(one: Measurement) -> list[int]:
    """Number of row rounds that accepted 0, 1, ... drafted tokens; empty for plain decoding."""
    if one.strategy == PLAIN:
        return []
    held = [int(one.row_rounds), *one.hits.sum((1, 2)).astype(int).tolist(), 0]
    return [more - less for more, less in zip(held, held[1:], strict=False)]


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


def records(
    prompts: Sequence[Prompt],
    rollout: RolloutResult,
    scores: Mapping[int, Score],
    told: Mapping[int, tuple[str, float]],
    advantages: np.ndarray,
) -> list[Record]:
    """The lines of the completions file, one per answer.

    `told`: text and log-prob sum by uid; advantages: float[answers], in their order.
    """
    return [
        Record(
            uid=answer.uid,
            prompt=prompts[answer.prompt].text,
            completion=told[answer.uid][0],
            reward=scores[answer.uid].value,
            length=len(answer.tokens),
            finish=answer.finish,
            parts=scores[answer.uid].parts,
            failure=scores[answer.uid].failure,
            id=prompts[answer.prompt].id,
            group=answer.prompt,
            reference=str(prompts[answer.prompt].row["answer"]),
            advantage=float(advantage),
            logprob=told[answer.uid][1],
            accepted=answer.accepted,
        )
        for answer, advantage in zip(rollout.completions, advantages, strict=True)
    ]


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
