"""The policy and the drafter of a configuration: their sizes and weights, new, loaded or given."""

from __future__ import annotations

import sys
from difflib import get_close_matches
from functools import partial
from pathlib import Path
from typing import Any

import jax
from jax.sharding import Mesh

from tlt_jax import keys, run_folder
from tlt_jax.config import Config, parse, validate
from tlt_jax.config.schema import ADAPTIVE, AUTO, HUB, NGRAM, NONE
from tlt_jax.data import adapter_files
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import ConfigError, ModelError
from tlt_jax.kernels.numerics import widen
from tlt_jax.models import (
    architecture,
    drafter as drafters,
    hf,
    hf_adapter,
    hf_config,
    hf_drafter,
    lora,
    published,
)
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.models.drafter import DrafterConfig, DrafterParams
from tlt_jax.models.lora import Adapters
from tlt_jax.models.low_rank import Lora
from tlt_jax.models.published import Published

# The largest multiple to which vocabularies of published models are padded: Qwen2.5 has up to 399 tokens without a text.
PADDING = 512
NEW = ("", NONE, AUTO)  # drafter_training.start that names no drafter
DRAFT_VOCAB = 32_000  # default draft vocabulary of a new drafter, as that of published ones


def model_config(config: Config, tokenizer: Any) -> ModelConfig:
    """Sizes and features: of the model directory, or of model.init with the tokenizer's vocabulary and EOS.

    A model directory needs no tokenizer (None).
    """
    eos_ids = () if tokenizer is None else (tokenizer.eos_token_id,)
    if config.model.path:
        found = hf_config.read_config(policy_directory(config), eos_ids, config.model.init)
    else:
        found = hf_config.new_config(config.model.init, len(tokenizer), eos_ids)
    return found.for_sequences(config.data.max_prompt_tokens + validate.answer_limit(config))


def warn_of_tokenizer(config: Config, tokenizer: Any) -> None:
    """Prints a line when the tokenizer seems to belong to another model: by the number of its tokens, or by its EOS.

    A new model, and a model without a tokenizer (None), fit any.
    """
    if not config.model.path or tokenizer is None:
        return
    model, size = hf_config.read_config(policy_directory(config)), len(tokenizer)
    if not model.vocab_size - PADDING < size <= model.vocab_size:
        what = f"{size:,} tokens, and the model has {model.vocab_size:,}"
    elif model.eos_ids and tokenizer.eos_token_id not in model.eos_ids:
        ids = ", ".join(map(str, model.eos_ids))
        what = f"EOS {tokenizer.eos_token!r} (id {tokenizer.eos_token_id}), and the model has EOS {ids}"
    else:
        return
    source = config.model.tokenizer or config.model.path
    print(
        f"warning: the tokenizer {source} has {what} ({config.model.path}): it seems to belong to another model: leave "
        "model.tokenizer empty, or set it to the tokenizer of this model",
        file=sys.stderr,
    )


def load_policy(config: Config, model: ModelConfig, mesh: Mesh) -> Params:
    """The weights of the model directory, or new ones drawn from train.seed; "train" layout.

    Where model.path is a directory of adapters, they are merged into their base.
    """
    dtype = config.model.param_dtype
    base = load_base(config, model, mesh, dtype)
    directory = adapter_directory(config)
    if directory is None:
        return base
    found = hf_adapter.read_lora(directory)
    adapters = hf_adapter.load(directory, found, model, mesh, widen(dtype))
    placed = architecture.shardings(model, mesh, "train")
    merge = partial(lora.merge, dtype=dtype)
    program = jax.jit(merge, donate_argnames="base", out_shardings=placed)
    return program(base, adapters)


def load_base(config: Config, model: ModelConfig, mesh: Mesh, dtype: str) -> Params:
    """As `load_policy`, but of adapters only their base, in this dtype."""
    if config.model.path:
        return hf.load(policy_directory(config), model, mesh, dtype)
    init_key = keys.stream_key(config.train.seed, keys.POLICY_WEIGHTS)
    params = architecture.init(model, mesh, init_key, config.model.param_dtype)
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


def source_directory(config: Config) -> Path | None:
    """Where the policy's weights were read; None for a new model."""
    return policy_directory(config) if config.model.path else None


def start_adapters(config: Config, found: Lora, model: ModelConfig, mesh: Mesh) -> Adapters:
    """The adapters that a run with model.lora starts from: those of model.path, or new ones drawn from train.seed.

    Raises ModelError when those of model.path do not fit the section model.lora.
    """
    dtype = config.model.param_dtype
    if (directory := adapter_directory(config)) is not None:
        hf_adapter.check(found, directory)
        return hf_adapter.load(directory, found, model, mesh, dtype)
    init_key = keys.stream_key(config.train.seed, keys.ADAPTER_WEIGHTS)
    return lora.init(found, model, mesh, init_key, dtype)


