"""`python -m tlt_jax.train.drafter --config FILE`: trains a drafter for the policy of a configuration."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

from tlt_jax import atomic, cli, run_folder
from tlt_jax.checkpoint.store import Store
from tlt_jax.cli import DIVERGED, DONE, PREEMPTED
from tlt_jax.config import Config, load as configuration, validate
from tlt_jax.data import dataset as datasets, packing, prompt_format
from tlt_jax.data.adapter_files import has_tokenizer, tokenizer_source
from tlt_jax.data.packing import Example
from tlt_jax.data.prompt_format import Encoder
from tlt_jax.distributed.process import Preemption
from tlt_jax.drafter import (
    corpus,
    update as drafter_update,
)
from tlt_jax.drafter.recipe import DrafterRecipe, DrafterState, recipe_of
from tlt_jax.errors import Interrupted
from tlt_jax.metrics import Writer, check_trackers
from tlt_jax.models import from_config, hf_drafter
from tlt_jax.models.architecture import Params
from tlt_jax.optimizer import MAX_NONFINITE
from tlt_jax.train import adaptive, run_state, setup as setups, sft
from tlt_jax.train.run_state import RunState
from tlt_jax.train.setup import Setup

LOG_EVERY = 25  # steps between log lines, and the most steps in flight on the devices

ABOUT = f"""{cli.COMMANDS["drafter"].about}
Everything goes to the folder {run_folder.DRAFTER} of the run; the drafter itself to
{run_folder.DRAFTER}/{run_folder.EXPORT}, as SGLang and vLLM load it (an EAGLE drafter of a Qwen2 policy only SGLang)."""


def train(config: Config) -> int:
    """Trains to drafter_training.steps, from the newest checkpoint if one exists; returns the exit code."""
    config = replace(config, run=str(Path(config.run) / run_folder.DRAFTER))
    check_trackers(config)
    if not config.drafter_training.texts:
        validate.validate_one_turn(config)
    from_config.check_drafter_training(config)
    tokenizer = find_tokenizer(config)
    dataset = None
    if config.sft.steps or not config.drafter_training.texts:
        dataset = datasets.load(config, tokenizer)
    setup, steps = Setup.of(config, tokenizer, dataset), config.drafter_training.steps
    setup = setups.with_start_drafter(setup)
    if (start := from_config.start_directory(setup.config)) is not None:
        from_config.start_config(setup.config, setup.model, start)
    if dataset:
        print(dataset.describe(), flush=True)
    digest = dataset.digest() if dataset else ""
    with (
        run_folder.entered(config),
        Preemption() as preempted,
        Store(
            config.run, config.checkpoint.keep, identity=run_folder.identity(config, digest)
        ) as store,
    ):
        resumed = store.latest()
        is_trained = resumed is not None and resumed >= steps
        if is_trained and atomic.is_made_from(run_folder.export(config), of_step(resumed)):
            print(
                f"{run_folder.export(config)} is finished: it has all {resumed} steps. Another drafter needs another run."
            )
            return DONE
        with Writer(config, steps, resumed) as writer:
            try:
                params = sft.warm_start(setup, writer, preempted)
                examples = gather(setup, params, preempted)
            except Interrupted:
                return PREEMPTED
            recipe, state = begin(setup, examples, store, resumed)
            rows = corpus.PackedCorpus(examples, config)
            state, acceptance, code = train_drafter(
                config, recipe, state, params, rows, store, writer, preempted
            )
        if code == DONE:
            directory, dtype, step = (
                run_folder.export(config),
                config.model.param_dtype,
                int(state.step),
            )
            made_from = of_step(step)
            if caveat := adaptive.export(directory, dtype, recipe, state, acceptance, made_from):
                print(f"{directory}: {caveat}")
            learned = sum(int(one.answer.size) for one in examples)
            setups.leave(setup, directory, recipe.drafter, step, learned)
            print(f"{directory}: the drafter after {step} steps")
    return code


def of_step(step: int) -> dict[str, Any]:
    """Provenance of an exported drafter; differs from that of a drafter trained during RL."""
    return run_folder.of_step(step, "tlt_jax.train.drafter")


def find_tokenizer(config: Config) -> Any:
    """The tokenizer; None when the policy has none and the drafter learns from given texts, which must be token ids."""
    is_reading = config.drafter_training.texts and not config.sft.steps
    if is_reading and config.model.path and not config.model.tokenizer:
        directory = tokenizer_source(str(from_config.model_directory(config)))
        if Path(directory).is_dir() and not has_tokenizer(Path(directory)):
            return None
    return prompt_format.tokenizer_of(config)


def gather(setup: Setup, params: Params, interrupted: Callable[[], bool]) -> list[Example]:
    """The training texts, cut to the row length and the policy's positions."""
    config, model = setup.config, setup.model
    sources = [config.drafter_training.texts]
    if not config.drafter_training.texts:
        sources = corpus.answer(
            config, model, setup.mesh, params, setup.dataset, setup.tokenizer, interrupted
        )
    encoder = Encoder(config, setup.tokenizer)
    examples = [
        example
        for source in sources
        for example in corpus.read(str(source), encoder, model.vocab_size)
    ]
    examples = [example._replace(uid=uid) for uid, example in enumerate(examples)]
    return corpus.fit(examples, min(packing.row_tokens(config), model.max_positions))


