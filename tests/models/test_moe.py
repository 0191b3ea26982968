"""Laws of routers: replayed experts, their gradients, what is measured, and the load-balancing loss."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.models import architecture, hf, hf_config, moe, remat, transformer

MIXED = "qwen3_moe_mixed"  # its second layer has experts, and the others have none
CASES = ["qwen3_moe", MIXED, "qwen2_moe"]


@pytest.fixture(scope="module")
def policies(tmp_path_factory):
    """A function of a case: its configuration and its weights in float64."""

    def load(case: str):
        folder = model_cases.write(case, tmp_path_factory.mktemp(case))
        config = hf_config.read_config(folder)
        return config, hf.load(folder, config, make_mesh(1, 1), "float64")

    return load


def forward(params, config, replayed=None, tokens=model_cases.TOKENS, **options):
    """Logits of packed rows whose last two tokens are padding, and what the routers did."""
    ids = jnp.asarray(tokens, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    segments = jnp.ones_like(ids).at[:, -2:].set(0)
    x, _, routers = transformer.routed_hidden(
        params, config, ids, positions, segments, compute_dtype="float64", block=4,
        replayed=moe.by_layer(replayed, config), **options,
    )  # fmt: skip
    return transformer.logits(params, config, x), routers


def own_ids(params, config) -> jax.Array:
    """The experts of the router's choice, as a prefill records them."""
    ids = jnp.asarray(model_cases.TOKENS, jnp.int32)

    @jax.jit
    def prefill(params):
        rollout = architecture.to_rollout(params, config, make_mesh(1, 1), "float64")
        return transformer.prefill(rollout, config, ids, jnp.full(2, ids.shape[1])).experts

    return prefill(params)


def others(config, own: jax.Array) -> jax.Array:
    """Other experts than these, for each token and layer."""
    return ((own + 1) % config.num_experts).astype(own.dtype)


@pytest.mark.parametrize("case", CASES)
def test_replaying_the_routers_choice_changes_no_bit_and_no_record_is_it(case, policies, x64):
    config, params = policies(case)
    own = own_ids(params, config)
    assert own.shape[2:] == moe.record_shape(config)[:1] and own.dtype == jnp.uint8
    logits, routers = forward(params, config)
    missing = own.at[:, 3:6].set(255)
    for replayed in (own, missing):
        again, measured = forward(params, config, replayed)
        np.testing.assert_array_equal(again[:, :-2], logits[:, :-2])
        assert not measured.changed.any()
    other, measured = forward(params, config, others(config, own))
    assert not np.allclose(other[:, :-2], logits[:, :-2])
    np.testing.assert_array_equal(measured.changed, measured.tokens)
    np.testing.assert_array_equal(routers.tokens, 2 * (model_cases.LENGTH - 2))
    assert len(routers.tokens) == len(config.expert_layers)


def test_the_gates_of_replayed_experts_are_the_routers_probabilities_and_have_their_gradient(
    policies, x64
):
    """Of a layer, with weights and a gradient that NumPy computes in loops."""
    config, params = policies("qwen3_moe")
    router = np.asarray(params.layers.router[0])
    random = np.random.default_rng(0)
    y, weights = random.normal(size=(7, config.hidden_size)), random.normal(size=(7, 3))
    ids = np.stack([random.permutation(config.num_experts)[:3] for _ in range(7)])

    def gates_of(router):
        found = np.zeros((7, 3))
        for t in range(7):
            scores = np.exp(router @ y[t])
            chosen = scores[ids[t]] / scores.sum()
            found[t] = chosen / chosen.sum()
        return found

    def total(router):
        return jnp.sum(weights * moe.route(router, config, jnp.asarray(y), jnp.asarray(ids))[1])

    routed, gates = moe.route(jnp.asarray(router), config, jnp.asarray(y), jnp.asarray(ids))
    np.testing.assert_array_equal(routed.ids, ids)
    np.testing.assert_allclose(gates, gates_of(router), rtol=1e-12)
    gradient, step = np.asarray(jax.grad(total)(jnp.asarray(router))), 1e-6
    for expert in range(config.num_experts):
        moved = np.zeros_like(router)
        moved[expert, 5] = step
        slope = (weights * (gates_of(router + moved) - gates_of(router - moved))).sum() / (2 * step)
        assert gradient[expert, 5] == pytest.approx(slope, rel=1e-6, abs=1e-9)
    assert np.abs(gradient).max(1).all(), "every chosen expert's row learns"


