"""Runs that train adapters: their base stays, their state is small, they resume, and speculation changes no bit."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from jobs import Job
from test_adaptive_runs import check_learning
from test_dynamic_sampling import DYNAMIC
from training_runs import (
    STEPS,
    assert_close,
    assert_equal,
    completions,
    events,
    having,
    resumed,
    spied,
    state_of,
    stopped_after,
)

from tlt_jax import cli, export, run_folder
from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config
from tlt_jax.data import prompt_format
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import ConfigError, ModelError
from tlt_jax.models import from_config, hf, lora
from tlt_jax.train import loop, step_metrics

TARGETS = ["q_proj", "o_proj", "down_proj"]
LORA = {
    "model.lora.rank": 2,
    "model.lora.alpha": 8,
    "model.lora.targets": TARGETS,
    "eval.every": 0,
}


def sizes(config: Config) -> tuple:
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    return model, meshes.make_mesh(config.mesh.data, config.mesh.model)


@pytest.fixture(scope="module")
def trained(configure, shared):
    """A run with two minibatches and a KL term, and the metrics of each step's optimizer steps."""
    knobs = {"algorithm.kl_coef": 0.1, "algorithm.minibatches": 2, "checkpoint.export": True}
    config = configure(shared / "lora", LORA | knobs)
    with pytest.MonkeyPatch.context() as patch:
        updates = spied(patch, step_metrics, "of_update", lambda *given: given[0])
        assert loop.train(config) == cli.DONE
    return config, updates


def test_the_base_keeps_every_bit_and_is_the_reference(trained):
    """The KL is 0 at first: the base without adapters is scored, not the policy of a later step."""
    config, updates = trained
    model, mesh = sizes(config)
    start = from_config.load_policy(config, model, mesh)
    kept = hf.load(run_folder.reference(config), model, mesh, "float32")
    assert_equal(kept, start)
    assert float(updates[0][0]["kl"]) == pytest.approx(0, abs=1e-6)
    assert float(updates[-1][0]["kl"]) > 1e-5
    for first, second in updates:
        assert float(first["ratio_mean"]) == pytest.approx(1, abs=1e-5)
        assert abs(float(second["ratio_mean"]) - 1) > 1e-6


def test_a_checkpoint_holds_adapters_and_their_moments_alone(trained):
    """Of L = 1 layer, D 16, heads 16 wide, F 16, rank 2: 3 targets x 2 factors x 2 x 16 numbers, three times."""
    config, _ = trained
    with Store(config.run, create=False) as store:
        index = store.index(STEPS)["items"]["policy"]
    arrays = {name: leaf for name, leaf in index.items() if leaf["shape"]}
    numbers = sum(int(np.prod(leaf["shape"])) for leaf in arrays.values())
    assert numbers == 3 * (3 * 2 * 2 * 16)
    assert {leaf["dtype"] for leaf in arrays.values()} == {"float32"}
    assert all(".a" in name or ".b" in name for name in arrays)
    moved = state_of(config).params
    for name in ("q", "o", "down"):
        adapter = getattr(moved, name)
        assert np.abs(np.asarray(adapter.b)).max() > 1e-3
    assert moved.k is moved.gate is None


def test_the_export_is_the_merged_policy(trained):
    config, _ = trained
    model, mesh = sizes(config)
    base = from_config.load_policy(config, model, mesh)
    found = hf.load(run_folder.export(config), model, mesh, "float32")
    adapters = state_of(config).params
    for name in ("q", "k", "o", "gate", "down"):
        matrix = np.asarray(getattr(base.layers, name), np.float64)
        if (adapter := getattr(adapters, name)) is not None:
            change = np.asarray(adapter.b, np.float64) @ np.asarray(adapter.a, np.float64)
            matrix = matrix + 8 / 2 * change
        np.testing.assert_allclose(getattr(found.layers, name), matrix, rtol=0, atol=1e-6)
    assert_equal(found.embed, base.embed)


def test_a_run_resumes_with_drafts_to_the_bit_and_with_the_same_adapters_alone(trained, tmp_path):
    config, _ = trained
    drafting = {
        "speculation.drafter": "ngram", "speculation.tuner": "fixed", "speculation.strategies": ["2_1_3"],
    }  # fmt: skip
    drafted = resumed(config, tmp_path / "resumed", 2, drafting)
    assert max(value for _, value in events(drafted)["speculation/accept_length"]) > 1
    other = stopped_after(2, config, tmp_path / "other")
    for name, value in (("rank", 4), ("alpha", 16.0), ("targets", ["q_proj"])):
        changed = having(other, **{f"model__lora__{name}": value})
        with pytest.raises(ConfigError, match=f"model.lora.{name} .* there, .*another run folder"):
            loop.train(changed)


