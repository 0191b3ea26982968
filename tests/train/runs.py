"""What the tests of whole runs share: what a run has written, and where it is interrupted."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import jax
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tlt_jax.checkpoint import Store
from tlt_jax.config import Config


def saved_steps(config: Config) -> list[int]:
    with Store(config.run, create=False) as store:
        return store.steps()


def assert_equal(ours, theirs) -> None:
    """Every leaf is equal, bit by bit."""
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)),
        ours,
        theirs,
    )


def events(config: Config) -> dict[str, list[tuple[int, float]]]:
    """Scalar name -> (step, value) of every event."""
    accumulator = EventAccumulator(str(Path(config.run) / "tensorboard")).Reload()
    return {
        name: [(e.step, e.value) for e in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def raise_at(monkeypatch, target, name: str, number: int, act) -> None:
    """Runs `act` before call `number` (from 1) of a function."""
    function, calls = getattr(target, name), iter(range(1, 1000))

    def counted(*args, **kwargs):
        if next(calls) == number:
            act()
        return function(*args, **kwargs)

    monkeypatch.setattr(target, name, counted)


def preempt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)
