"""`python -m tlt_jax.train`, but process FAILS_AS raises when phase FAILS_IN starts for the FAILS_NTHth time.

FAILS_IN damage: what it reads of the checkpoint of step FAILS_NTH is damaged. FAILS_IN slow rename: it renames slowly.
ANSWER_S: it waits so many seconds for whoever has the port of process 0.
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from jobs import command

from tlt_jax.distributed import job

REASON = "the card has fallen off the bus"


def break_down() -> None:
    """Makes the phase raise in this process if it is the one: a rollout while answers arrive, others at their start."""
    from tlt_jax.checkpoint import index
    from tlt_jax.data import dataset as datasets
    from tlt_jax.distributed.watch import Watch
    from tlt_jax.train import evaluation

    job.ANSWER_S = float(os.environ.get("ANSWER_S", job.ANSWER_S))
    if os.environ["JAX_PROCESS_ID"] != os.environ.get("FAILS_AS"):
        return
    phase, nth = os.environ["FAILS_IN"], int(os.environ["FAILS_NTH"])
    alive, submit, begun = Watch.alive, evaluation.submit, []

    def fail() -> None:
        Path(os.environ["FAILS_MARK"]).write_text(str(time.time()))
        raise RuntimeError(REASON)

    def watched(watch: Watch, name: str = "") -> None:
        alive(watch, name)
        if name == phase:
            begun.append(name)
            if len(begun) == nth and phase != "rollout":
                fail()

    def submitted(*arguments) -> str:
        if phase == "rollout" and len(begun) >= nth:
            fail()
        return submit(*arguments)

    Watch.alive, evaluation.submit = watched, submitted
    if phase == "start":
        datasets.load = lambda *_: fail()
    if phase == "slow rename":
        rename = Path.rename
        Path.rename = lambda path, to: (time.sleep(3), rename(path, to))[1]
    if phase == "damage":
        index.read = partial(damaged, index.read, nth)


def damaged(read, step: int, folder: Path, targets):
    """Reads a checkpoint; that of this step is damaged for this process."""
    if folder.name == str(step):
        raise ValueError("DATA_LOSS: Error reading: CRC-32C checksum verification failed")
    return read(folder, targets)


if __name__ == "__main__":
    sys.exit(command(break_down))
