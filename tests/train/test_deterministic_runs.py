"""`rollout.deterministic`: a run in bfloat16 that drafts repeats and resumes bit for bit, however the machine delays it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

import pytest
from pairwise import marked
from training_runs import resumed

from tlt_jax import cli
from tlt_jax.config import Config
from tlt_jax.rollout import learned_drafter
from tlt_jax.rollout.scheduler import group
from tlt_jax.train import loop

BFLOAT16 = {
    "model.compute_dtype": "bfloat16",
    "model.init": {
        "model_type": "qwen2", "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4,
        "num_key_value_heads": 2, "intermediate_size": 64, "max_position_embeddings": 128,
    },
    "rollout.deterministic": True,
    "rollout.prompts": 4,
    "rollout.samples": 4,
    "rollout.slots": 6,
    "rollout.max_new_tokens": 32,
    "rollout.chunk": 4,
    "train.steps": 3,
    "train.row_tokens": 128,
    "eval.every": 2,
    "sft.steps": 0,
}  # fmt: skip


DRAFTERS = {
    "ngram": {"speculation.strategies": ["2_2_4", "3_1_4"]},
    "adaptive": {
        "speculation.strategies": ["2_2_4"], "idle_training.learning_rate": 0.01, "drafter_training.share": 1.0,
    },
}  # fmt: skip


def delay(monkeypatch, seed: int) -> None:
    """Delays the detection of finished work, at random and by a random time."""
    draw, is_ready = random.Random(seed), group.is_ready

    def late(state):
        time.sleep(0.004 * draw.random() ** 4)
        return draw.random() < 0.3 and is_ready(state)

    monkeypatch.setattr(group, "is_ready", late)


def chunks(config) -> list[tuple]:
    """Strategy, shape, rounds and rows of every chunk that ran."""
    fields = ("group", "strategy", "batch", "slots", "rounds", "tokens", "reason")
    lines = [
        json.loads(line)
        for file in sorted((Path(config.run) / "speculation").iterdir())
        for line in file.read_text().splitlines()
    ]
    assert {line["strategy"] for line in lines} > {"off"}, "some chunk drafted"
    return sorted(tuple(str(line[field]) for field in fields) for line in lines)


@pytest.fixture(scope="module")
def undelayed(configure, shared):
    """undelayed(drafter) -> the configuration of a finished run on a few problems, repeated many times, which is run once."""
    done: dict[str, Config] = {}

    def make(drafter: str) -> Config:
        if drafter not in done:
            data = {"data.train": shared / "rows.jsonl", "model.tokenizer": shared / "tokenizer"}
            config = configure(
                shared / drafter,
                BFLOAT16 | DRAFTERS[drafter] | data | {"speculation.drafter": drafter},
            )
            assert loop.train(config) == cli.DONE
            done[drafter] = config
        return done[drafter]

    return make


@pytest.mark.parametrize(
    ("drafter", "step"),
    marked([
        *((("adaptive", step), step == 1) for step in (0, 1, 2)),
        *((("ngram", step), False) for step in (0, 1, 2)),
    ]),
)  # fmt: skip
def test_a_run_repeats_and_resumes_bit_for_bit_whatever_delays_it(
    undelayed, tmp_path, monkeypatch, drafter, step
):
    """`adaptive` drafts with n-grams, too, and learns without a clock."""
    monkeypatch.setattr(learned_drafter, "DETERMINISTIC_GAIN", -10.0)  # drafts once it is measured
    whole = undelayed(drafter)
    used = {chunk[1].partition(":")[0] for chunk in chunks(whole)}
    assert drafter == "ngram" or used & {"learned", "merged"}
    delay(monkeypatch, step + 1)
    assert chunks(resumed(whole, tmp_path / "run", step)) == chunks(whole)
