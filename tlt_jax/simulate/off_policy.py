"""How far off-policy a step is: updates between the policy that wrote a token and the policy that is trained on it. No JAX."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple


class OffPolicy(NamedTuple):
    """Of the answer tokens of a step: mean and largest age in updates of the policy, share of tokens that are older than 0."""

    mean: float = 0.0
    most: int = 0
    older: float = 0.0


def off_policy(tokens: Mapping[int, int]) -> OffPolicy:
    """Of tokens counted by age."""
    whole = sum(tokens.values())
    if not whole:
        return OffPolicy()
    mean = sum(age * count for age, count in tokens.items()) / whole
    most = max(age for age, count in tokens.items() if count)
    return OffPolicy(mean, most, 1 - tokens.get(0, 0) / whole)
