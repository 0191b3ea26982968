"""Knows how the arms of whole RL steps run: as commands in folders of their own, in turns, with answers compared to plain's."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import whole_runs
from in_turns import Turns
from whole_runs import Run, first_difference

ROOT = Path(__file__).resolve().parent.parent
PLAIN, CACHES = "plain", ("cold", "warm")


class Failure(Exception):
    """What ends the benchmark: a command that fails, or answers that differ."""


def command(*arguments: str) -> float:
    """Runs a command of the product; its seconds. Raises Failure with its last lines."""
    begin = time.perf_counter()
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    check(shlex.join(arguments), done.returncode, done.stdout)
    return time.perf_counter() - begin


def environment() -> dict[str, str]:
    """Of a command of the product."""
    paths = [str(ROOT), str(ROOT / "benchmarks"), os.environ.get("PYTHONPATH", "")]
    # With XLA's own caches JAX knows programs by the path of their folder, which is another in every arm.
    own = {"PYTHON": sys.executable, "JAX_PERSISTENT_CACHE_ENABLE_XLA_CACHES": "none"}
    return os.environ | own | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}


def check(name: str, code: int, output: str) -> None:
    """Raises Failure, with the last lines of the output, for an exit code that is not 0."""
    if code:
        tail = "\n".join(output.splitlines()[-15:])
        raise Failure(f"{name} ended with code {code}:\n{tail}")


def started(arguments: Sequence[str], processes: int, folder: Path) -> Turns:
    """The training command as so many processes, stopped at its first step."""
    start = [sys.executable, "-m", "in_turns", *arguments]
    if processes > 1:
        start = [str(ROOT / "launch" / "local.sh"), str(processes), *arguments]
    return Turns(start, environment() | {"MODULE": "in_turns"}, processes, folder)


def say(text: str) -> None:
    """Tells whoever waits, outside the report."""
    print(text, file=sys.stderr, flush=True)


def take_turn(
    args: argparse.Namespace, shared: Sequence[str], arms: Mapping[str, Sequence[str]], turn: int
) -> dict[tuple[str, str], Run]:
    """The runs of one turn by (cache, arm). Raises Failure when an arm's answers or policy are others than plain's."""
    found: dict[tuple[str, str], Run] = {}
    kept = args.work / "programs" / "kept"
    if CACHES[0] in args.caches:
        shutil.rmtree(kept, ignore_errors=True)
    for cache in args.caches:
        folders = {arm: args.work / "runs" / f"{turn}_{cache}_{arm}" for arm in arms}
        programs = {arm: args.work / "programs" / f"of_{arm}" for arm in arms}
        arguments: dict[str, list[str]] = {}
        for arm, changes in arms.items():
            for folder in (folders[arm], programs[arm], stops(folders[arm])):
                shutil.rmtree(folder, ignore_errors=True)
            if cache != CACHES[0]:
                shutil.copytree(kept, programs[arm])
            arguments[arm] = [
                "--config", args.config, *shared, *changes, "--run", str(folders[arm]),
                "--rollout.compile_cache", str(programs[arm]), "--log.texts_every", "1",
            ]  # fmt: skip
            if cache == CACHES[0] and args.cold_steps:
                arguments[arm] += ["--train.steps", str(args.cold_steps)]
        for arm, seconds in walls(arguments, folders, args.processes, args.by_step):
            shutil.rmtree(folders[arm] / "checkpoints", ignore_errors=True)
            if cache == CACHES[0]:  # files of the same name are the same program
                shutil.copytree(programs[arm], kept, dirs_exist_ok=True)
            found[cache, arm] = run = whole_runs.read_run(folders[arm], seconds)
            say(f"turn {turn}, {cache}, {arm}: steps {run.seconds:.1f} s, process {seconds:.1f} s")
            compare(found[cache, PLAIN], run, f"turn {turn}, {cache}, {arm}", args.may_differ)
    return found


def stops(folder: Path) -> Path:
    """Where a run that takes turns says that it has stopped."""
    return folder.with_name(f"{folder.name}.turns")


def walls(
    arguments: Mapping[str, Sequence[str]],
    folders: Mapping[str, Path],
    processes: int,
    by_step: bool,
) -> Iterator[tuple[str, float]]:
    """Arms that have ended, and the seconds that each of them ran; they run one after another, or in turns step by step."""
    together = [list(arguments)] if by_step else [[arm] for arm in arguments]
    for arms in together:
        running: dict[str, Turns] = {}
        try:
            for arm in arms:
                running[arm] = started(arguments[arm], processes, stops(folders[arm]))
            waiting = list(arms)
            while waiting:
                waiting = [arm for arm in waiting if goes_on(arm, running[arm])]
            for arm in arms:
                yield arm, running[arm].seconds
        finally:
            for one in running.values():
                one.end()


def goes_on(arm: str, run: Turns) -> bool:
    """Whether a run goes on after its next turn. Raises Failure when it failed."""
    goes = run.go_on()
    check(arm, run.run.returncode or 0, run.output.read_text(errors="replace"))
    return goes


def compare(plain: Run, run: Run, name: str, may_differ: bool) -> None:
    """Says where the answers or the policy are others than plain's. Raises Failure unless they may be."""
    difference = first_difference(plain, run)
    if difference and not may_differ:
        raise Failure(f"{name}: other than plain decoding: {difference}")
    if difference:
        print(f"{name}: other than plain decoding: {difference}\n", flush=True)
