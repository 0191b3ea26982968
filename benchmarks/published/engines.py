"""Cost tables of the engines behind published numbers: an estimate, and what a drafted round takes beyond it.

The paper's engine stops for its host between drafting, verifying and extending the drafter's cache. What that takes is what
a third party measured on two H20 (numbers.ENGINE_ROUNDS) beyond the estimate of the same round; it enters no figure of the
paper that it is compared with.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path

import numpy as np

from benchmarks.published import numbers
from tlt_jax.models import drafter_network, hf
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.drafter_network import DrafterConfig
from tlt_jax.simulate import cost_table, estimate
from tlt_jax.simulate.cost_table import ESTIMATE, LITERATURE, CostTable, Row
from tlt_jax.simulate.estimate import EstimatedTable
from tlt_jax.spec_decode.strategy import PLAIN, Strategy

MEASURED = Path(cost_table.__file__).parent / "costs/h200_qwen2.5_7b.csv"
SHAPES = {
    "Qwen2.5-7B": ("qwen2", 3584, 28, 28, 4, 18944, 152064),
    "Qwen2.5-32B": ("qwen2", 5120, 64, 40, 8, 27648, 152064),
    "Qwen3-8B": ("qwen3", 4096, 36, 32, 8, 12288, 151936),
}
DEVICE, DEVICES, POLICY = "h100", 4, "Qwen2.5-32B"  # of figure 13 and table 4
SLOTS, HELD, BATCHES = 8192, 1024.0, (1, 2, 4, 8, 16, 32, 64, 128, 256)
KNOBS = (
    "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "intermediate_size",
)  # fmt: skip


def policy(name: str) -> ModelConfig:
    """The sizes of a policy of SHAPES."""
    *sizes, vocab = SHAPES[name]
    rest = {"max_position_embeddings": 131072, "tie_word_embeddings": False}
    heads = {"head_dim": 128} if sizes[0] == "qwen3" else {}
    return hf.new_config(dict(zip(KNOBS, sizes, strict=True)) | rest | heads, vocab, ())


def drafter(name: str, kind: str) -> DrafterConfig:
    """A drafter of this kind; eagle3: of 32,000 tokens."""
    given = {"draft_vocab_size": 32000} if kind == "eagle3" else {}
    return drafter_network.for_policy(policy(name), kind, **given)


@dataclass(frozen=True)
class EngineTable(EstimatedTable):
    """An estimated table of an engine whose drafted rounds take `drafting` seconds more."""

    drafting: float = 0.0

    def shape(self, batch: int, strategy: Strategy) -> tuple[float, float, float]:
        """As CostTable.shape."""
        fixed, each, error = super().shape(batch, strategy)
        return fixed + (self.drafting if strategy != PLAIN else 0.0), each, error


@cache
def estimated(device: str, devices: int, name: str, kind: str = "eagle") -> EstimatedTable:
    """The estimate of our own programs for a policy on devices that are not here."""
    measured = cost_table.read(MEASURED)
    return estimate.table(device, devices, policy(name), drafter(name, kind), measured)


@cache
def drafting_seconds() -> float:
    """What a drafted round of the paper's engine takes beyond the estimate: the mean over numbers.ENGINE_ROUNDS."""
    table, arm = estimated("h20", 2, "Qwen2.5-7B"), Strategy(2, 2, 2, "learned")
    beyond = [
        (drafted - plain) / 1e3
        - (
            table.round_seconds(rows, 1024, arm, 512.0)
            - table.round_seconds(rows, 1024, PLAIN, 512.0)
        )
        for rows, (drafted, plain) in numbers.ENGINE_ROUNDS.items()
    ]
    return float(np.mean(beyond))


@cache
def papers(device: str, devices: int, name: str) -> EngineTable:
    """The paper's engine, with EAGLE drafters that share the policy's head, as the paper's do."""
    table = estimated(device, devices, name)
    given = {one.name: getattr(table, one.name) for one in fields(table)}
    return EngineTable(**given, drafting=drafting_seconds())


def literature() -> CostTable:
    """Rounds of the paper's engine for Qwen2.5-32B on four H100, as figure 13 and table 4 have them.

    They are published as accept lengths and speed-ups: a drafted round takes their ratio times a plain round, which is an
    estimate.
    """
    table = papers(DEVICE, DEVICES, POLICY)
    rows = [
        Row("round", table.round_seconds(batch, SLOTS, PLAIN, held), ESTIMATE, batch, SLOTS, held)
        for held in (HELD, float(SLOTS))
        for batch in BATCHES
    ]

    def drafted(batch: int, depth: int, nodes: int, times: float, note: str) -> Row:
        plain = table.round_seconds(batch, SLOTS, PLAIN, HELD)
        seconds = plain * numbers.ACCEPT_LENGTH[depth][numbers.NODES.index(nodes)] / times
        return Row(
            "round",
            seconds,
            LITERATURE,
            batch,
            SLOTS,
            HELD,
            Strategy(depth, 8, nodes),
            "eagle",
            note=note,
        )

    for depth, row in numbers.SPEEDUP.items():
        for nodes, times in zip(numbers.NODES, row, strict=True):
            if nodes > depth:
                rows.append(drafted(1, depth, nodes, times, "figure 13"))
    for nodes, row in numbers.SPEEDUP_BY_REQUESTS.items():
        for requests, times in zip(numbers.REQUESTS[1:], row[1:], strict=True):
            rows.append(
                drafted(requests, 10, nodes, times, "table 4, with figure 13's accept length")
            )
    rows += [row for row in table.rows if row.program in ("compile", "begin", "update", "publish")]
    facts = {
        "policy": POLICY, "device": DEVICE, "devices": str(DEVICES), "sizes": table.estimate.sizes.text(),
        "published": "arXiv 2511.16665, figure 13 and table 4: ratios to a plain round, which is an estimate",
        "made by": "python -m benchmarks.published.compare --costs FILE",
    }  # fmt: skip
    return CostTable(tuple(rows), facts)
