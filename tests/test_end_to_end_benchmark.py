"""The benchmark of whole steps: its tables add up, its ratios are plain over arm, and other answers do not pass."""

from __future__ import annotations

import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tlt_jax.config.schema import Config, Log
from tlt_jax.metrics import Writer
from tlt_jax.metrics.writer import ChunkRecord, Record

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("end_to_end", ROOT / "benchmarks" / "end_to_end.py")
end_to_end = importlib.util.module_from_spec(SPEC)
sys.modules["end_to_end"] = end_to_end  # dataclasses look their module up
SPEC.loader.exec_module(end_to_end)

PHASES = {"rollout": 8.0, "update": 4.0, "old_log_prob": 0.5, "reward": 0.25, "eval": 2.0,
          "update_weights": 0.5, "other": 1.0}  # fmt: skip
COMPILED = {"rollout": 2.5, "update": 1.0, "eval": 0.5, "update_weights": 0.25}


def scalars(slower: float = 1.0, compiled: bool = True) -> dict[str, float]:
    """The accounts of a step whose rollout takes `slower` times as long beside its compiling."""
    compiling = COMPILED if compiled else {}
    phases = PHASES | {"rollout": 5.0 * slower + compiling.get("rollout", 0.0)}
    return {
        **{f"timing_s/{name}": seconds for name, seconds in phases.items()},
        **{f"perf/compile_s/{name}": seconds for name, seconds in compiling.items()},
        "timing_s/step": sum(phases.values()),
        "perf/compile_s": sum(compiling.values()),
        "perf/compiles": len(compiling),
        "perf/row_rounds": 100,
        "perf/padding_ratio": 0.25,
        "response_length/p50": 20.0,
        "response_length/max": 60.0,
        "actor/entropy": 0.8,
        "reward/mean": 0.5,
    }


def answer(uid: int, text: str = "1 2=3") -> dict:
    return {"uid": uid, "completion": text, "length": 5, "finish": "stop", "reward": 1.0}


def chunk(
    strategy: str = "3_1_4", tokens: int = 60, predicted: float | None = 50.0, **rest
) -> dict:
    return {"strategy": strategy, "tokens": tokens, "rounds": 10, "live": 2.0, "batch": 4,
            "predicted": predicted, "measured": 100.0, "is_timed": True} | rest  # fmt: skip


@pytest.fixture
def run() -> end_to_end.Run:
    """Two steps, of which the second compiled nothing."""
    steps = {1: scalars(), 2: scalars(compiled=False)}
    chunks = {1: [chunk(), chunk("off", 20, None)], 2: [chunk(tokens=40)]}
    answers = {step: {uid: answer(uid) for uid in (0, 1)} for step in (1, 2)}
    return end_to_end.Run(steps, chunks, answers, wall=50.0)


def test_the_phases_add_up_to_the_steps_and_compiling_is_in_none_of_them(run):
    phases = end_to_end.phases(run)
    assert sum(phases.values()) == pytest.approx(run.seconds)
    assert phases["unaccounted"] == pytest.approx(0)
    compiling = [phases[f"compiling, {name}"] for name in ("rollout", "update", "eval", "other")]
    assert (phases["rollout"], phases["update"], compiling) == (10.0, 8.0, [2.5, 1, 0.5, 0.25])
    assert end_to_end.bound(run) == pytest.approx(run.seconds / (run.seconds - 12.5))

    lost = {**run.steps, 1: run.steps[1] | {"timing_s/step": run.steps[1]["timing_s/step"] + 7}}
    assert end_to_end.phases(replace(run, steps=lost))["unaccounted"] == pytest.approx(7)


def test_a_ratio_is_plain_over_arm_and_quiet_steps_are_those_without_compiling_in_either(run):
    plain = replace(run, steps={1: scalars(2.0), 2: scalars(3.0, False), 3: scalars(9.0, False)})
    arm = replace(run, steps={1: scalars(), 2: scalars(1.0, False), 3: scalars(1.0)})
    assert end_to_end.quiet_ratio(plain, arm) == (3.0, 1)
    ratio, steps = end_to_end.quiet_ratio(replace(run, steps={1: scalars()}), run)
    assert math.isnan(ratio) and steps == 0


