"""`rollout.deterministic`: a run in bfloat16 that drafts repeats and resumes bit for bit, however the machine delays it."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path

from training_runs import resumed

from tlt_jax import cli
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
    "rollout.slots": 2,
    "rollout.max_new_tokens": 16,
    "rollout.chunk": 4,
    "train.steps": 2,
    "train.row_tokens": 128,
    "eval.every": 0,
    "sft.steps": 0,
}  # fmt: skip


ADAPTIVE = {
    "speculation.drafter": "adaptive", "speculation.strategies": ["2_2_4"], "idle_training.learning_rate": 0.01,
    "drafter_training.share": 1.0, "drafter_training.unroll": 1,
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


def test_a_run_repeats_and_resumes_bit_for_bit_whatever_delays_it(
    configure, shared, tmp_path, monkeypatch
):
    """On a few problems, repeated many times. It drafts with n-grams, too, and learns without a clock."""
    monkeypatch.setattr(learned_drafter, "DETERMINISTIC_GAIN", -10.0)  # drafts once it is measured
    data = {"data.train": shared / "rows.jsonl", "model.tokenizer": shared / "tokenizer"}
    whole = configure(tmp_path / "whole", BFLOAT16 | ADAPTIVE | data)
    assert loop.train(whole) == cli.DONE
    assert {chunk[1].partition(":")[0] for chunk in chunks(whole)} & {"learned", "merged"}
    delay(monkeypatch, seed=2)
    assert chunks(resumed(whole, tmp_path / "run", 1)) == chunks(whole)
