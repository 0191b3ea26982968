"""README.md and docs/drafters.md: their commands take the shown arguments, and the important ones run."""

from __future__ import annotations

import argparse
import json
import os
import re
import runpy
import shlex
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tensorboard import program
from test_python_face import SMALL

import tlt_jax
from tlt_jax import cli
from tlt_jax.config import load as configuration

ROOT = Path(tlt_jax.__file__).parents[1]
PAGE = (ROOT / "README.md").read_text()
FENCED = r"^```(\w+)\n(.*?)^```"
BLOCKS = re.findall(FENCED, PAGE, re.M | re.S)
DRAFTERS = re.findall(FENCED, (ROOT / "docs" / "drafters.md").read_text(), re.M | re.S)
PROSE = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
STARTS = r"(?:\.venv/bin/)?python |pip |tlt |(?:\./)?launch/"
SHOWN = [line for kind, code in BLOCKS + DRAFTERS if kind == "bash" for line in code.splitlines()]
SHOWN = list(dict.fromkeys(SHOWN + re.findall(f"`((?:{STARTS})[^`]+)`", PROSE)))
TINY = ["--eval.prompts", "2"]
for name, value in SMALL.items():
    TINY += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
GSM8K = [
    {"question": f"How many are {n} and {n} ducks?", "answer": f"{n} + {n} = {2 * n}\n#### {2 * n}"}
    for n in range(10)
]


class Accepted(Exception):
    """Raised instead of running a command, once its arguments are parsed."""


