"""Cost tables: what is refused, what is interpolated, and how far from rows that follow a law."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from tlt_jax.errors import DataError
from tlt_jax.models import drafter as drafters, hf_config
from tlt_jax.rollout.executables.programs import CatchUp, StateShape
from tlt_jax.simulate import cost_table, estimate
from tlt_jax.simulate.cost_table import CostRow, CostTable
from tlt_jax.simulate.estimate import DEVICES, Estimate, Sizes
from tlt_jax.simulate.simulator import noiseless_seconds
from tlt_jax.spec_decode.strategy import LEARNED, PLAIN, Strategy, parse
from tlt_jax.tuner.cost_model import DENSE, Networks

SHIPPED = Path(cost_table.__file__).parent / "costs/h200_qwen2.5_7b.csv"
HEAD = "program,rows,slots,held,strategy,drafter,tokens,seconds,source,note\n"
PLAIN_ROUND = "round,1,64,,off,,,0.01,measured,\n"
DRAFTED = Strategy(4, 2, 8, LEARNED)
ARMS = [parse(text) for text in ("1_1_2", "3_1_4", "6_4_16", "8_4_48")]


def written(tmp_path, text):
    path = tmp_path / "costs.csv"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "no head"),
        (HEAD.replace("held", "keld"), "unknown column 'keld': the columns are program, rows"),
        (HEAD + "sleep,,,,,,,1,measured,\n", "row 1: unknown program 'sleep': use one of round"),
        (HEAD + PLAIN_ROUND + "round,1,64,,off,,,,measured,\n", "row 2: round without seconds"),
        (HEAD + "round,1,,,off,,,0.01,measured,\n", "row 1: round without slots"),
        (HEAD + "update,,,,,,,2,measured,\n", "update without tokens"),
        (HEAD + "round,1,64,,off,,,0.01,guess,\n", "unknown source 'guess'"),
        (HEAD + "round,1,64,,off,,,-1,measured,\n", "seconds '-1': give a finite number above 0"),
        (HEAD + "round,1,64,,2_2_99,,,1,measured,\n", "99 nodes|6 candidates"),
        (HEAD + "round,1,64,,2_2_4,medusa,,1,measured,\n", "unknown drafter 'medusa'"),
        (HEAD + "round,1,64,,2_2_4,,,1,measured,\n", "no plain round"),
        (HEAD + PLAIN_ROUND + "round,4,64,32,off,,,0.01,measured,\n", "some rounds have `held`"),
        (HEAD + "reward,,,,,,,1,measured,a,b\n", "quote a note with commas"),
    ],
)
def test_a_wrong_table_is_refused_by_name_in_one_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message) as caught:
        cost_table.read(written(tmp_path, text))
    assert "costs.csv" in str(caught.value) and "\n" not in str(caught.value)


def test_a_table_that_is_written_is_read_back(tmp_path):
    first = cost_table.read(SHIPPED)
    path = written(tmp_path, cost_table.text_of(first.rows, first.facts))
    again = cost_table.read(path)
    assert again.rows == first.rows and again.facts == first.facts and len(first.rows) > 15


def test_measured_rounds_are_reproduced_and_others_are_less_certain():
    table = cost_table.read(SHIPPED)
    for row in table.of("round"):
        arm = cost_table.normal(row.strategy, row.drafter)
        found = table.round_seconds(row.rows, row.slots, arm, row.held)
        assert found == pytest.approx(row.seconds, rel=0.01)
        assert table.shape(row.rows, arm)[2] < 0.05 < table.shape(row.rows + 1, arm)[2]


def law(batch, strategy, read):
    """Seconds of a round of a made-up machine: linear in the named terms."""
    levels, topk = strategy.drafted_levels, strategy.topk
    nodes, drafted = batch * strategy.nodes, batch * levels * topk
    return 4e-3 + 2e-5 * nodes + 3e-4 * levels + 4e-6 * drafted + 2e-8 * batch * read


@pytest.mark.parametrize("held", [0.0, 700.0])
def test_missing_rounds_follow_the_law_of_the_measured_ones(held):
    """Of 30 rounds every third is left out, and predicted from the others: within 5 %."""
    rows = [
        CostRow(
            "round", law(batch, arm, held or slots), "measured", batch, slots, held, arm, "eagle3"
        )
        for batch in (1, 8, 64)
        for slots in (1024, 4096)
        for arm in (PLAIN, *ARMS)
    ]
    kept = [row for at, row in enumerate(rows) if at % 3 != 1]
    table = CostTable(tuple(kept))
    for row in rows:
        arm = cost_table.normal(row.strategy, row.drafter)
        found = table.round_seconds(row.rows, row.slots, arm, row.held)
        assert found == pytest.approx(row.seconds, rel=0.05)
    grows = [table.round_seconds(64, 4096, PLAIN, read) for read in (100.0, 10_000.0)]
    assert (grows[1] > grows[0]) == bool(held)


def test_missing_rounds_of_a_mixture_follow_the_measured_ones_with_its_experts():
    """All experts take 16 ms: every third round is predicted from the others within 8 %; without the term up to 32 % off."""
    networks, batches = Networks(None, 128, 8), (1, 4, 16, 64)

    def seconds(batch, arm):
        return law(batch, arm, 1024) + 16e-3 * networks.touched(batch * arm.nodes)

    cells = [(batch, cost_table.normal(arm)) for batch in batches for arm in (PLAIN, *ARMS)]
    rows = [
        CostRow("round", seconds(*cell), "measured", cell[0], 1024, 0.0, cell[1]) for cell in cells
    ]
    kept, off = tuple(row for at, row in enumerate(rows) if at % 3 != 1), []
    for one in (networks, DENSE):
        table = CostTable(kept, networks=one)
        found = [table.round_seconds(batch, 1024, arm, 0.0) / seconds(batch, arm) for batch, arm in cells]  # fmt: skip
        off.append(float(np.abs(np.log(found)).max()))
    assert off[0] < 0.08 < 0.25 < off[1]


def test_calls_are_linear_in_their_tokens_and_scaled_by_the_nearest_row():
    measured = ((0.5 + tokens / 1e4, tokens) for tokens in (1e3, 1e4, 1e5))
    rows = [CostRow("update", seconds, "measured", tokens=tokens) for seconds, tokens in measured]
    table = CostTable(tuple(rows))
    assert table.seconds("update", 3e4) == pytest.approx(3.5, rel=0.1)
    assert table.seconds("update", 1e5) == pytest.approx(10.5, rel=1e-6)
    assert table.seconds("save") == 0.0 and math.isinf(table.error("save"))
    assert CostTable(tuple(rows[:1])).seconds("update", 2e3) == pytest.approx(1.2, rel=0.1)


# Estimates

POLICY = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
MODEL = hf_config.new_config(POLICY, 152064, ())
SIZES = "read", "layers", "cached", "level", "width"
DRAFTER = drafters.for_policy(MODEL, "eagle3", draft_vocab_size=32000)


def test_sizes_are_those_counted_by_hand():
    """Qwen2.5-7B: 28 layers of width 3584, 28 + 2 x 4 heads of 128, an MLP of 18944, a head of 152064."""
    layer = 3584 * 128 * (28 + 2 * 4) + 128 * (28 + 2 * 4) + 28 * 128 * 3584 + 3 * 3584 * 18944
    norms = 28 * 2 * 3584 + 3584
    sizes = Sizes.of(MODEL, DRAFTER)
    assert sizes.read == 28 * layer + norms + 3584 * 152064
    assert sizes.cached == 2 * 28 * 4 * 128


MIXED = hf_config.new_config(
    POLICY | {
        "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_attention_heads": 32, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8,
    }, 151936, (),
)  # fmt: skip


@pytest.mark.parametrize("dense_layers", [(), (0, 3)])
def test_sizes_of_a_mixture_of_experts_are_those_counted_by_hand(dense_layers):
    """Qwen3-30B-A3B: 48 layers of width 2048, 32 + 2 x 4 heads of 128, 128 experts of width 768, 8 a token."""
    sizes, count = Sizes.of(replace(MIXED, dense_layers=dense_layers)), 48 - len(dense_layers)
    attention = 2048 * 128 * (32 + 2 * 4) + 32 * 128 * 2048 + 2 * 128
    dense = len(dense_layers) * 3 * 2048 * 6144
    assert sizes.experts == count * 128 * 3 * 2048 * 768
    norms = 48 * 2 * 2048 + 2048
    assert sizes.read == 48 * attention + count * 128 * 2048 + dense + norms + 2048 * 151936
    assert sizes.reads(1) == pytest.approx(sizes.read + sizes.experts / 16)
    assert sizes.reads(1000) == pytest.approx(sizes.read + sizes.experts)
    assert sizes.cached == 2 * 48 * 4 * 128


def test_a_round_of_a_mixture_reads_the_experts_that_its_nodes_touch():
    """Trees of 8 nodes of 3 rows that hold 1,000 tokens; by hand. Updates compute what a token has, and all is published."""
    sizes = Sizes(10**9, 10, 10**4, width=10**5, experts=16 * 10**9, networks=Networks(None, 16, 2))
    there = Estimate(sizes, estimate.Device(1e12, 1e15, 1e11))
    read = 10**9 + 16 * 10**9 * (1 - (14 / 16) ** 24)
    moved = 2 * (read + 3 * 1000 * 10**4) / (1e12 * 4.3 / 4.8)
    flop = 2 * 24 * (3 * 10**9 + 1000 * 10**5) / (1e15 * 791 / 989)
    found = there.round_seconds(3, parse("ngram:7_1_8"), 1000.0)
    assert found == pytest.approx(moved + flop + (19 * 10 + 40) * 1.5e-6)
    rows = {row.program: row.seconds for row in estimate.estimated_rows(there, 0.5)}
    assert rows["update"] == pytest.approx(6 * 3 * 10**9 * 16384 / 1e15 / 0.5)
    assert rows["publish"] == pytest.approx(2 * 17 * 10**9 / 50e9)


def test_levels_of_a_drafter_read_its_weights_and_the_head_that_it_uses():
    """EAGLE multiplies by the policy's head of 152064 tokens, EAGLE-3 by its own of 32000; by hand for EAGLE."""
    own, shared = (
        Sizes.of(MODEL, drafters.for_policy(MODEL, kind)) for kind in ("eagle3", "eagle")
    )
    layer = 3584 * 128 * (28 + 2 * 4) + 28 * 128 * 3584 + 3 * 3584 * 18944
    norms_and_biases = 40_000
    assert abs(shared.level - (layer + 2 * 3584 * 3584 + 152064 * 3584)) < norms_and_biases
    assert own.level > 152064 * 3584 and Sizes.of(MODEL, DRAFTER).level < own.level


