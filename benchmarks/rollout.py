"""Tokens per second of the rollout engine against `transformers` generate on torch, and what one decode step spends.

python benchmarks/rollout.py [--shapes quickstart,mid,qwen] [--sequences 1,8,32] [--repeats 3] [--json FILE]

Both decode the same random float32 weights from one Hugging Face directory: the same prompts, temperature 1, no filters,
no EOS, the same number of tokens per sequence, on the same number of CPU threads. The two take turns in one process
(ours, theirs, ours, ...), after an untimed run of each (ours compiles in it); a cell is the median of the repeats. In a
heavy-tailed cell the lengths are lognormal quantiles with longest / 75th percentile of 4 or more; a row of
`transformers` that is done is told so by a stopping criterion, and only the tokens that were asked for count. On a
machine with other work, wall time is that work's too: `cpu ratio` compares the processor seconds, of all threads, that a
token costs (coarse for runs below 0.1 s: that clock lags). Torch's threads sleep while they wait (OMP_WAIT_POLICY): the
spinning default was seen to be far slower on shared cores.

Shares of a step are differences between variants of the same chunk, a loop of the rollout's rounds on full rows with the
cache that the rollout has, timed in turns; each variant's time is its best, in processor seconds of all threads, which
other work disturbs less:
  model     forward and commit; of the logits only the maximum is taken, so that all of them are made
  sampling  greedy chunk - model: the choice of a token, its log-probability, the report
  noise     chunk at temperature 1 - greedy chunk
  host      a round of a rollout through the engine (equal lengths; its prefill, also timed alone, taken off) - chunk
            at temperature 1: dispatch, polling, dealing, admission
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.config import Config, load as configuration
from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import GENERATE_STREAM
from tlt_jax.models import hf, transformer
from tlt_jax.models.transformer import ModelConfig
from tlt_jax.rollout.buckets import block_size, bucket_width
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.programs import Decode, Prefill, Start, StateShape
from tlt_jax.spec_decode.decode import Weights
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
PROMPT_TOKENS = 16
TAIL_RATIO = 5.0  # longest / 75th percentile aimed at; rounding to whole tokens leaves at least 4
SHARE_SECONDS = (
    10.0  # the variants of a step are timed again and again for this long, and 5 times at least
)
STEADY_SECONDS = 0.15
PLAIN = Sampling()


@dataclass(frozen=True)
class Shape:
    """A model to measure, and the length of its answers: equal ones, and the longest of a heavy tail."""

    name: str
    init: dict[str, Any]
    vocab: int
    equal: int
    longest: int
    chunk: int


def qwen2(width: int, layers: int, heads: int, kv_heads: int, mlp: int) -> dict[str, Any]:
    """Sizes of a Qwen2 with tied embeddings."""
    return {
        "model_type": "qwen2", "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": mlp, "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
    }  # fmt: skip


def shapes() -> list[Shape]:
    """The three models: the quickstart's, a middle one, and Qwen2.5-0.5B's sizes with few tokens."""
    from tlt_jax.data.dataset import tokenizer

    quickstart = configuration.read(QUICKSTART)
    return [
        Shape(
            "quickstart",
            quickstart.model.init,
            len(tokenizer(quickstart)),
            equal=96,
            longest=192,
            chunk=16,
        ),
        Shape("mid", qwen2(512, 12, 8, 2, 1408), 8192, equal=64, longest=128, chunk=16),
        Shape("qwen", qwen2(896, 24, 14, 2, 4864), 151936, equal=32, longest=64, chunk=4),
    ]


def answer_lengths(kind: str, sequences: int, shape: Shape) -> list[int]:
    """How many tokens each sequence gets."""
    if kind == "equal":
        return [shape.equal] * sequences
    normal = statistics.NormalDist()
    quantiles = np.asarray([normal.inv_cdf((i + 0.5) / sequences) for i in range(sequences)])
    sigma = math.log(TAIL_RATIO) / (quantiles[-1] - np.quantile(quantiles, 0.75))
    lengths = np.maximum(
        np.round(shape.longest * np.exp(sigma * (quantiles - quantiles[-1]))), 1
    ).astype(int)
    if lengths.max() < 4 * np.quantile(lengths, 0.75):
        raise ValueError(
            f"longest {lengths.max()} is below 4 times the 75th percentile of {lengths.tolist()}"
        )
    return np.random.default_rng(0).permutation(lengths).tolist()


class Ours:
    """The engine on one CPU device."""

    def __init__(self, directory: Path, shape: Shape, slots: int):
        settings = replace(
            Config().rollout,
            prompts=slots,
            samples=1,
            max_new_tokens=shape.longest,
            chunk=shape.chunk,
            compile_cache="off",
        )
        data = replace(Config().data, max_prompt_tokens=PROMPT_TOKENS)
        mesh = meshes.make_mesh(1, 1)
        self.model = hf.read_config(directory)
        self.engine = Engine(replace(Config(), rollout=settings, data=data), self.model, mesh)
        self.weights = self.engine.publish(hf.load(directory, self.model, mesh, "float32"))

    def decode(self, prompts: np.ndarray, lengths: Sequence[int], turn: int) -> dict[str, float]:
        """One rollout; the engine's totals."""
        request = self.engine.request(
            list(prompts), 1, PLAIN, lengths, stream=GENERATE_STREAM, step=turn, eos_ids=()
        )
        result, _ = self.engine.run(request, self.weights)
        if [len(one.tokens) for one in result.completions] != list(lengths):
            raise RuntimeError("the engine made other lengths than asked for")
        return result.stats


