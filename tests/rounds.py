"""One chunk alone, without groups, queues and buckets: prompts go in, one program decodes them, answers come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.distributed import mesh as meshes
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import architecture, drafter as drafters
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.rollout import bindings
from tlt_jax.rollout.executables.programs import GroupShapes, StateShape, shardings
from tlt_jax.spec_decode import decode as chunk, decode_state, noise, verify
from tlt_jax.spec_decode.decode import Decoder, Report
from tlt_jax.spec_decode.decode_state import Admission, DecodeState, Weights
from tlt_jax.spec_decode.interface import Context, DecodingParams, DraftTree, Sampling
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree_drafter import learned_drafter


def begin(
    decoder: Decoder,
    weights: Weights,
    prompts: Sequence[Sequence[int]],
    keys: jax.Array,
    limit: int,
) -> DecodeState:
    """Sequences with room for `limit` more tokens; as many of each prompt as there are keys for."""
    target, drafter, params, _ = decoder
    batch, sizes = len(keys), np.array([len(prompt) for prompt in prompts], np.int32)
    width, slots = max(sizes.max() - 1, 1), int(sizes.max()) + limit
    source = np.arange(batch, dtype=np.int32) * len(prompts) // batch
    tokens = np.zeros((len(prompts), width + 1), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    empty = jax.tree.map(
        lambda leaf: jnp.zeros(leaf.shape, leaf.dtype),
        (target.empty(batch, slots), drafter.empty(batch, slots)),
    )
    zeros = jnp.zeros(batch, jnp.int32)
    state = DecodeState(
        roots=zeros, lengths=zeros, limits=zeros, live=zeros > 0, keys=jnp.zeros((batch, 2), jnp.uint32),
        stop_state=zeros,
        history=jnp.zeros((batch, target.padded_slots(slots) if drafter.reads_history else 0), jnp.int32),
        cache=empty[0], drafter=empty[1],
    )  # fmt: skip
    new = Admission(
        rows=jnp.arange(batch, dtype=jnp.int32),
        source=jnp.asarray(source),
        roots=jnp.asarray(tokens[np.arange(len(prompts)), sizes - 1][source]),
        lengths=jnp.asarray(sizes[source] - 1),
        limits=jnp.asarray(sizes[source] + np.int32(limit)),
        keys=jnp.asarray(keys),
        history=jnp.asarray(tokens[source][:, : width + 1 if drafter.reads_history else 0]),
    )
    prefilled = target.prefill(
        weights.target, jnp.asarray(tokens[:, :width]), jnp.asarray(sizes - 1)
    )
    return decode_state.admit(target, drafter, state, prefilled, new)


def program(
    decoder: Decoder, prompts: Sequence[Sequence[int]], limit: int, rounds: int = 0
) -> Callable[..., tuple[DecodeState, Report]]:
    """(weights, keys[B, 2]) -> state and report after `rounds` rounds, or at the end of all answers."""

    @jax.jit
    def run(weights, keys):
        bounds, state = jnp.array([1, limit]), begin(decoder, weights, prompts, keys, limit)
        if decoder.drafter.catch_up:
            state, _ = chunk.catch_up(
                decoder.target, decoder.drafter, state, weights, jnp.int32(decoder.strategy.path)
            )
        return chunk.decode_chunk(decoder, rounds or limit, state, weights, (), bounds)

    return run


def drafting(
    shapes: GroupShapes, shape: StateShape, count: int, strategy: Strategy, temperature: float
) -> jax.stages.Lowered:
    """The program of `count` rounds of drafting without a target; each round's draft becomes the text of the next."""
    decoder = Decoder(
        shapes.target, shapes.drafter, DecodingParams(Sampling(temperature)), strategy
    )

    def run(own, features, keys, weights, host):
        def step(_, carry):
            lengths, history, drafter = carry
            context = Context(history, lengths, features, host, ahead)
            drafter, tree = chunk.draft_tree(decoder, weights, drafter, context, lengths)
            text = jnp.maximum(tree.tokens[:, 1 : strategy.path], 0)
            return lengths + 1, chunk.remember(history, text, lengths), drafter

        ahead = None
        if chunk.reads_noise(decoder):
            size = strategy.path, decoder.target.vocab, chunk.float_type(weights)
            ahead = noise.drawn_whole(keys, own[0] + 1, *size)
        return jax.lax.fori_loop(0, count, step, own), features

    state = shapes.state(shape)
    own, features = (
        (state.lengths, state.history, state.drafter),
        shapes.target.features(state.cache),
    )
    program = jax.jit(run, donate_argnums=(0, 1), out_shardings=shardings((own, features)))
    host = shapes.drafter.host_context(shape.batch)
    return program.lower(own, features, state.keys, shapes.weights, host)


def match(tree: DraftTree, chosen: jax.Array, depth: int, unrolls: bool = False) -> verify.Walk:
    """The walk of live rows for which the target's choice at every node is given."""
    unused = jnp.zeros(chosen.shape[0])

    def visit(nodes, step, alive):
        tokens = jnp.take_along_axis(jnp.asarray(chosen), nodes[:, None], axis=1)[:, 0]
        return verify.Visit(tokens, unused, unused > 0)

    return verify.walk(tree, unused == 0, depth, visit, unrolls)


def answers(report: Report) -> list[list[int]]:
    """The tokens of every row."""
    tokens, counts = np.asarray(report.tokens), np.asarray(report.counts)
    return [row[:count].tolist() for row, count in zip(tokens, counts, strict=True)]


def tiny(
    model: ModelConfig, kind: str, dtype: str, decoding: DecodingParams, strategy: Strategy
) -> tuple[Decoder, Weights]:
    """A random policy, and a random drafter of this kind."""
    mesh, own = meshes.make_mesh(1, 1), drafters.for_policy(model, kind)
    group = meshes.data_group(mesh, 0)
    target = bindings.bind_target(model, Fused.of(group), dtype, own.captures, strategy.path)
    drafter = learned_drafter(own, target, Fused.of(group), dtype)
    params = (
        architecture.init(model, mesh, jax.random.key(0), dtype),
        drafters.init(own, mesh, jax.random.key(7), dtype),
    )
    reshard = (architecture.to_rollout, model), (drafters.to_rollout, own)
    parts = [
        jax.jit(partial(change, config=config, mesh=mesh, dtype=dtype))(part)
        for (change, config), part in zip(reshard, params, strict=True)
    ]
    return Decoder(target, drafter, decoding, strategy), Weights(*parts)
