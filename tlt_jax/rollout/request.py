"""What a rollout decodes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_jax.spec_decode.stopping import DecodingParams


@dataclass(frozen=True)
class RolloutRequest:
    """What a rollout decodes, the same for every group: prompts, longest answer and samples of each, keys by uid."""

    prompts: tuple[np.ndarray, ...]
    samples: int
    max_new_tokens: tuple[int, ...]
    keys: np.ndarray
    rules: DecodingParams
    rounds: int
    in_flight: int
    capacity: int
