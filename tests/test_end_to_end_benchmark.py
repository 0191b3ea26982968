"""The benchmark of whole steps: its tables add up, its ratios are plain over arm, and other answers do not pass."""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from PIL import Image
from scipy import stats

from benchmarks.common import processes, timing
from benchmarks.whole_runs import arms, end_to_end, picture, report, runs
from benchmarks.whole_runs.in_turns import Turns
from benchmarks.whole_runs.runs import Run
from tlt_jax.config import load as configuration
from tlt_jax.config.schema import Config, Log
from tlt_jax.metrics import Writer
from tlt_jax.metrics.timeline import COLORS
from tlt_jax.metrics.writer import ChunkRecord, Record

PHASES = {"rollout": 8.0, "update": 4.0, "old_log_prob": 0.5, "reward": 0.25, "eval": 2.0,
          "update_weights": 0.5, "drafter": 0.5, "other": 1.0}  # fmt: skip
COMPILED = {"rollout": 2.5, "update": 1.0, "eval": 0.5, "update_weights": 0.25}


def scalars(slower: float = 1.0, compiled: bool = True) -> dict[str, float]:
    """Metrics of a step whose rollout takes `slower` times as long, apart from compiling."""
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
        "perf/idle_ratio": 0.25,
        "group/busy_s@0": 1.0,
        "group/busy_s@1": 1.0,
        "response_length/p50": 20.0,
        "response_length/p75": 25.0,
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


SPANS = [
    SimpleNamespace(group=0, kind="decode", start=0.0, end=2.0, number=1),
    SimpleNamespace(group=1, kind="train", start=1.0, end=1.5, number=2),
]


@pytest.fixture
def run() -> Run:
    """Two steps; the second compiled nothing."""
    steps = {1: scalars(), 2: scalars(compiled=False)}
    chunks = {1: [chunk(), chunk("off", 20, None)], 2: [chunk(tokens=40)]}
    answers = {step: {uid: answer(uid) for uid in (0, 1)} for step in (1, 2)}
    return Run(steps, chunks, answers, wall=50.0)


def test_the_phases_add_up_to_the_steps_and_compiling_is_in_none_of_them(run):
    phases = runs.phases(run)
    assert sum(phases.values()) == pytest.approx(run.seconds)
    assert phases["unaccounted"] == pytest.approx(0)
    compiling = [phases[f"compiling, {name}"] for name in ("rollout", "update", "eval", "other")]
    assert (phases["rollout"], phases["update"], compiling) == (10.0, 8.0, [2.5, 1, 0.5, 0.25])
    assert runs.bound(run) == pytest.approx(run.seconds / (run.seconds - 12.5))

    lost = {**run.steps, 1: run.steps[1] | {"timing_s/step": run.steps[1]["timing_s/step"] + 7}}
    assert runs.phases(replace(run, steps=lost))["unaccounted"] == pytest.approx(7)


def test_a_ratio_is_plain_over_arm_and_quiet_steps_are_those_without_compiling_in_either(run):
    plain = replace(run, steps={1: scalars(2.0), 2: scalars(3.0, False), 3: scalars(9.0, False)})
    arm = replace(run, steps={1: scalars(), 2: scalars(1.0, False), 3: scalars(1.0)})
    assert runs.quiet_pairs(plain, arm) == [(15.0, 5.0)]
    assert runs.pairs(plain, arm, "rollout") == [(12.5, 7.5), (15.0, 5.0), (45.0, 7.5)]
    assert timing.ratio(runs.pairs(plain, arm, "rollout"))[0] == 72.5 / 20
    assert timing.interval([]) == "-"


def test_a_single_pair_has_no_interval_and_that_of_a_mean_is_students():
    assert timing.interval([(3.0, 2.0)]) == "1.50"
    values = [1.0, 2.0, 3.0, 5.0]
    mean, half = timing.ratio([(value, 1.0) for value in values])
    error = statistics.stdev(values) / 2
    assert mean - half == pytest.approx(stats.t.interval(0.95, 3, mean, error)[0])