def clone(folder: Path) -> Path:
    """The folder with the files of a clone that commands need, and an installed environment."""
    for name in ("launch", "configs"):
        shutil.copytree(ROOT / name, folder / name)
    shutil.copy(ROOT / "pyproject.toml", folder)
    python = folder / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    (folder / ".venv" / "installed-base").write_bytes(
        subprocess.check_output("cksum", input=(ROOT / "pyproject.toml").read_bytes())
    )
    return folder


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory) -> Path:
    """A clone after the page's first command, with a policy of one layer, for one step."""
    folder = clone(tmp_path_factory.mktemp("clone"))
    words = words_of("./launch/quickstart.sh", *TINY)
    variables = {"PYTHONPATH": str(ROOT), "HOME": str(folder)}
    done = subprocess.run(
        words, cwd=folder, env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return folder


@pytest.fixture(autouse=True)
def undone(tmp_path, monkeypatch):
    """Runs each test in a new folder, and undoes what commands change in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path))
    monkeypatch.setattr("tlt_jax.cli.set_environment", lambda config: None)
    handler = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, handler)


def words_of(command: str, *more: str, **places: str) -> list[str]:
    """The words of a command of the page, without optional arguments, and with `more`."""
    assert command in SHOWN, command
    words = shlex.split(re.sub(r" \[--[^]]*\]", "", command))
    return [places.get(word, os.path.expandvars(word)) for word in (*words, *more)]


def start(words: list[str], monkeypatch) -> int | None:
    """Runs `python -m MODULE`, `python FILE` or `tlt` in this process; its exit code."""
    is_module = words[1] == "-m"
    given = words if words[0] == "tlt" else words[2:] if is_module else words[1:]
    monkeypatch.setattr(sys, "argv", given)
    try:
        if is_module:
            runpy.run_module(given[0], run_name="__main__", alter_sys=True)
        return (
            cli.main() if given is words else runpy.run_path(ROOT / given[0], run_name="__main__")
        )
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    "command", [one for one in SHOWN if re.search(r"tlt_|tlt train|benchmarks[./]|local", one)]
)
def test_a_command_takes_the_arguments_that_the_page_shows(command, tmp_path, monkeypatch):
    """With all optional arguments. Placeholders are names of existing files."""
    clone(tmp_path)
    shutil.copy(ROOT / "configs" / "quickstart.yaml", "FILE")
    Path("RUN").mkdir()
    Path("RUN", "config.yaml").write_text(configuration.to_yaml(configuration.read("FILE")))
    text = command.replace("--section.knob VALUE ...", "--train.seed 3").replace("SEED", "3")
    text = re.sub(r" [NK]\]", " 1]", text)
    text = re.sub(r"^launch/local\.sh \d", "python -m tlt_jax.train", text)
    words = shlex.split(re.sub(r" \[(--[^]]*)\]", r" \1", text))
    if "generate" not in command:
        parse = argparse.ArgumentParser.parse_known_args

        def parse_known_args(self, args=None, namespace=None):
            _, rest = parse(self, args, namespace)
            configuration.parse(["--config", "FILE", *rest])
            raise Accepted

        monkeypatch.setattr(argparse.ArgumentParser, "parse_known_args", parse_known_args)

    def prepared(config, is_one_of_many=False):
        raise Accepted

    monkeypatch.setattr(cli, "prepared", prepared)
    with pytest.raises(Accepted):
        start(words, monkeypatch)


def test_the_extras_of_the_page_exist():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    named = re.findall(r'pip install -e "\.\[(\w+)\]"', PAGE)
    assert named and set(named) <= set(project["optional-dependencies"])


def test_the_quickstart_ends_with_a_model(quickstart):
    run = quickstart / "runs" / "quickstart"
    assert (run / "hf" / "model.safetensors").is_file()
    listed = (ROOT / "docs" / "run_folder.md").read_text()
    assert [part.name for part in run.iterdir() if f"\n| `{part.name}" not in listed] == []


def test_tensorboard_takes_the_folder_of_runs():
    words = words_of(".venv/bin/python -m tensorboard.main --logdir runs")
    board = program.TensorBoard()
    board.configure(argv=words[2:])
    assert board.flags.logdir == "runs"


def test_a_drafter_is_trained_and_drafts(tmp_path, monkeypatch):
    clone(tmp_path)
    make, train = (one for one in SHOWN if "runs/drafted" in one)
    few = ["--drafter_training.rollouts", "1", "--drafter_training.steps", "1"]
    few += ["--drafter_training.unroll", "1"]
    assert start(words_of(make, *TINY, *few), monkeypatch) == 0
    drafter = TINY.index("--speculation.drafter")
    always = ["--speculation.tuner", "fixed", "--speculation.strategies", "[learned:2_1_3]"]
    assert start(words_of(train, *TINY[:drafter], *TINY[drafter + 2 :], *always), monkeypatch) == 0
    chunks = (tmp_path / "runs/quickstart/speculation/000001.jsonl").read_text().splitlines()
    assert {json.loads(chunk)["strategy"] for chunk in chunks} == {"learned:2_1_3"}


def test_a_finished_run_is_used(quickstart, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(quickstart)
    shown = {re.search(r"tlt_jax\.(\w+)", one)[1]: one for one in SHOWN if "tlt_jax." in one}
    generate = words_of(
        shown["generate"], "--drafter", "ngram", "--strategy", "2_1_3", "--max-new-tokens", "4",
        DIR="runs/quickstart/hf", TEXT="1 2 0 1:",
    )  # fmt: skip
    assert start(generate, monkeypatch) == 0
    printed = capsys.readouterr().out
    assert "tokens/s" in printed and "accept length" in printed
    assert start(words_of(shown["eval"], RUN="runs/quickstart"), monkeypatch) == 0
    printed, said = capsys.readouterr()
    assert {"eval/mean@1", "eval/pass@1"} <= set(json.loads(printed))
    assert said.startswith("weights: step 1 of runs/quickstart (runs/quickstart/hf)")
    assert start(words_of(shown["show"], "--step", "1", RUN="runs/quickstart"), monkeypatch) == 0
    assert "best 1: reward" in capsys.readouterr().out
    out = str(tmp_path / "exported")
    assert start(words_of(shown["export"], RUN="runs/quickstart", DIR=out), monkeypatch) == 0
    for name in ("model.safetensors", "prompt_format.json"):
        exported, final = (Path(at, name) for at in (out, "runs/quickstart/hf"))
        assert exported.read_bytes() == final.read_bytes()


def test_gsm8k_is_trained_on_with_the_model_made_from_it(tmp_path, monkeypatch):
    clone(tmp_path)
    for name, rows in (("train", GSM8K[:8]), ("test", GSM8K[8:])):
        (tmp_path / f"{name}.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    make, train = (one for one in SHOWN if "gsm8k_tiny" in one)
    sizes = ["--hidden-size", "16", "--layers", "1", "--mlp-size", "32"]
    assert start(words_of(make, *sizes), monkeypatch) == 0
    few = [
        word
        for name in ("prompts", "samples", "max_new_tokens")
        for word in (f"--rollout.{name}", "2")
    ]
    few += ["--train.steps", "1", "--eval.every", "0"]
    assert start(words_of(train, *few), monkeypatch) == 0
    assert (tmp_path / "runs" / "gsm8k_tiny" / "hf" / "model.safetensors").is_file()


def test_tlt_names_the_commands_of_the_table(monkeypatch, capsys):
    assert start(words_of("tlt --help"), monkeypatch) == 0
    printed = capsys.readouterr().out
    table = {
        re.search(r"-m (\S+)", one)[1] for one in re.findall(r"^\| `(python -m [^`]+)`", PAGE, re.M)
    }
    assert {command.module for command in cli.COMMANDS.values()} == table
    assert all(name in printed for name in cli.COMMANDS)
