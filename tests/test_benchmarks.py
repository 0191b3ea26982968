"""The benchmarks: rows are complete, scripts that pages name exist and take their arguments, and figures are counted right."""

from __future__ import annotations

import csv
import importlib
import json
import math
import os
import re
import runpy
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.common import timing
from benchmarks.common.results import MEASURED_WITH, ResultTable
from benchmarks.whole_runs import end_to_end, learning, runs
from benchmarks.whole_runs.runs import Run
from tlt_jax.config.schema import Config
from tlt_jax.metrics import ChunkRecord, Record, Writer, evaluations

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
FILES = sorted((BENCHMARKS / "results").glob("*.csv"))
OTHERS = {"in_turns.py"}  # is started by a benchmark, and takes no --help
SCRIPTS = sorted(
    path.relative_to(BENCHMARKS)
    for path in BENCHMARKS.rglob("*.py")
    if "__main__" in path.read_text() and path.name not in OTHERS
)
PAGES = [ROOT / "README.md", BENCHMARKS / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_of_a_result_is_whole_and_says_what_it_was_measured_with(path):
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header[: len(MEASURED_WITH)]) == MEASURED_WITH
    assert len(set(header)) == len(header) and rows
    assert {len(row) for row in rows} == {len(header)}


def test_every_script_and_every_file_of_rows_that_a_page_names_is_there():
    text = "\n".join(page.read_text() for page in PAGES)
    named = set(re.findall(r"python benchmarks/([\w/]+\.py)", text))
    named |= {
        f"{name.replace('.', '/')}.py" for name in re.findall(r"-m benchmarks\.([\w.]+)", text)
    }
    assert {"end_to_end.py", "speculation/speed.py"} <= named <= {str(path) for path in SCRIPTS}
    page = (BENCHMARKS / "README.md").read_text()
    assert set(re.findall(r"`(?:results/)?(\w+\.csv)`", page)) <= {path.name for path in FILES}


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_script_says_what_it_measures_and_takes(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / script), "--help"])
    with pytest.raises(SystemExit) as end:
        if script.parent.name:
            importlib.import_module(".".join(("benchmarks", *script.with_suffix("").parts))).main()
        else:
            runpy.run_path(BENCHMARKS / script, run_name="__main__")
    assert end.value.code == 0
    assert "python " in capsys.readouterr().out, "how it is called"


def test_a_table_is_printed_and_appended_to_its_file(tmp_path, capsys):
    path = tmp_path / "new.csv"
    for value in (0.12345, 2.0):
        ResultTable(("what", "value"), path).row("a, b", value)
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [*MEASURED_WITH, "what", "value"]
    assert [row[-2:] for row in rows] == [["a, b", "0.123"], ["a, b", "2"]]
    assert capsys.readouterr().out.endswith("| what | value |\n|---|---|\n| a, b | 2 |\n")
    with pytest.raises(ValueError, match="has the columns"):
        ResultTable(("what", "other"), path)
    assert len(path.read_text().splitlines()) == 3


# Whole runs

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
    assert timing.interval([]) == "-" and timing.interval([(3.0, 2.0)]) == "1.50"


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
    with pytest.raises(end_to_end.Failure, match="ngram: other than plain"):
        end_to_end.compare(run, replace(run, answers=other), "ngram", may_differ=False)


def test_a_run_folder_is_read_as_the_product_writes_it(tmp_path):
    config = Config(run=str(tmp_path))
    line = ChunkRecord(0, 1, 4, 2.0, 64, "3_1_4", "kept", 50.0, 100.0, 60, 10, 0.6, [1], True)
    with Writer(config, 2) as writer:
        writer.scalars(0, {"eval/mean@1": 0.5})
        for step in (1, 2):
            writer.step(step, scalars(), [Record(0, "12:", "1=2", 1.0, 4, "stop")], [], [line])
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


def test_the_report_has_every_arm_and_its_ratio(run, capsys):
    fast = replace(run, steps={1: scalars(0.5), 2: scalars(0.5, False)}, wall=25.0)
    turn = {("cold", "plain"): run, ("cold", "ngram"): fast}
    runs.report([turn], "cold", ["plain", "ngram"])
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


