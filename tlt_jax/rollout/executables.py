"""The executables of a rollout's programs, compiled ahead of time and kept in one place, with a log of compilations."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache

from tlt_jax.distributed.mesh import is_cpu
from tlt_jax.rollout.ports import Program
from tlt_jax.rollout.programs import DraftOnly, GroupShapes
from tlt_jax.spec_decode.decode import Report, Weights

MAX_PROGRAMS = 1024  # beyond this the least recently used one is dropped

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """A line of the compile log: seconds of lowering and compilation, and bytes on one device."""

    program: Program
    seconds: float
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int


class Executables:
    """The executables of every data group; `compiles` is the log. Implements the port `Programs`.

    `waited`: from when to when its caller waited for a compilation, in seconds of time.perf_counter.

    On accelerators programs that can be waited for are compiled in a thread, one at a time: compiling occupies the host
    there, not the devices. On a CPU it would take the rollout's own cores.
    """

    def __init__(self, shapes: Sequence[GroupShapes], log: Callable[[Compiled], None]):
        self.shapes, self.log = tuple(shapes), log
        self.executables: OrderedDict[Program, Callable[..., Any]] = OrderedDict()
        self.ran: set[Program] = set()
        self.compiles: list[Compiled] = []
        self.waited: list[tuple[float, float]] = []  # when the host did nothing else but compile
        self.waits = is_cpu(shapes[0].mesh)
        self.thread = ThreadPoolExecutor(1, "compile")
        self.ahead: dict[Program, Future] = {}

    def lower(self, program: Program) -> jax.stages.Lowered:
        """The program for the devices (or device descriptions) of its group's mesh."""
        return program.lower(self.shapes[program.group], self.get)

    def get(self, program: Program) -> Callable[..., Any]:
        """The executable, compiled now when it is not there."""
        if program not in self.executables:
            begin = time.perf_counter()
            if program in self.ahead:
                executable, compiled = self.ahead.pop(program).result()
            else:
                executable, compiled = compile_now(program, self.lower(program), begin)

            self.waited.append((begin, time.perf_counter()))
            self.compiles.append(compiled)
            self.log(compiled)
            self.executables[program] = executable
            if len(self.executables) > MAX_PROGRAMS:
                self.ran.discard(self.executables.popitem(last=False)[0])

        self.executables.move_to_end(program)
        return self.executables[program]

    def is_first_run(self, program: Program) -> bool:
        """Whether this is the first call with this program: a first run also loads its kernels.

        On a CPU loading takes half a second for a chunk of 12 layers.
        """
        is_first = program not in self.ran
        self.ran.add(program)
        return is_first

    def has(self, program: Program) -> bool:
        """Whether `get` returns at once."""
        return program in self.executables or (program in self.ahead and self.ahead[program].done())

    def is_ready(self, program: Program) -> bool:
        """Whether to use the executable now. Else it is being compiled, or will be when asked again; ask for another one.

        Always true where compiling is waited for.
        """
        if self.waits or self.has(program):
            return True
        if all(future.done() for future in self.ahead.values()):
            begin = time.perf_counter()
            self.ahead[program] = self.thread.submit(
                compile_now, program, self.lower(program), begin
            )
            self.waited.append((begin, time.perf_counter()))
        return False

    def read(self, report: Report) -> Report:
        """The report of a chunk that is done, as NumPy arrays."""
        return jax.device_get(report)


def compile_now(
    program: Program, lowered: jax.stages.Lowered, begin: float
) -> tuple[Callable[..., Any], Compiled]:
    """The executable, and its line of the log, with seconds since lowering began.

    Lowering is not done here: in a thread it would miss JAX's local settings.
    """
    executable = lowered.compile()
    seconds, memory = time.perf_counter() - begin, executable.memory_analysis()
    return executable, compile_record(program, seconds, memory)


def compile_record(program: Program, seconds: float, memory: Any) -> Compiled:
    """The log line of a compilation."""
    return Compiled(
        program,
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
    )


def log_compile(compiled: Compiled) -> None:
    """One line per executable; a chunk's name has its strategy."""
    sizes = (compiled.arguments, compiled.outputs, compiled.aliased, compiled.temporary)
    log.info(
        "compiled %s in %.2f s: %.1f MiB in, %.1f out (%.1f in place), %.1f temporary",
        compiled.program, compiled.seconds, *(size / 2**20 for size in sizes),
    )  # fmt: skip


def time_draft(executables: Executables, draft: DraftOnly, weights: Weights) -> float:
    """Seconds of a round of drafting alone, on sequences that are half full of zeros: the median of 3 runs after one."""
    shapes, batch = executables.shapes[draft.group], draft.state.batch
    spec = shapes.known(draft.state), shapes.drafter.host_context(batch)
    known, host = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), spec
    )
    executables.get(draft)

    spent = []
    for _ in range(4):
        half = jnp.full(batch, draft.state.slots // 2, jnp.int32, device=known.lengths.sharding)
        known = jax.block_until_ready(known.replace(lengths=half))
        begin = time.perf_counter()
        known = jax.block_until_ready(draft(executables, known, weights, host))
        spent.append((time.perf_counter() - begin) / draft.rounds)
    return median(spent[1:])


def use_compile_cache(folder: str) -> None:
    """Turns on JAX's persistent compilation cache, in this folder, the default one, or not at all."""
    if folder == "off":
        return
    path = Path(folder).expanduser() if folder else Path.home() / ".cache" / "tlt_jax" / "xla"
    if jax.config.jax_compilation_cache_dir != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        compilation_cache.reset_cache()  # JAX decides at its first compilation whether it has a cache
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
