"""What does one step of plain decoding spend its processor seconds on?

python benchmarks/rollout_shares.py [--shapes quickstart,mid,qwen] [--sequences 1,8,32]

Shares of a step are differences between variants of the same chunk, a loop of the rollout's rounds on full rows with the
cache that the rollout has, timed in turns; each variant's time is its best, in processor seconds of all threads, which
other work disturbs less:
  model     forward and commit; of the logits only the maximum is taken, so that all of them are made
  noise     chunk at temperature 1 - greedy chunk
  sampling  greedy chunk - model: the choice of a token, its log-probability, the report
  host      a round of a rollout through the engine (equal lengths; its prefill, also timed alone, taken off) - chunk
            at temperature 1: dispatch, polling, dealing, admission
"""

from __future__ import annotations

import gc
import math
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from result_table import ResultTable
from rollout_setup import PROMPT_TOKENS, Ours, Shape, arguments, chosen, model_directory, prompts_of

from tlt_jax.rollout.buckets import block_size, bucket_width
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import Decode, Prefill, Start, StateShape
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling

# The variants of a step are timed again and again for this long, and 5 times at least.
SHARE_SECONDS = 10.0
STEADY_SECONDS = 0.15
COLUMNS = (
    "shape", "sequences", "step_processor_ms", "model_share", "noise_share", "sampling_share", "host_share",
)  # fmt: skip


def forward_only(engine: Engine, rounds: int) -> Callable[..., Any]:
    """The chunk without a choice: forward and commit, the next root taken from the maximum of the logits."""
    target = engine.programs.shapes[0].target

    def chunk(state: Any, weights: Weights) -> Any:
        def step(_: int, state: Any) -> Any:
            roots, lengths = state.roots[:, None], state.lengths
            seen = jnp.ones((*roots.shape, 1), bool)
            logits, scratch = target.forward(
                weights.target, roots, lengths[:, None], seen, state.cache, lengths
            )
            cache = target.keep(state.cache, scratch, jnp.zeros_like(roots), lengths)
            following = (logits.max(axis=(1, 2)) > 0).astype(jnp.int32)
            return state.replace(roots=following, lengths=lengths + 1, cache=cache)

        return jax.lax.fori_loop(0, rounds, step, state)

    return jax.jit(chunk, donate_argnums=0)


class Variants:
    """The chunk of a step and its cheaper variants, on full rows with the cache that the rollout has."""

    def __init__(self, ours: Ours, shape: Shape, prompts: np.ndarray):
        engine, self.rounds, self.weights = ours.engine, shape.chunk, ours.weights[0]
        batch = next(size for size in engine.batches if size >= len(prompts))
        sizes = StateShape(0, batch, engine.cache_buckets(list(prompts), shape.equal)[0])
        self.programs: dict[str, Callable[..., Any]] = {
            name: engine.programs.get(
                Decode(sizes, self.rounds, params=DecodingParams(Sampling(heat)))
            )
            for name, heat in (("greedy", 0.0), ("full", 1.0))
        }
        self.programs["model"] = forward_only(engine, self.rounds)
        far = jnp.full(batch, 1 << 30, jnp.int32)
        lengths = jnp.full(batch, PROMPT_TOKENS, jnp.int32)
        state = Start(sizes)(engine.programs)
        self.state = state.replace(lengths=lengths, limits=far, live=far > 0)

    def seconds(self, name: str) -> float:
        """Processor seconds of a round of this variant."""
        state = jax.tree.map(jnp.copy, self.state)  # a chunk takes its state for good

        def run() -> None:
            nonlocal state
            if name == "model":
                state = self.programs[name](state, self.weights)
            else:
                bounds = np.array([1, self.rounds], np.int32)
                state = self.programs[name](state, self.weights, (), bounds)[0]
            jax.block_until_ready(state)

        return steady(run) / self.rounds


def shares(ours: Ours, shape: Shape, sequences: int) -> list[object]:
    """A row of the table."""
    prompts, lengths = prompts_of(shape, sequences), [shape.equal] * sequences
    variants = Variants(ours, shape, prompts)
    timed = {name: partial(variants.seconds, name) for name in variants.programs}
    timed["rollout"] = partial(steady, lambda: ours.decode(prompts, lengths, 0))
    timed["prefill"] = partial(steady, lambda: prefill(ours, prompts))
    best, begin, turn = dict.fromkeys(timed, math.inf), time.perf_counter(), 0
    while turn < 5 or (turn < 100 and time.perf_counter() - begin < SHARE_SECONDS):
        for name, seconds in timed.items():
            best[name] = min(best[name], seconds())
        turn += 1
    step = (best["rollout"] - best["prefill"]) / shape.equal
    parts = (
        best["model"], best["full"] - best["greedy"], best["greedy"] - best["model"], step - best["full"],
    )  # fmt: skip
    return [shape.name, sequences, 1e3 * step, *(part / step for part in parts)]


def steady(call: Callable[[], Any]) -> float:
    """Processor seconds of a call, over as many calls as a clock that lags by milliseconds needs."""
    begin, calls = time.process_time(), 0
    while calls == 0 or time.process_time() - begin < STEADY_SECONDS:
        call()
        calls += 1
    return (time.process_time() - begin) / calls


def prefill(ours: Ours, prompts: np.ndarray) -> None:
    """Prefills the prompts, in the blocks that the engine takes."""
    left, width = len(prompts), bucket_width(PROMPT_TOKENS)
    while left > 0:
        size = block_size(left, width)
        tokens, lengths = (
            np.zeros((size, width), np.int32),
            np.full(size, PROMPT_TOKENS - 1, np.int32),
        )
        program = Prefill(0, size, width)
        jax.block_until_ready(
            program(ours.engine.programs, ours.weights[0].target, tokens, lengths)
        )
        left -= size


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    args = arguments(__doc__).parse_args(argv)
    shapes, counts = chosen(args)
    table = ResultTable(COLUMNS, args.csv)
    for shape in shapes:
        with model_directory(shape) as folder:
            ours = Ours(folder, shape, max(counts))
            for count in counts:
                table.row(*shares(ours, shape, count))
        del ours
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
