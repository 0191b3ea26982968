"""States for a drafter's loss: the costs of keeping them in the rollout, and of a prefill.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/harvest.py

Both are timed on one CPU device, for a policy of D512 L12 V8192 in float32 and the features of
EAGLE-3 (three hidden states). Keeping: a chunk of plain rounds, and one of drafting rounds, of an
engine that captures states, over the same chunk of one that does not; the chunks take turns, every
state is its own. Again: the policy's prefill of whole texts with their states, keys and values
thrown away, over the tokens that it is given. Seconds are those of processors, of all threads,
which other work disturbs less. Medians of the turns; the interval of a ratio is its middle half.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.config import Config
from tlt_jax.config.schema import Rollout, Speculation
from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import eagle, hf, transformer
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import Decode, StateShape, zeros
from tlt_jax.rollout.scheduler.harvest import Harvest
from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name

MIDDLE = {
    "model_type": "qwen2", "hidden_size": 512, "num_hidden_layers": 12, "num_attention_heads": 8,
    "num_key_value_heads": 2, "intermediate_size": 1408, "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
}  # fmt: skip
VOCAB, SLOTS, ROUNDS, WINDOW = 8192, 512, 4, 256
DRAFTING = Strategy(3, 1, 4)


def seconds(work: Callable[..., object], *arguments) -> float:
    """Processor seconds of one call, until its results are there."""
    begin = time.process_time()
    jax.block_until_ready(work(*arguments))
    return time.process_time() - begin


class Chunk:
    """A chunk on half full rows that never end, again and again on its own state."""

    def __init__(self, engine: Engine, weights, batch: int, strategy: Strategy):
        self.engine, self.weights = engine, weights
        self.shape = StateShape(0, batch, SLOTS)
        self.program = Decode(self.shape, ROUNDS, strategy)
        spec = engine.programs.shapes[0].state(self.shape)
        self.state = jax.tree.map(
            lambda leaf, of: jax.device_put(leaf, of.sharding), zeros(spec), spec
        )
        self.bytes = (
            0
            if spec.cache.states is None
            else spec.cache.states.size * spec.cache.states.dtype.itemsize
        )
        self.all = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(spec))

    def __call__(self):
        batch = self.shape.batch
        half, live = jnp.full(batch, SLOTS // 2, jnp.int32), jnp.ones(batch, bool)
        limits = jnp.full(batch, SLOTS, jnp.int32)
        state = self.state.replace(lengths=half, live=live, limits=limits)
        bounds = np.array([1, ROUNDS], np.int32)
        self.state, report = self.program(self.engine.programs, state, self.weights, (), bounds)
        return report.counts


def main() -> None:
    """Prints both costs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--batches", default="16")
    parser.add_argument("--turns", type=int, default=21)
    options = parser.parse_args()
    model, mesh = hf.new_config(MIDDLE, VOCAB, ()), meshes.make_mesh(1, 1)
    drafter = eagle.for_policy(model, "eagle3")
    config = replace(
        Config(),
        rollout=Rollout(compile_cache="off"),
        speculation=Speculation("a drafter given here"),
    )
    engines = [Engine(config, model, mesh, (), drafter, captures) for captures in (False, True)]
    params = transformer.init(model, mesh, jax.random.key(0), "float32")
    weights = engines[0].publish(params, eagle.init(drafter, mesh, jax.random.key(1), "float32"))[0]
    print(f"jax {jax.__version__}, {options.turns} turns, {SLOTS} slots, chunks of {ROUNDS} rounds")
    for batch in map(int, options.batches.split(",")):
        for strategy in (PLAIN, DRAFTING):
            off, on = chunks = [Chunk(engine, weights, batch, strategy) for engine in engines]
            spent = [[seconds(chunk) for chunk in chunks] for _ in range(options.turns + 2)][2:]
            ratios = [with_states / without for without, with_states in spent]
            low, middle, high = statistics.quantiles(ratios, n=4)
            second = statistics.median(without for without, _ in spent)
            tokens = batch * ROUNDS
            extra = (middle - 1) * second / tokens
            print(
                f"keeping, {batch} rows, {name(strategy)}: ratio {middle:.4f}"
                f" ({low:.4f} to {high:.4f})"
                f" of {1e3 * second:.1f} ms, {1e6 * extra:.1f} us a row and round;"
                f" {on.bytes / 2**20:.2f} MiB beside {off.all / 2**20:.2f}"
            )
        again(options.turns, model, weights.target, batch)
        copy = engines[1].programs.get(Harvest(on.shape, 4, WINDOW))
        places = np.arange(4, dtype=np.int32), np.zeros(4, np.int32)
        copied = [seconds(copy, on.state, *places) for _ in range(options.turns)]
        print(f"harvest of 4 x {WINDOW}: {1e3 * statistics.median(copied):.2f} ms")


def again(turns: int, model, params, batch: int) -> None:
    """Times the prefill of as many texts as one window is long."""
    states = partial(transformer.prefill, config=model, captures_states=True)
    tokens = jnp.zeros((min(batch, 4), WINDOW), jnp.int32)
    lengths = jnp.full(len(tokens), WINDOW, jnp.int32)
    run = jax.jit(lambda params: states(params, tokens=tokens, lengths=lengths).states)
    spent = statistics.median([seconds(run, params) for _ in range(turns + 1)][1:])
    each = 1e6 * spent / tokens.size
    print(f"again: {len(tokens)} x {WINDOW} in {1e3 * spent:.1f} ms, {each:.1f} us a token")


if __name__ == "__main__":
    main()
