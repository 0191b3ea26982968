"""The cost table of real runs, from what their folders keep: chunks, scalars, log and timelines. Imports no JAX."""

from __future__ import annotations

import json
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from tlt_jax import atomic
from tlt_jax.config import Config, load as loading
from tlt_jax.config.schema import ADAPTIVE, LOG, NGRAM, RESOLVED
from tlt_jax.data import packing
from tlt_jax.errors import ConfigError, DataError
from tlt_jax.metrics import timeline
from tlt_jax.metrics.run import Run, open_run
from tlt_jax.models import from_config
from tlt_jax.simulate.cost_table import CAPTURED, CPU, DRAFTERS, FEATURES, MEASURED, CostRow, normal
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, PLAIN, Strategy

LEAST_ROUNDS = 4  # of a chunk whose seconds count
LEAST_GAP = 2e-4  # seconds between two programs above which the device was idle
COMPILED = re.compile(
    r"(compiled|loaded) chunk of \d+ rounds, (\S+), of (\d+ x \d+), group \d+ in ([\d.]+) s:"
)
# Programs with the scalar of their seconds, without those of compiling in the same part.
CALLS = {
    "publish": "update_weights", "reward": "reward", "save": "save_checkpoint",
}  # fmt: skip


def of_runs(folders: Sequence[Path]) -> tuple[list[CostRow], dict[str, str]]:
    """The rows of runs of the same policy and devices, and the facts of the table's head.

    Raises ConfigError for a run without steps, runs on different devices, and when no run kept plain chunks.
    """
    opened, names = [open_run(folder) for folder in folders], ", ".join(map(str, folders))
    configs = [loading.read_resolved(folder / RESOLVED) for folder in folders]
    devices = {(bool(one.mesh.fake_devices), one.mesh.model) for one in configs}
    if len(devices) > 1:
        raise ConfigError(
            f"{names}: their data groups have different devices (mesh.model, mesh.fake_devices): record "
            "them apart"
        )
    rows = [
        row
        for run, config in zip(opened, configs, strict=True)
        for rows in (
            rounds(run.folder, config), calls(run, config), hosts(run, run.folder),
            micro_steps(run, run.folder), compilations(run.folder),
        )
        for row in rows
    ]  # fmt: skip
    if not any(row.program == "round" and row.strategy == PLAIN for row in rows):
        raise ConfigError(
            f"{names}: no plain chunks were kept to measure: record a run with --speculation.drafter ngram "
            "or adaptive, and a tuner that is not fixed"
        )
    config = configs[0]
    facts = {"device": CPU} if config.mesh.fake_devices else {}
    if all(captures_features(folder, one) for folder, one in zip(folders, configs, strict=True)):
        facts |= {FEATURES: CAPTURED}
    return rows, facts | {
        "policy": config.model.path or "a new one", "devices": str(config.mesh.model),
        "measured": ", ".join(f"{run.folder.name}, {run.steps} steps" for run in opened),
        "made by": "python -m tlt_jax.simulate --record",
    }  # fmt: skip


def captures_features(folder: Path, config: Config) -> bool:
    """Whether the rounds of a run capture features: it is adaptive, and began with a learned drafter or drafted with one."""
    return config.speculation.drafter == ADAPTIVE and (
        from_config.start_directory(config) is not None
        or any(
            strategies.parse(json.loads(line)["strategy"]).drafter in (LEARNED, MERGED)
            for path in folder.glob("speculation/*.jsonl")
            for line in atomic.lines(path)
        )
    )


def rounds(folder: Path, config: Config) -> Iterator[CostRow]:
    """The median seconds of a round of every shape and strategy, of chunks that were timed."""
    found: dict[tuple[int, int, Strategy], list[float]] = defaultdict(list)
    for path in sorted(folder.glob("speculation/*.jsonl")):
        for number, line in enumerate(atomic.lines(path), 1):
            one = chunk(path, number, line)
            if one["is_timed"] and one["rounds"] >= LEAST_ROUNDS:
                cell = one["batch"], one["slots"], strategies.parse(one["strategy"])
                found[cell].append(one["seconds"] / one["rounds"])
    for cell in sorted(found, key=lambda one: (*one[:2], strategies.name(one[2]))):
        rows, slots, strategy = cell
        seconds, note = float(np.median(found[cell])), f"median of {len(found[cell])} chunks"
        drafter, bare = drafter_of(strategy, config), replace(strategy, drafter="")
        yield CostRow("round", seconds, MEASURED, rows, slots, 0.0, bare, drafter, note=note)


