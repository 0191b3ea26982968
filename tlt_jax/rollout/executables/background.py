"""Threads that compile while their caller does other work."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import jax

MOST_THREADS = 4  # compilations at once: more add little, since XLA compiles the parts of one program in threads
WAIT = "/tlt_jax/compile/wait_duration"  # an event for jax.monitoring: the caller waited for a background compilation

log = logging.getLogger(__name__)


class Background:
    """At most `threads` compilations at once, and one thread of their own for programs of the whole mesh.

    Processes that tune a GPU program of several processes exchange what they measured while they compile it, and wait for
    each other: so programs of the whole mesh compile one after another, in the order in which they are submitted, which must
    be that of all processes. Whoever lowers holds `lowering`: compilers of Triton kernels have one user at a time.
    """

    def __init__(self, threads: int):
        self.threads, self.lowering = threads, threading.RLock()
        self.pool = ThreadPoolExecutor(threads, "compile")
        self.in_order = ThreadPoolExecutor(1, "compile_whole_mesh")
        self.futures: list[Future] = []

    def submit(self, job: Callable[[], Any], is_whole_mesh: bool = False) -> Future:
        """Runs the job in a thread."""
        future = (self.in_order if is_whole_mesh else self.pool).submit(job)
        self.futures = [one for one in self.futures if not one.done()] + [future]
        return future

    @property
    def running(self) -> int:
        """Jobs that are not done."""
        return sum(not future.done() for future in self.futures)

    def cancel(self) -> None:
        """Drops the jobs that have not begun; a process ends when those that have are done."""
        for future in self.futures:
            future.cancel()

    def close(self) -> None:
        """Drops the jobs that have not begun, and ends the threads."""
        self.cancel()
        for threads in (self.pool, self.in_order):
            threads.shutdown(wait=False)


def result(future: Future, job: Callable[[], Any]) -> Any:
    """What the future's job returns or raises; a job that has not begun is not waited for: the caller runs it."""
    if future.cancel():
        return job()
    begin = time.perf_counter()
    try:
        return future.result()
    finally:
        jax.monitoring.record_event_duration_secs(WAIT, time.perf_counter() - begin)


class Early:
    """A jitted function; `compile` compiles it in the background for arguments that are known early.

    A call first waits for these compilations, and raises their errors. It then calls the function, which finds the
    executable in JAX's memory: there is one compilation, and the bits are those of the function alone. Arguments of other
    shapes compile when they are given, which is logged, and so is XLA's failure, for which the call compiles again: kernels
    are tuned in memory that the devices may lack while they decode.
    """

    def __init__(self, function: jax.stages.Wrapped, background: Background):
        self.function, self.background = function, background
        self.pending: list[tuple[Future, Callable[[], Any]]] = []
        self.known: set[Any] = set()  # shapes, once something was compiled
        self.is_expected = True  # every compilation succeeded

    @property
    def lower(self) -> Callable[..., jax.stages.Lowered]:
        """That of the function."""
        return self.function.lower

    def compile(self, arguments: Callable[[], tuple]) -> None:
        """Starts to compile for ShapeDtypeStructs with shardings, which `arguments` returns in the thread."""
        job = partial(self.compiled, arguments)
        self.pending.append((self.background.submit(job, is_whole_mesh=True), job))

    def compiled(self, arguments: Callable[[], tuple]) -> Any:
        """Compiles; returns the shapes for which it did."""
        with self.background.lowering:
            given = arguments()
            lowered = self.function.lower(*given)
        lowered.compile()
        return shapes(given)

    def __call__(self, *arguments: Any) -> Any:
        while self.pending:
            try:
                self.known.add(result(*self.pending.pop(0)))
            except jax.errors.JaxRuntimeError as error:
                self.is_expected = False
                log.info("%s compiles when it is called: %s", name(self.function), error)
        if self.known and self.is_expected and (given := shapes(arguments)) not in self.known:
            expected = [one for _, leaves in self.known for one in leaves]
            other = [one for one in given[1] if one not in expected]
            log.info(
                "%s compiles when it is called: it was expected with other arrays than its %d%s",
                name(self.function), len(given[1]), f", not with {other[0]}" if other else "",
            )  # fmt: skip
            self.known.add(given)
        return self.function(*arguments)


def shapes(arguments: Any) -> tuple[Any, tuple[str, ...]]:
    """The structure of the arguments, and the shape and dtype of every array."""
    leaves, structure = jax.tree.flatten(arguments)
    return structure, tuple(f"{leaf.dtype}{list(leaf.shape)}" for leaf in leaves)


def name(function: Any) -> str:
    """The name of the Python function that was jitted."""
    function = getattr(function, "__wrapped__", function)
    return getattr(getattr(function, "func", function), "__name__", str(function))
