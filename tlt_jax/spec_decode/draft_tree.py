"""Draft trees, their candidates and the noise that drafting and sampling share, as arrays; knows no network."""

from __future__ import annotations

import jax.numpy as jnp
from flax import struct
from jaxtyping import Array, Float, Int32

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


def score_order(scores: Float[Array, "B N"]) -> Int32[Array, "B N"]:
    """Rank of every node by score, 0 for the highest; of equal scores the earlier node comes first.

    The root, whose score is 0, has rank 0.
    """
    earlier = jnp.arange(scores.shape[1])[None, :] < jnp.arange(scores.shape[1])[:, None]
    better = (scores[:, None, :] > scores[:, :, None]) | (
        (scores[:, None, :] == scores[:, :, None]) & earlier
    )
    return better.sum(axis=-1, dtype=jnp.int32)
