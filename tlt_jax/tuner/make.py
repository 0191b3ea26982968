"""The arms and the tuner of a configuration."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from functools import partial

from tlt_jax.config import extension
from tlt_jax.config.schema import ADAPTIVE, NONE, Speculation
from tlt_jax.errors import ConfigError
from tlt_jax.spec_decode.strategy import DRAFTERS, LEARNED, MERGED, NGRAM, OFF, Strategy, name
from tlt_jax.tuner import baselines, goodput
from tlt_jax.tuner.baselines import parse_arms
from tlt_jax.tuner.cost_model import DENSE, Networks
from tlt_jax.tuner.interface import Tuner

FEW = 32  # most live sequences of a data group that drafts, with the tuner threshold


def arms(speculation: Speculation) -> tuple[Strategy, ...]:
    """The strategies of speculation.strategies, without plain decoding; none without a drafter.

    With the drafter adaptive, each strategy becomes an arm of every drafter of `drafters_of`, in the
    order of DRAFTERS, or of the drafter that it names. Raises ConfigError.
    """
    try:
        parsed = parse_arms(speculation.strategies)
    except ValueError as error:
        raise ConfigError(f"speculation.strategies: {error}") from error
    if speculation.drafter == ADAPTIVE:
        return tuple(
            replace(one, drafter=drafter)
            for drafter in DRAFTERS
            for one in parsed
            if drafter in ((one.drafter,) if one.drafter else drafters_of(one))
        )
    for one in parsed:
        if one.drafter:
            raise ConfigError(
                f"speculation.strategies names the drafter of {name(one)}, and speculation.drafter is "
                f"{speculation.drafter!r}: write {name(replace(one, drafter=''))}, or set the drafter to {ADAPTIVE}"
            )
    return () if speculation.drafter == NONE else parsed


def within(arms: Sequence[Strategy], deepest: int | None) -> tuple[Strategy, ...]:
    """The arms without those of a learned drafter that are deeper than it can draft in a round; None: any depth.

    Raises ConfigError when none is left that uses the learned drafter.
    """
    if deepest is None:
        return tuple(arms)
    learned = [arm for arm in arms if arm.drafter != NGRAM]
    if learned and all(arm.depth > deepest for arm in learned):
        raise ConfigError(
            f"speculation.strategies {', '.join(map(name, learned))}: the drafter drafts at most {deepest} tokens a round: "
            f"use depth {deepest} or less"
        )
    return tuple(arm for arm in arms if arm.drafter == NGRAM or arm.depth <= deepest)


def drafters_of(strategy: Strategy) -> tuple[str, ...]:
    """The drafters for which a strategy is a separate arm.

    To keep arms few, n-grams alone draft only chains; their other continuations are in merged trees.
    Merged trees have topk 2 or more: a chain has no room for the candidates of two drafters.
    """
    return (NGRAM, LEARNED) if strategy.topk == 1 else (LEARNED, MERGED)


def node_cost(is_cpu: bool) -> float:
    """The expected cost of a node, as a share of a plain round's cost.

    1/8 on CPUs, which are compute-bound from small batches on, 1/200 on accelerators, which are
    memory-bound.
    """
    return 1 / 8 if is_cpu else 1 / 200


def make_tuner(
    speculation: Speculation,
    arms: Sequence[Strategy],
    is_cpu: bool,
    networks: Networks = DENSE,
) -> Tuner:
    """The tuner that speculation.tuner names; without arms, one that always decodes plainly.

    `networks`: of policy and drafter. Raises ConfigError when the user's module:function returns no Tuner.
    """
    kind, _, most = speculation.tuner.partition(":")
    simple = None
    if not arms:
        simple = baselines.fixed(OFF)
    elif kind == "threshold" and (not most or most.isdecimal()):
        simple = baselines.threshold(arms, int(most or FEW))
    elif speculation.tuner == "fixed":
        simple = baselines.fixed(arms[0])
    elif speculation.tuner == "beg_mab":
        simple = baselines.beg_mab(arms)
    if simple:
        return simple._replace(predict=partial(baselines.costs_alone, networks=networks))
    if not extension.is_own(speculation.tuner):
        return goodput.goodput(
            arms, node_cost=node_cost(is_cpu), learning=(LEARNED, MERGED), networks=networks
        )
    found = extension.call("speculation.tuner", speculation.tuner, arms)
    if not isinstance(found, Tuner):
        raise ConfigError(
            f"speculation.tuner {speculation.tuner!r} gave a {type(found).__name__}: return a Tuner of "
            "tlt_jax/tuner/interface.py"
        )
    return found


def largest_batches(
    tuner: Tuner, batches: Sequence[int], drafters: Collection[str] = ()
) -> dict[Strategy, int]:
    """The largest batch bucket for each strategy that the tuner may use.

    `batches`: the batch buckets, ascending; `drafters`: names of the trained drafters.
    """
    state = tuner.update_prior(tuner.init(), dict.fromkeys(drafters, (1.0,)))
    fewest = (1, *(size + 1 for size in batches))
    return {
        arm: batch
        for batch, least in zip(batches, fewest, strict=False)
        for arm in tuner.usable(state, batch, least)
    }
