"""What does one optimizer step of the policy cost: seconds, tokens and FLOP per second, fill, compilation?

OMP_WAIT_POLICY=PASSIVE python -m benchmarks.device.update [--shape smollm2] [--csv FILE]
OMP_WAIT_POLICY=PASSIVE python -m benchmarks.device.update --model DIR --answers 32 --repeats 3

The answers have the lengths of GSM8K problems with answers of 170 tokens: prompts normal around 110, answers log-normal
around 155, both cut at 256. Weights are random, or those of a model directory; tokens are random. FLOP are those of the
products with weights: 6 for each weight of a layer and token that is not padding, and for each weight of the head and answer
token; attention and recomputation are left out. Bound: the same products alone, with the tokens of one accumulation step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from benchmarks.common import results
from benchmarks.common.engines import model_of, sizes
from benchmarks.common.timing import clocked
from tlt_jax.config import Config
from tlt_jax.config.schema import Rollout, Train
from tlt_jax.config.task import Data
from tlt_jax.data import packing
from tlt_jax.data.packing import Example, PackedRows, Spans
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.models import architecture, hf, hf_config
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.train import batch as batches, memory, policy_update
from tlt_jax.train.advantages import answer_weights
from tlt_jax.train.policy_update import PolicyState, Recipe

SHAPES = {
    "smollm2": sizes(576, 30, 9, 3, 1536, 49152, kind="llama", positions=8192),
    "quickstart": sizes(128, 2, 4, 2, 384, 64, positions=512),
}
PROMPT, ANSWER = 256, 256  # tokens of the longest
COLUMNS = ("what", "rows_x_tokens", "version", "tokens", "wall_s", "processor_s", "compile_s")


def examples(count: int, vocab: int, seed: int) -> list[Example]:
    """Examples with the lengths that the module's docstring describes."""
    random = np.random.default_rng(seed)
    prompts = np.clip(random.normal(110, 35, count), 45, PROMPT).astype(int)
    answers = np.clip(random.lognormal(np.log(155), 0.45, count), 20, ANSWER).astype(int)
    return [
        Example(uid, random.integers(0, vocab, prompt), random.integers(0, vocab, answer))
        for uid, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
    ]


def matrices(model: ModelConfig) -> list[tuple[int, int, int]]:
    """(outputs, inputs, how many) of every matrix of the layers."""
    D, F, L = model.hidden_size, model.mlp_dim, model.num_layers
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    return [(heads, D, L), (kv, D, 2 * L), (D, heads, L), (F, D, 2 * L), (D, F, L)]  # fmt: skip


def products(matrices: list[tuple[int, int, int]], tokens: int) -> float:
    """Processor seconds of the products of so many tokens with these matrices: forward, and both gradients."""
    total = 0.0
    for outputs, inputs, count in matrices:
        x, dy = jnp.ones((tokens, inputs)), jnp.ones((tokens, outputs))
        weight = jnp.ones((outputs, inputs))
        for subscripts, *operands in (
            ("ti,oi->to", x, weight), ("to,oi->ti", dy, weight), ("ti,to->io", x, dy)
        ):  # fmt: skip
            product = jax.jit(lambda a, b, subscripts=subscripts: jnp.einsum(subscripts, a, b))
            jax.block_until_ready(product(*operands))
            total += count * min(clocked(lambda: product(*operands))[1] for _ in range(3))  # noqa: B023
    return total


def policy(given: argparse.Namespace, mesh: Mesh) -> tuple[ModelConfig, Params]:
    """The policy of the model directory, or one of the shape with random weights."""
    if given.model:
        model = hf_config.read_config(given.model)
        return model, hf.load(given.model, model, mesh, "float32")
    model = model_of(SHAPES[given.shape])
    return model, architecture.init(model, mesh, jax.random.key(0), "float32")


def packed_batch(
    given: argparse.Namespace, config: Config, recipe: Recipe
) -> tuple[tuple[PackedRows, Spans], list[PackedRows]]:
    """The answers in packed rows, on the host and on the device."""
    made = examples(given.answers, recipe.model.vocab_size, 0)
    packed = packing.pack(made, packing.row_tokens(config), packing.rows(config))
    weights = answer_weights(packed[1].lengths, "token_mean", ANSWER)
    advantages = np.random.default_rng(1).normal(size=given.answers)
    recorded = [np.full(length, -1.0) for length in packed[1].lengths]
    return packed, batches.make_batch(packed, recipe, weights, advantages, recorded)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = results.arguments(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="smollm2")
    parser.add_argument("--model", type=Path, help="model directory, instead of --shape")
    parser.add_argument("--answers", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rows", type=int, default=0, help="train.rows")
    parser.add_argument("--row-tokens", type=int, default=0, help="train.row_tokens")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the row, and what it amounts to."""
    given, mesh = arguments(argv), make_mesh(1, 1)
    rows = {"rows": given.rows, "row_tokens": given.row_tokens}
    config = Config(
        train=Train(steps=100, **rows),
        data=Data(max_prompt_tokens=PROMPT),
        rollout=Rollout(max_new_tokens=ANSWER),
    )
    model, params = policy(given, mesh)
    recipe = memory.within(
        config, Recipe.of(config, model, mesh, 100), None, memory.device_memory(mesh)
    )
    (packed, spans), batch = packed_batch(given, config, recipe)
    programs, state = policy_update.programs(recipe), policy_update.create(params, recipe)
    losses = []

    def step() -> PolicyState:
        nonlocal state
        state, metrics = policy_update.update(programs, state, batch, len(losses))
        losses.append(float(metrics["loss"]))
        return state

    first, *later = [clocked(step) for _ in range(1 + given.repeats)]
    wall, work = (statistics.median(part) for part in zip(*later, strict=True))

    real, padded = int((packed.segments > 0).sum()), packed.segments.size
    steps, rows, length = packed.segments.shape
    answered, head = int(spans.lengths.sum()), [(model.vocab_size, model.hidden_size, 1)]
    layers = sum(outputs * inputs * count for outputs, inputs, count in matrices(model))
    bound = products(matrices(model), rows * length) + products(head, -(-answered // steps))
    bound *= steps
    what = f"update of {given.model or given.shape} on {given.answers} answers"
    table = results.ResultTable(COLUMNS, given.csv)
    table.row(what, f"{rows} x {length}", "now", real, wall, work, first[0] - wall)
    print(
        f"\n{steps} accumulation steps, fill {np.mean(packed.segments > 0):.3f}, {real / wall:.0f} tokens/s"
    )
    print(f"losses {', '.join(f'{loss:.6f}' for loss in losses)}")
    for name, tokens in (("real", real), ("all", padded)):
        flop = 6 * (tokens * layers + answered * model.vocab_size * model.hidden_size)
        print(f"{flop / wall / 1e9:.1f} GFLOP/s over {name} tokens")
    print(f"its products {bound:.2f} s of processors, a share of {bound / work:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
