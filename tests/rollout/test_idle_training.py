"""Idle groups of a tiny engine train the drafter: no answer changes, and the merged drafter has their updates."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import test_harvest_engine as harvests
import tiny_engine as tiny

from tlt_jax.drafter import (
    idle_training as idle,
    recipe as drafter_recipe,
    update as drafter_update,
)
from tlt_jax.drafter.idle_training import IdleTraining
from tlt_jax.drafter.recipe import DrafterRecipe
from tlt_jax.drafter.replay import Replay, ReplayConfig
from tlt_jax.drafter.update import Copies, MicroStep
from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.models import drafter as drafters
from tlt_jax.optimizer import Adam
from tlt_jax.rollout.executables import compilation
from tlt_jax.rollout.executables.programs import Decode, StateShape

ADAM = Adam(learning_rate=1e-2, total_steps=1)
pytestmark = pytest.mark.usefixtures("x64")


class Setting:
    """An engine, its trainer, and the drafter's state; `step` makes one RL step."""

    def __init__(self, kind="eagle3", data=2, model=1, least=3):
        self.engine, self.weights = harvests.engine_of(kind, data, model, captures_states=True)
        drafter = self.engine.drafter
        fixed = {"param_dtype": "float64", "compute_dtype": "float64", "logits_chunk": 64}
        self.recipe = DrafterRecipe(
            tiny.MODEL,
            drafter,
            self.engine.mesh,
            ADAM,
            0 if drafter.is_block else 2,
            attention_block=16,
            **fixed,
        )
        ids = (
            None if drafter.has_full_vocab else np.arange(drafter.draft_vocab_size, dtype=np.int32)
        )
        params = drafters.init(drafter, self.engine.mesh, jax.random.key(3), "float64", ids)
        self.state = drafter_recipe.create(params, self.recipe)
        replay = ReplayConfig(width=32, max_bytes=10**6, held_out=4)
        self.groups = dict(enumerate(self.engine.groups))
        self.trainer = IdleTraining(
            Copies(self.recipe, self.groups),
            {index: Replay(replay, index, mesh) for index, mesh in self.groups.items()},
            self.engine.programs, partial(MicroStep, recipe=self.recipe), bound=10.0,
        )  # fmt: skip
        self.trainer.keep_alive = partial(self.trainer.keep_alive, least=least)
        self.results, self.metrics = [], []

    def step(self, trains: bool = True) -> None:
        prompts = [np.asarray(prompt, np.int32) for prompt in tiny.PROMPTS]
        request = self.engine.request(
            prompts, tiny.SAMPLES, tiny.PLAIN, tiny.LIMIT, stream=TRAIN_STREAM,
            step=len(self.results), rollouts_left=5,
        )  # fmt: skip
        background = {}
        if trains:
            self.trainer.begin(len(self.results), request, self.weights, self.state)
            background = self.trainer.background_work()
        result, _ = self.engine.run(request, self.weights, **background)
        self.results.append(result)
        if trains:
            seconds = result.stats["seconds"]
            self.state, metrics = self.trainer.end(self.state, seconds)
            self.trainer.activate()
            self.metrics.append(metrics)


@pytest.fixture(scope="module")
def setting() -> Setting:
    """After two steps, the second of which trained."""
    with jax.enable_x64(True):
        found = Setting(least=2)
        found.step()
        found.step()
    return found


def same(one, other) -> bool:
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return all(np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)


@pytest.mark.parametrize(
    "kind, data, model",
    [
        pytest.param("eagle3", 2, 1, marks=pytest.mark.matrix),
        ("eagle", 2, 2),
        pytest.param("eagle3", 1, 1, marks=pytest.mark.matrix),
        pytest.param("dflash2", 1, 1, marks=pytest.mark.matrix),
        ("dspark", 2, 1),
        pytest.param("dflash", 2, 2, marks=pytest.mark.matrix),
    ],
)
def test_the_drafter_learns_and_no_answer_changes(kind, data, model):
    setting = Setting(kind, data, model)
    before = jax.device_get(setting.state)
    for _ in range(3):
        setting.step(trains=False)
    plain, setting.results = setting.results, []
    for _ in range(3):
        setting.step()
    for one, other in zip(setting.results, plain, strict=True):
        assert tiny.answers(one) == tiny.answers(other)
        for a, b in zip(one.completions, other.completions, strict=True):
            np.testing.assert_array_equal(a.logprobs, b.logprobs)
    assert setting.metrics[0]["drafter/steps"] == 0, "it is not active yet"
    for metrics in setting.metrics[1:]:
        assert metrics["drafter/steps"] >= 3 * data and metrics["drafter/tokens"] > 0
        assert 0 < metrics["drafter/acceptance"] < 1 and metrics["drafter/replay_tokens"] > 0
        assert 1 / data <= metrics["drafter/merge_weight_max"] <= 1
    assert not same(setting.state.params, before.params)
    for leaf, was in zip(jax.tree.leaves(setting.state), jax.tree.leaves(before), strict=True):
        assert leaf.shape == was.shape and leaf.dtype == was.dtype
    spans = {span.kind for span in setting.results[1].spans}
    assert setting.results[1].stats["idle_delay"] >= 0 and "harvest" in spans


