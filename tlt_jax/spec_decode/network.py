"""The interface of a learned drafter's network, as pure functions of all weights, its own and the target's."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax

from tlt_jax.spec_decode.interface import PyTree


class LevelPasses(NamedTuple):
    """A draft by one pass for each level of a tree. Slot t of the cache: features of token t and token t + 1, at position t."""

    # (weights, cache, scratch, tokens[B, k], hidden[B, k, Z] of the parents, positions[B, k], starts[B], ancestors[B, k, R],
    # level) -> the scratch with k more nodes from row level * k on, and their hidden states [B, k, Z]. The nodes attend to
    # `starts` slots, and to those of the first R scratch rows that `ancestors` marks, themselves included.
    step: Callable
    # (batch, rows) -> zeros
    scratch: Callable[[int, int], PyTree]


class BlockPass(NamedTuple):
    """A draft of all levels by one pass, at most `depth`. Slot t of the cache: features of token t. No hidden state is read."""

    # (weights, cache, roots[B], starts[B], levels) -> hidden states [B, P, Z] of the first `levels` positions after each root,
    # in one pass that sees `starts` slots of the cache
    draft: Callable
    depth: int
    # (weights, tokens[B, k]) -> what the token before adds to the logits [B, k, U] of each of k nodes; None: nothing
    bias: Callable | None
    # (weights, hidden[B, 1, Z], tokens[B, k]) -> log-probability [B, k] that the target accepts the best token after each of
    # k nodes, from the hidden state of its position; None: unknown
    confidence: Callable | None


class Network(NamedTuple):
    """A learned drafter's network."""

    # (weights, cache, tokens[B, W], features[B, W, F], starts[B], last[B]) -> the cache with slots starts.. written, and the
    # hidden states [B, Z] at index `last` of the window
    extend: Callable
    # (weights, cache, tokens[R, W], features[R, W, F], rows[R], starts[R]) -> the cache with slots starts.. of rows written
    fill: Callable
    passes: LevelPasses | BlockPass
    # (weights, hidden[..., Z]) -> logits [..., U] of the tokens that the network can propose
    logits: Callable
    # (weights) -> their token ids [U]; None: 0, 1, ...
    ids: Callable
    # as those of a Target, of the network's cache
    resize: Callable
    empty: Callable
    params: PyTree  # ShapeDtypeStructs with shardings of its own weights
    hidden: jax.ShapeDtypeStruct  # [1, Z], with its sharding
    # (values[..., U], k) -> the k largest values along the axis and their indices
    top: Callable = jax.lax.top_k
    unrolls: bool = False  # the levels of a tree, as a Target's small loops
    # (values[..., U], k) -> `top`, and the logsumexp along the axis, NaN where a value is (the others are any there): in place
    # of `top`, for GPUs, where kernels cost more than their arithmetic
    survey: Callable | None = None
