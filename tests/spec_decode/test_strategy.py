"""Strategies and their text form."""

from __future__ import annotations

import pytest

from tlt_jax.spec_decode.strategy import DRAFTERS, Strategy, name, parse

SHAPES = ["3_1_4", "6_4_16", "1_1_2"]


@pytest.mark.parametrize("drafter", ["", *DRAFTERS])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_strategy_with_and_without_a_drafter_is_written_and_read_back(drafter, shape):
    text = f"{drafter}:{shape}" if drafter else shape
    strategy = parse(text)
    assert name(strategy) == text and strategy.drafter == drafter
    assert Strategy(strategy.depth, strategy.topk, strategy.nodes) == parse(shape)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("eagle:3_1_4", "unknown drafter 'eagle': use one of ngram, learned, merged"),
        (":3_1_4", "depth_topk_nodes"),
        ("6_4_-1", "depth_topk_nodes"),
        ("0_4_16", "depth is 0"),
        ("6_0_16", "topk is 0"),
        ("2_2_8", "use nodes 7"),
        ("ngram:off", "depth_topk_nodes"),
        ("ngram:8_4_8", "strategy ngram:8_4_8: 8 nodes .* use nodes 9"),
    ],
)
def test_a_strategy_of_no_drafter_or_tree_is_refused_by_name(text, says):
    with pytest.raises(ValueError, match=says):
        parse(text)


def test_only_ngrams_draft_their_levels_for_nothing():
    levels = [parse(text).drafted_levels for text in ("5_1_6", *(f"{d}:5_1_6" for d in DRAFTERS))]
    assert levels == [5, 0, 5, 5]
