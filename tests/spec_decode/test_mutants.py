"""Planted mistakes of drafting and verification are caught: those that change tokens by the identity, the others by their
own law.
"""

from __future__ import annotations

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import rounds
import toys

from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import sequence_keys
from tlt_jax.spec_decode import (
    decode as chunk,
    noise,
    one_pass,
    tree_drafter,
)
from tlt_jax.spec_decode.decode import Decoder
from tlt_jax.spec_decode.interface import ABSENT, DecodingParams, NoiseAhead, Sampling, Target
from tlt_jax.spec_decode.strategy import Strategy

V, LIMIT, SAMPLES = 12, 16, 4
TABLE = toys.table(V, scale=1.0)
NOISY = TABLE + toys.table(V, seed=9, scale=0.5)
PROMPTS = [[3, 1, 4, 1, 5], [2, 6, 5, 3, 5, 8, 9], [11, 10]]
RULES = DecodingParams(Sampling(1.0))
TREE = Strategy(depth=2, topk=2, nodes=5)
pytestmark = pytest.mark.usefixtures("x64")


# Each takes the original function and the amount of harm; with 0 it is the original


def redrawn_noise(gumbel, harm):
    """The noise of a position depends on how many positions are drawn with it."""

    def draw(keys, positions, *rest):
        again = keys.at[1:].set(keys[1:] ^ (harm * positions[1:, :1]).astype(jnp.uint32))
        return gumbel(again, positions, *rest)

    return draw


def stale_noise(draw_ahead, harm):
    """The last position that a round needs anew is not drawn: noise of another position is in its place."""
    return lambda ahead, keys, starts, live: draw_ahead(
        ahead.replace(ends=ahead.ends + harm * (ahead.ends < starts + ahead.count)),
        keys, starts, live,
    )  # fmt: skip


def noise_of_another_place(places, harm):
    """Noise is stored and looked up by the slot alone, not by the row."""

    def find(ahead, positions):
        found = places(ahead, positions)
        return jnp.where(harm > 0, found % ahead.count, found)

    return find


def noise_per_node(choose_at, harm):
    """Below the root, the nodes of one depth have noise of their own."""

    def choose(decoder, state, ahead, logits, nodes, step, alive):
        own = jnp.where(
            step > 0, state.keys + (harm * nodes[:, None]).astype(jnp.uint32), state.keys
        )
        if ahead is not None:
            turned = jnp.roll(ahead.values, harm * nodes[0], axis=-1)
            ahead = ahead.replace(values=jnp.where(step > 0, turned, ahead.values))
        return choose_at(decoder, state.replace(keys=own), ahead, logits, nodes, step, alive)

    return choose


def logits_of_another_parent(choose_at, harm):
    """Below the root, a child is compared with the choice of the node before its parent."""

    def choose(decoder, state, ahead, logits, nodes, *rest):
        before = jnp.where(nodes > 1, nodes - harm, nodes)
        return choose_at(decoder, state, ahead, logits, before, *rest)

    return choose


def unlooked_children(choose_at, harm):
    """At the root the first token of the vocabulary is taken, whatever the target chose there."""

    def choose(decoder, state, ahead, logits, nodes, step, alive):
        visit = choose_at(decoder, state, ahead, logits, nodes, step, alive)
        return visit.replace(tokens=jnp.where((step == 0) & (harm > 0), 0, visit.tokens))

    return choose


def seen_siblings(ancestors, harm):
    """A node sees all nodes before it."""
    chain = jnp.maximum(jnp.arange(TREE.nodes, dtype=jnp.int32) - 1, 0)
    return lambda parents: ancestors(jnp.where(harm > 0, chain, parents))


def later_positions(forward, harm):
    """The positions of all nodes below the root are one too large."""
    return lambda params, tokens, positions, *rest: forward(
        params, tokens, positions.at[:, 1:].add(harm), *rest
    )


def first_nodes_kept(keep, harm):
    """The first nodes of the tree are committed, not those of the path."""

    def commit(cache, scratch, path, lengths):
        return keep(
            cache,
            scratch,
            jnp.where(harm > 0, jnp.arange(path.shape[1], dtype=path.dtype), path),
            lengths,
        )

    return commit


def path_kept_late(keep, harm):
    """What follows the root is committed one slot too late."""

    def commit(cache, scratch, path, lengths):
        late = jnp.concatenate([path[:, :1], path[:, :-1]], axis=1)
        return keep(cache, scratch, jnp.where(harm > 0, late, path), lengths)

    return commit


def later_features(window, harm):
    """The drafter reads the features of the token after."""

    def cut(array, starts, width, *rows):
        return window(array, starts + harm * (array.ndim == 3), width, *rows)

    return cut


def noise_of_another_level(noise_of, harm):
    """The drafter expects the noise of the next level."""
    return lambda context, level, ids: noise_of(context, level + harm, ids)


def children_of_another_parent(grown, harm):
    """The children of a beam are hung below another beam of its level."""
    return lambda beams, index, *rest: grown(beams, jnp.roll(index, harm, axis=1), *rest)


def repeated_siblings(children, harm):
    """The second child is the first one once more."""

    def guess(*args, **settings):
        tokens, scores = children(*args, **settings)
        return tokens.at[..., 1].set(jnp.where(harm > 0, tokens[..., 0], tokens[..., 1])), scores

    return guess


