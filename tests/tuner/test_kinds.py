"""Training and evaluation have separate acceptance evidence; costs are learned from both."""

from __future__ import annotations

import json

import numpy as np
import pytest
from tuner_rollouts import measured

from tlt_jax.spec_decode.strategy import PLAIN, parse
from tlt_jax.tuner import baselines, goodput
from tlt_jax.tuner.interface import EVALUATION, TRAINING, Cell

ARM = parse("2_2_4")
MAKERS = {
    "goodput": lambda: goodput.goodput([ARM]),
    "beg_mab": lambda: baselines.beg_mab([ARM]),
    "fixed": lambda: baselines.fixed(ARM),
}


def after(tuner, state, *seen):
    for one in seen:
        state = tuner.observe(state, one)
    return state


@pytest.mark.parametrize("name", MAKERS)
def test_switching_back_restores_a_kind_except_for_the_costs(name):
    tuner = MAKERS[name]()
    before = after(tuner, tuner.init(), measured(PLAIN), measured(ARM, accepted=2.0))
    other = tuner.switched(before, EVALUATION)
    assert json.loads(json.dumps(other)) == other
    other = after(tuner, other, *[measured(ARM, accepted=0.1, per_round=0.7)] * 5)
    back = tuner.switched(other, TRAINING)
    assert back["cells"] == other["cells"] != before["cells"]
    shared = {"clock", "cells", "seen", "law", "funds", "catch_up", "others", "turns"}
    assert {key: back[key] for key in back.keys() - shared} == {
        key: before[key] for key in before.keys() - shared
    }
    assert tuner.switched(back, TRAINING) == back or name == "goodput"  # which ends a rollout


def test_evaluations_that_draft_badly_do_not_change_the_expected_acceptance_in_training():
    """Predicted tokens per second of a tree in training, with evaluations in between that accept nothing."""
    tuner, speeds = goodput.goodput([ARM]), []
    for evaluates in (False, True):
        state = after(tuner, tuner.init(), *[measured(PLAIN), measured(ARM, accepted=2.0)] * 4)
        if evaluates:
            state = tuner.switched(state, EVALUATION)
            state = after(tuner, state, *[measured(ARM, accepted=0.0)] * 40)
            speeds.append(tuner.predict(state, [Cell(4, 512, ARM)])[0][0])
            state = tuner.switched(state, TRAINING)
        speeds.append(tuner.predict(state, [Cell(4, 512, ARM)])[0][0])
    trained, evaluated, again = speeds
    assert again == pytest.approx(trained, abs=0.02)
    assert evaluated < trained - 0.5


def test_an_estimate_of_a_drafter_has_the_same_age_in_both_kinds():
    """A long training, an update with an estimate, then the first evaluation, which has few rounds."""
    tuner = goodput.goodput([parse("learned:2_2_4")], learning=["learned"])
    state = after(tuner, tuner.init(), *[measured(PLAIN, rounds=1000)] * 60)
    state = tuner.update_prior(state, {"learned": (0.7, 0.6)})
    cell = [Cell(4, 512, parse("learned:2_2_4"))]
    trained, evaluated = (
        tuner.predict(tuner.switched(state, kind), cell) for kind in (TRAINING, EVALUATION)
    )
    np.testing.assert_allclose(evaluated, trained)
    assert np.isfinite(trained).all()


def test_an_update_makes_both_kinds_less_certain():
    tuner = goodput.goodput([ARM])
    state = after(tuner, tuner.init(), measured(PLAIN), measured(ARM, accepted=2.0))
    other = after(tuner, tuner.switched(state, EVALUATION), measured(ARM, accepted=1.0))
    updated = tuner.update_prior(other)
    for kind in (TRAINING, EVALUATION):
        was, now = (tuner.switched(one, kind)["clock"] for one in (other, updated))
        assert now == was + goodput.UPDATE
