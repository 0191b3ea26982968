"""Completion and reference answer to score, in worker processes that can be killed; knows no model and imports no JAX.

A reward is a function (prompt: str, completion: str, row: dict) -> float or dict. `row` has the columns of the data
set and, as row["answer"], the reference answer. A dict has the reward under "score"; its other numbers are reported.
"""

from tlt_jax.rewards.scorer import Score, Scorer

__all__ = ["Score", "Scorer"]
