"""Stop texts within generated tokens, and the reasons for which a sequence finishes; knows no rounds."""

from __future__ import annotations

import jax.numpy as jnp
from jaxtyping import Array, Int32

from tlt_jax.data.stop_rules import StopRules
from tlt_jax.shapes import shaped

RUNNING, STOPPED, TRUNCATED, BROKEN = 0, 1, 2, 3  # BROKEN: the target's logits are not finite


@shaped
def follow(
    rules: StopRules, states: Int32[Array, " B"], tokens: Int32[Array, "B M"]
) -> Int32[Array, "B M"]:
    """The state of the rules after each token; `states`: those before. rules.end: the token completes a stop text."""
    table = jnp.asarray(rules.table)
    classes = jnp.asarray(rules.classes).at[tokens].get(mode="fill", fill_value=rules.other)
    after = []
    for m in range(tokens.shape[1]):
        states = table[states, classes[:, m]]
        after.append(states)
    return jnp.stack(after, axis=1)
