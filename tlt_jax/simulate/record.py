"""The cost table of a real run, from what its folder keeps: chunks, scalars, log and timelines. Imports no JAX."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tlt_jax.config import Config, load as loading
from tlt_jax.config.outputs import LOG, RESOLVED
from tlt_jax.config.schema import ADAPTIVE, NGRAM
from tlt_jax.data import packing
from tlt_jax.errors import ConfigError, DataError
from tlt_jax.metrics import timeline
from tlt_jax.metrics.run import Run, open_run
from tlt_jax.simulate.cost_table import CPU, DRAFTERS, MEASURED, Row, normal
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

LEAST_ROUNDS = 4  # of a chunk whose seconds count
LEAST_GAP = 2e-4  # seconds between two programs above which the device was idle
COMPILED = re.compile(r"(compiled|loaded) chunk of \d+ rounds, (\S+), of .* in ([\d.]+) s:")
# Programs with the scalar of their seconds, without those of compiling in the same part.
CALLS = {
    "publish": "update_weights", "reward": "reward", "save": "save_checkpoint",
}  # fmt: skip


class Cell(NamedTuple):
    """What the seconds of a round depend on."""

    rows: int
    slots: int
    strategy: Strategy


def of_run(folder: Path) -> tuple[list[Row], dict[str, str]]:
    """The rows of a run, and the facts of the table's head.

    Raises ConfigError for a run without chunks or steps.
    """
    run, config = open_run(folder), loading.read_resolved(folder / RESOLVED)
    rows = [
        *rounds(folder, config),
        *calls(run, config),
        *hosts(run, folder),
        *micro_steps(run, folder),
        *compilations(folder),
    ]
    device = {"device": CPU} if config.mesh.fake_devices else {}
    facts = device | {
        "policy": config.model.path or "a new one", "devices": str(config.mesh.model),
        "measured": f"{folder.name}, {run.steps} steps",
        "made by": "python -m tlt_jax.simulate --record",
    }  # fmt: skip
    return rows, facts


def rounds(folder: Path, config: Config) -> Iterator[Row]:
    """The median seconds of a round of every shape and strategy, of chunks that were timed."""
    found: dict[Cell, list[float]] = defaultdict(list)
    for path in sorted(folder.glob("speculation/*.jsonl")):
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            one = chunk(path, number, line)
            if one["is_timed"] and one["rounds"] >= LEAST_ROUNDS:
                cell = Cell(one["batch"], one["slots"], strategies.parse(one["strategy"]))
                found[cell].append(one["seconds"] / one["rounds"])
    if not any(cell.strategy == PLAIN for cell in found):
        raise ConfigError(
            f"{folder} kept no plain chunks to measure: record a run with --speculation.drafter ngram or adaptive"
        )
    for cell in sorted(found, key=lambda one: (one.rows, one.slots, strategies.name(one.strategy))):
        seconds, note = found[cell], f"median of {len(found[cell])} chunks"
        bare = Strategy(cell.strategy.depth, cell.strategy.topk, cell.strategy.nodes)
        drafter = drafter_of(cell.strategy, config)
        yield Row(
            "round", float(np.median(seconds)), MEASURED, cell.rows, cell.slots, 0.0, bare, drafter, note=note
        )  # fmt: skip


def chunk(path: Path, number: int, line: str) -> Mapping:
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


def calls(run: Run, config: Config) -> Iterator[Row]:
    """The median seconds of the other parts of a step."""
    steps = run.metrics.get("timing_s/step")
    if steps is None:
        raise ConfigError(f"{run.folder} has no complete step yet: nothing to measure")
    for program, part in CALLS.items():
        if found := list(without_compiling(run, part).values()):
            note = f"median of {len(found)} steps"
            yield Row(program, float(np.median(found)), MEASURED, note=note)
    yield from updates(run, config)
    yield from drafter_updates(run, config)
    rest = [by_step(run, f"timing_s/{part}") for part in ("metrics", "other")]
    other = [sum(part.get(step, 0.0) for part in rest) for step in steps.steps.tolist()]
    if np.median(other) > 0:
        yield Row("other", float(np.median(other)), MEASURED, note="metrics and the rest of a step")


def without_compiling(run: Run, part: str) -> dict[int, float]:
    """Seconds of a part of the steps in which it took some and compiled nothing."""
    compiling = by_step(run, f"perf/compile_s/{part}")
    found = by_step(run, f"timing_s/{part}").items()
    return {step: seconds for step, seconds in found if seconds > 0 and not compiling.get(step)}


def updates(run: Run, config: Config) -> Iterator[Row]:
    """The median seconds of updates of each number of accumulation steps, by their tokens on a data group with padding."""
    tokens, filled = by_step(run, "perf/total_num_tokens"), by_step(run, "actor/packed_ratio")
    whole, found = packing.step_tokens(config), defaultdict(list)
    for step, seconds in without_compiling(run, "update").items():
        if tokens.get(step):
            count = max(round(tokens[step] / filled.get(step, 1.0) / whole), 1)
            found[count].append(seconds)
    for count, seconds in sorted(found.items()):
        note = f"{count} accumulation steps; median of {len(seconds)} steps"
        held = count * whole / config.mesh.data
        yield Row("update", float(np.median(seconds)), MEASURED, tokens=held, note=note)


def drafter_updates(run: Run, config: Config) -> Iterator[Row]:
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
        yield Row("drafter_update", float(seconds), MEASURED, tokens=float(held), note=note)


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


def hosts(run: Run, folder: Path) -> Iterator[Row]:
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
            yield Row(program, float(np.median(found)), MEASURED, note=note)


def micro_steps(run: Run, folder: Path) -> Iterator[Row]:
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
        yield Row("micro_step", seconds, MEASURED, tokens=count, note=note)


def compilations(folder: Path) -> Iterator[Row]:
    """The median seconds of compiling a chunk of each strategy, as the log has them.

    Of a run all of whose chunks came from the compile cache, the seconds of loading them: so a similar run loads them too.
    """
    path, found = folder / LOG, {"compiled": defaultdict(list), "loaded": defaultdict(list)}
    if not path.is_file():
        return
    for line in path.read_text(encoding="utf-8").splitlines():
        if match := COMPILED.search(line):
            found[match[1]][strategies.parse(match[2])].append(float(match[3]))
    how = "compiled" if found["compiled"] else "loaded"
    for strategy, seconds in found[how].items():
        bare = Strategy(strategy.depth, strategy.topk, strategy.nodes)
        yield Row(
            "compile", float(np.median(seconds)), MEASURED, strategy=bare, note=f"{how} {len(seconds)} chunks"
        )  # fmt: skip
