"""Runs that leave a drafter on the shelf, and runs that start from it: which is taken, and that no token changes."""

from __future__ import annotations

import json
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from training_runs import assert_same_bits, having, spied, stopped_after

from tlt_jax import cli, run_folder
from tlt_jax.config import Config
from tlt_jax.data import dataset as datasets, prompt_format
from tlt_jax.distributed.board import LocalBoard
from tlt_jax.distributed.job import Job
from tlt_jax.drafter import __main__ as drafters_command
from tlt_jax.drafter.investment import Investment
from tlt_jax.inference.rollouts import Rollouts
from tlt_jax.models import from_config, hf_drafter, shelf
from tlt_jax.rollout import learned_drafter
from tlt_jax.rollout.engine import Engine
from tlt_jax.train import drafter as drafter_command, loop, setup as setups
from tlt_jax.train.setup import Setup
from tlt_jax.tuner import cost_model

STEPS = 3
ADAPTIVE = {
    "train.steps": STEPS, "eval.every": 0, "speculation.drafter": "adaptive", "speculation.strategies": ["2_1_3"],
    "drafter_training.share": 1.0, "checkpoint.export": True,
}  # fmt: skip


@pytest.fixture(scope="module")
def knobs(shared):
    return ADAPTIVE | {"drafter_training.shelf": str(shared / "shelf")}


@pytest.fixture(scope="module")
def first(configure, shared, knobs):
    """A run that finds nothing on the shelf, and leaves its drafter there."""
    config = configure(shared / "first", knobs)
    assert loop.train(config) == cli.DONE
    return config


def setup_of(config: Config, job: Job | None = None) -> Setup:
    tokenizer = prompt_format.tokenizer_of(config)
    return Setup.of(config, tokenizer, datasets.load(config, tokenizer), job)


def entry_of(config: Config) -> Path:
    """The entry of a run."""
    return Path(config.drafter_training.shelf) / shelf.name_of(Path(config.run))


def test_a_run_leaves_its_drafter_with_what_it_is_for_and_learned_from(first):
    (one,) = shelf.entries(Path(first.drafter_training.shelf))
    assert one.directory == entry_of(first)
    assert (one.kind, one.steps, one.started_from) == ("eagle3", STEPS, "")
    assert one.tokens > 0 and one.run == first.run and len(one.bases) == 1
    assert one.acceptance == hf_drafter.read_acceptance(run_folder.drafter_export(first)) != ()
    assert shelf.lineage(run_folder.export(first)) == one.bases


def test_the_next_run_drafts_with_it_from_its_first_step_and_has_the_same_tokens(
    first, configure, tmp_path, knobs, capsys, monkeypatch
):
    started = spied(monkeypatch, setups, "keep_start", lambda *given: given[2])
    own = {"drafter_training.shelf": str(tmp_path / "shelf")}
    shutil.copytree(first.drafter_training.shelf, tmp_path / "shelf")
    config = configure(tmp_path / "second", knobs | own)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, first)
    said = capsys.readouterr().out
    assert said.count("the drafter starts from") == 1 and "acceptance by depth 0." in said
    (params,) = started
    kept = run_folder.start_drafter(config)
    assert shelf.checksum(kept / "model.safetensors") == shelf.read(entry_of(first)).weights
    assert params is not None and hf_drafter.read_acceptance(kept)
    assert shelf.read(tmp_path / "shelf" / shelf.name_of(Path(config.run))).started_from

    # Resumed, it looks at no shelf: what it started from is its own.
    monkeypatch.setattr(shelf, "entries", lambda folder: pytest.fail("the shelf was read"))
    shutil.rmtree(tmp_path / "shelf")
    again = stopped_after(1, config, tmp_path / "again")
    shutil.rmtree(Path(again.run) / "drafter" / "hf")
    assert loop.train(again) == cli.DONE
    assert_same_bits(again, config)
    names = ("model.safetensors", "config.json")
    for name in names:
        ours, theirs = (run_folder.drafter_export(one) / name for one in (again, config))
        assert ours.read_bytes() == theirs.read_bytes()


@pytest.mark.parametrize("pays", [False, True])
def test_on_a_cpu_under_share_auto_it_is_used_once_the_first_rollout_says_that_it_pays(
    first, configure, tmp_path, knobs, capsys, monkeypatch, pays
):
    uses, publish, asked = [], Engine.publish, []

    def spying(self, *given):
        uses.append(self.drafter is not None)
        return publish(self, *given)

    def payback(engine, tuner, depths):
        asked.append([*depths])
        return 9.0, 1.0 if pays else 10.0

    monkeypatch.setattr(Engine, "publish", spying)
    monkeypatch.setattr(learned_drafter, "payback", payback)
    monkeypatch.setattr(cost_model, "is_disturbed", lambda costs: False)  # by other tests
    monkeypatch.setattr(Investment, "earned", lambda self, *given: self)  # nothing learns
    shutil.copytree(first.drafter_training.shelf, tmp_path / "shelf")
    own = {"drafter_training.shelf": str(tmp_path / "shelf"), "drafter_training.share": "auto"}
    config = configure(tmp_path / "run", knobs | own)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, first)
    assert uses == [False, *[pays] * STEPS]
    known = [*hf_drafter.read_acceptance(entry_of(first))]
    assert asked == [known] * (1 if pays else STEPS)
    assert ("the drafter drafts from here on" in capsys.readouterr().out) == pays


