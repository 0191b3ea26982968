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
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from scipy import stats

from benchmarks.common import processes, timing
from benchmarks.common.results import MEASURED_WITH, ResultTable
from benchmarks.device import accelerator, sections, setup, tune
from benchmarks.device.setup import SHAPES, Device, TimeIsOver
from benchmarks.device.tune import Case
from benchmarks.whole_runs import end_to_end, learning, runs
from benchmarks.whole_runs.in_turns import Turns
from benchmarks.whole_runs.runs import Run
from tlt_jax import make_tiny_model
from tlt_jax.config import load as configuration
from tlt_jax.config.schema import Config, Log
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.metrics import Writer, evaluations
from tlt_jax.metrics.evaluations import Judged
from tlt_jax.metrics.writer import ChunkRecord, Record

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
    config = Config(run=str(tmp_path), log=Log(progress=False, texts_every=1))
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
    run = end_to_end.started(["--config", str(config)], 1, tmp_path / "turns")
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


def test_quick_is_two_arms_in_two_processes(tmp_path):
    args, _ = end_to_end.parse(["--work", str(tmp_path), "--quick"])
    assert list(end_to_end.arms_of(args)) == ["plain", "tlt"]
    assert (args.processes, args.by_step, args.caches) == (2, True, ["cold"])
    assert configuration.load(["--config", args.config]).mesh.data == 2


# Learning

RIGHT = {0: 2, 4: 6}  # of 8 answers, by step of the evaluation
PLAIN_S, ADAPTIVE_S = [4.0, 6.0, 5.0, 9.0], [2.0, 3.0, 2.5, 4.5]


def judged(row: int, is_correct: bool) -> Judged:
    reward = float(is_correct)
    return Judged("eval", f"eval-{row}", 0, "2 3:", "5.", "5", reward, is_correct, 3, "stop")


def write(folder, seconds, text="5.", weights=b"weights"):
    """A run folder of four steps with one answer each, in which the last answer is `text`."""
    for step, right in RIGHT.items():
        answers = [judged(row, row < right) for row in range(8)]
        evaluations.keep(evaluations.path_of(folder, step), step, answers)
    (folder / "completions").mkdir()
    lines = []
    for step, spent in enumerate(seconds, 1):
        found = text if step == len(seconds) else "5."
        answer = {"uid": 0, "completion": found, "length": 3, "finish": "stop", "reward": 1.0}
        answer |= {"logprob": -spent, "accepted": int(spent)}
        (folder / "completions" / f"{step:06d}.jsonl").write_text(json.dumps(answer) + "\n")
        lines.append({"step": step, "timing_s/step": spent, "timing_s/rollout": spent / 2})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "hf").mkdir()
    (folder / "hf" / "model.safetensors").write_bytes(weights)
    return folder


@pytest.fixture
def plain(tmp_path):
    return write(tmp_path / "plain", PLAIN_S)


def table(plain, adaptive, capsys, *more):
    """The rows of the printed table by step, and the lines below it."""
    learning.main(["--plain", str(plain), "--adaptive", str(adaptive), *more])
    printed, _, below = capsys.readouterr().out.strip().partition("\n\n")
    rows = [[cell.strip() for cell in row.strip("|").split("|")] for row in printed.splitlines()]
    header, _, *found = rows
    assert tuple(header) == learning.COLUMNS
    return {int(row[0]): dict(zip(header, row, strict=True)) for row in found}, below.splitlines()


@pytest.mark.parametrize(("right", "count"), [(0, 8), (31, 256), (128, 256), (256, 256)])
def test_the_interval_of_a_share_is_wilsons(right, count):
    wanted = stats.binomtest(right, count).proportion_ci(0.95, method="wilson")
    assert learning.wilson(right, count) == pytest.approx((wanted.low, wanted.high), abs=1e-6)


def test_equal_runs_are_equal_whatever_their_seconds_and_the_seconds_are_of_both(
    plain, tmp_path, capsys
):
    rows, below = table(plain, write(tmp_path / "adaptive", ADAPTIVE_S), capsys)
    assert {step: (row["right"], row["accuracy"]) for step, row in rows.items()} == {
        0: ("2", "0.25"),
        4: ("6", "0.75"),
    }
    assert {row["equal"] for row in rows.values()} == {"yes"}
    assert (rows[0]["plain_step_s"], rows[4]["plain_step_s"]) == ("nan", "5.5")
    assert rows[4]["adaptive_step_s"] == "2.75"
    assert below[0] == "steps 1 to 4: all answers are equal"
    assert below[1].startswith("steps 1 to 4, step: plain / adaptive 2.00 (")


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"text": "6."}, "step 4: 1 of 1 answers; the first is uid 0, whose completion is"),
        ({"weights": b"others"}, "the policies after the last step"),
    ],
)
def test_an_answer_or_a_weight_that_differs_is_named(plain, tmp_path, capsys, change, part):
    rows, below = table(plain, write(tmp_path / "adaptive", ADAPTIVE_S, **change), capsys)
    assert (rows[0]["equal"], rows[4]["equal"]) == ("yes", "no")
    assert part in below[0]


# An accelerator


def device(seconds: float = 600.0) -> Device:
    return Device(SHAPES["tiny"], make_mesh(1, 1), time.time() + seconds, 8)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """One call of each program is timed."""
    monkeypatch.setattr(setup, "REPEATS", (1, 0))


