"""Laws of the training loop: resume is exact, each step is written once, and errors are counted or named."""

from __future__ import annotations

import errno
import json
import re
import shutil
import signal
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import toy_rewards
from jobs import Job, run_until
from training_runs import (
    STEPS,
    assert_close,
    assert_equal,
    assert_same_bits,
    completions,
    die,
    evaluated,
    events,
    having,
    preempt,
    raise_at,
    saved_steps,
    spied,
    state_of,
    stopped_after,
)

from tlt_jax import cli, eval, run_folder
from tlt_jax.checkpoint import index as checkpoints
from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, load as configuration
from tlt_jax.data import dataset as datasets, prompt_format
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import CheckpointError, ConfigError, DataError, Diverged
from tlt_jax.metrics import evaluations
from tlt_jax.models import from_config, hf
from tlt_jax.rollout.engine import Engine
from tlt_jax.train import (
    batch as batches,
    evaluation,
    loop,
    policy_update,
    sft,
    startup,
    step_metrics,
)
from tlt_jax.train.evaluation import Evaluated, Evaluator
from tlt_jax.tuner import baselines

DRAFTED = {
    "speculation.drafter": "ngram",
    "speculation.tuner": "beg_mab",
    "speculation.strategies": ["2_2_4"],
}


@pytest.fixture(scope="module")
def whole(shared, configure):
    """A finished run over more than two epochs of three problems, every step saved. Tests copy it, none writes to it."""
    files = {
        "data.train": shared / "rows.jsonl",
        "model.tokenizer": shared / "tokenizer",
        "checkpoint.export": True,
        "eval.correct_at": 0.5,
    }
    config = configure(shared / "whole", files | {"checkpoint.best_metric": "eval/mean@2"})
    assert loop.train(config) == cli.DONE
    return config


def chosen(config: Config) -> dict[str, list[dict]]:
    """Speculation file -> the chunks in it."""
    files = sorted((Path(config.run) / "speculation").glob("*"))
    return {f.name: [json.loads(line) for line in f.read_text().splitlines()] for f in files}


def test_a_run_learns_writes_each_step_once_and_saves_it(whole):
    assert saved_steps(whole) == [0, 1, 2, 3, 4]  # 0: the baseline is the best so far
    first, last = state_of(whole, 0), state_of(whole)
    assert (int(last.step), int(last.skipped)) == (STEPS, 0)
    assert any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(*map(jax.tree.leaves, (first, last)), strict=True)
    )
    written = events(whole)
    for name in (
        "reward/mean",
        "response_length/p75",
        "actor/entropy",
        "timing_s/step",
        "training/epoch",
    ):
        assert [step for step, _ in written[name]] == [1, 2, 3, 4], name
    assert [step for step, _ in written["eval/mean@2"]] == [0, 2, 4]
    assert written["training/epoch"][-1][1] == pytest.approx(4 * 2 / 3)
    assert max(value for _, value in written["actor/rollout_logprob_diff_max"]) < 1e-4
    assert {name: len(lines) for name, lines in completions(whole).items()} == {
        f"00000{n}.jsonl": 6 for n in (1, 2, 3, 4)
    }


def test_a_run_keeps_the_answers_of_its_evaluations(whole):
    assert sorted(evaluated(whole)) == [f"00000{n}.jsonl" for n in (0, 2, 4)]
    prompts = datasets.load(whole, prompt_format.tokenizer_of(whole)).part()
    for index, step in enumerate((0, 2, 4)):
        answers = evaluations.read(evaluations.path_of(whole.run, step))
        found = [(one.id, one.prompt, one.reference, one.sample) for one in answers]
        assert found == [
            (one.id, one.text, one.row["answer"], n) for one in prompts for n in (0, 1)
        ]
        rewards = [one.reward for one in answers]
        assert rewards == [toy_rewards.digest("", one.completion, {}) for one in answers]
        assert np.mean(rewards) == pytest.approx(events(whole)["eval/mean@2"][index][1])
        assert [one.is_correct for one in answers] == [one >= 0.5 for one in rewards]


def test_a_finished_run_says_so_and_another_configuration_is_refused(whole, monkeypatch, capsys):
    monkeypatch.setattr(policy_update, "update", None)
    assert loop.train(whole) == cli.DONE
    assert "is finished: it has all 4 steps" in capsys.readouterr().out
    assert configuration.parse(["--run", whole.run]) == whole
    moved = having(whole, mesh__data=1, log__trackers=[])
    assert loop.train(moved) == cli.DONE
    assert configuration.read(Path(whole.run) / "config.yaml") == moved
    other = having(whole, optim__learning_rate=0.5, train__seed=1)
    with pytest.raises(ConfigError) as refused:
        loop.train(other)
    text = str(refused.value)
    assert "other values of train.seed (0 there, 1 here): use those of" in text and "\n" not in text
    assert loop.train(whole) == cli.DONE


def copied(config: Config, run: Path, **knobs) -> Config:
    """A copy of a finished run, with other values of knobs."""
    shutil.copytree(config.run, run)
    return having(config, run=str(run), **knobs)


