"""Compiles the rollout's programs ahead of time, caches their executables and logs the compilations."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from statistics import median
from typing import Any

import jax

from tlt_jax.distributed.mesh import is_cpu
from tlt_jax.distributed.process import processors
from tlt_jax.rollout.executables import background, disk_cache
from tlt_jax.rollout.executables.background import Background
from tlt_jax.rollout.executables.disk_cache import (
    ExecutableCache,
    SerializationError,
    SerializedExecutable,
    digest,
)
from tlt_jax.rollout.executables.programs import (
    Admit,
    Decode,
    GroupShapes,
    Program,
    StateShape,
    of_group,
)
from tlt_jax.spec_decode.decode import Report
from tlt_jax.spec_decode.strategy import PLAIN

MAX_PROGRAMS = 1024  # limit on the executables in memory: the least recently used one is dropped
# With less of LLVM's optimization the rollout's programs compile in four fifths of the time and run as fast
# (0.98 to 1.05): most of their time is in matrix products, which come from libraries.
CPU_OPTIONS = {"xla_backend_optimization_level": 1}
# Expected seconds of a compilation, relative to compiling the program: to load one of another data group; one that an earlier
# run compiled, which is lowered again; and the least cost of a background compilation to a rollout.
LOADING, CACHED, BACKGROUND = 0.07, 0.2, 0.3
FIRST = 3.0  # expected seconds of a chunk of plain decoding before the first compilation
RECENT = 12  # compilations that the estimate uses: newer ones may come from a cache

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Compiled:
    """An entry of the compile log: seconds of lowering and compilation, and bytes on one device.

    `is_loaded`: the executable was loaded, from another data group or an earlier run, not compiled.
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
class CompileResult:
    """An executable, its bytes where it can be serialized, the background thread's seconds, and whether it was loaded.

    `earlier`: of one from the disk cache or JAX's own, the seconds that compiling it took.
    """

    executable: jax.stages.Compiled
    serialized: SerializedExecutable | None = None
    seconds: float = 0.0
    is_loaded: bool = False
    earlier: float = 0.0


class CompileCosts:
    """Measured seconds of compilations, and the expected seconds of the next."""

    def __init__(self) -> None:
        self.units: deque[float] = deque(maxlen=RECENT)
        self.alike: dict[tuple, float] = {}

    def note(self, program: Program, seconds: float) -> None:
        """Adds the measured seconds of a compilation."""
        self.units.append(seconds / program.relative_seconds)
        self.alike[kind(program)] = seconds

    def of(self, program: Program) -> float:
        """Expected seconds: those of the last program of this kind, or scaled from other kinds."""
        unit = median(self.units) if self.units else FIRST
        return self.alike.get(kind(program), unit * program.relative_seconds)


def kind(program: Program) -> tuple:
    """The key of programs that compile in about the same time: sizes hardly matter."""
    return type(program), getattr(program, "strategy", None)


