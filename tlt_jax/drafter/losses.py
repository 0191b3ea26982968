"""The losses of drafters: what a kind predicts on packed rows, and one scorer that compares it with the policy.

All arrays of scores are indexed by the position s whose next token is predicted, and compared with the policy's
distribution there. Draft step j of EAGLE at slot t predicts token t + 2 + j (models/eagle.py): s = t + 1 + j. Position j of a
block at token t predicts token t + 1 + j (models/block_drafter.py): s = t + j; it counts while the tokens t + 1, ..., t + 1 + j
are all to be learned. Blocks are at anchors that are drawn among the answers' tokens.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Int32

from tlt_jax import keys
from tlt_jax.data.packing import PackedRows
from tlt_jax.distributed.mesh import sharding
from tlt_jax.drafter.recipe import DrafterRecipe
from tlt_jax.kernels.numerics import capped, contract, masked
from tlt_jax.models import block_drafter, drafter as drafters, eagle, targets
from tlt_jax.models.drafter import DrafterParams, Shared
from tlt_jax.shapes import shaped

# Weight of the token loss; that of eagle's feature loss is 1 (arXiv 2401.15077, section 3.2).
TOKEN_WEIGHT = {"eagle": 0.1, "eagle3": 1.0}
DECAY = 0.8  # of the weights of EAGLE's draft steps
# Of a block drafter, as published for DSpark (arXiv 2607.05147): weights of the cross-entropy of the row's next token, of the
# L1 distance of the drafter's and the policy's distribution, and of the cross-entropy of a confidence head to the acceptance
# probability; position j of a block has the weight exp(-j / GAMMA).
TOKEN, VARIATION, CONFIDENCE, GAMMA = 0.1, 0.9, 1.0, 4.0
# Rows have one block for every SPACING tokens. DSpark's training has at most 512 for 4096 tokens, of millions of texts; an RL
# run has few texts, and learns more from a row with more blocks.
SPACING = 2
# Trained weights that read hidden states. A block drafter's final norm belongs to its layers.
HEADS = {
    False: ("final_norm", "head"),
    True: ("markov_gate", "markov_out", "confidence", "confidence_bias"),
}

Metrics = dict[str, Array]
PyTree = Any


@shaped
def loss(
    params: DrafterParams,
    shared: Shared,
    batch: PackedRows,
    recipe: DrafterRecipe,
    step: Int[Array, ""] | int,
) -> tuple[Float[Array, ""], dict[str, Float[Array, ""] | Int[Array, ""]]]:
    """The loss of a batch with features and states in optimizer step `step`, and its metrics.

    Metrics: `tokens`, `agreement@1`, `acceptance@1`, ... by depth, given the depths before, and the terms of the loss.
    """
    if recipe.drafter.is_block:
        total, metrics = block_loss(params, shared, batch, recipe, step)
    else:
        total, metrics = eagle_loss(params, shared, batch, recipe)
    return total, {"tokens": jnp.sum(batch.is_answer), **metrics}


# EAGLE: unrolled draft steps at every position


def eagle_loss(
    params: DrafterParams, shared: Shared, batch: PackedRows, recipe: DrafterRecipe
) -> tuple[Array, Metrics]:
    """`loss` of EAGLE drafters.

    Each term is a mean over the positions in `is_answer` that draft step j can predict: j + 1 slots of their segment lie
    before them.
    """
    kind = recipe.drafter.kind
    hidden = eagle.unroll(
        params, recipe.drafter, shared, batch.tokens, batch.features, batch.positions, batch.segments,
        recipe.unroll, recipe.attention_block, recipe.mesh,
    )  # fmt: skip
    aligned = [jnp.roll(step, j + 1, axis=1) for j, step in enumerate(hidden)]
    head = PolicyHead.of(shared, params, recipe, batch.states.dtype)
    draft = draft_logits(params, head, recipe)

    def one(states: Array, teacher: Likeliest | None, *hidden: Array) -> list[Scores]:
        """The policy's logits serve all draft steps."""
        logits = head.logits(states)
        normalizer, top, scale = sums(logits, teacher)
        target = logits if head.ids is None else head.drafted(states)
        target, labels = target - normalizer[..., None], label_of(top, head.ids)
        goal = mixed(target, teacher, scale, head.ids, recipe.teacher_share)
        return [
            score(target, draft(state, None)[0], top, labels, head.ids, goal=goal)
            for state in hidden
        ]

    chunk = max(1, recipe.logits_chunk // (1 + len(aligned)))
    rows = batch.states, Likeliest.of(batch, recipe), *aligned
    scores = in_chunks(one, rows, recipe.mesh, chunk)
    total, metrics = jnp.zeros((), scores[0].acceptance.dtype), {}
    for j, (predicted, scored) in enumerate(zip(aligned, scores, strict=True)):
        _, reaches = eagle.shift(batch.segments, batch.segments, j + 1)
        known = batch.is_answer & jnp.roll(reaches, j + 1, axis=1)  # s - 1 - j is in s's segment
        terms = {"token_loss": mean(scored.terms["token_loss"], known & scored.learns)}
        step_loss = TOKEN_WEIGHT[kind] * terms["token_loss"]
        if kind == "eagle":
            wide = jnp.promote_types(predicted.dtype, jnp.float32)
            gap = optax.losses.huber_loss(predicted.astype(wide), batch.states.astype(wide))
            terms["feature_loss"] = mean(jnp.mean(gap, axis=-1), known)
            step_loss += terms["feature_loss"]
        metrics |= (terms if j == 0 else {}) | at_depth(j, scored, known)
        total += DECAY**j * step_loss
    return total, metrics


# Block drafters: every position of the blocks at drawn anchors


def block_loss(
    params: DrafterParams,
    shared: Shared,
    batch: PackedRows,
    recipe: DrafterRecipe,
    step: Int[Array, ""] | int,
) -> tuple[Array, Metrics]:
    """`loss` of block drafters.

    Each term is a mean over the positions that count, with the weights exp(-j / GAMMA); the token loss only over those
    whose next token is in the row and in the draft vocabulary (arXiv 2607.05147). The Markov head reads the row's tokens,
    and so does a path selector. What it drafts is compared, unlike in published training of DFlash 2, where the logits without
    it are, and it has a cross-entropy over its candidates (docs/design/drafter_training.md).
    """
    config = recipe.drafter
    anchors = draw(candidates(batch), step, recipe)
    hidden = block_drafter.forward_blocks(
        params, config, shared, batch.tokens, batch.features, batch.positions, batch.segments, anchors,
        recipe.attention_block, recipe.mesh,
    )  # fmt: skip
    places = positions_of(anchors, batch, config.depth)
    head = PolicyHead.of(shared, params, recipe, hidden.dtype)
    draft, last = draft_logits(params, head, recipe), batch.tokens.shape[1] - 1

    def one(policy: tuple, labels: Array, hidden: Array, previous: Array) -> Scores:
        states, teacher, (normalizer, top, scale) = policy
        target = head.drafted(states) - normalizer[..., None]
        logits, confidence = draft(hidden, previous)
        goal = mixed(target, teacher, scale, head.ids, recipe.teacher_share)
        return score(target, logits, top, labels, head.ids, True, confidence, goal)

    # The policy's logits are computed once for each token of the rows; several positions may predict it.
    policy = batch.states, Likeliest.of(batch, recipe)
    known = in_chunks(
        lambda states, teacher: sums(head.logits(states), teacher),
        policy,
        recipe.mesh,
        recipe.logits_chunk,
    )
    policy = jax.tree.map(lambda array: look_up(array, places.at), (*policy, known))
    after = label_of(look_up(batch.tokens, jnp.minimum(places.at + 1, last)), head.ids)
    labels = jnp.where(places.has_next, after, -1)
    previous = look_up(batch.tokens, places.at)
    previous = block_drafter.markov_embedding(params, previous, hidden.dtype)
    rows = jax.tree.map(
        lambda array: array.reshape(len(array), hidden.shape[1] * config.depth, *array.shape[3:]),
        (policy, labels, hidden, previous),
    )
    scores = in_chunks(one, rows, recipe.mesh, max(1, recipe.logits_chunk // 2))
    scores = jax.tree.map(lambda array: array.reshape(places.at.shape), scores)
    counts, weights = places.counts, jnp.exp(-jnp.arange(config.depth) / GAMMA)
    learns = {"token_loss": counts & scores.learns}
    metrics = {
        name: mean(term, learns.get(name, counts), weights) for name, term in scores.terms.items()
    }
    total = TOKEN * metrics["token_loss"] + VARIATION * metrics["variation"]
    if config.confidence:
        total += CONFIDENCE * metrics["confidence_loss"]
    for j in range(config.depth):
        metrics |= at_depth(j, jax.tree.map(lambda array: array[..., j], scores), counts[..., j])  # noqa: B023
    return total, metrics


@shaped
def candidates(batch: PackedRows) -> Bool[Array, "R T"]:
    """Whether a token can be an anchor: its next token is to be learned, and its segment has a token before it."""
    is_first = batch.segments != jnp.roll(batch.segments, 1, axis=1)
    return batch.is_answer & ~is_first.at[:, 0].set(True)


@shaped
def draw(
    mask: Bool[Array, "R T"], step: Int[Array, ""] | int, recipe: DrafterRecipe
) -> Int32[Array, "R A"]:
    """The anchors of every row: A = T / SPACING different tokens where the mask is True; -1 where it has fewer.

    Each of them with the same probability. A function of the seed, the step and the mask alone.
    """
    order = jax.random.uniform(keys.anchors_key(recipe.seed, step), mask.shape, jnp.float32)
    count = -(-mask.shape[1] // SPACING)
    chosen, anchors = jax.lax.top_k(jnp.where(mask, order, -1), count)
    return jnp.where(chosen < 0, -1, anchors).astype(jnp.int32)


@struct.dataclass
class BlockPositions:
    """The token at each position of the blocks, whose next token is predicted.

    `at`: its place in the row, clipped to the row; `counts`: whether the position counts; `has_next`: whether the row has
    its next token.
    """

    at: Int[Array, "R A P"]
    counts: Bool[Array, "R A P"]
    has_next: Bool[Array, "R A P"]


@shaped
def positions_of(anchors: Int[Array, "R A"], batch: PackedRows, depth: int) -> BlockPositions:
    """The places of the blocks of `depth` positions at the anchors."""
    T = batch.tokens.shape[1]
    wanted = anchors[..., None] + jnp.arange(depth)
    at = jnp.clip(wanted, 0, T - 1)
    own = look_up(batch.segments, at[..., :1])
    known = look_up(batch.is_answer, at) & (look_up(batch.segments, at) == own)
    known &= (anchors[..., None] >= 0) & (wanted < T)
    counts = jnp.cumsum(~known, axis=-1) == 0
    after = look_up(batch.segments, jnp.minimum(at + 1, T - 1))
    return BlockPositions(at, counts, (wanted + 1 < T) & (after == own))


@shaped
def look_up(rows: Array, at: Int[Array, "R A J"]) -> Array:
    """rows[r, at[r]] of every row."""
    return jax.vmap(lambda row, places: row[places])(rows, at)


# The scorer


@struct.dataclass
class Scores:
    """How well a draft predicts the token after each position.

    `agrees`: drafter and policy have the same most likely token. `acceptance`: sum of min(p, q), the acceptance probability
    of speculative sampling (arXiv 2211.17192). `learns`: whether the draft vocabulary has the token to be learned. `terms`:
    losses by name.
    """

    agrees: Bool[Array, "*A"]
    acceptance: Float[Array, "*A"]
    learns: Bool[Array, "*A"]
    terms: dict[str, Float[Array, "*A"]]


@shaped
def score(
    target: Float[Array, "*A U"],
    logits: Float[Array, "*A U"],
    top: Int[Array, "*A"],
    labels: Int[Array, "*A"],
    ids: Int32[Array, " U"] | None,
    is_block: bool = False,
    confidence: Float[Array, "*A"] | None = None,
    goal: Float[Array, "*A U"] | None = None,
) -> Scores:
    """Scores of draft logits against the policy's log-probs `target` of the same tokens.

    `top`: the policy's most likely token of all. `labels`: the index among the U of the token to be learned, -1: none.
    `ids`: the tokens of the draft vocabulary; None: all. `token_loss` is the cross-entropy to the policy over the draft
    vocabulary; of a block drafter that of the labels, with `variation`, the L1 distance of drafter and policy over all
    tokens, and `confidence_loss`, the cross-entropy of the log-odds `confidence` (None: no such head) to the acceptance,
    which gets no gradient from it. `goal`: log-probs that cross-entropy and distance compare with, of `mixed`; None: the
    policy's.
    """
    logprobs = jax.nn.log_softmax(logits, axis=-1)
    p, q = jnp.exp(target), jnp.exp(logprobs)
    goal = target if goal is None else goal
    acceptance = jnp.sum(jnp.minimum(p, q), axis=-1)
    guess = jnp.argmax(logits, axis=-1)
    agrees = (guess if ids is None else ids[guess]) == top
    if not is_block:
        token_loss = -jnp.sum(jax.nn.softmax(goal, axis=-1) * logprobs, axis=-1)
        return Scores(agrees, acceptance, labels >= 0, {"token_loss": token_loss})
    index = jax.lax.broadcasted_iota(labels.dtype, logprobs.shape, logprobs.ndim - 1)
    token_loss = -jnp.sum(jnp.where(index == labels[..., None], logprobs, 0), axis=-1)
    # The probability of tokens outside the draft vocabulary, which the drafter gives 0, is part of the distance.
    wanted = jnp.exp(goal)
    variation = jnp.sum(jnp.abs(q - wanted), axis=-1)
    if ids is not None:
        variation += jnp.maximum(1 - jnp.sum(wanted, axis=-1), 0)
    terms = {"token_loss": token_loss, "variation": variation}
    if confidence is not None:
        label = jax.lax.stop_gradient(acceptance)
        terms["confidence_loss"] = optax.sigmoid_binary_cross_entropy(confidence, label)
    return Scores(agrees, acceptance, labels >= 0, terms)


@shaped
def label_of(tokens: Int[Array, "*A"], ids: Int32[Array, " U"] | None) -> Int[Array, "*A"]:
    """The index of each token in the draft vocabulary; -1: it is not there."""
    if ids is None:
        return tokens
    place = jnp.minimum(jnp.searchsorted(ids, tokens), ids.shape[0] - 1)
    return jnp.where(ids[place] == tokens, place, -1)


def at_depth(j: int, score: Scores, mask: Bool[Array, "*A"]) -> Metrics:
    """The metrics of depth j + 1."""
    return {
        f"agreement@{j + 1}": mean(score.agrees, mask),
        f"acceptance@{j + 1}": mean(score.acceptance, mask),
    }


@shaped
def mean(
    values: Array, mask: Bool[Array, "*A"], weights: Float[Array, " P"] | None = None
) -> Float[Array, ""]:
    """Mean of the values where the mask is True, with these weights (None: all 1); 0 when it is True nowhere."""
    if weights is None:
        return jnp.sum(jnp.where(mask, values, 0)) / jnp.maximum(jnp.sum(mask), 1)
    weights = jnp.where(mask, weights.astype(values.dtype), 0)
    total = jnp.sum(weights)
    return jnp.sum(weights * jnp.where(mask, values, 0)) / jnp.where(total > 0, total, 1)


class PolicyHead(NamedTuple):
    """The policy's LM head `whole`, and its rows `part` of the draft vocabulary `ids` (None: all); every data group has both.

    `axis`: the logical axis of the draft vocabulary.
    """

    whole: Float[Array, "V D"]
    part: Float[Array, "U D"]
    ids: Int32[Array, " U"] | None
    vocab_size: int
    axis: str | None
    mesh: Mesh
    cap: float = 0.0  # of the policy's logits

    @classmethod
    def of(
        cls, shared: Shared, params: DrafterParams, recipe: DrafterRecipe, dtype: object
    ) -> PolicyHead:
        """The head in this dtype."""
        mesh, ids = recipe.mesh, params.ids
        axis = drafters.vocab_axis(recipe.drafter, mesh)

        def gathered(weight: Array, axis: str | None) -> Array:
            return jax.lax.with_sharding_constraint(
                weight, sharding(mesh, (axis, "embed"), "rollout")
            )

        whole = gathered(shared.head.astype(dtype), "vocab")
        part = whole if ids is None else gathered(whole[ids], axis)
        return cls(whole, part, ids, recipe.model.vocab_size, axis, mesh, recipe.model.logit_cap)

    def logits(self, states: Float[Array, "G *A D"]) -> Float[Array, "G *A V"]:
        """The policy's logits of all tokens, from its states of G data groups; those of padding are the lowest number."""
        logits = capped(contract("...d,vd->...v", states, self.whole), self.cap)
        return self.split(masked(logits, jnp.arange(logits.shape[-1]) < self.vocab_size), "vocab")

    def drafted(self, states: Float[Array, "G *A D"]) -> Float[Array, "G *A U"]:
        """The policy's logits of the draft vocabulary."""
        if self.ids is None:
            return self.logits(states)
        logits = contract("...d,vd->...v", states, self.part)
        return self.split(capped(logits, self.cap), self.axis)

    def split(self, logits: Array, axis: str | None) -> Array:
        """Logits [G, R, T, V], each group's vocabulary sharded over the mesh axis "model"."""
        axes = "batch", None, None, axis
        return jax.lax.with_sharding_constraint(logits, sharding(self.mesh, axes, "train"))


class Likeliest(NamedTuple):
    """The K tokens that a teacher finds most likely at each position, with its log-probs at temperature 1."""

    ids: Int[Array, "*A K"]
    logprobs: Float[Array, "*A K"]

    @classmethod
    def of(cls, batch: PackedRows, recipe: DrafterRecipe) -> Likeliest | None:
        """Those of the rows; None where the drafter learns from the policy alone."""
        if not recipe.teacher_share or batch.teacher_ids is None:
            return None
        return cls(batch.teacher_ids, batch.teacher_logprobs)


def sums(
    logits: Float[Array, "*A V"], teacher: Likeliest | None
) -> tuple[Float[Array, "*A"], Int[Array, "*A"], Float[Array, "*A"] | None]:
    """The logsumexp of the policy's logits, its most likely token, and the log of what `mixed` scales other tokens by."""
    normalizer, top, scale = jax.nn.logsumexp(logits, axis=-1), jnp.argmax(logits, axis=-1), None
    if teacher:
        logprobs = jnp.take_along_axis(logits, teacher.ids, axis=-1) - normalizer[..., None]
        scale = targets.rest(teacher.logprobs) - targets.rest(logprobs)
    return normalizer, top, scale


def mixed(
    target: Float[Array, "*A U"],
    teacher: Likeliest | None,
    scale: Float[Array, "*A"] | None,
    ids: Int32[Array, " U"] | None,
    share: float,
) -> Float[Array, "*A U"] | None:
    """Log-probs of (1 - share) of the policy and `share` of the teacher, which the drafter learns; None without a teacher.

    A token that is not among the teacher's likeliest has the policy's probability, scaled so that all add up to 1.
    """
    if teacher is None:
        return None
    places = label_of(teacher.ids, ids)
    places = jnp.where(places < 0, target.shape[-1], places)
    theirs = jnp.put_along_axis(
        target + scale[..., None], places, teacher.logprobs.astype(target.dtype), axis=-1, inplace=False, mode="drop"
    )  # fmt: skip
    return jnp.logaddexp(target + jnp.log1p(-share), theirs + jnp.log(share))


def draft_logits(
    params: DrafterParams, head: PolicyHead, recipe: DrafterRecipe
) -> Callable[[Array, Array | None], tuple[Array, Array | None]]:
    """A function of hidden states and Markov embeddings [G, ..., Z] and [G, ..., r] of G data groups (None: no such head).

    It returns draft logits with the Markov bias or as a path selector shares them, and the confidence's log-odds (None without
    that head). The trained heads are gathered once per data group.
    """
    config, mesh = recipe.drafter, recipe.mesh
    axes = drafters.weights(config, mesh.shape["model"])
    parts = mesh.shape["model"] if head.axis else 1
    cast = drafters.cast(params, head.whole.dtype)
    copies = {
        name: targets.group_copies(getattr(cast, name), getattr(axes, name).axes, mesh)
        for name in HEADS[config.is_block]
        if getattr(cast, name) is not None
    }
    cast = cast.replace(head=head.part) if config.copies_head else cast
    shared = Shared(embed=head.whole, head=head.whole)  # the embedding is not read

    def drafted(copies: dict[str, Array], hidden: Array, embedding: Array | None) -> tuple:
        mine = cast.replace(**copies)
        logits = drafters.logits(mine, config, shared, hidden)
        if mine.markov_out is not None:
            bias = block_drafter.markov_bias(mine, embedding, hidden)
            if config.selector_top_k:
                is_best = logits >= least_of_best(logits, config.selector_top_k, parts)
                shared_out = block_drafter.selected(masked(logits, is_best), bias)
                logits = jnp.where(is_best, shared_out, logits)
            else:
                logits += bias
        confidence = None
        if config.confidence:
            confidence = block_drafter.confidence(mine, hidden, embedding)
        return logits, confidence

    def of_groups(hidden: Array, embedding: Array | None) -> tuple[Array, Array | None]:
        logits, confidence = jax.vmap(drafted)(copies, hidden, embedding)
        return head.split(logits, head.axis), confidence

    return of_groups


def least_of_best(logits: Float[Array, "*A U"], k: int, parts: int) -> Float[Array, "*A 1"]:
    """The k-th largest logit, or the least where there are fewer; no gradient. `parts`: devices over which the U lie."""
    logits, U = jax.lax.stop_gradient(logits), logits.shape[-1]
    if U % parts == 0 and U // parts >= k:  # each device looks through its own first
        best = jax.lax.top_k(logits.reshape(*logits.shape[:-1], parts, -1), k)[0]
        logits = jax.lax.collapse(best, best.ndim - 2)
    return jax.lax.top_k(logits, min(k, U))[0][..., -1:]


def in_chunks(
    one: Callable[..., PyTree],
    rows: tuple[PyTree, ...],
    mesh: Mesh,
    chunk: int,
) -> PyTree:
    """one(*rows), where `one` treats each token independently, on `chunk` tokens of each data group at once.

    `rows`: pytrees of arrays [R, T, ...]. `one` takes and returns arrays [groups, R / groups, t, ...]. The backward pass
    recomputes it, unless there is only one chunk, whose memory would not be freed earlier anyway.
    """
    R, T = jax.tree.leaves(rows)[0].shape[:2]
    groups = mesh.shape["data"]
    length = max(1, min(T, chunk * groups // R))
    chunks = -(-T // length)
    length = -(-T // chunks)

    def split(array: Array) -> Array:
        padded = jnp.pad(array, [(0, 0), (0, chunks * length - T), *[(0, 0)] * (array.ndim - 2)])
        return jnp.moveaxis(
            padded.reshape(groups, R // groups, chunks, length, *array.shape[2:]), 2, 0
        )

    def join(array: Array) -> Array:
        return jnp.moveaxis(array, 0, 2).reshape(R, chunks * length, *array.shape[4:])[:, :T]

    if chunks == 1:
        results = one(*jax.tree.map(lambda array: split(array)[0], rows))
        return jax.tree.map(lambda array: join(array[None]), results)
    results = jax.lax.map(lambda parts: jax.checkpoint(one)(*parts), jax.tree.map(split, rows))
    return jax.tree.map(join, results)
