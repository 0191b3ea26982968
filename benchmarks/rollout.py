"""How many tokens per second does the rollout engine make, over `transformers` generate on torch?

python benchmarks/rollout.py [--shapes quickstart,mid,qwen] [--sequences 1,8,32] [--repeats 3]

Both decode the same random float32 weights from one Hugging Face directory: the same prompts, temperature 1, no filters,
no EOS, the same number of tokens per sequence, on the same number of CPU threads. The two take turns in one process
(ours, theirs, ours, ...), after an untimed run of each (ours compiles in it); a cell is the median of the repeats. In a
heavy-tailed cell the lengths are lognormal quantiles with longest / 75th percentile of 4 or more; a row of
`transformers` that is done is told so by a stopping criterion, and only the tokens that were asked for count. On a
machine with other work, wall time is that work's too: `cpu_ratio` compares the processor seconds, of all threads, that a
token costs (coarse for runs below 0.1 s: that clock lags). Torch's threads sleep while they wait (OMP_WAIT_POLICY): the
spinning default was seen to be far slower on shared cores.
"""

from __future__ import annotations

import gc
import math
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import numpy as np
from result_table import ResultTable
from rollout_setup import Ours, Shape, arguments, chosen, model_directory, prompts_of

TAIL_RATIO = 5.0  # longest / 75th percentile aimed at; rounding to whole tokens leaves at least 4
COLUMNS = (
    "shape", "lengths", "sequences", "tokens", "longest_tokens", "p75_tokens", "ours_tokens_per_s",
    "transformers_tokens_per_s", "ratio", "cpu_ratio", "ratio_by_repeat", "compile_s",
)  # fmt: skip


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
) -> list[object]:
    """A row of the table."""
    lengths = answer_lengths(kind, sequences, shape)
    prompts = prompts_of(shape, sequences)
    compiled = ours.decode(prompts, lengths, 0)["compile_seconds"]
    theirs.decode(prompts, [2] * sequences, 0)
    seconds = [
        [clock(partial(side.decode, prompts, lengths, turn)) for side in (ours, theirs)]
        for turn in range(1, repeats + 1)
    ]
    (mine, my_cpu), (other, other_cpu) = np.median(seconds, axis=0).tolist()
    ratios = " ".join(f"{b[0] / a[0]:.2f}" for a, b in seconds)
    late, total = float(np.quantile(lengths, 0.75)), sum(lengths)
    return [
        shape.name, kind, sequences, total, max(lengths), late, total / mine, total / other, other / mine, other_cpu / my_cpu,
        ratios, compiled,
    ]  # fmt: skip


def versions() -> str:
    """What the numbers were measured with."""
    import torch
    import transformers

    return (f"Python {platform.python_version()}, jax {jax.__version__}, torch {torch.__version__}, "
            f"transformers {transformers.__version__}, {torch.get_num_threads()} torch threads")  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = arguments(__doc__)
    parser.add_argument("--lengths", default="equal,heavy")
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args(argv)
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # read when torch is loaded
    shapes, counts = chosen(args)
    print(versions())
    table = ResultTable(COLUMNS, args.csv)
    for shape in shapes:
        with model_directory(shape) as folder:
            ours, theirs = Ours(folder, shape, max(counts)), Theirs(folder)
            for count in counts:
                for kind in args.lengths.split(","):
                    if count > 1 or kind == "equal":  # the lengths of one sequence are equal
                        table.row(*compare(ours, theirs, shape, kind, count, args.repeats))
        del ours, theirs
        gc.collect()
    return 0


if __name__ == "__main__":
    sys.exit(main())
