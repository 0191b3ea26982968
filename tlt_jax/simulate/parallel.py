"""Simulations in processes of their own, as many at once as there are cores, with their progress; knows no simulation."""

from __future__ import annotations

import gc
import os
import queue
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

POLL_S = 0.2  # seconds between two looks at processes that report nothing
COLLECTED = (
    100_000,
    20,
    50,
)  # gc.set_threshold: a simulation makes many small objects, and few circles of them

Simulate = Callable[..., Any]  # simulate(name, told=f): calls f(steps done)


def cores() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def every(simulate: Simulate, names: Sequence[str], steps: int) -> dict[str, Any]:
    """What `simulate` returns for each name; it can be pickled. Raises what one of them raises."""
    console = Console(file=sys.stderr)
    shown = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*shown, console=console, transient=True, disable=not console.is_terminal) as bar:
        tasks = {name: bar.add_task(name, total=steps) for name in names}

        def told(name: str, step: int) -> None:
            bar.update(tasks[name], completed=step)

        if min(cores(), len(names)) == 1:
            return {name: simulate(name, told=partial(told, name)) for name in names}
        context = get_context("spawn")  # JAX has threads, which a fork would lose
        with (
            context.Manager() as manager,
            ProcessPoolExecutor(
                cores(), context, initializer=gc.set_threshold, initargs=COLLECTED
            ) as pool,
        ):
            found = manager.Queue()
            futures = {name: pool.submit(reporting, simulate, name, found) for name in names}
            while not all(future.done() for future in futures.values()) and not failed(futures):
                try:
                    told(*found.get(timeout=POLL_S))
                except queue.Empty:
                    continue
            return {name: future.result() for name, future in futures.items()}


def failed(futures: dict[str, Future]) -> bool:
    """Whether a simulation has raised."""
    return any(future.done() and future.exception() for future in futures.values())


def reporting(simulate: Simulate, name: str, steps: Any) -> Any:
    """The simulation of this name; puts (name, steps done) into the queue after each step."""
    return simulate(name, told=lambda step: steps.put((name, step)))
