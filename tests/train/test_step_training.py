"""Drafter training in the policy update: policy and tokens stay bit-equal, and the drafter trains on the right rows."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from jobs import Job
from test_adaptive_runs import ADAPTIVE, STEPS, UNEVEN, drafter_of
from training_runs import (
    assert_close,
    assert_equal,
    assert_same_bits,
    completions,
    events,
    spied,
    state_of,
    stopped_after,
)

from tlt_jax import cli
from tlt_jax.checkpoint.store import Store
from tlt_jax.drafter import step_training
from tlt_jax.drafter.investment import Investment
from tlt_jax.rollout import learned_drafter
from tlt_jax.rollout.engine import Engine
from tlt_jax.train import loop
from tlt_jax.train.run_state import INVESTMENT
from tlt_jax.tuner import cost_model

SHARE = ADAPTIVE | {
    "drafter_training.share": 1.0,
    "train.row_tokens": 96,
    "speculation.strategies": ["2_1_3"],
}


@pytest.fixture(scope="module")
def plain(configure, shared):
    """The run without a drafter."""
    config = configure(shared / "plain", UNEVEN | {"train.row_tokens": 96})
    assert loop.train(config) == cli.DONE
    return config


@pytest.fixture(scope="module")
def whole(configure, shared):
    """The run whose drafter learns from all rows of each update."""
    config = configure(shared / "whole", SHARE)
    assert loop.train(config) == cli.DONE
    return config


@pytest.fixture(scope="module")
def recorded(plain, whole, shared):
    """A run resumed after its first step, and the inputs of each drafter training step: policy and rows, as NumPy arrays."""
    config = stopped_after(1, whole, shared / "recorded")
    with pytest.MonkeyPatch.context() as patch:
        given = spied(
            patch, step_training, "learn",
            lambda recipe, drafter, policy, rows, step: jax.tree.map(np.asarray, (policy, rows)),
        )  # fmt: skip
        assert loop.train(config) == cli.DONE
    return config, given


def test_a_resumed_run_has_the_same_drafter_of_each_steps_answers_and_earlier_policy(
    recorded, plain, whole
):
    config, given = recorded
    assert_same_bits(config, plain)
    assert_equal(drafter_of(config, STEPS), drafter_of(whole, STEPS))
    assert len(given) == STEPS - 1
    for step, (policy, rows) in enumerate(given, start=2):
        assert_equal(policy, jax.tree.map(np.asarray, state_of(config, step - 1).params))
        file = Path(config.run) / "completions" / f"{step:06d}.jsonl"
        lengths = [json.loads(line)["length"] for line in file.read_text().splitlines()]
        found = []
        for batch in rows:
            for segments, mask in zip(batch.segments, batch.is_answer, strict=True):
                parts = [mask[segments == one] for one in range(1, segments.max() + 1)]
                found += [int(part.sum()) for part in parts]
                # The loss mask covers the tokens after the prompt, to the end of the answer.
                assert all(part[-int(part.sum()) - 1 : -1].all() and not part[-1] for part in parts)
        assert sorted(found) == sorted(lengths)


def test_what_the_drafter_learns_changes_no_bit_of_the_policy(plain, whole):
    assert_same_bits(whole, plain)
    measured = events(whole)
    assert all(value >= 1 for _, value in measured["drafter/update_steps"])
    answers = [value for _, value in measured["response_length/mean"]]
    learned = [value for _, value in measured["drafter/update_tokens"]]
    np.testing.assert_allclose(learned, np.multiply(answers, 6), err_msg="every answer token, once")
    assert [step for step, _ in measured["drafter/acceptance@1"]] == [1, 2, 3, 4]


def test_a_block_drafter_learns_changes_no_bit_and_resumes(plain, configure, tmp_path):
    """On all rows of each update."""
    config = configure(tmp_path / "whole", SHARE | {"drafter_training.kind": "dspark"})
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)
    measured = events(config)
    assert [step for step, _ in measured["drafter/acceptance@2"]] == [1, 2, 3, 4]
    assert "drafter/confidence_loss" in measured
    resumed = stopped_after(2, config, tmp_path / "resumed")
    assert loop.train(resumed) == cli.DONE
    assert_equal(drafter_of(resumed, STEPS), drafter_of(config, STEPS))


def test_a_non_finite_loss_changes_nothing_is_reported_and_the_run_continues(
    plain, whole, tmp_path, monkeypatch
):
    config, learn = stopped_after(2, whole, tmp_path / "run"), step_training.learn

    def spoiled(recipe, drafter, policy, rows, step):
        if step == 2:
            policy = jax.tree.map(lambda leaf: leaf * np.nan, policy)
        return learn(recipe, drafter, policy, rows, step)

    monkeypatch.setattr(step_training, "learn", spoiled)
    before = jax.tree.map(np.asarray, drafter_of(config, 2).params)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)
    assert_equal(jax.tree.map(np.asarray, drafter_of(config, 3).params), before)
    assert int(drafter_of(config, STEPS).step) > int(drafter_of(config, 3).step)
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("step 3: the drafter's loss is not finite: that update is skipped") == 1
    assert dict(events(config)["drafter/update_steps"])[3] == 0


def test_once_drafting_pays_it_starts_is_reported_and_continues_when_resumed(
    plain, whole, tmp_path, monkeypatch, capsys
):
    """Drafting is made to pay: after the second step, and after every step of the resumed run."""
    gain = iter([0.0, 5.0])
    monkeypatch.setattr(learned_drafter, "payback", lambda *_: (next(gain), 0.0))
    monkeypatch.setattr(cost_model, "is_disturbed", lambda costs: False)  # by other tests
    knows = spied(monkeypatch, Engine, "publish", lambda engine, *_: engine.drafter is not None)
    config = stopped_after(0, whole, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "completions")
    assert loop.train(config) == cli.DONE
    assert knows == [False, False, True, True, True], "before each step, and after the last one"
    printed = capsys.readouterr().out
    assert printed.count("step 2/4  the drafter drafts from here on: of its drafts") == 1
    assert_same_bits(config, plain)

    again = stopped_after(3, config, tmp_path / "again")
    assert loop.train(again) == cli.DONE
    assert knows[5:] == [True, True], "the tuner of the checkpoint knows the drafter"
    assert_same_bits(again, plain)


def test_processes_that_disagree_on_seconds_learn_the_same(plain, configure, tmp_path):
    """share auto: the seconds of process 0 decide the training budget, its rows, and when drafting starts.

    The drafter learns from rows until the rollout has features, and then from what it harvests.
    """
    rest = {"drafter_training.share": "auto", "mesh.fake_devices": 2}
    config = configure(tmp_path / "run", SHARE | rest)
    with Job(config, 2, "disagreeing_process", by_launcher=True) as job:
        assert job.wait() == [cli.DONE], job.said()
    assert completions(config) == completions(plain)
    assert_close(config, plain)
    measured = {name: dict(values) for name, values in events(config).items()}
    assert measured["drafter/update_steps"][2] >= 1, "once a step's seconds are known"
    assert measured["drafter/steps"][STEPS - 1] >= 1, "from what is harvested, once drafting pays"
    assert "the drafter drafts from here on" in job.said()
    learned = sum(sum(measured[f"drafter/{kind}"].values()) for kind in ("tokens", "update_tokens"))
    with Store(config.run, create=False) as store:
        assert Investment.of(store.index(STEPS)["meta"][INVESTMENT]).tokens == learned


def test_a_run_that_is_too_short_for_learning_has_no_drafter(plain, configure, tmp_path):
    config = configure(tmp_path / "run", SHARE | {"drafter_training.share": "auto"})
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, plain)
    assert "drafter/update_steps" not in events(config)


def test_a_share_is_that_of_all_steps_and_a_function_of_the_step():
    for share in (0.0, 0.1, 0.3, 0.5, 1.0):
        for count in (1, 2, 3, 7):
            found = [step_training.taken(share, step, count) for step in range(40)]
            assert sum(map(len, found)) == math.floor(share * 40 * count)
            assert all(len(set(one)) == len(one) and set(one) <= set(range(count)) for one in found)
    assert {place for step in range(40) for place in step_training.taken(0.3, step, 7)} == set(
        range(7)
    )
