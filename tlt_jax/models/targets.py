"""The product with the vocabulary at target tokens alone: what a rule makes of logits, and a loss of them with its gradient.

Shapes: R packed rows of T tokens on G data groups, N = R / G * T tokens of a group, M >= N slots for its targets.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.custom_derivatives import CustomVJPPrimal
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Int, Shaped

from tlt_jax.distributed.mesh import sharding
from tlt_jax.kernels.numerics import capped, contract, masked, widen
from tlt_jax.models import architecture
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.shapes import shaped

FEWEST = 4  # chunks that the tokens of a data group are divided into, at least

LOGITS = 1024  # most targets whose logits exist at once, in each data group
CPU_LOGITS = 2**24  # most logits of a chunk on a CPU, whose caches and memory are small

PyTree = Any
# Logits [G, length, V] and values of the same targets [G, length] to the loss of each group [G], and to sums and maxima [G].
Rule = Callable[[Array, PyTree], tuple[Array, tuple[dict[str, Array], dict[str, Array]]]]


def blocks(vocab_size: int, mesh: Mesh | None) -> tuple[int, int]:
    """Targets per chunk of an update's logits, and queries per block of attention scores without a library kernel.

    By the kind of the devices: tuned on CPUs of two cores, also for a simulated run, which has no mesh; for accelerators the
    sizes of common libraries.
    """
    if mesh is not None and mesh.devices.flat[0].platform != "cpu":
        return LOGITS, 512
    most = max(1, CPU_LOGITS // vocab_size)
    return min(LOGITS, 1 << most.bit_length() - 1), 64


class Targets(NamedTuple):
    """The targets of packed rows, in order, in slots of their data group, and their division into chunks of `length` slots.

    `places`: the token of each slot, N after the last target. `ranks`: the slot of each target, of other tokens any.
    `chunks`: so many hold all targets of the group that has most.
    """

    is_target: Bool[Array, "R T"]
    places: Int[Array, "G M"]
    ranks: Int[Array, "G N"]
    chunks: Int[Array, ""]
    length: int

    @classmethod
    def of(cls, is_target: Bool[Array, "R T"], mesh: Mesh, chunk: int) -> Targets:
        """The targets in chunks of `chunk_length` slots."""
        flat = is_target.reshape(mesh.shape["data"], -1)
        tokens = flat.shape[1]
        length = chunk_length(tokens, chunk)
        order = jnp.argsort(~flat, axis=1, stable=True).astype(jnp.int32)
        counts = jnp.sum(flat, axis=1, dtype=jnp.int32)
        places = jnp.where(jnp.arange(tokens) < counts[:, None], order, tokens)
        places = jnp.pad(places, ((0, 0), (0, -tokens % length)), constant_values=tokens)
        ranks = jnp.maximum(jnp.cumsum(flat, axis=1, dtype=jnp.int32) - 1, 0)
        return cls(is_target, places, ranks, -(-jnp.max(counts) // length), length)

    def gather(self, tree: PyTree) -> PyTree:
        """Arrays [G, M, ...] of the values at targets, 0 after the last, from arrays [R, T, ...]."""

        def of(array: Shaped[Array, "R T ..."]) -> Shaped[Array, "G M ..."]:
            flat = array.reshape(len(self.places), -1, *array.shape[2:])
            places = jnp.expand_dims(self.places, range(2, flat.ndim))
            return jnp.take_along_axis(flat, places, axis=1, mode="fill", fill_value=0)

        return jax.tree.map(of, tree)

    def spread(self, values: Shaped[Array, "G M ..."]) -> Shaped[Array, "R T ..."]:
        """The values at their tokens, 0 at tokens that are no target."""
        ranks = jnp.expand_dims(self.ranks, range(2, values.ndim))
        found = jnp.take_along_axis(values, ranks, axis=1, mode="clip")
        found = found.reshape(*self.is_target.shape, *values.shape[2:])
        return jnp.where(jnp.expand_dims(self.is_target, range(2, values.ndim)), found, 0)

    def part(self, tree: PyTree, index: Int[Array, ""]) -> PyTree:
        """Arrays [G, length, ...] of one chunk, from arrays [G, M, ...]."""

        def of(array: Array) -> Array:
            start = index * self.length
            return jax.lax.dynamic_slice_in_dim(array, start, self.length, axis=1)

        return jax.tree.map(of, tree)

    def put(
        self, values: Shaped[Array, "G M ..."], part: Array, index: Int[Array, ""]
    ) -> Shaped[Array, "G M ..."]:
        """The values, those of one chunk replaced."""
        part = part.astype(values.dtype)
        return jax.lax.dynamic_update_slice_in_dim(values, part, index * self.length, axis=1)


def chunk_length(tokens: int, chunk: int) -> int:
    """Slots of a chunk, for `tokens` tokens of a data group: `chunk`, or as many as make FEWEST chunks.

    Chunks without a target are left out. With one chunk of all tokens, no product would be.
    """
    return max(1, min(chunk, -(-tokens // FEWEST)))


class Head(NamedTuple):
    """The output embedding, and how it and the logits lie on the mesh."""

    weight: Float[Array, "V D"]
    axes: tuple[str | None, ...]
    vocab_size: int
    mesh: Mesh
    cap: float = 0.0  # of the logits

    @classmethod
    def of(cls, params: Params, model: ModelConfig, mesh: Mesh) -> Head:
        """The output embedding of the policy in its "train" layout."""
        name = "embed" if params.head is None else "head"
        axes = getattr(architecture.weights(model, mesh.shape["model"]), name).axes
        return cls(getattr(params, name), axes, model.vocab_size, mesh, model.logit_cap)

    def copies(self, weight: Float[Array, "V D"]) -> Float[Array, "G V D"]:
        """The weight gathered once for each data group."""
        return group_copies(weight, self.axes, self.mesh)

    def place(self, copies: Float[Array, "G V D"]) -> Float[Array, "G V D"]:
        """Gradients of the copies, where these lie."""
        return self.lay(copies, ("batch", *self.axes), "rollout")

    def gradient(self, copies: Float[Array, "G V D"]) -> Float[Array, "V D"]:
        """The weight's gradient, the sum of those of its copies."""
        return self.lay(jnp.sum(copies, axis=0).astype(self.weight.dtype), self.axes, "train")

    @jax.named_scope("head")
    def logits(self, copies: Float[Array, "G V D"], x: Float[Array, "G t D"]) -> Array:
        """Logits [G, t, V] in at least float32, those of the vocabulary's padding among them."""
        return self.split(contract("gtd,gvd->gtv", x, copies))

    def split(self, logits: Float[Array, "G t V"]) -> Float[Array, "G t V"]:
        """Logits or their gradient, the vocabulary sharded over the mesh axis "model"."""
        return self.lay(logits, ("batch", None, "vocab"), "train")

    def visible(self, logits: Float[Array, "G t V"]) -> Float[Array, "G t V"]:
        """The logits, capped; those of the vocabulary's padding are the lowest number."""
        return masked(capped(logits, self.cap), jnp.arange(logits.shape[-1]) < self.vocab_size)

    def lay(self, array: Array, axes: tuple[str | None, ...], layout: str) -> Array:
        return jax.lax.with_sharding_constraint(array, sharding(self.mesh, axes, layout))


