"""Rounds of toys give the tokens of plain decoding, and a drafter that knows the target is right in every one.

Planted mistakes are caught: those of verification change tokens, those of drafting make drafts worse.
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
from tlt_jax.spec_decode.interface import DecodingParams, NoiseAhead, Sampling, Target
from tlt_jax.spec_decode.strategy import Strategy

V, LIMIT, SAMPLES = 12, 16, 4
TABLE = toys.table(V, scale=1.0)
NOISY = TABLE + toys.table(V, seed=9, scale=0.5)
PROMPTS = [[3, 1, 4, 1, 5], [2, 6, 5, 3, 5, 8, 9], [11, 10]]
RULES = DecodingParams(Sampling(1.0))
TREE = Strategy(depth=2, topk=2, nodes=5)
pytestmark = pytest.mark.usefixtures("x64")


# Each takes the original function


def stale_noise(draw_ahead):
    """The last position that a round needs anew is not drawn: noise of another position is in its place."""
    return lambda ahead, keys, starts, live: draw_ahead(
        ahead.replace(ends=ahead.ends + (ahead.ends < starts + ahead.count)), keys, starts, live
    )


def noise_of_another_place(places):
    """Noise is stored and looked up by the slot alone, not by the row."""
    return lambda ahead, positions: places(ahead, positions) % ahead.count


def logits_of_another_parent(choose_at):
    """Below the root, a child is compared with the choice of the node before its parent."""
    return lambda decoder, state, ahead, logits, nodes, *rest: choose_at(
        decoder, state, ahead, logits, jnp.where(nodes > 1, nodes - 1, nodes), *rest
    )


def seen_siblings(ancestors):
    """A node sees all nodes before it."""
    chain = jnp.maximum(jnp.arange(TREE.nodes, dtype=jnp.int32) - 1, 0)
    return lambda parents: ancestors(jnp.broadcast_to(chain, parents.shape))


def later_positions(forward):
    """The positions of all nodes below the root are one too large."""
    return lambda params, tokens, positions, *rest: forward(
        params, tokens, positions.at[:, 1:].add(1), *rest
    )


def first_nodes_kept(keep):
    """The first nodes of the tree are committed, not those of the path."""
    return lambda cache, scratch, path, lengths: keep(
        cache, scratch, jnp.zeros_like(path) + jnp.arange(path.shape[1], dtype=path.dtype), lengths
    )


def later_features(window):
    """The drafter reads the features of the token after."""
    return lambda array, starts, width, *rows: window(
        array, starts + (array.ndim == 3), width, *rows
    )


def children_of_another_parent(grown):
    """The children of a beam are hung below another beam of its level."""
    return lambda beams, index, *rest: grown(beams, jnp.roll(index, 1, axis=1), *rest)


VERIFICATION = [
    (chunk, "draw_ahead", stale_noise), (NoiseAhead, "places", noise_of_another_place),
    (chunk, "choose_at", logits_of_another_parent), (chunk, "ancestors", seen_siblings),
    (Target, "forward", later_positions), (Target, "keep", first_nodes_kept),
]  # fmt: skip
DRAFTING = [
    (tree_drafter, "window", later_features), (tree_drafter, "candidates_below", children_of_another_parent),
]  # fmt: skip


def decoder_of(**changes) -> Decoder:
    """The toy, with changes of its target."""
    group = meshes.data_group(meshes.make_mesh(1, 1), 0)
    target, drafter = toys.table_target(group, V), toys.table_drafter()(group, V)
    return Decoder(target._replace(**changes), drafter, RULES, TREE)


def spoiled(monkeypatch, place, name: str, mutant) -> Decoder:
    """The toy with a mutant."""
    expected()  # without it
    if place is Target:
        return decoder_of(**{name: mutant(getattr(decoder_of().target, name))})
    monkeypatch.setattr(place, name, mutant(getattr(place, name)))
    return decoder_of()


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


def test_the_laws_hold():
    assert laws(decoder_of()) == (True, True)


@pytest.mark.matrix  # the form that reads the vocabulary once is unrolled too
def test_the_laws_hold_where_small_loops_are_written_out():
    assert laws(decoder_of(unrolls=True)) == (True, True)


@pytest.mark.parametrize("is_at_once", [False, True])
def test_the_laws_hold_where_the_vocabulary_is_read_once(monkeypatch, is_at_once):
    if not is_at_once:
        monkeypatch.setattr(chunk, "LEVEL", -1)
    decoder = decoder_of(unrolls=True, choose=partial(one_pass.choose, is_sharded=False))
    state = rounds.begin(decoder, toys.weights(TABLE, NOISY), PROMPTS, keys(), LIMIT)
    assert chunk.chooses_at_once(decoder, state) == is_at_once
    assert laws(decoder) == (True, True)


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", VERIFICATION, ids=lambda mutant: mutant[2].__name__)
def test_a_mistake_of_verification_changes_tokens(monkeypatch, mutant):
    assert not laws(spoiled(monkeypatch, *mutant))[0]


@pytest.mark.matrix
@pytest.mark.parametrize("mutant", DRAFTING, ids=lambda mutant: mutant[2].__name__)
def test_a_mistake_of_drafting_changes_no_token_and_drafts_worse(monkeypatch, mutant):
    assert laws(spoiled(monkeypatch, *mutant)) == (True, False)
