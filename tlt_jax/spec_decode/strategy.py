"""Strategies: the shape of a draft tree, its drafter, and their names; no JAX."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

# Drafters that one engine may have: n-grams, the learned drafter, and the candidates of both in one tree.
NGRAM, LEARNED, MERGED = DRAFTERS = ("ngram", "learned", "merged")


@dataclass(frozen=True)
class Strategy:
    """Shape of a round's draft tree, and its drafter. Plain decoding is (0, 0, 1).

    depth: levels below the root; topk: largest number of children of a node; nodes: tree size, with the root. drafter:
    one of DRAFTERS; "": the only drafter of the engine.
    """

    depth: int = 0
    topk: int = 0
    nodes: int = 1
    drafter: str = ""

    @property
    def path(self) -> int:
        """M: most tokens that one round can emit, one per level and the bonus token."""
        return self.depth + 1

    @property
    def drafted_levels(self) -> int:
        """Levels that a network drafts; those of NGRAM cost nearly nothing."""
        return 0 if self.drafter == NGRAM else self.depth


PLAIN = Strategy()


OFF = "off"
TEXT = re.compile(r"(?:(\w+):)?(\d+)_(\d+)_(\d+)")


@lru_cache
def parse(text: str) -> Strategy:
    """The strategy of "depth_topk_nodes" (nodes with the root); "off" is plain decoding.

    "drafter:depth_topk_nodes" names its drafter, one of DRAFTERS. Raises ValueError for other text
    and for impossible trees.
    """
    if text == OFF:
        return PLAIN
    match = TEXT.fullmatch(text)
    if not match:
        raise ValueError(
            f"strategy {text!r} is not depth_topk_nodes: write three whole numbers, as in 6_4_16, or {OFF}"
        )
    drafter, *sizes = match.groups()
    if drafter and drafter not in DRAFTERS:
        raise ValueError(
            f"strategy {text!r}: unknown drafter {drafter!r}: use one of {', '.join(DRAFTERS)}"
        )
    strategy = Strategy(*map(int, sizes), drafter or "")
    check(strategy)
    return strategy


def name(strategy: Strategy) -> str:
    """The strategy as text, which `parse` reads."""
    if strategy == PLAIN:
        return OFF
    shape = f"{strategy.depth}_{strategy.topk}_{strategy.nodes}"
    return f"{strategy.drafter}:{shape}" if strategy.drafter else shape


def check(strategy: Strategy) -> None:
    """Raises ValueError unless the tree has enough candidates and can reach its depth."""
    depth, topk, nodes = strategy.depth, strategy.topk, strategy.nodes
    text = f"strategy {name(strategy)}"
    for what, number in (("depth", depth), ("topk", topk), ("nodes", nodes)):
        if number < 1:
            raise ValueError(
                f"{text}: {what} is {number}: use at least 1, or {OFF} for plain decoding"
            )

    if nodes <= depth:
        raise ValueError(
            f"{text}: {nodes} nodes with the root never reach depth {depth}: use nodes {depth + 1} or more"
        )

    most = topk + (depth - 1) * topk**2
    if nodes - 1 > most:
        raise ValueError(
            f"{text}: {depth} levels of topk {topk} make {most} candidates: use nodes {most + 1} or fewer"
        )
