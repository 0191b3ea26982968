"""All that survives an RL step, its checkpoints, and what a checkpoint of other settings keeps of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flax import struct

from tlt_jax.checkpoint import Store
from tlt_jax.config import Config
from tlt_jax.drafter import update as drafter_update
from tlt_jax.optimizer import TrainState
from tlt_jax.train import policy_update
from tlt_jax.tuner.interface import State as TunerState, Tuner

TUNER = "tuner"  # of a checkpoint's meta: it is of no importance to the policy, and JSON

log = logging.getLogger(__name__)


@struct.dataclass
class RunState:
    """What the loop owns and replaces at every step; nobody else changes it.

    Not in it, since losing them costs speed only: executables, n-gram memory, timings of drafting
    (Engine). Not in it, since they never change: the KL reference, a drafter that is not trained.
    `policy` and `drafter` (weights, Adam moments, counters) are None when the run does not train
    them; `tuner` is plain JSON, None when nothing decodes. `step`: steps done.
    """

    step: int = struct.field(pytree_node=False)
    policy: TrainState | None = None
    drafter: TrainState | None = None
    tuner: TunerState | None = struct.field(pytree_node=False, default=None)


def abstract(
    step: int, policy: policy_update.Recipe | None = None, drafter: drafter_update.Recipe | None = None
) -> RunState:
    """ShapeDtypeStructs with shardings of what these recipes train: to restore a checkpoint, or to plan."""
    return RunState(
        step,
        policy and policy_update.abstract_state(policy),
        drafter and drafter_update.abstract_state(drafter),
    )


def save(
    store: Store,
    state: RunState,
    basis: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Starts to save a step; `basis` is what the tuner's state depends on besides its measurements."""
    items = {"policy": state.policy, "drafter": state.drafter}
    meta = {} if state.tuner is None else {TUNER: {"basis": basis, "state": state.tuner}}
    store.save(state.step, {name: item for name, item in items.items() if item is not None}, meta, metrics)


def restore(
    store: Store, like: RunState, tuner: Tuner | None = None, basis: Mapping[str, Any] | None = None
) -> RunState:
    """The state of the checkpoint of `like.step`, with the shardings of `like`; reads every format so far.

    A tuner's state of another basis begins anew, and says why.
    """
    targets = {"policy": like.policy, "drafter": like.drafter}
    restored = store.restore(like.step, {name: item for name, item in targets.items() if item is not None})
    state = RunState(like.step, restored.items.get("policy"), restored.items.get("drafter"))
    if tuner is None:
        return state
    return state.replace(tuner=resumed_tuner(restored.meta.get(TUNER), tuner, basis))


def resumed_tuner(saved: Mapping[str, Any] | None, tuner: Tuner, basis: Mapping[str, Any]) -> TunerState:
    """The saved tuner state when it was learned under this basis; else a new one."""
    fresh = tuner.init()
    if saved is None:
        reason = "not in the checkpoint"
    elif other := [name for name, value in basis.items() if saved["basis"].get(name) != value]:
        reason = f"of another {', '.join(other)}"
    elif saved["state"].keys() != fresh.keys():
        reason = "of another version"
    else:
        return saved["state"]
    if fresh:
        log.info("the tuner starts anew: what it had learned is %s", reason)
    return fresh


def is_due(config: Config, step: int, steps: int) -> bool:
    """Whether a checkpoint is due: after every checkpoint.every-th step and after the last."""
    return step == steps or (config.checkpoint.every > 0 and step > 0 and step % config.checkpoint.every == 0)
