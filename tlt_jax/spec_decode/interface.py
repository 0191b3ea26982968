"""What scores trees and what drafts them, as pure functions; knows no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
from flax import struct
from jaxtyping import Array, Bool, Float, Int32, Shaped

from tlt_jax.spec_decode.draft_tree import Candidates, NoiseAhead
from tlt_jax.spec_decode.strategy import Strategy

PyTree = Any


@struct.dataclass
class Context:
    """What a drafter may look at: tokens 0..lengths (the last one is the root), and features of all before the root.

    `host_context` is what the host gave along with the chunk; `ahead` is the noise of positions lengths + 1, + 2, ..., or None
    when tokens are chosen without noise, or the drafter reads none.
    """

    history: Int32[Array, "B S"]
    lengths: Int32[Array, " B"]
    features: Float[Array, "B S F"]
    host_context: PyTree
    ahead: NoiseAhead | None = None


class Resize(Protocol):
    """The given rows of a cache or state, for so many committed slots; row -1 may hold anything."""

    def __call__(self, cache: PyTree, rows: Int32[Array, " C"], slots: int, /) -> PyTree: ...


class Empty(Protocol):
    """ShapeDtypeStructs, with shardings, of a cache or state."""

    def __call__(self, batch: int, slots: int, /) -> PyTree: ...


class Forward(Protocol):
    """Logits after every node of the trees, and the scratch that `keep` commits from."""

    def __call__(
        self,
        params: PyTree,
        tokens: Int32[Array, "B N"],
        positions: Int32[Array, "B N"],
        ancestors: Bool[Array, "B N N"],
        cache: PyTree,
        lengths: Int32[Array, " B"],
        /,
    ) -> tuple[Float[Array, "B N V"], PyTree]: ...


class Keep(Protocol):
    """The cache with the path's nodes at slots lengths[b]..; all M are written."""

    def __call__(
        self,
        cache: PyTree,
        scratch: PyTree,
        path: Int32[Array, "B M"],
        lengths: Int32[Array, " B"],
        /,
    ) -> PyTree: ...


class Features(Protocol):
    """What the drafter asked for, of every committed slot."""

    def __call__(self, cache: PyTree, /) -> Float[Array, "B S F"]: ...


class States(Protocol):
    """The normed last hidden state of every committed slot."""

    def __call__(self, cache: PyTree, /) -> Float[Array, "B S D"]: ...


class Prefill(Protocol):
    """What `insert` takes: slots 0..lengths of each prompt."""

    def __call__(
        self, params: PyTree, tokens: Int32[Array, "Q P"], lengths: Int32[Array, " Q"], /
    ) -> PyTree: ...


class Insert(Protocol):
    """The cache whose row rows[r] is prompt source[r]; rows from B on are dropped."""

    def __call__(
        self,
        cache: PyTree,
        prefilled: PyTree,
        rows: Int32[Array, " R"],
        source: Int32[Array, " R"],
        /,
    ) -> PyTree: ...


class Target(NamedTuple):
    """The model that decides, as pure functions; a cache and a prefill are pytrees only it understands.

    padded_slots(slots) are the slots of a cache for so many committed tokens, scratch tail too; `vocab`
    is the width of the logits; `params` are ShapeDtypeStructs, with shardings, of the weights.
    `states` is None where they are not captured, or where the features are these states already.
    `unrolls`: small loops within a round are written out, as accelerators like it, whose host waits
    in every pass of a loop; a CPU likes to compile less and to leave early.
    """

    forward: Forward
    keep: Keep
    features: Features
    prefill: Prefill
    insert: Insert
    resize: Resize
    empty: Empty
    padded_slots: Callable[[int], int]
    vocab: int
    params: PyTree
    states: States | None = None
    unrolls: bool = False


class Draft(Protocol):
    """At least strategy.nodes - 1 candidates; `temperature` is the target's, 0 when greedy."""

    def __call__(
        self,
        weights: PyTree,
        state: PyTree,
        context: Context,
        strategy: Strategy,
        temperature: float,
        /,
    ) -> Candidates: ...


class CatchUp(Protocol):
    """The state that lacks at most the last `missing` >= 1 committed tokens of any live row."""

    def __call__(
        self,
        weights: PyTree,
        state: PyTree,
        context: Context,
        live: Bool[Array, " B"],
        missing: Int32[Array, ""],
        /,
    ) -> PyTree: ...


class Extend(Protocol):
    """The state that knows `width` more committed tokens."""

    def __call__(
        self, weights: PyTree, state: PyTree, context: Context, width: int, /
    ) -> PyTree: ...


