"""What does an accumulation step of the 7B shape move and hold, with the library's attention and with that in blocks?

python benchmarks/attention_bytes.py [--topology h200:1] [--shapes 4x4096,1x16384]

Compiles ahead of time, for a GPU (the gpu-aot extra) or a TPU topology (the tpu extra); nothing runs. `gib_moved` is what
XLA counts on one device, operands and results of every operation, with a layer's loop as often as it runs; a library's
call counts its operands and results, not what it does inside. Of programs for TPUs it is not
known: their text does not say how often loops run.
"""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest import mock

import jax
from result_table import ResultTable, add_csv

from tlt_jax import plan
from tlt_jax.config import load as configuration
from tlt_jax.distributed.mesh import is_tpu, make_mesh
from tlt_jax.distributed.topology import describe
from tlt_jax.kernels import packed_attention
from tlt_jax.train import policy_batch, policy_update
from tlt_jax.train.recipe import Recipe

COLUMNS = (
    "topology", "mesh", "rows_x_tokens", "attention", "gib_moved", "temporaries_gib", "largest_scores_mib",
    "compile_s",
)  # fmt: skip
GIB, MIB = 2**30, 2**20


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--topology", default="h200:1", help="such as h200:8, v5p:2x2x1")
    parser.add_argument("--config", default="configs/math_qwen2.5_7b_pod.yaml")
    parser.add_argument("--mesh", default="1x1", help="data x model")
    parser.add_argument("--shapes", default="4x4096,1x16384", help="rows x tokens of a step")
    add_csv(parser)
    args = parser.parse_args(argv)
    os.environ.setdefault("MATH_TRAIN", "none")
    os.environ.setdefault("MATH_EVAL", "none")
    jax.config.update("jax_platforms", "cpu")
    config = configuration.parse(["--config", args.config])
    mesh = make_mesh(*map(int, args.mesh.split("x")), describe(args.topology).devices)
    recipe = Recipe.of(config, plan.sizes(config), mesh, 1)
    table = ResultTable(COLUMNS, args.csv)
    for shape in args.shapes.split(","):
        rows, tokens = map(int, shape.split("x"))
        own = packed_attention.form(
            mesh, jax.numpy.dtype(recipe.compute_dtype), recipe.model.head_dim, False
        )
        for form in dict.fromkeys((own, packed_attention.BLOCKS)):
            jax.clear_caches()
            policy_update.programs.cache_clear()
            with mock.patch.object(packed_attention, "form", lambda *_, form=form: form):
                start = time.perf_counter()
                compiled = lower(replace(recipe, longest=tokens), rows, tokens).compile()
            seconds = round(time.perf_counter() - start)
            moved = "" if is_tpu(mesh) else bytes_moved(compiled) / GIB
            temporary = f"{compiled.memory_analysis().temp_size_in_bytes / GIB:.2f}"
            scores = largest_scores(compiled.as_text(), recipe, rows, tokens) / MIB
            table.row(args.topology, args.mesh, f"{rows} x {tokens}", form, moved, temporary, scores, seconds)  # fmt: skip
    return 0


def lower(recipe: Recipe, rows: int, tokens: int) -> Any:
    """The program of an accumulation step, lowered."""
    given = policy_batch.abstract_rows(recipe.mesh, rows, tokens, ("recorded",))
    sums = policy_update.abstract_sums(recipe, given)
    params = policy_update.abstract_state(recipe).params
    return policy_update.programs(recipe).accumulate.lower(sums, params, given)


def bytes_moved(compiled: jax.stages.Compiled) -> float:
    """Bytes that one device moves: those that XLA counts in a computation, and its loops as often as they run.

    XLA itself counts the body of a loop once. There is no public way to ask it for a device that is absent.
    """
    from jax._src.lib import _jax, xla_client

    client = jax.devices("cpu")[0].client
    text = compiled.as_text()
    loops, inside = {}, ""
    for line in text.splitlines():
        if start := re.match(r"(?:ENTRY )?%?([\w.-]+) \(.*\{$", line):
            inside = start[1]
            loops[inside] = []
        elif body := re.search(r" while\(.* body=%?([\w.-]+)", line):
            times = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', line)
            loops[inside].append((body[1], int(times[1])))

    def once(name: str) -> float:
        chosen = re.sub(r"^ENTRY ", "", text, flags=re.M)
        chosen = re.sub(rf"^(%?{re.escape(name)} \()", r"ENTRY \1", chosen, flags=re.M)
        module = xla_client.hlo.hlo_module_from_text("HloModule one\n" + chosen.split("\n", 1)[1])
        return _jax.hlo_module_cost_analysis(client, module)["bytes accessed"]

    def whole(name: str) -> float:
        return once(name) + sum(times * whole(body) - once(body) for body, times in loops[name])

    return whole(re.search(r"^ENTRY %?([\w.-]+) ", text, re.M)[1])


def largest_scores(text: str, recipe: Recipe, rows: int, tokens: int) -> int:
    """Bytes of the largest float32 array with axes of queries and, last, of keys that holds a device's scores of a block."""
    model, block, largest = recipe.model, recipe.attention_block, 0
    data, parallel = recipe.mesh.devices.shape
    fewest = rows // data * model.num_heads // parallel * block * tokens
    queries = {block, model.num_heads // model.num_kv_heads * block}
    for shape in set(re.findall(r"f32\[([\d,]+)\]", text)):
        sizes = [int(size) for size in shape.split(",")]
        has_axes = sizes[-1] == tokens and (queries & set(sizes) or sizes.count(tokens) > 1)
        if has_axes and math.prod(sizes) >= fewest:
            largest = max(largest, 4 * math.prod(sizes))
    return largest


if __name__ == "__main__":
    sys.exit(main())