def chunk(path: Path, number: int, line: bytes) -> Mapping:
    """A line of a speculation file. Raises DataError, with the line, when it is none."""
    try:
        found = json.loads(line)
        return {name: found[name] for name in ("batch", "slots", "strategy", "rounds", "seconds", "is_timed")}  # fmt: skip
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{path}, line {number}: no chunk of this version: {error}") from error


def drafter_of(strategy: Strategy, config: Config) -> str:
    """The kind of drafter by which a chunk drafted, "" for a plain one."""
    if strategy == PLAIN:
        return ""
    if normal(strategy).drafter == NGRAM or config.speculation.drafter == NGRAM:
        return NGRAM
    kind = config.drafter_training.kind if config.speculation.drafter == ADAPTIVE else "eagle3"
    return kind if kind in DRAFTERS else "eagle3"


def calls(run: Run, config: Config) -> Iterator[CostRow]:
    """The median seconds of the other parts of a step."""
    steps = run.metrics.get("timing_s/step")
    if steps is None:
        raise ConfigError(f"{run.folder} has no complete step yet: nothing to measure")
    for program, part in CALLS.items():
        if found := list(without_compiling(run, part).values()):
            note = f"median of {len(found)} steps"
            yield CostRow(program, float(np.median(found)), MEASURED, note=note)
    yield from updates(run, config)
    yield from drafter_updates(run, config)
    rest = [by_step(run, f"timing_s/{part}") for part in ("metrics", "other")]
    other = [sum(part.get(step, 0.0) for part in rest) for step in steps.steps.tolist()]
    if np.median(other) > 0:
        yield CostRow(
            "other", float(np.median(other)), MEASURED, note="metrics and the rest of a step"
        )


def without_compiling(run: Run, part: str) -> dict[int, float]:
    """Seconds of a part of the steps in which it took some and compiled nothing."""
    compiling = by_step(run, f"perf/compile_s/{part}")
    found = by_step(run, f"timing_s/{part}").items()
    return {step: seconds for step, seconds in found if seconds > 0 and not compiling.get(step)}


def updates(run: Run, config: Config) -> Iterator[CostRow]:
    """The median seconds of updates of each number of accumulation steps, by their tokens on a data group with padding.

    With those of the log-probs of the policy before them, and of the reference, where a run computes these.
    """
    scored = by_step(run, "timing_s/old_log_prob")
    compiling = by_step(run, "perf/compile_s/old_log_prob")
    tokens, filled = by_step(run, "perf/total_num_tokens"), by_step(run, "actor/packed_ratio")
    whole, found = packing.step_tokens(config), defaultdict(list)
    for step, seconds in without_compiling(run, "update").items():
        if tokens.get(step) and not compiling.get(step):
            count = max(round(tokens[step] / filled.get(step, 1.0) / whole), 1)
            found[count].append(seconds + scored.get(step, 0.0))
    for count, seconds in sorted(found.items()):
        note = f"{count} accumulation steps; median of {len(seconds)} steps"
        held = count * whole / config.mesh.data
        yield CostRow("update", float(np.median(seconds)), MEASURED, tokens=held, note=note)


def drafter_updates(run: Run, config: Config) -> Iterator[CostRow]:
    """The median seconds of an accumulation step of the drafter's update."""
    tokens, steps = by_step(run, "drafter/update_tokens"), by_step(run, "drafter/update_steps")
    found = [
        (seconds / steps[step], tokens[step] / steps[step] / config.mesh.data)
        for step, seconds in without_compiling(run, "drafter").items()
        if steps.get(step) and tokens.get(step)
    ]
    if found:
        seconds, held = np.median(np.array(found), axis=0)
        note = f"an accumulation step; median of {len(found)} steps"
        yield CostRow("drafter_update", float(seconds), MEASURED, tokens=float(held), note=note)


