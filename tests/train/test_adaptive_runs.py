"""A run that trains its drafter in idle time: the policy is bit-equal to that of a run without, whatever goes wrong."""

from __future__ import annotations

import random
import shutil

import jax
import numpy as np
import pytest
from idle_process import LEAST, groups_train
from training_runs import (
    assert_equal,
    assert_same_bits,
    die,
    events,
    raise_at,
    spied,
    stopped_after,
)

from tlt_jax import cli, run_folder
from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config
from tlt_jax.data import prompt_format
from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter.idle_training import IdleTraining
from tlt_jax.drafter.recipe import DrafterRecipe, idle_recipe
from tlt_jax.errors import ConfigError, ModelError
from tlt_jax.models import from_config, hf_drafter
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.scheduler import driver
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.train import adaptive as adaptive_run, loop, run_state, sft
from tlt_jax.tuner import goodput

STEPS = 4
UNEVEN = {
    "train.steps": STEPS,
    "rollout.max_new_tokens": 40,
    "data.task_args": {"min_length": 3, "max_length": 6, "modulus": 5, "tail": 2.0},
    "eval.every": 0,
}  # fmt: skip
ADAPTIVE = UNEVEN | {
    "speculation.drafter": "adaptive",
    "speculation.strategies": ["2_1_3", "2_2_4"],
    "drafter_training.share": 0.0,
    "idle_training.learning_rate": 0.01,
}


def check_learning(configure, tmp_path, monkeypatch, knobs):
    """A drafter learns on idle groups and from rows of the update, and changes no bit of the policy."""
    groups_train(monkeypatch)
    plain = configure(tmp_path / "plain", UNEVEN | knobs)
    adaptive = configure(tmp_path / "adaptive", ADAPTIVE | knobs | {"drafter_training.share": 0.5})
    for config in (plain, adaptive):
        assert loop.train(config) == cli.DONE
    assert_same_bits(adaptive, plain)
    found = events(adaptive)
    assert sum(value for _, value in found["drafter/update_tokens"]) > 0
    assert all(np.isfinite(value) for _, value in found["drafter/loss"])


@pytest.fixture(scope="module")
def plain(configure, shared):
    """The run without a drafter."""
    config = configure(shared / "plain", UNEVEN)
    assert loop.train(config) == cli.DONE
    return config


@pytest.fixture(scope="module")
def adaptive(configure, shared):
    """The run that trains its drafter."""
    config = configure(shared / "adaptive", ADAPTIVE | {"checkpoint.export": True})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adaptive_run, "HELD_OUT", 2)  # of six sequences a step
        patch.setattr(adaptive_run, "WINDOW", 32)
        groups_train(patch)
        assert loop.train(config) == cli.DONE
    return config


@pytest.fixture(autouse=True)
def trains(monkeypatch):
    """Idle groups train in every step."""
    groups_train(monkeypatch)


def recipe_of(config: Config) -> DrafterRecipe:
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
    return idle_recipe(config, model, from_config.new_drafter_config(config, model), mesh)


def drafter_of(config: Config, step: int):
    """The drafter's state in the checkpoint of a step."""
    with Store(config.run, create=False) as store:
        return run_state.restore(store, run_state.abstract(step, drafter=recipe_of(config))).drafter


def test_training_the_drafter_changes_no_bit_of_the_policy(plain, adaptive):
    assert_same_bits(adaptive, plain)
    measured = events(adaptive)
    trained = dict(measured["drafter/steps"])
    assert trained[1] == 0, "the seconds of a rollout are not known yet"
    assert all(trained[step] >= 2 * LEAST for step in (2, 3, 4))
    assert all(value > 0 for step, value in measured["drafter/tokens"] if step > 1)
    assert {name for name in measured if name.startswith("idle/")} == {
        "idle/ratio", "idle/used_ratio", "idle/delay_s",
    }  # fmt: skip
    for name in ("idle/ratio", "idle/used_ratio"):
        assert all(0 <= value <= 1 for _, value in measured[name])
    assert all(0 < value <= 1 for _, value in measured["drafter/acceptance"])


