"""docs/extending.md: its files and commands, run as they are, and the effect of each extension."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from objectives import algorithm
from training_runs import events

import tlt_jax
from tlt_jax import cli
from tlt_jax.config import Config, changes, load as configuration
from tlt_jax.data.packing import PackedRows
from tlt_jax.errors import ConfigError, DataError
from tlt_jax.rewards import Scorer
from tlt_jax.train import loop, losses

ROOT = Path(tlt_jax.__file__).parents[1]
BLOCKS = re.findall(
    r"^```(\w+)\n(.*?)^```", (ROOT / "docs" / "extending.md").read_text(), re.M | re.S
)
FILES = {code.split()[1]: code for kind, code in BLOCKS if kind != "bash"}
COMMANDS = [
    shlex.split(line)
    for kind, code in BLOCKS
    if kind == "bash"
    for line in code.replace("\\\n", " ").splitlines()
]
PROGRAMS = ["--rollout.compile_cache", os.environ["TLT_JAX_TEST_PROGRAMS"]]


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    """A folder with the files of the page, in which its commands run."""
    for name, code in FILES.items():
        (tmp_path / name).write_text(code)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in FILES:
        sys.modules.pop(name.removesuffix(".py"), None)


def command(run: str) -> list[str]:
    """The arguments of the page's training command with this run folder."""
    (found,) = [words for words in COMMANDS if f"runs/{run}" in words]
    assert found[:3] == ["python", "-m", "tlt_jax.train"]
    return [*found[3:], *PROGRAMS]


def trained(run: str) -> tuple[Config, list[dict]]:
    """The run of the page's command, in this process, and the answers of its two steps."""
    config = configuration.parse(command(run))
    assert loop.train(config) == cli.DONE
    return config, answers(config)


def answers(config: Config) -> list[dict]:
    return lines_of(Path(config.run) / "completions")


def lines_of(folder: Path) -> list[dict]:
    """The lines of the files of two steps."""
    first, second = sorted(folder.iterdir())
    return [json.loads(line) for file in (first, second) for line in file.read_text().splitlines()]


def make_tokenizer() -> None:
    """Runs the page's line of Python that does so."""
    (words,) = [words for words in COMMANDS if words[1] == "-c"]
    exec(words[2])


def test_every_block_of_the_page_is_a_file_or_a_command():
    assert [*FILES] == [
        "tiny.yaml", "my_script.py", "my_rewards.py", "my_task.py", "my_data.py", "my_losses.py", "my_tuners.py",
    ]  # fmt: skip
    assert len(COMMANDS) == 7 and len(FILES) + 6 == len(BLOCKS)


def test_the_reward_of_the_page_scores_the_answers_of_the_command():
    config, found = trained("reward")
    lengths = [len(answer["completion"]) for answer in found]
    expected = [max(0.0, (12 - n) / 12) for n in lengths]
    assert [answer["reward"] for answer in found] == pytest.approx(expected)
    assert len(found) == 16 and len(set(expected)) > 1
    steps = events(config)["reward/terms/my_rewards:brevity/characters"]
    means = [np.mean(lengths[:8]), np.mean(lengths[8:])]
    assert [value for _, value in steps] == pytest.approx(means)


def test_the_script_of_the_page_scores_by_its_own_function(folder):
    """In the process of its command, with the loop's compiled programs."""
    text = (
        (folder / "tiny.yaml")
        .read_text()
        .replace("rollout: {", f"rollout: {{compile_cache: {PROGRAMS[1]}, ")
    )
    (folder / "tiny.yaml").write_text(text)
    (words,) = [words for words in COMMANDS if "my_script.py" in words]
    variables = {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, *words[1:]], env=os.environ | variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "so rewards run in its threads" in done.stderr
    found = lines_of(folder / "runs" / "script" / "completions")
    lengths = [len(answer["completion"]) for answer in found]
    assert [answer["reward"] for answer in found] == pytest.approx(
        [max(0.0, 1 - n / 12) for n in lengths]
    )


def test_the_task_of_the_page_gives_prompts_and_scores_them():
    config, found = trained("task")
    assert len({answer["prompt"] for answer in found}) == 4
    assert all(re.fullmatch("[1-9][0-9]{4}:", answer["prompt"]) for answer in found)
    for answer in found:
        right = answer["completion"].strip() == answer["prompt"][-2::-1]
        assert answer["reward"] == float(right)
    with Scorer(config) as scorer:
        for completion in ("54321", "12345"):
            scorer.submit(completion, "12345:", completion, {"answer": "54321"})
        assert {key: score.value for key, score in scorer.collect().items()} == {
            "54321": 1.0,
            "12345": 0.0,
        }


def test_the_rows_of_the_page_are_trained_on(capsys):
    make_tokenizer()
    config, found = trained("data")
    assert "data: 34 of 36 rows, 2 of evaluation" in capsys.readouterr().out
    prompts = {answer["prompt"] for answer in found}
    assert len(prompts) == 4 and prompts <= {f"{a} {b}:" for a in range(2, 8) for b in range(2, 8)}
    with Scorer(config) as scorer:
        scorer.submit(0, "2 3:", "5", {"answer": "5"})
        assert scorer.collect()[0].value == 1.0


