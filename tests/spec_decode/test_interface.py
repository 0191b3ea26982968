"""Targets, drafters and networks take and return what the signatures of their interfaces say."""

from __future__ import annotations

from typing import get_args, get_type_hints

import drafter_cases
import jax
import jax.numpy as jnp
import pytest
import rounds
import toys
from beartype.door import is_bearable
from jaxtyping import jaxtyped

from tlt_jax.config.schema import Speculation
from tlt_jax.distributed import mesh as meshes
from tlt_jax.kernels.fused import Fused
from tlt_jax.rollout import bindings, networks, ngram_memory
from tlt_jax.spec_decode import admission, decode
from tlt_jax.spec_decode.decode import Decoder
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling
from tlt_jax.spec_decode.network import Network
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.spec_decode.tree_drafter import learned_drafter

PROMPTS, LIMIT, TREE = [[3, 1, 4], [2, 7]], 8, Strategy(3, 2, 6)
RULES = DecodingParams(sampling=Sampling(temperature=1.0))


def checked(record, seen: set[str]):
    """The record, with functions that check their arguments and results against their protocols.

    `seen` collects the names of the functions that are called.
    """

    def check(name: str, function, protocol):
        hints = get_type_hints(protocol.__call__)
        *arguments, (_, result) = hints.items()

        def call(*given):
            seen.add(f"{type(record).__name__}.{name}")
            with jaxtyped("context"):  # one letter, one length: in the arguments and in the result
                for (argument, hint), value in zip(arguments, given, strict=True):
                    assert is_bearable(value, hint), f"{name}: {argument} is no {hint}: {value}"
                answer = function(*given)
                assert is_bearable(answer, result), f"{name} is no {result}: {answer}"
            return answer

        return call

    protocols = {
        name: one
        for name, hint in get_type_hints(type(record)).items()
        for one in (hint, *get_args(hint))  # X, or X | None
        if getattr(one, "_is_protocol", False) and getattr(record, name)
    }
    parts = {name: check(name, getattr(record, name), one) for name, one in protocols.items()}
    if hasattr(record, "passes"):
        parts["passes"] = checked(record.passes, seen)
    return record._replace(**parts)


def trace(decoder: Decoder, weights: Weights, host_context=()) -> None:
    """Traces the functions of a rollout with this decoder."""
    target, drafter = decoder.target, decoder.drafter

    def everything(weights, keys, host_context):
        state = rounds.begin(decoder, weights, PROMPTS, keys, LIMIT)
        if drafter.catch_up:
            state, _ = decode.catch_up(target, drafter, state, weights, jnp.int32(1))
        state, *_ = decode.advance_round(decoder, state, None, weights, host_context)
        return admission.resize(target, drafter, 2 * LIMIT, state, jnp.zeros(1, jnp.int32))

    jax.eval_shape(everything, weights, jnp.zeros((2, 2), jnp.uint32), host_context)


def names(record: str, functions: str) -> set[str]:
    return {f"{record}.{name}" for name in functions.split()}


TARGET = names("Target", "forward keep features prefill insert resize empty")
STATELESS = TARGET | names("Drafter", "draft extend reset resize empty")
LEARNED = STATELESS | names("Drafter", "catch_up")
LEARNED |= names("Network", "extend fill logits ids resize empty top")
LEARNED, BLOCKS = (
    LEARNED | names("LevelPasses", "step"),
    LEARNED | names("BlockPass", "draft bias confidence"),
)


def policy(seen: set[str], monkeypatch, kind: str) -> tuple[Decoder, Weights]:
    """The policy and a learned drafter."""
    whole = networks.network
    monkeypatch.setattr(networks, "network", lambda *rest: checked(whole(*rest), seen))
    return rounds.tiny(drafter_cases.policy(), kind, "float32", RULES, TREE)


@pytest.mark.parametrize("kind", ["eagle", "eagle3", "dspark"])
def test_the_policy_and_a_learned_drafter_keep_to_the_signatures(monkeypatch, kind):
    seen: set[str] = set()
    decoder, weights = policy(seen, monkeypatch, kind)
    target, drafter = checked(decoder.target, seen), checked(decoder.drafter, seen)
    trace(decoder._replace(target=target, drafter=drafter), weights)
    assert seen == (BLOCKS if kind == "dspark" else LEARNED)


def test_the_policy_and_ngrams_keep_to_the_signatures(monkeypatch):
    monkeypatch.setattr(ngram_memory, "POOL", 8)
    seen: set[str] = set()
    decoder, weights = policy(set(), monkeypatch, "eagle")
    group = meshes.data_group(meshes.make_mesh(1, 1), 0)
    settings = Speculation(drafter="ngram")
    drafter = bindings.bind_drafter(settings, None, decoder.target, Fused.of(group), "float32")
    decoder = decoder._replace(target=checked(decoder.target, seen), drafter=checked(drafter, seen))
    trace(decoder, weights.replace(drafter=()), jnp.zeros((2, 8), jnp.int32))
    assert seen == STATELESS


def toy(seen: set[str], twist=lambda network: network) -> tuple[Decoder, Weights]:
    """The toys."""
    group, vocab = meshes.data_group(meshes.make_mesh(1, 1), 0), 9
    network = checked(twist(toys.table_network(group, vocab)), seen)
    target, drafter = toys.table_target(group, vocab), learned_drafter(network, toys.CERTAIN)
    table = jnp.asarray(toys.table(vocab))
    decoder = Decoder(checked(target, seen), checked(drafter, seen), RULES, TREE)
    return decoder, Weights(table, table)


@pytest.mark.usefixtures("x64")
def test_toys_keep_to_the_signatures():
    seen: set[str] = set()
    trace(*toy(seen))
    assert seen == LEARNED


@pytest.mark.usefixtures("x64")
def test_another_shape_or_type_is_seen():
    def one_row(network: Network) -> Network:
        return network._replace(extend=lambda weights, cache, tokens, *_: (cache, tokens[:1] * 1.0))

    def floats(network: Network) -> Network:
        return network._replace(ids=lambda weights: jnp.arange(9.0))

    for twist, name in ((one_row, "extend"), (floats, "ids")):
        with pytest.raises(AssertionError, match=f"{name} is no"):
            trace(*toy(set(), twist))