@pytest.fixture
def job_inputs(monkeypatch, tmp_path):
    """A model and problems in GSM8K's format, for the main job without a drafter."""
    for name, added in (("train", 3), ("test", 4)):
        rows = [
            {"question": f"{i} and {added} ducks?", "answer": f"Many.\n#### {i + added}"}
            for i in range(20)
        ]
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"{name}.jsonl").write_text(lines)
    sizes = ["--vocab-size", "300", "--hidden-size", "16", "--layers", "1", "--mlp-size", "32"]
    command = ["--data", str(tmp_path / "train.jsonl"), "--out", str(tmp_path / "model"), *sizes]
    assert make_tiny_model.main(command) == 0
    monkeypatch.setenv("MODEL_DIR", str(tmp_path / "model"))
    monkeypatch.setenv("GSM8K_DIR", str(tmp_path))
    monkeypatch.setattr(sections, "JOB_DRAFTERS", ("none",))


@pytest.mark.parametrize("section", sections.SECTIONS)
def test_every_section_measures(section, job_inputs):
    rows = list(sections.SECTIONS[section](device()))
    assert bool(rows) == (section not in ("graphs", "tune")), "CUDA graphs and Triton are a GPU's"
    for row in rows:
        assert len(row) == len(sections.COLUMNS) - 1
        case, milliseconds, rate, *_ = row
        assert math.isfinite(rate) and (milliseconds > 0 or "without drafting" in case)
    assert len({row[0] for row in rows}) == len(rows)


def test_the_operations_of_an_update_are_those_of_its_products(monkeypatch):
    """By hand: tiny has matrices of 64 x (64 + 2 * 32 + 64 + 3 * 128) in 2 layers, norms and biases, and a head of 256 x 64.

    A quarter of the 128 tokens of a row are a prompt, without a product with the head.
    """
    monkeypatch.setattr(setup, "seconds", lambda call: 1.0)
    one = device()
    _, flop = sections.update_seconds(one, one.model(), 2, 128)
    matrices = 2 * 64 * (64 + 2 * 32 + 64 + 3 * 128)
    vectors = 2 * (2 * 64 + 64 + 2 * 32)
    causal = 2 * 64 * 128  # layers, width of the heads, tokens
    assert flop == 6 * 2 * (128 * (matrices + vectors + causal) + 96 * 256 * 64)


def test_the_bound_of_decoding_is_weights_and_half_full_cache(monkeypatch):
    monkeypatch.setattr(setup, "round_seconds", lambda *given: 1.0)
    monkeypatch.setattr(setup, "copy_rate", lambda device: (1.0, 1.0))
    shares = [row[4] for row in sections.decode(device())]
    weights = 2 * 64 * (64 + 2 * 32 + 64 + 3 * 128) + 256 * 64 + 2 * (2 * 64 + 64 + 2 * 32) + 64
    cache = 2 * 2 * 32 * 64  # keys and values, layers, width, slots
    assert shares == [4 * (weights + batch * cache) for batch in (1, 4)]


def case(name: str, seconds: dict[str, float], wrong: str = "") -> Case:
    """A case whose candidates take these seconds, one of them with a wrong result."""
    return Case(
        name=name,
        candidates=tuple(seconds),
        error=lambda candidate: math.nan if candidate == wrong else 0.01,
        most=0.02,
        seconds=seconds.__getitem__,
        read=1e9,
        line=lambda candidate: f"{name!r}: {candidate}",
    )


def test_tuning_prints_the_fastest_of_the_right_candidates_as_code(capfd):
    cases = [case("one", {"a": 0.3, "b": 0.2}), case("two", {"c": 0.1, "d": 0.4}, wrong="c")]
    rows = list(tune.measured(cases, device()))
    assert [row[:3] for row in rows] == [
        ("one, a", 300.0, pytest.approx(1 / 300)), ("one, b", 200.0, 0.005), ("two, d", 400.0, 0.0025)
    ]  # fmt: skip
    printed = capfd.readouterr().out
    assert "two, c: differs by nan, at most 0.02" in printed
    assert printed.endswith("\nTABLE = {\n    'one': b,\n    'two': d,\n}\n")


def test_every_case_is_tuned_when_the_seconds_are_over(monkeypatch, capfd):
    monkeypatch.setattr(tune, "SECONDS", 0.0)
    cases = [case("one", {"a": 0.3, "b": 0.2}), case("two", {"c": 0.1, "d": 0.4})]
    assert [row[0] for row in tune.measured(cases, device())] == ["one, a", "two, c"]
    assert "one: 1 of 2 were tried in time" in capfd.readouterr().out
    with pytest.raises(TimeIsOver):
        next(tune.measured(cases, device(-1.0)))


def test_no_row_begins_when_time_is_over():
    with pytest.raises(TimeIsOver):
        next(sections.decode(device(-1.0)))


def test_the_command_prints_rows_keeps_them_and_names_what_it_left_out(tmp_path, capfd):
    path = tmp_path / "rows.csv"
    command = ["--shape", "tiny", "--csv", str(path)]
    assert accelerator.main([*command, "--sections", "copies"]) == 0
    printed = capfd.readouterr().out
    assert "| copies | product of 256 x 256 |" in printed and "not finished" not in printed
    assert len(path.read_text().splitlines()) == 4
    assert accelerator.main([*command, "--minutes", "0", "--sections", "copies,graphs"]) == 0
    printed = capfd.readouterr().out
    assert printed.strip().endswith(
        "not finished within 0 minutes: copies, graphs: loop in the graph, "
        "graphs: a graph a round, graphs: no graphs"
    )
    with pytest.raises(SystemExit):
        accelerator.main(["--sections", "decoding"])
    assert "--sections decoding: the sections are copies" in capfd.readouterr().err
