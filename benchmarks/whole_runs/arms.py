"""Knows how the arms of whole RL steps run: as commands in folders of their own, in turns, with answers compared to plain's."""

from __future__ import annotations

import argparse
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from benchmarks.common import processes
from benchmarks.common.processes import ROOT
from benchmarks.whole_runs import runs
from benchmarks.whole_runs.in_turns import Turns
from benchmarks.whole_runs.runs import Run, first_difference

PLAIN, CACHES = "plain", ("cold", "warm")
IN_TURNS = "benchmarks.whole_runs.in_turns"
# With XLA's own caches JAX identifies programs by the path of their folder, which differs between arms.
VARIABLES = {"PYTHON": sys.executable, "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none"}


class Failure(Exception):
    """Ends the benchmark: a command that fails, or answers that differ."""


def command(*arguments: str) -> float:
    """Runs a module of the product; its seconds. Raises Failure with its last lines."""
    begin = time.perf_counter()
    done = processes.run(processes.module(*arguments), **VARIABLES)
    check(shlex.join(arguments), done.returncode, done.stdout + done.stderr)
    return time.perf_counter() - begin


def check(name: str, code: int, output: str) -> None:
    """Raises Failure, with the last lines of the output, for an exit code that is not 0."""
    if code:
        tail = "\n".join(output.splitlines()[-15:])
        raise Failure(f"{name} ended with code {code}:\n{tail}")


def started(arguments: Sequence[str], count: int, folder: Path) -> Turns:
    """The training command as `count` processes, stopped before its first step."""
    start = processes.module(IN_TURNS, *arguments)
    if count > 1:
        start = [str(ROOT / "launch" / "local.sh"), str(count), *arguments]
    return Turns(start, processes.environment(MODULE=IN_TURNS, **VARIABLES), count, folder)


def say(text: str) -> None:
    """Reports progress on stderr, outside the report."""
    print(text, file=sys.stderr, flush=True)


def take_turn(
    args: argparse.Namespace, shared: Sequence[str], arms: Mapping[str, Sequence[str]], turn: int
) -> dict[tuple[str, str], Run]:
    """The runs of one turn by (cache, arm). Raises Failure when an arm's answers or policy differ from plain's."""
    found: dict[tuple[str, str], Run] = {}
    kept = args.work / "programs" / "kept"
    if CACHES[0] in args.caches:
        shutil.rmtree(kept, ignore_errors=True)
    for cache in args.caches:
        is_cold = cache == CACHES[0]
        folders = {arm: args.work / "runs" / f"{turn}_{cache}_{arm}" for arm in arms}
        programs = {arm: args.work / "programs" / f"of_{arm}" for arm in arms}
        arguments: dict[str, list[str]] = {}
        for arm, changes in arms.items():
            for folder in (folders[arm], programs[arm], stops(folders[arm])):
                shutil.rmtree(folder, ignore_errors=True)
            if not is_cold:
                shutil.copytree(kept, programs[arm])
            arguments[arm] = [
                "--config", args.config, *shared, *changes, "--run", str(folders[arm]),
                "--rollout.compile_cache", str(programs[arm]), "--log.texts_every", "1",
            ]  # fmt: skip
            if is_cold and args.cold_steps:
                arguments[arm] += ["--train.steps", str(args.cold_steps)]
        for arm, seconds in walls(arguments, folders, args.processes, args.by_step):
            name = f"turn {turn}, {cache}, {arm}"
            shutil.rmtree(folders[arm] / "checkpoints", ignore_errors=True)
            if is_cold:  # files of the same name are the same program
                shutil.copytree(programs[arm], kept, dirs_exist_ok=True)
            found[cache, arm] = run = runs.read_run(folders[arm], seconds)
            say(f"{name}: steps {run.seconds:.1f} s, process {seconds:.1f} s")
            compare(found[cache, PLAIN], run, name, args.may_differ)
    return found


def stops(folder: Path) -> Path:
    """Where the processes of a run report that they have stopped."""
    return folder.with_name(f"{folder.name}.turns")


def walls(
    arguments: Mapping[str, Sequence[str]], folders: Mapping[str, Path], count: int, by_step: bool
) -> Iterator[tuple[str, float]]:
    """Arms that have ended and the seconds that each ran; they run one after another, or in turns step by step."""
    together = [list(arguments)] if by_step else [[arm] for arm in arguments]
    for arms in together:
        running: dict[str, Turns] = {}
        try:
            for arm in arms:
                running[arm] = started(arguments[arm], count, stops(folders[arm]))
            waiting = list(arms)
            while waiting:
                waiting = [arm for arm in waiting if goes_on(arm, running[arm])]
            for arm in arms:
                yield arm, running[arm].seconds
        finally:
            for one in running.values():
                one.end()


def goes_on(arm: str, run: Turns) -> bool:
    """Whether a run continues after its next turn. Raises Failure when it failed."""
    goes = run.go_on()
    check(arm, run.run.returncode or 0, run.output.read_text(errors="replace"))
    return goes


def compare(plain: Run, run: Run, name: str, may_differ: bool) -> None:
    """Reports where answers or policy differ from plain's. Raises Failure unless they may."""
    difference = first_difference(plain, run)
    if difference and not may_differ:
        raise Failure(f"{name}: other than plain decoding: {difference}")
    if difference:
        print(f"{name}: other than plain decoding: {difference}\n", flush=True)
