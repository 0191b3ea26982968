"""Saving and restoring RunState, also from checkpoints of the first format."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from flax import struct
from training_runs import assert_equal

from tlt_jax.checkpoint.store import Store
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.optimizer import Adam, create
from tlt_jax.train import run_state
from tlt_jax.train.run_state import RunState
from tlt_jax.tuner import baselines

ADAM = Adam(1e-3, 10)
BASIS = {"speculation.tuner": "beg_mab", "version": 3}


@struct.dataclass
class Params:
    """Weights of one matrix."""

    matrix: jax.Array


def trained(seed: int):
    """Weights with their optimizer."""
    mesh = make_mesh(1, 1)
    where = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    weight = jax.device_put(jax.random.normal(jax.random.key(seed), (4, 3)), where)
    return create(ADAM, Params(weight), mesh)


@pytest.fixture
def state() -> RunState:
    """The state after seven steps."""
    tuner = {**baselines.begin_beg_mab(), "choices": 5, "rewards": {"4/off": [9.5]}}
    return RunState(7, trained(0), trained(1), tuner)


def like(state: RunState) -> RunState:
    """The abstract state to restore into."""
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), state
    )
    return shapes.replace(tuner=None)


def test_what_is_saved_is_restored(state, tmp_path):
    with Store(tmp_path) as store:
        run_state.save(store, state, BASIS, {"eval/mean@1": 0.5})
        store.wait()
        found = run_state.restore(store, like(state), baselines.beg_mab(["2_2_4"]), BASIS)
        assert store.index(7)["metrics"] == {"eval/mean@1": 0.5}
    assert found.step == 7 and found.tuner == state.tuner
    assert_equal((found.policy, found.drafter), (state.policy, state.drafter))


def test_a_checkpoint_of_the_first_format_is_read(state, tmp_path):
    """Its content: one item, `policy`, and as meta the basis and state of the tuner."""
    with Store(tmp_path) as store:
        meta = {"tuner": {"basis": BASIS, "state": state.tuner}}
        store.save(7, {"policy": state.policy}, meta)
        store.wait()
        tuner = baselines.beg_mab(["2_2_4"])
        found = run_state.restore(store, like(state).replace(drafter=None), tuner, BASIS)
    assert found.drafter is None and found.tuner == state.tuner
    assert_equal(found.policy, state.policy)


def test_a_state_without_a_policy_has_no_such_item(state, tmp_path):
    with Store(tmp_path) as store:
        run_state.save(store, RunState(3, drafter=state.drafter))
        store.wait()
        assert store.index(3)["items"].keys() == {"drafter"} and store.index(3)["meta"] == {}
        found = run_state.restore(store, like(RunState(3, drafter=state.drafter)))
    assert_equal(found.drafter, state.drafter)
    assert found.tuner is None


def test_a_tuner_that_learns_costs_alone_begins_without_a_word(state, tmp_path, caplog):
    with Store(tmp_path) as store:
        run_state.save(store, state, BASIS)
        store.wait()
        found = run_state.restore(store, like(state), baselines.fixed("off"), {"version": 4})
    assert found.tuner == baselines.fixed("off").init() and not caplog.records


def test_the_state_is_a_pytree_of_what_is_trained(state):
    doubled = jax.tree.map(lambda leaf: leaf * 2 if leaf.dtype == jnp.float32 else leaf, state)
    assert (doubled.step, doubled.tuner) == (state.step, state.tuner)
    assert_equal(doubled.policy.params.matrix, 2 * state.policy.params.matrix)
