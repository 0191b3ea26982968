"""A training loop of one's own on the library: answers, a lesson, other weights, answers, a step. Prints what it got, as JSON.

`library_process.py MODEL CHANGES JOINS`, as one of several processes, which the loop joins `itself`, or `open_engine` joins.
"""

from __future__ import annotations

import json
import os
import sys

import jax

import tlt_jax
from tlt_jax.errors import RewardError
from tlt_jax.inference.engine import RolloutModel

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5, 3, 5], [8, 10]]


def use(engine: RolloutModel) -> dict:
    """What a loop of one step gets from the engine."""
    first = engine.generate(PROMPTS)
    metrics = engine.learn(first)
    engine.update_weights(jax.tree.map(lambda leaf: 0.9 * leaf, engine.params))
    second = engine.generate(PROMPTS)
    try:  # in the process that decodes the answers to prompt 1
        engine.generate(PROMPTS, keep=2, score=lambda one: None if one.prompt == 1 else 1.0)
    except RewardError as error:
        refused = str(error)
    third = engine.generate(PROMPTS, 1)
    advantages = [float(len(one.tokens) - 9) for one in third]
    found = engine.forward_backward(third, advantages=advantages, with_logprobs=True)
    return {
        "update": [found.loss, engine.optim_step()["grad_norm"]],
        "refused": refused,
        "answers": [[one.tokens.tolist() for one in answers] for answers in (first, second, third)],
        "logprobs": [one.tolist() for one in [*(one.logprobs for one in first), *found.logprobs]],
        "accept_length": first.accept_length,
        "acceptance": metrics["drafter/acceptance@1"],
    }


if __name__ == "__main__":
    model, changes, joins = sys.argv[1:]
    if joins == "itself":
        names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        where, count, index = (os.environ[name] for name in names)
        jax.distributed.initialize(where, int(count), int(index))
    with tlt_jax.open_engine(model, json.loads(changes)) as opened:
        print(json.dumps(use(opened)))
