"""The executables of a rollout's programs, compiled ahead of time and kept in one place, with a log of compilations."""

from __future__ import annotations

import logging
import os
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache import compilation_cache

from tlt_jax.distributed.mesh import is_cpu
from tlt_jax.rollout.executables import disk_cache, serialized
from tlt_jax.rollout.executables.compile_cost import KEPT, LOADING, CompileCosts
from tlt_jax.rollout.executables.disk_cache import ExecutableCache, digest
from tlt_jax.rollout.executables.programs import Decode, GroupShapes, StateShape, of_group
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.rollout.executables.serialized import SerializationError, SerializedExecutable
from tlt_jax.spec_decode.decode import Report
from tlt_jax.spec_decode.strategy import PLAIN

MAX_PROGRAMS = 1024  # beyond this the least recently used one is dropped
# Kernels of the rollout's programs run as fast (0.98 to 1.05) with less of LLVM's optimization, and
# compile in four fifths of the time: what takes their time is matrix products, which come from libraries.
CPU_OPTIONS = {"xla_backend_optimization_level": 1}
NEVER_S = 1e9  # no compilation takes so long
BACKGROUND = 0.3  # what a compilation costs a rollout that goes on meanwhile, over one that waits

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """A line of the compile log: seconds of lowering and compilation, and bytes on one device.

    `is_loaded`: it was not compiled, but loaded: from another data group, or an earlier run.
    """

    program: Program
    seconds: float
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int
    is_loaded: bool = False


@dataclass(frozen=True)
class Made:
    """An executable, and itself as bytes when it can be; seconds that a thread took for it; whether it was only loaded."""

    executable: jax.stages.Compiled
    serialized: SerializedExecutable | None = None
    seconds: float = 0.0
    is_loaded: bool = False


