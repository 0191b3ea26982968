"""Seconds of every program of a rollout, from those of a round alone; knows no clock."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tlt_jax.rollout.buckets import admission_size
from tlt_jax.rollout.executables.programs import (
    Admit,
    CatchUp,
    Decode,
    Prefill,
    Resize,
    Start,
    StateShape,
)
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.rollout.recorder import IDLE_ROUND
from tlt_jax.rollout.scheduler.harvest import Harvest
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

DRAFTER = 1 / 20  # a drafter's cost to catch up with a token, relative to the policy's cost of it

RoundCost = Callable[
    [int, int, Strategy], float
]  # rows, slots, strategy -> milliseconds of a round


def noiseless_seconds(round_cost: RoundCost, program: Program, rounds: int) -> float:
    """Seconds of a program without noise.

    A prefill counts as a round with as many nodes as it has tokens. Writing a cache takes as long as
    a round takes to read it; a copy takes twice that. The `rounds` of a catch-up are the tokens that
    the drafter lacks, alike in all rows.
    """

    def write_cost(batch: int, slots: int) -> float:
        return round_cost(batch, slots, PLAIN) - round_cost(batch, 0, PLAIN)

    match program:
        case Decode(StateShape(_, batch, slots), _, strategy):
            taken = max(rounds, IDLE_ROUND) * round_cost(batch, slots, strategy)
        case Prefill(_, prompts, width):
            taken = round_cost(prompts, width, replace(PLAIN, nodes=width))
        case CatchUp(StateShape(_, batch, slots)):
            nodes = max(-(-rounds // batch), 1)
            taken = DRAFTER * round_cost(batch, slots, replace(PLAIN, nodes=nodes))
        case Start(StateShape(_, batch, slots)):
            taken = write_cost(batch, slots)
        case Admit(StateShape(_, batch), Prefill(_, _, width)):
            taken = write_cost(admission_size(batch), width)
        case Resize(_, batch, slots):
            taken = 2 * write_cost(batch, slots)
        case Harvest(_, windows, width):
            taken = 2 * write_cost(windows, width)
    return taken / 1e3