def test_the_loss_of_the_page_has_the_gradient_worked_by_hand_and_trains():
    """Two answers of two tokens in a row: of the second, a log-ratio beyond the limit is clipped, and keeps no gradient."""
    log_ratios = jnp.log(jnp.array([[1.2, 0.9, 2.0, 1.1]]))
    old, mask = jnp.full((1, 4), -1.0), jnp.ones((1, 4), bool)
    advantages, segments = jnp.array([[-1.0, -1.0, 1.0, 1.0]]), jnp.array([[1, 1, 2, 2]])
    rows = PackedRows(
        segments, segments, segments, weights=mask * 1.0, advantages=advantages, old_logprobs=old,
        update_logprobs=old + log_ratios,
    )  # fmt: skip
    found = losses.slope(algorithm(clip_low=0.4, clip_high=0.4, loss="my_losses:gmpo"), rows)
    first, second = np.sqrt(1.2 * 0.9), np.sqrt(np.exp(0.4) * 1.1)
    assert float(found.loss) == pytest.approx(2 * first - 2 * second, rel=1e-6)
    np.testing.assert_allclose(found.grads, [[first, first, 0.0, -second]], rtol=1e-6)
    config, _ = trained("loss")
    assert {"actor/pg_loss", "actor/ratio_max"} <= set(events(config))
    assert not any("pg_clipfrac" in name for name in events(config))
    ppo = configuration.parse([*command("loss"), "--algorithm.loss", "ppo"])
    assert [one.name for one in changes.changes(config, ppo)] == ["algorithm.loss"]


def test_the_tuner_of_the_page_chooses_in_a_run():
    config, _ = trained("tuner")
    chunks = lines_of(Path(config.run) / "speculation")
    trees = {1: "7_1_8", 2: "3_1_4", 3: "3_1_4"} | dict.fromkeys(range(4, 9), "off")
    assert chunks
    for chunk in chunks:
        live = int(re.fullmatch(r"(\d) live", chunk["reason"])[1])
        assert chunk["strategy"] == trees[live]


WRONG = """
def no_task(**arguments):
    return []

def one_argument(only):
    return only

def older(logprobs, old_logprobs, advantages, clip_low, clip_high):
    return logprobs

def mean(tokens, low, high):
    return tokens.update_logprobs.mean()

def branches(tokens, low, high):
    return tokens.update_logprobs if tokens.advantages.sum() > 0 else tokens.old_logprobs

def misspelt(tokens, low, high):
    return tokens.log_probs

def no_tuner(strategies):
    return {}

def no_rows():
    return []

def no_list():
    return 3

def texts():
    return ["2 3:", {"prompt": "4 5:", "answer": 9}]
"""
MISTAKES = [
    ("--data.task", "wrong:missing", "data.task 'wrong:missing': module 'wrong' has no function 'missing'"),
    ("--data.task", "wrong:no_task", "gave a list without rows, verify, longest_row, tokenizer: see Task"),
    ("--data.task", "wrong:one_argument", "do not fit 'wrong:one_argument': missing a required argument: 'only'"),
    ("--data.train", "absent:rows", "data.train 'absent:rows': module 'absent' cannot be imported (ModuleNotFoundError: "),
    ("--data.train", "wrong:no_list", "data.train 'wrong:no_list' gave a int: return or yield"),
    ("--data.train", "wrong:no_rows", "wrong:no_rows: the function yields no rows: yield one mapping per row"),
    ("--data.train", "wrong:texts", "wrong:texts:1: not an object (str): write {column: value, ...}"),
    ("--algorithm.loss", "wrong:one_argument", "is called as loss(rows: tlt_jax.data.packing.PackedRows, clip_low, clip_high)"),
    ("--algorithm.loss", "wrong:older", "takes other arguments (missing a required argument: 'clip_low'): the arrays that it"),
    ("--algorithm.loss", "wrong:branches", "JAX cannot trace or differentiate it: Attempted boolean conversion of traced"),
    ("--algorithm.loss", "wrong:misspelt", "differentiate it: 'PackedRows' object has no attribute 'log_probs'"),
    ("--algorithm.loss", "wrong:mean", "gave shape () for tokens of shape (2, 3): return an array with the loss of each"),
    ("--speculation.tuner", "wrong:no_tuner", "speculation.tuner 'wrong:no_tuner' gave a dict: return a Tuner"),
]  # fmt: skip


@pytest.mark.parametrize(("knob", "value", "message"), MISTAKES)
def test_a_mistake_in_an_extension_is_one_line_before_any_step(folder, knob, value, message):
    (folder / "wrong.py").write_text(WRONG)
    words = {
        "--data.train": ["--model.tokenizer", "tokenizer", "--reward.terms", "{exact: 1.0}"],
        "--speculation.tuner": ["--speculation.drafter", "ngram"],
    }.get(knob, [])
    make_tokenizer()
    config = configuration.parse(["--config", "tiny.yaml", knob, value, *words, *PROGRAMS])
    with pytest.raises((ConfigError, DataError)) as error:
        loop.train(config)
    sys.modules.pop("wrong", None)
    assert message in str(error.value) and not Path(config.run).exists()
    assert "\n" not in str(error.value).replace("1 problem\n", "")


def test_a_row_that_is_longer_than_the_longest_is_named(folder):
    (folder / "my_task.py").write_text(FILES["my_task.py"].replace("self.length - 1", "30"))
    config = configuration.parse(
        ["--config", "tiny.yaml", "--data.task", "my_task:Reversed", *PROGRAMS]
    )
    with pytest.raises(DataError, match="longest prompt has 32 tokens"):
        loop.train(config)
    liar = "(self.length - 1) if split == 'train' and index == 0 else 30"
    (folder / "my_task.py").write_text(FILES["my_task.py"].replace("self.length - 1", liar))
    sys.modules.pop("my_task")
    with pytest.raises(DataError, match="row eval-0 of the task 'my_task:Reversed' has 32 tokens"):
        loop.train(config)


def test_a_folder_of_the_modules_name_is_the_data(folder):
    (folder / "my_data").mkdir()
    config = configuration.parse(command("data"))
    make_tokenizer()
    with pytest.raises(DataError, match="my_data:sums: no .jsonl, .json, .csv or .parquet file"):
        loop.train(config)
