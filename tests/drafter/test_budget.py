"""When idle drafter training pauses and resumes, worked by hand."""

from __future__ import annotations

from tlt_jax.drafter.budget import FALL, GAIN, PATIENCE, Budget

QUARTER = PATIENCE // 4  # micro-steps of an RL step


def after(budget: Budget, *steps: tuple[float, int]) -> Budget:
    for acceptance, count in steps:
        budget = budget.after(acceptance, count)
    return budget


def test_training_continues_while_acceptance_rises():
    rising = [(0.2 + 2 * GAIN * i, QUARTER) for i in range(30)]
    assert not after(Budget(), *rising).is_paused


def test_it_pauses_when_acceptance_stays_and_resumes_when_it_falls():
    level = [(0.6, QUARTER)] * 4  # the first of them is the best so far
    assert not after(Budget(), *level).is_paused
    paused = after(Budget(), *level, (0.6, QUARTER))
    assert paused.is_paused
    assert after(paused, (0.6 - FALL / 2, 0)).is_paused
    resumed = after(paused, (0.6 - 1.1 * FALL, 0))
    assert not resumed.is_paused and resumed.best == 0.6 - 1.1 * FALL
    assert not after(resumed, *[(0.57, QUARTER)] * 3).is_paused


def test_patience_is_counted_in_micro_steps_however_they_are_spread():
    begun = after(Budget(), (0.6, QUARTER))
    for count in (1, 8, PATIENCE):
        whole = PATIENCE // count
        assert not after(begun, *[(0.6, count)] * (whole - 1)).is_paused
        assert after(begun, *[(0.6, count)] * whole).is_paused


def test_steps_that_trained_nothing_are_no_evidence_against_training():
    assert not after(Budget(), *[(0.6, 0)] * 50).is_paused


def test_noise_below_the_least_gain_is_no_improvement():
    budget = after(Budget(), (0.6, QUARTER))
    assert after(budget, *[(0.6 + 0.9 * GAIN, QUARTER)] * 4).is_paused
