"""benchmarks/simulated_findings.py: coupled prefetch covers what its law says, and the jobs are those that are published."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.simulated_findings import JOBS, Prefetched, price
from tlt_jax.simulate import __main__ as command, run
from tlt_jax.simulate.lengths import Drawn
from tlt_jax.spec_decode.strategy import PLAIN, Strategy


class Equal:
    """Answers of one length."""

    def __init__(self, tokens):
        self.tokens = tokens

    def draw(self, step, prompts, samples, seed):
        return Drawn(np.full(prompts, 20), np.full((prompts, samples), self.tokens))

    def describe(self):
        return "equal"


@pytest.mark.parametrize("tokens", [192, 1000, 4000, 16000])
def test_coupled_texts_cover_an_answer_up_to_its_first_difference(tokens):
    """With f differences a token (1 - e^(-fL)) / (fL) of L tokens: 88, 56, 19 and 5 % at f = 0.0013."""
    drawn = Prefetched(Equal(tokens), 0.0013, 1.0, math.inf, 0.0).draw(0, 200, 50, 0).answers
    covered = (1 - math.exp(-0.0013 * tokens)) / (0.0013 * tokens)
    assert 1 - drawn.mean() / tokens == pytest.approx(covered, abs=0.01)


def test_texts_that_do_not_exist_cover_nothing_and_a_token_of_a_text_has_its_price():
    def mean(*rest):
        return Prefetched(Equal(1000), 0.0, *rest).draw(0, 200, 50, 0).answers.mean()

    assert mean(0.0, math.inf, 0.0) == 1000
    assert mean(0.25, math.inf, 0.0) == pytest.approx(750, rel=0.03)
    assert mean(1.0, 400.0, 0.0) == 600 and mean(1.0, 400.0, 0.5) == 800


def test_the_price_of_a_text_is_a_chain_of_64_against_rounds_as_usual():
    table = command.costs_of(command.BASE, JOBS["7b"].config)
    chain = table.round_seconds(1, 0, Strategy(63, 1, 64, "ngram"), 500.0) / 64
    plain = table.round_seconds(1, 0, PLAIN, 500.0)
    assert price(table, 500.0, 0.0) == pytest.approx(chain / plain)
    assert price(table, 500.0, 3.0) == pytest.approx(3 * chain / plain)


@pytest.mark.parametrize(("name", "billions"), [("7b", 7.6), ("32b", 32.8)])
def test_the_policies_are_as_large_as_they_are_called(name, billions):
    """Weights of Qwen2.5-7B and 32B with the embedding, in billions, as their model cards state."""
    model = run.model_of(JOBS[name].config)
    layers, width, mlp, vocab = model.num_layers, model.hidden_size, model.mlp_dim, 152064
    heads = model.head_dim * (2 * model.num_heads + 2 * model.num_kv_heads)
    assert (layers * width * (heads + 3 * mlp) + 2 * vocab * width) / 1e9 == pytest.approx(
        billions, rel=0.01
    )