def test_a_finished_run_is_made_longer_and_ends_as_one_that_was_so_from_the_start(whole, tmp_path):
    short = having(whole, run=str(tmp_path / "run"), train__steps=2)
    assert loop.train(short) == cli.DONE
    longer = having(short, train__steps=STEPS, eval__samples=1, checkpoint__best_metric="")
    assert loop.train(longer) == cli.DONE
    assert_same_bits(longer, whole)
    assert configuration.read(tmp_path / "run" / "config.yaml") == longer
    (note,) = map(json.loads, (tmp_path / "run" / "changes.jsonl").read_text().splitlines())
    assert (note["step"], note["changes"]) == (2, {"eval.samples": [2, 1]}), (
        "nothing else is recorded"
    )


def test_a_schedule_over_the_steps_says_so_when_there_are_more(whole, tmp_path, configure):
    config = having(whole, run=str(tmp_path / "run"), optim__schedule="cosine")
    (tmp_path / "run" / "checkpoints" / "3").mkdir(parents=True)
    run_folder.enter(config)
    longer = having(config, train__steps=8)
    with pytest.raises(
        ConfigError,
        match=r"train.steps .4 there, 8 here. .optim.schedule cosine takes the learning rate of every step from it.: "
        "use those of .*, or --override to resume with these from step 3",
    ):
        run_folder.enter(longer)
    run_folder.enter(replace(longer, override=True))
    assert not configuration.read(tmp_path / "run" / "config.yaml").override, (
        "it must be passed again each time"
    )
    run_folder.enter(longer)


def test_what_changes_updates_resumes_with_override_and_is_recorded_with_its_step(whole, tmp_path):
    changed = copied(
        whole, tmp_path / "run", train__steps=5, optim__learning_rate=0.02, optim__schedule="linear",
        algorithm__minibatches=2,
    )  # fmt: skip
    with pytest.raises(
        ConfigError,
        match=r"algorithm.minibatches .1 there, 2 here.*optim.learning_rate .0.01 there, 0.02 here.*"
        r"use .* --override .* step 4",
    ):
        loop.train(changed)
    assert loop.train(replace(changed, override=True)) == cli.DONE
    assert saved_steps(changed)[-1] == 5
    (note,) = map(json.loads, (tmp_path / "run" / "changes.jsonl").read_text().splitlines())
    expected = {
        "algorithm.minibatches": [1, 2],
        "optim.learning_rate": [0.01, 0.02],
        "optim.schedule": ["constant", "linear"],
        "train.steps": [4, 5],
    }
    assert (note["step"], note["changes"]) == (4, expected)
    assert events(changed)["actor/lr"][-1] == (5, pytest.approx(0.02 * (1 - 4 / 5)))
    assert loop.train(changed) == cli.DONE, "it is this run's value now"
    seed = having(changed, train__seed=7, override=True)
    with pytest.raises(
        ConfigError, match="other values of train.seed .0 there, 7 here.: use those"
    ):
        loop.train(seed)
    kl = having(changed, algorithm__kl_coef=0.1, override=True)
    with pytest.raises(ConfigError, match="other values of algorithm.kl_coef .0.0 there, 0.1 here"):
        loop.train(kl)


HOLDER = """
import sys, time
from tlt_jax import run_folder
with run_folder.locked(sys.argv[1]):
    print("held", flush=True)
    time.sleep(120)
"""


def test_a_second_run_in_a_folder_is_refused_by_name_and_a_kill_releases_the_lock(whole, tmp_path):
    config = copied(whole, tmp_path / "run")
    command = [sys.executable, "-c", HOLDER, config.run]
    holder = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert holder.stdout.readline() == "held\n"
    before = files_of(Path(config.run))
    who = rf"is in use by process {holder.pid} on \S+ since \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d: wait for it"
    with pytest.raises(ConfigError, match=who):
        loop.train(config)
    assert files_of(Path(config.run)) == before
    holder.kill()
    holder.wait()
    assert loop.train(config) == cli.DONE


def test_a_file_system_without_locks_is_used_and_reported(tmp_path, monkeypatch, caplog):
    def fails(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(run_folder.fcntl, "flock", fails)
    with run_folder.locked(str(tmp_path / "run")):
        assert "cannot be locked (No locks available): start no second run in it" in caplog.text


def test_a_longer_run_that_died_before_its_export_has_the_new_policy_in_the_end(
    whole, tmp_path, monkeypatch, capsys
):
    config = copied(whole, tmp_path / "run", train__steps=5)
    policy = tmp_path / "run" / "hf" / "model.safetensors"
    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="killed here"):
        raise_at(patch, loop.hf, "save_whole", 1, die)
        loop.train(config)
    assert saved_steps(config)[-1] == 5
    earlier = policy.read_bytes()
    assert loop.train(config) == cli.DONE
    assert policy.read_bytes() != earlier
    assert "is finished" not in capsys.readouterr().out
    assert loop.train(config) == cli.DONE and "is finished" in capsys.readouterr().out


def stopped(config: Config, monkeypatch, target, name: str, number: int) -> Config:
    """The run, which gets SIGTERM before call `number` of a function."""
    with monkeypatch.context() as patch:
        raise_at(patch, target, name, number, preempt)
        assert loop.train(config) == cli.PREEMPTED
    return config


