"""Functions of Python in the place of module:function: what they change, where they run, and one line for each mistake."""

from __future__ import annotations

import functools
import json
import os
import pickle
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import toy_rewards
from objectives import algorithm
from training_runs import SIZES

import tlt_jax
from tlt_jax import cli, run_folder
from tlt_jax.config import Config, changes, extension, load as configuration
from tlt_jax.data import tasks
from tlt_jax.errors import ConfigError
from tlt_jax.rewards import Scorer
from tlt_jax.train import loop
from tlt_jax.tuner.baselines import fixed

ROOT = Path(tlt_jax.__file__).parents[1]
TINY = {
    "model.init": SIZES,
    "mesh.data": 1, "mesh.fake_devices": 0, "data.eval_size": 2, "data.max_prompt_tokens": 16, "sft.steps": 0,
    "rollout.prompts": 2, "rollout.samples": 2, "rollout.max_new_tokens": 8, "train.steps": 1, "eval.every": 0,
    "checkpoint.every": 1, "checkpoint.export": False, "speculation.drafter": "ngram",
    "rollout.compile_cache": os.environ["TLT_JAX_TEST_PROGRAMS"],
}  # fmt: skip


def in_this_file(name: str):
    """A function of this name that no other process can import."""

    def reward(prompt, completion, row):
        return float(len(completion))

    reward.__name__ = name
    return reward


def test_a_function_of_a_module_is_its_name_and_any_other_keeps_its_function():
    assert extension.named("knob", toy_rewards.digits) == "toy_rewards:digits"
    assert not isinstance(extension.named("knob", toy_rewards.digits), extension.Local)
    assert extension.named("knob", tasks.Fold) == "tlt_jax.data.tasks:Fold"
    mine = in_this_file("mine")
    local = extension.named("knob", mine)
    assert local == "<local>:mine" and extension.load("knob", local) is mine
    assert extension.named("knob", in_this_file("mine")) != local, "another function of the name"
    assert extension.named("knob", mine) == local and hash(local) == hash("<local>:mine")
    assert algorithm(loss=local) != algorithm(loss=extension.named("knob", in_this_file("mine")))
    for copy in (pickle.loads(pickle.dumps(local)), str(local)):
        assert copy == local and type(copy) is str


def test_all_functions_of_a_run_are_used_and_its_configuration_can_be_read(tmp_path, caplog):
    """A task, a reward, a loss and a tuner; then data."""
    called = set()

    def reward(prompt, completion, row):
        called.add("reward")
        return {"score": float(len(completion)), "seven": 7.0}

    def loss(rows, clip_low, clip_high):
        called.add("loss")
        return -rows.advantages * rows.update_logprobs

    def tuner(strategies):
        called.add("tuner")
        return fixed(strategies[0])

    class Task(tasks.Fold):
        def rows(self, *given):
            called.add("task")
            return super().rows(*given)

    given = {"reward.terms": {reward: 0.5, "task": 1}, "algorithm.loss": loss, "speculation.tuner": tuner,
             "data.task": Task, "data.task_args": {"modulus": 5}, "run": tmp_path / "run"}  # fmt: skip
    config = tlt_jax.load_config("quickstart", TINY | given)
    assert loop.train(config) == cli.DONE
    assert called == {"reward", "loss", "tuner", "task"}
    assert caplog.text.count("so rewards run in its threads") == 1
    lines = (tmp_path / "run" / "completions" / "000001.jsonl").read_text().splitlines()
    for answer in map(json.loads, lines):
        parts = answer["parts"]
        assert (
            parts["<local>:reward"] == len(answer["completion"])
            and parts["<local>:reward/seven"] == 7
        )
        assert answer["reward"] == 0.5 * parts["<local>:reward"] + parts["task"]

    resumed = tlt_jax.load_config("quickstart", TINY | given | {"train.steps": 2})
    assert loop.train(resumed) == cli.DONE, "with the functions it goes on"
    text = run_folder.read(tmp_path / "run")
    assert not changes.changes(resumed, text) and text.algorithm.loss == "<local>:loss"
    for name, knob in (("loss", "algorithm.loss"), ("Task", "data.task")):
        found = {"algorithm.loss": loss} if knob == "data.task" else {}
        without = tlt_jax.load_config(tmp_path / "run" / "config.yaml", found | {"train.steps": 3})
        with pytest.raises(ConfigError) as error:
            loop.train(without)
        message = f"{knob} '<local>:{name}' is a function of another notebook, script or process: pass {name} itself in"
        assert message in str(error.value) and "\n" not in str(error.value)