def test_a_round_is_its_bytes_its_flop_its_kernels_and_its_sums_over_devices():
    """4 rows of a tree of 8 nodes and 2 levels of 3 that hold 1,000 tokens, on two devices; by hand."""
    sizes = Sizes(read=10**9, layers=10, cached=10**4, level=10**8, width=10**5)
    there = Estimate(sizes, estimate.Device(1e12, 1e15, 1e11), 2)
    moved = 2 * (10**9 + 4 * 1000 * 10**4 + 2 * 10**8) / (1e12 * 4.3 / 4.8)
    flop = 2 * (32 * (10**9 + 1000 * 10**5) + 24 * 10**8) / (1e15 * 791 / 989)
    kernels = (19 * 10 + 40 + 30 * 2) * 1.5e-6
    sums = 2 * (10 * 32 + 24) * 5000 * 2 * 2 * 0.5 / 1e11 + 2 * (10 + 2) * 3e-6
    found = there.round_seconds(4, Strategy(2, 3, 8, "learned"), 1000.0)
    assert found == pytest.approx((moved + flop) / 2 + kernels + sums)


def test_a_round_reads_what_windows_hold():
    windowed = replace(MODEL, num_layers=4, windows=(512, 512, 512, 0))
    sizes = Sizes.of(windowed)
    assert [sizes.seen(held) for held in (100, 512, 4608)] == [100, 512, (3 * 512 + 4608) / 4]
    assert Sizes.of(replace(windowed, windows=())).seen(4608) == 4608


