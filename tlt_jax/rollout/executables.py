"""The executables of a rollout, compiled ahead of time and kept in one registry; knows shapes, not networks."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.rollout.buckets import admission_size
from tlt_jax.spec_decode import decode as chunk
from tlt_jax.spec_decode.decode import Admission, Decoder, DecodeState, DecodingParams, Known, Weights
from tlt_jax.spec_decode.interface import Drafter, PyTree, Target
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

log = logging.getLogger(__name__)

MAX_PROGRAMS = 1024  # beyond this the one unused longest is dropped


@dataclass(frozen=True)
class Key:
    """Names one executable.

    `kind`: start, prefill, admit, resize, catch_up, chunk or draft; `sizes`: what else its shapes depend on.
    """

    kind: str
    group: int
    batch: int
    slots: int
    sizes: tuple[int, ...] = ()
    tail: int = 0
    strategy: Strategy = PLAIN
    rules: DecodingParams = DecodingParams()


@dataclass(frozen=True)
class Compiled:
    """A line of the compile log: seconds of lowering and compilation, and bytes on one device."""

    key: Key
    seconds: float
    arguments: int
    outputs: int
    aliased: int
    temporary: int
    code: int


class Executables:
    """Owns the executables of every data group; `compiles` is the log.

    On accelerators programs that can be waited for are compiled in a thread, one at a time: compiling occupies the host
    there, not the devices. On a CPU it would take the rollout's own cores.
    """

    def __init__(
        self,
        targets: Sequence[Target],
        drafters: Sequence[Drafter],
        meshes: Sequence[Mesh],
        log: Callable[[Compiled], None],
    ):
        self.targets, self.drafters, self.meshes, self.log = targets, drafters, meshes, log
        self.executables: OrderedDict[Key, Callable[..., Any]] = OrderedDict()
        self.ran: set[Key] = set()
        self.compiles: list[Compiled] = []
        self.waits = meshes[0].devices.flat[0].platform == "cpu"
        self.thread = ThreadPoolExecutor(1, "compile")
        self.ahead: dict[Key, Future] = {}

    def get(self, key: Key) -> Callable[..., Any]:
        """The executable, compiled now when it is not there."""
        if key not in self.executables:
            begin = time.perf_counter()
            done = self.ahead.pop(key).result if key in self.ahead else partial(compile_now, key, self.lower(key), begin)
            executable, compiled = done()
            self.compiles.append(compiled)
            self.log(compiled)
            self.executables[key] = executable
            if len(self.executables) > MAX_PROGRAMS:
                self.ran.discard(self.executables.popitem(last=False)[0])
        self.executables.move_to_end(key)
        return self.executables[key]

    def is_first_run(self, key: Key) -> bool:
        """Whether the executable had not run before it was asked for now: backends load what a program calls when it does.

        On a CPU that is half a second for a chunk of 12 layers.
        """
        is_first = key not in self.ran
        self.ran.add(key)
        return is_first

    def has(self, key: Key) -> bool:
        """Whether `get` returns at once."""
        return key in self.executables or (key in self.ahead and self.ahead[key].done())

    def is_ready(self, key: Key) -> bool:
        """Whether to use the executable now. Else it is being compiled, or will be when asked again; ask for another one.

        Always true where compiling is waited for.
        """
        if self.waits or self.has(key):
            return True
        if all(future.done() for future in self.ahead.values()):
            begin = time.perf_counter()
            self.ahead[key] = self.thread.submit(compile_now, key, self.lower(key), begin)
        return False


    def lower(self, key: Key) -> jax.stages.Lowered:
        """The program of a key for the devices (or device descriptions) of its group's mesh."""
        target, drafter = self.targets[key.group], self.drafters[key.group]
        state = self.state(key)
        if key.kind == "start":
            return jax.jit(partial(zeros, state), out_shardings=shardings(state)).lower()
        if key.kind == "prefill":
            tokens, lengths = self.array(key, key.batch, key.slots), self.array(key, key.batch)
            return jax.jit(partial(prefill, target)).lower(target.params, tokens, lengths)
        if key.kind == "admit":
            prefilled, size = self.prefilled(key), admission_size(key.batch)
            new = Admission(
                *(self.array(key, size) for _ in range(5)),
                keys=self.array(key, size, 2, dtype=jnp.uint32),
                history=self.array(key, size, self.remembered(key.group, key.sizes[1])),
            )
            return self.update(partial(chunk.admit, target, drafter), state).lower(state, prefilled, new)
        if key.kind == "resize":
            batch, slots = key.sizes[:2]
            after = shardings(self.state(key, batch, slots))
            program = jax.jit(partial(chunk.resize, target, drafter, slots), out_shardings=after)
            return program.lower(state, self.array(key, batch))
        weights = Weights(target.params, drafter.params)
        if key.kind == "catch_up":
            outputs = shardings(state), self.replicated(key)
            program = jax.jit(partial(chunk.catch_up, target, drafter), donate_argnums=0, out_shardings=outputs)
            return program.lower(state, weights, self.array(key))
        if key.kind == "chunk":
            decoder = Decoder(target, drafter, key.rules, key.strategy)
            program = jax.jit(
                partial(chunk.decode_chunk, decoder, key.sizes[0]),
                donate_argnums=0,
                out_shardings=(shardings(state), self.replicated(key)),
            )
            guide = () if key.strategy == PLAIN else drafter.guide(key.batch)
            return program.lower(state, weights, guide, self.array(key, 2))
        if key.kind == "draft":
            decoder, known = Decoder(target, drafter, key.rules, key.strategy), self.known(key)
            program = partial(chunk.draft_alone, decoder, key.sizes[0])
            program = jax.jit(program, donate_argnums=0, out_shardings=shardings(known))
            return program.lower(known, weights, drafter.guide(key.batch))
        raise ValueError(f"no program of kind {key.kind!r}")

    def known(self, key: Key) -> Known:
        """Shapes and shardings of what drafting reads."""
        state = self.state(key)
        features = self.targets[key.group].features(state.cache)
        return Known(state.keys, state.lengths, state.history, features, state.drafter)

    def update(self, function: Callable[..., DecodeState], state: DecodeState) -> Any:
        """A jitted function that takes the state, donated, and returns it in the same place."""
        return jax.jit(function, donate_argnums=0, out_shardings=shardings(state))

    def replicated(self, key: Key) -> NamedSharding:
        """Sharding of what every device of the group holds."""
        return NamedSharding(self.meshes[key.group], PartitionSpec())

    def array(self, key: Key, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """A small array that every device of the group holds."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated(key))

    def remembered(self, group: int, width: int) -> int:
        """Tokens of a prompt that an admission brings along when its prefill is so wide: all, or none that anyone reads."""
        return width + 1 if self.drafters[group].remembers else 0

    def state(self, key: Key, batch: int = 0, slots: int = 0) -> DecodeState:
        """Shapes and shardings of the decoding state."""
        batch, slots, small = batch or key.batch, slots or key.slots, partial(self.array, key)
        target, drafter = self.targets[key.group], self.drafters[key.group]
        return DecodeState(
            roots=small(batch),
            lengths=small(batch),
            limits=small(batch),
            live=small(batch, dtype=jnp.bool_),
            keys=small(batch, 2, dtype=jnp.uint32),
            tail=small(batch, key.tail),
            history=small(batch, target.room(slots) if drafter.remembers else 0),
            cache=target.empty(batch, slots),
            drafter=drafter.empty(batch, slots),
        )

    def prefilled(self, key: Key) -> PyTree:
        """What the prefill that an admission reads from returns: shapes, and the shardings that its compilation chose."""
        executable = self.get(prefill_key(key.group, *key.sizes))
        return jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            executable.out_info[0],
            executable.output_shardings[0],
        )


def compile_now(key: Key, lowered: jax.stages.Lowered, begin: float) -> tuple[Callable[..., Any], Compiled]:
    """The executable, and its line of the log, with seconds since lowering began.

    Lowering is not done here: in a thread it would miss JAX's local settings.
    """
    executable = lowered.compile()
    return executable, compile_record(key, time.perf_counter() - begin, executable.memory_analysis())


def time_draft(registry: Executables, key: Key, weights: Weights) -> float:
    """Seconds of a round of the "draft" program of this key, on sequences that are half full of zeros."""
    spec = registry.known(key), registry.drafters[key.group].guide(key.batch)
    known, guide = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding), spec)
    program, spent = registry.get(key), []
    for _ in range(4):
        half = jnp.full(key.batch, key.slots // 2, jnp.int32, device=known.lengths.sharding)
        known = jax.block_until_ready(known.replace(lengths=half))
        begin = time.perf_counter()
        known = jax.block_until_ready(program(known, weights, guide))
        spent.append((time.perf_counter() - begin) / key.sizes[0])
    return median(spent[1:])


def prefill_key(group: int, prompts: int, width: int) -> Key:
    """Key of the prefill of this many prompts of this many tokens."""
    return Key("prefill", group, prompts, width)


def prefill(target: Target, params: PyTree, tokens: jax.Array, lengths: jax.Array) -> tuple[PyTree, jax.Array]:
    """The prefill, and a small array that is ready when it is done."""
    return target.prefill(params, tokens, lengths), lengths + 1


def zeros(like: PyTree) -> PyTree:
    """Zeros in these shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


def shardings(tree: PyTree) -> PyTree:
    """The shardings of a tree of ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)


def compile_record(key: Key, seconds: float, memory: Any) -> Compiled:
    """The log line of a compilation."""
    return Compiled(
        key,
        seconds,
        memory.argument_size_in_bytes,
        memory.output_size_in_bytes,
        memory.alias_size_in_bytes,
        memory.temp_size_in_bytes,
        memory.generated_code_size_in_bytes,
    )


def use_compile_cache(folder: str) -> None:
    """Turns on JAX's persistent compilation cache, in this folder, the default one, or not at all."""
    if folder == "off":
        return
    path = Path(folder).expanduser() if folder else Path.home() / ".cache" / "tlt_jax" / "xla"
    if jax.config.jax_compilation_cache_dir != str(path):
        jax.config.update("jax_compilation_cache_dir", str(path))
        compilation_cache.reset_cache()  # JAX settles at the first compilation whether and where it has a cache
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def log_compile(compiled: Compiled) -> None:
    """One line per executable."""
    key, mib = compiled.key, 2**-20
    what = f"{key.kind} of group {key.group}, {key.batch} x {key.slots}" + (f", {key.sizes}" if key.sizes else "")
    log.info(
        "compiled %s in %.2f s: %.1f MiB in, %.1f out (%.1f in place), %.1f temporary",
        what, compiled.seconds, compiled.arguments * mib, compiled.outputs * mib, compiled.aliased * mib,
        compiled.temporary * mib,
    )  # fmt: skip