def test_adapters_of_a_step_are_exported_and_start_another_run(configure, trained, tmp_path):
    """On the base that the run saved, since it began with a new model; the KL is to that base, not to the start."""
    config, _ = trained
    whole = having(config, model__lora__rank=0)
    with pytest.raises(ConfigError, match="--adapter: .* trains all weights"):
        export.export_adapter(whole, Path(config.run), Path("out"))
    out = tmp_path / "adapter"
    assert export.export_adapter(config, Path(config.run), out, "2") == 2
    saved = state_of(config, 2).params
    settings = json.loads((out / "adapter_config.json").read_text())
    assert settings["base_model_name_or_path"] == str(run_folder.reference(config))
    assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (2, 8, TARGETS)

    knobs = LORA | {"model.path": str(out), "train.steps": 1, "algorithm.kl_coef": 0.1}
    again = configure(tmp_path / "again", knobs)
    model, mesh = sizes(again)
    found = lora.chosen(again.model.lora, model)
    assert_equal(from_config.start_adapters(again, found, model, mesh), saved)
    assert loop.train(again) == cli.DONE
    assert events(again)["actor/kl"][0][1] > 1e-5
    kept = run_folder.reference(again) / "model.safetensors"
    assert kept.read_bytes() == (run_folder.reference(config) / "model.safetensors").read_bytes()

    other = having(again, run=str(tmp_path / "other"), model__lora__rank=4)
    with pytest.raises(ModelError, match="model.lora .*rank: 4.* has .*rank: 2.*: use its values"):
        loop.train(other)
    supervised = having(again, run=str(tmp_path / "sft"), sft__steps=1)
    with pytest.raises(ConfigError, match="sft.steps 1 with the adapters of model.path"):
        loop.train(supervised)


def test_a_drafter_learns_from_the_policy_with_adapters_and_changes_no_bit(
    configure, tmp_path, monkeypatch
):
    """On idle groups and from rows of the update, for which the features are those of the policy with its adapters."""
    knobs = LORA | {"train.steps": 3}
    check_learning(configure, tmp_path, monkeypatch, knobs)


@pytest.mark.matrix  # processes train all weights, experts and with environments in the gate
def test_two_processes_train_the_adapters_of_one(configure, tmp_path):
    """After a warm start of all weights, of which process 0 writes the base, slowly; one of an earlier attempt exists.

    Each decodes and scores half of a step's window (dynamic sampling), and has half of the rows for the KL in the reward.
    With one minibatch all ratios are exactly 1.
    """
    knobs = LORA | DYNAMIC | {
        "mesh.fake_devices": 2, "rollout.slots": 2, "sft.steps": 2, "sft.solution_column": "prompt",
        "algorithm.kl_in": "reward", "algorithm.kl_coef": 0.1, "algorithm.importance": "sequence",
        "algorithm.importance_mask": 1.5, "model.compute_dtype": "float32",
    }  # fmt: skip
    alone, two = (configure(tmp_path / name, knobs) for name in ("alone", "two"))
    assert loop.train(alone) == cli.DONE
    reference = run_folder.reference(two)
    reference.mkdir(parents=True)
    (reference / "config.json").write_text("{}")
    fails = {"FAILS_AS": "0", "FAILS_IN": "slow rename", "FAILS_NTH": "1"}
    with Job(
        two, 2, "failing_process", by_launcher=True, TOY_REWARD_SECONDS="0.01", **fails
    ) as job:
        assert job.wait() == [cli.DONE], job.said()
    kept = json.loads((reference / "made_from.json").read_text())
    assert kept["source"]["train.seed"] == "0" and kept["leaves"]
    assert json.loads((reference / "config.json").read_text())["hidden_size"]
    for ours, theirs in zip(*(completions(one).values() for one in (two, alone)), strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one[:-1] == other[:-1]  # all but the advantage
            np.testing.assert_allclose(one[-1], other[-1], rtol=0, atol=1e-5)
    assert_close(two, alone)
    ours, theirs = map(events, (two, alone))
    for name in ("groups/tried", "groups/replaced", "groups/filled", "reward/mean"):
        assert ours[name] == theirs[name], name
    penalties = (found["actor/reward_kl_penalty"] for found in (ours, theirs))
    np.testing.assert_allclose(*penalties, rtol=1e-3, atol=1e-7)
    assert theirs["actor/reward_kl_penalty"][-1][1] != 0
    assert {value for _, value in theirs["actor/ratio_max"]} == {1.0}