def test_estimates_of_the_measured_rounds_differ_from_them_by_one_factor():
    """Of 13 rounds of an H200, plain and with trees, of 1 to 128 rows: within 12 % once scaled, and the factor is near 1."""
    table = cost_table.read(SHIPPED)
    there = Estimate(Sizes.parsed(table.facts["sizes"]), DEVICES["h200"])
    factor, spread = estimate.factor(table, there)
    assert 1 < factor < 1.2 and spread < 0.05
    for row in table.of("round"):
        arm = cost_table.normal(row.strategy, row.drafter)
        found = factor * there.round_seconds(row.rows, arm, row.read)
        assert found == pytest.approx(row.seconds, rel=0.12)


def test_the_factor_of_an_estimate_is_that_of_the_measured_table_and_carries_over():
    there = Estimate(Sizes.of(MODEL, DRAFTER), DEVICES["h200"])
    cells = [(batch, arm) for batch in (1, 8, 64) for arm in (PLAIN, Strategy(6, 4, 16, "learned"))]
    rows = [
        CostRow("round", 1.3 * there.round_seconds(*cell, 2048.0), "measured", cell[0], 4096, 2048.0, cell[1])
        for cell in cells
    ]  # fmt: skip
    update = there.update_seconds(1e4, there.sizes.read) / 0.4
    rows.append(CostRow("update", update, "measured", tokens=1e4))
    sizes = " ".join(f"{name} {getattr(there.sizes, name)}" for name in SIZES)
    measured = CostTable(tuple(rows), {"device": "h200", "devices": "1", "sizes": sizes})
    assert estimate.factor(measured, there) == pytest.approx((1.3, 0.0))
    same = estimate.table("h200", 1, MODEL, DRAFTER, measured)
    for row in rows[:-1]:
        found = same.round_seconds(row.rows, row.slots, row.strategy, row.held)
        assert found == pytest.approx(row.seconds, rel=0.02)
    assert same.seconds("update", 1e4) == pytest.approx(rows[-1].seconds, rel=0.05)
    other = estimate.table("h100", 1, MODEL, DRAFTER, measured)
    first, second = (one.round_seconds(1, 4096, PLAIN, 2048.0) for one in (same, other))
    bandwidths = DEVICES["h200"].bandwidth / DEVICES["h100"].bandwidth
    assert 1 < second / first < bandwidths, "kernels are launched as fast"
    assert {row.source for row in other.rows} == {"estimate"} and np.isfinite(other.spread)