def shifted_logits(logits: Float[Array, "*A V"], temperature: float) -> tuple[Array, Array]:
    """Logits over the temperature (0 counts as 1), less their maximum, and the sum of their exponentials."""
    if temperature not in (0, 1):
        # Padding stays finite.
        logits = jnp.maximum(logits / temperature, jnp.finfo(logits.dtype).min)
    shifted = logits - jax.lax.stop_gradient(jnp.max(logits, axis=-1, keepdims=True))
    return shifted, jnp.sum(jnp.exp(shifted), axis=-1)


def log_softmax(logits: Float[Array, "*A V"], temperature: float) -> Float[Array, "*A V"]:
    """Log-probabilities of all tokens."""
    shifted, total = shifted_logits(logits, temperature)
    return shifted - jnp.log(total)[..., None]


def rest(logprobs: Float[Array, "*A K"]) -> Float[Array, "*A"]:
    """The log-probability of all tokens but these K; where rounding leaves none, that of one rounding."""
    left = 1 - jnp.sum(jnp.exp(logprobs), axis=-1)
    return jnp.log(jnp.maximum(left, jnp.finfo(left.dtype).eps))


@shaped
def score(
    logits: Float[Array, "*A V"],
    targets: Int[Array, "*A"],
    temperature: float,
    entropy_learns: bool,
    support: Int[Array, "*A S"] | None = None,
) -> tuple[Float[Array, "*A"], Float[Array, "*A"]]:
    """Log-probability of the targets and entropy, of logits over the temperature (0 counts as 1).

    Reduces over V only, so V may be sharded. Without `entropy_learns` the entropy has no gradient. With a `support` both are
    of these tokens, -1 for none, and the target alone.
    """
    shifted, total = shifted_logits(logits, temperature)
    if support is not None:
        # Some of them may be the target, which counts once.
        ids = jnp.concatenate([targets[..., None], support], axis=-1)
        values = jnp.take_along_axis(shifted, jnp.maximum(ids, 0), axis=-1)
        is_kept = jnp.concatenate(
            [
                jnp.ones_like(targets, bool)[..., None],
                (support >= 0) & (support != targets[..., None]),
            ],
            axis=-1,
        )
        shifted = jnp.where(is_kept, values, jnp.finfo(values.dtype).min)
        shifted -= jax.lax.stop_gradient(jnp.max(shifted, axis=-1, keepdims=True))
        total, targets = jnp.sum(jnp.exp(shifted), axis=-1), jnp.zeros_like(targets)
    ids = jax.lax.broadcasted_iota(targets.dtype, shifted.shape, shifted.ndim - 1)
    chosen = jnp.sum(jnp.where(ids == targets[..., None], shifted, 0), axis=-1)
    logprobs = chosen - jnp.log(total)
    if not entropy_learns:
        shifted, total = jax.lax.stop_gradient((shifted, total))
    entropy = jnp.log(total) - jnp.sum(jnp.exp(shifted) * shifted, axis=-1) / total
    return logprobs, entropy