def test_rows_of_a_function_are_trained_on(tmp_path):
    tasks.make("fold", {}).tokenizer().save_pretrained(tmp_path / "tokenizer")

    def sums():
        for a in range(8):
            yield {"prompt": f"{a} {a}:", "answer": 2 * a}

    given = {"data.train": sums, "model.tokenizer": tmp_path / "tokenizer", "reward.terms": {"exact": 1.0},
             "run": tmp_path / "run", "data.task_args": {}}  # fmt: skip
    assert loop.train(tlt_jax.load_config("quickstart", TINY | given)) == cli.DONE
    text = (tmp_path / "run" / "completions" / "000001.jsonl").read_text()
    assert {json.loads(line)["prompt"] for line in text.splitlines()} <= {
        f"{a} {a}:" for a in range(8)
    }


def test_a_task_of_this_process_scores_in_it():
    class Mine(tasks.Fold):
        def verify(self, completion, answer):
            return 0.25

    with Scorer(tlt_jax.load_config("quickstart", {"data.task": Mine})) as scorer:
        scorer.submit(0, "p", "c", {"answer": "1"})
        assert scorer.collect()[0].value == 0.25


def scorer_of(reward, **knobs) -> Scorer:
    name = extension.named("reward.terms", reward)
    section = replace(Config().reward, terms={name: 1.0}, failure_score=-1.0, **knobs)
    return Scorer(replace(Config(), reward=section))


def test_what_a_reward_in_a_thread_does_fails_its_own_score(caplog):
    def probe(prompt, completion, row):
        if completion == "hang":
            time.sleep(4.0)
        if completion == "leave":
            sys.exit()
        return {"good": 1.0, "none": None}[completion]

    with scorer_of(probe, timeout_s=2.0) as scorer:
        for text in ("hang", "leave", "raise", "none", "good"):
            scorer.submit(text, "p", text, {})
        found = {text: (one.value, one.failure) for text, one in scorer.collect().items()}
    assert found == {
        "hang": (-1.0, "timeout"),
        "leave": (-1.0, "crash"),
        "raise": (-1.0, "error"),
        "none": (-1.0, "error"),
        "good": (1.0, None),
    }
    assert caplog.text.count("so rewards run in its threads") == 1


def twice(name: str) -> dict:
    return {in_this_file(name): 1.0, in_this_file(name) if name else None: 2.0}


MISTAKES = [
    ({"reward.terms": {lambda p, c, r: 1.0: 1.0}}, "has no name: define it with def"),
    ({"algorithm.loss": functools.partial(print)}, "has no name: define it with def"),
    ({"reward.terms": twice("same")}, "reward.terms has <local>:same twice: rename one"),
    ({"reward.terms": in_this_file("one")}, "reward.terms '<local>:one' has the wrong type: write a mapping"),
    ({"reward.terms": [in_this_file("one")]}, "reward.terms ['<local>:one'] has the wrong type: write a mapping"),
    ({"reward.terms": {3: 1.0}}, "reward.terms has the key 3: give text"),
    ({"reward.terms": {in_this_file("one"): "much"}}, "reward.terms.<local>:one 'much' has the wrong type"),
    ({"train.steps": len}, "functions are for data.task, data.train, data.eval, speculation.tuner, reward.terms, environment"),
    ({"data.task_args": {"f": len}}, "data.task_args is a function: give a number"),
    ({"train.steps": {1, 2}}, "train.steps is a set: give a number, text, list or mapping"),
    ({"train.steps": object()}, "train.steps is a object"),
    ({"train.steps": None}, "train.steps None has the wrong type: write a whole number"),
    ({3: 1}, "3 is no knob: give its name as text"),
    ([("train.steps", 1)], "the changes are a list: give a dict"),
    ({"train.stebs": 1}, "unknown knob train.stebs: did you mean train.steps?"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "message"), MISTAKES)
def test_a_wrong_use_is_one_line(given, message):
    with pytest.raises(ConfigError) as error:
        tlt_jax.load_config("quickstart", given)
    assert message in str(error.value) and "\n" not in str(error.value)


def test_a_wrong_source_is_one_line():
    with pytest.raises(
        ConfigError, match="the configuration is a NoneType: give the path of a YAML"
    ):
        tlt_jax.load_config(None)


def test_values_of_python_are_those_of_the_command_line():
    given = {"train.steps": np.int64(3), "optim.learning_rate": np.float32(0.5), "rollout.stop": ("\n", "x"),
             "run": Path("a b"), "data.system": "8",
             "rollout.samples": "4", "checkpoint.export": np.bool_(False)}  # fmt: skip
    words = ["--train.steps", "3", "--optim.learning_rate", "0.5", "--rollout.stop", '["\\n", "x"]', "--run", "a b",
             "--data.system", "8", "--rollout.samples", "4",
             "--checkpoint.export", "false"]  # fmt: skip
    typed = configuration.parse(["--config", "quickstart", *words])
    assert tlt_jax.load_config("quickstart", given) == typed
