"""The loss of block drafters: every position of the blocks at anchors that are drawn among the answers' tokens.

Position j of the block at token t predicts token t + 1 + j (models/block_drafter.py) and is compared with the policy's
distribution at token s = t + j. It counts while the tokens t + 1, ..., t + 1 + j are all to be learned.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax import keys
from tlt_jax.data.packing import PackedRows
from tlt_jax.drafter.recipe import Recipe
from tlt_jax.drafter.scores import mean, part_logits, policy_heads, policy_logits, split
from tlt_jax.models import block_drafter, drafter as drafters, token_logprobs as scoring
from tlt_jax.models.drafter import DrafterParams, Shared
from tlt_jax.shapes import shaped

HEADS = ("markov_out", "confidence", "confidence_bias")  # trained weights that read hidden states


@dataclass(frozen=True)
class Objective:
    """What the update of a block drafter minimizes: weighted losses of every position of blocks at drawn anchors.

    Of position j, exp(-j / gamma) times the sum of: `token` times the cross-entropy of the row's next token; `variation`
    times the L1 distance of the drafter's and the policy's distribution; and for a confidence head, `confidence` times its
    cross-entropy to the acceptance probability. These weights are those published for DSpark (arXiv 2607.05147).

    Rows have one block for every `spacing` tokens. DSpark's training has at most 512 for 4096 tokens, of millions of texts;
    an RL run has few texts, and learns more from a row with more blocks.
    """

    compile_steps: ClassVar[int] = 3  # two layers: 8 to 9 s of a CPU, as 3 steps of eagle3
    token: float = 0.1
    variation: float = 0.9
    confidence: float = 1.0
    gamma: float = 4.0
    spacing: int = 2

    def evaluate(
        self,
        params: DrafterParams,
        shared: Shared,
        batch: PackedRows,
        recipe: Recipe,
        step: Array | int,
    ) -> tuple[Array, dict[str, Array]]:
        """The loss of this objective, and its metrics: `loss`."""
        return loss(params, shared, batch, recipe, step)


@shaped
def loss(
    params: DrafterParams,
    shared: Shared,
    batch: PackedRows,
    recipe: Recipe,
    step: Int[Array, ""] | int,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""] | Int[Array, ""]]]:
    """The loss of a batch with features and states in optimizer step `step`, and its metrics.

    Each term is a mean over the positions that count, with the weights exp(-j / gamma); the token loss only over those
    whose next token is in the row and in the draft vocabulary (arXiv 2607.05147). The Markov head reads the row's tokens.
    """
    config, objective = recipe.drafter, recipe.objective
    anchors = draw(candidates(batch), step, recipe)
    hidden = block_drafter.forward_blocks(
        params, config, shared, batch.tokens, batch.features, batch.positions, batch.segments, anchors,
        recipe.attention_block, recipe.mesh,
    )  # fmt: skip
    places = positions_of(anchors, batch, config.depth)
    scores = position_scores(params, shared, batch, places, hidden, recipe)

    counts = places.counts
    weights = jnp.exp(-jnp.arange(config.depth) / objective.gamma)
    token_loss = mean(scores.token_loss, counts & scores.has_label, weights)
    variation = mean(scores.variation, counts, weights)
    total = objective.token * token_loss + objective.variation * variation
    metrics = {
        "tokens": jnp.sum(batch.is_answer),
        "token_loss": token_loss,
        "variation": variation,
    }
    if config.confidence:
        confidence_loss = mean(scores.confidence_loss, counts, weights)
        total += objective.confidence * confidence_loss
        metrics["confidence_loss"] = confidence_loss
    for j in range(config.depth):
        at = (..., j)
        metrics[f"agreement@{j + 1}"] = mean(scores.agrees[at], counts[at])
        metrics[f"acceptance@{j + 1}"] = mean(scores.acceptance[at], counts[at])
    return total, metrics


@shaped
def candidates(batch: PackedRows) -> Bool[Array, "R T"]:
    """Whether a token can be an anchor: its next token is to be learned, and its segment has a token before it."""
    is_first = batch.segments != jnp.roll(batch.segments, 1, axis=1)
    return batch.is_answer & ~is_first.at[:, 0].set(True)


@shaped
def draw(
    mask: Bool[Array, "R T"], step: Int[Array, ""] | int, recipe: Recipe
) -> Int32[Array, "R A"]:
    """The anchors of every row: A = T / spacing different tokens where the mask is True; -1 where it has fewer.

    Each of them with the same probability. A function of the seed, the step and the mask alone.
    """
    order = jax.random.uniform(keys.anchors_key(recipe.seed, step), mask.shape, jnp.float32)
    count = -(-mask.shape[1] // recipe.objective.spacing)
    chosen, anchors = jax.lax.top_k(jnp.where(mask, order, -1), count)
    return jnp.where(chosen < 0, -1, anchors).astype(jnp.int32)


@struct.dataclass
class Places:
    """The token at each position of the blocks, whose next token is predicted.

    `at`: its place in the row, clipped to the row; `counts`: whether the position counts; `has_next`: whether the row has
    its next token.
    """

    at: Int[Array, "R A P"]
    counts: Bool[Array, "R A P"]
    has_next: Bool[Array, "R A P"]


@shaped
def positions_of(anchors: Int[Array, "R A"], batch: PackedRows, depth: int) -> Places:
    """The places of the blocks of `depth` positions at the anchors."""
    T = batch.tokens.shape[1]
    wanted = anchors[..., None] + jnp.arange(depth)
    at = jnp.clip(wanted, 0, T - 1)
    own = look_up(batch.segments, at[..., :1])
    known = look_up(batch.is_answer, at) & (look_up(batch.segments, at) == own)
    known &= (anchors[..., None] >= 0) & (wanted < T)
    counts = jnp.cumsum(~known, axis=-1) == 0
    after = look_up(batch.segments, jnp.minimum(at + 1, T - 1))
    return Places(at, counts, (wanted + 1 < T) & (after == own))


@shaped
def look_up(rows: Array, at: Int[Array, "R A J"]) -> Array:
    """rows[r, at[r]] of every row."""
    return jax.vmap(lambda row, places: row[places])(rows, at)


@struct.dataclass
class Scores:
    """How well each position predicts its next token.

    `token_loss`: the cross-entropy of the row's next token, which is in the row and in the draft vocabulary if `has_label`.
    `variation`: the L1 distance of drafter and policy over all tokens. `acceptance`: sum of min(p, q), which is 1 -
    variation / 2. `agrees`: both have the same most likely token. `confidence_loss`: 0 without that head.
    """

    token_loss: Float[Array, "*A"]
    has_label: Bool[Array, "*A"]
    variation: Float[Array, "*A"]
    acceptance: Float[Array, "*A"]
    agrees: Bool[Array, "*A"]
    confidence_loss: Float[Array, "*A"]


def position_scores(
    params: DrafterParams,
    shared: Shared,
    batch: PackedRows,
    places: Places,
    hidden: Float[Array, "R A P Z"],
    recipe: Recipe,
) -> Scores:
    """Scores of every position, from the drafter's hidden states.

    Computed in chunks of positions, so that only one chunk's logits exist at a time. The policy's logits of all tokens are
    computed once for each token of the rows; several positions may predict it.
    """
    mesh, ids, size = recipe.mesh, params.ids, recipe.model.vocab_size
    axis = drafters.vocab_axis(recipe.drafter, mesh)
    heads = policy_heads(shared, ids, axis, hidden.dtype, mesh)
    draft, last = draft_logits(params, heads, recipe), batch.tokens.shape[1] - 1

    def sums(states: Array) -> tuple[Array, Array]:
        logits = policy_logits(states, heads[0], size, mesh)
        return jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1)

    def one(
        states: Array, normalizer: Array, top: Array, labels: Array, hidden: Array, previous: Array
    ) -> Scores:
        if ids is None:
            target = policy_logits(states, heads[0], size, mesh)
        else:
            target = part_logits(states, heads[1], axis, mesh)
        target -= normalizer[..., None]
        logits, confidence = draft(hidden, previous)
        return score(target, split(logits, axis, mesh), top, labels, confidence, ids)

    normalizer, top = scoring.in_chunks(sums, (batch.states,), mesh, recipe.logits_chunk)
    policy = (look_up(array, places.at) for array in (batch.states, normalizer, top))
    after = label_of(look_up(batch.tokens, jnp.minimum(places.at + 1, last)), ids)
    labels = jnp.where(places.has_next, after, -1)
    previous = look_up(batch.tokens, places.at)
    previous = block_drafter.markov_embedding(params, previous, hidden.dtype)

    def flat(array: Array) -> Array:
        R, A, P = array.shape[:3]
        return array.reshape(R, A * P, *array.shape[3:])

    rows = tuple(flat(array) for array in (*policy, labels, hidden, previous))
    found = scoring.in_chunks(one, rows, mesh, max(1, recipe.logits_chunk // 2))
    return jax.tree.map(lambda array: array.reshape(places.at.shape), found)


@shaped
def label_of(tokens: Int[Array, "*A"], ids: Int32[Array, " U"] | None) -> Int[Array, "*A"]:
    """The index of each token in the draft vocabulary; -1: it is not there."""
    if ids is None:
        return tokens
    place = jnp.minimum(jnp.searchsorted(ids, tokens), ids.shape[0] - 1)
    return jnp.where(ids[place] == tokens, place, -1)


@shaped
def score(
    target: Float[Array, "*A U"],
    logits: Float[Array, "*A U"],
    top: Int[Array, "*A"],
    labels: Int[Array, "*A"],
    confidence: Float[Array, "*A"] | None,
    ids: Int32[Array, " U"] | None,
) -> Scores:
    """Scores of draft logits against the policy's log-probs `target` of the same tokens.

    `top`: the policy's most likely token of all; `labels`: the index of the true token among the U, -1: none;
    `confidence`: log-odds, None without that head. No gradient flows into the confidence's target.
    """
    drafted = jax.nn.log_softmax(logits, axis=-1)
    p, q = jnp.exp(target), jnp.exp(drafted)
    chosen = (
        jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
    )
    token_loss = -jnp.sum(jnp.where(chosen, drafted, 0), axis=-1)
    # The policy's probability of tokens outside the draft vocabulary, which the drafter gives 0, is part of the distance.
    variation = jnp.sum(jnp.abs(q - p), axis=-1)
    if ids is not None:
        variation += jnp.maximum(1 - jnp.sum(p, axis=-1), 0)
    acceptance = jnp.sum(jnp.minimum(p, q), axis=-1)
    confidence_loss = jnp.zeros_like(variation)
    if confidence is not None:
        wanted = jax.lax.stop_gradient(acceptance)
        confidence_loss = optax.sigmoid_binary_cross_entropy(confidence, wanted)
    guess = jnp.argmax(logits, axis=-1)
    guess = guess if ids is None else ids[guess]
    return Scores(token_loss, labels >= 0, variation, acceptance, guess == top, confidence_loss)


def draft_logits(
    params: DrafterParams, heads: tuple[Array, Array], recipe: Recipe
) -> Callable[[Array, Array], tuple[Array, Array | None]]:
    """A function of hidden states and Markov embeddings [G, ..., Z] and [G, ..., r] of G data groups.

    It returns draft logits with the Markov bias, and the confidence's log-odds (None without that head). The trained heads
    are gathered once per data group. `heads`: scores.policy_heads.
    """
    config, (whole, part) = recipe.drafter, heads
    axes = drafters.weights(config, recipe.mesh.shape["model"])
    cast = drafters.cast(params, whole.dtype)
    cast = cast.replace(head=None if config.has_full_vocab else part)
    shared = Shared(embed=whole, head=whole)  # the embedding is not read
    copies = {
        name: scoring.group_copies(getattr(cast, name), getattr(axes, name).axes, recipe.mesh)
        for name in HEADS
        if getattr(cast, name) is not None
    }

    def drafted(copies: dict[str, Array], hidden: Array, embedding: Array) -> tuple:
        mine = cast.replace(**copies)
        logits = block_drafter.logits(mine, config, shared, hidden)
        if mine.markov_out is not None:
            logits += block_drafter.markov_bias(mine, embedding)
        confidence = None
        if config.confidence:
            confidence = block_drafter.confidence(mine, hidden, embedding)
        return logits, confidence

    return lambda hidden, embedding: jax.vmap(drafted)(copies, hidden, embedding)