@pytest.mark.parametrize(
    "case, apart",
    [(MIXED, True), *((case, False) for case in CASES if case != MIXED),
     *(pytest.param(case, True, marks=pytest.mark.matrix) for case in CASES if case != MIXED)],
)  # fmt: skip
def test_gradients_of_replayed_experts_do_not_depend_on_what_layers_keep_or_on_the_mesh(
    case, apart, policies, x64
):
    """On a mesh, and `apart` on one device with each choice of what is kept."""
    config, params = policies(case)
    replayed = others(config, own_ids(params, config))

    def gradients(levels, mesh=None):
        def loss(params):
            logits, routers = forward(params, config, replayed, remat=levels, mesh=mesh)
            return jnp.sum(jnp.sin(logits[:, :-2, :37])) + moe.balance_loss(routers)

        return jax.jit(jax.grad(loss))(params)

    expected = gradients(())
    L = config.num_layers
    mixed = (remat.PRODUCTS, *(remat.FULL,) * (L - 1))
    for levels in ((remat.FULL,) * L, (remat.ATTENTION,) * L, mixed) if apart else ():
        found = gradients(levels)
        for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-11)
    mesh = make_mesh(2, 2)
    params = jax.device_put(params, architecture.shardings(config, mesh, "train"))
    found = gradients((remat.PRODUCTS,) * L, mesh)
    for one, other in zip(jax.tree.leaves(expected), jax.tree.leaves(found), strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-9, atol=1e-11)


def test_what_is_measured_are_sums_over_tokens_that_are_no_padding(x64):
    random = np.random.default_rng(0)
    probabilities = random.dirichlet(np.ones(5), (2, 6))
    own = np.argsort(-probabilities)[..., :2]
    ids = own.copy()
    ids[0, 1] = own[0, 1][::-1]  # the same experts
    ids[1, 2, 0] = next(set(range(5)) - {*own[1, 2]} for _ in "a").pop()
    counts = np.ones((2, 6), bool)
    counts[:, 4:] = False
    routed = moe.Routed(*map(jnp.asarray, (ids, own, probabilities)))
    found = moe.measured(routed, jnp.asarray(counts))
    kept = ids[counts]
    np.testing.assert_array_equal(found.load, np.bincount(kept.ravel(), minlength=5))
    np.testing.assert_allclose(found.probability, probabilities[counts].sum(0))
    p = probabilities[counts]
    np.testing.assert_allclose(found.entropy, -(p * np.log(p)).sum())
    assert (int(found.changed), int(found.tokens)) == (1, 8)
    scalars = moe.scalars(jax.tree.map(lambda leaf: leaf[None], found))
    load = np.bincount(kept.ravel(), minlength=5) / (16 / 5)
    assert scalars["experts/load_max"] == pytest.approx(load.max())
    assert scalars["experts/load@2"] == pytest.approx(load[2])
    assert scalars["experts/changed"] == pytest.approx(1 / 8)


@pytest.mark.parity
@pytest.mark.parametrize("case", ["qwen3_moe", "qwen2_moe"])
def test_router_logits_and_load_balancing_loss_are_those_of_transformers(
    case, policies, tmp_path, x64
):
    import make_goldens
    import torch

    config, params = policies(case)
    reference = make_goldens.reference(model_cases.write(case, tmp_path / case))
    kept = torch.ones(model_cases.TOKENS.shape, dtype=torch.int64)
    kept[:, -2:] = 0
    with make_goldens.all_float64():
        theirs = reference(
            torch.tensor(model_cases.TOKENS), attention_mask=kept, output_router_logits=True
        )
    theirs.aux_loss.backward()

    def loss(params):
        return moe.balance_loss(forward(params, config)[1])

    value, gradient = jax.value_and_grad(loss)(params)
    assert float(value) == pytest.approx(float(theirs.aux_loss), rel=1e-6)  # they sum in float32
    ours = gradient.layers.router[1]
    expected = reference.model.layers[1].mlp.gate.weight.grad.numpy()
    np.testing.assert_allclose(ours, expected, rtol=1e-5, atol=1e-8)
    probabilities = [torch.softmax(one, -1).numpy(force=True) for one in theirs.router_logits]
    count = kept.reshape(-1).numpy() > 0
    sums = np.stack([one[count].sum(0) for one in probabilities])
    np.testing.assert_allclose(forward(params, config)[1].probability, sums, rtol=1e-9)
