"""Knows what benchmarks of random weights share: model sizes, an engine with its weights, and chunks of full rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax.config import Config
from tlt_jax.config.schema import NONE
from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.models import architecture, drafter as drafters, hf_config, lora
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.low_rank import Lora
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import Decode, Start, StateShape
from tlt_jax.spec_decode import ngram
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy


def model_of(init: dict[str, Any]) -> ModelConfig:
    """The model of these sizes, without an end token."""
    return hf_config.new_config(init, init["vocab_size"], ())


def sizes(
    width: int, layers: int, heads: int, kv_heads: int, mlp: int, vocab: int, *, kind: str = "qwen2",
    is_tied: bool = True, positions: int = 1024,
) -> dict[str, Any]:  # fmt: skip
    """Sizes of a model as in its config.json."""
    return {
        "model_type": kind, "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "intermediate_size": mlp, "max_position_embeddings": positions,
        "tie_word_embeddings": is_tied, "vocab_size": vocab,
    }  # fmt: skip


def random_engine(
    model: ModelConfig, mesh: Mesh, sequences: int, *, kind: str = NONE, dtype: str = "float32",
    strategies: Sequence[str] = (), draft_vocab: int | None = None, captures_states: bool = False,
    adapters: Lora | None = None,
) -> tuple[Engine, Weights]:  # fmt: skip
    """An engine of a random policy, with a random drafter of this kind if one is named, and the weights of data group 0.

    Without `strategies` it has those of the default configuration; without `draft_vocab` the drafter has all tokens.
    """
    config, drafts = Config(), kind != NONE
    speculation = replace(config.speculation, drafter="a directory" if drafts else NONE)
    config = replace(
        config,
        model=replace(config.model, compute_dtype=dtype),
        rollout=replace(config.rollout, prompts=sequences, samples=1, compile_cache="off"),
        speculation=replace(speculation, strategies=list(strategies or speculation.strategies)),
    )
    drafter, params = None, None
    if drafts:
        vocab = draft_vocab or model.vocab_size
        drafter = drafters.for_policy(model, kind, draft_vocab_size=vocab)
        ids = np.arange(vocab) if draft_vocab else None
        params = drafters.init(drafter, mesh, jax.random.key(1), dtype, ids)
    engine = Engine(
        config, model, mesh, drafter=drafter, captures_states=captures_states, lora=adapters
    )
    policy = architecture.init(model, mesh, jax.random.key(0), dtype)
    if adapters:
        policy = lora.applied(policy, lora.init(adapters, model, mesh, jax.random.key(2), dtype))
    return engine, jax.block_until_ready(engine.publish(policy, params)[0])


class FullRows:
    """A chunk of rows that are half full and never end, called again and again on its own state.

    `history` int32[batch, T]: tokens for drafters that read some; the rows hold them again and again.
    """

    def __init__(
        self, engine: Engine, weights: Weights, batch: int, slots: int, rounds: int, strategy: Strategy = PLAIN,
        sampling: Sampling = Sampling(), history: np.ndarray | None = None,  # noqa: B008
    ):  # fmt: skip
        self.engine, self.weights, self.rounds = engine, weights, rounds
        self.shape, shapes = StateShape(0, batch, slots), engine.programs.shapes[0]
        chunk = Decode(self.shape, rounds, strategy, DecodingParams(sampling))
        self.program = engine.programs.get(chunk)
        self.state = Start(self.shape)(engine.programs)
        host = () if strategy == PLAIN else shapes.drafter_of(strategy).host_context(batch)
        self.host = jax.tree.map(lambda one: np.full(one.shape, ngram.SEPARATOR, one.dtype), host)
        self.rows = {
            "lengths": np.full(batch, slots // 2, np.int32), "limits": np.full(batch, 1 << 30, np.int32),
            "live": np.ones(batch, bool), "keys": np.asarray(sequence_keys(0, 0, 0, np.arange(batch))),
        }  # fmt: skip
        if history is not None and self.state.history.shape[1]:
            self.rows["history"] = np.resize(history, (batch, self.state.history.shape[1]))
            self.rows["roots"] = self.rows["history"][:, slots // 2]

    def __call__(self) -> jax.Array:
        """Decodes all rounds; raises RuntimeError if it decoded fewer."""
        rows = meshes.put(self.rows, self.engine.programs.shapes[0].replicated)
        bounds = np.array([1, self.rounds], np.int32)
        state = self.state.replace(**rows)
        if state.drafter != ():  # it lacks the newest token, as between rounds
            state = state.replace(drafter=state.drafter.replace(built=rows["lengths"] - 1))
        self.state, report = self.program(state, self.weights, self.host, bounds)
        if int(report.rounds) != self.rounds:
            raise RuntimeError(f"{report.rounds} rounds instead of {self.rounds}")
        return report.tokens