def test_a_micro_step_updates_only_its_groups_copy_and_measures_without_learning(setting):
    trainer, state = setting.trainer, setting.state
    batch = trainer.replays[1].sample(0, idle.FIRST_TOKENS)
    rate = ADAM.learning_rate * (idle.FIRST_TOKENS / 2048) ** 0.5
    adam = replace(ADAM, learning_rate=rate)
    recipe = replace(setting.recipe, mesh=setting.groups[1], adam=adam)
    policy = setting.weights[1].target
    update = jax.jit(partial(drafter_update.update, recipe=recipe))
    expected, metrics = update(jax.device_get(state), policy, batch)
    piece = trainer.piece(1, idle.FIRST_TOKENS)
    for learns, wanted in ((False, state), (True, expected)):
        copy = trainer.on_devices.spread(state)[1]
        found, measured = setting.engine.programs.get(piece)(copy, policy, batch, np.bool_(learns))
        np.testing.assert_allclose(measured["loss"], metrics["loss"], rtol=1e-9)
        for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(np.asarray(a)[0], np.asarray(b), rtol=1e-7, atol=1e-12)


def test_the_expected_compile_time_of_a_micro_step_grows_with_its_unrolled_steps(setting):
    known, piece = compilation.CompileCosts(), setting.trainer.piece(0, 256)
    known.note(Decode(StateShape(0, 2, 32), 4), 3.0)
    assert known.of(piece) == pytest.approx(3.0 * (1.4 + 0.4 * 2))
    known.note(piece, 20.0)
    assert known.of(setting.trainer.piece(1, 512)) == 20.0


def test_the_size_of_a_micro_step_follows_its_seconds(setting, monkeypatch):
    trainer = setting.trainer
    monkeypatch.setattr(trainer, "bound", 0.1)

    def sized(tokens, seconds):
        return trainer.sized(tokens, seconds, seconds)

    assert sized(256, 0.05) == 256
    assert sized(256, 0.15) == 128
    assert sized(2048, 0.9) == 128  # 1024 in 0.45 s, 512 in 0.225, 256 in 0.11
    assert sized(256, 0.02) == 512
    assert sized(256, 1e-9) == idle.MOST_TOKENS
    assert sized(idle.LEAST_TOKENS, 9.0) == idle.LEAST_TOKENS
    # The host stalled: between 0.05 s and 4 s nothing follows; between 0.3 s and 4 s the micro-step was too long.
    assert trainer.sized(2048, 0.05, 4.0) == 2048
    assert trainer.sized(2048, 0.3, 4.0) == 512
    assert trainer.sized(256, 0.0, 0.02) == 512


def test_the_first_micro_step_that_must_pay_is_compiled_once_the_rollouts_left_are_long_enough(
    setting,
):
    cost, prepared = 3.0, []
    programs = SimpleNamespace(compile_cost=lambda piece: cost, prepare=prepared.append)
    trainer = IdleTraining(
        setting.trainer.on_devices,
        {0: None},
        programs,
        partial(MicroStep, recipe=setting.recipe),
        must_pay=True,
    )
    for seconds in (0.0, 0.9 * cost / idle.COMPILING):
        trainer.resize(seconds)
    trainer.activate()
    assert not prepared and not trainer.background_work(), "nothing is harvested in vain"
    trainer.resize(1.1 * cost / idle.COMPILING)
    cost = 0.0
    trainer.resize(0.0)
    assert trainer.background_work()
    assert len(prepared) == 2 and trainer.tokens == idle.FIRST_TOKENS
    cost, trainer.must_pay = 3.0, False
    trainer.resize(0.0)
    assert len(prepared) == 3


def test_the_merge_leaves_out_a_failed_group_and_has_the_others(caplog, monkeypatch):
    """Group 1 of 2 raises in its second micro-step of every step: the merge is group 0's copy, and training continues."""
    setting, merges, merged = Setting(), [], Copies.merged
    trainer = setting.trainer
    done = trainer.done

    def fails(group, least, most):
        if group == 1 and trainer.copies[1].steps == 1:
            jax.tree.map(lambda leaf: leaf.delete(), trainer.copies[1].state)
            raise jax.errors.JaxRuntimeError("INTERNAL: a card fell off the bus")
        done(group, least, most)

    def recorded(self, copies, tokens):
        merges.append((jax.device_get(copies[0]), tokens))
        return merged(self, copies, tokens)

    monkeypatch.setattr(Copies, "merged", recorded)
    trainer.done = fails
    for _ in range(4):
        setting.step()
        if merges:
            copy, tokens = merges[-1]
            assert tokens[0] > 0 and tokens[1] == 0
            assert same(setting.state, jax.tree.map(lambda leaf: leaf[0], copy))
    assert len(merges) == 3 and all(one["drafter/steps"] >= 3 for one in setting.metrics[1:])
    failed = [metrics.get("drafter/failed_groups", 0) for metrics in setting.metrics]
    assert failed == [0, 1, 1, 0], "after two failed steps in a row the run excludes it"
    assert trainer.is_active and not any("drafter/failures" in one for one in setting.metrics)
    assert caplog.text.count("a card fell off the bus") == 2
    assert caplog.text.count("data groups [1] are left out of idle training from here on") == 1


@pytest.mark.parametrize("tokens, share", [(512, 0.5), (2048, 1.0), (8192, 1.0)])
def test_a_small_micro_step_has_a_smaller_learning_rate(tokens, share):
    assert drafter_recipe.scaled(ADAM, tokens) == replace(ADAM, learning_rate=share * 1e-2)


def test_while_training_is_paused_only_held_out_sequences_are_measured(setting):
    setting.trainer.budget = replace(setting.trainer.budget, best=1.5, is_paused=True)
    setting.step()
    before = setting.state
    assert setting.metrics[-1]["drafter/steps"] == 0
    assert setting.trainer.budget.best != 1.5, "acceptance is far below that: training resumes"
    setting.step()
    assert setting.metrics[-1]["drafter/steps"] > 0 and not same(
        before.params, setting.state.params
    )