def model_directory(config: Config) -> Path:
    """The local directory of model.path; a hub id is downloaded once."""
    return hf.resolve(parse.expand(config.model.path, "model.path"))


def adapter_directory(config: Config) -> Path | None:
    """The directory of model.path when it holds adapters."""
    if not config.model.path:
        return None
    directory = model_directory(config)
    return directory if adapter_files.is_adapter(directory) else None


def policy_directory(config: Config) -> Path:
    """The directory of the model of model.path: of adapters, that of their base."""
    directory = model_directory(config)
    if not adapter_files.is_adapter(directory):
        return directory
    try:
        return hf.resolve(adapter_files.base_of(directory))
    except ModelError as error:
        raise ModelError(
            f"{error}: it is the base_model_name_or_path of {directory / adapter_files.CONFIG}: correct it there"
        ) from error


def fingerprint(config: Config) -> list[tuple[str, int, int]]:
    """Name, size and modification time of each file of the model directory, and of its adapters."""
    if not config.model.path:
        return []
    directories = {model_directory(config), policy_directory(config)}
    return [
        (path.name, path.stat().st_size, path.stat().st_mtime_ns)
        for directory in sorted(directories)
        for path in sorted(directory.iterdir())
    ]


def load_drafter(
    config: Config, model: ModelConfig, mesh: Mesh
) -> tuple[DrafterConfig | None, DrafterParams | None]:
    """The learned drafter of speculation.drafter in the "train" layout; None when it names no directory.

    For an adaptive one: the drafter of drafter_training.start, or only the configuration of a new one. Raises ModelError,
    naming what does not fit, when the drafter was made for another policy.
    """
    drafter, path = drafter_config(config, model), drafter_source(config)
    if path is None:
        return drafter, None
    return hf_drafter.load(
        path, model, mesh, config.model.param_dtype, longest_sequence(config, model)
    )


def drafter_config(config: Config, model: ModelConfig) -> DrafterConfig | None:
    """The config of the learned drafter of speculation.drafter; None when it names no directory.

    Reads config.json only. If the directory does not exist yet, it is the drafter that train.drafter would write; with
    speculation.drafter adaptive, it is the one that training starts from. Raises ModelError as `load_drafter` does.
    """
    path = drafter_directory(config)
    if path is not None and path.exists():
        return hf_drafter.read_config(path, model, longest_sequence(config, model))
    if path is None and config.speculation.drafter != ADAPTIVE:
        return None
    start = start_directory(config)
    return (
        new_drafter_config(config, model) if start is None else start_config(config, model, start)
    )


def new_drafter_config(config: Config, model: ModelConfig) -> DrafterConfig:
    """The config of a new drafter of `drafter_training`. Raises ConfigError when its knobs conflict."""
    check_drafter_training(config)
    kind, size = config.drafter_training.kind, model.vocab_size
    if drafters.KINDS[kind].can_reduce:
        size = min(config.drafter_training.vocab or DRAFT_VOCAB, size)
    return drafters.for_policy(model, kind, draft_vocab_size=size)


def check_drafter_training(config: Config) -> None:
    """Raises ConfigError when the knobs of `drafter_training` conflict."""
    knobs, is_named = config.drafter_training, config.drafter_training.start not in NEW
    if knobs.vocab and (is_named or not drafters.KINDS[knobs.kind].can_reduce):
        reason = f"an {knobs.kind} drafter proposes every token"
        if is_named:
            reason = "the drafter of drafter_training.start has its own"
        raise ConfigError(f"drafter_training.vocab {knobs.vocab}: {reason}: set it to 0")
    if not is_named:
        check_unroll(knobs.unroll, knobs.kind)


def check_unroll(unroll: int, kind: str) -> None:
    """Raises ConfigError for drafter_training.unroll with a block drafter."""
    if unroll and drafters.KINDS[kind].is_block:
        raise ConfigError(
            f"drafter_training.unroll {unroll}: a {kind} drafter drafts all positions in one step: set it to 0"
        )


def start_config(config: Config, model: ModelConfig, directory: Path) -> DrafterConfig:
    """The config of the drafter to start from. Raises ConfigError when a knob does not fit its kind."""
    drafter = hf_drafter.read_config(directory, model, longest_sequence(config, model))
    check_unroll(config.drafter_training.unroll, drafter.kind)
    return drafter


