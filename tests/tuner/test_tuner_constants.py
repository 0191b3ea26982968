"""Why the tuner has this caution: less costs time with a useless drafter, more with a good one.

test_tuner_arms tests HORIZON; a budget bounds the cost of explorations for any value of it.
"""

from __future__ import annotations

import pytest
import scenarios
from test_tuner_arms import ARMS, decode, seconds, tuner_for

from tlt_jax.tuner import baselines, goodput

SEEDS = 6


def useless() -> float:
    """Seconds of first rollouts over those of plain decoding: no draft is accepted, and the clock has 20 % noise."""
    spent, plain = 0.0, 0.0
    for seed in range(SEEDS):
        scenario = scenarios.Scenario(scenarios.gpu, 0.3, agreement=0.0, seed=seed, noise=0.2)
        spent += seconds(decode(scenario, tuner_for(scenarios.gpu), rollouts=1, seed=seed)[1])
        plain += seconds(decode(scenario, baselines.fixed("off"), rollouts=1, seed=seed)[1])
    return spent / plain


def good() -> float:
    """Seconds of first rollouts over those of the oracle: most drafts are accepted, and the clock has no noise."""
    spent, least = 0.0, 0.0
    for seed in range(SEEDS):
        scenario = scenarios.Scenario(scenarios.gpu, 0.8, seed=seed)
        spent += seconds(decode(scenario, tuner_for(scenarios.gpu), rollouts=2, seed=seed)[1])
        least += seconds(
            decode(scenario, scenarios.oracle(scenario, ARMS), rollouts=2, seed=seed)[1]
        )
    return spent / least


MOST = {useless: 1.03, good: 1.25}


@pytest.mark.parametrize("scenario", MOST)
def test_a_useless_drafter_costs_little_on_a_noisy_clock_and_a_good_one_is_soon_used(scenario):
    assert scenario() < MOST[scenario]


@pytest.mark.parametrize(("scenario", "factor"), [(useless, 0.25), (good, 4.0)])
def test_a_quarter_and_four_times_the_caution_cost_more(scenario, factor, monkeypatch):
    monkeypatch.setattr(goodput, "CAUTION", factor * goodput.CAUTION)
    assert scenario() > MOST[scenario]
