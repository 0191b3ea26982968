"""Mistakes in the RL loop and the functions it calls; each mutant gets the original function."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import optax
from loop_rollouts import TRAINING

from tlt_jax.config import Config
from tlt_jax.train.setup import Setup

GRAD_CLIP = 1.5


def plant(monkeypatch, place: Any, name: str, mutant: Callable) -> None:
    """Replaces the original by the mutant."""
    monkeypatch.setattr(place, name, mutant(getattr(place, name)))


def flipped(advantages):
    """Every advantage has the other sign."""
    return lambda *args: -advantages(*args)


def dealt_to_the_next(advantages):
    """Every answer gets the advantage of the one before it in its group."""
    return lambda *args: np.roll(advantages(*args), 1, axis=1)


def dealt_in_the_order_of_packing(spread):
    """Advantages and weights are placed on the longest answer first, as answers are packed."""

    def placed(spans, values):
        order = np.argsort(-spans.lengths, kind="stable")
        return spread(spans, np.asarray(values)[np.argsort(order)])

    return placed


def of_the_first_minibatch(spread):
    """Every minibatch gets the advantages of the first one."""
    first = []

    def placed(spans, values):
        if min(values) < 0:  # advantages
            first.append(values)
            values = np.resize(first[0], len(values))
        return spread(spans, values)

    return placed


def without_last_tokens(make_batch):
    """The last token of every answer has weight 0."""

    def make(packed, recipe, weights, *rest):
        batch, spans = make_batch(packed, recipe, weights, *rest), packed[1]
        kept = spans.spread(weights)
        for (step, row, first), length in zip(spans.places, spans.lengths, strict=True):
            kept[step, row, first + length - 1] = 0
        return [
            rows._replace(weights=jax.device_put(part, rows.weights.sharding))
            for rows, part in zip(batch, kept, strict=True)
        ]

    return make


def the_same_in_every_step(sequence_keys):
    """The noise does not depend on the step."""
    return lambda seed, stream, step, uids: sequence_keys(seed, stream, 0, uids)


def of_seed_zero(sequence_keys):
    """The noise does not depend on the seed."""
    return lambda seed, stream, step, uids: sequence_keys(0, stream, step, uids)


def clipped_one_by_one(widen):
    """The gradient of each accumulation step is clipped."""

    def widened(grads):
        return optax.clip_by_global_norm(GRAD_CLIP).update(widen(grads), ())[0]

    return widened


def never_clipped(transformation):
    """The optimizer clips nothing."""
    return lambda adam, *rate: transformation(replace(adam, grad_clip=0.0), *rate)


def the_training_noise(stream):
    """Evaluation samples with the noise of training."""
    return TRAINING


def spoil(config: Config, knobs: dict) -> Config:
    """The configuration with other values of some knobs."""
    for name, value in knobs.items():
        section, knob = name.split(".")
        config = replace(config, **{section: replace(getattr(config, section), **{knob: value})})
    return config


def misread(value: Any, knobs: dict) -> Any:
    """A configuration, or a copy of an object that has one, with other values of some knobs."""
    if isinstance(value, Config):
        return spoil(value, knobs)
    for name in ("config", "run"):
        if isinstance(getattr(value, name, None), Config | Setup):
            value = copy.copy(value)
            object.__setattr__(value, name, misread(getattr(value, name), knobs))
    return value


def reading(**knobs):
    """A mutant that reads these knob values instead of the run's; __ stands for the dot."""
    knobs = {name.replace("__", "."): value for name, value in knobs.items()}

    def mutant(function):
        def spoiled(*args):
            return function(*(misread(arg, knobs) for arg in args))

        return spoiled

    mutant.__name__ = ", ".join(f"{name} is {value}" for name, value in knobs.items())
    return mutant
