"""Texts that a drafter learns from, read or answered by the policy, as packed rows; knows no drafter."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import grain
import numpy as np
from jax.sharding import Mesh

from tlt_jax import atomic, run_folder
from tlt_jax.config import Config, parse
from tlt_jax.data import dataset as datasets, files, packing
from tlt_jax.data.dataset import Dataset, Encoder, Prompt
from tlt_jax.data.files import Problems
from tlt_jax.data.packing import Example
from tlt_jax.errors import DataError, Interrupted
from tlt_jax.keys import DRAFTER_STREAM
from tlt_jax.models.transformer import ModelConfig, Params
from tlt_jax.rollout.engine import Engine
from tlt_jax.spec_decode.decoding_params import Sampling

BLOCK = 4096  # examples that are packed together

log = logging.getLogger(__name__)


def answer(
    config: Config,
    model: ModelConfig,
    mesh: Mesh,
    params: Params,
    dataset: Dataset,
    tokenizer: Any,
    interrupted: Callable[[], bool],
) -> list[Path]:
    """Files with the policy's own answers, as `read` takes them: one file for each rollout.

    There are drafter_training.rollouts of them, each to rollout.prompts prompts. Those that an
    earlier attempt has written are not answered again. Raises Interrupted on demand.
    """
    folder, steps = Path(config.run) / run_folder.ANSWERS, config.drafter_training.rollouts
    paths = [folder / f"{step:06d}.jsonl" for step in range(steps)]
    folder.mkdir(parents=True, exist_ok=True)
    missing = [step for step, path in enumerate(paths) if not path.exists()]
    if not missing:
        return paths
    plain = replace(config, speculation=replace(config.speculation, drafter="none"))
    engine = Engine(plain, model, mesh, datasets.stop_rules(config, tokenizer))
    weights, settings = engine.publish(params), config.rollout
    sampling = Sampling.of(settings)
    for step in missing:
        if interrupted():
            raise Interrupted("the drafter's texts were interrupted")
        prompts = dataset.prompts(step)
        tokens, limit = [prompt.tokens for prompt in prompts], settings.max_new_tokens
        request = engine.request(
            tokens, settings.samples, sampling, limit, stream=DRAFTER_STREAM, step=step
        )
        rollout, _ = engine.run(request, weights, interrupted=interrupted)
        write(paths[step], prompts, rollout.completions)
        speed = rollout.stats["tokens_per_second"]
        log.info(
            "texts %d/%d: %d answers, %.0f tokens/s",
            step + 1,
            len(paths),
            len(rollout.completions),
            speed,
        )
    return paths


def write(path: Path, prompts: Sequence[Prompt], completions: Sequence[Any]) -> None:
    """Writes prompts and responses as token ids, whole or not at all."""
    rows = (
        {"prompt": prompts[one.prompt].tokens.tolist(), "response": one.tokens.tolist()}
        for one in completions
    )
    atomic.write_text(path, "".join(json.dumps(row) + "\n" for row in rows))


def read(source: str, encoder: Encoder, vocab_size: int) -> list[Example]:
    """Prompts with responses, text or token ids; text is tokenized as for RL, and EOS ends a response.

    Raises DataError with all that is wrong, text without a tokenizer too.
    """
    problems, rows, knob = Problems(), [], "drafter_training.texts"
    has_tokenizer = encoder.tokenizer is not None
    fix = (
        "text, or token ids of the policy" if has_tokenizer else "token ids, or set model.tokenizer"
    )
    for path in files.locate(parse.expand(source, knob), knob, problems):
        for line, row in files.read(path, problems):
            for column in ("prompt", "response"):
                if what := wrong(row.get(column), vocab_size, has_tokenizer):
                    problems.add(str(path), line, f"column {column!r} {what}", f"use {fix}")
            rows.append(row | {"id": f"{path.name}:{line}"})
    problems.stop_if_any()
    prompts, responses = ([row[column] for row in rows] for column in ("prompt", "response"))
    texts = [row for row in rows if isinstance(row["prompt"], str)]
    tokens = iter(encoder.prompts(texts))
    prompts = [
        next(tokens).tokens if isinstance(one, str) else np.asarray(one, np.int32)
        for one in prompts
    ]
    tokens = iter(
        encoder.solutions([{"solution": one} for one in responses if isinstance(one, str)])
    )
    responses = [
        next(tokens) if isinstance(one, str) else np.asarray(one, np.int32) for one in responses
    ]
    return [Example(uid, *pair) for uid, pair in enumerate(zip(prompts, responses, strict=True))]


def wrong(value: Any, vocab_size: int, has_tokenizer: bool) -> str:
    """What is wrong with a text or a list of token ids; empty when nothing is."""
    if value is None:
        return "is missing"
    if isinstance(value, str | list) and not len(value):
        return "is empty"
    if isinstance(value, str):
        return "" if has_tokenizer else "is text, and the policy has no tokenizer"
    if not isinstance(value, list) or not all(isinstance(one, int) for one in value):
        return f"holds a {type(value).__name__} that is no list of token ids"
    highest = max(value) if min(value) >= 0 else min(value)
    return "" if 0 <= highest < vocab_size else f"has token {highest}, the policy has {vocab_size}"


def fit(examples: Sequence[Example], row_tokens: int) -> list[Example]:
    """Examples cut to a row's length; those that leave nothing to predict are dropped and counted."""
    kept = [
        example._replace(answer=example.answer[: row_tokens - len(example.prompt)])
        for example in examples
        if len(example.prompt) and len(example.answer) and len(example.prompt) < row_tokens
    ]
    if not kept:
        raise DataError(
            f"none of the {len(examples)} texts fits rows of {row_tokens} tokens: raise train.row_tokens"
        )
    cut = sum(example.length > row_tokens for example in examples)
    if cut:
        log.info(
            "texts: %d of %d are longer than a row of %d tokens and were cut",
            cut,
            len(examples),
            row_tokens,
        )
    return kept


class PackedCorpus:
    """Packed rows of all examples [n, T], dealt in an order that is shuffled anew in every pass."""

    def __init__(self, examples: Sequence[Example], config: Config):
        length, seed = packing.row_tokens(config), config.train.seed
        mixed = np.random.default_rng(seed).permutation(len(examples))
        blocks = [
            [examples[i] for i in mixed[start : start + BLOCK]]
            for start in range(0, len(mixed), BLOCK)
        ]
        packed = [packing.pack(block, length, 1) for block in blocks]
        self.arrays = {
            name: np.concatenate([getattr(one, name)[:, 0] for one in packed])
            for name in ("tokens", "positions", "segments")
        }
        masks = [one.spread(np.ones(len(one.spans)))[:, 0] > 0 for one in packed]
        self.arrays["loss_mask"] = np.concatenate(masks)
        self.order = (
            grain.MapDataset.range(len(self.arrays["tokens"])).seed(seed % 2**32).shuffle().repeat()
        )
        self.size = packing.rows(config)

    def batch(self, step: int) -> dict[str, np.ndarray]:
        """The rows [R, T] of one optimizer step."""
        chosen = [
            int(self.order[place]) for place in range(step * self.size, (step + 1) * self.size)
        ]
        return {name: array[chosen] for name, array in self.arrays.items()}
