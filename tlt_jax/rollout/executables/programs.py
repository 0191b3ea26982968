"""The programs of a data group, each named by the sizes it is compiled for.

A program is lowered for the devices of its group (`lower`), and called through the Executables that compile it, or through
the simulator's programs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.rollout.request import admission_size
from tlt_jax.spec_decode import decode, decode_state
from tlt_jax.spec_decode.decode import Decoder
from tlt_jax.spec_decode.decode_state import (
    Admission,
    Appended,
    DecodeState,
    Features,
    Weights,
)
from tlt_jax.spec_decode.interface import DecodingParams, Drafter, PyTree, Target
from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name

if TYPE_CHECKING:
    from tlt_jax.rollout.executables.compilation import Executables

# Relative seconds of compiling a chunk that drafts, and of each of its levels.
DRAFTS, LEVEL = 1.8, 0.05


@dataclass(frozen=True)
class StateShape:
    """Sizes of a group's decoding state: rows and committed cache slots."""

    group: int
    batch: int
    slots: int

    def __str__(self) -> str:
        return f"{self.batch} x {self.slots}, group {self.group}"


@dataclass(frozen=True)
class GroupShapes:
    """Shapes and shardings of the arguments and results of one data group's programs.

    The decoding state and the weights are those of `drafter`. The `drafters` that strategies name
    share that state; each reads, extends or ignores it.
    """

    target: Target
    drafter: Drafter
    mesh: Mesh
    drafters: Mapping[str, Drafter] = field(default_factory=dict)

    def drafter_of(self, strategy: Strategy) -> Drafter:
        """The drafter that the strategy names; `drafter` when it names none."""
        return self.drafters[strategy.drafter] if strategy.drafter else self.drafter

    @property
    def weights(self) -> Weights:
        """The weights, as ShapeDtypeStructs."""
        return Weights(self.target.params, self.drafter.params)

    @property
    def replicated(self) -> NamedSharding:
        """The sharding of arrays that every device of the group holds whole."""
        return NamedSharding(self.mesh, PartitionSpec())

    def array(self, *shape: int, dtype: Any = jnp.int32) -> jax.ShapeDtypeStruct:
        """A small array that every device of the group holds whole."""
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.replicated)

    def state(self, shape: StateShape) -> DecodeState:
        """The decoding state."""
        batch, slots, small = shape.batch, shape.slots, self.array
        return DecodeState(
            roots=small(batch),
            lengths=small(batch),
            limits=small(batch),
            live=small(batch, dtype=jnp.bool_),
            keys=small(batch, 2, dtype=jnp.uint32),
            stop_state=small(batch),
            history=small(
                batch, self.target.padded_slots(slots) if self.drafter.reads_history else 0
            ),
            cache=self.target.empty(batch, slots),
            drafter=self.drafter.empty(batch, slots),
        )


class Program:
    """Names one executable of one data group: frozen, hashable, with the sizes that it is compiled for as fields.

    `relative_seconds`: what compiling it takes relative to a chunk of plain decoding, measured on policies of 1, 12 and 30
    layers. `text`: its name in logs, a format of the program and of the name of its strategy.
    """

    group: int
    relative_seconds: ClassVar[float] = 1.0
    text: ClassVar[str]

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        """The program lowered for its group's devices or device descriptions; `shapes`: those of the group.

        `get` returns the executable of another program, whose shardings this one reads.
        """
        raise NotImplementedError

    def __call__(self, programs: Executables, *arguments: Any) -> Any:
        """Dispatches the program: the first line of each docstring has its arguments and results."""
        return programs.get(self)(*arguments)

    def __str__(self) -> str:
        return self.text.format(self, name(getattr(self, "strategy", PLAIN)))


@dataclass(frozen=True)
class OfState(Program):
    """A program that makes or takes a decoding state."""

    state: StateShape

    @property
    def group(self) -> int:
        return self.state.group


@dataclass(frozen=True)
class Start(OfState):
    """start() -> state without sequences."""

    relative_seconds = 0.07
    text = "start of {0.state}"

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        state = shapes.state(self.state)
        return jax.jit(partial(zeros, state), out_shardings=shardings(state)).lower()


@dataclass(frozen=True)
class Prefill(Program):
    """prefill(target weights, tokens[Q, P], lengths[Q]) -> keys and values of the prompts, marker: their record, if any."""

    group: int
    prompts: int
    width: int

    relative_seconds = 0.4
    text = "prefill of {0.prompts} x {0.width}, group {0.group}"

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        tokens, lengths = shapes.array(self.prompts, self.width), shapes.array(self.prompts)
        program = jax.jit(partial(prefill, shapes.target))
        return program.lower(shapes.target.params, tokens, lengths)


