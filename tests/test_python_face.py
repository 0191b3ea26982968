"""The functions of the package for notebooks: configurations, training and models."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys

import pytest

import tlt_jax
from tlt_jax import generate
from tlt_jax.config import load
from tlt_jax.errors import ConfigError, DataError

SMALL = {
    "model.init": {
        "model_type": "qwen2", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 128,
    },
    "data.task_args": {"min_length": 3, "max_length": 4, "modulus": 5},
    "rollout.prompts": 2, "rollout.samples": 2, "rollout.max_new_tokens": 24, "train.steps": 1, "sft.steps": 0,
    "eval.every": 0, "speculation.drafter": "none", "rollout.compile_cache": os.environ["TLT_JAX_TEST_PROGRAMS"],
}  # fmt: skip


def test_changes_are_those_of_the_command_line():
    changes = {"rollout.temperature": 0.5, "run": "x y", "rollout.stop": ["\n"], "mesh.data": 1}
    words = [
        "--rollout.temperature",
        "0.5",
        "--run",
        "x y",
        "--rollout.stop",
        '["\\n"]',
        "--mesh.data",
        "1",
    ]
    assert tlt_jax.load_config("quickstart", changes) == load.parse(
        ["--config", "quickstart", *words]
    )
    with pytest.raises(ConfigError, match="did you mean rollout.temperature"):
        tlt_jax.load_config("quickstart", {"rollout.temprature": 1})


def test_a_policy_is_trained_and_answers(tmp_path, capsys):
    config = tlt_jax.load_config("quickstart", SMALL | {"run": tmp_path / "run"})
    run = tlt_jax.run_training(config)
    assert (run.code, run.steps, run.folder) == (0, 1, tmp_path / "run")
    try_it = shlex.split(capsys.readouterr().out.splitlines()[-1])
    assert generate.main(try_it[try_it.index("tlt_jax.generate") + 1 :]) == 0, "as printed"
    assert "text as it is, temperature 1" in capsys.readouterr().err
    answers = run.completions()
    assert [one["group"] for one in answers] == [0, 0, 1, 1] and all(one["id"] for one in answers)
    rewards = [one["reward"] for one in answers]
    assert run.metrics["reward/mean"].values.tolist() == pytest.approx([sum(rewards) / 4])
    model = tlt_jax.open_model(run.hf, {"train.seed": 3, "rollout.slots": 4})
    first = model.generate(["12 3:", [5, 4]], samples=2, max_new_tokens=6)
    assert [(one["prompt_index"], one["sample"]) for one in first] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert all(1 <= len(one["token_ids"]) <= 6 for one in first) and first[0]["prompt"] == "12 3:"
    compiles = len(model.engine.programs.compiles)
    assert model.generate(["12 3:", [5, 4]], samples=2, max_new_tokens=6) == first
    assert len(model.engine.programs.compiles) == compiles, "programs are cached"
    assert model.generate(["12 3:", [5, 4]], call=1, samples=2, max_new_tokens=6) != first
    with pytest.raises(ConfigError, match="rollout.temperature -1.0 is too small"):
        model.generate(["12 3:"], temperature=-1)
    with pytest.raises(DataError, match="prompt 0: .* are no token ids"):
        model.generate([[]])


def test_importing_the_package_starts_no_jax():
    code = "import sys, tlt_jax; tlt_jax.load_config('quickstart'); sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_the_example_of_the_readme_runs(tmp_path):
    from pathlib import Path

    readme = (Path(__file__).parents[1] / "README.md").read_text()
    _, _, rest = readme.partition("```python\n")
    code, _, _ = rest.partition("```")
    changes = json.dumps(SMALL | {"run": "runs/mine"})
    code = code.replace(
        '{"run": "runs/mine"}', changes.replace("true", "True").replace("false", "False")
    )
    assert changes[:20] in code
    variables = {"PYTHONPATH": str(Path(__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
