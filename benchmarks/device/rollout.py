"""How many tokens a second does the rollout engine decode, relative to `transformers` generate on torch?

python benchmarks/rollout.py [--shapes quickstart,mid,qwen] [--sequences 1,8,32] [--repeats 3] [--csv FILE]

Both decode the same random float32 weights from one Hugging Face directory: the same prompts, temperature 1, no filters,
no EOS, the same number of tokens per sequence, on the same number of CPU threads. The two take turns in one process
(ours, theirs, ours, ...) after an untimed run of each, in which ours compiles; a cell is the median of the repeats. In a
heavy-tailed cell the lengths are lognormal quantiles with longest / 75th percentile of 4 or more; a stopping criterion ends
finished rows of `transformers`, and only requested tokens count. Other work on the machine changes wall times: `cpu_ratio`
compares the processor seconds of all threads for a token (coarse for runs below 0.1 s: that clock lags). Torch's threads
sleep while they wait (OMP_WAIT_POLICY): the spinning default was far slower on shared cores.
"""

from __future__ import annotations

import gc
import math
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np

from benchmarks.common import results
from benchmarks.common.engines import model_of, sizes
from benchmarks.common.processes import ROOT
from benchmarks.common.timing import clocked, interleaved
from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import NONE, Speculation
from tlt_jax.data.prompt_format import tokenizer_of
from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import GENERATE_STREAM
from tlt_jax.models import architecture, hf, hf_config
from tlt_jax.rollout.engine import Engine
from tlt_jax.spec_decode.interface import Sampling

QUICKSTART = ROOT / "configs" / "quickstart.yaml"
PROMPT_TOKENS = 16
TAIL_RATIO = 5.0  # longest / 75th percentile aimed at; rounding to whole tokens leaves at least 4
PAUSE_S = 0.2  # before a timed call: the threads of the last one settle
COLUMNS = (
    "shape", "lengths", "sequences", "tokens", "longest_tokens", "p75_tokens", "ours_tokens_per_s",
    "transformers_tokens_per_s", "ratio", "cpu_ratio", "ratio_by_repeat", "compile_s",
)  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """A model to measure, and the tokens of its answers: of equal ones, and of the longest of a heavy tail."""

    name: str
    init: dict[str, Any]
    equal: int
    longest: int
    chunk: int


def shapes() -> list[Shape]:
    """The three models: the quickstart's, a middle one, and Qwen2.5-0.5B's sizes with few tokens."""
    quickstart = configuration.read(QUICKSTART)
    init = quickstart.model.init | {"vocab_size": len(tokenizer_of(quickstart))}
    return [
        Shape("quickstart", init, equal=96, longest=192, chunk=16),
        Shape("mid", sizes(512, 12, 8, 2, 1408, 8192), equal=64, longest=128, chunk=16),
        Shape("qwen", sizes(896, 24, 14, 2, 4864, 151936), equal=32, longest=64, chunk=4),
    ]


def answer_lengths(kind: str, sequences: int, shape: Shape) -> list[int]:
    """How many tokens each sequence gets."""
    if kind == "equal":
        return [shape.equal] * sequences
    normal = statistics.NormalDist()
    quantiles = np.asarray([normal.inv_cdf((i + 0.5) / sequences) for i in range(sequences)])
    sigma = math.log(TAIL_RATIO) / (quantiles[-1] - np.quantile(quantiles, 0.75))
    lengths = np.round(shape.longest * np.exp(sigma * (quantiles - quantiles[-1])))
    lengths = np.maximum(lengths, 1).astype(int)
    late = np.quantile(lengths, 0.75)
    if lengths.max() < 4 * late:
        raise ValueError(f"longest {lengths.max()} is below 4 times the 75th percentile {late}")
    return np.random.default_rng(0).permutation(lengths).tolist()


