"""Trees and verification: ancestors, the walk, and where an answer finishes, against plain loops."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import rounds

from tlt_jax.data.stop_rules import stop_tokens
from tlt_jax.spec_decode import decode as chunk, decode_state, tree, verify
from tlt_jax.spec_decode.decode import BROKEN, RUNNING, STOPPED, TRUNCATED, Report
from tlt_jax.spec_decode.decode_state import Admission, DecodeState
from tlt_jax.spec_decode.interface import NO_DRAFTER, DecodingParams, DraftTree, Target
from tlt_jax.spec_decode.verify import BINS, Stats


def random_trees(
    count: int, nodes: int, vocab: int, seed: int = 0
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """tokens, parents and depths of trees whose siblings are distinct."""
    rng = np.random.default_rng(seed)
    tokens, parents, depths = (np.zeros((count, nodes), np.int32) for _ in range(3))
    for b in range(count):
        for i in range(1, nodes):
            parents[b, i] = rng.integers(0, i)
            siblings = {int(tokens[b, j]) for j in range(1, i) if parents[b, j] == parents[b, i]}
            tokens[b, i] = rng.choice([v for v in range(vocab) if v not in siblings])
            depths[b, i] = depths[b, parents[b, i]] + 1
    return tokens, parents, depths


@pytest.mark.parametrize("nodes", [1, 2, 3, 4, 5, 8, 9])
def test_ancestors_equal_the_way_up(nodes):
    parents = random_trees(20, nodes, 12)[1]
    parents[0] = np.maximum(np.arange(nodes) - 1, 0)  # a chain: the deepest tree
    found = np.asarray(tree.ancestors(jnp.asarray(parents)))
    np.testing.assert_array_equal(found, [references.ancestors(row) for row in parents])


@pytest.mark.parametrize("unrolls", [False, True])
@pytest.mark.parametrize("nodes", [1, 2, 7])
def test_a_walk_is_that_of_a_loop(nodes, unrolls):
    tokens, parents, depths = random_trees(300, nodes, 8, seed=1)
    chosen = np.random.default_rng(2).integers(0, 8, size=tokens.shape).astype(np.int32)
    for b in range(0, 300, 2):  # make long walks common
        for i in range(1, nodes):
            chosen[b, parents[b, i]] = tokens[b, i]
    depth = int(depths.max())
    unused = jnp.zeros(tokens.shape), jnp.zeros(tokens.shape, jnp.int32)
    tree_of = DraftTree(*map(jnp.asarray, (tokens, parents, depths)), *unused)
    walk = jax.jit(rounds.match, static_argnums=(2, 3))(tree_of, chosen, depth, unrolls)
    rng = np.random.default_rng(3)
    logprobs, broken = rng.normal(size=chosen.shape), rng.random(chosen.shape) < 0.5
    choices = verify.Visit(*map(jnp.asarray, (chosen, logprobs, broken)))
    seen = tree.ancestors(tree_of.parents)
    path_of = jax.jit(verify.path_of, static_argnums=3)
    at_once = path_of(tree_of, seen, jnp.ones(300, bool), depth, choices)
    np.testing.assert_array_equal(at_once.accepted, walk.accepted)
    np.testing.assert_array_equal(at_once.path, walk.path)
    asleep = path_of(tree_of, seen, jnp.zeros(300, bool), depth, choices)
    assert not asleep.accepted.any() and not asleep.path.any()
    for b in range(300):
        path, emitted = references.walk(tokens[b], parents[b], chosen[b], depth)
        accepted = int(walk.accepted[b])
        assert accepted == len(path) - 1
        assert walk.path[b, : accepted + 1].tolist() == path
        for visits in (walk.visits, at_once.visits):
            assert visits.tokens[b, : accepted + 1].tolist() == emitted
        for name, values in (("logprobs", logprobs), ("broken", broken)):
            found = getattr(at_once.visits, name)[b, : accepted + 1]
            np.testing.assert_array_equal(found, values[b, path].astype(found.dtype))


UNUSED = dict.fromkeys(("resize", "empty", "padded_slots", "vocab", "params"))


def state_of(lengths, limits, live, stops) -> DecodeState:
    ints = [jnp.asarray(x, jnp.int32) for x in (lengths, lengths, limits)]
    history = jnp.zeros((len(lengths), 12), jnp.int32)
    keys = jnp.zeros((len(lengths), 2), jnp.uint32)
    return DecodeState(
        *ints, jnp.asarray(live), keys, jnp.asarray(stops, jnp.int32), history, (), ()
    )


RULES = DecodingParams(eos_ids=(0, 9), stops=stop_tokens(((4, 5), (7,))))
AFTER_4 = int(RULES.stops.table[0, RULES.stops.classes[4]])
NO = 3  # place of the first broken logits
# Tokens of a walk behind 9 tokens and a root, accepted ones, limit, stop state, first broken place; tokens emitted, finish.
ENDS = [
    ([1, 2, 3], 2, 99, 0, NO, 3, RUNNING), ([1, 0, 3], 2, 99, 0, NO, 2, STOPPED), ([1, 9, 0], 0, 99, 0, NO, 1, RUNNING),
    ([5, 1, 1], 2, 99, AFTER_4, NO, 1, STOPPED), ([1, 4, 5], 2, 99, 0, NO, 3, STOPPED),
    ([1, 7, 3], 2, 99, 0, NO, 2, STOPPED), ([1, 2, 3], 2, 12, 0, NO, 2, TRUNCATED), ([1, 2, 0], 2, 13, 0, NO, 3, STOPPED),
    ([1, 9, 2], 2, 99, 0, 1, 2, BROKEN), ([1, 2, 9], 2, 99, 0, 2, 3, BROKEN), ([9, 9, 9], 2, 99, 0, 0, 1, BROKEN),
    ([1, 2, 3], 1, 99, 0, 2, 2, RUNNING),
]  # fmt: skip


@pytest.mark.parametrize("live", [True, False])
def test_an_answer_may_finish_inside_an_accepted_path_or_where_logits_are_not_finite(live):
    columns = (jnp.array(column, jnp.int32) for column in zip(*ENDS, strict=True))
    tokens, accepted, limits, stops, first, counts, finish = columns
    state = state_of([9] * len(ENDS), limits, [live] * len(ENDS), stops)
    broken = jnp.arange(3) >= first[:, None]
    found, ends, after = chunk.settle(RULES, state, tokens, accepted, broken)
    np.testing.assert_array_equal(found, live * counts)
    np.testing.assert_array_equal(ends, finish if live else RUNNING)
    assert after[2] == 0, "after 1 no stop has begun"


def test_a_stop_text_may_span_rounds():
    rules = DecodingParams(stops=stop_tokens(((4, 5, 4, 6),)))
    state = state_of([9] * 3, [99] * 3, [True] * 3, [0] * 3)
    rounds = [[[4, 5, 1], [4, 5, 1], [5, 4, 5]], [[4, 6, 1], [1, 4, 6], [4, 5, 4]], [[6, 0, 0]] * 3]
    broken, ends = jnp.zeros((3, 3), bool), []
    for tokens, accepted in zip(rounds, ([1, 1, 2], [1, 1, 2], [0, 0, 0]), strict=True):
        _, finish, stop_state = chunk.settle(
            rules, state, jnp.array(tokens, jnp.int32), jnp.array(accepted, jnp.int32), broken
        )
        state = state.replace(stop_state=stop_state)
        ends.append(finish.tolist())
    assert ends[:2] == [[RUNNING] * 3, [STOPPED, RUNNING, RUNNING]] and ends[2][2] == STOPPED


def test_a_new_sequence_resets_its_row():
    state = state_of([5, 6], [99, 99], [False, True], [4, 6])
    target = Target(*[None] * 4, insert=lambda cache, prefilled, rows, source: cache, **UNUSED)
    new = Admission(
        *(jnp.array(x, jnp.int32) for x in ([2, 0], [0, 3], [0, 1], [0, 2], [0, 9])),
        keys=jnp.array([[2, 2], [1, 1]], jnp.uint32),
        history=jnp.array([[9, 9, 9], [8, 7, 1]], jnp.int32),
    )
    state = decode_state.admit(target, NO_DRAFTER, state, (), new)
    assert state.history[:, :4].tolist() == [[8, 7, 1, 0], [0, 0, 0, 0]]
    assert (
        state.stop_state.tolist() == [0, 6]
        and state.live.all()
        and state.keys.tolist() == [[1, 1], [0, 0]]
    )
    assert (state.roots.tolist(), state.lengths.tolist(), state.limits.tolist()) == (
        [1, 6],
        [2, 6],
        [9, 99],
    )


def test_reports_grow_from_the_left():
    bins, rows = jnp.ones(BINS, jnp.int32), jnp.ones(2, jnp.int32)
    stats = Stats(rows, jnp.int32(1), jnp.ones((1, 2, 2), jnp.int32), bins, jnp.ones(BINS), bins)

    def report_of(tokens, counts, finish) -> Report:
        tokens, counts, finish = (jnp.array(one, jnp.int32) for one in (tokens, counts, finish))
        return Report(tokens, -jnp.ones(tokens.shape), counts, finish, jnp.int32(1), stats)

    report = report_of(np.zeros((2, 6)), [0, 2], [RUNNING] * 2)
    emitted = report_of([[1, 2, 3], [4, 5, 6]], [1, 3], [RUNNING, TRUNCATED])
    report = chunk.append(report, emitted)
    assert report.stats.row_rounds.tolist() == [2, 2] and (report.stats.hits == 2).all()
    assert report.tokens.tolist() == [[1, 0, 0, 0, 0, 0], [0, 0, 4, 5, 6, 0]]
    assert report.counts.tolist() == [1, 5] and report.finish.tolist() == [RUNNING, TRUNCATED]
    assert report.rounds == 2
