"""When drafter training pauses and when it begins again, worked by hand."""

from __future__ import annotations

from tlt_jax.drafter.budget import FALL, GAIN, PATIENCE, Budget


def after(budget: Budget, *steps: tuple[float, bool]) -> Budget:
    for acceptance, is_trained in steps:
        budget = budget.after(acceptance, is_trained)
    return budget


def test_it_goes_on_while_acceptance_rises():
    rising = [(0.2 + 2 * GAIN * i, True) for i in range(30)]
    assert not after(Budget(), *rising).is_paused


def test_it_pauses_when_acceptance_stays_and_resumes_when_it_falls():
    level = [(0.6, True)] * PATIENCE
    assert not after(Budget(), *level).is_paused
    paused = after(Budget(), *level, (0.6, True))
    assert paused.is_paused
    assert after(paused, (0.6 - FALL / 2, False)).is_paused
    resumed = after(paused, (0.6 - 1.1 * FALL, False))
    assert not resumed.is_paused and resumed.best == 0.6 - 1.1 * FALL
    assert not after(resumed, *[(0.57, True)] * (PATIENCE - 1)).is_paused


def test_steps_that_trained_nothing_are_no_evidence_against_training():
    assert not after(Budget(), *[(0.6, False)] * 50).is_paused


def test_noise_below_the_least_gain_is_no_improvement():
    budget = after(Budget(), (0.6, True))
    assert after(budget, *[(0.6 + 0.9 * GAIN, True)] * PATIENCE).is_paused
