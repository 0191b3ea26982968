"""Supervised warm start on worked solutions, cached by all of its inputs; also `python -m tlt_jax.train.sft`."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from tlt_jax import cli, run_folder
from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import NONE, Algorithm, Lora
from tlt_jax.data import dataset as datasets, packing, prompt_format
from tlt_jax.data.dataset import Dataset
from tlt_jax.errors import Diverged, Interrupted
from tlt_jax.metrics import Writer, check_trackers
from tlt_jax.models import from_config, hf, shelf
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.optimizer import MAX_NONFINITE, WEIGHT_DECAY, Adam
from tlt_jax.train import batch as batches, memory, policy_update, setup as setups
from tlt_jax.train.policy_update import PolicyState, Recipe
from tlt_jax.train.setup import Setup

FORMAT = 2  # version of the cache
LOG_EVERY = 25  # steps between metrics that are written
LOG_EVERY_S = 10.0  # seconds after which a step is logged though its metrics are not written

# Fixed, since as the main module __name__ is "__main__".
log = logging.getLogger("tlt_jax.train.sft")


def warm_start(setup: Setup, writer: Writer, interrupted: Callable[[], bool]) -> Params:
    """The policy that RL starts from: the loaded or new one, after sft.steps on worked solutions.

    A warm start that was made before from the same settings and solutions is read from the cache, which all processes see.
    Raises Interrupted on demand, and Diverged before anything is cached, each in all of them.
    """
    config, model, mesh = setup.config, setup.model, setup.mesh
    if not config.sft.steps:
        return from_config.load_policy(config, model, mesh)
    cache = cache_folder(config, model, setup.dataset)
    if cache and setup.job.decided((cache / "config.json").is_file()):
        log.info("warm start: read from %s", cache)
        return hf.load(cache, model, mesh, config.model.param_dtype)
    recipe = supervised(Recipe.of(config, model, mesh, config.sft.steps), config)
    recipe = memory.fitted(config, recipe, None, setup.job)
    state = policy_update.create(from_config.load_policy(config, model, mesh), recipe)
    correct = partial(memory.corrected, config, None, setup.job)
    programs = policy_update.corrected_programs(config, recipe, correct)
    steps, tokens, began, logged = config.sft.steps, 0, time.perf_counter(), -math.inf
    for step in range(1, steps + 1):
        if not setup.job.meeting().goes_on(interrupted):
            raise Interrupted("the warm start was interrupted")
        solutions = setup.dataset.solutions(step - 1, config.sft.batch)
        batch = batches.solutions(config, recipe, solutions)
        state, metrics = policy_update.update(programs, state, batch, step - 1)
        tokens += sum(len(solution) for _, solution in solutions)
        is_written, now = step % LOG_EVERY == 0 or step == steps, time.perf_counter()
        if not is_written and now - logged <= LOG_EVERY_S:
            continue  # a step that is not reported waits for no device
        shown = {name: float(metrics[name]) for name in ("loss", "grad_norm", "lr")}
        shown["tokens_per_second"] = tokens / (time.perf_counter() - began)
        logged = now
        if is_written:
            writer.scalars(step, {f"sft/{name}": value for name, value in shown.items()})
        log.info(
            "warm start %d/%d  loss %.3f  %.0f tokens/s", step, steps, shown["loss"], shown["tokens_per_second"]
        )  # fmt: skip
        if is_written:
            check(config, state, step)
    if cache:
        hf.save_whole(state.params, model, cache, mesh, dtype=config.model.param_dtype)
    return state.params


def check(config: Config, state: PolicyState, step: int) -> None:
    """Raises Diverged when the last updates before `step`, or the weights after the last step, are not finite.

    Updates that are not finite are skipped: single ones before the last are no reason to stop.
    """
    steps, skips = config.sft.steps, int(state.skips)
    if skips >= MAX_NONFINITE or skips and step == steps:
        what = f"its loss is not finite since step {step - skips + 1}"
    elif step == steps and not is_finite(state.params):
        what = f"its weights are not finite after step {step}"
    else:
        return
    raise Diverged(
        f"the warm start diverged, and nothing of it is kept: {what} of {steps}: lower sft.learning_rate "
        f"{config.sft.learning_rate:g}, or check the weights of the model that it starts from"
    )


@jax.jit
def is_finite(params: Params) -> Bool[Array, ""]:
    """Whether all weights are finite."""
    return jnp.stack([jnp.isfinite(leaf).all() for leaf in jax.tree.leaves(params)]).all()


def supervised(recipe: Recipe, config: Config) -> Recipe:
    """The recipe of the warm start: negative log-likelihood, with the learning rate and weight decay of sft.

    It trains all weights. Worked solutions may be longer than answers, up to the row length.
    """
    algorithm = Algorithm(importance=NONE, router_balance=config.algorithm.router_balance)
    adam = Adam.short(config, config.sft.learning_rate, config.sft.steps)
    return replace(
        recipe, adam=adam, algorithm=algorithm, temperature=1.0, is_supervised=True,
        longest=None, lora=None,
    )  # fmt: skip


def cache_folder(config: Config, model: ModelConfig, dataset: Dataset) -> Path | None:
    """The cache folder of a warm start with these settings; None when sft.cache is off."""
    if config.sft.cache == "off":
        return None
    root = (
        Path(config.sft.cache).expanduser()
        if config.sft.cache
        else Path.home() / ".cache" / "tlt_jax" / "sft"
    )
    settings = {
        "format": FORMAT,
        "jax": jax.__version__,
        "model": asdict(replace(config.model, lora=Lora())),
        "sizes": asdict(model),
        "source": from_config.fingerprint(config),
        "data": asdict(config.data),
        "rows": dataset.digest_of_solutions(config.sft.steps, config.sft.batch),
        "sft": asdict(replace(config.sft, cache="")) | {"weight_decay": WEIGHT_DECAY},
        "mesh": (config.mesh.data, config.mesh.model),
        "packing": (
            packing.row_tokens(config),
            packing.rows(config),
            config.rollout.max_new_tokens,
        ),
        "optimizer": asdict(config.optim),
        "seed": config.train.seed,
    }
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()
    return root / digest[:16]


def main() -> int:
    """Runs the warm start of a configuration; writes the model and tokenizer to --out, the metrics to <run>/sft."""
    arguments = sys.argv[1:]
    out = "" if "--help" in arguments else cli.take(arguments, "--out")
    config = configuration.load(
        arguments,
        command="python -m tlt_jax.train.sft",
        about=cli.COMMANDS["sft"].about,
        own=configuration.CONFIG | {"--out DIR": "the folder to write"},
    )
    config = replace(config, run=str(Path(config.run) / "sft"))
    with cli.prepared(config):
        check_trackers(config)
        tokenizer = prompt_format.tokenizer_of(config)
        dataset = datasets.load(config, tokenizer)
        print(dataset.describe(), flush=True)
        setup = Setup.of(config, tokenizer, dataset)
        with run_folder.locked(config.run), Writer(config, config.sft.steps, None) as writer:
            params = warm_start(setup, writer, lambda: False)
        hf.save(
            params, setup.model, Path(out), setup.mesh, tokenizer, config.model.param_dtype,
            files=prompt_format.files(config) | {shelf.LINEAGE: {"bases": setups.bases_of(setup)}},
            source=from_config.source_directory(config),
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
