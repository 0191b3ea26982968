"""A batch of packed rows for drafter training, on a mesh."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.distributed.mesh import put, sharding


@struct.dataclass
class Batch:
    """Packed rows (packing.Packed). `loss_mask`: the positions whose next token enters the loss.

    A segment may start at any position of its sequence; attention does not reach tokens before the segment. `features`:
    the policy's features that the drafter reads; `states`: its normed last hidden states; None: the update computes them.
    """

    tokens: Int32[Array, "R T"]
    positions: Int32[Array, "R T"]
    segments: Int32[Array, "R T"]
    loss_mask: Bool[Array, "R T"]
    features: Float[Array, "R T F"] | None = None
    states: Float[Array, "R T D"] | None = None


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are sharded over the mesh axis "data"."""
    return sharding(mesh, ("batch", None), "train")


def make_batch(rows: dict[str, np.ndarray], mesh: Mesh) -> Batch:
    """The batch on the mesh, from tokens, positions, segments and loss_mask [R, T]."""
    return Batch(**put(rows, batch_sharding(mesh)))


def abstract_batch(mesh: Mesh, rows: int, tokens: int) -> Batch:
    """ShapeDtypeStructs with shardings of a batch without features, for compilation."""
    small = partial(jax.ShapeDtypeStruct, (rows, tokens), sharding=batch_sharding(mesh))
    return Batch(small(jnp.int32), small(jnp.int32), small(jnp.int32), small(jnp.bool_))
