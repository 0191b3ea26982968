"""The state of sequences in decoding, and the weights that they are decoded with; knows no function on it."""

from __future__ import annotations

from typing import Any

from flax import struct
from jaxtyping import Array, Bool, Int32, UInt32

PyTree = Any


@struct.dataclass
class Weights:
    """Parameters of the target and of the drafter."""

    target: PyTree
    drafter: PyTree


@struct.dataclass
class DecodeState:
    """Sequences in decoding. The root is the newest token, at position `lengths`; the cache holds all tokens before it.

    `limits`: most tokens of prompt and answer together. `history`: tokens of the sequences, up to the root (S is 0 when
    no drafter reads them). `stop_state`: state of the stop rules. A row that is not live changes nothing in its slots
    below `lengths`.
    """

    roots: Int32[Array, " B"]
    lengths: Int32[Array, " B"]
    limits: Int32[Array, " B"]
    live: Bool[Array, " B"]
    keys: UInt32[Array, "B 2"]
    stop_state: Int32[Array, " B"]
    history: Int32[Array, "B S"]
    cache: PyTree
    drafter: PyTree
