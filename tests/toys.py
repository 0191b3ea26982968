"""A target without a network whose logits depend on every earlier token and its position, and drafters that guess it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.board import LocalBoard
from tlt_jax.keys import sequence_keys
from tlt_jax.rollout.events import Decision
from tlt_jax.rollout.executables.compilation import Executables
from tlt_jax.rollout.executables.disk_cache import ExecutableCache
from tlt_jax.rollout.executables.programs import GroupShapes
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler import driver
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.rollout.scheduler.queue import WorkQueue
from tlt_jax.rollout.scheduler.state import (
    CandidatePrograms,
    GroupContext,
    GroupView,
    Needs,
    no_context,
)
from tlt_jax.spec_decode import ngram
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import NO_DRAFTER, DecodingParams, Drafter, Target, stateless
from tlt_jax.spec_decode.network import LevelPasses, Network
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, NGRAM, PLAIN, Strategy
from tlt_jax.spec_decode.tree_drafter import learned_drafter, merged_drafter
from tlt_jax.spec_decode.tree_growth import Coupling
from tlt_jax.tuner import fixed
from tlt_jax.tuner.interface import Measurement

DECAY = 0.7
TAIL = 6


@struct.dataclass
class TokenCache:
    """The committed tokens themselves, and the logits after each as features."""

    tokens: jax.Array
    features: jax.Array


def table(vocab: int, seed: int = 0, scale: float = 2.0, dtype=np.float64) -> np.ndarray:
    """[V, V]: what each earlier token adds to the logits, before it decays with distance."""
    return (scale * np.random.default_rng(seed).normal(size=(vocab, vocab))).astype(dtype)


def table_logits(weights: np.ndarray, prefix: list[int]) -> np.ndarray:
    """Logits of the token after a prefix."""
    ages = np.arange(len(prefix))[::-1]
    return (DECAY**ages) @ weights[np.asarray(prefix)]


def table_target(group: Mesh, vocab: int, dtype=jnp.float64) -> Target:
    """The table as a Target on one data group."""

    def forward(params, tokens, positions, ancestors, cache, lengths):
        slots = jnp.arange(cache.tokens.shape[1])
        ages = positions[:, :, None] - slots
        old = jnp.where(
            slots < lengths[:, None, None], jnp.power(DECAY, ages.astype(params.dtype)), 0
        )
        ages = positions[:, :, None] - positions[:, None, :]
        new = jnp.where(ancestors, jnp.power(DECAY, ages.astype(params.dtype)), 0)
        logits = jnp.einsum("bns,bsv->bnv", old, params[cache.tokens]) + jnp.einsum(
            "bnm,bmv->bnv", new, params[tokens]
        )
        return logits, TokenCache(tokens, logits)

    def keep(cache, scratch, path, lengths):
        rows = jnp.arange(path.shape[0])[:, None]
        slots = lengths[:, None] + jnp.arange(path.shape[1])
        return jax.tree.map(
            lambda old, new: old.at[rows, slots].set(new[rows, path]), cache, scratch
        )

    def prefill(params, tokens, lengths):
        ages = jnp.arange(tokens.shape[1])[:, None] - jnp.arange(tokens.shape[1])
        decay = jnp.where(ages >= 0, jnp.power(DECAY, ages.astype(params.dtype)), 0)
        return TokenCache(tokens, jnp.einsum("ts,qsv->qtv", decay, params[tokens]))

    def insert(cache, prefilled, rows, source):
        return jax.tree.map(
            lambda old, new: old.at[rows, : new.shape[1]].set(new[source], mode="drop"),
            cache,
            prefilled,
        )

    whole = NamedSharding(group, PartitionSpec())
    return Target(
        forward=forward,
        keep=keep,
        features=lambda cache: cache.features,
        prefill=prefill,
        insert=insert,
        resize=lambda cache, rows, slots: jax.tree.map(partial(fit, rows, slots), cache),
        empty=lambda batch, slots: TokenCache(
            jax.ShapeDtypeStruct((batch, slots + TAIL), jnp.int32, sharding=whole),
            jax.ShapeDtypeStruct((batch, slots + TAIL, vocab), dtype, sharding=whole),
        ),
        padded_slots=lambda slots: slots + TAIL,
        vocab=vocab,
        params=jax.ShapeDtypeStruct((vocab, vocab), dtype, sharding=whole),
    )


def fit(rows, slots, leaf):
    """The given rows of an array of slots, cut or padded."""
    taken = leaf[jnp.maximum(rows, 0)][:, : slots + TAIL]
    return jnp.pad(taken, [(0, 0), (0, slots + TAIL - taken.shape[1])] + [(0, 0)] * (leaf.ndim - 2))


TREE = Strategy(depth=3, topk=2, nodes=6)


@struct.dataclass
class Branch:
    """Scratch of the toy network: the tokens and positions of the nodes so far."""

    tokens: jax.Array
    positions: jax.Array


def table_network(
    group: Mesh, vocab: int, ids: np.ndarray | None = None, dtype=jnp.float64
) -> Network:
    """The table as a drafter's network; its hidden state are the logits, from the target's for the token before.

    With the target's own table it knows exactly what the target will say, if features, slots, parents and ancestors are
    all right: `step` computes the logits twice, from the parent and from the cache and the ancestors, and answers NaN
    where they differ. With `ids` it only knows these tokens.
    """
    whole = NamedSharding(group, PartitionSpec())

    def extend(weights, cache, tokens, features, starts, last):
        rows = jnp.arange(tokens.shape[0])
        cache = fill(weights, cache, tokens, features, rows, starts)
        return cache, cache[rows, starts + last]

    def fill(weights, cache, tokens, features, rows, starts):
        slots = starts[:, None] + jnp.arange(tokens.shape[1])
        return cache.at[rows[:, None], slots].set(DECAY * features + weights.drafter[tokens])

    def step(weights, cache, scratch, tokens, hidden, positions, starts, ancestors, level):
        k, table = tokens.shape[1], weights.drafter
        here = level * k + jnp.arange(k)
        scratch = Branch(
            scratch.tokens.at[:, here].set(tokens), scratch.positions.at[:, here].set(positions)
        )
        count = ancestors.shape[2]
        ages = positions[:, :, None] - scratch.positions[:, None, :count]
        decay = jnp.where(ancestors, jnp.power(DECAY, ages.astype(table.dtype)), 0)
        base = jnp.take_along_axis(cache, (starts - 1)[:, None, None], axis=1)
        age = (positions - starts[:, None] + 1)[:, :, None].astype(table.dtype)
        whole = jnp.power(DECAY, age) * base + jnp.einsum(
            "bkr,brv->bkv", decay, table[scratch.tokens[:, :count]]
        )
        one = DECAY * hidden + table[tokens]
        return scratch, jnp.where(
            jnp.abs(whole - one).max(axis=-1, keepdims=True) < 1e-9, one, jnp.nan
        )

    return Network(
        extend=extend,
        fill=fill,
        passes=LevelPasses(
            step, lambda batch, rows: Branch(*[jnp.zeros((batch, rows), jnp.int32)] * 2)
        ),
        logits=lambda weights, hidden: hidden if ids is None else hidden[..., ids],
        ids=lambda weights: None if ids is None else jnp.asarray(ids, jnp.int32),
        resize=lambda cache, rows, slots: fit(rows, slots, cache),
        empty=lambda batch, slots: jax.ShapeDtypeStruct(
            (batch, slots + TAIL, vocab), dtype, sharding=whole
        ),
        params=jax.ShapeDtypeStruct((vocab, vocab), dtype, sharding=whole),
        hidden=jax.ShapeDtypeStruct((1, vocab), dtype, sharding=whole),
    )


CERTAIN = Coupling(1.0, 50.0)


def table_drafter(coupling: Coupling = CERTAIN, ids: np.ndarray | None = None):
    """A maker of the drafter of the toy network on a data group."""
    return lambda group, vocab: learned_drafter(table_network(group, vocab, ids), coupling)


def no_drafter(group: Mesh, vocab: int) -> Drafter:
    """A maker of no drafter."""
    return NO_DRAFTER


def executables(
    groups: int, vocab: int, drafter=no_drafter, named=lambda drafter: {}, is_cached: bool = True
) -> Executables:
    """Executables of the table target on this many data groups of one device; `named`: what strategies can name too.

    Tests of all files and workers share what was compiled, but where `is_cached` is false.
    """
    mesh = meshes.make_mesh(groups, 1)
    parts = [meshes.data_group(mesh, index) for index in range(groups)]
    shapes = []
    for part in parts:
        own = drafter(part, vocab)
        shapes.append(GroupShapes(table_target(part, vocab), own, part, named(own)))
    folder = Path(os.environ["TLT_JAX_TEST_PROGRAMS"]) / "toys"
    return Executables(
        shapes, lambda compiled: None, ExecutableCache(folder if is_cached else None)
    )


POOL = 24


def with_ngrams(drafter: Drafter) -> dict[str, Drafter]:
    """What an adaptive engine drafts with: n-grams of the sequence and a pool, the drafter, and both in one tree."""

    def draft(weights, state, context, strategy, temperature):
        return ngram.propose(context.history, context.lengths, context.host_context, strategy)

    ngrams = stateless(
        draft, host_context=lambda batch: jax.ShapeDtypeStruct((batch, POOL), jnp.int32)
    )
    return {NGRAM: ngrams, LEARNED: drafter, MERGED: merged_drafter(drafter, ngrams)}


def pool(rows) -> np.ndarray:
    """A host context of n-grams: texts that have nothing to do with the rows."""
    return np.random.default_rng(len(rows)).integers(0, 12, (len(rows), POOL), np.int32)


def bucketed(batches, slots, strategy: Strategy = PLAIN):
    """The decisions that always take one strategy."""
    return Planner(batches, slots, fixed.fixed(strategy)).decide


@dataclass
class Decided:
    """A planner that decides with a function and learns nothing."""

    given: Callable[[GroupView], Decision]

    def worth_compiling(self, view: GroupView, candidates: CandidatePrograms) -> None:
        return None

    def decide(self, view: GroupView, candidates: CandidatePrograms) -> Decision:
        return self.given(view)

    def observe(self, measurement: Measurement) -> None:
        pass


def placed(
    programs: Executables, group: int, weights: np.ndarray, guess: np.ndarray | None
) -> Weights:
    """The tables on a data group."""
    shapes = programs.shapes[group]
    if not shapes.drafter.reads_history:
        return Weights(jax.device_put(weights, shapes.replicated), ())
    return Weights(
        *(
            jax.device_put(one, shapes.replicated)
            for one in (weights, weights if guess is None else guess)
        )
    )


def contexts(
    programs: Executables, weights: np.ndarray, prompts: list[list[int]], samples: int, params: DecodingParams, *,
    max_new_tokens=24, capacity=8, batches=(8,), slots=(64,), rounds=4, in_flight=2, strategy=PLAIN, decide=None, seed=0,
    guess=None, planner=None,
) -> list[GroupContext]:  # fmt: skip
    """The fixed side of every group for a rollout of the table target; the drafter's table is `guess`, or the target's."""
    tokens = tuple(np.asarray(prompt, np.int32) for prompt in prompts)
    keys = sequence_keys(seed, 0, 0, np.arange(len(prompts) * samples))
    limits = (max_new_tokens,) * len(tokens)
    request = RolloutRequest(tokens, samples, limits, keys, params, rounds, in_flight, capacity)
    queue = WorkQueue(LocalBoard(), "test", len(prompts), samples)
    planner = planner or Decided(decide or bucketed(batches, slots, strategy))
    return [
        GroupContext(
            i, programs, placed(programs, i, weights, guess), request, queue, planner,
            needs={
                name: Needs(pool if jax.tree.leaves(one.host_context(1)) else no_context, one.catch_up is not None)
                for name, one in {"": shapes.drafter, **shapes.drafters}.items()
            },
            remembers=shapes.drafter.reads_history,
        )
        for i, shapes in enumerate(programs.shapes)
    ]  # fmt: skip


def play(*arguments, **rest) -> RolloutResult:
    """A rollout of the table target, of the arguments that `contexts` has."""
    return driver.run(driver.start(contexts(*arguments, **rest)))