class Theirs:
    """`transformers` on torch."""

    def __init__(self, directory: Path):
        import torch
        from transformers import AutoModelForCausalLM

        self.torch = torch
        self.model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()
        self.model.generation_config.eos_token_id = None

    def decode(self, prompts: np.ndarray, lengths: Sequence[int], turn: int) -> None:
        """One generate call."""
        torch, limits = self.torch, self.torch.tensor(lengths)
        torch.manual_seed(turn)

        def is_done(tokens: Any, scores: Any, **rest: Any) -> Any:
            return tokens.shape[1] - prompts.shape[1] >= limits

        inputs = torch.from_numpy(prompts.astype(np.int64))
        with torch.inference_mode():
            out = self.model.generate(
                inputs, attention_mask=torch.ones_like(inputs), max_new_tokens=max(lengths), do_sample=True,
                temperature=1.0, top_k=0, top_p=1.0, use_cache=True, pad_token_id=0, stopping_criteria=[is_done],
            )  # fmt: skip
        if out.shape[1] != prompts.shape[1] + max(lengths):
            raise RuntimeError("transformers made other lengths than asked for")


def clock(call: Callable[[], Any], pause: float = 0.2) -> tuple[float, float]:
    """Seconds of a call by the wall and by the processor, after a pause in which the threads of the last one settle."""
    time.sleep(pause)
    begin, used = time.perf_counter(), time.process_time()
    call()
    return time.perf_counter() - begin, time.process_time() - used


def compare(
    ours: Ours, theirs: Theirs, shape: Shape, kind: str, sequences: int, repeats: int
) -> dict[str, Any]:
    """One cell of the table."""
    lengths = answer_lengths(kind, sequences, shape)
    prompts = np.random.default_rng(1).integers(
        0, shape.vocab, (sequences, PROMPT_TOKENS), dtype=np.int32
    )
    compiled = ours.decode(prompts, lengths, 0)["compile_seconds"]
    theirs.decode(prompts, [2] * sequences, 0)
    seconds = [
        [clock(partial(side.decode, prompts, lengths, turn)) for side in (ours, theirs)]
        for turn in range(1, repeats + 1)
    ]
    (mine, my_cpu), (other, other_cpu) = np.median(seconds, axis=0).tolist()
    return {
        "shape": shape.name, "lengths": kind, "sequences": sequences, "tokens": sum(lengths), "longest": max(lengths),
        "p75": float(np.quantile(lengths, 0.75)), "ours": sum(lengths) / mine, "theirs": sum(lengths) / other,
        "ratio": other / mine, "cpu_ratio": other_cpu / my_cpu, "ratios": [b[0] / a[0] for a, b in seconds],
        "compile_seconds": compiled,
    }  # fmt: skip


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


