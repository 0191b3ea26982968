"""The state that persists across RL steps, its checkpoints, and what a run with changed settings or a command reuses."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
from flax import struct
from jax.sharding import Mesh

from tlt_jax import atomic, run_folder
from tlt_jax.checkpoint.store import FOLDER, Store
from tlt_jax.config import Config, validate
from tlt_jax.data import prompt_format
from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter import recipe as drafter_recipe
from tlt_jax.drafter.investment import Investment
from tlt_jax.errors import CheckpointError, ConfigError, DamagedCheckpoint
from tlt_jax.models import from_config, hf, lora, low_rank
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.optimizer import TrainState
from tlt_jax.train import policy_update
from tlt_jax.train.policy_update import Recipe
from tlt_jax.train.setup import base_of
from tlt_jax.tuner import cost_model
from tlt_jax.tuner.interface import State as TunerState, Tuner

# Keys in a checkpoint's meta, with JSON values: the tuner's state, the budget of the drafter's training in the update, and the
# position of the data.
TUNER, INVESTMENT, POSITION = "tuner", "investment", "position"

LATEST = ("latest", "last")  # names of the newest checkpoint
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
    drafter: drafter_recipe.DrafterRecipe | None = None,
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

    A tuner state of another basis is dropped for an initial one, with a log line. Raises CheckpointError.
    """
    targets = {"policy": like.policy, "drafter": like.drafter}
    restored = store.restore(
        like.step, {name: item for name, item in targets.items() if item is not None}
    )
    items, meta = restored.items, restored.meta
    investment, position = Investment.of(meta.get(INVESTMENT)), meta.get(POSITION)
    state = RunState(
        like.step, items.get("policy"), items.get("drafter"), None, investment, position
    )
    if tuner is None:
        return state
    return state.replace(tuner=resumed_tuner(meta.get(TUNER), tuner, basis))


def resume(
    store: Store,
    policy: Recipe,
    drafter: drafter_recipe.DrafterRecipe | None,
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
    if fresh.keys() - cost_model.begin().keys():  # a tuner that only has costs chooses no strategy
        log.warning("the tuner starts from scratch: its saved state is %s", reason)
    return fresh


def is_due(config: Config, step: int, steps: int) -> bool:
    """True after every checkpoint.every-th step, and after the last."""
    return step == steps or (
        config.checkpoint.every > 0 and step > 0 and step % config.checkpoint.every == 0
    )


def sizes(config: Config) -> tuple[ModelConfig, Mesh]:
    """The policy's ModelConfig and the mesh of the configuration. Raises ConfigError when it does not fit the devices."""
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    validate.validate_model(config, model, jax.device_count())
    return model, meshes.make_mesh(config.mesh.data, config.mesh.model)


def saved_policy(
    config: Config, run: Path, step: str, model: ModelConfig, mesh: Mesh
) -> tuple[int, Params]:
    """The step that `step` names, and the policy after it, in the "train" layout. Raises ConfigError or CheckpointError."""
    target = policy_update.abstract_state(Recipe.of(config, model, mesh, total_steps=1))
    chosen, state = restore_item(config, run, step, "policy", target)
    return chosen, lora.whole(state.params, base_of(config, run, model, mesh))


def policy_or_export(
    config: Config, run: Path, step: str, model: ModelConfig, mesh: Mesh
) -> tuple[int, Params, Path]:
    """As `saved_policy`, and where the weights are from: the run's export when it is of that step, else the checkpoint.

    Raises ConfigError or CheckpointError.
    """
    newest = run_folder.newest(config)
    try:
        made_from = json.loads((run_folder.export(config) / atomic.MADE_FROM).read_text("utf-8"))
        exported = int(made_from["step"])
    except (OSError, ValueError, KeyError, TypeError):
        exported = None  # the run has exported no policy
    if low_rank.kept_apart(lora.chosen(config.model.lora, model), config.model.compute_dtype):
        exported = None  # adapters are merged there, and rounded with the base in a rollout
    if exported is not None and (step == str(exported) or step in LATEST and exported >= newest):
        directory = run_folder.export(config)
        return exported, hf.load(directory, model, mesh, config.model.param_dtype), directory
    chosen, params = saved_policy(config, run, step, model, mesh)
    return chosen, params, run / FOLDER / str(chosen)


def restore_item(config: Config, run: Path, step: str, item: str, target: Any) -> tuple[int, Any]:
    """The step that `step` names (a number, last, latest or best), and its item with the shardings of the target.

    Raises ConfigError or CheckpointError when no such checkpoint exists.
    """
    with Store(run, config.checkpoint.keep, config.checkpoint.best_metric, create=False) as store:
        if step in (*LATEST, "best"):
            chosen = store.best() if step == "best" else store.latest()
        elif step.isdecimal():
            chosen = int(step)
        else:
            raise ConfigError(f"--step {step!r} is neither a number, last nor best")
        if chosen not in store.steps():
            is_unset = step == "best" and not config.checkpoint.best_metric
            why = " (checkpoint.best_metric is empty)" * is_unset
            raise ConfigError(
                f"--step {step}: {run} has no such checkpoint{why}, only {store.steps() or 'none'}"
            )
        if item not in store.index(chosen)["items"]:
            raise ConfigError(
                f"--{item}: the run had trained none at step {chosen}: drafter_training.share auto trains one only if the rest "
                "of the run pays it back, share 1 from the first step on"
            )
        return chosen, store.restore(chosen, {item: target}).items[item]
