"""What does keeping the factors of adapters apart cost a rollout in bfloat16, and how much of their change does it see?

python -m benchmarks.device.adapters [--csv FILE] [--model DIR --data FILE]

Cost: chunks of plain rounds of a random policy of SmolLM2-135M's shape, with adapters of rank 32 on every matrix and with
merged ones, in turns. Share: of a model directory whose adapters learn the worked solutions of a JSONL file (question, answer)
for `--steps` steps at the rate 1e-5: the slope of the log-probs' change against that in float32, as the update, the rollout and
a rollout of merged matrices see it, and their mean differences from the update.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import results
from benchmarks.common.engines import FullRows, model_of, random_engine
from benchmarks.common.timing import clocked, interleaved, interval
from benchmarks.device.update import SHAPES
from tlt_jax.config.schema import LORA_TARGETS
from tlt_jax.data import packing
from tlt_jax.data.packing import Example
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.models import architecture, hf, kv_cache, lora, transformer
from tlt_jax.models.low_rank import Lora
from tlt_jax.optimizer import Adam
from tlt_jax.train import policy_batch, policy_update
from tlt_jax.train.objective import Objective
from tlt_jax.train.recipe import Recipe

ADAPTERS = Lora(32, 64.0, LORA_TARGETS)  # of configs/math_qwen2.5_7b_lora_h100.yaml
RATE = 1e-5
COLUMNS = ("what", "case", "value", "interval_or_slope")


def cost(turns: int) -> list[tuple]:
    """Seconds of rounds with merged adapters over those with factors apart, for 1, 8 and 32 rows."""
    model, mesh, found = model_of(SHAPES["smollm2"]), make_mesh(1, 1), []
    for rows in (1, 8, 32):
        chunks = {}
        for name, adapters in (("merged", None), ("apart", ADAPTERS)):
            engine, weights = random_engine(model, mesh, rows, dtype="bfloat16", adapters=adapters)
            chunks[name] = FullRows(engine, weights, rows, 256, 4)
        calls = {name: partial(clocked, chunk) for name, chunk in chunks.items()}
        seconds = interleaved(calls, turns, unmeasured=1)
        walls = [[one[0] for one in seconds[name]] for name in ("merged", "apart")]
        found.append(
            ("cost", f"{rows} rows", walls[1][0] / 4, interval([*zip(*walls, strict=True)]))
        )
    return found


def share(directory: Path, data: Path, steps: int) -> list[tuple]:
    """The slopes and differences of the module's docstring."""
    from transformers import AutoTokenizer

    tokenizer, mesh = AutoTokenizer.from_pretrained(directory), make_mesh(1, 1)
    model = hf.read_config(directory)
    rows = [json.loads(line) for line in data.read_text("utf-8").split("\n")[:8]]
    examples = [
        Example(uid, np.asarray(tokenizer(one["question"]).input_ids), np.asarray(tokenizer(one["answer"]).input_ids))
        for uid, one in enumerate(rows)
    ]  # fmt: skip
    recipe = Recipe(
        model, mesh, Adam(RATE, steps), Objective(), "float32", "bfloat16", lora=ADAPTERS,
        logits_chunk=256,
    )  # fmt: skip
    packed = packing.pack(examples, 512, 8)
    count = int(packed.answer_lengths.sum())
    weights, ones = np.full(len(examples), 1 / count), np.ones(len(examples))
    batch = policy_batch.make_batch(packed, mesh, None, weights, ones, None)
    base = hf.load(directory, model, mesh, "bfloat16")
    trained = lora.init(ADAPTERS, model, mesh, jax.random.key(0), "float32")
    programs = policy_update.programs(recipe)
    cache = kv_cache.empty(model, len(batch[0].tokens), 8, 0, "bfloat16", mesh)
    exact = policy_update.programs(replace(recipe, compute_dtype="float32"))

    def rollout(params, rows, cache, apart):
        params = architecture.to_rollout(params, model, mesh, "bfloat16", apart)
        B, T = rows.tokens.shape
        segments = rows.segments[:, :, None] == rows.segments[:, None]
        ancestors = segments & jnp.tril(jnp.ones((T, T), bool))
        logits, _ = transformer.tree_forward(
            params, model, rows.tokens, rows.positions, ancestors, cache, jnp.zeros(B, jnp.int32)
        )
        logprobs = jax.nn.log_softmax(logits, axis=-1)
        return jnp.take_along_axis(logprobs, rows.targets[..., None], axis=-1)[..., 0]

    seen = {
        "update": programs.score,
        "exact": lambda policy, rows: exact.score(
            jax.tree.map(lambda leaf: leaf.astype("float32"), policy), rows
        ),
        "apart": partial(jax.jit(partial(rollout, apart=ADAPTERS)), cache=cache),
        "merged": partial(jax.jit(partial(rollout, apart=None)), cache=cache),
    }

    def scores() -> dict[str, np.ndarray]:
        policy = lora.whole(state.params, base)
        return {
            name: np.concatenate(
                [np.asarray(score(policy, rows))[np.asarray(rows.is_answer)] for rows in batch]
            ).astype(np.float64)
            for name, score in seen.items()
        }

    state, found, start = policy_update.create(trained, recipe), [], None
    for step in range(steps + 1):
        if step in (0, 1, 5, 10, steps):
            now = scores()
            start = start or now
            move = now["exact"] - start["exact"]
            for name in ("update", "apart", "merged"):
                difference = np.abs(now[name] - now["update"]).mean()
                slope = (now[name] - start[name]) @ move / max(move @ move, 1e-30)
                found.append(
                    (
                        f"{name}, moved by {move.mean():.4f}",
                        f"step {step}",
                        difference,
                        f"{slope:.3f}",
                    )
                )
                print(*found[-1], flush=True)
        state, _ = policy_update.update(programs, state, batch, step, base)
    return found


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints its rows, and appends them to the file."""
    parser = results.arguments(__doc__)
    parser.add_argument("--model", type=Path, help="model directory; without it only the cost")
    parser.add_argument("--data", type=Path, help="JSONL file with question and answer")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--turns", type=int, default=8)
    given = parser.parse_args(argv)
    found = share(given.model, given.data, given.steps) if given.model else cost(given.turns)
    table = results.ResultTable(COLUMNS, given.csv)
    for row in found:
        table.row(*row)
    return 0


if __name__ == "__main__":
    sys.exit(main())