def test_the_interval_of_a_ratio_covers_it_in_19_of_20_cases():
    """n = 2,000 experiments of 20 steps: a share outside of 3.5 to 6.5 % is found with more than 3 standard errors."""
    draw = np.random.default_rng(0)
    misses = 0
    for _ in range(2000):
        work = draw.lognormal(0, 0.3, 20)  # a step is long or short for both arms
        plain, arm = (work * draw.normal(mean, 0.15, 20) for mean in (1.3, 1.0))
        value, half = timing.ratio([*zip(plain.tolist(), arm.tolist(), strict=True)])
        misses += abs(value - 1.3) > half
    assert 0.035 < misses / 2000 < 0.065


def test_idle_time_is_what_decoding_leaves_and_the_merge_is_not_inside(run):
    step = scalars() | {"timing_s/rollout": 10.0, "idle/ratio": 0.3, "idle/used_ratio": 0.5,
                        "idle/delay_s": 0.1, "timing_s/drafter": 0.2, "drafter/steps": 4.0,
                        "drafter/tokens": 900.0}  # fmt: skip
    found = runs.idle(replace(run, steps={1: step, 2: step}), groups=2)
    assert found["nothing to decode"] == pytest.approx(0.3) and found["used"] == pytest.approx(0.5)
    assert found["training inside"] == pytest.approx(6.0 / 6.6), (
        "2 x 2 groups x 10 s x 0.3 x 0.5 of 0.3 s more each"
    )
    assert (found["micro-steps"], found["tokens"]) == (8, 1800)
    plain = runs.idle(run, groups=2)
    assert plain["nothing to decode"] == pytest.approx(0.25)
    assert plain["used"] == 0 and math.isnan(plain["training inside"])


def test_drafting_is_summed_over_rounds_and_errors_are_of_chunks_that_were_timed(run):
    assert runs.accept_length(run) == (60 + 40) / 40
    assert runs.accept_length(run, [2]) == 40 / 20
    assert math.isnan(runs.accept_length(replace(run, chunks={})))
    noisy = {1: [chunk(predicted=1.0, is_timed=False), chunk(predicted=100.0 * math.e)]}
    assert runs.prediction_error(replace(run, chunks=noisy)) == pytest.approx(1)
    assert runs.padding(run) == pytest.approx(0.25)


@pytest.mark.parametrize("name, value", [("completion", "1 2=4"), ("length", 6), ("reward", 0.0)])
def test_an_answer_that_differs_is_found_and_named(run, name, value):
    assert runs.first_difference(run, run) == ""
    other = {1: run.answers[1], 2: {0: answer(0), 1: answer(1) | {name: value}}}
    found = runs.first_difference(run, replace(run, answers=other))
    assert found.startswith("step 2: 1 of 2 answers; the first is uid 1") and repr(value) in found
    for fewer in ({1: run.answers[1]}, {**run.answers, 2: {0: answer(0)}}):
        assert runs.first_difference(run, replace(run, answers=fewer))
    assert "policies" in runs.first_difference(run, replace(run, policy="ab12"))
    with pytest.raises(arms.Failure, match="ngram: other than plain"):
        arms.compare(run, replace(run, answers=other), "ngram", may_differ=False)


