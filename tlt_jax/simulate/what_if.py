"""What a measure would be worth: a cost table in which named parts take other seconds. Knows no run. No JAX."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tlt_jax.errors import ConfigError
from tlt_jax.simulate.cost_table import PROGRAMS, CostTable, normal
from tlt_jax.spec_decode.strategy import NGRAM, PLAIN, Strategy

BYTES = 2  # of a cached number
DRAFTING, VERIFICATION, TREE_ATTENTION = "drafting", "verification", "tree_attention"
CALLS = tuple(one for one in PROGRAMS if one not in ("round", "attention"))
# Parts that a factor scales. drafting: what a round takes more than one with the same tree of n-grams. verification: what that
# one takes more than a plain round, without reading the cache.
SCALED = (DRAFTING, VERIFICATION, *CALLS)
PARTS = (*SCALED, TREE_ATTENTION)


def parsed(words: Sequence[str]) -> dict[str, float]:
    """The values by part of --what-if PART=NUMBER ...: factors, and tree_attention's share of a copy's bandwidth.

    Raises ConfigError for an unknown part or a value that is no such number.
    """
    found: dict[str, float] = {}
    for word in words:
        part, _, text = word.partition("=")
        if part not in PARTS:
            raise ConfigError(f"--what-if {word}: no part {part!r}: parts are {', '.join(PARTS)}")
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        is_share = part == TREE_ATTENTION
        if not (math.isfinite(value) and value >= 0) or (is_share and not 0 < value <= 1):
            what = "a share above 0, at most 1" if is_share else "a factor, 0 or more"
            raise ConfigError(f"--what-if {word}: give {part}={what}")
        found[part] = value
    return found


def table(base: CostTable, values: Mapping[str, float]) -> CostTable:
    """The table with these values by part; without any the table itself.

    Raises ConfigError for tree_attention where attention was not measured apart.
    """
    if TREE_ATTENTION in values and not (base.attention and "copy" in base.facts):
        raise ConfigError(
            f"--what-if {TREE_ATTENTION}={values[TREE_ATTENTION]:g}: this table has no rows of attention: "
            "use --costs h200_qwen2.5_7b"
        )
    kept = base.rows, base.facts, base.node, base.one_pass
    return ChangedTable(*kept, base=base, values=dict(values)) if values else base


@dataclass(frozen=True)
class ChangedTable(CostTable):
    """The table `base` with other seconds of some parts; see `parsed`."""

    base: CostTable = field(kw_only=True)
    values: Mapping[str, float] = field(kw_only=True)

    @property
    def reads_held(self) -> bool:
        return self.base.reads_held

    def factor(self, part: str) -> float:
        """The factor of a part."""
        return self.values.get(part, 1.0)

    def shape(self, batch: int, strategy: Strategy) -> tuple[float, float, float]:
        """As CostTable.shape."""
        fixed, each, error = self.base.shape(batch, strategy)
        if not strategy.depth:
            return fixed, each, error
        arm = normal(strategy)
        alone = Strategy(arm.depth, arm.topk, arm.nodes, NGRAM)
        (verified, *_), (plain, *_) = (self.base.shape(batch, one) for one in (alone, PLAIN))
        fixed += (self.factor(DRAFTING) - 1) * max(fixed - verified, 0.0)
        fixed += (self.factor(VERIFICATION) - 1) * max(verified - plain, 0.0)
        return fixed, min(each, self.most_each(batch)), error

    def most_each(self, batch: int) -> float:
        """Seconds for each token that a row holds when the cache is read at tree_attention's share of a copy's bandwidth."""
        if TREE_ATTENTION not in self.values:
            return math.inf
        words = self.base.facts["sizes"].split()
        cached = int(words[words.index("cached") + 1])
        copy = float(self.base.facts["copy"].split()[0])
        return batch * BYTES * cached / (self.values[TREE_ATTENTION] * copy)

    def call_seconds(self, program: str, tokens: float) -> float:
        return self.factor(program) * self.base.seconds(program, tokens)

    def compile_rows(self) -> list[tuple[Strategy, float]]:
        factor = self.factor("compile")
        return [(strategy, factor * seconds) for strategy, seconds in self.base.compile_rows()]
