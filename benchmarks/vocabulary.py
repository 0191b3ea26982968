"""What does a round spend on choosing tokens where the vocabulary has 151,936 of them?

python benchmarks/vocabulary.py [--layers 24] [--sequences 8] [--turns 7] [--csv FILE]

Rounds of full rows of a random Qwen2.5-0.5B of so many layers, by samplings that take turns: greedy, no filter, and two
filters on logits of which few tokens are kept (`peaked`, as those of a trained model) or tens of thousands (`flat`). Plain
decoding and a tree that a random EAGLE-3 drafter of 32,000 tokens grows with the policy's noise. Logits are as sharp as the
temperature makes them. Each cell is the least of the turns, in processor seconds of all threads.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from result_table import ResultTable, add_csv
from rollout_setup import qwen2

from tlt_jax.config import Config
from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.models import eagle, hf, transformer
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import Decode, Start, StateShape
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name

VOCAB, DRAFTED, SLOTS, ROUNDS = 151_936, 32_000, 512, 4
TREE = Strategy(7, 1, 8)
PEAKED, FLAT = 0.02, 1.0  # temperatures of random logits, whose standard deviation is about 0.1
SAMPLINGS = {
    "greedy": Sampling(0.0),
    "no filter, peaked": Sampling(PEAKED),
    "top-p 0.95, peaked": Sampling(PEAKED, 0, 0.95),
    "top-k 50, peaked": Sampling(PEAKED, 50),
    "top-p 0.95, flat": Sampling(FLAT, 0, 0.95),
}
COLUMNS = (
    "strategy", "sequences", "layers", "sampling", "round_processor_ms", "over_greedy_share", "tokens_a_row_round",
)  # fmt: skip


def engine_of(layers: int, sequences: int) -> tuple[Engine, object]:
    """An engine of the random policy and drafter, and its weights."""
    mesh = meshes.make_mesh(1, 1)
    model = hf.new_config(qwen2(896, layers, 14, 2, 4864), VOCAB, ())
    drafter = eagle.for_policy(model, "eagle3", draft_vocab_size=DRAFTED)
    config = Config()
    config = replace(
        config,
        rollout=replace(config.rollout, prompts=sequences, samples=1, compile_cache="off"),
        speculation=replace(config.speculation, drafter="a directory", strategies=[name(TREE)]),
    )
    engine = Engine(config, model, mesh, drafter=drafter)
    policy = transformer.init(model, mesh, jax.random.key(0), "float32")
    ids = np.arange(DRAFTED)
    weights = engine.publish(policy, eagle.init(drafter, mesh, jax.random.key(1), "float32", ids))
    return engine, weights[0]


def rounds_of(engine: Engine, weights, sequences: int, strategy: Strategy, sampling: Sampling):
    """A call that decodes ROUNDS rounds, and gives processor seconds and tokens of one."""
    shape = StateShape(0, sequences, SLOTS)
    program = engine.programs.get(Decode(shape, ROUNDS, strategy, DecodingParams(sampling)))
    lengths = jnp.full(sequences, SLOTS // 2, jnp.int32)
    begin = Start(shape)(engine.programs).replace(
        lengths=lengths,
        limits=jnp.full(sequences, 1 << 30, jnp.int32),
        live=lengths > 0,
        keys=jnp.asarray(sequence_keys(0, 0, 0, np.arange(sequences))),
    )

    def call() -> tuple[float, float]:
        state = jax.block_until_ready(jax.tree.map(jnp.copy, begin))
        started = time.process_time()
        report = program(state, weights, (), np.array([1, ROUNDS], np.int32))[1]
        jax.block_until_ready(report.tokens)
        spent = time.process_time() - started
        return spent / ROUNDS, float(report.counts.sum()) / (ROUNDS * sequences)

    return call


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table when all turns are over."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--turns", type=int, default=7)
    add_csv(parser)
    args = parser.parse_args(argv)
    engine, weights = engine_of(args.layers, args.sequences)
    calls: dict[tuple[Strategy, str], Callable[[], tuple[float, float]]] = {
        (strategy, text): rounds_of(engine, weights, args.sequences, strategy, sampling)
        for strategy in (PLAIN, TREE)
        for text, sampling in SAMPLINGS.items()
    }
    best, tokens = dict.fromkeys(calls, math.inf), {}
    for turn in range(args.turns + 1):
        for key, call in calls.items():
            seconds, tokens[key] = call()
            best[key] = min(best[key], seconds) if turn else math.inf  # the first loads
    table = ResultTable(COLUMNS, args.csv)
    for (strategy, text), seconds in best.items():
        share = 1 - best[strategy, "greedy"] / seconds
        table.row(
            name(strategy), args.sequences, args.layers, text, 1e3 * seconds, share, tokens[strategy, text]
        )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
