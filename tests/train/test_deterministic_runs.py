"""`rollout.deterministic`: a run in bfloat16 that drafts repeats and resumes bit for bit, however the machine delays it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from training_runs import assert_equal, completions, state_of, stopped_after

from tlt_jax import cli
from tlt_jax.rollout import learned_drafter
from tlt_jax.rollout.scheduler import group
from tlt_jax.train import loop

STEPS = 3
BFLOAT16 = {
    "model.compute_dtype": "bfloat16",
    "model.init": {
        "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
    },
    "rollout.deterministic": True,
    "rollout.prompts": 4,
    "rollout.samples": 4,
    "rollout.slots": 6,
    "rollout.max_new_tokens": 32,
    "rollout.chunk": 4,
    "train.steps": STEPS,
    "train.row_tokens": 128,
    "speculation.drafter": "ngram",
    "speculation.strategies": ["2_2_4", "3_1_4"],
    "eval.every": 2,
    "sft.steps": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def make(configure, shared):
    """make(run folder): the configuration of a run on a few problems, repeated many times."""
    data = {"data.train": shared / "rows.jsonl", "model.tokenizer": shared / "tokenizer"}
    return lambda run: configure(run, BFLOAT16 | data)


@pytest.fixture(scope="module")
def undelayed(make, tmp_path_factory):
    config = make(tmp_path_factory.mktemp("deterministic") / "run")
    assert loop.train(config) == cli.DONE
    return config


def delay(monkeypatch, seed: int) -> None:
    """Delays the detection of finished work, at random and by a random time."""
    draw, is_ready = random.Random(seed), group.is_ready

    def late(state):
        time.sleep(0.004 * draw.random() ** 4)
        return draw.random() < 0.3 and is_ready(state)

    monkeypatch.setattr(group, "is_ready", late)


def chunks(config) -> list[tuple]:
    """Strategy, shape, rounds and rows of every chunk that ran."""
    fields = ("group", "strategy", "batch", "slots", "rounds", "tokens", "reason")
    lines = [
        json.loads(line)
        for file in sorted((Path(config.run) / "speculation").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert {line["strategy"] for line in lines} > {"off"}, "some chunk drafted"
    return sorted(tuple(str(line[field]) for field in fields) for line in lines)


@pytest.mark.matrix  # in the gate the resumed run is delayed too
@pytest.mark.parametrize("seed", [1, 2])
def test_delays_change_nothing(undelayed, make, tmp_path, monkeypatch, seed):
    delay(monkeypatch, seed)
    config = make(tmp_path / "run")
    assert loop.train(config) == cli.DONE
    assert completions(config) == completions(undelayed)
    assert chunks(config) == chunks(undelayed)
    assert_equal(state_of(config, STEPS), state_of(undelayed, STEPS))


@pytest.mark.parametrize("step", [1, pytest.param(2, marks=pytest.mark.matrix)])
def test_a_resumed_run_ends_with_the_same_bits(undelayed, tmp_path, monkeypatch, step):
    delay(monkeypatch, step)
    config = stopped_after(step, undelayed, tmp_path / "run")
    assert loop.train(config) == cli.DONE
    assert completions(config) == completions(undelayed)
    assert chunks(config) == chunks(undelayed)
    assert_equal(state_of(config, STEPS), state_of(undelayed, STEPS))


@pytest.fixture(scope="module")
def learning(make, configure, shared, tmp_path_factory):
    """The run whose drafter trains in policy updates, and drafts as soon as its acceptance is measured."""
    run = tmp_path_factory.mktemp("deterministic") / "learning"
    data = {"data.train": shared / "rows.jsonl", "model.tokenizer": shared / "tokenizer"}
    knobs = {
        "speculation.drafter": "adaptive",
        "speculation.strategies": ["2_2_4"],
        "idle_training.learning_rate": 0.01,
    }
    config = configure(run, BFLOAT16 | data | knobs | {"drafter_training.share": 1.0})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(learned_drafter, "DETERMINISTIC_GAIN", -10.0)
        assert loop.train(config) == cli.DONE
    return config


@pytest.mark.parametrize("step", [pytest.param(0, marks=pytest.mark.matrix), 2])
def test_a_drafter_that_learns_without_a_clock_repeats_and_resumes(
    learning, tmp_path, monkeypatch, step
):
    assert any("learned" in chunk[1] or "merged" in chunk[1] for chunk in chunks(learning))
    delay(monkeypatch, 3)
    monkeypatch.setattr(learned_drafter, "DETERMINISTIC_GAIN", -10.0)
    config = stopped_after(step, learning, tmp_path / "run")
    assert loop.train(config) == cli.DONE
    assert completions(config) == completions(learning)
    assert chunks(config) == chunks(learning)
    assert_equal(state_of(config, STEPS), state_of(learning, STEPS))
