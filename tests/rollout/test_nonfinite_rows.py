"""A row does not depend on the other rows, though these hold NaN or infinity and rows are reused; exactly in float64."""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest
import test_speculation as speculation
import tiny_engine as tiny

from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.models.kv_cache import KVCache
from tlt_jax.rollout.recorder import NONFINITE, RolloutResult
from tlt_jax.rollout.scheduler import group as machine

small_pool = tiny.small_pool
pytestmark = pytest.mark.usefixtures("small_pool")
# Not tied: a token whose embedding is not finite has finite logits. Token 0 is padding and, as an EOS, in no pass.
POLICY, BAD = replace(tiny.MODEL, tied=False), (0, 17, 33)
LONG = [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6]
PROMPTS = [[3, 1, 4], [33, *LONG], [9], [36, 10], [*LONG, 17, 2], [1, 4], LONG, [5, 8, 33], [7, 12]]
EOS, SHAPE = POLICY.eos_ids[0], {
    "slots": 3, "batch_buckets": [3], "cache_buckets": [32], "chunk": 3, "policy": POLICY
}  # fmt: skip


def broken(prompt: list[int], answer: tuple[int, list[int], str]) -> tuple[int, list[int], str]:
    """What the answer of finite weights becomes: it ends with EOS after the first bad token that a pass reads."""
    uid, tokens, finish = answer
    read = [*prompt, *tokens[:-1]]
    bad = [place for place, token in enumerate(read) if token in BAD]
    if not bad:
        return answer
    kept = max(bad[0] + 1 - len(prompt), 0)
    return uid, [*tokens[:kept], EOS], NONFINITE


@pytest.mark.parametrize(
    "drafter",
    ["none", "eagle", *(pytest.param(it, marks=pytest.mark.matrix) for it in ("ngram", "dflash"))],
)
def test_a_row_does_not_depend_on_rows_that_are_not_finite(x64, monkeypatch, drafter):
    """And what is stored is finite after every chunk, but for keys."""
    if drafter == "none":
        engine = tiny.engine_of(**SHAPE)
        weights = engine.publish(tiny.params_of(engine))
    else:
        engine, weights = speculation.speculating(drafter, ["3_3_9", "1_2_2"], 1, 1, **SHAPE)

    def decoded(number: float) -> RolloutResult:
        parts = {}
        for group, one in weights.items():
            embed = one.target.embed.at[np.array(BAD)].set(number)
            parts[group] = one.replace(target=one.target.replace(embed=embed))
        return tiny.roll_out(
            engine, parts, PROMPTS, tiny.SAMPLES, tiny.PLAIN, tiny.LIMIT, stream=TRAIN_STREAM, step=0
        )  # fmt: skip

    retire, stored = machine.retire, []

    def read(group, state):
        of = jax.tree.leaves(state.device, is_leaf=lambda part: isinstance(part, KVCache))
        caches = [part for part in of if isinstance(part, KVCache)]
        leaves = jax.tree.leaves([(cache.values, cache.features) for cache in caches])
        stored.append(all(np.isfinite(leaf).all() for leaf in leaves))
        return retire(group, state)

    monkeypatch.setattr(machine, "retire", read)
    finite = decoded(0.5)
    expected = [broken(PROMPTS[one[0] // tiny.SAMPLES], one) for one in tiny.answers(finite)]
    broken_rows = sum(finish == NONFINITE for _, _, finish in expected)
    assert len(expected) / 3 < broken_rows < len(expected) - SHAPE["slots"]
    for number in (np.nan, np.inf):
        found = decoded(number)
        assert tiny.answers(found) == expected
        for one, other in zip(found.completions, finite.completions, strict=True):
            kept = len(one.tokens) - (one.finish == NONFINITE)
            np.testing.assert_allclose(one.logprobs[:kept], other.logprobs[:kept], atol=1e-9)
    assert stored and all(stored)
