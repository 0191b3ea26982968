"""A target without a network whose logits depend on every earlier token and its position, and drafters that guess it."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.board import LocalBoard
from tlt_jax.kernels.fused import Fused
from tlt_jax.keys import sequence_keys
from tlt_jax.models import drafter as drafters
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.rollout.executables.compilation import Executables
from tlt_jax.rollout.executables.disk_cache import ExecutableCache
from tlt_jax.rollout.executables.programs import GroupShapes
from tlt_jax.rollout.recorder import Decision, RolloutResult
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler import driver
from tlt_jax.rollout.scheduler.planner import GroupCandidates, Planner
from tlt_jax.rollout.scheduler.queue import WorkQueue
from tlt_jax.rollout.scheduler.state import GroupContext, GroupView, Needs, no_context
from tlt_jax.spec_decode import ngram
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import NO_DRAFTER, DecodingParams, Drafter, Target, stateless
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, NGRAM, PLAIN, Strategy
from tlt_jax.spec_decode.tree_drafter import Coupling, LearnedState, learned_drafter, merged_drafter
from tlt_jax.tuner import baselines
from tlt_jax.tuner.interface import Measurement

DECAY = 0.7
TAIL = 6


@struct.dataclass
class Table:
    """Weights of the toys: what a token adds to the logits after it, [V, V]; `ids`: the tokens that a drafter knows."""

    embed: jax.Array
    head: jax.Array | None = None
    ids: jax.Array | None = None


def weights(
    target: np.ndarray, drafter: np.ndarray | None, ids: np.ndarray | None = None
) -> Weights:
    """The tables of the target and of the drafter, None without one."""
    if drafter is None:
        return Weights(Table(jnp.asarray(target)), ())
    known = None if ids is None else jnp.asarray(ids, jnp.int32)
    return Weights(Table(jnp.asarray(target)), Table(jnp.asarray(drafter), ids=known))


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
            slots < lengths[:, None, None], jnp.power(DECAY, ages.astype(params.embed.dtype)), 0
        )
        ages = positions[:, :, None] - positions[:, None, :]
        new = jnp.where(ancestors, jnp.power(DECAY, ages.astype(params.embed.dtype)), 0)
        logits = jnp.einsum("bns,bsv->bnv", old, params.embed[cache.tokens]) + jnp.einsum(
            "bnm,bmv->bnv", new, params.embed[tokens]
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
        decay = jnp.where(ages >= 0, jnp.power(DECAY, ages.astype(params.embed.dtype)), 0)
        return TokenCache(tokens, jnp.einsum("ts,qsv->qtv", decay, params.embed[tokens]))

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
        params=Table(jax.ShapeDtypeStruct((vocab, vocab), dtype, sharding=whole)),
    )


def fit(rows, slots, leaf):
    """The given rows of an array of slots, cut or padded."""
    taken = leaf[jnp.maximum(rows, 0)][:, : slots + TAIL]
    return jnp.pad(taken, [(0, 0), (0, slots + TAIL - taken.shape[1])] + [(0, 0)] * (leaf.ndim - 2))


TREE = Strategy(depth=3, topk=2, nodes=6)


@struct.dataclass
class Branch:
    """Scratch of the toy drafter: the tokens and positions of the nodes so far."""

    tokens: jax.Array
    positions: jax.Array


def extend(params, config, shared, cache, tokens, features, starts, last, fused):
    """As eagle.extend, of the toy."""
    rows = jnp.arange(tokens.shape[0])
    cache = fill(params, config, shared, cache, tokens, features, rows, starts, fused)
    return cache, cache[rows, starts + last]


def fill(params, config, shared, cache, tokens, features, rows, starts, fused):
    """As eagle.fill, of the toy."""
    slots = starts[:, None] + jnp.arange(tokens.shape[1])
    return cache.at[rows[:, None], slots].set(DECAY * features + params.embed[tokens])


def draft_level(
    params, config, shared, cache, scratch, tokens, hidden, positions, starts, ancestors, level, fused
):  # fmt: skip
    """As eagle.draft_level, of the toy."""
    k, table = tokens.shape[1], params.embed
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
    return scratch, jnp.where(jnp.abs(whole - one).max(axis=-1, keepdims=True) < 1e-9, one, jnp.nan)


def scratch(config, batch, rows, dtype, model_axis):
    """As eagle.scratch, of the toy."""
    return Branch(*[jnp.zeros((batch, rows), jnp.int32)] * 2)


def logits(params, config, shared, hidden, fused):
    """As eagle.logits, of the toy."""
    return hidden if params.ids is None else hidden[..., params.ids]


NETWORK = SimpleNamespace(
    extend=extend, fill=fill, draft_level=draft_level, scratch=scratch, logits=logits
)
CERTAIN = Coupling(1.0, 50.0)
SOME = np.array([0, 2, 3, 5, 7, 9], np.int32)


def table_drafter(coupling: Coupling = CERTAIN, knows_some: bool = False):
    """A maker of a learned drafter on a data group; its hidden state are the logits, from the target's for the token before.

    With the target's own table it knows exactly what the target will say, if features, slots, parents and ancestors are
    all right: `draft_level` computes the logits twice, from the parent and from the cache and the ancestors, and answers
    NaN where they differ. `knows_some`: it only knows the tokens SOME.
    """

    def make(group: Mesh, vocab: int) -> Drafter:
        policy = ModelConfig("llama", vocab, vocab, 1, 1, 1, 2, 2, 64)
        config, target = drafters.for_policy(policy, "eagle"), table_target(group, vocab)
        drafter = learned_drafter(config, target, Fused.of(group), "float64", coupling, NETWORK)
        spec = partial(jax.ShapeDtypeStruct, sharding=NamedSharding(group, PartitionSpec()))
        return drafter._replace(
            empty=lambda batch, slots: drafter.empty(batch, slots).replace(
                cache=spec((batch, slots + TAIL, vocab), jnp.float64)
            ),
            resize=lambda state, rows, slots: LearnedState(
                fit(rows, slots, state.cache),
                *(leaf[jnp.maximum(rows, 0)] for leaf in (state.built, state.hidden)),
            ),
            params=Table(
                spec((vocab, vocab), jnp.float64),
                ids=spec(SOME.shape, jnp.int32) if knows_some else None,
            ),
        )

    return make


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
    return Planner(batches, slots, baselines.fixed(strategy)).decide


@dataclass
class Decided:
    """A planner that decides with a function and learns nothing."""

    given: Callable[[GroupView], Decision]

    def worth_compiling(self, view: GroupView, candidates: GroupCandidates) -> None:
        return None

    def decide(self, view: GroupView, candidates: GroupCandidates) -> Decision:
        return self.given(view)

    def observe(self, measurement: Measurement) -> None:
        pass


def placed(
    programs: Executables, group: int, table: np.ndarray, guess: np.ndarray | None
) -> Weights:
    """The tables on a data group."""
    shapes = programs.shapes[group]
    if not shapes.drafter.reads_history:
        return jax.device_put(weights(table, None), shapes.replicated)
    ids = None if shapes.drafter.params.ids is None else SOME
    guess = table if guess is None else guess
    return jax.device_put(weights(table, guess, ids), shapes.replicated)


def contexts(
    programs: Executables, table: np.ndarray, prompts: list[list[int]], samples: int, params: DecodingParams, *,
    max_new_tokens=24, capacity=8, batches=(8,), slots=(64,), rounds=4, in_flight=2, strategy=PLAIN, decide=None,
    guess=None, planner=None,
) -> list[GroupContext]:  # fmt: skip
    """The fixed side of every group for a rollout of the table target; the drafter's table is `guess`, or the target's."""
    tokens = tuple(np.asarray(prompt, np.int32) for prompt in prompts)
    keys = sequence_keys(0, 0, 0, np.arange(len(prompts) * samples))
    limits = (max_new_tokens,) * len(tokens)
    request = RolloutRequest(tokens, samples, limits, keys, params, rounds, in_flight, capacity)
    queue = WorkQueue(LocalBoard(), "test", len(prompts), samples)
    planner = planner or Decided(decide or bucketed(batches, slots, strategy))
    return [
        GroupContext(
            i, programs, placed(programs, i, table, guess), request, queue, planner,
            needs={
                name: Needs(pool if jax.tree.leaves(one.host_context(1)) else no_context, one.catch_up is not None)
                for name, one in {"": shapes.drafter, **shapes.drafters}.items()
            },
            reads_history=shapes.drafter.reads_history,
        )
        for i, shapes in enumerate(programs.shapes)
    ]  # fmt: skip


def play(*arguments, **rest) -> RolloutResult:
    """A rollout of the table target, of the arguments that `contexts` has."""
    return driver.run(driver.LocalGroups(contexts(*arguments, **rest)))