class Executables:
    """The executables of every data group; `compiles` is the log. Implements the port `Programs`.

    `waited`: from when to when its caller waited for a compilation, in seconds of time.perf_counter.

    A program that another group has, or an earlier run has `kept`, is loaded from there where
    the backend can do that. Others are compiled in the background, one at a time, on accelerators,
    whose host is free, and on a CPU with more cores than devices; elsewhere compiling takes the
    rollout's own cores, and is waited for.
    """

    def __init__(
        self,
        shapes: Sequence[GroupShapes],
        log: Callable[[Compiled], None],
        kept: ExecutableCache | None = None,
    ):
        self.shapes, self.log = tuple(shapes), log
        self.executables: OrderedDict[Program, Callable[..., Any]] = OrderedDict()
        self.ran: set[Program] = set()
        self.compiles: list[Compiled] = []
        self.waited: list[tuple[float, float]] = []  # when the host did nothing else but compile
        self.is_cpu, self.compile_costs, self.disk_cache = (
            is_cpu(shapes[0].mesh),
            CompileCosts(),
            kept or ExecutableCache(),
        )
        self.serialized: dict[Program, SerializedExecutable] = {}  # of group 0's programs
        self.waits = self.is_cpu and cores() <= jax.local_device_count()
        self.sizes = sizes_of(shapes[0])
        self.names: dict[tuple[Program, str], str] = {}  # of `asked`
        self.thread = ThreadPoolExecutor(1, "compile")
        self.ahead: dict[Program, Future] = {}
        self.changes = 0  # of `executables`

    def rebind(self, shapes: Sequence[GroupShapes]) -> None:
        """Programs are for these shapes from here on; those that are there are dropped."""
        for future in self.ahead.values():
            future.cancel()
        for kept in (self.executables, self.ran, self.serialized, self.ahead):
            kept.clear()
        self.shapes, self.sizes = tuple(shapes), sizes_of(shapes[0])
        self.changes += 1

    def rebinding(self, shapes: Sequence[GroupShapes]) -> float:
        """Seconds that it is expected to take to compile what is there for these shapes, but for chunks that draft.

        Those are compiled again where they pay for themselves.
        """
        sizes, seconds = sizes_of(shapes[0]), 0.0
        for program in self.executables:
            if getattr(program, "strategy", PLAIN) != PLAIN:
                continue
            kept = self.disk_cache.seconds(self.asked(program, sizes))
            compile_cost = self.compile_costs.of(program) if kept is None else KEPT * kept
            seconds += compile_cost * (
                LOADING if program.group and self.is_shared(program) else 1.0
            )
        return seconds

    def lower(self, program: Program) -> jax.stages.Lowered:
        """The program for the devices (or device descriptions) of its group's mesh."""
        return program.lower(self.shapes[program.group], self.get)

    def get(self, program: Program) -> Callable[..., Any]:
        """The executable, compiled now when it is not there."""
        if program not in self.executables:
            begin = time.perf_counter()
            if program in self.ahead:
                made = self.ahead.pop(program).result()
            else:
                made = self.of_another_group(program) or self.make(program, self.lower(program))
            end = time.perf_counter()
            self.waited.append((begin, end))
            self.hold(program, made, end - begin)
        self.executables.move_to_end(program)
        return self.executables[program]

    def hold(self, program: Program, made: Made, seconds: float) -> None:
        """Keeps an executable, with its line of the log; drops the one unused longest when there are too many."""
        line = compile_record(program, made.seconds or seconds, made.executable.memory_analysis())
        line = replace(line, is_loaded=made.is_loaded)
        self.compiles.append(line)
        self.log(line)
        if not made.is_loaded:
            self.compile_costs.note(program, line.seconds)
            self.disk_cache.note(self.asked(program), line.seconds)
        if made.serialized and len(self.shapes) > 1:
            self.serialized[of_group(program, 0)] = made.serialized
        self.executables[program] = made.executable
        if len(self.executables) > MAX_PROGRAMS:
            dropped = self.executables.popitem(last=False)[0]
            self.ran.discard(dropped)
            self.serialized.pop(of_group(dropped, 0), None)
        self.changes += 1

    def is_shared(self, program: Program) -> bool:
        """Whether another group's executable can be loaded for this one's devices."""
        return of_group(program, 0) in self.serialized

    def of_another_group(self, program: Program) -> Made | None:
        """The executable of another group, for this group's devices, when there is one."""
        if not self.is_shared(program):
            return None
        found = self.serialized[of_group(program, 0)]
        try:
            return Made(serialized.deserialize(found, self.devices(program)), found, is_loaded=True)
        except SerializationError as error:
            log.info("every data group compiles its programs: %s", error)
            del self.serialized[of_group(program, 0)]
            return None

    def make(self, program: Program, lowered: jax.stages.Lowered) -> Made:
        """The executable of a lowered program: from the folder, or compiled."""
        devices = self.devices(program)
        if found := self.disk_cache.get(lowered, self.options, devices):
            return Made(*found, is_loaded=True)
        hits = len(CACHE_HITS)
        executable, made = compile_now(lowered, self.options), None
        if len(CACHE_HITS) > hits:
            return Made(executable, is_loaded=True)
        try:
            made = serialized.serialize(executable, devices)
            self.disk_cache.put(lowered, self.options, made)
        except SerializationError as error:
            log.debug("%s stays where it was compiled: %s", program, error)
        return Made(executable, made)

    def asked(self, program: Program, sizes: str = "") -> str:
        """The program and its sizes, or others, as text that is the same in every run."""
        key = program, sizes or self.sizes
        if key not in self.names:
            self.names[key] = repr((of_group(program, 0), key[1], sorted(self.options.items())))
        return self.names[key]

    def devices(self, program: Program) -> list[jax.Device]:
        """The devices of its group."""
        return list(self.shapes[program.group].mesh.devices.flat)

    def is_first_run(self, program: Program) -> bool:
        """Whether this is the first call with this program: a first run also loads its kernels.

        On a CPU loading takes half a second for a chunk of 12 layers.
        """
        is_first = program not in self.ran
        self.ran.add(program)
        return is_first

    def compile_cost(self, program: Program) -> float:
        """What compiling it is expected to cost a rollout, in seconds; 0: `get` returns at once."""
        if program in self.executables or (program in self.ahead and self.ahead[program].done()):
            return 0.0
        share = 1.0 if self.waits else BACKGROUND
        if self.is_shared(program):
            return share * LOADING * self.compile_costs.of(program)
        kept = self.disk_cache.seconds(self.asked(program))
        return share * self.compile_costs.of(program) if kept is None else KEPT * kept

    def prepare(self, programs: Iterable[Program]) -> None:
        """Compiles what is not there: now, or in the background, where it is one program at a time."""
        for program in programs:
            if self.waits or self.is_shared(program):
                self.get(program)
            elif self.compile_cost(program) and all(
                future.done() for future in self.ahead.values()
            ):
                begin = time.perf_counter()
                self.ahead[program] = self.thread.submit(self.timed, program, self.lower(program))
                self.waited.append((begin, time.perf_counter()))

    def timed(self, program: Program, lowered: jax.stages.Lowered) -> Made:
        """`make`, with its seconds. Lowering is not done here: in a thread it would miss JAX's local settings."""
        begin = time.perf_counter()
        made = self.make(program, lowered)
        return replace(made, seconds=time.perf_counter() - begin)

    @property
    def version(self) -> tuple[int, int]:
        """Changes with the programs that are there."""
        return self.changes, sum(future.done() for future in self.ahead.values())

    @property
    def options(self) -> dict[str, Any]:
        """XLA's options of a compilation."""
        return CPU_OPTIONS if self.is_cpu else {}

    @property
    def compiling_alongside(self) -> bool:
        """Whether something is compiled in the background that takes the devices' own cores."""
        return self.is_cpu and not all(future.done() for future in self.ahead.values())

    def memory_held(self, groups: Sequence[int]) -> dict[str, int]:
        """Stats of the compiled programs that draft: how many, and the most bytes that those of one of the groups hold.

        The bytes are those of their code, and of the largest temporaries.
        """
        drafting = [
            one
            for one in {one.program: one for one in self.compiles}.values()
            if one.program in self.executables
            and isinstance(one.program, Decode)
            and one.program.strategy != PLAIN
        ]
        sizes = [0]
        for index in groups:
            held = [one for one in drafting if one.program.group == index]
            sizes.append(
                sum(one.code for one in held) + max((one.temporary for one in held), default=0)
            )
        return {"pool_programs": len(drafting), "pool_bytes": max(sizes)}

    def read(self, report: Report) -> Report:
        """The report of a chunk that is done, as NumPy arrays."""
        return jax.device_get(report)


