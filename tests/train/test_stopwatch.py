"""Seconds of the loop by phase: each counts for one phase, and compiling counts once, whoever compiled."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from observed import configure
from training_runs import events

from tlt_jax import cli
from tlt_jax.metrics import Writer, names
from tlt_jax.rewards import Scorer
from tlt_jax.rollout.engine import Engine
from tlt_jax.simulate.simulator import VirtualClock
from tlt_jax.train import batch as batches, loop, run_state, step_metrics
from tlt_jax.train.evaluation import Evaluator
from tlt_jax.train.step_metrics import COMPILATION, COMPILING, Stopwatch

TRACING, LOWERING, *_ = COMPILING


@pytest.fixture
def clock() -> VirtualClock:
    """A clock that is moved by hand."""
    clock = VirtualClock()
    clock.jump(100.0)
    return clock


def test_each_second_belongs_to_one_phase_and_those_of_an_inner_one_to_that(clock):
    watch = Stopwatch(clock.now)
    clock.time += 1
    with watch.phase("update"):
        clock.time += 2
        with watch.phase("old_log_prob"):
            clock.time += 4
        clock.time += 8
    clock.time += 16
    with pytest.raises(KeyError), watch.phase("eval"):
        clock.time += 32
        raise KeyError
    first = watch.lap()
    assert {name.removeprefix("timing_s/"): seconds for name, seconds in first.items() if "timing_s" in name} == {
        "other": 17, "update": 10, "old_log_prob": 4, "eval": 32, "step": 63,
    }  # fmt: skip
    clock.time += 64
    with watch.phase("update"):
        clock.time += 128
    assert watch.lap()["timing_s/step"] == 192, "a lap starts where the previous one ended"


def test_a_lap_inside_a_phase_cuts_it_in_two(clock):
    watch = Stopwatch(clock.now)
    with watch.phase("metrics"):
        clock.time += 1
        first = watch.lap()
        clock.time += 2
    clock.time += 4
    assert (first["timing_s/metrics"], first["timing_s/step"]) == (1, 1)
    second = watch.lap()
    assert (second["timing_s/metrics"], second["timing_s/other"]) == (2, 4)


def test_a_second_in_which_several_programs_compile_counts_once_in_its_phase(clock):
    watch = Stopwatch(clock.now)
    with watch.phase("rollout"):
        clock.time += 10
        watch.on_event(TRACING, 4.0)  # from 106 to 110
        watch.on_event(COMPILATION, 2.0)  # inside it
        watch.on_event("/jax/checkpoint/write/durations_sec", 9.0)
    with watch.phase("update"):
        clock.time += 3
        watch.on_event(LOWERING, 5.0)  # 2 s of it were in the rollout, and are counted already
        watch.on_event(COMPILATION, 0.5)
    found = watch.lap()
    assert {name: value for name, value in found.items() if name.startswith("perf/")} == {
        "perf/compiles": 2,
        "perf/compile_s": 7,
        "perf/compile_s/rollout": 4,
        "perf/compile_s/update": 3,
    }
    clock.time += 1
    assert watch.lap()["perf/compile_s"] == 0 == watch.lap()["perf/compiles"]


def test_every_program_of_the_process_is_noticed_however_it_is_compiled():
    values = jnp.arange(7.0)
    with Stopwatch() as watch:
        watch.lap()
        with watch.phase("update"):
            function = jax.jit(lambda x: x * 2.5 + 1)
            function(values)
        with watch.phase("rollout"):
            jax.jit(lambda x: x * 3.5 + 1).lower(values).compile()
        found = watch.lap()
        function(values)
        again = watch.lap()
    assert found["perf/compiles"] == 2 and again["perf/compiles"] == 0
    assert 0 < found["perf/compile_s/update"] <= found["timing_s/update"]
    assert 0 < found["perf/compile_s/rollout"] <= found["timing_s/rollout"]
    jax.jit(lambda x: x * 4.5 + 1)(values)
    assert watch.lap()["perf/compiles"] == 0, "it listens only inside its context"


COSTS = {
    (Engine, "publish"): 1,
    (Evaluator, "evaluate"): 2,
    (run_state, "save"): 4,
    (Engine, "run"): 8,
    (Scorer, "collect"): 16,
    (batches, "pack"): 32,
    (step_metrics, "of_rollout"): 64,
    (step_metrics, "chunks"): 128,
    (Writer, "step"): 256,
}


def test_the_phases_of_the_loop_leave_no_work_over_and_add_up(tmp_path, clock, monkeypatch):
    def costly(function, seconds):
        def call(*args, **kwargs):
            clock.time += seconds
            return function(*args, **kwargs)

        return call

    for (owner, name), seconds in COSTS.items():
        monkeypatch.setattr(owner, name, costly(getattr(owner, name), seconds))
    monkeypatch.setattr(loop, "Stopwatch", partial(Stopwatch, clock.now))
    knobs = {"train.steps": 3, "eval.every": 2, "eval.prompts": 2, "checkpoint.every": 1,
             "rollout.prompts": 2, "rollout.samples": 2, "rollout.max_new_tokens": 8}  # fmt: skip
    config = configure(tmp_path, knobs)
    assert loop.train(config) == cli.DONE

    written = events(config)
    steps = [
        {name: dict(written[name]).get(step, 0) for name in written if name.startswith("timing_s/")}
        for step in (1, 2, 3)
    ]
    expected = {
        "update_weights": [1] * 3,
        "eval": [2 + 8 + 16, 0, 2 + 8 + 16],
        "save_checkpoint": [0, 4, 4],
        "rollout": [8] * 3,
        "reward": [16] * 3,
        "update": [32] * 3,
        "old_log_prob": [0] * 3,
        "metrics": [64, 64 + 128 + 256, 64 + 128 + 256],
        "other": [0] * 3,
    }
    for name, seconds in expected.items():
        assert [step.pop(f"timing_s/{name}") for step in steps] == seconds, name
    whole = [sum(each) for each in zip(*expected.values(), strict=True)]
    assert steps == [{"timing_s/step": seconds} for seconds in whole], "no other phase"
    assert [step for step, _ in written["timing_s/eval"]] == [1, 3], "an evaluation counts once"


def test_the_names_of_all_phases_are_in_the_list():
    for name in ("rollout", "update", step_metrics.OTHER):
        names.find(f"timing_s/{name}", "scalar")
        names.find(f"perf/compile_s/{name}", "scalar")
