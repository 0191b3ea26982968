"""The toy runs of the training loop's tests: their folder, and their configuration."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from training_runs import KNOBS, TASK

from tlt_jax.config import Config, load as configuration
from tlt_jax.data import tasks


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

    def make(run: Path, knobs: dict | None = None) -> Config:
        values = (
            KNOBS
            | {
                "run": run,
                "rollout.compile_cache": os.environ["TLT_JAX_TEST_PROGRAMS"],
                "checkpoint.export": False,
            }
            | (knobs or {})
        )
        pairs = [(name, value if isinstance(value, str) else json.dumps(value, default=str).strip('"'))
                 for name, value in values.items()]  # fmt: skip
        return configuration.build({}, pairs)

    return make
