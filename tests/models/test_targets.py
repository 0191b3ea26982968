"""Laws of the loss at targets: its value and gradient are those of all logits at once, and only targets are computed."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tlt_jax.distributed.mesh import make_mesh, sharding
from tlt_jax.models import architecture, targets

V, D, R, T = 11, 16, 4, 13
TEMPERATURE, ENTROPY = 0.8, 0.3


def model_of(tied: bool, vocab: int = V) -> architecture.ModelConfig:
    return architecture.ModelConfig(
        family="qwen2", vocab_size=vocab, hidden_size=D, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4,
        mlp_dim=24, max_positions=32, qkv_bias=True, tied=tied, init_std=0.4,
    )  # fmt: skip


def given() -> tuple[np.ndarray, ...]:
    """Hidden states, target ids, weights and targets; the last rows, so the last data group, have few."""
    random = np.random.default_rng(0)
    is_target = random.random((R, T)) < np.array([0.9, 0.4, 0.1, 0.0])[:, None]
    weights = np.where(is_target, random.random((R, T)) + 0.1, 0)
    return random.normal(size=(R, T, D)), random.integers(0, V, (R, T)), weights, is_target


def rule(logits, values):
    """Weighted sum of negative log-probs and entropies; for metrics, their number and the largest probability."""
    ids, weights = values
    logprobs, entropy = targets.score(logits, ids, TEMPERATURE, True)
    mask = weights > 0
    loss = jnp.sum(weights * (ENTROPY * entropy - logprobs), axis=-1)
    sums = {"tokens": jnp.sum(mask, axis=-1, dtype=loss.dtype)}
    return loss, (sums, {"largest": jnp.max(jnp.where(mask, jnp.exp(logprobs), 0), axis=-1)})


def logprobs_of(logits, ids):
    """The log-probability of each target."""
    return targets.score(logits, ids, TEMPERATURE, False)[0]


def expected(head: np.ndarray, x, ids, weights, is_target):
    """Loss, its gradient in head and x, and all log-probs, in NumPy from all logits at once."""
    scaled = x @ head.T / TEMPERATURE
    logp = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    p, chosen = np.exp(logp), np.take_along_axis(logp, ids[..., None], axis=-1)[..., 0]
    entropy = -(p * logp).sum(axis=-1)
    slope = p - np.eye(V)[ids] - ENTROPY * p * (logp + entropy[..., None])
    slope *= weights[..., None] / TEMPERATURE
    loss = (weights * (ENTROPY * entropy - chosen)).sum()
    gradients = np.einsum("rtv,rtd->vd", slope, x), slope @ head
    return loss, gradients, np.where(is_target, chosen, 0)


def found(tied: bool, mesh, chunk: int, dtype: str, parameters: str = "float64"):
    """The same by `target_loss` and `target_values`, with the metrics, and the head as NumPy has it."""
    model, (x, ids, weights, is_target) = model_of(tied), given()
    params = architecture.init(model, mesh, jax.random.key(0), parameters)
    params = params.replace(head=None if tied else -params.embed)
    rows = [jax.device_put(array, sharding(mesh, ("batch",), "train")) for array in given()]
    x, ids, weights, is_target = rows[0].astype(dtype), *rows[1:]

    def loss(params, x):
        return targets.target_loss(
            params, model, mesh, x, (ids, weights), is_target, rule, chunk=chunk
        )

    @jax.jit
    def run(params, x):
        both = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, x)
        rows = params, model, mesh, x, ids, is_target
        logprobs = targets.target_values(*rows, logprobs_of, chunk=chunk)
        return loss(params, x)[0], both, logprobs

    plain, ((value, metrics), (gradient, dx)), logprobs = run(params, x)
    np.testing.assert_allclose(plain, value, rtol=1e-6 if dtype != "float64" else 1e-12)
    head = np.asarray(architecture.head(params) if tied else params.head)[:V]
    dhead = architecture.head(gradient)
    assert dhead.dtype == parameters and dx.dtype == dtype
    return (value, (np.asarray(dhead)[:V], dx), logprobs), metrics, head


@pytest.mark.parametrize(
    ("chunk", "tied", "shape"),
    [(1, True, (2, 2)), (3, False, (1, 1)), (1000, False, (2, 2))],
)
def test_loss_gradient_and_logprobs_are_those_of_all_logits_at_once(chunk, tied, shape, x64):
    results, (sums, maxima), head = found(tied, make_mesh(*shape), chunk, "float64")
    reference = expected(head, *given())
    for one, other in zip(*map(jax.tree.leaves, (results, reference)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-9, atol=1e-12)
    logprobs, is_target = reference[2], given()[3]
    assert float(sums["tokens"]) == is_target.sum() < is_target.size
    np.testing.assert_allclose(maxima["largest"], np.exp(logprobs[is_target]).max(), rtol=1e-9)


def test_bfloat16_states_give_the_gradient_up_to_their_rounding(x64):
    results, _, head = found(True, make_mesh(2, 2), 4, "bfloat16", "float32")
    reference = expected(head, *given())
    for one, other in zip(*map(jax.tree.leaves, (results, reference)), strict=True):
        one = np.asarray(one, np.float64)
        assert np.linalg.norm(one - other) < 0.02 * np.linalg.norm(other)


def test_chunks_without_a_target_are_not_computed():
    """As many chunks as hold the targets, wherever they lie; with one more target, one more."""
    model, mesh, calls = model_of(True), make_mesh(1, 1), []
    params = architecture.init(model, mesh, jax.random.key(0), "float32")
    x, ids = jnp.ones((2, 16, D)), jnp.zeros((2, 16), jnp.int32)

    def counted(logits, values):
        jax.debug.callback(lambda: calls.append(logits.shape[1]))
        return rule(logits, values)

    def loss(params, weights):
        return targets.target_loss(
            params, model, mesh, x, (ids, weights), weights > 0, counted, chunk=4
        )[0]

    step = jax.jit(jax.value_and_grad(loss))
    for places, chunks in (([], 0), ([0, 5, 20, 31], 1), ([2, 3, 4, 5, 30], 2), (range(32), 8)):
        weights = np.zeros(32, np.float32)
        weights[list(places)] = 1
        calls.clear()
        value, _ = step(params, weights.reshape(2, 16))
        jax.effects_barrier()
        assert calls == [4] * chunks
        assert (float(value) == 0) == (chunks == 0)


def test_a_chunk_is_at_most_a_quarter_of_the_tokens():
    assert targets.chunk_length(768, 1024) == 192
    assert targets.chunk_length(768, 128) == 128
    assert targets.chunk_length(1, 1024) == 1


def test_no_collective_moves_states_between_data_groups():
    """Each group takes its own targets: only the head is gathered, and sums and gradients of the head are added."""
    model, mesh = model_of(True, vocab=64), make_mesh(4, 1)
    params = architecture.abstract(model, mesh, "train", "float32")

    def array(*shape, dtype="float32"):
        place = sharding(mesh, ("batch",), "train")
        return jax.ShapeDtypeStruct(shape, dtype, sharding=place)

    def loss(params, x, ids, weights):
        return targets.target_loss(
            params, model, mesh, x, (ids, weights), weights > 0, rule, chunk=32
        )[0]

    step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1)))
    rows = array(8, 250), array(8, 250, dtype="int32")
    text = step.lower(params, array(8, 250, D), rows[1], rows[0]).compile().as_text()
    moved = re.findall(r"= (.*?) (?:all-gather|all-to-all|collective-permute|all-reduce)\(", text)
    shapes = {shape for line in moved for shape in re.findall(r"\[([\d,]*)\]", line)}
    assert shapes == {"", "64,16"}