def test_sigterm_in_the_warm_start_saves_nothing_and_says_so(whole, tmp_path, monkeypatch, capsys):
    warm = {"sft__steps": 1, "sft__solution_column": "prompt"}
    config = having(whole, run=str(tmp_path), **warm)
    stopped(config, monkeypatch, startup, "new_state", 1)
    assert saved_steps(config) == []
    said = f"{config.run} was stopped before its first step: the same command starts again"
    assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("target", "name", "number", "saved"),
    [(Evaluator, "evaluate", 3, STEPS), (evaluation, "collected", 3, 1)],
    ids=["last evaluation", "rewards"],
)
def test_sigterm_saves_and_the_run_resumes_to_the_same_bits(
    whole, tmp_path, monkeypatch, capsys, target, name, number, saved
):
    config = having(whole, run=str(tmp_path), checkpoint__every=0)
    stopped(config, monkeypatch, target, name, number)
    place = Path(config.run) / "checkpoints" / str(saved)
    shown = capsys.readouterr().out
    assert f"was stopped, and is saved in {place}: the same command resumes from there" in shown
    assert saved_steps(config)[-1] == saved
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, whole)
    assert events(config)["eval/mean@2"] == events(whole)["eval/mean@2"]
    with (
        Store(config.run, best_metric="eval/mean@2", create=False) as ours,
        Store(whole.run, create=False) as theirs,
    ):
        assert ours.index(STEPS)["metrics"] == theirs.index(STEPS)["metrics"] != {}
        best = ours.index(ours.best())["metrics"]["eval/mean@2"]
        assert best == pytest.approx(max(dict(events(whole)["eval/mean@2"]).values()))
    assert (tmp_path / "hf" / "model.safetensors").is_file()


def test_sigterm_before_the_loop_ends_the_command_as_one_in_it_does(whole, tmp_path):
    with Job(replace(whole, run=str(tmp_path / "run"))) as job:
        maps = Path(f"/proc/{job.started[0].pid}/maps")
        job.wait_for(lambda: "jaxlib" in maps.read_text())
        job.send(signal.SIGTERM)
        codes = job.wait()
    said_so = "stopped: the same command starts again, or resumes from the last checkpoint\n"
    assert (codes, job.said()) == ([cli.PREEMPTED], said_so)


def test_a_killed_process_loses_nothing_that_was_saved(whole, tmp_path):
    """kill -9 during a save, then the remaining steps: by the command, in a subprocess."""
    config = replace(whole, run=str(tmp_path / "run"))
    assert run_until(config, "checkpoints/3*", signal.SIGKILL) == -signal.SIGKILL
    assert STEPS not in saved_steps(config)
    assert loop.train(config) == cli.DONE
    assert_same_bits(config, whole)
    assert evaluated(config) == evaluated(whole)
    ours, theirs = events(config), events(whole)
    for name in ("reward/mean", "actor/loss", "actor/grad_norm", "eval/mean@2", "eval/pass@1"):
        assert ours[name] == theirs[name], name
    assert [step for step, _ in ours["timing_s/step"]] == [1, 2, 3, 4], "each is written once"


def test_a_run_resumes_on_another_mesh(whole, tmp_path):
    config = stopped_after(2, whole, tmp_path / "run")
    config = having(config, mesh__data=1, mesh__model=2)
    assert loop.train(config) == cli.DONE
    assert completions(config) == completions(whole)
    assert_close(config, having(whole, mesh=config.mesh), atol=2e-4)


@pytest.fixture(scope="module")
def drafted(shared, configure):
    """A finished run that drafts, every step saved. Tests copy it, none writes to it.

    Its tuner starts with a reward of plain decoding, and its next nine choices do not explore:
    its first prediction does not depend on the measured seconds of earlier chunks.
    """
    files = {"data.train": shared / "rows.jsonl", "model.tokenizer": shared / "tokenizer"}
    config = configure(shared / "drafted", DRAFTED | files | {"train.steps": 3, "eval.every": 0})
    with pytest.MonkeyPatch.context() as patched:
        known = {**baselines.begin_beg_mab(), "choices": 20, "rewards": {"3/off": [100.0]}}
        patched.setattr(baselines, "begin_beg_mab", lambda: known)
        assert loop.train(config) == cli.DONE
    return config


def test_drafting_changes_no_bit_of_a_run(drafted, whole):
    assert [*completions(drafted).items()] == [*completions(whole).items()][:3]
    assert_equal(state_of(drafted, 3), state_of(whole, 3))
    measured = events(drafted)
    for name in (
        "accept_length/ngram",
        "share",
        "accept_rate@1",
        "nodes@3",
        "round_ms@3",
        "pool_programs",
        "pool_mib",
    ):
        assert measured[f"speculation/{name}"], "some chunk drafted"


def tuner_of(config: Config, step: int) -> dict:
    """The tuner's state in the checkpoint of a step."""
    with Store(config.run, create=False) as store:
        return store.index(step)["meta"]["tuner"]


def states_of(monkeypatch) -> list[dict]:
    """The tuner's state at every rollout from now on."""
    return spied(monkeypatch, Engine, "run", lambda _, request, weights, tuner, **rest: tuner)