def cores() -> int:
    """Processors that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def sizes_of(shapes: GroupShapes) -> str:
    """A digest of what a group's programs are lowered for beside their own sizes."""
    leaves = jax.tree.leaves((shapes.weights, shapes.state(StateShape(0, 1, 1))))
    return digest(dict(shapes.mesh.shape), [(leaf.shape, str(leaf.dtype)) for leaf in leaves])


def compile_now(lowered: jax.stages.Lowered, options: Mapping[str, Any]) -> jax.stages.Compiled:
    """The executable."""
    return lowered.compile(compiler_options=dict(options) or None)


CACHE_HITS: list[str] = []  # what JAX read from its own cache, which cannot be serialized again


def count_cache_hits(event: str, **_: Any) -> None:
    """Notes that JAX has read an executable instead of compiling it."""
    if event == "/jax/compilation_cache/cache_hits":
        CACHE_HITS.append(event)


jax.monitoring.register_event_listener(count_cache_hits)


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
    log.debug(
        "%s %s in %.2f s: %.1f MiB in, %.1f out (%.1f in place), %.1f temporary",
        "loaded" if compiled.is_loaded else "compiled", compiled.program, compiled.seconds, *(size / 2**20 for size in sizes),
        extra={} if compiled.is_loaded else {"compile_seconds": compiled.seconds},
    )  # fmt: skip


def use_compile_cache(folder: str) -> ExecutableCache:
    """Turns on JAX's persistent compilation cache, in this folder, the default one, or not at all.

    The rollout's own executables are in a folder in it. It is pruned first. One that cannot be written is only read, or
    not used at all, which one line says.
    """
    if folder == "off":
        return ExecutableCache()
    path = Path(folder).expanduser() if folder else Path.home() / ".cache" / "tlt_jax" / "xla"
    if reason := disk_cache.unwritable(path):
        log.warning(disk_cache.UNWRITABLE, path, reason)
        if not os.access(path, os.R_OK | os.X_OK):
            return ExecutableCache()
    else:
        disk_cache.prune(path, time.time())
    if jax.config.jax_compilation_cache_dir != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        compilation_cache.reset_cache()  # JAX decides at its first compilation whether it has a cache
    # What takes less is not written: everything is, or nothing.
    least = NEVER_S if reason else 0.0
    jax.config.update("jax_persistent_cache_min_compile_time_secs", least)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return ExecutableCache(path / "rollout", is_writable=not reason)
