"""The state that persists across RL steps, its checkpoints, and what a run with changed settings reuses of it."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from flax import struct

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config
from tlt_jax.drafter import recipe as drafter_recipe
from tlt_jax.drafter.investment import Investment
from tlt_jax.errors import CheckpointError, DamagedCheckpoint
from tlt_jax.optimizer import TrainState
from tlt_jax.train import policy_update
from tlt_jax.train.recipe import Recipe
from tlt_jax.tuner.interface import State as TunerState, Tuner

# Keys in a checkpoint's meta, with JSON values: the tuner's state, the budget of the drafter's training in the update, and the
# position of the data.
TUNER, INVESTMENT, POSITION = "tuner", "investment", "position"

log = logging.getLogger(__name__)


@struct.dataclass
class RunState:
    """The state that the training loop owns and replaces at every step.

    It excludes what only costs time to lose (executables and n-gram memory in Engine, timings of
    drafting in Trainer), and what never changes (the KL reference, a drafter that is not trained). `policy` and
    `drafter` (weights, Adam moments, counters) are None when the run does not train them; `tuner` is
    JSON, None when the run does not decode. `step`: number of finished steps. `investment`: progress
    and cost of the drafter's training in policy updates. `position`: of the next step's first prompt in the data; None: every
    step so far took rollout.prompts prompts.
    """

    step: int = struct.field(pytree_node=False)
    policy: TrainState | None = None
    drafter: TrainState | None = None
    tuner: TunerState | None = struct.field(pytree_node=False, default=None)
    investment: Investment = struct.field(pytree_node=False, default=Investment())
    position: int | None = struct.field(pytree_node=False, default=None)


def abstract(
    step: int,
    policy: Recipe | None = None,
    drafter: drafter_recipe.Recipe | None = None,
) -> RunState:
    """ShapeDtypeStructs with shardings of what these recipes train, to restore or to plan."""
    return RunState(
        step,
        policy and policy_update.abstract_state(policy),
        drafter and drafter_recipe.abstract_state(drafter),
    )


def save(
    store: Store,
    state: RunState,
    basis: Mapping[str, Any] | None = None,
    metrics: Mapping[str, float] | None = None,
) -> None:
    """Starts saving a checkpoint of the step.

    `basis`: the settings for which the tuner's state is valid.
    """
    items = {"policy": state.policy, "drafter": state.drafter}
    meta = {} if state.tuner is None else {TUNER: {"basis": basis, "state": state.tuner}}
    if meta and state.drafter is not None:
        meta[INVESTMENT] = state.investment.saved()
    if state.position is not None:
        meta[POSITION] = state.position
    store.save(
        state.step, {name: item for name, item in items.items() if item is not None}, meta, metrics
    )


def restore(
    store: Store, like: RunState, tuner: Tuner | None = None, basis: Mapping[str, Any] | None = None
) -> RunState:
    """The state of the checkpoint of `like.step`, with the shardings of `like`.

    Reads every checkpoint format so far. A tuner state of another basis is dropped for an initial
    one, with a log line. Raises CheckpointError.
    """
    targets = {"policy": like.policy, "drafter": like.drafter}
    restored = store.restore(
        like.step, {name: item for name, item in targets.items() if item is not None}
    )
    items, investment = restored.items, Investment.of(restored.meta.get(INVESTMENT))
    position = restored.meta.get(POSITION)
    state = RunState(
        like.step,
        items.get("policy"),
        items.get("drafter"),
        investment=investment,
        position=position,
    )
    if tuner is None:
        return state
    return state.replace(tuner=resumed_tuner(restored.meta.get(TUNER), tuner, basis))


def resume(
    store: Store,
    policy: Recipe,
    drafter: drafter_recipe.Recipe | None,
    tuner: Tuner,
    basis: Mapping[str, Any],
) -> RunState | None:
    """The state of the newest checkpoint, with the drafter of this recipe if it was saved; None without a checkpoint.

    Damaged checkpoints are set aside, except the only one left: a run that had checkpoints never starts
    from scratch by itself. Raises CheckpointError.
    """
    while (step := store.latest()) is not None:
        try:
            has_drafter = drafter and "drafter" in store.index(step)["items"]
            like = abstract(step, policy, drafter if has_drafter else None)
            return restore(store, like, tuner, basis)
        except DamagedCheckpoint as error:
            if len(store.steps()) == 1:
                raise
            log.warning("%s; it is set aside", error)
            store.set_aside(step)
    if store.has_set_aside():
        raise CheckpointError(
            f"{store.folder} holds only damaged checkpoints: a new run needs another run folder"
        )
    return None


def resumed_tuner(
    saved: Mapping[str, Any] | None, tuner: Tuner, basis: Mapping[str, Any]
) -> TunerState:
    """The saved tuner state when its basis is this one; else an initial state."""
    fresh = tuner.init()
    if saved is None:
        reason = "not in the checkpoint"
    elif other := [name for name, value in basis.items() if saved["basis"].get(name) != value]:
        reason = f"of another {', '.join(other)}"
    elif saved["state"].keys() != fresh.keys():
        reason = "of another version"
    else:
        return saved["state"]
    if fresh.keys() - {"cells"}:  # a tuner that only has costs chooses no strategy
        log.warning("the tuner starts from scratch: its saved state is %s", reason)
    return fresh


def is_due(config: Config, step: int, steps: int) -> bool:
    """True after every checkpoint.every-th step, and after the last."""
    return step == steps or (
        config.checkpoint.every > 0 and step > 0 and step % config.checkpoint.every == 0
    )
