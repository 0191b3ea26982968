"""metrics.jsonl: a line for each step whatever interrupts the run; a run read back; the answers that `show` prints."""

from __future__ import annotations

import dataclasses
import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from test_metrics import SPANS

import tlt_jax
from tlt_jax import run_folder, show
from tlt_jax.config import Config
from tlt_jax.config.load import to_yaml
from tlt_jax.config.schema import Mesh
from tlt_jax.errors import ConfigError
from tlt_jax.metrics import Record, Writer
from tlt_jax.metrics.evaluations import OF_EVALUATION
from tlt_jax.metrics.run import ScalarsFile, read_scalars

ROOT = Path(tlt_jax.__file__).parents[1]
PAGE = (ROOT / "docs" / "run_folder.md").read_text()


@pytest.fixture
def config(tmp_path) -> Config:
    config = Config(run=str(tmp_path / "run"), mesh=Mesh(data=2))
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.yaml").write_text(to_yaml(config))
    return config


OF_A_STEP = {"group": 0, "advantage": 0.0, "logprob": 0.0, "accepted": 0}


def record(uid: int, reward: float, **more) -> Record:
    return Record(
        uid, "2+2=", f"answer {uid}", reward, 10 + uid, "stop", {"task": reward}, **OF_A_STEP | more
    )


def write(config: Config, steps, resumed_from: int | None = None, scale: float = 1.0) -> None:
    """A warm start, then steps with an evaluation after each even one."""
    with Writer(config, 10, resumed_from) as writer:
        if resumed_from is None:
            writer.scalars(25, {"sft/loss": 1.5})
            writer.scalars(50, {"sft/loss": 0.5})
            writer.evaluation(0, {"eval/mean@1": 0.0})
        for step in steps:
            scalars = {"reward/mean": scale * step, "actor/lr": 0.5}
            writer.step(step, scalars, [record(0, 1.0)], SPANS)
            if step % 2 == 0:
                writer.evaluation(step, {"eval/mean@1": scale * step})


def test_a_line_has_all_scalars_of_its_step_and_numbers_are_exact(config):
    write(config, range(1, 5), scale=1 / 3)
    lines = [json.loads(line) for line in open(Path(config.run) / "metrics.jsonl")]
    expected = [{"step": n, "reward/mean": n / 3, "actor/lr": 0.5} for n in range(1, 5)]
    for line in expected[1::2]:
        line["eval/mean@1"] = line["step"] / 3
    assert lines == [{"step": 0, "eval/mean@1": 0.0}, *expected]


def test_a_run_is_read_back_with_the_steps_of_each_metric(config):
    write(config, range(1, 4))
    with Writer(config, 10, 3) as writer:
        writer.scalars(4, {"actor/loss": math.nan, "actor/kl": math.inf, "reward/mean": 4})
    run = tlt_jax.open_run(config.run)
    assert run.metrics["reward/mean"].steps.tolist() == [1, 2, 3, 4]
    assert run.metrics["reward/mean"].values.tolist() == [1, 2, 3, 4]
    assert run.metrics["eval/mean@1"].steps.tolist() == [0, 2]
    assert run.metrics["sft/loss"].steps.tolist() == [25, 50], "the warm start counts its own steps"
    assert np.isnan(run.metrics["actor/loss"].values).all() and np.isnan(
        run.metrics["actor/kl"].values
    )
    assert (run.steps, run.code, run.hf) == (3, None, run_folder.export(config))
    assert [one["completion"] for one in run.completions()] == ["answer 0"] == [
        one["completion"] for one in run.completions(2)
    ]  # fmt: skip


def test_a_folder_or_step_that_is_not_there_is_one_line(config, tmp_path):
    with pytest.raises(ConfigError, match="is no run folder: it has no config.yaml"):
        tlt_jax.open_run(tmp_path / "other")
    run = tlt_jax.open_run(config.run)
    assert (run.steps, run.metrics) == (0, {})
    with pytest.raises(ConfigError, match="no step is done"):
        run.completions()
    write(config, range(1, 4))
    with pytest.raises(ConfigError, match="step 7: .* has the answers of steps 1 to 3"):
        run.completions(7)


@pytest.mark.parametrize("lost", [1, 3, 20, 60])
def test_a_write_that_was_cut_off_leaves_no_step_twice_and_none_out(config, lost):
    write(config, range(1, 6))
    path = Path(config.run) / "metrics.jsonl"
    path.write_bytes(path.read_bytes()[:-lost])
    assert set(tlt_jax.open_run(config.run).metrics["reward/mean"].steps[:4]) == {1, 2, 3, 4}
    write(config, range(5, 8), resumed_from=4)
    lines = [json.loads(line) for line in path.open()]
    assert [line["step"] for line in lines] == [*range(8)]
    assert [line["reward/mean"] for line in lines[1:]] == [*range(1, 8)]