def test_a_run_of_the_policy_that_was_trained_takes_it_too(first, knobs, configure, tmp_path):
    trained = configure(tmp_path / "run", knobs | {"model.path": run_folder.export(first)})
    found, _ = setups.best_on_shelf(setup_of(trained))
    assert found.directory == entry_of(first)
    other = configure(tmp_path / "run", knobs | {"train.seed": 1})
    found, said = setups.best_on_shelf(setup_of(other))
    assert found is None and "has none for this policy (1 for other policies" in said


def test_the_best_one_that_fits_is_taken(first, knobs, configure, tmp_path, caplog):
    copies = tmp_path / "shelf"
    config = configure(tmp_path / "run", knobs | {"drafter_training.shelf": str(copies)})

    def put(name, acceptance, **facts):
        at = copies / name
        shutil.copytree(entry_of(first), at)
        known = json.loads((at / shelf.FACTS).read_text())
        (at / shelf.FACTS).write_text(json.dumps(known | facts))
        (at / "acceptance.json").write_text(json.dumps({"acceptance": acceptance}))
        return at

    good = put("good", [0.5, 0.4])
    put("poor", [0.6, 0.1])
    put("other tokenizer", [0.9], tokenizer="another")
    put("other kind", [0.91], kind="eagle")
    put("other policy", [0.99], bases=["another"])
    with (put("damaged", [0.92]) / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        file.write(b"?")
    (put("no network", [0.93]) / "config.json").write_text("{}")
    found, said = setups.best_on_shelf(setup_of(config))
    assert found.directory == good and str(good) in said
    reasons = "another tokenizer", "changed on disk", "not a supported drafter"
    assert len(caplog.messages) == 3 and all(one in caplog.text for one in reasons)
    vocab = having(config, drafter_training__vocab=3)
    assert setups.best_on_shelf(setup_of(vocab))[0] is None
    for known, why in (
        ({"drafter_training__shelf": "off"}, "shelf is off"),
        ({"rollout__deterministic": True}, "deterministic"),
    ):
        assert why in setups.best_on_shelf(setup_of(having(config, **known)))[1]


@pytest.mark.parametrize("is_seen", [True, False])
def test_all_processes_take_what_the_first_finds_and_all_can_read(
    first, knobs, configure, tmp_path, monkeypatch, is_seen, caplog
):
    config, board, found = configure(tmp_path / "run", knobs), LocalBoard(), {}
    monkeypatch.setattr(
        setups, "best_on_shelf",
        lambda setup: (shelf.read(entry_of(first)) if setup.job.is_first else pytest.fail("not its choice"), "it is"),
    )  # fmt: skip
    is_file = Path.is_file
    monkeypatch.setattr(
        Path, "is_file",
        lambda path: (is_seen or threading.current_thread().name == "0") and is_file(path),
    )  # fmt: skip
    setup = setup_of(config)

    def run(process):
        given = replace(setup, job=Job(process, 2, board))
        found[process] = setups.with_start_drafter(given).config.drafter_training.start

    threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in range(2)]
    [thread.start() for thread in threads], [thread.join(60) for thread in threads]
    expected = str(entry_of(first)) if is_seen else "none"
    assert found == {0: expected, 1: expected}
    assert is_seen == ("cannot be read by process 1" not in caplog.text)


def test_a_drafter_trained_alone_is_left_too_and_begins_from_the_shelf(
    first, knobs, configure, tmp_path, capsys
):
    texts = tmp_path / "texts.jsonl"
    texts.write_text(
        "".join(json.dumps({"prompt": [1, 2], "response": [n, 3]}) + "\n" for n in range(4, 8))
    )
    own = {"drafter_training.texts": str(texts), "drafter_training.steps": 2}
    shutil.copytree(first.drafter_training.shelf, tmp_path / "shelf")
    own["drafter_training.shelf"] = str(tmp_path / "shelf")
    config = configure(tmp_path / "run", knobs | own)
    assert drafter_command.train(config) == cli.DONE
    assert "the drafter starts from" in capsys.readouterr().out
    one = shelf.read(entry_of(config))
    assert (one.steps, one.tokens, one.data) == (2, 8, str(texts))
    assert one.bases == shelf.read(entry_of(first)).bases
    again = having(config, drafter_training__steps=2)
    assert drafter_command.train(again) == cli.DONE
    assert "is finished" in capsys.readouterr().out


def test_the_command_lists_the_shelf(first, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["drafters", "--shelf", first.drafter_training.shelf])
    assert drafters_command.main() == cli.DONE
    said = capsys.readouterr().out
    assert entry_of(first).name in said and "acceptance by depth" in said


def test_other_commands_know_the_drafter_of_a_run_that_began_from_the_shelf(first, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(first.run, run)
    shutil.copytree(entry_of(first), run / run_folder.START_DRAFTER)
    config = having(first, run=str(run), drafter_training__kind="dflash")
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    assert from_config.drafter_config(config, model).kind == "eagle3"


def test_an_engine_begins_anew_whatever_is_in_the_folder_of_a_run(first, tmp_path):
    """The knob `run` of an engine means nothing."""
    run = tmp_path / "run"
    shutil.copytree(first.run, run)
    shutil.copytree(entry_of(first), run / run_folder.START_DRAFTER)
    config = having(
        first, run=str(run), model__path=str(run_folder.export(first)), speculation__tuner="fixed"
    )
    with Rollouts.opened(config) as opened:
        assert opened.fixed_drafter is None