class Reset(Protocol):
    """The state whose fresh rows know nothing."""

    def __call__(self, state: PyTree, fresh: Bool[Array, " B"], /) -> PyTree: ...


class Drafter(NamedTuple):
    """What guesses ahead, as pure functions; its state rides in the decoding state.

    `weights` are the target's too. `catch_up` is None when there is nothing to catch up with.
    host_context(batch) are ShapeDtypeStructs of what the host gives along with a chunk that drafts;
    `params` are those of its own weights, with shardings. `remembers`: whether it reads
    `Context.history`; `reads_noise`: whether it reads `Context.ahead`.
    """

    draft: Draft
    catch_up: CatchUp | None
    extend: Extend
    reset: Reset
    resize: Resize
    empty: Empty
    host_context: Callable[[int], PyTree]
    params: PyTree
    remembers: bool
    reads_noise: bool


def stateless(
    draft: Draft, remembers: bool = True, host_context: Callable[[int], PyTree] = lambda batch: ()
) -> Drafter:
    """A drafter without weights or state of its own."""
    return Drafter(
        draft=draft,
        catch_up=None,
        extend=lambda weights, state, context, width: state,
        reset=lambda state, fresh: state,
        resize=lambda state, rows, slots: state,
        empty=lambda batch, slots: (),
        host_context=host_context,
        params=(),
        remembers=remembers,
        reads_noise=False,
    )


def undrafted(
    weights: PyTree, state: PyTree, context: Context, strategy: Strategy, temperature: float
) -> Candidates:
    """The draft of no drafter. Raises ValueError for a strategy that needs one."""
    raise ValueError(f"{strategy} needs a drafter, and there is none")


NO_DRAFTER = stateless(undrafted, remembers=False)


class ExtendCache(Protocol):
    """The cache with slots starts.. written, and the hidden states of window place `last`."""

    def __call__(
        self,
        weights: PyTree,
        cache: PyTree,
        tokens: Int32[Array, "B W"],
        features: Float[Array, "B W F"],
        starts: Int32[Array, " B"],
        last: Int32[Array, " B"],
        /,
    ) -> tuple[PyTree, Float[Array, "B Z"]]: ...


class Fill(Protocol):
    """The cache with slots starts.. of these rows written."""

    def __call__(
        self,
        weights: PyTree,
        cache: PyTree,
        tokens: Int32[Array, "R W"],
        features: Float[Array, "R W F"],
        rows: Int32[Array, " R"],
        starts: Int32[Array, " R"],
        /,
    ) -> PyTree: ...


class Step(Protocol):
    """The scratch with k more nodes, and their hidden states; `hidden` are those of their parents.

    They are written from scratch row level * k on. They see `starts` slots, and of the first R
    scratch rows those that `ancestors` marks, themselves too.
    """

    def __call__(
        self,
        weights: PyTree,
        cache: PyTree,
        scratch: PyTree,
        tokens: Int32[Array, "B k"],
        hidden: Float[Array, "B k Z"],
        positions: Int32[Array, "B k"],
        starts: Int32[Array, " B"],
        ancestors: Bool[Array, "B k R"],
        level: int | Int32[Array, ""],
        /,
    ) -> tuple[PyTree, Float[Array, "B k Z"]]: ...


class Logits(Protocol):
    """Logits of the tokens that the network can propose."""

    def __call__(
        self, weights: PyTree, hidden: Float[Array, "... Z"], /
    ) -> Float[Array, "... U"]: ...


class Ids(Protocol):
    """The token ids of the logits, or None when they are 0, 1, ..."""

    def __call__(self, weights: PyTree, /) -> Int32[Array, " U"] | None: ...


class Top(Protocol):
    """The k largest along the logits' axis and their places, as lax.top_k."""

    def __call__(
        self, values: Float[Array, "... U"], k: int, /
    ) -> Sequence[Shaped[Array, "... k"]]: ...


class Network(NamedTuple):
    """A learned drafter's network, as pure functions of all weights, its own and the target's.

    Its cache slot t comes from (features of token t, token t + 1), at rotary position t.
    scratch(batch, rows) is zeros. `params` are ShapeDtypeStructs, with shardings, of its own
    weights; `hidden` is that of hidden[1, Z]. `unrolls`: levels of a tree are no loop of the
    program, which is compiled for longer then, and runs without the host on accelerators.
    """

    extend: ExtendCache
    fill: Fill
    step: Step
    logits: Logits
    ids: Ids
    resize: Resize
    empty: Empty
    scratch: Callable[[int, int], PyTree]
    params: PyTree
    hidden: jax.ShapeDtypeStruct
    top: Top = jax.lax.top_k
    unrolls: bool = False
