"""Rewards of completions, computed in worker processes that can be killed. No JAX.

A reward is a function (prompt: str, completion: str, row: dict) -> float or dict. `row` has the
columns of the data set and, as row["answer"], the reference answer. A dict has the reward as
"score"; its other numbers become metrics.
"""

from tlt_jax.rewards.scorer import Score, Scorer

__all__ = ["Score", "Scorer"]
