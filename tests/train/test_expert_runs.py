"""Runs of a mixture of experts: what the rollout routed is replayed, speculation and resuming change no bit."""

from __future__ import annotations

import numpy as np
import pytest
from jobs import Job
from test_adaptive_runs import check_learning
from test_lora_runs import sizes
from training_runs import (
    SIZES,
    STEPS,
    assert_close,
    assert_equal,
    assert_same_bits,
    completions,
    events,
    having,
    resumed,
    state_of,
)

from tlt_jax import cli, run_folder
from tlt_jax.errors import ConfigError
from tlt_jax.models import hf
from tlt_jax.train import loop

EXPERTS = {
    "model.init": SIZES
    | {
        "model_type": "qwen3_moe", "num_hidden_layers": 2, "head_dim": 8, "num_experts": 6, "num_experts_per_tok": 2,
        "moe_intermediate_size": 8, "norm_topk_prob": True, "initializer_range": 0.3,
    },
    "eval.every": 0,
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(configure, shared):
    """A run in float32 that replays experts nevertheless, with a load-balancing loss."""
    knobs = {"algorithm.router_replay": "always", "algorithm.router_balance": 0.1}
    config = configure(shared / "experts", EXPERTS | knobs | {"checkpoint.export": True})
    assert loop.train(config) == cli.DONE
    return config


def test_the_routers_are_trained_and_measured(trained):
    found = events(trained)
    assert all(value == 0 for _, value in found["experts/changed"]), "float32 routes alike"
    for name in ("entropy", "load_max", "load_min", "balance_loss", "load@0", "load@5"):
        values = [value for _, value in found[f"experts/{name}"]]
        assert len(values) == STEPS and np.isfinite(values).all()
    loads = [found[f"experts/load@{expert}"][0][1] for expert in range(6)]
    assert np.mean(loads) == pytest.approx(1, rel=1e-5)
    model, mesh = sizes(trained)
    exported = hf.load(run_folder.export(trained), model, mesh, "float32")
    assert_equal(exported, state_of(trained).params)


def test_replay_changes_no_bit_in_float32_and_neither_do_drafts_nor_a_resume(
    trained, configure, tmp_path
):
    never = configure(tmp_path / "never", EXPERTS | {"algorithm.router_balance": 0.1})
    assert loop.train(never) == cli.DONE
    assert_same_bits(never, trained)
    drafting = {
        "speculation.drafter": "ngram", "speculation.tuner": "fixed", "speculation.strategies": ["2_1_3"],
    }  # fmt: skip
    drafted = resumed(trained, tmp_path / "drafted", 2, drafting)
    assert max(value for _, value in events(drafted)["speculation/accept_length"]) > 1


def test_replay_brings_the_ratio_of_rollout_and_update_nearer_to_1_in_bfloat16(configure, tmp_path):
    """Of the first step, whose answers are the same; six layers of which each chooses 2 of 32 experts: 0.025 and 0.19."""
    wide = EXPERTS["model.init"] | {
        "num_hidden_layers": 6, "num_experts": 32, "hidden_size": 64, "moe_intermediate_size": 64, "initializer_range": 0.2,
    }  # fmt: skip
    knobs = EXPERTS | {
        "model.init": wide, "model.compute_dtype": "bfloat16", "train.steps": 1, "rollout.prompts": 8, "rollout.samples": 4,
        "rollout.slots": 16, "checkpoint.every": 0,
    }  # fmt: skip
    found = {}
    for chosen in ("auto", "never"):
        config = configure(tmp_path / chosen, knobs | {"algorithm.router_replay": chosen})
        assert loop.train(config) == cli.DONE
        found[chosen] = {name: values[0][1] for name, values in events(config).items()}
    diff = "actor/rollout_logprob_diff_mean"
    assert found["auto"]["response_length/mean"] == found["never"]["response_length/mean"]
    assert found["auto"]["experts/changed"] > 0.01
    assert found["auto"][diff] < 0.5 * found["never"][diff]


@pytest.mark.matrix  # of a dense policy: train/test_adaptive_runs.py
def test_a_drafter_learns_from_experts_and_changes_no_bit(configure, tmp_path, monkeypatch):
    """On idle groups and from rows of the update; its layer is dense."""
    knobs = EXPERTS | {"train.steps": 3, "algorithm.router_replay": "always"}
    check_learning(configure, tmp_path, monkeypatch, knobs)


def test_adapters_leave_experts_alone_and_model_2_equals_model_1(configure, tmp_path):
    knobs = EXPERTS | {"model.lora.rank": 2, "train.steps": 2, "algorithm.router_replay": "always"}
    one = configure(tmp_path / "one", knobs | {"mesh.data": 1})
    two = configure(tmp_path / "two", knobs | {"mesh.data": 1, "mesh.model": 2})
    for config in (one, two):
        assert loop.train(config) == cli.DONE
    states = [state_of(config, 2) for config in (one, two)]
    assert states[0].params.gate is None and states[0].params.q is not None
    assert_close(two, one, 2e-4)  # Adam enlarges what rounds


@pytest.mark.matrix  # of a dense policy: train/test_processes.py; the exchange of records: rollout/test_exchange.py
def test_two_processes_train_the_experts_of_one(configure, tmp_path):
    knobs = EXPERTS | {"algorithm.router_replay": "always", "mesh.fake_devices": 2}
    alone, two = (configure(tmp_path / name, knobs) for name in ("alone", "two"))
    assert loop.train(alone) == cli.DONE
    with Job(two, 2, by_launcher=True) as job:
        assert job.wait() == [cli.DONE], job.said()
    assert_close(two, alone)
    assert completions(two).keys() == completions(alone).keys()
    assert all(value == 0 for _, value in events(two)["experts/changed"])


@pytest.mark.parametrize(
    "knob, value, message",
    [
        ("router_replay", "always", "algorithm.router_replay always: the model has no experts"),
        ("router_balance", 0.01, "algorithm.router_balance 0.01: the model has no experts"),
    ],
)
def test_knobs_of_experts_are_refused_for_a_dense_model(configure, tmp_path, knob, value, message):
    config = having(configure(tmp_path / "run"), **{f"algorithm__{knob}": value})
    with pytest.raises(ConfigError, match=message):
        loop.train(config)
