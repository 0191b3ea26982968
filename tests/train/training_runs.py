"""Helpers for tests of whole runs: read the files of a run, and interrupt it."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tlt_jax import cli
from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, load as configuration
from tlt_jax.data import prompt_format
from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import from_config
from tlt_jax.train import loop, policy_update
from tlt_jax.train.policy_update import PolicyState, Recipe

STEPS = 4
TASK = {"min_length": 3, "max_length": 4, "modulus": 5}
SIZES = {
    "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 64,
}  # fmt: skip
KNOBS = {
    "model.init": SIZES,
    "data.task_args": TASK,
    "data.eval_size": 2,
    "data.max_prompt_tokens": 8,
    "rollout.prompts": 2,
    "rollout.samples": 3,
    "rollout.max_new_tokens": 12,
    "speculation.drafter": "none",
    "rollout.chunk": 4,
    "rollout.slots": 3,
    "train.steps": STEPS,
    "train.row_tokens": 64,
    "mesh.data": 2,
    "reward.terms": {"toy_rewards:digest": 1.0},
    "optim.learning_rate": 0.01,
    "eval.every": 2,
    "eval.samples": 2,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
    "reward.environment": ["TOY_REWARD_SECONDS", "TOY_REWARD_RAISES", "JAX_PROCESS_ID"],
    "sft.cache": "off",
}  # fmt: skip


def built(values: dict[str, Any]) -> Config:
    """The configuration with these values of knobs, the others by default, the compiled programs of all tests and no shelf."""
    own = {
        "rollout.compile_cache": os.environ["TLT_JAX_TEST_PROGRAMS"],
        "drafter_training.shelf": "off",
    }
    values = own | values
    pairs = [(name, value if isinstance(value, str) else json.dumps(value, default=str).strip('"'))
             for name, value in values.items()]  # fmt: skip
    return configuration.build({}, pairs)


def having(config: Any, **knobs: Any) -> Any:
    """The configuration, or section, with these values; `__` stands for the dot in a name."""
    for name, value in knobs.items():
        head, _, rest = name.partition("__")
        value = having(getattr(config, head), **{rest: value}) if rest else value
        config = replace(config, **{head: value})
    return config


def saved_steps(config: Config) -> list[int]:
    with Store(config.run, create=False) as store:
        return store.steps()


def assert_equal(ours, theirs) -> None:
    """Every leaf is equal, bit by bit."""
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(np.asarray(one), np.asarray(other)),
        ours,
        theirs,
    )


def events(config: Config) -> dict[str, list[tuple[int, float]]]:
    """Scalar name -> (step, value) of every event."""
    accumulator = EventAccumulator(str(Path(config.run) / "tensorboard")).Reload()
    return {
        name: [(e.step, e.value) for e in accumulator.Scalars(name)]
        for name in accumulator.Tags()["scalars"]
    }


def raise_at(monkeypatch, target, name: str, number: int, act) -> None:
    """Runs `act` before call `number` (from 1) of a function."""
    function, calls = getattr(target, name), iter(range(1, 1000))

    def counted(*args, **kwargs):
        if next(calls) == number:
            act()
        return function(*args, **kwargs)

    monkeypatch.setattr(target, name, counted)


def spied(monkeypatch, target, name: str, seen: Callable = lambda *given, **named: given) -> list:
    """A list that gets what `seen` makes of the arguments of every call of a function."""
    function, calls = getattr(target, name), []

    def call(*args, **kwargs):
        calls.append(seen(*args, **kwargs))
        return function(*args, **kwargs)

    monkeypatch.setattr(target, name, call)
    return calls


def die() -> None:
    """Ends the run at once; its files stay as they are."""
    raise RuntimeError("killed here")


def preempt() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def stopped_after(step: int, config: Config, run: Path) -> Config:
    """A copy of the run as left by a kill -9 before the save of the next step is complete."""
    shutil.copytree(config.run, run)
    for saved in (run / "checkpoints").iterdir():
        if saved.name.isdigit() and int(saved.name) > step:
            shutil.rmtree(saved)
    shutil.rmtree(run / "hf", ignore_errors=True)
    return replace(config, run=str(run))


def resumed(whole: Config, run: Path, step: int, knobs: dict[str, Any] | None = None) -> Config:
    """The run, killed after a step and resumed with other values of knobs that may change: it ends with the bits of `whole`."""
    given = {name.replace(".", "__"): value for name, value in (knobs or {}).items()}
    config = having(stopped_after(step, whole, run), **given)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, whole)
    return config


def assert_same_bits(ours: Config, theirs: Config) -> None:
    """The answers of all steps, and the policy and optimizer after the last one, are equal."""
    assert completions(ours) == completions(theirs)
    step = theirs.train.steps
    assert_equal(state_of(ours, step), state_of(theirs, step))


def assert_close(ours: Config, theirs: Config, atol: float = 1e-5) -> None:
    """The policies after the last step are equal up to the order of sums, which several processes may take in another one."""
    states = (state_of(one, theirs.train.steps).params for one in (ours, theirs))
    for one, other in zip(*map(jax.tree.leaves, states), strict=True):
        np.testing.assert_allclose(one, other, rtol=0, atol=atol)


def state_of(config: Config, step: int = STEPS) -> PolicyState:
    """The state that the run saved after a step, on the mesh of the configuration."""
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
    target = policy_update.abstract_state(Recipe.of(config, model, mesh, 1))
    with Store(config.run, create=False) as store:
        return store.restore(step, {"policy": target}).items["policy"]


def evaluated(config: Config) -> dict[str, str]:
    """Evaluation file -> its text."""
    return {file.name: file.read_text() for file in Path(config.run).glob("evaluation/*")}


def completions(config: Config) -> dict[str, list[tuple]]:
    """Completions file -> the answers in it."""
    files = sorted((Path(config.run) / "completions").iterdir())
    fields = (
        "step", "uid", "prompt", "completion", "reward", "length", "finish", "id", "group", "reference", "advantage",
    )  # fmt: skip
    return {
        f.name: [tuple(json.loads(line)[k] for k in fields) for line in f.read_text().splitlines()]
        for f in files
    }
