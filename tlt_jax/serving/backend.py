"""What the server asks of an engine: sequences of tokens that are continued beside each other. Knows no HTTP and no JAX."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

STOP, LENGTH, NONFINITE, CANCELLED = "stop", "length", "nonfinite", "cancelled"
# New tokens, their log-probs at the sampling temperature, and how it finished: one of these four, once; "" while it goes on.
Told = Callable[[list[int], list[float], str], None]


class Sampling(Protocol):
    """How tokens are drawn, for all sequences alike: temperature (0: greedy), then top-k (0: off), then top-p (1: off)."""

    temperature: float
    top_k: int
    top_p: float


class Backend(Protocol):
    """An engine. `model`: its name. `vocab`: token ids are below it. `longest`: most tokens of a prompt and its answer.

    stops: the texts at which answers may be cut; None: any. known: prompt and answer of conversations, which the server keeps.
    Its methods are called in the server's thread, and return at once.
    """

    model: str
    vocab: int
    longest: int
    sampling: Sampling
    stops: Sequence[str] | None
    known: OrderedDict[bytes, tuple[np.ndarray, np.ndarray]]

    def submit(
        self, prompt: np.ndarray, most: int, told: Told, seed: tuple[int, int] | None = None
    ) -> int:
        """Starts a sequence: int32[P] prompt, at most `most` new tokens; its handle. Raises UserError when it takes none.

        The noise depends on `seed` alone: a seed and the number of the answer; None: the backend chooses.
        `told` may be called from any thread, and returns at once.
        """

    def cancel(self, handle: int) -> None:
        """Ends a sequence; without effect on one that has finished."""