VERIFICATION = [
    (noise, "gumbel", redrawn_noise), (chunk, "draw_ahead", stale_noise),
    (NoiseAhead, "places", noise_of_another_place), (chunk, "choose_at", noise_per_node),
    (chunk, "choose_at", logits_of_another_parent), (chunk, "choose_at", unlooked_children),
    (chunk, "ancestors", seen_siblings),
    (Target, "forward", later_positions), (Target, "keep", first_nodes_kept), (Target, "keep", path_kept_late),
]  # fmt: skip
DRAFTING = [
    (tree_drafter, "window", later_features), (tree_drafter, "noise_of", noise_of_another_level),
    (tree_drafter, "candidates_below", children_of_another_parent),
]  # fmt: skip
REPEATED = (tree_drafter, "score_children", repeated_siblings)


def named(mutant) -> str:
    return mutant[2].__name__


def spoiled(monkeypatch, mutants, harm: int) -> Decoder:
    """The toy with these mutants."""
    expected()  # without them
    group = meshes.data_group(meshes.make_mesh(1, 1), 0)
    target, drafter = toys.table_target(group, V), toys.table_drafter()(group, V)
    for place, name, mutant in mutants:
        if place is Target:
            target = target._replace(**{name: mutant(getattr(target, name), harm)})
        else:
            monkeypatch.setattr(place, name, mutant(getattr(place, name), harm))
    return Decoder(target, drafter, RULES, TREE)


@cache
def expected() -> list[list[int]]:
    """The answers by plain decoding in NumPy."""
    ahead = noise.gumbel(
        keys(), jnp.broadcast_to(jnp.arange(32, dtype=jnp.int32), (len(keys()), 32)), V, jnp.float64
    )
    return [
        references.decode(
            lambda prefix: toys.table_logits(TABLE, prefix), lambda t, row=row: row[t], PROMPTS[uid // SAMPLES],
            RULES.sampling, (), (), LIMIT,
        )[0]
        for uid, row in enumerate(np.asarray(ahead))
    ]  # fmt: skip


def keys() -> jax.Array:
    return jnp.asarray(sequence_keys(0, 0, 0, np.arange(len(PROMPTS) * SAMPLES)))


def laws(decoder: Decoder) -> tuple[bool, bool]:
    """Whether the tokens are those of plain decoding, and whether a drafter that knows the target is right in every round."""
    run, same = rounds.program(decoder, PROMPTS, LIMIT), []
    for guess in (NOISY, TABLE):
        _, report = run(toys.weights(TABLE, guess), keys())
        same.append(rounds.answers(report) == expected())
    return all(same), int(report.stats.row_rounds.sum()) == len(expected()) * -(-LIMIT // TREE.path)


def siblings_differ(decoder: Decoder) -> bool:
    """Whether the drafter's first trees hold no child of a node twice."""

    @jax.jit
    def first(weights, keys):
        state = rounds.begin(decoder, weights, PROMPTS, keys, LIMIT)
        ahead = noise.drawn_whole(keys, state.lengths + 1, TREE.path, V, jnp.float64)
        context = chunk.context_of(decoder.target, state, (), ahead)
        known = decoder.drafter.catch_up(weights, state.drafter, context, state.live, TREE.path)
        return chunk.draft_tree(decoder, weights, known, context, state.roots)[1]

    tree = jax.tree.map(np.asarray, first(toys.weights(TABLE, NOISY), keys()))
    below = [
        [(parent, token) for parent, token in zip(*row, strict=True) if token != ABSENT]
        for row in zip(tree.parents[:, 1:], tree.tokens[:, 1:], strict=True)
    ]
    assert all(below), "every row drafts"
    return all(len(set(row)) == len(row) for row in below)


def test_the_laws_hold_without_harm_also_through_every_mutant(monkeypatch):
    decoder = spoiled(monkeypatch, [*VERIFICATION, *DRAFTING, REPEATED], harm=0)
    assert laws(decoder) == (True, True) and siblings_differ(decoder)


def test_the_laws_hold_where_small_loops_are_written_out(monkeypatch):
    decoder = spoiled(monkeypatch, [], harm=0)
    assert laws(decoder._replace(target=decoder.target._replace(unrolls=True))) == (True, True)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_the_laws_hold_where_the_vocabulary_is_read_once(monkeypatch, is_at_once):
    if not is_at_once:
        monkeypatch.setattr(chunk, "LEVEL", -1)
    decoder = spoiled(monkeypatch, [], harm=0)
    choose = partial(one_pass.choose, is_sharded=False)
    decoder = decoder._replace(target=decoder.target._replace(unrolls=True, choose=choose))
    state = rounds.begin(decoder, toys.weights(TABLE, NOISY), PROMPTS, keys(), LIMIT)
    assert chunk.chooses_at_once(decoder, state) == is_at_once
    assert laws(decoder) == (True, True)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", VERIFICATION, ids=named)
def test_a_mistake_of_verification_changes_tokens(monkeypatch, mutant):
    assert not laws(spoiled(monkeypatch, [mutant], harm=1))[0]


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", DRAFTING, ids=named)
def test_a_mistake_of_drafting_changes_no_token_and_drafts_worse(monkeypatch, mutant):
    assert laws(spoiled(monkeypatch, [mutant], harm=1)) == (True, False)


@pytest.mark.matrix
def test_siblings_that_repeat_change_no_token_and_are_seen_in_the_tree(monkeypatch):
    decoder = spoiled(monkeypatch, [REPEATED], harm=1)
    assert laws(decoder)[0] and not siblings_differ(decoder)
