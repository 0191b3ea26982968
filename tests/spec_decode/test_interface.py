"""Targets and drafters take and return what their interfaces say."""

from __future__ import annotations

from inspect import signature
from typing import Any

import drafter_cases
import jax
import jax.numpy as jnp
import pytest
import rounds
import toys
from beartype.door import is_bearable
from jaxtyping import Array, Bool, Float, Int32, jaxtyped

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import block_drafter, eagle
from tlt_jax.rollout import bindings, ngram_memory
from tlt_jax.spec_decode import decode, decode_state
from tlt_jax.spec_decode.decode import Decoder
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import Candidates, Context, DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import Strategy

PROMPTS, LIMIT, TREE = [[3, 1, 4], [2, 7]], 8, Strategy(3, 2, 6)
RULES = DecodingParams(sampling=Sampling(temperature=1.0))
B, N = Int32[Array, " B"], Int32[Array, "B N"]
SHAPES = {  # arguments, and the result
    "Target": {
        "forward": (Any, N, N, Bool[Array, "B N N"], Any, B, tuple[Float[Array, "B N V"], Any]),
        "keep": (Any, Any, Int32[Array, "B M"], B, Any),
        "features": (Any, Float[Array, "B S F"]),
        "prefill": (Any, Int32[Array, "Q P"], Int32[Array, " Q"], Any),
        "insert": (Any, Any, Int32[Array, " R"], Int32[Array, " R"], Any),
        "resize": (Any, Int32[Array, " C"], int, Any),
        "empty": (int, int, Any),
    },
    "Drafter": {
        "draft": (Any, Any, Context, Strategy, float, Candidates),
        "catch_up": (Any, Any, Context, Bool[Array, " B"], Int32[Array, ""], Any),
        "extend": (Any, Any, Context, int, Any),
        "reset": (Any, Bool[Array, " B"], Any),
        "resize": (Any, Int32[Array, " C"], int, Any),
        "empty": (int, int, Any),
    },
}
LEARNED = {f"{record}.{name}" for record, functions in SHAPES.items() for name in functions}
STATELESS = LEARNED - {"Drafter.catch_up"}


def checked(record, seen: set[str]):
    """The record, with functions that check their arguments and results; `seen` collects the names of those called."""

    def check(name: str, function, hints):
        def call(*given):
            seen.add(f"{type(record).__name__}.{name}")
            with jaxtyped("context"):  # one letter, one length: in the arguments and in the result
                for hint, value in zip(hints, given, strict=False):
                    assert is_bearable(value, hint), f"{name}: {value} is no {hint}"
                answer = function(*given)
                assert len(given) == len(hints) - 1
                assert is_bearable(answer, hints[-1]), f"{name} is no {hints[-1]}: {answer}"
            return answer

        return call

    shapes = SHAPES[type(record).__name__]
    functions = {name: getattr(record, name) for name in shapes if getattr(record, name)}
    return record._replace(
        **{name: check(name, function, shapes[name]) for name, function in functions.items()}
    )


def trace(decoder: Decoder, weights: Weights, host_context=()) -> set[str]:
    """Traces the functions of a rollout with this decoder; the names of those that were called."""
    seen: set[str] = set()
    target, drafter = checked(decoder.target, seen), checked(decoder.drafter, seen)
    decoder = decoder._replace(target=target, drafter=drafter)

    def everything(weights, keys, host_context):
        state = rounds.begin(decoder, weights, PROMPTS, keys, LIMIT)
        if drafter.catch_up:
            state, _ = decode.catch_up(target, drafter, state, weights, jnp.int32(1))
        state, *_ = decode.advance_round(decoder, state, None, weights, host_context)
        return decode_state.resize(target, drafter, 2 * LIMIT, state, jnp.zeros(1, jnp.int32))

    jax.eval_shape(everything, weights, jnp.zeros((2, 2), jnp.uint32), host_context)
    return seen


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dflash2", "dspark"])
def test_the_policy_and_a_learned_drafter_keep_to_the_signatures(kind):
    decoder, weights = rounds.tiny(drafter_cases.policy(), kind, "float32", RULES, TREE)
    assert trace(decoder, weights) == LEARNED


def test_the_policy_and_ngrams_keep_to_the_signatures(monkeypatch):
    monkeypatch.setattr(ngram_memory, "POOL", 8)
    decoder, weights = rounds.tiny(drafter_cases.policy(), "eagle", "float32", RULES, TREE)
    group = meshes.data_group(meshes.make_mesh(1, 1), 0)
    decoder = decoder._replace(drafter=bindings.ngram_drafter(group))
    texts = jnp.zeros((2, 8), jnp.int32)
    assert trace(decoder, weights.replace(drafter=()), texts) == STATELESS


@pytest.mark.usefixtures("x64")
def test_toys_keep_to_the_signatures():
    group, table = meshes.data_group(meshes.make_mesh(1, 1), 0), toys.table(9)
    drafter = toys.table_drafter()(group, 9)
    decoder = Decoder(toys.table_target(group, 9), drafter, RULES, TREE)
    assert trace(decoder, toys.weights(table, table)) == LEARNED


def test_networks_take_the_same_arguments():
    taken = [
        [
            list(signature(getattr(network, name)).parameters)
            for name in ("extend", "fill", "logits")
        ]
        for network in (eagle, block_drafter, toys.NETWORK)
    ]
    assert taken[0] == taken[1] == taken[2]
    levels = [signature(network.draft_level).parameters for network in (eagle, toys.NETWORK)]
    assert list(levels[0]) == list(levels[1])
