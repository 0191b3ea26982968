"""What-if tables: a factor of 1 changes no bit, a part changes what it names and nothing else, unknown parts are refused."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tests.simulate.test_simulated_run import configuration, steps_of, table, world
from tlt_jax.config.schema import Speculation
from tlt_jax.errors import ConfigError, DataError
from tlt_jax.rollout.executables.programs import CatchUp, StateShape
from tlt_jax.simulate import attention, cost_table, what_if
from tlt_jax.simulate.acceptance import Acceptances, Curve
from tlt_jax.simulate.cost_table import CostTable, Row
from tlt_jax.simulate.round_costs import noiseless_seconds
from tlt_jax.spec_decode.strategy import LEARNED, NGRAM, PLAIN, Strategy, parse

SHIPPED = Path(cost_table.__file__).parent / "costs/h200_qwen2.5_7b.csv"
TREE = Strategy(4, 2, 8, LEARNED)
SAME_TREE = Strategy(4, 2, 8, NGRAM)


@pytest.fixture(scope="module")
def shipped():
    return cost_table.read(SHIPPED)


def changed(base, **values):
    return what_if.table(
        base, what_if.parsed([f"{part}={value}" for part, value in values.items()])
    )


def test_factors_of_one_change_no_bit_of_a_run():
    given = world(groups=2, compiles=True)
    same = replace(given, table=changed(given.table, **dict.fromkeys(what_if.SCALED, 1)))
    for name in ("plain", "adaptive"):
        assert repr(steps_of(name, given)) == repr(steps_of(name, same))
    assert what_if.table(given.table, {}) is given.table


def test_faster_drafting_helps_runs_that_draft_by_a_network_and_changes_no_other():
    accepted = Acceptances((0.5,), Curve((0.9,), (0.9,)))
    given = world(table(drafted=1.5), steps=1, accepted=accepted)
    free = replace(given, table=changed(given.table, drafting=0))
    config = replace(configuration(), speculation=Speculation(tuner="fixed", strategies=["3_1_4"]))
    seconds = {}
    for name in ("plain", "ngram", "frozen"):
        found = [steps_of(name, one, config)[0] for one in (given, free)]
        seconds[name] = [one.seconds["rollout"] for one in found]
    assert seconds["plain"][0] == seconds["plain"][1] and seconds["ngram"][0] == seconds["ngram"][1]
    assert seconds["frozen"][1] < 0.9 * seconds["frozen"][0]


def test_a_run_of_ngrams_alone_accepts_what_ngrams_do():
    """Its strategies name no drafter. Chains of three: 1 + 0.9 + 0.81 + 0.73 tokens a round, less the ends of answers."""
    accepted = Acceptances((0.9,), Curve((0.1,), (0.1,)))
    config = replace(configuration(), speculation=Speculation(tuner="fixed", strategies=["3_1_4"]))
    (step,) = steps_of("ngram", world(steps=1, accepted=accepted), config)
    assert step.accept_length == pytest.approx(3.44, rel=0.08) and step.strategies.keys() == {
        "ngram"
    }


def test_a_call_of_a_step_takes_its_factor_of_the_seconds():
    given = world(steps=1)
    (before,) = steps_of("plain", given)
    (after,) = steps_of("plain", replace(given, table=changed(given.table, update=0.5, publish=3)))
    assert after.seconds["update"] == pytest.approx(0.5 * before.seconds["update"])
    assert after.seconds["publish"] == pytest.approx(3 * before.seconds["publish"])
    assert after.seconds["rollout"] == before.seconds["rollout"]
    compiled = changed(given.table, compile=0.25).compile_rows()
    assert compiled == [(PLAIN, 0.25 * 0.5)]


@pytest.mark.parametrize("batch", [1, 8, 20])
def test_drafting_and_verification_are_what_a_round_takes_beyond_a_smaller_one(shipped, batch):
    """By hand: without drafting a round is one of n-grams, without verification too a plain one."""
    drafted, alone, plain = (shipped.shape(batch, one)[0] for one in (TREE, SAME_TREE, PLAIN))
    assert drafted > alone > plain
    half = changed(shipped, drafting=0.5).shape(batch, TREE)[0]
    assert half == pytest.approx(alone + 0.5 * (drafted - alone))
    bare = changed(shipped, drafting=0, verification=0)
    assert bare.shape(batch, TREE)[0] == pytest.approx(plain)
    prefill = replace(PLAIN, nodes=512)
    assert bare.shape(batch, prefill) == shipped.shape(batch, prefill)


def test_tree_attention_at_a_share_of_the_copy_takes_the_seconds_of_its_bytes(shipped):
    """28 layers x 2 x 4 heads x 128 numbers of two bytes at 0.7 of 3.61 TB/s, a row and token; less is never slower."""
    each = 28 * 2 * 4 * 128 * 2 / (0.7 * 3.61e12)
    fast = changed(shipped, tree_attention=0.7)
    found, before = (one.shape(8, Strategy(8, 4, 48, NGRAM)) for one in (fast, shipped))
    assert found[1] == pytest.approx(8 * each, rel=1e-3) and found[1] < 0.2 * before[1]
    assert found[0] == before[0], "launches take as long"
    assert fast.shape(8, PLAIN) == shipped.shape(8, PLAIN)
    slow = changed(shipped, tree_attention=0.01)
    assert slow.shape(8, SAME_TREE) == shipped.shape(8, SAME_TREE)


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("attention=2", "no part 'attention': parts are drafting, verification, update"),
        ("drafting", "give drafting=a factor"), ("drafting=-1", "give drafting=a factor, 0 or more"),
        ("update=nan", "give update=a factor"), ("tree_attention=1.5", "a share above 0, at most 1"),
    ],
)  # fmt: skip
def test_a_wrong_part_or_factor_is_refused_by_name(word, message):
    with pytest.raises(ConfigError, match=message):
        what_if.parsed([word])


def test_tree_attention_needs_a_table_with_rows_of_attention():
    with pytest.raises(ConfigError, match="no rows of attention: use --costs h200"):
        changed(table(), tree_attention=0.7)


# Attention that was measured apart


def test_attention_is_recovered_from_cases_that_follow_a_law():
    """0.2 ms, 5 ns a token and 1 ns a token and node."""
    cases = [(rows, nodes, 2048.0) for rows in (1, 8, 64) for nodes in (1, 8, 48)]
    seconds = [2e-4 + rows * held * (5e-9 + 1e-9 * nodes) for rows, nodes, held in cases]
    found = attention.fit(*zip(*cases, strict=True), seconds)
    assert found == pytest.approx((5e-9, 1e-9), rel=0.15)
    assert found.slope(4, 16) == pytest.approx(4 * (found.token + 16 * found.node))


def law(batch, strategy, held):
    """Seconds of a made-up round, whose attention grows with rows, tokens and nodes."""
    read = batch * held * (5e-9 + 2e-9 * strategy.nodes)
    return 4e-3 + 1e-5 * batch * strategy.nodes + 3e-4 * strategy.drafted_levels + read


def test_with_attention_apart_rounds_of_longer_answers_follow_the_law():
    """Measured with 2,048 tokens a row, predicted with 16,384: within 10 %; without the rows of attention up to twice off."""
    arms = [PLAIN, parse("4_2_8"), parse("8_4_48")]
    rounds = [
        Row("round", law(batch, arm, 2048.0), "measured", batch, 4096, 2048.0, arm, "eagle3" if arm.depth else "")
        for batch in (1, 8, 32) for arm in arms
    ]  # fmt: skip
    apart = [
        Row("attention", 1e-4 + batch * 2048 * (5e-9 + 2e-9 * arm.nodes), "measured", batch, 4096, 2048.0, arm)
        for batch in (1, 8, 32) for arm in arms
    ]  # fmt: skip
    tables = CostTable((*rounds, *apart)), CostTable(tuple(rounds))
    off = []
    for one in tables:
        found = [one.round_seconds(b, 32768, cost_table.normal(a), 16384.0) / law(b, cost_table.normal(a), 16384.0)
                 for b in (1, 8, 32) for a in arms]  # fmt: skip
        off.append(float(np.abs(np.log(found)).max()))
    assert off[0] < 0.1 < 0.3 < off[1]
    near = tables[0].round_seconds(8, 4096, TREE, 2048.0)
    assert near == pytest.approx(law(8, TREE, 2048.0), rel=0.01)


def test_attention_that_takes_longer_than_its_round_is_refused(tmp_path):
    text = SHIPPED.read_text().replace(
        "round,8,4096,2048,off,,,0.00484", "round,8,4096,2048,off,,,0.0001"
    )
    (tmp_path / "costs.csv").write_text(text)
    with pytest.raises(DataError, match="a round of 8 rows takes 0.0001 s, and its attention"):
        cost_table.read(tmp_path / "costs.csv")


def test_a_catch_up_reads_the_cache_of_each_row_once_for_its_own_tokens():
    """4 rows of 1,000 slots lack 40 tokens: ten nodes of each row, not 40 nodes in one row of 4,000."""
    seen = []
    noiseless_seconds(lambda *given: seen.append(given) or 1.0, CatchUp(StateShape(0, 4, 1000)), 40)
    assert seen == [(4, 1000, replace(PLAIN, nodes=10))]