# Attention that was measured apart


def round_law(batch, strategy, held):
    """Seconds of a made-up round, whose attention grows with rows, tokens and nodes."""
    read = batch * held * (5e-9 + 2e-9 * strategy.nodes)
    return 4e-3 + 1e-5 * batch * strategy.nodes + 3e-4 * strategy.drafted_levels + read


def test_with_attention_apart_rounds_of_longer_answers_follow_the_round_law():
    """Measured with 2,048 tokens a row, predicted with 16,384: within 10 %; without the rows of attention up to twice off."""
    arms = [PLAIN, parse("4_2_8"), parse("8_4_48")]
    rounds = [
        CostRow("round", round_law(batch, arm, 2048.0), "measured", batch, 4096, 2048.0, arm, "eagle3" if arm.depth else "")
        for batch in (1, 8, 32) for arm in arms
    ]  # fmt: skip
    apart = [
        CostRow("attention", 1e-4 + batch * 2048 * (5e-9 + 2e-9 * arm.nodes), "measured", batch, 4096, 2048.0, arm)
        for batch in (1, 8, 32) for arm in arms
    ]  # fmt: skip
    tables = CostTable((*rounds, *apart)), CostTable(tuple(rounds))
    off = []
    for one in tables:
        found = [one.round_seconds(b, 32768, cost_table.normal(a), 16384.0) / round_law(b, cost_table.normal(a), 16384.0)
                 for b in (1, 8, 32) for a in arms]  # fmt: skip
        off.append(float(np.abs(np.log(found)).max()))
    assert off[0] < 0.1 < 0.3 < off[1]
    near = tables[0].round_seconds(8, 4096, DRAFTED, 2048.0)
    assert near == pytest.approx(round_law(8, DRAFTED, 2048.0), rel=0.01)


def test_attention_that_takes_longer_than_its_round_is_refused(tmp_path):
    head = "round,8,4096,2048,off,,,"
    text = SHIPPED.read_text().replace(f"{head}0.00484", f"{head}0.0001")
    with pytest.raises(DataError, match="a round of 8 rows takes 0.0001 s, and its attention"):
        cost_table.read(written(tmp_path, text))


def test_a_catch_up_reads_the_cache_of_each_row_once_for_its_own_tokens():
    """4 rows of 1,000 slots lack 40 tokens: ten nodes of each row, not 40 nodes in one row of 4,000."""
    seen = []
    noiseless_seconds(lambda *given: seen.append(given) or 1.0, CatchUp(StateShape(0, 4, 1000)), 40)
    assert seen == [(4, 1000, replace(PLAIN, nodes=10))]
