"""A process trains only on its rows, so it needs only the answers in them, and the lengths of the others."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tlt_jax.config import Config
from tlt_jax.data import packing
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.rollout.recorder import Completion
from tlt_jax.train import batch as batches


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("groups", [1, 2, 4])
def test_the_rows_of_a_process_are_the_same_without_the_answers_that_it_does_not_need(seed, groups):
    draw, config = np.random.default_rng(seed), Config()
    config = replace(
        config,
        mesh=replace(config.mesh, data=groups),
        train=replace(config.train, rows=2 * groups, row_tokens=128),
        algorithm=replace(config.algorithm, minibatches=1 + seed % 3),
    )
    prompts = [Prompt(draw.integers(1, 99, draw.integers(2, 20)), {}) for _ in range(12)]
    answers = [
        Completion(uid, uid // 4, uid % 4, draw.integers(1, 99, n), draw.normal(size=n), "stop")
        for uid, n in enumerate(draw.integers(1, 100, 48))
    ]
    needed = [batches.needed(config, prompts, [group], answers) for group in range(groups)]
    assert set().union(*needed) == set(range(48)), "each answer is somebody's"
    assert sum(map(len, needed)) == 48, "and of nobody else"
    for group, uids in enumerate(needed):
        known = [
            one
            if one.uid in uids
            else replace(one, tokens=0 * one.tokens, logprobs=0 * one.logprobs)
            for one in answers
        ]
        for part in batches.split(config, answers):
            packed = [
                packing.pack(
                    [batches.example(prompts, those[i]) for i in part], 128, 2 * groups, groups
                )
                for those in (answers, known)
            ]
            placed = [
                one[1].place([those[i].logprobs for i in part])
                for one, those in zip(packed, (answers, known), strict=True)
            ]
            rows = slice(2 * group, 2 * group + 2)
            np.testing.assert_array_equal(placed[0][:, rows], placed[1][:, rows])
            for name in ("tokens", "targets", "positions", "segments"):
                one, other = (getattr(part[0], name)[:, rows] for part in packed)
                np.testing.assert_array_equal(one, other)