def test_the_drafter_moves_and_is_saved_and_exported(adaptive):
    first, last = (drafter_of(adaptive, step) for step in (2, STEPS))
    assert int(last.step) > int(first.step) > 0
    moved = [
        np.abs(np.asarray(one) - np.asarray(other)).max()
        for one, other in zip(
            jax.tree.leaves(first.params), jax.tree.leaves(last.params), strict=True
        )
    ]
    assert max(moved) > 1e-4
    model = from_config.model_config(adaptive, prompt_format.tokenizer_of(adaptive))
    folder = run_folder.drafter_export(adaptive)
    mesh = meshes.make_mesh(1, 1)
    _, params = hf_drafter.load(folder, model, mesh, "float32", 48)
    assert_equal(jax.device_get(params), jax.device_get(last.params))


def test_a_run_that_died_between_its_exports_makes_both_and_alone_writes_a_drafter(
    adaptive, tmp_path, monkeypatch
):
    config = stopped_after(STEPS, adaptive, tmp_path / "run")
    places = run_folder.drafter_export, run_folder.export
    shutil.rmtree(run_folder.drafter_export(config))
    drafters = str(run_folder.drafter_export(config).parent)
    with run_folder.locked(drafters), pytest.raises(ConfigError, match="in use by"):
        loop.train(config)
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed here"):
        raise_at(patch, loop.hf, "save_whole", 1, die)
        loop.train(config)
    assert [place(config).exists() for place in places] == [True, False]
    assert loop.train(config) == cli.DONE
    for place in places:
        ours, theirs = (place(one) / "model.safetensors" for one in (config, adaptive))
        assert ours.read_bytes() == theirs.read_bytes()


def test_a_resumed_run_has_the_same_policy_and_continues_with_the_drafter(
    adaptive, plain, tmp_path, monkeypatch
):
    config = stopped_after(3, adaptive, tmp_path / "run")
    seen = spied(monkeypatch, IdleTraining, "begin", lambda self, *given: int(given[-1].step))
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)
    assert seen[0] == int(drafter_of(adaptive, 3).step)


def test_the_policy_is_the_same_when_pieces_end_at_random_times(
    configure, plain, tmp_path, monkeypatch
):
    draw, is_ready = random.Random(3), IdleTraining.is_ready
    monkeypatch.setattr(
        IdleTraining, "is_ready", lambda self, group: draw.random() < 0.2 and is_ready(self, group)
    )
    idle = driver.LocalGroups.is_idle
    monkeypatch.setattr(
        driver.LocalGroups, "is_idle", lambda self, group: draw.random() < 0.5 and idle(self, group)
    )
    config = configure(tmp_path / "run", ADAPTIVE)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)


def test_idle_work_that_raises_leaves_the_drafter_and_twice_in_a_row_is_the_end_of_it(
    configure, plain, tmp_path, monkeypatch, capsys
):
    def failing(self, group):
        raise OSError("no such luck")

    monkeypatch.setattr(IdleTraining, "dispatch", failing)
    config = configure(tmp_path / "run", ADAPTIVE)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)
    lines = [line for line in capsys.readouterr().out.splitlines() if "idle training" in line]
    assert sum("no such luck" in text for text in lines) == 2, "one line a step"
    assert "is stopped" in lines[-1] and len(lines) == 3
    assert [value for _, value in events(config)["drafter/failures"]] == [1.0, 2.0]  # steps 2 and 3
    assert_equal(jax.device_get(drafter_of(config, 1)), jax.device_get(drafter_of(config, STEPS)))