def by_step(run: Run, name: str) -> dict[int, float]:
    """A metric by step; empty when the run has none."""
    found = run.metrics.get(name)
    return (
        {} if found is None else dict(zip(found.steps.tolist(), found.values.tolist(), strict=True))
    )


def spans_of(path: Path) -> tuple[dict[int, list[tuple[float, float, str]]], float]:
    """(start, end, kind) of the spans of each data group in a timeline, in order, and when the rollout began; seconds."""
    groups: dict[int, list[tuple[float, float, str]]] = defaultdict(list)
    began = 0.0
    for event in json.loads(path.read_text(encoding="utf-8"))["traceEvents"]:
        if event["ph"] == "X" and event["pid"] == timeline.ROLLOUT:
            start = event["ts"] / 1e6
            groups[event["tid"]].append((start, start + event["dur"] / 1e6, event["name"]))
        elif event["ph"] == "X" and event["name"] == "rollout":
            began = event["ts"] / 1e6
    return {group: sorted(spans) for group, spans in groups.items()}, began


def hosts(run: Run, folder: Path) -> Iterator[CostRow]:
    """What the host takes before a rollout's first program, and before one on an idle device: of steps that compile nothing."""
    compiles, begins, gaps = by_step(run, "perf/compiles"), [], []
    for path in sorted(folder.glob("timeline/*.json")):
        if compiles.get(int(path.stem), 0.0):
            continue
        groups, began = spans_of(path)
        begins += [min(spans[0][0] for spans in groups.values()) - began] if groups else []
        for spans in groups.values():
            decoding = [span for span in spans if span[2] in timeline.DECODING]
            apart = [after[0] - before[1] for before, after in pairwise(decoding)]
            gaps += [gap for gap in apart if gap > LEAST_GAP]
    for program, found in (("begin", begins), ("host", gaps)):
        if found and np.median(found) > 0:
            note = f"median of {len(found)}"
            yield CostRow(program, float(np.median(found)), MEASURED, note=note)


def micro_steps(run: Run, folder: Path) -> Iterator[CostRow]:
    """Micro-steps of idle drafter training: the median span of the timelines, and the tokens of one."""
    taken = [
        end - start
        for path in folder.glob("timeline/*.json")
        for spans in spans_of(path)[0].values()
        for start, end, kind in spans
        if kind == "train"
    ]
    tokens, steps = by_step(run, "drafter/tokens"), by_step(run, "drafter/steps")
    each = [tokens[step] / steps[step] for step in steps if steps[step] and tokens.get(step)]
    if taken and each:
        note = f"median of {len(taken)} spans"
        seconds, count = float(np.median(taken)), float(np.median(each))
        yield CostRow("micro_step", seconds, MEASURED, tokens=count, note=note)


def compilations(folder: Path) -> Iterator[CostRow]:
    """The median seconds in which the chunks of each strategy became available, as the log has them.

    Of each chunk the first time: other data groups of a process share it. What came from the compile cache counts as loaded,
    so a similar run loads it too.
    """
    path, firsts = folder / LOG, {}
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := COMPILED.search(line):
            how, strategy, sizes, seconds = match.groups()
            firsts.setdefault((strategies.parse(strategy), sizes), (how, float(seconds)))
    found: dict[Strategy, list[tuple[str, float]]] = defaultdict(list)
    for (strategy, _), first in firsts.items():
        found[replace(strategy, drafter="")].append(first)
    for strategy, each in found.items():
        hows = Counter(how for how, _ in each)
        note = ", ".join(f"{how} {count}" for how, count in sorted(hows.items()))
        seconds = float(np.median([seconds for _, seconds in each]))
        yield CostRow("compile", seconds, MEASURED, strategy=strategy, note=f"{note} chunks")
