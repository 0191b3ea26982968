"""What a round is made of: draft trees, noise, parameters of sampling, and targets and drafters as pure functions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

PyTree = Any
ABSENT = -1  # token of a padding node: equal to no token id


@struct.dataclass
class DraftTree:
    """Token trees. Node 0 is the root, the newest token, and its own parent.

    parents[b, i] < i for i > 0; siblings are distinct. `scores`: log-probabilities, estimated by the drafter, that the
    target accepts the whole path to the node. `ranks`: the largest sibling rank on the path to the node (0: every node is
    the best child). Padding nodes have the token ABSENT and are children of the root.
    """

    tokens: Int32[Array, "B N"]
    parents: Int32[Array, "B N"]
    depths: Int32[Array, "B N"]
    scores: Float[Array, "B N"]
    ranks: Int32[Array, "B N"]


@struct.dataclass
class Candidates:
    """Nodes to choose a tree from; score -inf marks padding.

    `scores`, `ranks`: as in a DraftTree. `parents`: index of a candidate, -1 for the root; a parent comes before its
    children. Padding aside, siblings are distinct and no child has a higher score than its parent.
    """

    tokens: Int32[Array, "B C"]
    parents: Int32[Array, "B C"]
    depths: Int32[Array, "B C"]
    scores: Float[Array, "B C"]
    ranks: Int32[Array, "B C"]


def score_order(scores: Float[Array, "B N"]) -> Int32[Array, "B N"]:
    """Rank of every node by score, 0 for the highest; of equal scores the earlier node comes first.

    The root, whose score is 0, has rank 0.
    """
    earlier = jnp.arange(scores.shape[1])[None, :] < jnp.arange(scores.shape[1])[:, None]
    better = (scores[:, None, :] > scores[:, :, None]) | (
        (scores[:, None, :] == scores[:, :, None]) & earlier
    )
    return better.sum(axis=-1, dtype=jnp.int32)


@struct.dataclass
class NoiseAhead:
    """Noise of the next M positions of each row; every position is drawn once.

    Position p of row b is values[b * M + p mod M]; `ends`: the first position of each row that is not drawn.
    """

    values: Float[Array, "A V"]
    ends: Int32[Array, " B"]

    @property
    def count(self) -> int:
        """M."""
        return self.values.shape[0] // self.ends.shape[0]

    def places(self, positions: Int32[Array, " B"]) -> Int32[Array, " B"]:
        """The indices of `values` at one position of each row."""
        return jnp.arange(self.ends.shape[0], dtype=jnp.int32) * self.count + positions % self.count


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: temperature (0: greedy), then top-k (0: off), then top-p (1: off)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, section: Any) -> Sampling:
        """The sampling of a configuration section: rollout or eval."""
        return cls(section.temperature, section.top_k, section.top_p)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class DecodingParams:
    """All that generated tokens depend on, besides weights and random keys.

    `eos_ids`: tokens that end a sequence; `stops`: data.stop_rules.StopRules of the stop texts, or None. `kept`: ids that are
    reported of the tokens that a filter kept, of which log-probs are then; 0: none, and log-probs are of all tokens.
    """

    sampling: Sampling = Sampling()
    eos_ids: tuple[int, ...] = ()
    stops: Any = None
    kept: int = 0


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


class TokenRecord(NamedTuple):
    """Numbers that the target keeps of every token that it has processed: `width` of this dtype.

    `of`: (the scratch of `forward`, or a prefill) -> [B, N, width]
    """

    width: int
    dtype: Any
    of: Callable[[PyTree], Array]


class Target(NamedTuple):
    """The model that decides, as pure functions; caches and prefills are pytrees that only the target understands."""

    # (params, tokens[B, N], positions[B, N], ancestors[B, N, N], cache, lengths[B]) -> logits[B, N, V], scratch of `keep`
    forward: Callable
    # (cache, scratch, path[B, M], lengths[B]) -> the cache with the path's nodes at slots lengths[b]..; all M are written
    keep: Callable
    # (cache) -> the features [B, S, F] that the drafter requested, of every committed slot
    features: Callable
    # (params, tokens[Q, P], lengths[Q]) -> slots 0..lengths of each prompt, for `insert`
    prefill: Callable
    # (cache, prefilled, rows[R], source[R]) -> the cache with prompt source[r] in row rows[r]; rows >= B are dropped
    insert: Callable
    # (cache, rows[C], slots) -> these rows of the cache (-1: undefined values), with slots for `slots` committed tokens
    resize: Callable
    # (batch, slots) -> ShapeDtypeStructs with shardings of a cache
    empty: Callable
    # (slots) -> slots of a cache for `slots` committed tokens, scratch included
    padded_slots: Callable[[int], int]
    vocab: int  # width of the logits
    params: PyTree  # ShapeDtypeStructs with shardings of the weights
    # (cache) -> the normed last hidden states [B, S, D]; None when not captured, or when the features are these states
    states: Callable | None = None
    # Small loops within a round are unrolled, for accelerators, where every iteration of a loop waits for the host; a CPU
    # compiles loops faster and leaves them early.
    unrolls: bool = False
    # (scaled[*A, V], perturbed[*A, V]) -> id of the largest perturbed value, its scaled logit, and the logsumexp of the scaled
    # logits, NaN where one is. With it tokens are chosen in one pass over the vocabulary, and at all nodes of a small tree at
    # once: for GPUs, where kernels cost more than arithmetic.
    choose: Callable | None = None
    # (scaled[*A, V], sampling) -> sampling.filter of the logits that `choose` chooses from
    filter: Callable | None = None
    record: TokenRecord | None = None  # None: nothing is kept
    # (cache, scratch of `forward` for R rows, rows[R], starts[R]) -> the cache with all nodes of tree r in row rows[r], from
    # slot starts[r] on; None: it takes no more than a round commits
    append: Callable | None = None


class Drafter(NamedTuple):
    """The drafter, as pure functions of the weights of both; its state is part of the decoding state."""

    # (weights, state, context, strategy, temperature: the target's, 0 when greedy) -> at least strategy.nodes - 1 candidates
    draft: Callable[..., Candidates]
    # (weights, state, context, live[B], missing) -> the state that lacks at most the last `missing` >= 1 committed tokens of
    # any live row; None when there is no state to catch up
    catch_up: Callable | None
    # (weights, state, context, width) -> the state with `width` more committed tokens
    extend: Callable
    # (state, fresh[B]) -> the state with its fresh rows empty
    reset: Callable
    # as those of Target, of the state
    resize: Callable
    empty: Callable
    # (batch) -> ShapeDtypeStructs of what the host passes with a chunk that drafts
    host_context: Callable[[int], PyTree]
    params: PyTree  # ShapeDtypeStructs with shardings of the drafter's weights
    reads_history: bool  # Context.history
    reads_noise: bool  # Context.ahead


def stateless(
    draft: Callable, reads_history: bool = True, host_context: Callable = lambda batch: ()
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
        reads_history=reads_history,
        reads_noise=False,
    )


def undrafted(
    weights: PyTree, state: PyTree, context: Context, strategy: Any, temperature: float
) -> Candidates:
    """Raises ValueError: the strategy needs a drafter."""
    raise ValueError(f"{strategy} needs a drafter, but none is configured")


NO_DRAFTER = stateless(undrafted, reads_history=False)