def test_a_drafter_that_diverges_is_dropped_and_the_last_good_one_stays(
    configure, plain, tmp_path, monkeypatch
):
    done = IdleTraining.done

    def broken(self, group, least, most):
        copy = self.copies[group]
        if copy.steps == 1:
            copy.metrics = copy.metrics | {"loss": jax.numpy.float32(np.nan)}
            copy.state = jax.tree.map(lambda leaf: leaf * 0, copy.state)
        done(self, group, least, most)

    monkeypatch.setattr(IdleTraining, "done", broken)
    config = configure(tmp_path / "run", ADAPTIVE)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)
    assert events(config)["drafter/failures"]
    assert int(drafter_of(config, STEPS).step) == 0


def test_what_the_run_cannot_pay_back_is_neither_compiled_nor_captured(
    configure, plain, tmp_path, monkeypatch
):
    monkeypatch.undo()
    used = spied(monkeypatch, Engine, "use_learned", lambda engine, is_used: is_used)
    config = configure(tmp_path / "run", ADAPTIVE | {"checkpoint.export": True})
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)
    assert max(value for _, value in events(config)["drafter/steps"]) == 0
    assert used == [False]
    with Store(config.run, create=False) as store:
        assert store.index(STEPS)["items"].keys() == {"policy"}
    assert run_folder.export(config).is_dir() and not run_folder.drafter_export(config).exists()
    config = stopped_after(2, config, tmp_path / "again")
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)


def test_a_drafter_of_a_directory_drafts_from_the_first_step(
    adaptive, plain, configure, tmp_path, monkeypatch
):
    monkeypatch.undo()
    used = spied(monkeypatch, Engine, "use_learned", lambda engine, is_used: is_used)
    offered = spied(
        monkeypatch, Planner, "decide", lambda self, *_: self.tuner.usable(self.state, 3, 1)
    )
    start = {"drafter_training.start": str(run_folder.drafter_export(adaptive))}
    config = configure(tmp_path / "run", ADAPTIVE | start)
    priors = spied(monkeypatch, goodput, "update_prior", lambda state, estimated={}: estimated)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)
    assert set(used) == {True}
    assert {arm.drafter for arms in offered for arm in arms} == {"ngram", "learned", "merged"}
    known = events(adaptive)["drafter/acceptance"][-1][1]
    assert priors[0]["learned"][0] == pytest.approx(known), (
        "the last measurement of the earlier run"
    )


def test_an_unreadable_record_of_acceptance_is_refused_before_the_warm_start(
    adaptive, configure, tmp_path, monkeypatch
):
    start = tmp_path / "drafter"
    shutil.copytree(run_folder.drafter_export(adaptive), start)
    (start / "acceptance.json").write_text('{"acceptance": [2]}')
    monkeypatch.setattr(sft, "warm_start", lambda *_: pytest.fail("it was made for nothing"))
    with pytest.raises(ModelError, match="acceptance.json: write"):
        loop.train(configure(tmp_path / "run", ADAPTIVE | {"drafter_training.start": str(start)}))


def test_a_new_drafter_of_a_fixed_policy_has_the_draft_vocabulary_of_the_first_answers(
    configure, plain, tmp_path, monkeypatch
):
    given, create = [], adaptive_run.create
    monkeypatch.setattr(
        adaptive_run, "create",
        lambda *parts, texts=(): (given.append([*texts]), create(*parts, texts=given[-1]))[1],
    )  # fmt: skip
    knobs = {
        "speculation.tuner": "fixed", "speculation.strategies": ["learned:2_1_3"],
        "drafter_training.kind": "eagle3", "drafter_training.vocab": 5,
    }  # fmt: skip
    config = configure(tmp_path / "run", ADAPTIVE | knobs)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)
    assert [len(texts) for texts in given] == [0, 6]
    ids = np.asarray(drafter_of(config, STEPS).params.ids)
    counts = np.bincount(np.concatenate(given[1]), minlength=99)
    others = np.delete(counts, ids)
    assert len(ids) == 5 and counts[ids].min() >= others.max() and ids.max() >= 5