def shares(ours: Ours, shape: Shape, sequences: int) -> dict[str, Any]:
    """Processor seconds of a decode step by what they are spent on."""
    engine, rounds = ours.engine, shape.chunk
    batch = next(size for size in engine.batches if size >= sequences)
    prompts = np.random.default_rng(1).integers(
        0, shape.vocab, (sequences, PROMPT_TOKENS), dtype=np.int32
    )
    lengths = [shape.equal] * sequences
    slots = engine.cache_buckets(list(prompts), shape.equal)[0]
    shape_of_state = StateShape(0, batch, slots)
    chunks = {
        name: Decode(shape_of_state, rounds, params=DecodingParams(Sampling(heat)))
        for name, heat in (("greedy", 0.0), ("full", 1.0))
    }
    programs = {name: engine.programs.get(chunk) for name, chunk in chunks.items()} | {
        "model": forward_only(engine, rounds)
    }
    weights = ours.weights[0]
    far = jnp.full(batch, 1 << 30, jnp.int32)

    state = Start(shape_of_state)(engine.programs)
    state = state.replace(
        lengths=jnp.full(batch, PROMPT_TOKENS, jnp.int32), limits=far, live=far > 0
    )
    states = dict.fromkeys(programs)

    def run(name: str) -> None:
        out = programs[name](
            states[name],
            weights,
            *([] if name == "model" else [(), np.array([1, rounds], np.int32)]),
        )
        states[name] = out if name == "model" else out[0]
        jax.block_until_ready(states[name])

    best, begin, turn = (
        dict.fromkeys((*programs, "rollout", "prefill"), math.inf),
        time.perf_counter(),
        0,
    )
    while turn < 5 or (turn < 100 and time.perf_counter() - begin < SHARE_SECONDS):
        for name in programs:
            states[name] = jax.tree.map(jnp.copy, state)  # a chunk takes its state for good
            best[name] = min(best[name], steady(partial(run, name)) / rounds)
        best["rollout"] = min(best["rollout"], steady(lambda: ours.decode(prompts, lengths, 0)))
        best["prefill"] = min(best["prefill"], steady(lambda: prefill(ours, prompts)))
        turn += 1
    step = (best["rollout"] - best["prefill"]) / shape.equal
    parts = {
        "model": best["model"], "noise": best["full"] - best["greedy"], "sampling": best["greedy"] - best["model"],
        "host": step - best["full"],
    }  # fmt: skip
    return {"shape": shape.name, "sequences": sequences, "step_seconds": step, **parts}


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


def write_model(shape: Shape, directory: Path) -> None:
    """A random model of this shape as a Hugging Face directory."""
    model: ModelConfig = hf.new_config(shape.init, shape.vocab, ())
    mesh = meshes.make_mesh(1, 1)
    params = transformer.init(model, mesh, jax.random.key(0), "float32")
    hf.save(params, model, directory, mesh, None, "float32")


def versions() -> str:
    """What the numbers were measured with."""
    import torch
    import transformers

    return (f"Python {platform.python_version()}, jax {jax.__version__}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, {torch.get_num_threads()} torch threads")  # fmt: skip


def show_cell(cell: dict[str, Any]) -> str:
    """A row of the first table."""
    spread = ", ".join(f"{ratio:.2f}" for ratio in cell["ratios"])
    return (f"| {cell['shape']} | {cell['lengths']} | {cell['sequences']} | {cell['tokens']} | "
            f"{cell['longest']} / {cell['p75']:.0f} | {cell['ours']:.1f} | {cell['theirs']:.1f} | **{cell['ratio']:.2f}** | "
            f"{cell['cpu_ratio']:.2f} | {spread} | {cell['compile_seconds']:.1f} |")  # fmt: skip


def show_shares(part: dict[str, Any]) -> str:
    """A row of the second table."""
    names = ("model", "noise", "sampling", "host")
    columns = " | ".join(f"{100 * part[name] / part['step_seconds']:.0f}%" for name in names)
    return (
        f"| {part['shape']} | {part['sequences']} | {1e3 * part['step_seconds']:.2f} | {columns} |"
    )


CELLS = "| shape | lengths | sequences | tokens | longest / p75 | ours, tokens/s | transformers, tokens/s | ratio | "
CELLS += "cpu ratio | each repeat | compile, s |\n" + "|---" * 11 + "|"
SHARES = """| shape | sequences | step, processor ms | model | noise | sampling | host |
|---|---|---|---|---|---|---|"""


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints both tables as they fill."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="quickstart,mid,qwen")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--lengths", default="equal,heavy")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--parts", default="cells,shares")
    parser.add_argument("--json", type=Path, help="also write all numbers here")
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    counts, results = (
        [int(count) for count in args.sequences.split(",")],
        {"cells": [], "shares": []},
    )
    print(versions())
    for shape in shapes():
        if shape.name in args.shapes.split(","):
            measure(shape, counts, args, results)
            gc.collect()
    print(
        "\n".join(
            [
                CELLS,
                *map(show_cell, results["cells"]),
                "",
                SHARES,
                *map(show_shares, results["shares"]),
            ]
        )
    )
    return 0


def measure(
    shape: Shape, counts: Sequence[int], args: argparse.Namespace, results: dict[str, list]
) -> None:
    """Both tables' rows of one model, appended to the results."""
    with tempfile.TemporaryDirectory() as folder:
        write_model(shape, Path(folder))
        ours, theirs = Ours(Path(folder), shape, max(counts)), Theirs(Path(folder))
        for count in counts:
            for kind in args.lengths.split(",") if "cells" in args.parts else ():
                if count > 1 or kind == "equal":  # the lengths of one sequence are equal
                    results["cells"].append(compare(ours, theirs, shape, kind, count, args.repeats))
                    print(show_cell(results["cells"][-1]), flush=True)
            if "shares" in args.parts:
                results["shares"].append(shares(ours, shape, count))
                print(show_shares(results["shares"][-1]), flush=True)
            if args.json:
                args.json.write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    sys.exit(main())