def test_a_resumed_run_continues_with_what_its_tuner_learned(drafted, tmp_path, monkeypatch):
    learned = [tuner_of(drafted, step)["state"] for step in (1, 2, 3)]
    assert 20 < learned[0]["choices"] < learned[1]["choices"] < learned[2]["choices"]
    config = stopped_after(2, drafted, tmp_path / "run")
    states = states_of(monkeypatch)
    assert loop.train(config) == cli.DONE
    assert states[0] == learned[1]
    assert list(chosen(config)) == list(chosen(drafted))
    assert chosen(config)["000002.jsonl"] == chosen(drafted)["000002.jsonl"]
    assert_same_bits(config, drafted)


def test_every_chunk_that_ran_is_written_with_what_was_predicted_and_measured(drafted, whole):
    assert not chosen(whole), "no strategy is chosen where none may draft"
    assert list(chosen(drafted)) == [f"00000{n}.jsonl" for n in (1, 2, 3)]
    for name, lines in chosen(drafted).items():
        assert sum(line["tokens"] for line in lines) == sum(
            answer[5] for answer in completions(drafted)[name]
        )
        for line in lines:
            assert line["strategy"] in ("off", "2_2_4")
            assert line["measured"] * line["seconds"] == pytest.approx(line["tokens"])
            assert line["strategy"] == "off" or sum(line["accepted"]) >= line["rounds"]
            assert line["predicted"] is None or line["predicted"] > 0
        known = {"never tried": {False}, "best median": {True}, "epsilon": {False, True}}
        tried = [line for line in lines if ", while" not in line["reason"]]  # another one ran
        assert all((line["predicted"] is not None) in known[line["reason"]] for line in tried)
    first = [(line["reason"], line["predicted"]) for line in chosen(drafted)["000001.jsonl"]]
    assert ("never tried", None) in first
    assert ("best median", 3 * 100.0) in first, "three live rows at the reward known before"


def test_other_strategies_reset_the_tuner_and_change_no_bit(drafted, tmp_path, monkeypatch, caplog):
    config = stopped_after(2, drafted, tmp_path / "run")
    config = having(config, speculation__strategies=["1_1_2"])
    states = states_of(monkeypatch)
    assert loop.train(config) == cli.DONE
    assert states[0] == baselines.begin_beg_mab()
    lines = [line for line in caplog.messages if "tuner" in line]
    assert lines == [
        "the tuner starts from scratch: its saved state is of another speculation.strategies"
    ]
    assert_equal(state_of(config, 3), state_of(drafted, 3))


def test_updates_that_are_not_finite_stop_the_run_and_keep_its_weights(
    whole, tmp_path, monkeypatch, capsys
):
    config = stopped_after(1, whole, tmp_path / "run")
    before = state_of(config, 1)
    monkeypatch.setattr(
        batches, "answer_advantages", lambda rewards, *_: np.full(rewards.shape, np.nan)
    )
    assert loop.train(config) == cli.DIVERGED
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert line.startswith(
        "error: step 4: 3 updates in a row were not finite: lower optim.learning_rate"
    )
    assert saved_steps(config) == [0, 1, 2, 3]
    after = state_of(config, 3)
    assert_equal(after.params, before.params)
    assert_equal(after.opt_state, before.opt_state)
    assert (int(after.skips), int(after.skipped)) == (2, 2)
    assert [value for _, value in events(config)["actor/nonfinite"]] == [0, 1, 2, 3]


