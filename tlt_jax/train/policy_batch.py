"""The packed rows of a policy update, on the mesh.

Shapes: R packed rows of an accumulation step, T tokens of a row.
"""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.data.packing import Packed
from tlt_jax.data.segments import most_segments
from tlt_jax.distributed.mesh import put, sharding


@struct.dataclass
class Rows:
    """The packed rows of one accumulation step; see packing.Packed.

    Per-token values are at the position of the target, 0 elsewhere; `weights` > 0 exactly at
    targets that the loss counts. Log-probs: `recorded` of the sampler; `old` of the policy before the first minibatch
    (None: those of the update itself, so ratios are 1); `reference` of the frozen initial policy.
    `answers`: 1 at all targets of finite answers, also those that the loss leaves out; None: it counts all of these.
    """

    tokens: Int32[Array, "R T"]
    positions: Int32[Array, "R T"]
    segments: Int32[Array, "R T"]
    targets: Int32[Array, "R T"]
    weights: Float[Array, "R T"]
    advantages: Float[Array, "R T"]
    recorded: Float[Array, "R T"] | None = None
    old: Float[Array, "R T"] | None = None
    reference: Float[Array, "R T"] | None = None
    answers: Float[Array, "R T"] | None = None

    @property
    def is_answer(self) -> Bool[Array, "R T"]:
        """Where the next token is an answer's."""
        return (self.weights if self.answers is None else self.answers) > 0


Batch = Sequence[Rows]  # a minibatch, by accumulation step


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Rows are sharded over the mesh axis "data"."""
    return sharding(mesh, ("batch", None), "train")


def make_batch(
    packed: Packed,
    mesh: Mesh,
    longest: int | None,
    weights: np.ndarray,
    advantages: np.ndarray,
    recorded: list[np.ndarray] | None = None,
    is_answer: np.ndarray | None = None,
) -> Batch:
    """The batch on the mesh.

    weights[n] and advantages[n] are per example, `recorded` log-probs per answer token; `is_answer` bool[n]: the examples of
    `Rows.answers`, where some have weights of 0. Raises
    ValueError for an example longer than `longest` tokens (the recipe's limit), and for a row with more
    examples than attention supports.
    """
    if longest is not None and packed.positions.max() >= longest:
        raise ValueError(
            f"an example has {packed.positions.max() + 1} tokens, the recipe's longest {longest}"
        )
    most = most_segments(packed.segments.shape[-1])
    if packed.segments.max() > most:
        raise ValueError(
            f"a row has {packed.segments.max()} examples, attention takes {most}: pack them by packing.pack"
        )
    fields = {
        name: getattr(packed, name) for name in ("tokens", "positions", "segments", "targets")
    }
    fields |= {"weights": packed.spread(weights), "advantages": packed.spread(advantages)}
    if recorded is not None:
        fields["recorded"] = packed.place(recorded)
    if is_answer is not None:
        fields["answers"] = packed.spread(is_answer)
    steps = [Rows(**{name: array[step] for name, array in fields.items()})
             for step in range(len(packed.tokens))]  # fmt: skip
    return put(steps, rows_sharding(mesh))


def with_advantages(batch: Batch, packed: Packed, advantages: np.ndarray, mesh: Mesh) -> Batch:
    """The batch with other advantages, float[n] of its examples."""
    placed = put(list(packed.spread(advantages)), rows_sharding(mesh))
    return [rows.replace(advantages=part) for rows, part in zip(batch, placed, strict=True)]


def abstract_rows(mesh: Mesh, rows: int, row_tokens: int, given: tuple[str, ...] = ()) -> Rows:
    """ShapeDtypeStructs with shardings of the rows of an accumulation step, for compilation.

    `given`: names of the optional fields that are not None.
    """

    def array(dtype: jax.typing.DTypeLike) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct((rows, row_tokens), dtype, sharding=rows_sharding(mesh))

    wide = jnp.asarray(0.0).dtype
    integers = {name: array(jnp.int32) for name in ("tokens", "positions", "segments", "targets")}
    return Rows(**integers, **{name: array(wide) for name in ("weights", "advantages", *given)})