class Ours:
    """The engine on one CPU device."""

    def __init__(self, directory: Path, shape: Shape, slots: int):
        rollout = replace(
            Config().rollout, prompts=slots, samples=1, max_new_tokens=shape.longest, chunk=shape.chunk, compile_cache="off"
        )  # fmt: skip
        data = replace(Config().data, max_prompt_tokens=PROMPT_TOKENS)
        mesh, model = meshes.make_mesh(1, 1), hf_config.read_config(directory)
        config = Config(speculation=Speculation(NONE), rollout=rollout, data=data)
        self.engine = Engine(config, model, mesh)
        self.weights = self.engine.publish(hf.load(directory, model, mesh, "float32"))

    def decode(self, prompts: np.ndarray, lengths: Sequence[int], turn: int) -> dict[str, float]:
        """One rollout; the engine's totals."""
        request = self.engine.request(
            list(prompts), 1, Sampling(), lengths, stream=GENERATE_STREAM, step=turn, eos_ids=()
        )
        result, _ = self.engine.run(request, self.weights)
        if [len(one.tokens) for one in result.completions] != list(lengths):
            raise RuntimeError("the engine made other lengths than requested")
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
            raise RuntimeError("transformers made other lengths than requested")


@contextmanager
def model_directory(shape: Shape) -> Iterator[Path]:
    """A random model of this shape as a Hugging Face directory, which is deleted at the end."""
    model, mesh = model_of(shape.init), meshes.make_mesh(1, 1)
    params = architecture.init(model, mesh, jax.random.key(0), "float32")
    with TemporaryDirectory() as folder:
        hf.save(params, model, Path(folder), mesh, None, "float32")
        yield Path(folder)


def compare(
    ours: Ours, theirs: Theirs, shape: Shape, kind: str, sequences: int, repeats: int
) -> list[object]:
    """A row of the table."""
    lengths, size = answer_lengths(kind, sequences, shape), (sequences, PROMPT_TOKENS)
    random = np.random.default_rng(1)
    prompts = random.integers(0, shape.init["vocab_size"], size, dtype=np.int32)
    compiled = ours.decode(prompts, lengths, 0)["compile_seconds"]
    theirs.decode(prompts, [2] * sequences, 0)

    def timed(side: Ours | Theirs, turns: Iterator[int]) -> tuple[float, float]:
        time.sleep(PAUSE_S)
        return clocked(partial(side.decode, prompts, lengths, next(turns)))

    calls: dict[str, Callable[[], tuple[float, float]]] = {
        name: partial(timed, side, iter(range(1, repeats + 1)))
        for name, side in (("ours", ours), ("theirs", theirs))
    }
    found = interleaved(calls, repeats)
    (mine, my_cpu), (other, other_cpu) = (np.median(one, axis=0) for one in found.values())
    ratios = " ".join(f"{b[0] / a[0]:.2f}" for a, b in zip(*found.values(), strict=True))
    late, total = float(np.quantile(lengths, 0.75)), sum(lengths)
    speeds = map(float, (total / mine, total / other, other / mine, other_cpu / my_cpu))
    return [shape.name, kind, sequences, total, max(lengths), late, *speeds, ratios, compiled]


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = results.arguments(__doc__)
    parser.add_argument("--shapes", default="quickstart,mid,qwen")
    parser.add_argument("--sequences", default="1,8,32")
    parser.add_argument("--lengths", default="equal,heavy")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    counts = [int(count) for count in results.listed(args.sequences)]
    print(results.versions("torch", "transformers"))
    table = results.ResultTable(COLUMNS, args.csv)
    for shape in (one for one in shapes() if one.name in results.listed(args.shapes)):
        with model_directory(shape) as folder:
            ours, theirs = Ours(folder, shape, max(counts)), Theirs(folder)
            for count in counts:
                for kind in results.listed(args.lengths):
                    if count > 1 or kind == "equal":  # the lengths of one sequence are equal
                        table.row(*compare(ours, theirs, shape, kind, count, args.repeats))
        del ours, theirs
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