class Executables:
    """The executables of every data group; `compiles` is the log.

    `waited`: start and end of each time that the caller waited for a compilation, in seconds of time.perf_counter.

    Programs that another group or an earlier run (`kept`: the disk cache) has compiled are loaded
    where the backend can do so. Others are compiled in the `background`, several at a time on
    accelerators, whose host is free, and one at a time on a CPU with more cores than devices;
    elsewhere compiling takes the rollout's own cores, and the rollout waits.
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
        self.waited: list[tuple[float, float]] = []  # start and end of each wait
        self.is_cpu, self.compile_costs = is_cpu(shapes[0].mesh), CompileCosts()
        self.disk_cache = kept or ExecutableCache()
        self.serialized: dict[Program, SerializedExecutable] = {}  # of group 0's programs
        cores = len(processors())
        self.spare_cores = cores - (jax.local_device_count() if self.is_cpu else 0)
        self.waits = self.spare_cores <= 0
        # What else runs has the other cores meanwhile, and on a CPU it uses them all.
        beside = max(BACKGROUND, 1 / cores) if self.is_cpu else BACKGROUND
        self.share = 1.0 if self.waits else beside  # of its seconds that a compilation costs
        self.sizes = sizes_of(shapes[0])
        self.cache_keys: dict[tuple[Program, str], str] = {}  # of `cache_key`
        self.background = Background(
            1 if self.is_cpu else max(1, min(background.MOST_THREADS, cores // 2))
        )
        self.pending: dict[Program, Future] = {}
        self.jobs: dict[Program, Callable[[], CompileResult]] = {}  # of `pending`
        self.changes = 0  # of `executables`
        self.cannot_serialize = False  # and that was said

    def rebind(self, shapes: Sequence[GroupShapes]) -> None:
        """Drops all executables; new ones are compiled for these shapes."""
        for future in self.pending.values():
            future.cancel()
        for cached in (self.executables, self.ran, self.serialized, self.pending, self.jobs):
            cached.clear()
        self.shapes, self.sizes = tuple(shapes), sizes_of(shapes[0])
        self.changes += 1

    def close(self) -> None:
        """Drops all executables, and ends the background threads."""
        self.rebind(self.shapes)
        self.background.close()

    def rebinding(self, shapes: Sequence[GroupShapes]) -> float:
        """Expected seconds to compile the current executables for these shapes, except chunks that draft.

        The planner compiles those again where they pay off.
        """
        sizes, seconds = sizes_of(shapes[0]), 0.0
        for program in self.executables:
            if getattr(program, "strategy", PLAIN) != PLAIN:
                continue
            earlier = self.disk_cache.seconds(self.cache_key(program, sizes))
            compile_cost = self.compile_costs.of(program) if earlier is None else CACHED * earlier
            seconds += compile_cost * (
                LOADING if program.group and self.is_shared(program) else 1.0
            )
        return seconds

    def lower(self, program: Program) -> jax.stages.Lowered:
        """The program for the devices (or device descriptions) of its group's mesh."""
        with self.background.lowering:
            return program.lower(self.shapes[program.group], self.get)

    def get(self, program: Program) -> Callable[..., Any]:
        """The executable; compiles it now, or waits for its background compilation, when it is missing."""
        if program not in self.executables:
            begin = time.perf_counter()
            if program in self.pending:
                result = background.result(self.pending.pop(program), self.jobs.pop(program))
            else:
                result = self.load_shared(program) or self.make(program, self.lower(program))
            end = time.perf_counter()
            self.waited.append((begin, end))
            self.store(program, result, end - begin)
        self.executables.move_to_end(program)
        return self.executables[program]

    def store(self, program: Program, result: CompileResult, seconds: float) -> None:
        """Stores and logs an executable; drops the least recently used one beyond MAX_PROGRAMS."""
        memory = result.executable.memory_analysis()
        entry = Compiled(
            program,
            result.seconds or seconds,
            memory.argument_size_in_bytes,
            memory.output_size_in_bytes,
            memory.alias_size_in_bytes,
            memory.temp_size_in_bytes,
            memory.generated_code_size_in_bytes,
            result.is_loaded,
        )
        self.compiles.append(entry)
        self.log(entry)
        if not result.is_loaded:
            self.compile_costs.note(program, entry.seconds)
            self.disk_cache.note(self.cache_key(program), entry.seconds)
        elif earlier := self.disk_cache.seconds(self.cache_key(program)) or result.earlier:
            # Programs that are not in the cache take as long as this one did.
            self.compile_costs.note(program, earlier)
        if result.serialized and len(self.shapes) > 1:
            self.serialized[of_group(program, 0)] = result.serialized
        self.executables[program] = result.executable
        if len(self.executables) > MAX_PROGRAMS:
            dropped = self.executables.popitem(last=False)[0]
            self.ran.discard(dropped)
            self.serialized.pop(of_group(dropped, 0), None)
        self.changes += 1

    def is_shared(self, program: Program) -> bool:
        """Whether another group's executable can be loaded for this one's devices."""
        return of_group(program, 0) in self.serialized

    def load_shared(self, program: Program) -> CompileResult | None:
        """Loads the executable of another group for this group's devices; None when there is none."""
        if not self.is_shared(program):
            return None
        found = self.serialized[of_group(program, 0)]
        try:
            return CompileResult(
                disk_cache.deserialize(found, self.devices(program)), found, is_loaded=True
            )
        except SerializationError as error:
            log.info("every data group compiles its own programs: %s", error)
            del self.serialized[of_group(program, 0)]
            return None

    def make(self, program: Program, lowered: jax.stages.Lowered) -> CompileResult:
        """Loads the executable of a lowered program from the disk cache, or compiles it."""
        devices = self.devices(program)
        if found := self.disk_cache.get(lowered, self.options, devices):
            executable, data, earlier = found
            return CompileResult(executable, data, is_loaded=True, earlier=earlier)
        thread = threading.get_ident()
        hits, begin = len(CACHE_HITS), time.perf_counter()
        executable, data = lowered.compile(compiler_options=self.options or None), None
        seconds = time.perf_counter() - begin
        if saved := [one for where, one in CACHE_HITS[hits:] if where == thread]:
            return CompileResult(executable, is_loaded=True, earlier=seconds + sum(saved))
        try:
            data = disk_cache.serialize(executable, devices)
            self.disk_cache.put(lowered, self.options, data, seconds)
        except SerializationError as error:
            level = logging.DEBUG if self.cannot_serialize else logging.INFO
            self.cannot_serialize = True
            log.log(
                level,
                "%s cannot be serialized, and is kept by JAX's cache alone: %s",
                program,
                error,
            )
        return CompileResult(executable, data)

    def cache_key(self, program: Program, sizes: str = "") -> str:
        """The key of a program in the disk cache, the same in every run; `sizes`: a digest, by default the current shapes'."""
        key = program, sizes or self.sizes
        if key not in self.cache_keys:
            self.cache_keys[key] = repr(
                (of_group(program, 0), key[1], sorted(self.options.items()))
            )
        return self.cache_keys[key]

    def devices(self, program: Program) -> list[jax.Device]:
        """The devices of the program's group."""
        return list(self.shapes[program.group].mesh.devices.flat)

    def is_first_run(self, program: Program) -> bool:
        """Whether this is the first call with this program: its first run also loads its kernels.

        On a CPU, loading takes half a second for a chunk of 12 layers.
        """
        is_first = program not in self.ran
        self.ran.add(program)
        return is_first

    def compile_cost(self, program: Program) -> float:
        """The expected cost of compiling it to a rollout, in seconds; 0: `get` returns at once."""
        if program in self.executables or (
            program in self.pending and self.pending[program].done()
        ):
            return 0.0
        share = self.share
        if self.is_shared(program):
            return share * LOADING * self.compile_costs.of(program)
        earlier = self.disk_cache.seconds(self.cache_key(program))
        return share * self.compile_costs.of(program) if earlier is None else CACHED * earlier

    def prepare(self, programs: Iterable[Program]) -> None:
        """Compiles missing programs: now, or in the background as far as threads are free."""
        for program in programs:
            if self.waits or self.is_shared(program):
                self.get(program)
            elif self.background.running < self.background.threads:
                self.begin(program)

    def begin(self, program: Program) -> None:
        """Starts to compile a program in the background, unless it is there, or must wait for another compilation.

        It waits for that of the same program of another group, whose executable it may load, and for that of the program
        whose shardings it reads.
        """
        if program in self.pending or not self.compile_cost(program):
            return
        running = {of_group(one, 0) for one, future in self.pending.items() if not future.done()}
        source = program.source if isinstance(program, Admit) else program
        if running.intersection((of_group(program, 0), of_group(source, 0))):
            return
        begin = time.perf_counter()
        self.jobs[program] = partial(self.timed_make, program, self.lower(program))
        self.pending[program] = self.background.submit(self.jobs[program])
        self.waited.append((begin, time.perf_counter()))

    def timed_make(self, program: Program, lowered: jax.stages.Lowered) -> CompileResult:
        """`make`, with its seconds. The caller lowers: in this thread lowering would miss JAX's thread-local settings."""
        begin = time.perf_counter()
        result = self.make(program, lowered)
        return replace(result, seconds=time.perf_counter() - begin)

    @property
    def version(self) -> tuple[int, int]:
        """Changes whenever a program becomes available or is dropped."""
        return self.changes, sum(future.done() for future in self.pending.values())

    @property
    def options(self) -> dict[str, Any]:
        """XLA's compile options; what XLA_FLAGS sets is not set again: an option would take precedence."""
        set_by_user = os.environ.get("XLA_FLAGS", "")
        options = CPU_OPTIONS if self.is_cpu else {}
        return {name: value for name, value in options.items() if f"--{name}=" not in set_by_user}

    @property
    def compiling_alongside(self) -> bool:
        """Whether a background compilation takes cores from the devices."""
        return self.is_cpu and self.background.running > 0

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

    def read(self, report: Report, records: bool = False) -> Report:
        """The report of a finished chunk, as NumPy arrays; without its record unless that is wanted."""
        return jax.device_get(report if records else report.replace(record=None))