def test_the_training_command_takes_a_turn_for_its_start_and_every_step(tmp_path):
    config = tmp_path / "tiny.yaml"
    config.write_text(
        f"""
run: {tmp_path / "run"}
model: {{init: {{model_type: qwen2, hidden_size: 16, num_hidden_layers: 1, num_attention_heads: 2, num_key_value_heads: 1,
                intermediate_size: 16, max_position_embeddings: 64}}}}
data: {{task_args: {{min_length: 3, max_length: 4, modulus: 5}}, max_prompt_tokens: 8}}
rollout: {{prompts: 2, samples: 2, max_new_tokens: 8, compile_cache: {os.environ["TLT_JAX_TEST_PROGRAMS"]}}}
speculation: {{drafter: none}}
sft: {{steps: 0}}
train: {{steps: 1}}
eval: {{every: 0}}
"""
    )
    run = end_to_end.started(["--config", str(config)], 1, tmp_path / "turns")
    turns = 0
    try:
        assert (run.turn, run.run.poll()) == (1, None), run.output.read_text()
        while run.go_on():
            turns += 1
    finally:
        run.end()
    assert (run.run.returncode, turns) == (0, 1), run.output.read_text()
    steps = runs.read_steps(tmp_path / "run")
    assert list(steps) == [1]
    inside = sum(step["timing_s/step"] for step in steps.values())
    assert inside < run.seconds


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


# Learning

RIGHT = {0: 2, 4: 6}  # of 8 answers, by step of the evaluation
PLAIN_S, ADAPTIVE_S = [4.0, 6.0, 5.0, 9.0], [2.0, 3.0, 2.5, 4.5]


def judged(row: int, is_correct: bool) -> Record:
    more = {"reference": "5", "split": "eval", "sample": 0, "is_correct": is_correct}
    return Record(None, "2 3:", "5.", float(is_correct), 3, "stop", id=f"eval-{row}", **more)


def write(folder, seconds):
    """A run folder of four steps with one answer each."""
    for step, right in RIGHT.items():
        answers = [judged(row, row < right) for row in range(8)]
        evaluations.keep(evaluations.path_of(folder, step), step, answers)
    (folder / "completions").mkdir()
    lines = []
    for step, spent in enumerate(seconds, 1):
        answer = {"uid": 0, "completion": "5.", "length": 3, "finish": "stop", "reward": 1.0}
        answer |= {"logprob": -spent, "accepted": int(spent)}
        (folder / "completions" / f"{step:06d}.jsonl").write_text(json.dumps(answer) + "\n")
        lines.append({"step": step, "timing_s/step": spent, "timing_s/rollout": spent / 2})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "hf").mkdir()
    (folder / "hf" / "model.safetensors").write_bytes(b"weights")
    return str(folder)


@pytest.mark.parametrize(("right", "count"), [(0, 8), (31, 256), (128, 256), (256, 256)])
def test_the_interval_of_a_share_is_wilsons(right, count):
    wanted = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert learning.wilson(right, count) == pytest.approx((wanted.low, wanted.high), abs=1e-6)


def test_equal_runs_are_equal_whatever_their_seconds_and_the_seconds_are_of_both(tmp_path, capsys):
    plain, adaptive = write(tmp_path / "a", PLAIN_S), write(tmp_path / "b", ADAPTIVE_S)
    learning.main(["--plain", plain, "--adaptive", adaptive])
    printed, _, below = capsys.readouterr().out.strip().partition("\n\n")
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in printed.splitlines()]
    header, _, *rows = cells
    assert tuple(header) == learning.COLUMNS
    first, last = (dict(zip(header, row, strict=True)) for row in rows)
    for row, wanted in (
        (first, ["0", "2", "0.25", "yes", "nan"]),
        (last, ["4", "6", "0.75", "yes", "5.5"]),
    ):
        names = (header[0], "right", "accuracy", "equal", "plain_step_s")
        assert [row[name] for name in names] == wanted
    assert last["adaptive_step_s"] == "2.75"
    assert below.startswith(
        "steps 1 to 4: all answers are equal\nsteps 1 to 4, step: plain / adaptive 2.00 ("
    )