def test_answers_and_updates_that_are_not_finite_are_said_and_a_run_without_an_update_fails(
    whole, tmp_path, monkeypatch, capsys
):
    """A NaN embedding of the digit 1, which one of step 1's two prompts has; two steps, so that three skips never come."""
    load, token = (
        from_config.load_policy,
        prompt_format.tokenizer_of(whole).convert_tokens_to_ids("1"),
    )

    def broken(*args):
        params = load(*args)
        return params.replace(embed=params.embed.at[token].set(np.nan))

    def advantages(rewards, *_):
        return np.full(rewards.shape, np.nan)

    untied = whole.model.init | {"tie_word_embeddings": False}
    config = having(
        whole, run=str(tmp_path / "run"), model__init=untied, train__steps=2, eval__every=0,
        checkpoint__best_metric="",
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(from_config, "load_policy", broken)
        patch.setattr(batches, "answer_advantages", advantages)
        assert loop.train(config) == cli.DIVERGED
    said = capsys.readouterr()
    assert "error: step 2: every update of the run was skipped, because none was finite" in said.err
    assert "is done" not in said.out and not Path(config.run, "hf").exists()
    for step, (_, count) in enumerate(events(config)["response_length/nonfinite"], 1):
        (line,) = [one for one in said.out.splitlines() if one.startswith(f"step {step}/2  reward")]
        assert 0 < count < 6 and f"nonfinite {count:.0f}" in line
        assert f"step {step}/2  1 of 1 updates were skipped: not finite" in said.out

    with monkeypatch.context() as patch:  # a run that had two updates before
        patch.setattr(batches, "answer_advantages", advantages)
        assert loop.train(stopped_after(2, whole, tmp_path / "later")) == cli.DONE
    _, end = capsys.readouterr().out.split("is done:\n")
    assert end.splitlines()[0] == "  note         2 of 4 updates were skipped: not finite"


def test_rewards_that_raise_or_hang_are_counted_and_do_not_stop_the_run(
    shared, configure, tmp_path
):
    rows = [
        {"prompt": f"{n}{n}{n}:", "answer": "hang" if n == 0 else "raise"} for n in (0, 1, 2, 3)
    ]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    knobs = {
        "data.train": tmp_path / "rows.jsonl", "model.tokenizer": shared / "tokenizer", "data.eval_size": 0,
        "eval.every": 0, "train.steps": 2, "reward.terms": {"toy_rewards:trouble": 1.0}, "reward.timeout_s": 0.3,
        "reward.failure_score": -0.5,
    }  # fmt: skip
    config = configure(tmp_path / "run", knobs)
    assert loop.train(config) == cli.DONE
    written = events(config)
    assert sum(value for _, value in written["reward/failures/timeout"]) == 3
    assert sum(value for _, value in written["reward/failures/error"]) == 9
    assert [value for _, value in written["reward/mean"]] == [-0.5, -0.5]
    assert [value for _, value in written["groups/zero_variance"]] == [1, 1]


def test_the_best_checkpoint_is_kept_next_to_the_newest(configure, tmp_path, monkeypatch, caplog):
    measured = iter([0.1, 0.3, 0.9, 0.2, 0.4, 0.3, 0.2, 0.1])
    monkeypatch.setattr(
        Evaluator,
        "evaluate",
        lambda self, weights, tuner, *_: Evaluated({"eval/mean@2": next(measured)}, tuner, []),
    )
    knobs = {
        "eval.every": 1,
        "checkpoint.every": 0,
        "checkpoint.keep": 1,
        "checkpoint.best_metric": "eval/mean@2",
    }
    config = configure(tmp_path, knobs)
    assert loop.train(config) == cli.DONE
    assert saved_steps(config) == [2, 4]
    with Store(config.run, 1, "eval/mean@2", create=False) as store:
        assert store.best() == 2

    longer = having(config, train__steps=6, eval__temperature=0.5)
    assert loop.train(longer) == cli.DONE
    assert "from step 4 on: eval.temperature (1.0 there, 0.5 here)" in caplog.text
    assert "evaluations up to step 4 are not comparable with later ones" in caplog.text
    assert saved_steps(longer) == [5, 6], "0.3, the best since the change, and the newest"

    longest = having(longer, train__steps=7, eval__every=7)
    caplog.clear()
    assert loop.train(longest) == cli.DONE
    assert "from step 6 on: eval.every (1 there, 7 here)" in caplog.text
    assert "not comparable" not in caplog.text and saved_steps(longest) == [5, 7]


def test_the_exported_policy_is_the_last_state(whole):
    exported = Path(whole.run) / "hf"
    model = from_config.model_config(whole, prompt_format.tokenizer_of(whole))
    params = hf.load(exported, model, meshes.make_mesh(2, 1), "float32")
    last = state_of(whole).params
    assert_equal(
        params.replace(embed=params.embed[: model.vocab_size]),
        last.replace(embed=last.embed[: model.vocab_size]),
    )
    assert not list(Path(whole.run).glob("*.partial"))


def evaluated_by_command(monkeypatch, capsys, *words: str) -> tuple[list[dict], str]:
    """The objects that `tlt eval` prints, and what it says."""
    monkeypatch.setattr("tlt_jax.cli.set_environment", lambda config: None)
    monkeypatch.setattr(sys, "argv", ["eval", *words])
    assert eval.main() == 0
    out, err = capsys.readouterr()
    return [json.loads(line) for line in out.splitlines()], err


@pytest.mark.parametrize("step, where", [("best", "checkpoints/"), ("last", "hf")])
def test_a_step_of_a_run_is_evaluated_as_in_training(
    whole, tmp_path, monkeypatch, capsys, step, where
):
    config = copied(whole, tmp_path / "run")
    with Store(config.run, 9, "eval/mean@2", create=False) as store:
        number = {"last": 4, "best": store.best()}[step]
    kept = evaluated(config)
    shutil.rmtree(tmp_path / "run" / "evaluation")
    (found,), said = evaluated_by_command(monkeypatch, capsys, "--run", config.run, "--step", step)
    assert found == pytest.approx({
        name: dict(values)[number] for name, values in events(config).items() if name.startswith("eval/")
    })  # fmt: skip
    assert evaluated(config) == {f"00000{number}.jsonl": kept[f"00000{number}.jsonl"]}
    first, *_ = said.splitlines()
    assert first.startswith(f"weights: step {number} of {config.run} (") and where in first
    assert "2 rows of eval" in said and "prompts: text as it is, temperature 1" in said


def test_other_rows_and_numbers_of_answers_are_evaluated_and_kept_apart(
    whole, shared, tmp_path, monkeypatch, capsys
):
    config = copied(whole, tmp_path / "run")
    kept, source = evaluated(config)["000004.jsonl"], str(shared / "rows.jsonl")
    words = ["--run", config.run, "--split", "train", "--split", source, "--k", "1,3"]
    (train, file), said = evaluated_by_command(monkeypatch, capsys, *words)
    assert (train["split"], file["split"]) == ("train", source)
    assert {"eval/mean@1", "eval/mean@3", "eval/pass@1", "eval/pass@3"} < train.keys()
    assert "3 rows of train" in said and f"5 rows of {source}, 3 answers each" in said
    path = evaluations.path_of(config.run, 4)
    assert path.read_text().startswith(kept)
    rows = evaluations.by_row(evaluations.read(path))
    sizes = Counter((split, len(answers)) for (split, _), answers in rows.items())
    assert sizes == {("eval", 2): 2, ("train", 3): 3, (source, 3): 5}
    firsts = [answers[0].reward for (split, _), answers in rows.items() if split == source]
    assert file["eval/mean@1"] == pytest.approx(np.mean(firsts))


def test_a_damaged_file_of_answers_is_named_before_anything_is_decoded(
    whole, tmp_path, monkeypatch, capsys
):
    config = copied(whole, tmp_path / "run")
    path = evaluations.path_of(config.run, 4)
    path.write_text("{}\n")
    with pytest.raises(SystemExit) as stopped:
        evaluated_by_command(monkeypatch, capsys, "--run", config.run)
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and not out, "no metrics: nothing was evaluated"
    assert f"{path}:1 is no answer of an evaluation" in err.splitlines()[-1]


def test_the_start_policy_is_evaluated_only_when_it_is_said(whole, tmp_path, monkeypatch, capsys):
    (tmp_path / "config.yaml").write_text(configuration.to_yaml(whole))
    before = evaluated(whole)
    words = ["--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "start.jsonl")]
    (found,), said = evaluated_by_command(monkeypatch, capsys, *words)
    assert said.startswith(
        "weights: a new model with random weights (model.init), where the config"
    )
    assert f"{whole.run} has trained 4 steps: --run {whole.run} without --config" in said
    assert evaluated(whole) == before, "the run's evaluations are of what it trained"
    assert (tmp_path / "start.jsonl").read_text() == before["000000.jsonl"]


def test_minibatches_and_a_reference_start_at_ratio_1_and_kl_0(configure, tmp_path, monkeypatch):
    knobs = {
        "algorithm.kl_coef": 0.1,
        "algorithm.minibatches": 2,
        "algorithm.importance": "token",
        "eval.every": 0,
    }
    config = configure(tmp_path / "run", knobs)
    updates = spied(monkeypatch, step_metrics, "of_update", lambda *given: given[0])
    written = spied(monkeypatch, hf, "save_whole", lambda *given, **_: given[2].name)
    assert loop.train(config) == cli.DONE
    assert [len(one) for one in updates] == [2] * STEPS
    assert float(updates[0][0]["kl"]) == pytest.approx(0, abs=1e-6)
    assert float(updates[-1][0]["kl"]) > 1e-4
    for first, second in updates:
        assert float(first["ratio_mean"]) == pytest.approx(1, abs=1e-5)
        assert abs(float(second["ratio_mean"]) - 1) > 1e-5
        assert float(first["rollout_corr/rollout_is_mean"]) == pytest.approx(1, abs=1e-3)
    assert int(state_of(config).step) == 2 * STEPS
    assert written == ["reference"]

    again = stopped_after(2, config, tmp_path / "again")
    place = tmp_path / "again" / "reference"
    made_from, weights = place / "made_from.json", place / "model.safetensors"
    kept = made_from.read_text()
    made_from.write_text(kept.replace('"train.seed": "0"', '"train.seed": "5"'))
    with pytest.raises(
        CheckpointError, match="reference was made with train.seed 5, this run has 0"
    ):
        loop.train(again)
    made_from.write_text(kept)
    content = bytearray(weights.read_bytes())
    content[-3] ^= 0x40
    weights.write_bytes(content)
    with pytest.raises(CheckpointError, match="reference is corrupt .* changed on disk"):
        loop.train(again)
    shutil.rmtree(place)
    with pytest.raises(CheckpointError, match="reference is missing: the KL term needs the start"):
        loop.train(again)


def test_the_warm_start_learns_and_is_read_from_its_cache_the_second_time(
    configure, tmp_path, monkeypatch, capsys
):
    knobs = {"sft.steps": 8, "sft.batch": 8, "sft.learning_rate": 0.03, "sft.cache": tmp_path / "cache",
             "eval.every": 0, "train.steps": 2, "reward.terms": {"task": 1.0}}  # fmt: skip
    config = configure(tmp_path / "run", knobs)
    monkeypatch.setattr(sft, "LOG_EVERY", 1)
    assert loop.train(config) == cli.DONE
    losses = events(config)["sft/loss"]
    assert [step for step, _ in losses] == list(range(1, 9))
    assert losses[-1][1] < losses[0][1] - 0.2
    updates = spied(monkeypatch, batches, "solutions")
    again = replace(config, run=str(tmp_path / "again"))
    assert loop.train(again) == cli.DONE
    assert not updates
    (cached,) = (tmp_path / "cache").iterdir()
    assert f"warm start: read from {cached}" in capsys.readouterr().out
    assert_equal(state_of(again, 2), state_of(config, 2))
    resumed = stopped_after(1, config, tmp_path / "resumed")
    assert loop.train(resumed) == cli.DONE
    for name in ("sft/loss", "sft/lr", "reward/mean"):
        assert events(resumed)[name] == events(config)[name], name
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    others = {
        "sft.learning_rate": 0.02,
        "sft.steps": 9,
        "train.seed": 1,
        "mesh.data": 1,
    }

    def folder(changes):
        changed = configure(tmp_path / "run", knobs | changes)
        return sft.cache_folder(
            changed, model, datasets.load(changed, prompt_format.tokenizer_of(changed))
        )

    kept = {folder({name: value}) for name, value in others.items()}
    assert len(kept | {folder({})}) == len(others) + 1 and None not in kept
    assert folder({"sft.cache": "off"}) is None


@pytest.mark.parametrize(
    "knobs, what",
    [
        ({"sft.steps": 8, "sft.learning_rate": 1e30}, "its loss is not finite since step 2 of 8"),
        (
            {"sft.steps": 1, "sft.learning_rate": 1e39},
            "its weights are not finite after step 1 of 1",
        ),
    ],
)
def test_a_warm_start_that_diverges_ends_by_name_and_keeps_nothing(
    configure, tmp_path, monkeypatch, knobs, what
):
    monkeypatch.setattr(sft, "LOG_EVERY", 1)
    given = {"sft.batch": 8, "sft.cache": tmp_path / "cache", "reward.terms": {"task": 1.0}}
    config = configure(tmp_path / "run", given | knobs)
    with pytest.raises(Diverged, match=f"{what}: lower sft.learning_rate") as error:
        loop.train(config)
    assert error.value.code == 1 and "\n" not in str(error.value)
    assert not (tmp_path / "cache").exists() and not saved_steps(config)


def test_a_warm_start_is_cached_by_the_content_of_its_rows(tmp_path, shared, configure):
    source = tmp_path / "rows.jsonl"
    found = set()
    for solution in ("1: 2 3", "1: 2 4", "1: 2 3"):
        rows = [{"prompt": f"{n}", "answer": "3", "solution": solution} for n in range(1, 5)]
        source.write_text("".join(json.dumps(row) + "\n" for row in rows))
        knobs = {
            "data.train": source,
            "data.eval_size": 1,
            "model.tokenizer": shared / "tokenizer",
            "sft.steps": 2,
            "sft.cache": tmp_path / "cache",
        }
        config = configure(tmp_path / "run", knobs)
        dataset = datasets.load(config, prompt_format.tokenizer_of(config))
        model = from_config.model_config(config, dataset.encoder.tokenizer)
        found.add(sft.cache_folder(config, model, dataset))
    assert len(found) == 2


def test_a_checkpoint_of_another_run_is_refused_by_name(whole, tmp_path):
    """Its config.yaml is missing, so only the checkpoint knows the settings it was saved with; nor do names show other rows."""
    config = stopped_after(2, whole, tmp_path / "run")
    (Path(config.run) / "config.yaml").unlink()
    with pytest.raises(CheckpointError, match="another run: train.seed is 0 there and 9 here"):
        loop.train(having(config, train__seed=9))
    (Path(config.run) / "config.yaml").unlink()
    source = Path(config.data.train)
    before = source.read_text()
    rows = [json.loads(line) for line in before.splitlines()]
    try:
        source.write_text("".join(json.dumps(row | {"answer": "7"}) + "\n" for row in rows))
        with pytest.raises(CheckpointError, match="another run: the digest of its rows is"):
            loop.train(config)
    finally:
        source.write_text(before)


def test_a_file_in_the_place_of_a_folder_is_named(whole, tmp_path):
    for name in ("tensorboard", "completions", "checkpoints", "timeline"):
        run = tmp_path / name
        run.mkdir()
        (run / name).write_text("")
        with pytest.raises(ConfigError, match=f"{name}/{name} is no folder: move it away"):
            loop.train(replace(whole, run=str(run)))


def test_a_damaged_checkpoint_is_set_aside_and_what_a_killed_export_left_is_removed(
    whole, tmp_path, caplog
):
    config = stopped_after(3, whole, tmp_path / "run")
    saved, left = Path(config.run) / "checkpoints", Path(config.run) / "hf.123.partial"
    left.mkdir()
    assert (saved / "2").is_dir()
    for path in (saved / "3" / "policy").rglob("d/*"):
        path.write_bytes(b"damaged")
    assert loop.train(config) == cli.DONE
    (said,) = [one for one in caplog.messages if "it is set aside" in one]
    assert re.search("3 is corrupt .*: the run resumes from step 2", said) and "\n" not in said
    assert (saved / "damaged" / "3").is_dir() and not left.exists()
    assert_same_bits(config, whole)


def files_of(folder: Path) -> dict[str, bytes]:
    """The files of a run folder, without logs."""
    found = {str(path.relative_to(folder)): path for path in folder.rglob("*") if path.is_file()}
    return {
        name: path.read_bytes()
        for name, path in found.items()
        if name not in ("log.txt", "config.yaml", "lock")
    }


@pytest.mark.parametrize("kind", ["all damaged", "set aside by hand", "a file system that fails"])
def test_a_run_that_had_checkpoints_never_starts_from_scratch_by_itself(
    whole, tmp_path, monkeypatch, kind
):
    config = stopped_after(2, whole, tmp_path / "run")
    saved = Path(config.run) / "checkpoints"
    if kind == "all damaged":
        for path in saved.glob("*/policy/**/d/*"):
            path.write_bytes(b"damaged")
    elif kind == "set aside by hand":
        (saved / "damaged").mkdir()
        for path in saved.glob("[0-9]*"):
            path.rename(saved / "damaged" / path.name)
    else:
        stale = OSError(errno.ESTALE, "Stale file handle")
        monkeypatch.setattr(checkpoints, "read", lambda *_: (_ for _ in ()).throw(stale))
    before = files_of(Path(config.run))
    expected = {
        "all damaged": "/0 is corrupt .*: no other checkpoint exists; a new run needs another run folder",
        "set aside by hand": "holds only damaged checkpoints: a new run needs another run folder",
        "a file system that fails": "/2 cannot be read .*Stale file handle.: it may be intact",
    }[kind]
    for _ in range(2):  # the same command again gives the same error
        with pytest.raises(CheckpointError, match=expected):
            loop.train(config)
    after = files_of(Path(config.run))
    moved = {
        name.replace("checkpoints/damaged/", "checkpoints/"): file for name, file in after.items()
    }
    assert (moved if kind == "all damaged" else after) == before, "nothing is deleted or written"


def test_a_step_of_failed_rewards_says_why_and_three_end_the_run(whole, tmp_path, capsys):
    terms = {"toy_rewards:lost": 1.0}
    config = having(whole, run=str(tmp_path / "run"), reward__terms=terms, eval__every=0)
    assert loop.train(config) == cli.DIVERGED
    shown = capsys.readouterr()
    assert "rewards failed; the first: error: toy_rewards:lost: " in shown.out
    assert "error: step 3: every reward failed, 3 steps in a row: correct it" in shown.err


def test_a_policy_whose_logits_are_not_finite_ends_the_run_by_name(
    whole, tmp_path, monkeypatch, capsys
):
    load = from_config.load_policy

    def broken(*args):
        return jax.tree.map(lambda leaf: leaf * np.nan, load(*args))

    monkeypatch.setattr(from_config, "load_policy", broken)
    config = having(whole, run=str(tmp_path / "run"), eval__every=0)
    assert loop.train(config) == cli.DIVERGED
    assert "step 1: the policy's logits are not finite in any answer" in capsys.readouterr().err
    answers = [answer for step in completions(config).values() for answer in step]
    assert {answer[5:7] for answer in answers} == {(1, "nonfinite")}
    ((_, count),) = events(config)["response_length/nonfinite"]
    assert count == len(answers)


def test_a_run_that_never_began_may_be_corrected_and_a_folder_that_cannot_be_is_named(
    configure, tmp_path
):
    config = configure(tmp_path / "run")
    run_folder.enter(configure(tmp_path / "run", {"train.seed": 1}))
    run_folder.enter(config)
    assert configuration.read(tmp_path / "run" / "config.yaml") == config
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set another run folder"):
        run_folder.enter(configure(tmp_path / "file" / "run"))


def test_an_empty_evaluation_split_is_refused_at_once(configure, tmp_path):
    with pytest.raises(ConfigError, match="eval.every 2 needs prompts"):
        configure(tmp_path, {"data.eval_size": 0})


def test_epochs_are_counted_in_steps(configure, tmp_path):
    config = configure(tmp_path, {"train.steps": 0, "train.epochs": 3})
    found = [startup.total_steps(config, SimpleNamespace(rows=rows)) for rows in (1, 3, 4)]
    assert found == [1, 4, 6]
    with pytest.raises(DataError, match="set train.steps"):
        startup.total_steps(config, SimpleNamespace(rows=None))
    assert startup.total_steps(configure(tmp_path), SimpleNamespace(rows=None)) == STEPS


def test_pass_at_k_is_the_share_of_subsets_with_a_correct_answer():
    for samples in (1, 2, 5):
        for correct in range(samples + 1):
            answers = [i < correct for i in range(samples)]
            for k in range(1, samples + 1):
                subsets = [any(subset) for subset in combinations(answers, k)]
                assert evaluation.pass_at_k(samples, correct, k) == pytest.approx(np.mean(subsets))
    rounded = 0.9 - 1e-15  # a sum of terms
    assert evaluation.summarize(np.array([[1, 0, 0, rounded], [0, 0, 0, 0]]), 0.9) == pytest.approx(
        {
            "eval/mean@4": 1.9 / 8,
            "eval/pass@1": 0.25,
            "eval/pass@2": (1 - 1 / 6) / 2,
            "eval/pass@4": 0.5,
        }
    )


def test_the_command_of_the_warm_start_says_how_far_it_is(configure, tmp_path, monkeypatch, capsys):
    knobs = {"sft.steps": 2, "sft.batch": 4, "reward.terms": {"task": 1.0}}
    (tmp_path / "config.yaml").write_text(configuration.to_yaml(configure(tmp_path / "run", knobs)))
    words = ["--config", str(tmp_path / "config.yaml"), "--out", str(tmp_path / "policy")]
    monkeypatch.setattr("tlt_jax.cli.set_environment", lambda config: None)
    monkeypatch.setattr(sys, "argv", ["sft", *words])
    assert sft.main() == 0
    assert "warm start 2/2" in capsys.readouterr().out
    assert (tmp_path / "policy" / "config.json").is_file()
