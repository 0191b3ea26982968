"""The toy runs of the training loop's tests: their folder, and their configuration."""

from __future__ import annotations

import json

import pytest
from training_runs import KNOBS, TASK, built

from tlt_jax.data import tasks
from tlt_jax.train import policy_update


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder for all tests: three problems for training, two for evaluation."""
    root = tmp_path_factory.mktemp("train")
    task = tasks.make("fold", TASK)
    task.tokenizer().save_pretrained(root / "tokenizer")
    rows = [{"prompt": row.prompt, "answer": row.answer} for row in task.rows(0, range(5), "train")]
    (root / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return root


@pytest.fixture(scope="module")
def configure(shared):
    """configure(run folder, {knob: value}) -> the toy configuration: generated problems, no export."""

    return lambda run, knobs=None: built(
        KNOBS | {"run": run, "checkpoint.export": False} | (knobs or {})
    )


@pytest.fixture
def shallow(monkeypatch):
    """A policy without layers, whose programs compile at once."""
    monkeypatch.setattr(
        policy_update, "states", lambda params, rows, _: (params.embed[rows.tokens], None)
    )
    policy_update.programs.cache_clear()
    yield
    policy_update.programs.cache_clear()
