"""An engine on a tiny policy and the reference of its rollouts, shared by the rollout's tests."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references

from tlt_jax.config import Config
from tlt_jax.config.schema import Model as ModelSection, Rollout, Speculation
from tlt_jax.config.task import Data
from tlt_jax.data.stop_rules import stop_tokens
from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import TRAIN_STREAM, sequence_keys
from tlt_jax.models import architecture, transformer
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.rollout import ngram_memory
from tlt_jax.rollout.engine import Engine
from tlt_jax.spec_decode import noise
from tlt_jax.spec_decode.interface import Sampling

MODEL = ModelConfig(
    "qwen2", 37, 16, 2, 4, 2, 4, 32, 64, qkv_bias=True, tied=True, init_std=0.4, eos_ids=(0, 5)
)
STOPS = ((7, 7), (11,))
PROMPTS = [
    [3, 1, 4, 1, 5],
    [9],
    [2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6, 2, 6, 4, 3],
    [36, 10],
]
SAMPLES, LIMIT = 3, 12
CACHE = os.environ["TLT_JAX_TEST_PROGRAMS"]  # of executables, which many cases share


def engine_of(
    data: int = 1, model: int = 1, dtype: str = "float64", policy: ModelConfig = MODEL,
    batch_buckets=(), cache_buckets=(), records: bool = False, **rollout,
) -> Engine:  # fmt: skip
    config = Config(
        model=ModelSection(compute_dtype=dtype, param_dtype=dtype),
        data=Data(max_prompt_tokens=20),
        rollout=Rollout(
            **{
                "prompts": 4,
                "samples": SAMPLES,
                "max_new_tokens": LIMIT,
                "compile_cache": CACHE,
            }
            | rollout
        ),
        speculation=Speculation("none"),
    )
    mesh = meshes.make_mesh(data, model)
    return Engine(
        config, policy, mesh, stop_tokens(STOPS), batch_buckets=batch_buckets, cache_buckets=cache_buckets, records=records
    )  # fmt: skip


def with_drafter(
    plain: Engine, speculation: Speculation, drafter=None, captures_states=False
) -> Engine:
    """An engine of the same policy, mesh and sizes that drafts."""
    return Engine(
        replace(plain.config, speculation=speculation), plain.model_config, plain.mesh, plain.stops, drafter,
        captures_states, batch_buckets=plain.batches, cache_buckets=plain.caches, records=plain.records,
    )  # fmt: skip


@pytest.fixture(scope="module")
def small_pool():
    """N-grams search fewer tokens of other answers: less to compile."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ngram_memory, "POOL", 64)
        yield


@cache
def drawn(policy: ModelConfig, seed: int, dtype: str) -> architecture.Params:
    """New weights of a policy, on the host: one program for all meshes."""
    key = jax.random.key(seed)
    return jax.device_get(architecture.init(policy, meshes.make_mesh(1, 1), key, dtype))


def params_of(engine: Engine, seed: int = 0) -> architecture.Params:
    policy, dtype = engine.model_config, engine.config.model.param_dtype
    abstract = architecture.abstract(policy, engine.mesh, "train", dtype)
    return placed(drawn(policy, seed, dtype), abstract)


def placed(params, abstract):
    """The same weights on another mesh, where the vocabulary may be padded."""

    def place(leaf, target: jax.ShapeDtypeStruct) -> jax.Array:
        more = [(0, wanted - size) for wanted, size in zip(target.shape, leaf.shape, strict=True)]
        return jax.device_put(np.pad(leaf, more) if more else leaf, target.sharding)

    return jax.tree.map(place, params, abstract)


def play(
    engine: Engine,
    setting: Sampling,
    seed: int = 0,
    step: int = 0,
    stream: int = TRAIN_STREAM,
    limits=LIMIT,
    **rest,
):
    weights = engine.publish(params_of(engine, seed))
    return roll_out(
        engine, weights, PROMPTS, SAMPLES, setting, limits, stream=stream, step=step, **rest
    )


def roll_out(
    engine: Engine,
    weights,
    prompts,
    *shape,
    on_finish=None,
    interrupted=None,
    stops=None,
    in_flight=None,
    **which,
):
    """The rollout of these prompts, with a fresh tuner."""
    request = engine.request([np.asarray(prompt, np.int32) for prompt in prompts], *shape, **which)
    if stops is not None:  # instead of the engine's
        request = replace(request, params=replace(request.params, stops=stop_tokens(stops)))
    if in_flight is not None:
        request = replace(request, in_flight=in_flight)
    return engine.run(request, weights, on_finish=on_finish, interrupted=interrupted)[0]


def answers(result) -> list[tuple[int, list[int], str]]:
    return [(one.uid, one.tokens.tolist(), one.finish) for one in result.completions]


@cache
def reference(
    setting: Sampling, policy: ModelConfig = MODEL
) -> tuple[list[tuple[int, list[int], str]], list[list[float]]]:
    """The rollout by the training forward over each whole prefix, sequence by sequence, in float64."""
    params = architecture.init(policy, meshes.make_mesh(1, 1), jax.random.key(0), "float64")
    keys = jnp.asarray(sequence_keys(0, TRAIN_STREAM, 0, np.arange(len(PROMPTS) * SAMPLES)))
    size = 32

    @jax.jit
    def next_logits(tokens, length):
        segments = (jnp.arange(size) < length).astype(jnp.int32)[None]
        x, _ = transformer.hidden(
            params, policy, tokens[None], jnp.arange(size)[None], segments, compute_dtype="float64"
        )
        return transformer.logits(params, policy, x[0, length - 1])[: MODEL.vocab_size]

    def logits_of(prefix):
        return next_logits(np.pad(np.int32(prefix), (0, size - len(prefix))), len(prefix))

    draw = jax.jit(
        lambda key, t: noise.gumbel(key[None], t[None, None], MODEL.vocab_size, jnp.float64)[0, 0]
    )
    found, logprobs = [], []
    for uid, key in enumerate(keys):
        tokens, logp, finish = references.decode(
            logits_of,
            lambda t, key=key: draw(key, jnp.int32(t)),
            PROMPTS[uid // SAMPLES],
            setting,
            MODEL.eos_ids,
            STOPS,
            LIMIT,
        )
        found.append((uid, tokens, finish))
        logprobs.append(logp)
    return found, logprobs


PLAIN, COLD = Sampling(1.0), Sampling(0.6, 8, 1.0)
NUCLEUS, GREEDY = Sampling(1.0, 0, 0.8), Sampling(0.0)
LONG = replace(MODEL, num_layers=1, max_positions=224, eos_ids=(0,))
LONG_LIMIT = 200
LONG_PROMPTS = [np.random.default_rng(i).integers(1, 37, 9 + i % 8).tolist() for i in range(64)]
