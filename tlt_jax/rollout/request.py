"""What a rollout decodes: prompts, limits and keys, as plain arrays; knows no configuration and no data set."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tlt_jax.spec_decode.decoding_params import DecodingParams


@dataclass(frozen=True)
class RolloutRequest:
    """The same for every data group. The uid of a sequence is prompt * samples + sample.

    prompts: int32[P] each, with at least one token. max_new_tokens: longest answer to each prompt.
    keys: uint32[prompts * samples, 2], the key of each sequence's noise. rounds: most rounds of a
    chunk. in_flight: chunks that a group may have queued. capacity: most sequences of a group. rollouts_left: how
    many rollouts like it the run still decodes after it.
    """

    prompts: tuple[np.ndarray, ...]
    samples: int
    max_new_tokens: tuple[int, ...]
    keys: np.ndarray
    params: DecodingParams
    rounds: int
    in_flight: int
    capacity: int
    rollouts_left: float = 0
