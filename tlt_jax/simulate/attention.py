"""What attention takes of a decoding round: seconds for each cached token, and for each cached token and node. No JAX."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from tlt_jax.tuner import cost_model

# Priors: of a node, in seconds of a token; of what does not grow with the tokens, in those of the cases' mean tokens.
NODE, FIXED = 0.1, 0.2


class Attention(NamedTuple):
    """Seconds of a row in all layers, for each token that it holds (`token`) and, on top, for each of its nodes (`node`)."""

    token: float
    node: float

    def slope(self, batch: int, nodes: int) -> float:
        """Seconds of a round for each token that each of its `batch` rows holds."""
        return batch * (self.token + self.node * nodes)


def fit(
    rows: Sequence[int], nodes: Sequence[int], held: Sequence[float], seconds: Sequence[float]
) -> Attention:
    """The attention that was measured in C cases; what does not grow with the tokens (launches) belongs to the round's rest."""
    rows_C, nodes_C, held_C, seconds_C = (
        np.array(one, float) for one in (rows, nodes, held, seconds)
    )
    read_C = rows_C * held_C
    terms_CF = np.stack([np.ones_like(read_C), read_C, read_C * nodes_C], axis=1)
    units = np.array([FIXED * read_C.mean(), 1.0, NODE])
    noise_C = np.full(len(seconds_C), cost_model.WARM_NOISE)
    _, token, node = cost_model.fit(terms_CF, seconds_C, noise_C, units)
    return Attention(float(token), float(node))