def test_an_interval_is_students_and_a_single_turn_has_none():
    assert end_to_end.interval([1.5]) == "1.50"
    assert end_to_end.interval([1.0, 2.0, 3.0]) == "2.00 (-0.48 to 4.48)"


def test_drafting_is_summed_over_rounds_and_errors_are_of_chunks_that_were_timed(run):
    assert end_to_end.accept_length(run) == (60 + 40) / 40
    assert math.isnan(end_to_end.accept_length(replace(run, chunks={})))
    noisy = {1: [chunk(predicted=1.0, is_timed=False), chunk(predicted=100.0 * math.e)]}
    assert end_to_end.prediction_error(replace(run, chunks=noisy)) == pytest.approx(1)
    assert end_to_end.padding(run) == pytest.approx(0.25)


@pytest.mark.parametrize("name, value", [("completion", "1 2=4"), ("length", 6), ("reward", 0.0)])
def test_an_answer_that_differs_is_found_and_named(run, name, value):
    assert end_to_end.first_difference(run, run) == ""
    other = {1: run.answers[1], 2: {0: answer(0), 1: answer(1) | {name: value}}}
    found = end_to_end.first_difference(run, replace(run, answers=other))
    assert found.startswith("step 2: 1 of 2 answers; the first is uid 1") and repr(value) in found
    for fewer in ({1: run.answers[1]}, {**run.answers, 2: {0: answer(0)}}):
        assert end_to_end.first_difference(run, replace(run, answers=fewer))
    with pytest.raises(end_to_end.Failure, match="ngram: other answers than plain"):
        end_to_end.compare(run, replace(run, answers=other), "ngram", may_differ=False)


def test_a_run_folder_is_read_as_the_product_writes_it(tmp_path):
    config = Config(run=str(tmp_path), log=Log(progress=False))
    line = ChunkRecord(0, 1, 4, 2.0, 64, "3_1_4", "kept", 50.0, 100.0, 60, 10, 0.6, [1], True)
    with Writer(config, 2) as writer:
        writer.scalars(0, {"eval/mean@1": 0.5})
        for step in (1, 2):
            writer.step(step, scalars(), [Record(0, "12:", "1=2", 1.0, 4, "stop")], [], [line])
        writer.scalars(2, {"eval/mean@1": 0.75})
    run = end_to_end.read_run(tmp_path, 9.0)
    assert list(run.steps) == list(run.answers) == list(run.chunks) == [1, 2]
    assert run.seconds == pytest.approx(2 * scalars()["timing_s/step"])
    assert end_to_end.accept_length(run) == 3.0
    assert json.dumps(run.answers[1][0]["completion"]) == '"1=2"'


def test_the_report_has_every_arm_and_its_ratio(run, capsys):
    fast = replace(run, steps={1: scalars(0.5), 2: scalars(0.5, False)}, wall=25.0)
    end_to_end.report(
        [{("cold", "plain"): run, ("cold", "ngram"): fast}], "cold", ["plain", "ngram"]
    )
    text = capsys.readouterr().out
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ngram")]
    assert rows[0][2] == f"{run.seconds / fast.seconds:.2f}" and rows[0][4] == "2.00"
    numbers = [float(cell.strip(" |")) for cell in rows[1][1:]]
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.05)
    assert rows[2][2:5] == ["2.00", "1", "2.50"]


def test_arms_are_given_on_the_command_line_and_plain_is_always_there(tmp_path):
    args, rest = end_to_end.parse(
        ["--work", str(tmp_path), "--arm", "mine", "--a.b '[1, 2]'", "--x", "y"]
    )
    assert rest == ["--x", "y"]
    assert end_to_end.arms_of(args) == {
        "plain": "--speculation.drafter none", "mine": "--a.b '[1, 2]'",
    }  # fmt: skip
    usual, _ = end_to_end.parse(["--work", str(tmp_path)])
    assert list(end_to_end.arms_of(usual)) == ["plain", "ngram", "eagle3", "eagle3_7_1_8"]
    without, _ = end_to_end.parse(["--work", str(tmp_path), "--drafter", "none"])
    assert list(end_to_end.arms_of(without)) == ["plain", "ngram"]
