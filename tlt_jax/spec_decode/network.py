"""The interface of a learned drafter's network, as pure functions; knows no network."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
from jaxtyping import Array, Bool, Float, Int32, Shaped

from tlt_jax.spec_decode.interface import Empty, PyTree, Resize


class ExtendCache(Protocol):
    """The cache with slots starts.. written, and the hidden states at index `last` of the window."""

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
    """The scratch with k more nodes, and their hidden states; `hidden`: those of their parents.

    The nodes are written to scratch rows from level * k on. They attend to `starts` slots, and to those of the first R
    scratch rows that `ancestors` marks, themselves included.
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
    """The k largest values along the logits' axis and their indices, as lax.top_k."""

    def __call__(
        self, values: Float[Array, "... U"], k: int, /
    ) -> Sequence[Shaped[Array, "... k"]]: ...


class Survey(Protocol):
    """`Top`, and the logsumexp along the axis, NaN where a value is: the others are any there."""

    def __call__(
        self, values: Float[Array, "... U"], k: int, /
    ) -> tuple[Float[Array, "... k"], Int32[Array, "... k"], Float[Array, ...]]: ...


class DraftBlock(Protocol):
    """Hidden states of the first `levels` positions after each root, in one pass that sees `starts` slots of the cache."""

    def __call__(
        self,
        weights: PyTree,
        cache: PyTree,
        roots: Int32[Array, " B"],
        starts: Int32[Array, " B"],
        levels: int,
        /,
    ) -> Float[Array, "B P Z"]: ...


class Bias(Protocol):
    """What the token before adds to the logits of each of k nodes."""

    def __call__(
        self, weights: PyTree, tokens: Int32[Array, "B k"], /
    ) -> Float[Array, "B k U"]: ...


class Confidence(Protocol):
    """Log-probability that the target accepts the best token after each of k nodes, from the hidden state of its position."""

    def __call__(
        self, weights: PyTree, hidden: Float[Array, "B 1 Z"], tokens: Int32[Array, "B k"], /
    ) -> Float[Array, "B k"]: ...


class LevelPasses(NamedTuple):
    """A draft by one pass for each level of a tree. scratch(batch, rows): zeros."""

    step: Step
    scratch: Callable[[int, int], PyTree]


class BlockPass(NamedTuple):
    """A draft of all levels by one pass; `depth`: at most this many. `bias`, `confidence`: None when the network has none."""

    draft: DraftBlock
    depth: int
    bias: Bias | None
    confidence: Confidence | None


class Network(NamedTuple):
    """A learned drafter's network, as pure functions of all weights, its own and the target's.

    `passes` decides what slot t of its cache comes from: features of token t and token t + 1, at rotary position t
    (LevelPasses), or features of token t alone (BlockPass, which reads no hidden state of tokens: `extend` returns some of
    width 0). `params`: ShapeDtypeStructs with shardings of its own weights; `hidden`: that of hidden[1, Z]. `unrolls`: the
    levels of a tree are unrolled, which takes longer to compile, and runs on accelerators without waiting for the host.
    `survey`: in place of `top`, for GPUs, where kernels cost more than their arithmetic.
    """

    extend: ExtendCache
    fill: Fill
    passes: LevelPasses | BlockPass
    logits: Logits
    ids: Ids
    resize: Resize
    empty: Empty
    params: PyTree
    hidden: jax.ShapeDtypeStruct
    top: Top = jax.lax.top_k
    unrolls: bool = False
    survey: Survey | None = None