@dataclass(frozen=True)
class Admit(OfState):
    """admit(state, prefilled, admission) -> state in which new sequences have rows; donates the state."""

    source: Prefill

    relative_seconds = 0.3
    text = "admission to {0.state} from {0.source.prompts} x {0.source.width}"

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        state, size = shapes.state(self.state), admission_size(self.state.batch)
        prefill = get(self.source)  # its results have the shardings that the compiler chose
        prefilled = jax.tree.map(
            lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
            prefill.out_info[0],
            prefill.output_shardings[0],
        )
        new = Admission(
            *(shapes.array(size) for _ in range(5)),
            keys=shapes.array(size, 2, dtype=jnp.uint32),
            history=shapes.array(
                size, history_width(self.source.width, shapes.drafter.reads_history)
            ),
        )
        function = partial(decode_state.admit, shapes.target, shapes.drafter)
        program = jax.jit(function, donate_argnums=0, out_shardings=shardings(state))
        return program.lower(state, prefilled, new)


@dataclass(frozen=True)
class Resize(OfState):
    """resize(state, rows[batch]) -> state of these rows (-1: empty) with other numbers of rows and slots."""

    batch: int
    slots: int

    relative_seconds = 0.1
    text = "resize of {0.state} to {0.batch} x {0.slots}"

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        state = shapes.state(self.state)
        after = StateShape(self.group, self.batch, self.slots)
        function = partial(decode_state.resize, shapes.target, shapes.drafter, self.slots)
        program = jax.jit(function, out_shardings=shardings(shapes.state(after)))
        return program.lower(state, shapes.array(self.batch))


@dataclass(frozen=True)
class CatchUp(OfState):
    """catch_up(state, weights, missing) -> state whose drafter lacks at most `missing` tokens, marker."""

    relative_seconds = 0.5
    text = "catching up of {0.state}"

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        state = shapes.state(self.state)
        outputs = shardings(state), shapes.replicated
        function = partial(decode.catch_up, shapes.target, shapes.drafter)
        program = jax.jit(function, donate_argnums=0, out_shardings=outputs)
        return program.lower(state, shapes.weights, shapes.array())


@dataclass(frozen=True)
class Decode(OfState):
    """decode(state, weights, host context, bounds[2]) -> state, Report of a chunk; donates the state."""

    rounds: int
    strategy: Strategy = PLAIN
    params: DecodingParams = DecodingParams()

    @property
    def relative_seconds(self) -> float:
        drafts = self.strategy != PLAIN
        return DRAFTS + LEVEL * self.strategy.depth if drafts else 1.0

    text = "chunk of {0.rounds} rounds, {1}, of {0.state}"

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        state = shapes.state(self.state)
        drafter = shapes.drafter_of(self.strategy)
        decoder = Decoder(shapes.target, drafter, self.params, self.strategy)
        program = jax.jit(
            partial(decode.decode_chunk, decoder, self.rounds),
            donate_argnums=0,
            out_shardings=(shardings(state), shapes.replicated),
        )
        host = () if self.strategy == PLAIN else drafter.host_context(self.state.batch)
        return program.lower(state, shapes.weights, host, shapes.array(2))


@dataclass(frozen=True)
class Append(OfState):
    """append(state, weights, reply) -> state in which R sequences go on, their record; donates the state."""

    rows: int
    width: int

    relative_seconds = 0.6
    text = "append of {0.rows} x {0.width} to {0.state}"

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        state, many = shapes.state(self.state), partial(shapes.array, self.rows)
        new = Appended(many(), many(self.width), many(), many())
        function = partial(decode_state.append, shapes.target, self.state.slots)
        outputs = shardings(state), shapes.replicated
        program = jax.jit(function, donate_argnums=0, out_shardings=outputs)
        return program.lower(state, shapes.weights, new)


@dataclass(frozen=True)
class Harvest(OfState):
    """harvest(state, rows[R], starts[R]) -> a window of features of each of these rows.

    The state is not donated. Windows keep the sharding of the state's features.
    """

    rows: int
    width: int

    text = "harvest of {0.rows} x {0.width} from {0.state}"

    def lower(self, shapes: GroupShapes, get: Callable[[Program], Any]) -> jax.stages.Lowered:
        state, target, places = shapes.state(self.state), shapes.target, shapes.array(self.rows)
        sources = Features(
            target.features(state.cache), target.states(state.cache) if target.states else None
        )
        function = partial(decode_state.harvest, target, self.width)
        program = jax.jit(function, out_shardings=shardings(sources))
        return program.lower(state, places, places)


def of_group(program: Program, group: int) -> Program:
    """The same program of another data group."""
    if not isinstance(program, OfState):
        return replace(program, group=group)
    parts = {"state": replace(program.state, group=group)}
    if isinstance(program, Admit):
        parts["source"] = replace(program.source, group=group)
    return replace(program, **parts)


def history_width(width: int, reads_history: bool) -> int:
    """Tokens of a prompt that an admission from a prefill of this width copies to the history.

    All of them, or none when the drafter reads no history.
    """
    return width + 1 if reads_history else 0


def prefill(
    target: Target, params: PyTree, tokens: jax.Array, lengths: jax.Array
) -> tuple[PyTree, jax.Array]:
    """The prefill, and its record, or without one a small array that is ready when it is done."""
    found = target.prefill(params, tokens, lengths)
    return found, target.record.of(found) if target.record else lengths + 1


def zeros(like: PyTree) -> PyTree:
    """Zeros of these shapes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)


def shardings(tree: PyTree) -> PyTree:
    """The shardings of a tree of ShapeDtypeStructs."""
    return jax.tree.map(lambda leaf: leaf.sharding, tree)