def sizes_of(shapes: GroupShapes) -> str:
    """A digest of the shapes that a group's programs share: mesh, weights and decoding state."""
    leaves = jax.tree.leaves((shapes.weights, shapes.state(StateShape(0, 1, 1))))
    return digest(dict(shapes.mesh.shape), [(leaf.shape, str(leaf.dtype)) for leaf in leaves])


# Of JAX's cache hits, whose executables cannot be serialized again: the thread, and the seconds of compiling that it saved.
CACHE_HITS: list[tuple[int, float]] = []


def note_cache_hit(event: str, seconds: float, **_: Any) -> None:
    """Notes that JAX has loaded an executable instead of compiling it."""
    if event == "/jax/compilation_cache/compile_time_saved_sec":
        CACHE_HITS.append((threading.get_ident(), seconds))


jax.monitoring.register_event_duration_secs_listener(note_cache_hit)


def log_compile(compiled: Compiled) -> None:
    """Logs one line per executable; a chunk's name includes its strategy."""
    sizes = (compiled.arguments, compiled.outputs, compiled.aliased, compiled.temporary)
    log.debug(
        "%s %s in %.2f s: %.1f MiB in, %.1f out (%.1f in place), %.1f temporary",
        "loaded" if compiled.is_loaded else "compiled", compiled.program, compiled.seconds, *(size / 2**20 for size in sizes),
        extra={} if compiled.is_loaded else {"compile_seconds": compiled.seconds},
    )  # fmt: skip