def begin(
    setup: Setup, examples: list[Example], store: Store, resumed: int | None
) -> tuple[DrafterRecipe, DrafterState]:
    """The recipe, and the initial state: from the checkpoint, from drafter_training.start, or new.

    The draft vocabulary of a new one has the most frequent tokens of the texts.
    """
    config, model, mesh, start = setup.config, setup.model, setup.mesh, None
    if (directory := from_config.start_directory(config)) is not None:
        longest = config.data.max_prompt_tokens + config.rollout.max_new_tokens
        drafter, start = hf_drafter.load(directory, model, mesh, config.model.param_dtype, longest)
    else:
        drafter = from_config.new_drafter_config(config, model)
    recipe = recipe_of(config, model, drafter, mesh)
    if resumed is None:
        setups.keep_start(setup, drafter, start)
    else:
        return recipe, run_state.restore(store, run_state.abstract(resumed, drafter=recipe)).drafter
    return recipe, adaptive.create(config, recipe, start, (one.answer for one in examples))


def train_drafter(
    config: Config,
    recipe: DrafterRecipe,
    state: DrafterState,
    params: Params,
    rows: corpus.PackedCorpus,
    store: Store,
    writer: Writer,
    interrupted: Callable[[], bool],
) -> tuple[DrafterState, list[float], int]:
    """The state after the last step run, the acceptance by depth (empty if nothing was measured), and the exit code."""
    acceptance: list[float] = []
    update, steps = drafter_update.program(recipe), config.drafter_training.steps
    begin, tokens, reported, step = time.perf_counter(), 0, int(state.step), int(state.step)
    while step < steps:
        if interrupted():
            run_state.save(store, RunState(step, drafter=state))
            return state, acceptance, PREEMPTED
        batch = rows.batch(step)
        tokens += int(batch.is_answer.sum())
        state, metrics = update(state, params, drafter_update.on_mesh(batch, recipe.mesh))
        step += 1
        if step % LOG_EVERY == 0 or step == steps:
            metrics = jax.device_get(metrics)
            acceptance, seconds = drafter_update.depths(metrics), time.perf_counter() - begin
            found = {name: float(value) for name, value in metrics.items() if name != "tokens"}
            values = {f"drafter/{name}": value for name, value in found.items()}
            speed = tokens / seconds
            writer.scalars(step, values | {"drafter/tokens_per_second": speed})
            pace = {"perf/tokens_per_second": speed, "timing_s/step": seconds / (step - reported)}
            writer.progressed(step, values | pace)
            if int(state.skips) >= MAX_NONFINITE:
                print(f"error: step {step}: {int(state.skips)} updates in a row were not finite: lower "
                      "drafter_training.learning_rate", file=sys.stderr)  # fmt: skip
                return state, acceptance, DIVERGED
            begin, tokens, reported = time.perf_counter(), 0, step
        if run_state.is_due(config, step, steps):
            run_state.save(store, RunState(step, drafter=state))
    return state, acceptance, DONE


def main() -> int:
    """Exit code: 0 done, 1 diverged, 2 a mistake in the configuration or its files, 75 preempted (run it again)."""
    config = configuration.load(command="python -m tlt_jax.train.drafter", about=ABOUT)
    with cli.prepared(config):
        return train(config)


if __name__ == "__main__":
    sys.exit(main())
