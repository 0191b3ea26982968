"""What a training command starts from: its inputs, loaded once, and the frozen start policy, saved once in the run's folder.

The start policy is the base of adapters, and the reference of the KL term.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tlt_jax import atomic, run_folder
from tlt_jax.checkpoint.index import leaf_index
from tlt_jax.config import Config, parse, validate
from tlt_jax.config.schema import AUTO, NONE
from tlt_jax.data import adapter_files
from tlt_jax.data.dataset import Dataset
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.job import Job
from tlt_jax.errors import CheckpointError, ConfigError, ModelError
from tlt_jax.models import from_config, hf, hf_drafter, shelf
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.models.drafter import DrafterConfig, DrafterParams
from tlt_jax.models.shelf import Shelved

log = logging.getLogger(__name__)


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


def with_start_drafter(setup: Setup) -> Setup:
    """The setup with what drafter_training.start auto stands for: a directory of the shelf, or none; others as they are.

    Process 0 chooses, and says what. A run that has begun takes its own copy, and looks at no shelf. All processes call it.
    """
    config, job, chosen = setup.config, setup.job, NONE
    if job.decided(run_folder.has_begun(config)):
        return setup
    if config.drafter_training.start != AUTO:
        if job.is_first:
            from_config.say_start(config)
        return setup
    if job.is_first:
        found, said = best_on_shelf(setup)
        print(said, flush=True)
        chosen = str(found.directory) if found else NONE
    chosen = job.meeting().heard(chosen if job.is_first else "")[0]
    missing = chosen != NONE and not (Path(chosen) / shelf.FACTS).is_file()
    if unseen := job.meeting().heard("missing" if missing else ""):
        if job.is_first:
            log.warning(
                "%s cannot be read by process %d: the drafter is new: set drafter_training.shelf to a folder that all "
                "processes see", chosen, min(unseen),
            )  # fmt: skip
        chosen = NONE
    training = replace(config.drafter_training, start=chosen)
    return replace(setup, config=replace(config, drafter_training=training))


def best_on_shelf(setup: Setup) -> tuple[Shelved | None, str]:
    """The entry of the shelf that this run starts from, and a line that says it, or why there is none.

    Of the drafters of the wanted kind for this policy, for one that was trained from it, or for one that it was trained from:
    the one with the most expected tokens a round. One that does not fit, or is damaged, is left with a line of the log.
    """
    config, knobs = setup.config, setup.config.drafter_training
    folder = shelf.folder_of(knobs.shelf)
    if folder is None or config.rollout.deterministic:
        why = (
            "drafter_training.shelf is off"
            if folder is None
            else "rollout.deterministic repeats a run anywhere"
        )
        return None, f"the drafter is new: {why}"
    known = list(shelf.entries(folder))
    try:
        bases = bases_of(setup)
    except ModelError:  # loading the policy will say it
        return None, "the drafter is new: the policy's weights cannot be read"
    related = [one for one in known if one.is_related(bases) and is_wanted(config, one)]
    for one in sorted(related, key=lambda one: one.per_round, reverse=True):
        if reason := misfit(setup, one):
            log.warning("%s is not taken: %s", one.directory, reason)
            continue
        shelf.touch(one)
        return one, f"the drafter starts from {one.directory} ({one.describe()})"
    count = len(known) - len(related)
    others = f" ({count} for other policies or of other kinds)" if count else ""
    return None, f"the drafter is new: {folder} has none for this policy{others}"


def is_wanted(config: Config, one: Shelved) -> bool:
    """Whether an entry of the shelf is of the kind, and has the draft vocabulary, that the configuration asks for."""
    knobs = config.drafter_training
    return one.kind == knobs.kind and knobs.vocab in (0, one.draft_vocab)


def misfit(setup: Setup, one: Shelved) -> str:
    """Why the run cannot start from an entry of the shelf; "" when it can."""
    if one.tokenizer != shelf.vocabulary_digest(setup.tokenizer):
        return "it was trained with another tokenizer"
    try:
        if shelf.checksum(one.directory / hf_drafter.WEIGHTS) != one.weights:
            return "its weights changed on disk"
        from_config.start_config(setup.config, setup.model, one.directory)
    except (OSError, ConfigError, ModelError) as error:
        return str(error)
    return ""


def bases_of(setup: Setup) -> tuple[str, ...]:
    """Digests of the start policy, and of those that it was trained from, as far as is known. Raises ModelError.

    A policy that the run makes itself, new or by a warm start, is known by what determines it.
    """
    config, found = setup.config, []
    if config.model.path:
        directory = from_config.model_directory(config)
        found = [shelf.weights_digest(directory), *shelf.lineage(directory)]
    if config.sft.steps or not config.model.path:
        data = setup.dataset.digest() if config.sft.steps else ""
        made_of = run_folder.start_of(run_folder.identity(config, data))
        if not config.sft.steps:  # new weights depend on no data
            made_of = {
                name: made_of[name] for name in made_of if name.startswith(("model.", "train."))
            }
        made_of["vocabulary"] = shelf.vocabulary_digest(setup.tokenizer)
        found = [hashlib.sha256(json.dumps(made_of, sort_keys=True).encode()).hexdigest(), *found]
    return tuple(dict.fromkeys(found))


def keep_start(setup: Setup, drafter: DrafterConfig | None, start: DrafterParams | None) -> None:
    """Writes what a new run starts from into its folder, for a resumed one and for those who start from its policy.

    The lineage, and the drafter that it starts from (None: a new one), which may be gone later. All processes call it.
    """
    config, kept = setup.config, run_folder.start_drafter(setup.config)
    if setup.job.is_first:
        bases = bases_of(setup)
        atomic.write_text(
            Path(config.run) / shelf.LINEAGE, json.dumps({"bases": bases}, indent=1) + "\n"
        )
    if start is None:
        if setup.job.is_first:
            shutil.rmtree(kept, ignore_errors=True)
    elif from_config.start_directory(config) != kept:
        acceptance, dtype = from_config.drafter_acceptance(config), config.model.param_dtype
        atomic.write_directory(
            kept,
            lambda at: hf_drafter.save(start, drafter, at, dtype, acceptance),
            setup.job.is_first,
        )


def leave(setup: Setup, directory: Path, drafter: DrafterConfig, steps: int, tokens: int) -> None:
    """Puts the drafter that a run has written on the shelf, unless it has learned nothing. Process 0 calls it.

    It learned from this many answer tokens, in this many optimizer steps.
    """
    config, knobs = setup.config, setup.config.drafter_training
    folder, bases = shelf.folder_of(knobs.shelf), shelf.lineage(Path(config.run))
    if folder is None or not bases or not steps:
        return
    start = from_config.start_directory(config)
    facts = {
        "bases": bases,
        "tokenizer": shelf.vocabulary_digest(setup.tokenizer),
        "kind": drafter.kind,
        "draft_vocab": drafter.draft_vocab_size,
        "captures": drafter.captures,
        "tokens": tokens,
        "steps": steps,
        "data": knobs.texts or config.data.train or config.data.task,
        "started_from": "" if start is None else knobs.start,
        "run": config.run,
        "policy": config.model.path or "a new policy",
    }
    shelf.put(folder, shelf.name_of(directory.parents[1]), directory, facts)


def lineage_file(run: Path) -> dict[str, dict[str, list[str]]]:
    """The file with the lineage of a run's policy, content by name; empty for a run of a version without one."""
    bases = shelf.lineage(run)
    return {shelf.LINEAGE: {"bases": list(bases)}} if bases else {}


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