def test_a_run_folder_is_read_as_the_product_writes_it(tmp_path):
    config = Config(run=str(tmp_path), log=Log(progress=False, texts_every=1))
    line = ChunkRecord(0, 1, 4, 2.0, 64, "3_1_4", "kept", 50.0, 100.0, 60, 10, 0.6, [1], True)
    with Writer(config, 2) as writer:
        writer.scalars(0, {"eval/mean@1": 0.5})
        for step in (1, 2):
            writer.step(step, scalars(), [Record(0, "12:", "1=2", 1.0, 4, "stop")], SPANS, [line])
        writer.scalars(2, {"eval/mean@1": 0.75})
    assert runs.read_run(tmp_path, 9.0).policy == ""
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "model.safetensors").write_bytes(b"abc")
    run = runs.read_run(tmp_path, 9.0)
    assert list(run.steps) == list(run.answers) == list(run.chunks) == [1, 2]
    assert run.seconds == pytest.approx(2 * scalars()["timing_s/step"])
    assert runs.accept_length(run) == 3.0
    assert json.dumps(run.answers[1][0]["completion"]) == '"1=2"'
    assert run.policy.startswith("ba7816bf"), "SHA-256 of abc, as in FIPS 180-2"
    assert [(one["name"], one["tid"]) for one in run.traces[2]] == [("decode", 0), ("train", 1)]


def test_the_report_has_every_arm_and_its_ratio(run, capsys):
    fast = replace(run, steps={1: scalars(0.5), 2: scalars(0.5, False)}, wall=25.0)
    turn = {("cold", "plain"): run, ("cold", "ngram"): fast}
    report.report([turn], "cold", ["plain", "ngram"])
    text = capsys.readouterr().out
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ngram")]
    ratio = run.seconds / fast.seconds
    assert rows[0][2].startswith(f"{ratio:.2f} (") and rows[0][6] == "2.00"
    share = 12.5 / run.seconds
    assert rows[0][3] == f"{1 / (1 - share + share / (12.5 / 7.5)):.2f}", "Amdahl's law, by hand"
    assert rows[0][4] == f"{runs.bound(run):.2f}"
    numbers = [float(cell.strip(" |")) for cell in rows[1][1:]]
    assert sum(numbers[:-1]) == pytest.approx(numbers[-1], abs=0.05)
    assert rows[2][2].startswith("1.67 (") and rows[2][3:7] == ["2.00", "2.00", "1", "2.50"]
    assert rows[4][1:] == ["3.00", "2.00 |"]


SLEEPER = """
import sys, threading, time
from pathlib import Path
from benchmarks.whole_runs import in_turns
stop = in_turns.stopping(Path(sys.argv[1]), 0, 1, threading.Lock())
clocks = [time.time, time.monotonic, time.perf_counter]
for _ in range(2):
    before = [clock() for clock in clocks]
    stop()
    print(*(clock() - begin for clock, begin in zip(clocks, before, strict=True)), flush=True)
sys.exit(3)
"""


def test_a_run_that_takes_turns_measures_no_pause_and_its_seconds_have_none(tmp_path):
    folder = tmp_path / "turns"
    begin = time.perf_counter()
    run = Turns([sys.executable, "-c", SLEEPER, str(folder)], processes.environment(), 1, folder)
    try:
        for is_last in (False, True):
            time.sleep(2.0)
            assert run.go_on() is not is_last
    finally:
        run.end()
    assert run.run.returncode == 3
    assert run.seconds < time.perf_counter() - begin - 3.9
    measured = [float(text) for text in run.output.read_text().split()]
    assert len(measured) == 6 and max(measured) < 1.0


def test_the_training_command_takes_a_turn_for_its_start_and_every_step(tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"""
run: {tmp_path / "run"}
model: {{init: {{model_type: qwen2, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
                intermediate_size: 16, max_position_embeddings: 64}}}}
data: {{task_args: {{min_length: 3, max_length: 4, modulus: 5}}, max_prompt_tokens: 8}}
rollout: {{prompts: 2, samples: 2, max_new_tokens: 8, compile_cache: {os.environ["TLT_JAX_TEST_PROGRAMS"]}}}
sft: {{steps: 0}}
train: {{steps: 2}}
eval: {{every: 0}}
"""
    )
    run = arms.started(["--config", str(config)], 1, tmp_path / "turns")
    turns = 0
    try:
        assert (run.turn, run.run.poll()) == (1, None), run.output.read_text()
        while run.go_on():
            turns += 1
    finally:
        run.end()
    assert (run.run.returncode, turns) == (0, 2), run.output.read_text()
    steps = runs.read_steps(tmp_path / "run")
    assert list(steps) == [1, 2]
    inside = sum(step["timing_s/step"] for step in steps.values())
    assert inside < run.seconds


