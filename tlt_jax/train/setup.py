"""What a training command starts from: its inputs, loaded once, and the frozen start policy, saved once in the run's folder.

The start policy is the base of adapters, and the reference of the KL term.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tlt_jax import atomic, run_folder
from tlt_jax.checkpoint.index import leaf_index
from tlt_jax.config import Config, parse, validate
from tlt_jax.data import adapter_files
from tlt_jax.data.dataset import Dataset
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.job import Job
from tlt_jax.errors import CheckpointError
from tlt_jax.models import from_config, hf
from tlt_jax.models.architecture import ModelConfig, Params


@dataclass(frozen=True)
class Setup:
    """The inputs of a training command. `job`: the processes that run it together."""

    config: Config
    tokenizer: Any
    dataset: Dataset | None
    model: ModelConfig
    mesh: Mesh
    job: Job = field(default_factory=Job)

    @classmethod
    def of(
        cls, config: Config, tokenizer: Any, dataset: Dataset | None, job: Job | None = None
    ) -> Setup:
        """With the policy's sizes, and a mesh of the devices that exist.

        Raises ConfigError for a model or a mesh that does not fit them.
        """
        model = from_config.model_config(config, tokenizer)
        validate.validate_model(config, model, jax.device_count())
        mesh, job = meshes.make_mesh(config.mesh.data, config.mesh.model), job or Job()
        if job.is_first:
            from_config.warn_of_tokenizer(config, tokenizer)
        return cls(config, tokenizer, dataset, model, mesh, job)


def dtype_of(config: Config) -> str:
    """The dtype of the frozen start policy: of a base of adapters that of the products."""
    return config.model.compute_dtype if config.model.lora.rank else config.model.param_dtype


def frozen(setup: Setup, start: Params | None, source: Mapping[str, str]) -> Params | None:
    """The frozen start policy; None for a run that needs none. All processes call it.

    A new run gives its `start` policy, which is saved in the run folder; a resumed one (None) reads it from there. What a
    run trains is donated by every update, so a reference is read in a new run too: it shares no buffers with it. `source`:
    what it was made from, by name; it is stored with checksums of the weights. Raises CheckpointError when a resumed run
    finds no start policy, or another one.
    """
    config, job = setup.config, setup.job
    if not (config.algorithm.kl_coef or config.model.lora.rank):
        return None
    directory, dtype, is_new = run_folder.reference(config), dtype_of(config), start is not None
    if is_new:
        hf.save_whole(start, setup.model, directory, setup.mesh, dtype=dtype)
        job.decided(True)  # before it is renamed the others would read an earlier one, or none
    elif not directory.is_dir():
        why = "the adapters change" if config.model.lora.rank else "the KL term needs"
        raise CheckpointError(
            f"{directory} is missing: {why} the start policy, and only a new run has it: use another run folder"
        )
    is_trained = is_new and not config.model.lora.rank  # what `start` holds
    is_read = is_trained or not is_new
    params = hf.load(directory, setup.model, setup.mesh, dtype) if is_read else start
    record = {"source": dict(source), "leaves": leaf_index(params)}
    path = directory / atomic.MADE_FROM
    if is_new and job.is_first:
        atomic.write_text(path, json.dumps(record, indent=1))
    elif not is_new and path.exists():  # older versions wrote no such file
        check(path, record)
    return params


def check(path: Path, ours: Mapping[str, Any]) -> None:
    """Raises CheckpointError when the record at `path` names other settings, or the weights have changed since."""
    try:
        theirs = json.loads(path.read_text())
        source, leaves = theirs["source"], theirs["leaves"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}): use another run folder") from error
    for name, value in ours["source"].items():
        if source.get(name, value) != value:
            raise CheckpointError(
                f"{path.parent} was made with {name} {source[name]}, this run has {value}: use another run folder"
            )
    if other := [name for name, leaf in ours["leaves"].items() if leaves.get(name) != leaf]:
        raise CheckpointError(
            f"{path.parent} is corrupt ({other[0]} changed on disk): the run cannot continue without its start policy"
        )


def name_of_base(config: Config, run: Path) -> str:
    """The base of a run's adapters, for others: the model that model.path names, or what the run saved of a new one."""
    if config.sft.steps or not config.model.path:
        return str((run / run_folder.REFERENCE).absolute())
    source = parse.expand(config.model.path, "model.path")
    if (directory := from_config.adapter_directory(config)) is not None:
        source = adapter_files.base_of(directory)
    return str(Path(source).absolute()) if Path(source).is_dir() else source


def base_of(config: Config, run: Path, model: ModelConfig, mesh: Mesh) -> Params | None:
    """The base of the adapters that a run has saved, for commands that do not train; None without model.lora.

    Raises CheckpointError when it is missing or has changed.
    """
    if not config.model.lora.rank:
        return None
    directory = run / run_folder.REFERENCE
    if not directory.is_dir():
        raise CheckpointError(
            f"{directory} is missing: the checkpoints hold adapters alone, and their base was there: restore it"
        )
    params = hf.load(directory, model, mesh, dtype_of(config))
    check(directory / atomic.MADE_FROM, {"source": {}, "leaves": leaf_index(params)})
    return params
