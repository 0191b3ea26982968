"""What a run has saved, for commands that do not train: the items of its checkpoints, and its exported policy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tlt_jax import atomic, run_folder
from tlt_jax.checkpoint.store import FOLDER, Store
from tlt_jax.config import Config, validate
from tlt_jax.data import dataset as datasets
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import ConfigError
from tlt_jax.models import from_config, hf, lora, low_rank
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.train import policy_update, start_policy
from tlt_jax.train.recipe import Recipe

LATEST = ("latest", "last")  # names of the newest checkpoint


def sizes(config: Config) -> tuple[ModelConfig, Mesh]:
    """The policy's ModelConfig and the mesh of the configuration. Raises ConfigError when it does not fit the devices."""
    model = from_config.model_config(config, datasets.tokenizer(config))
    validate.validate_model(config, model, jax.device_count())
    return model, meshes.make_mesh(config.mesh.data, config.mesh.model)


def policy(
    config: Config, run: Path, step: str, model: ModelConfig, mesh: Mesh
) -> tuple[int, Params]:
    """The step that `step` names, and the policy after it, in the "train" layout. Raises ConfigError or CheckpointError."""
    target = policy_update.abstract_state(Recipe.of(config, model, mesh, total_steps=1))
    chosen, state = restore(config, run, step, "policy", target)
    return chosen, lora.whole(state.params, start_policy.base_of(config, run, model, mesh))


def policy_or_export(
    config: Config, run: Path, step: str, model: ModelConfig, mesh: Mesh
) -> tuple[int, Params, Path]:
    """As `policy`, and where the weights are from: the run's export when it is of that step, else the checkpoint.

    Raises ConfigError or CheckpointError.
    """
    exported, newest = exported_step(config), run_folder.newest(config)
    if low_rank.kept_apart(lora.chosen(config.model.lora), config.model.compute_dtype):
        exported = None  # adapters are merged there, and rounded with the base in a rollout
    if exported is not None and (step == str(exported) or step in LATEST and exported >= newest):
        directory = run_folder.export(config)
        return exported, hf.load(directory, model, mesh, config.model.param_dtype), directory
    chosen, params = policy(config, run, step, model, mesh)
    return chosen, params, run / FOLDER / str(chosen)


def exported_step(config: Config) -> int | None:
    """The step of the policy that the run exported; None without one."""
    try:
        made_from = json.loads((run_folder.export(config) / atomic.MADE_FROM).read_text("utf-8"))
        return int(made_from["step"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def restore(config: Config, run: Path, step: str, item: str, target: Any) -> tuple[int, Any]:
    """The step that `step` names (a number, last, latest or best), and its item with the shardings of the target.

    Raises ConfigError or CheckpointError when no such checkpoint exists.
    """
    with Store(run, config.checkpoint.keep, config.checkpoint.best_metric, create=False) as store:
        names = dict.fromkeys(LATEST, store.latest) | {"best": store.best}
        chosen = names.get(step, lambda: number(step))()
        if chosen not in store.steps():
            why = (
                ""
                if config.checkpoint.best_metric or step != "best"
                else " (checkpoint.best_metric is empty)"
            )
            raise ConfigError(
                f"--step {step}: {run} has no such checkpoint{why}, only {store.steps() or 'none'}"
            )
        if item not in store.index(chosen)["items"]:
            raise ConfigError(
                f"--{item}: the run had trained none at step {chosen}: drafter_training.share auto trains one only if the rest "
                "of the run pays it back, share 1 from the first step on"
            )
        return chosen, store.restore(chosen, {item: target}).items[item]


def number(text: str) -> int:
    """The step as an integer. Raises ConfigError for other text."""
    if not text.isdecimal():
        raise ConfigError(f"--step {text!r} is neither a number, last nor best")
    return int(text)