def test_the_picture_shows_training_in_its_colour_where_there_was_some(run, tmp_path):
    spans = [
        {"name": name, "tid": group, "ts": 1e6 * start, "dur": 1e6}
        for name, group, start in (("decode", 0, 0), ("decode", 1, 0), ("decode", 0, 1), ("train", 1, 1))
    ]  # fmt: skip
    plain = replace(run, traces=dict.fromkeys((1, 2), spans[:3]))
    tlt = replace(run, traces=dict.fromkeys((1, 2), spans))

    pytest.importorskip("matplotlib", reason="the benchmarks extra")

    def shows(name: str, *runs: Run) -> bool:
        picture.write(tmp_path / name, *runs)
        pixels = np.asarray(Image.open(tmp_path / name).convert("RGB"))
        return bool((pixels == COLORS["train"]).all(-1).any())

    assert shows("tlt.png", plain, tlt) and not shows("plain.png", plain, plain)


def test_the_picture_shows_a_step_in_which_neither_compiled(run):
    plain = replace(run, steps={n: scalars(n, n == 1) for n in (1, 2, 3, 4)})
    tlt = replace(run, steps={n: scalars(1.0, n == 4) for n in (1, 2, 3, 4)})
    assert picture.shown_step(plain, tlt) == 3


def test_arms_are_given_on_the_command_line_and_plain_is_always_there(tmp_path):
    args, rest = end_to_end.parse(
        ["--work", str(tmp_path), "--arm", "mine", "--a.b '[1, 2]'", "--x", "y"]
    )
    assert rest == ["--x", "y"]
    assert end_to_end.arms_of(args) == {
        "plain": "--speculation.drafter none", "mine": "--a.b '[1, 2]'",
    }  # fmt: skip
    usual, _ = end_to_end.parse(["--work", str(tmp_path)])
    assert list(end_to_end.arms_of(usual)) == ["plain", "fixed", "ngram", "tlt", "tlt_new"]
    without, _ = end_to_end.parse(["--work", str(tmp_path), "--drafter", "none"])
    assert list(end_to_end.arms_of(without)) == ["plain", "ngram", "tlt_new"]


def test_quickstart_is_three_arms_of_the_quickstart_in_three_turns(tmp_path):
    args, _ = end_to_end.parse(["--work", str(tmp_path), "--quickstart", "--steps", "60"])
    assert (args.turns, args.steps, args.caches) == (3, 60, ["cold", "warm"])
    assert Path(args.config).name == "quickstart.yaml"
    assert list(end_to_end.arms_of(args)) == ["plain", "ngram", "adaptive"]


def test_quick_is_two_arms_in_two_processes_with_a_picture(tmp_path):
    args, _ = end_to_end.parse(["--work", str(tmp_path), "--quick"])
    assert list(end_to_end.arms_of(args)) == ["plain", "tlt"]
    assert (args.processes, args.by_step, args.caches) == (2, True, ["cold"])
    assert args.picture == tmp_path / "end_to_end.png"
    assert configuration.load(["--config", args.config]).mesh.data == 2


def test_a_picture_that_cannot_be_drawn_is_refused_before_any_run(tmp_path, capsys):
    wanted = ["--work", str(tmp_path / "new"), "--picture", str(tmp_path / "a.png")]
    assert end_to_end.main([*wanted, "--arm", "mine", "--x y"]) == 2
    assert "tlt: name an arm so" in capsys.readouterr().err and not (tmp_path / "new").exists()
