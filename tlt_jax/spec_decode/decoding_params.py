"""The parameters of decoding that tokens depend on; no JAX."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Sampling:
    """How a token is drawn: temperature (0: greedy), then top-k (0: off), then top-p (1: off)."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @classmethod
    def of(cls, section: Any) -> Sampling:
        """The sampling of a configuration section: rollout or eval."""
        return cls(section.temperature, section.top_k, section.top_p)

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class DecodingParams:
    """All that generated tokens depend on, besides weights and random keys.

    `eos_ids`: tokens that end a sequence; `stops`: data.stop_rules.StopRules of the stop texts, or None.
    """

    sampling: Sampling = Sampling()
    eos_ids: tuple[int, ...] = ()
    stops: Any = None
