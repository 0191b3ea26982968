"""Knows what the benchmarks of plain decoding measure with: three model sizes, prompts, and the engine on one CPU device."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import jax
import numpy as np
from result_table import add_csv

from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import NONE, Speculation
from tlt_jax.data.dataset import tokenizer
from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import GENERATE_STREAM
from tlt_jax.models import hf, transformer
from tlt_jax.models.transformer import ModelConfig
from tlt_jax.rollout.engine import Engine
from tlt_jax.spec_decode.decoding_params import Sampling

QUICKSTART = Path(__file__).parent.parent / "configs" / "quickstart.yaml"
PROMPT_TOKENS = 16
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
        config = Config(speculation=Speculation(NONE), rollout=settings, data=data)
        self.engine = Engine(config, self.model, mesh)
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


@contextmanager
def model_directory(shape: Shape) -> Iterator[Path]:
    """A random model of this shape as a Hugging Face directory, which goes again."""
    model: ModelConfig = hf.new_config(shape.init, shape.vocab, ())
    mesh = meshes.make_mesh(1, 1)
    params = transformer.init(model, mesh, jax.random.key(0), "float32")
    with TemporaryDirectory() as folder:
        hf.save(params, model, Path(folder), mesh, None, "float32")
        yield Path(folder)


def prompts_of(shape: Shape, sequences: int) -> np.ndarray:
    """Random prompts."""
    size = (sequences, PROMPT_TOKENS)
    return np.random.default_rng(1).integers(0, shape.vocab, size, dtype=np.int32)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments that these benchmarks take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shapes", default="quickstart,mid,qwen")
    parser.add_argument("--sequences", default="1,8,32")
    add_csv(parser)
    return parser


def chosen(args: argparse.Namespace) -> tuple[list[Shape], list[int]]:
    """The shapes and the numbers of sequences that the arguments name."""
    counts = [int(count) for count in args.sequences.split(",")]
    return [shape for shape in shapes() if shape.name in args.shapes.split(",")], counts
