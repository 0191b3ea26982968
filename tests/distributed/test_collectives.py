import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.plan.launches import axes_crossed, collectives, device_groups


def test_device_groups_in_every_notation():
    assert device_groups("x = all-reduce(y), replica_groups={{0,1},{2,3}}, to_apply=add", 4) == [
        [0, 1],
        [2, 3],
    ]
    assert device_groups("x = all-gather(y), replica_groups=[2,2]<=[4]", 4) == [[0, 1], [2, 3]]
    assert device_groups("x = all-gather(y), replica_groups=[2,2]<=[2,2]T(1,0)", 4) == [
        [0, 2],
        [1, 3],
    ]
    assert device_groups("x = collective-permute(y), source_target_pairs={{0,2},{2,0}}", 4) == [
        [0, 2],
        [2, 0],
    ]
    assert device_groups("x = all-reduce(y), replica_groups=mesh['a'=1,'b'=2,'c'=2] {'c'}", 4) == [
        [0, 1],
        [2, 3],
    ]
    named = "x = all-reduce(y), replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}"
    assert device_groups(named, 4) == [[0, 2], [1, 3]]
    assert device_groups("x = all-reduce(y), replica_groups=mesh['a'=4] {'a':(1)2}", 4) == [
        [0, 2],
        [1, 3],
    ]
    assert device_groups("x = all-reduce(y), replica_groups={}", 4) == [[0, 1, 2, 3]]


def test_axes_crossed_are_those_along_which_members_differ():
    mesh = make_mesh(2, 4)
    assert axes_crossed([[0, 1, 2, 3], [4, 5, 6, 7]], mesh) == ["model"]
    assert axes_crossed([[0, 4], [1, 5]], mesh) == ["data"]
    assert axes_crossed([list(range(8))], mesh) == ["data", "model"]
    assert axes_crossed([[0], [1]], mesh) == []


@pytest.mark.parametrize("axis", ["data", "model"])
def test_a_sharded_contraction_reduces_over_its_axis(axis):
    mesh = make_mesh(2, 4)
    x = jax.device_put(jnp.ones((8, 16)), NamedSharding(mesh, PartitionSpec(None, axis)))
    program = jax.jit(lambda x: x.sum(axis=1)).lower(x).compile()
    assert collectives(program.as_text(), mesh) == {f"all-reduce over {axis}": 1}
