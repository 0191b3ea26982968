"""Writes tlt_jax/simulate/costs/h200_qwen2.5_7b.csv from the rows of an H200 in benchmarks/results/accelerator.csv.

python benchmarks/simulated_costs.py [--out FILE]

Rounds, and the attention of a layer, are measured. The update was measured with 8 of the 28 layers, and is scaled by its FLOP;
what no row has is estimated (tlt_jax.simulate.estimate), at the same share of the peak.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tlt_jax.models import drafter_network, hf  # noqa: E402
from tlt_jax.simulate import estimate  # noqa: E402
from tlt_jax.simulate.cost_table import ESTIMATE, MEASURED, CostTable, Row, text_of  # noqa: E402
from tlt_jax.simulate.estimate import DEVICES, Estimate, Sizes  # noqa: E402
from tlt_jax.spec_decode.strategy import parse  # noqa: E402

FOUND = ROOT / "benchmarks/results/accelerator.csv"
WRITTEN = ROOT / "tlt_jax/simulate/costs/h200_qwen2.5_7b.csv"
POLICY = {
    "model_type": "qwen2", "hidden_size": 3584, "num_hidden_layers": 28, "num_attention_heads": 28,
    "num_key_value_heads": 4, "intermediate_size": 18944, "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
}  # fmt: skip
VOCAB, DRAFT_VOCAB, UNROLL = 152064, 32000, 5
SECTIONS = ("copies", "decode", "trees", "attention", "update")
SLOTS, HELD = 4096, 2048
DECODED = re.compile(r"B (\d+), 2048 of 4096 slots")
DRAFTED = re.compile(r"(\d+_\d+_\d+), B (\d+)(, without drafting)?")
ATTENDED = re.compile(r"engine, B (\d+) N (\d+)")
COPIED = re.compile(r"copy of (\d+) MiB")
TREES = {1: "off", 8: "4_2_8", 48: "8_4_48"}  # a strategy with this many nodes
UPDATED = re.compile(r"(\d+) x (\d+), (\d+) layers")
# Of SmolLM2-135M (30 layers) on the same H200: benchmarks/README.md.
COMPILE_S, REWARD_S, OTHER_S, BEGIN_S = 8.0, 0.008, 0.022, 0.09


def rows(cases: Mapping[str, float], sizes: Sizes, short: Sizes) -> Iterator[Row]:
    """The rows of a table from the milliseconds of each case; `short`: sizes of the policy whose update was measured."""
    for case, ms in cases.items():
        if found := DECODED.fullmatch(case):
            yield Row("round", ms / 1e3, MEASURED, int(found[1]), SLOTS, HELD)
        elif found := DRAFTED.fullmatch(case):
            drafter = "ngram" if found[3] else "eagle3"
            note = "verification alone, as n-grams need it" if found[3] else ""
            strategy = parse(found[1])
            yield Row(
                "round",
                ms / 1e3,
                MEASURED,
                int(found[2]),
                SLOTS,
                HELD,
                strategy,
                drafter,
                note=note,
            )
        elif found := ATTENDED.fullmatch(case):
            strategy = parse(TREES[int(found[2])])
            seconds, note = sizes.layers * ms / 1e3, f"one layer's, times {sizes.layers}"
            yield Row(
                "attention", seconds, MEASURED, int(found[1]), SLOTS, HELD, strategy, note=note
            )
        elif found := UPDATED.fullmatch(case):
            tokens, scale = int(found[1]) * int(found[2]), sizes.read / short.read
            note = (
                f"measured with {found[3]} layers, times the FLOP of 28 over theirs ({scale:.2f})"
            )
            yield Row("update", scale * ms / 1e3, ESTIMATE, tokens=tokens, note=note)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, default=WRITTEN, metavar="FILE")
    out = parser.parse_args(arguments).out
    with FOUND.open(encoding="utf-8") as file:
        cases = {
            one["case"]: float(one["ms"])
            for one in csv.DictReader(file)
            if "H200" in one["machine"] and one["section"] in SECTIONS
        }
    model = hf.new_config(POLICY, VOCAB, ())
    short = hf.new_config(POLICY | {"num_hidden_layers": 8}, VOCAB, ())
    drafter = drafter_network.for_policy(model, "eagle3", draft_vocab_size=DRAFT_VOCAB)
    sizes = Sizes.of(model, drafter)
    found = list(rows(cases, sizes, Sizes.of(short)))
    there = Estimate(sizes, DEVICES["h200"])
    share = estimate.update_efficiency(CostTable(tuple(found)), there)
    more = estimate.estimated_rows(there, share, UNROLL)
    found += [row for row in more if row.program != "update"]
    smollm2 = "of SmolLM2-135M on the same device"
    found += [
        Row(
            "compile",
            COMPILE_S,
            ESTIMATE,
            note=f"a plain chunk; {smollm2}: 22.4 s for six programs",
        ),
        Row("reward", REWARD_S, ESTIMATE, note=f"beyond the rollout; {smollm2}"),
        Row(
            "begin",
            BEGIN_S,
            ESTIMATE,
            note=f"seconds in which the only data group was idle; {smollm2}",
        ),
        Row("other", OTHER_S, ESTIMATE, note=f"metrics and the rest of a step; {smollm2}"),
    ]
    (copied,) = (one for one in cases if COPIED.fullmatch(one))
    copy = 2 * int(COPIED.fullmatch(copied)[1]) * 2**20 / (cases[copied] / 1e3)
    facts = {
        "policy": "Qwen2.5-7B's shape (random weights), bfloat16", "device": "h200", "devices": "1", "sizes": sizes.text(),
        "copy": f"{copy:.3g} bytes a second, read and written",
        "measured": "one NVIDIA H200, 2026-11-26, commit 0003176, jax 0.11.2 (benchmarks/results/accelerator.csv)",
        "made by": "python benchmarks/simulated_costs.py",
    }  # fmt: skip
    out.write_text(text_of(found, facts), encoding="utf-8")
    print(f"{out}: {len(found)} rows")


if __name__ == "__main__":
    main()