@pytest.mark.parametrize("kept", range(0, 60, 4))
def test_an_evaluation_that_was_cut_off_leaves_its_step_whole(tmp_path, kept):
    path, step = tmp_path / "metrics.jsonl", {"reward/mean": 0.25, "actor/lr": 1e-6}
    file = ScalarsFile(path, math.inf)
    file.write(6, {"reward/mean": 0.125})
    file.write(7, step)
    before = path.read_bytes()
    file.write(7, {"eval/mean@1": 0.5, "eval/pass@1": 0.25})
    after = path.read_bytes()
    # What a process that was killed while it wrote has left: bytes of the new line over those of the old one.
    start = before.index(b"\n") + 1
    path.write_bytes(after[: start + kept] + before[start + kept :])
    resumed = ScalarsFile(path, 8)
    assert [line["step"] for line in read_scalars(path)] == [6, 7]
    assert read_scalars(path)[1].items() >= step.items()
    resumed.write(7, {"eval/mean@1": 0.5, "eval/pass@1": 0.25})
    resumed.write(8, {"reward/mean": 1.0})
    assert read_scalars(path)[1] == {"step": 7, **step, "eval/mean@1": 0.5, "eval/pass@1": 0.25}
    assert len(path.read_text().splitlines()) == 3


def test_a_new_run_in_the_folder_begins_with_empty_files(config):
    write(config, range(1, 4))
    with Writer(config, 10) as writer:
        writer.scalars(1, {"reward/mean": 9})
    run = tlt_jax.open_run(config.run)
    assert {name: one.values.tolist() for name, one in run.metrics.items()} == {"reward/mean": [9]}


def test_a_damaged_line_is_left_out_and_logged(config, caplog):
    write(config, range(1, 4))
    path = Path(config.run) / "metrics.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], b"\x00\xff\n", *lines[2:]]))
    assert [line["step"] for line in read_scalars(path)] == [0, 1, 2, 3]
    assert "1 lines that cannot be read" in caplog.text


def test_the_page_of_the_run_folder_names_every_field_of_an_answer():
    names = [field.name for field in dataclasses.fields(Record)]
    fields = [name for name in names if name not in OF_EVALUATION]
    assert [name for name in ["step", *fields] if f"| `{name}` |" not in PAGE] == []


ANSWERS = [
    json.loads(json.dumps({"step": 3, **dataclasses.asdict(one)}))
    for one in (record(uid, reward, reference="4", accepted=3) for uid, reward in enumerate([0.5, 1, -1, 0, 1]))
]  # fmt: skip


@pytest.mark.parametrize("best, worst, uids", [
    (2, 2, [1, 4, 2, 3]), (1, 0, [1]), (0, 1, [2]), (9, 9, [1, 4, 0, 3, 2]), (4, 4, [1, 4, 0, 3, 2]), (0, 0, []),
])  # fmt: skip
def test_show_prints_the_highest_and_the_lowest_rewards_and_none_twice(best, worst, uids):
    text = show.page(ANSWERS, best, worst)
    assert [int(line.split()[-1]) for line in text.splitlines() if "    answer" in line] == uids
    assert text.startswith("step 3: 5 answers, reward 0.300 on average, -1 to 1")
    assert text.count("reference answer\n    4") == text.count("3 of them drafted") == len(uids)


def test_show_prints_nothing_that_a_terminal_obeys():
    text = show.page([ANSWERS[0] | {"completion": "a\x1b[31m\nb\r"}], 1, 1)
    assert "    a\\x1b[31m\n    b\\r" in text and "\x1b" not in text


def test_the_command_shows_a_run_without_jax(config):
    write(config, range(1, 4))
    code = (
        "import sys, runpy\n"
        "try: runpy.run_module('tlt_jax.show', run_name='__main__', alter_sys=True)\n"
        "finally: assert 'jax' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, config.run, "--step", "2", "--best", "1"],
        capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "step 2: 1 answer" in done.stdout, done.stderr


def test_the_closing_hints_name_the_python_that_ran(config, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    environment = tmp_path / ".venv" / "bin"
    environment.mkdir(parents=True)
    (environment / "python").symlink_to(sys.executable)
    real = str(Path(sys.executable).parent)
    monkeypatch.setattr(run_folder.sys, "executable", str(environment / "python"))
    monkeypatch.setenv("PATH", "/nowhere")
    assert run_folder.python_name() == ".venv/bin/python"
    monkeypatch.setenv("PATH", str(environment))
    assert run_folder.python_name() == "python", "as in an activated environment"
    monkeypatch.setenv("PATH", real)
    assert run_folder.python_name() == ".venv/bin/python", "another environment's python is on PATH"
    monkeypatch.chdir(config.run)
    assert run_folder.python_name() == str(environment / "python")
    assert f"{environment}/python -m tlt_jax.show {config.run}" in run_folder.summary(config)
