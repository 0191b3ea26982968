"""The interfaces of targets and drafters, as pure functions; knows no network."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from flax import struct
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.spec_decode.decoding_params import Sampling
from tlt_jax.spec_decode.draft_tree import Candidates, NoiseAhead
from tlt_jax.spec_decode.strategy import Strategy

PyTree = Any


@struct.dataclass
class Context:
    """What a drafter may read: tokens 0..lengths (the last is the root), and the features of all tokens before the root.

    `host_context`: what the host passed with the chunk. `ahead`: the noise of positions lengths + 1, + 2, ...; None when
    tokens are chosen without noise, or the drafter reads none.
    """

    history: Int32[Array, "B S"]
    lengths: Int32[Array, " B"]
    features: Float[Array, "B S F"]
    host_context: PyTree
    ahead: NoiseAhead | None = None


class Resize(Protocol):
    """The given rows of a cache or state, with slots for `slots` committed tokens; row -1: undefined values."""

    def __call__(self, cache: PyTree, rows: Int32[Array, " C"], slots: int, /) -> PyTree: ...


class Empty(Protocol):
    """ShapeDtypeStructs with shardings of a cache or state."""

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
    """The features that the drafter requested, of every committed slot."""

    def __call__(self, cache: PyTree, /) -> Float[Array, "B S F"]: ...


class States(Protocol):
    """The normed last hidden state of every committed slot."""

    def __call__(self, cache: PyTree, /) -> Float[Array, "B S D"]: ...


class Prefill(Protocol):
    """The argument of `insert`: slots 0..lengths of each prompt."""

    def __call__(
        self, params: PyTree, tokens: Int32[Array, "Q P"], lengths: Int32[Array, " Q"], /
    ) -> PyTree: ...


class Insert(Protocol):
    """The cache with prompt source[r] in row rows[r]; rows >= B are dropped."""

    def __call__(
        self,
        cache: PyTree,
        prefilled: PyTree,
        rows: Int32[Array, " R"],
        source: Int32[Array, " R"],
        /,
    ) -> PyTree: ...


class Choose(Protocol):
    """Id of the largest perturbed value, its scaled logit, and the logsumexp of the scaled logits, NaN where one is."""

    def __call__(
        self, scaled: Float[Array, "*A V"], perturbed: Float[Array, "*A V"], /
    ) -> tuple[Int32[Array, "*A"], Float[Array, "*A"], Float[Array, "*A"]]: ...


class Filter(Protocol):
    """`sampling.filter`: the scaled logits, -inf at tokens that top-k and top-p drop."""

    def __call__(
        self, scaled: Float[Array, "*A V"], sampling: Sampling, /
    ) -> Float[Array, "*A V"]: ...


class Target(NamedTuple):
    """The model that decides, as pure functions; caches and prefills are pytrees that only the target understands.

    padded_slots(slots): slots of a cache for `slots` committed tokens, scratch included. `vocab`: width of the logits.
    `params`: ShapeDtypeStructs with shardings of the weights. `states`: None when not captured, or when the features are
    these states. `unrolls`: small loops within a round are unrolled, for accelerators, where every iteration of a loop
    waits for the host; a CPU compiles loops faster and leaves them early. `choose`: tokens are chosen in one pass over the
    vocabulary, and at all nodes of a small tree at once: for GPUs, where kernels cost more than arithmetic. `filter`: of
    the logits that `choose` chooses from.
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
    choose: Choose | None = None
    filter: Filter | None = None


class Draft(Protocol):
    """At least strategy.nodes - 1 candidates; `temperature`: the target's, 0 when greedy."""

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
    """The state with `width` more committed tokens."""

    def __call__(
        self, weights: PyTree, state: PyTree, context: Context, width: int, /
    ) -> PyTree: ...


class Reset(Protocol):
    """The state with its fresh rows empty."""

    def __call__(self, state: PyTree, fresh: Bool[Array, " B"], /) -> PyTree: ...


class Drafter(NamedTuple):
    """The drafter, as pure functions; its state is part of the decoding state.

    `weights`: the target's too. `catch_up`: None when the drafter has no state to catch up. host_context(batch):
    ShapeDtypeStructs of what the host passes with a chunk that drafts. `params`: ShapeDtypeStructs with shardings of the
    drafter's weights. `remembers`: whether it reads `Context.history`; `reads_noise`: whether it reads `Context.ahead`.
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
    """A drafter without weights and state."""
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
    """Raises ValueError: the strategy needs a drafter."""
    raise ValueError(f"{strategy} needs a drafter, but none is configured")


NO_DRAFTER = stateless(undrafted, remembers=False)