def start_directory(config: Config) -> Path | None:
    """The directory of the drafter to start from; None for a new one.

    A run that has begun keeps its own copy. Otherwise what drafter_training.start names: the drafter of a hub id, or of
    `hub`, is downloaded once; for `auto` a command that trains has put what it found in its place, and others find none.
    """
    if config.drafter_training.start in ("", NONE):
        return None
    kept = run_folder.start_drafter(config)
    if kept.is_dir() and run_folder.has_begun(config):
        return kept
    if config.drafter_training.start == AUTO:
        return None
    if hub_id := hub_start(config):
        return hf.resolve(hub_id)
    return Path(parse.expand(config.drafter_training.start, "drafter_training.start"))


def hub_start(config: Config) -> str:
    """The hub id that drafter_training.start names, or that `hub` stands for; "" where it names a directory, or nothing."""
    start = parse.expand(config.drafter_training.start, "drafter_training.start")
    if start == HUB:
        return published_start(config).drafter
    return start if not Path(start).exists() and parse.HUB_ID.fullmatch(start) else ""


def published_start(config: Config) -> Published:
    """The drafter of drafter_training.start hub: the first of model.path whose layout is read, if possible of the kind wanted.

    Raises ModelError without one.
    """
    base, kind = config.model.path, config.drafter_training.kind
    known = [one for one in published.table() if is_read(one)]
    fits = [one for one in known if one.base.lower() == base.lower()]
    if not fits:
        bases = ", ".join(dict.fromkeys(one.base for one in known))
        raise ModelError(
            f"drafter_training.start hub: no published drafter of model.path {base!r} is known: use the hub id of one of "
            f"{bases}, or give a drafter's directory or hub id"
        )
    return min(fits, key=lambda one: one.kind != kind)


def is_read(one: Published) -> bool:
    """Whether drafters of this layout can be read."""
    return one.layout in hf_drafter.FORMATS[one.kind].architectures


def say_start(config: Config) -> None:
    """Prints which published drafter training starts from, where drafter_training.start is hub."""
    if config.drafter_training.start == HUB:
        found = published_start(config)
        print(
            f"the drafter starts from {found.drafter}, published for {found.base} ({found.terms})",
            flush=True,
        )


def drafter_acceptance(config: Config) -> tuple[float, ...]:
    """Acceptance by depth that the directory of the run's drafter records; empty without a directory or a record.

    Raises ModelError for a record that cannot be read.
    """
    path = drafter_source(config)
    return () if path is None else hf_drafter.read_acceptance(path)


def drafter_source(config: Config) -> Path | None:
    """The directory of the run's drafter: that of speculation.drafter, or where the training of an adaptive one starts."""
    if config.speculation.drafter == ADAPTIVE:
        return start_directory(config)
    return drafter_directory(config)


def drafter_directory(config: Config) -> Path | None:
    """The directory that speculation.drafter names. Raises ConfigError for a misspelt word."""
    name, words = config.speculation.drafter, (NONE, NGRAM, ADAPTIVE)
    if name in words:
        return None
    if close := get_close_matches(name, words, 1):
        if not Path(name).exists():
            raise ConfigError(
                f"speculation.drafter {name!r} is not a directory: did you mean {close[0]}?"
            )
    return Path(parse.expand(name, "speculation.drafter"))


def longest_sequence(config: Config, model: ModelConfig) -> int:
    """The length of the longest sequence that a drafter may have to draft for."""
    return min(config.data.max_prompt_tokens + config.rollout.max_new_tokens, model.max_positions)


def placed(params: Params, model: ModelConfig, mesh: Mesh) -> Params:
    """The weights in the "train" layout on this mesh, without a copy where they are. Raises ConfigError.

    A leaf that is no jax.Array is an array that every process has whole.
    """
    wanted = architecture.abstract(model, mesh, "train", "float32")
    if jax.tree.structure(params) != jax.tree.structure(wanted):
        raise ConfigError(
            f"the weights are a {type(params).__name__} that does not fit the model: give Params of "
            'tlt_jax.models.architecture in the "train" layout, like `params` of open_engine'
        )
    for (path, leaf), target in zip(
        jax.tree.leaves_with_path(params), jax.tree.leaves(wanted), strict=True
    ):
        if leaf.shape != target.shape:
            raise ConfigError(
                f"weight {jax.tree_util.keystr(path)} has shape {leaf.shape}, and the model on this mesh {target.shape}"
            )
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ConfigError(
                "the weights were donated to another program: give those that it returned"
            )

    def put(leaf: Any, target: jax.ShapeDtypeStruct) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return jax.device_put(leaf, target.sharding)
        return meshes.put(leaf, target.sharding)

    return jax.tree.map(put, params, wanted)