@shaped
def group_copies(
    weight: Float[Array, ...], axes: Sequence[str | None], mesh: Mesh
) -> Float[Array, "groups ..."]:
    """The weight gathered once for each data group."""
    copies = jnp.broadcast_to(weight, (mesh.shape["data"], *weight.shape))
    return jax.lax.with_sharding_constraint(copies, sharding(mesh, ("batch", *axes), "rollout"))


@shaped
def target_values(
    params: Params,
    model: ModelConfig,
    mesh: Mesh,
    x: Float[Array, "R T D"],
    values: PyTree,
    is_target: Bool[Array, "R T"],
    rule: Callable[[Array, PyTree], PyTree],
    *,
    chunk: int,
) -> PyTree:
    """Arrays [R, T, ...] of what the rule makes of the logits [G, length, V] and `values` of targets; 0 elsewhere."""
    targets, head = Targets.of(is_target, mesh, chunk), Head.of(params, model, mesh)
    copies, given = head.copies(head.weight.astype(x.dtype)), targets.gather((x, values))

    def found(index: Array) -> PyTree:
        part, chosen = targets.part(given, index)
        return rule(head.visible(head.logits(copies, part)), chosen)

    def one(index: Array, results: PyTree) -> PyTree:
        return jax.tree.map(lambda to, part: targets.put(to, part, index), results, found(index))

    groups, slots = targets.places.shape
    results = jax.tree.map(
        lambda leaf: jnp.zeros((groups, slots, *leaf.shape[2:]), leaf.dtype),
        jax.eval_shape(found, jnp.int32(0)),
    )
    return jax.tree.map(targets.spread, jax.lax.fori_loop(0, targets.chunks, one, results))


@shaped
def target_loss(
    params: Params,
    model: ModelConfig,
    mesh: Mesh,
    x: Float[Array, "R T D"],
    values: PyTree,
    is_target: Bool[Array, "R T"],
    rule: Rule,
    *,
    chunk: int,
) -> tuple[Float[Array, ""], tuple[dict[str, Array], dict[str, Array]]]:
    """The rule's loss summed over all targets, and its sums and maxima over them, from the last hidden states.

    `values`: arrays [R, T]; the rule gets them at targets, and 0 in slots after the last, which must add nothing. Each data
    group holds the logits of one chunk at once. A differentiated loss is computed together with its gradient, so that a
    target takes three products and none is repeated; two where the head is frozen. Only the loss has a gradient, in x and the
    head; maxima are at least 0.
    """
    targets, head = Targets.of(is_target, mesh, chunk), Head.of(params, model, mesh)
    values = targets.gather(values)

    def run(weight: Array, x: Array, learns: bool, trains_head: bool) -> tuple[PyTree, PyTree]:
        """Results of all chunks, and with `learns` the gradients in the weight, None unless `trains_head`, and in x."""
        copies, states = head.copies(weight.astype(x.dtype)), targets.gather(x)

        def one(index: Array, carry: tuple[PyTree, PyTree]) -> tuple[PyTree, PyTree]:
            results, grads = carry
            part, given = targets.part((states, values), index)
            logits = head.logits(copies, part)

            def ruled(logits: Array) -> tuple[Array, tuple[dict, dict]]:
                return rule(head.visible(logits), given)

            if not learns:
                return joined(results, ruled(logits)), None
            loss, pull, extra = jax.vjp(ruled, logits, has_aux=True)
            dlogits = head.split(pull(jnp.ones_like(loss))[0].astype(x.dtype))
            dcopies, dstates = grads
            if trains_head:
                dcopies = head.place(dcopies + contract("gtv,gtd->gvd", dlogits, part))
            dstates = targets.put(dstates, contract("gtv,gvd->gtd", dlogits, copies), index)
            return joined(results, (loss, extra)), (dcopies, dstates)

        shape = len(copies), targets.length, copies.shape[1]
        logits = jax.ShapeDtypeStruct(shape, widen(x.dtype))
        results = jax.eval_shape(lambda logits: rule(logits, targets.part(values, 0)), logits)
        results = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), results)
        grads = None
        if learns:
            dcopies = None
            if trains_head:
                dcopies = head.place(jnp.zeros(copies.shape, widen(x.dtype)))
            grads = dcopies, jnp.zeros_like(states)
        results, grads = jax.lax.fori_loop(0, targets.chunks, one, (results, grads))
        loss, (sums, maxima) = results
        results = jnp.sum(loss), (jax.tree.map(jnp.sum, sums), jax.tree.map(jnp.max, maxima))
        if not learns:
            return results, None
        dweight = head.gradient(grads[0]) if trains_head else None
        return results, (dweight, targets.spread(grads[1]))

    @jax.custom_vjp
    def total(weight: Array, x: Array) -> PyTree:
        return run(weight, x, learns=False, trains_head=False)[0]

    def forward(weight: CustomVJPPrimal, x: CustomVJPPrimal) -> tuple[PyTree, PyTree]:
        return run(weight.value, x.value, learns=True, trains_head=weight.perturbed)

    def backward(grads: tuple[Array | None, Array], cotangents: PyTree) -> tuple[Array | None, ...]:
        return jax.tree.map(lambda grad: grad * cotangents[0].astype(grad.dtype), grads)

    total.defvjp(forward, backward, symbolic_zeros=True)
    return total(head.weight, x)


def joined(results: PyTree, more: PyTree) -> PyTree:
    """Results of a rule for two chunks."""
    (loss, (sums, maxima)), (one, (others, peaks)) = results, more
    return loss + one, (
        jax.tree.map(jnp.add, sums, others),
        jax.tree.map(jnp.maximum, maxima, peaks),
    )
