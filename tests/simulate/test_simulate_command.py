"""`python -m tlt_jax.simulate`: what it prints and writes, what it refuses in one line, and the table of a recorded run."""

from __future__ import annotations

import json
import os
from dataclasses import replace

import numpy as np
import pytest

from tlt_jax.errors import ConfigError, DataError
from tlt_jax.simulate import __main__ as command, acceptance, cost_table, estimate, record, report
from tlt_jax.simulate.acceptance import Curve
from tlt_jax.simulate.report import Step
from tlt_jax.spec_decode.strategy import PLAIN, parse
from tlt_jax.tuner.cost_model import Networks

SMALL = """
run: runs/none
mesh: {data: 2, model: 1}
rollout: {prompts: 4, samples: 2, max_new_tokens: 300, chunk: 16}
speculation: {strategies: ["3_1_4"]}
model: {init: {model_type: qwen2, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 512,
        num_key_value_heads: 2, intermediate_size: 128, max_position_embeddings: 512}}
data: {task: fold}
train: {steps: 3}
"""


@pytest.fixture
def config(tmp_path, monkeypatch):
    """The path of a small configuration; arms run in this process."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: {0})
    (tmp_path / "small.yaml").write_text(SMALL)
    return str(tmp_path / "small.yaml")


def test_it_prints_a_line_for_each_arm_and_writes_every_step(config, tmp_path, capsys):
    out, trace = str(tmp_path / "out.json"), tmp_path / "pictures/step.json"
    words = ["--config", config, "--arms", "plain,adaptive", "--json", out, "--explain", "--timeline", str(trace)]  # fmt: skip
    assert command.main([*words, "--rollout.samples", "3"]) == 0
    text = capsys.readouterr().out
    assert "simulated, not measured: 3 steps of 4 prompts x 3 answers" in text
    assert [line.split()[0] for line in text.splitlines() if line[:4] in ("  pl", "  ad")] == [
        "plain", "adaptive", "plain", "adaptive", "plain:", "adaptive:",
    ]  # fmt: skip
    found = json.loads((tmp_path / "out.json").read_text())["arms"]
    assert found.keys() == {"plain", "adaptive"} and len(found["plain"]["steps"]) == 3
    mean = found["plain"]["mean"]
    assert mean["step"] == pytest.approx(sum(mean[part] for part in report.PARTS))
    assert "  round: measured" in text and "updates 10 % faster" in text
    assert 0.02 < mean["round_error"] < 0.3
    kinds = {event["name"] for event in json.loads(trace.read_text())["traceEvents"]}
    assert {"prefill", "decode"} <= kinds


def test_several_numbers_of_groups_have_a_line_each_and_a_picture(config, tmp_path, capsys):
    words = ["--config", config, "--arms", "plain,ngram", "--groups", "1,2,6", "--steps", "2", "--warm"]  # fmt: skip
    picture, out = tmp_path / "pictures/groups.png", tmp_path / "out.json"
    assert command.main([*words, "--plot", str(picture), "--json", str(out)]) == 0
    head, *lines = [line.split() for line in capsys.readouterr().out.splitlines()[-4:]]
    assert head == ["groups", "plain", "s", "gain", "ngram", "s", "gain"]
    assert [line[0] for line in lines] == ["1", "2", "6"]
    seconds = [float(line[1]) for line in lines]
    assert seconds == sorted(seconds, reverse=True), "more groups never slow a step"
    assert all(float(line[4]) == pytest.approx(float(line[1]) / float(line[3]), rel=0.02) for line in lines)  # fmt: skip
    assert json.loads(out.read_text())["values"].keys() == {"1", "2", "6"}
    assert picture.stat().st_size > 1000


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--arms", "plain,fast"], "'fast' is none of plain"),
        (["--groups", "1..4"], "--groups 1..4: give numbers from 1"),
        (["--plot", "x.png"], "--plot x.png is of several numbers of data groups"),
        (["--steps", "-1"], "--steps -1: give 1 or more"),
        (["--costs", "b300"], "no such file, table or device"),
        (["--mesh.model", "2"], "and mesh.model is 2: set --mesh.model 1"),
        (["--lengths", "none.yaml"], "no run folder, MEDIAN,SIGMA or preset"),
        (["--groups", "0"], "give numbers from 1"),
        (["--rollout.sample", "2"], "rollout.sample"),
        (
            ["--environment.path", "toy_environments:Echo"],
            "one turn alone: set environment.path ''",
        ),
        (["--record", "no", "--costs", "x.csv"], "leave out --config, only --costs goes with it"),
    ],
)
def test_a_mistake_ends_with_one_line_that_names_it(config, words, message, capsys):
    refused(["--config", config, *words], message, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--costs", "x.csv"], "nowhere is no run folder"),
        ([], "name the file to write"),
        (["--costs", "x.csv", "--groups", "2"], "reads run folders alone: leave out --groups"),
        (["--costs", "x.csv", "--rollout.prompt", "3"], "leave out --rollout.prompt"),
    ],
)
def test_recording_reads_run_folders_alone(words, message, capsys):
    refused(["--record", "nowhere", *words], message, capsys)


def refused(words, message, capsys):
    """The command ends with one line."""
    with pytest.raises(SystemExit) as end:
        command.main(words)
    error = capsys.readouterr().err
    assert end.value.code == 2 and message in error and error.count("\n") == 1


def test_costs_of_a_device_are_estimated_for_the_policy_of_the_configuration(config, capsys):
    parsed = command.loading.parse(["--config", config, "--mesh.model", "2"])
    table = command.costs_of("v5p", parsed)
    assert isinstance(table, estimate.EstimatedTable) and table.estimate.devices == 2
    assert table.estimate.sizes.layers == 2 and table.round_seconds(1, 256, PLAIN, 100.0) > 0
    words = ["--config", config, "--costs", "v5p", "--arms", "plain", "--steps", "1"]
    assert command.main(words) == 0
    assert "of h200's rounds" in capsys.readouterr().out


def test_rounds_of_a_table_are_those_of_the_policys_experts(config):
    experts = {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 2}
    dense = command.loading.parse(["--config", config])
    mixed = replace(dense, model=replace(dense.model, init=dense.model.init | experts))
    found = [command.costs_of(command.BASE, one).networks for one in (dense, mixed)]
    assert found == [Networks(), Networks(None, 16, 2)]


def test_a_policy_whose_path_names_an_unset_variable_is_simulated_by_a_table(config, tmp_path):
    text = SMALL.replace("model: {init: {", "model: {path: $NOT_SET_HERE/x, init: {").replace(
        "vocab_size: 512,", ""
    )
    (tmp_path / "small.yaml").write_text(text)
    assert command.main(["--config", config, "--arms", "plain", "--steps", "1"]) == 0


def step(total, rollout, bubble):
    parts = {"rollout": rollout, "update": total - rollout}
    return Step(parts, 10, bubble, 0.0, 0.0, 0.0, {"off": rollout}, 0.1)


def test_gains_are_those_counted_by_hand():
    halves = {"plain": step(10, 8, 0.5), "ngram": step(5, 3, 0.5)}
    results = {name: [step(99, 9, 0.0), one] for name, one in halves.items()}
    lines = report.table(results).splitlines()
    assert lines[-1].split() == ["ngram", "5.00", "3.00", "2.00", "50%", "-", "2.00"]
    first, *_ = report.changes(report.summary([step(10, 8, 0.5)]))
    assert first == "no bubble in the rollout: 1.67 times as fast"


# Recording


def written(path, lines):
    """The path of a file with these lines of JSON."""
    path.write_text("".join(json.dumps(one) + "\n" for one in lines))
    return path


@pytest.fixture
def folder(tmp_path):
    """A run's folder with two steps: chunks, scalars, a log and a timeline."""
    (tmp_path / "config.yaml").write_text(SMALL.replace("model: 1}", "model: 1, fake_devices: 2}"))
    for name in ("speculation", "timeline", "completions"):
        (tmp_path / name).mkdir()
    (tmp_path / "completions/000002.jsonl").write_text("{}\n")
    chunks = [
        (2, "ngram:7_1_8", 8, 0.08, False), (4, "off", 16, 0.16, True), (4, "off", 16, 0.48, True), (4, "off", 16, 0.32, True),
        (4, "off", 16, 9.0, False), (4, "off", 2, 9.0, True), (4, "learned:3_1_4", 8, 0.24, True),
        (2, "ngram:3_1_4", 8, 0.08, True),
    ]  # fmt: skip
    lines = [
        {"batch": batch, "slots": 256, "strategy": name, "rounds": rounds, "seconds": seconds, "is_timed": timed,
         "accepted": [40, 30, 20, 10] if name.startswith("ngram:3") else []}
        for batch, name, rounds, seconds, timed in chunks
    ]  # fmt: skip
    written(tmp_path / "speculation/000001.jsonl", lines)
    parts = {"step": 9.0, "update": 3.5, "old_log_prob": 0.5, "update_weights": 0.5, "reward": 0.25}
    parts |= {"metrics": 0.1, "other": 0.1}
    scalars = {f"timing_s/{name}": seconds for name, seconds in parts.items()}
    scalars |= {"perf/total_num_tokens": 3000, "drafter/tokens": 1024, "drafter/steps": 4}
    first = scalars | {"step": 1, "timing_s/update": 30.0, "perf/compile_s/update": 20.0}
    written(tmp_path / "metrics.jsonl", [first, scalars | {"step": 2}])
    (tmp_path / "log.txt").write_text(
        "compiled chunk of 16 rounds, off, of 4 x 256, group 0 in 2.00 s: 1 MiB\n"
        "compiled chunk of 16 rounds, off, of 2 x 256, group 0 in 4.00 s: 1 MiB\n"
        "compiled prefill of 4 x 16, group 0 in 9.00 s: 1 MiB\n"
        "loaded chunk of 16 rounds, off, of 4 x 256, group 1 in 0.25 s: 1 MiB\n"
    )
    spans = [
        (0, 0, "prefill", 3.0, 1.0), (0, 0, "decode", 4.0, 2.0), (0, 0, "decode", 6.5, 1.0), (0, 1, "decode", 3.5, 1.0),
        (0, 1, "decode", 4.75, 1.0), (0, 1, "train", 6.0, 0.125), (1, 0, "rollout", 1.0, 9.0),
    ]  # fmt: skip
    events = [
        {"pid": pid, "tid": row, "name": name, "ph": "X", "ts": 1e6 * start, "dur": 1e6 * seconds}
        for pid, row, name, start, seconds in spans
    ]
    (tmp_path / "timeline/000002.json").write_text(json.dumps({"traceEvents": events}))
    return tmp_path


def test_the_rows_of_a_run_are_the_medians_of_what_it_kept(folder):
    rows, facts = record.of_runs([folder])
    tree = parse("3_1_4")
    found = {(row.rows, row.strategy, row.drafter): row.seconds for row in rows if row.rows}
    assert found[4, PLAIN, ""] == pytest.approx(0.02), "short and untimed ones do not count"
    assert found[4, tree, "eagle3"] == pytest.approx(0.03)
    assert found[2, tree, "ngram"] == pytest.approx(0.01)
    calls = {row.program: row for row in rows if not row.rows}
    assert calls["update"][1:8] == (4.0, "measured", 0, 0, 0.0, PLAIN, ""), "with log-probs"
    # Of a data group: one accumulation step of two rows of 1,792 tokens, padding included.
    assert (calls["update"].tokens, calls["micro_step"].tokens) == (1792, 256)
    seconds = {"micro_step": 0.125, "compile": 3.0, "other": 0.2, "begin": 2.0, "host": 0.375}
    for name, each in seconds.items():
        assert calls[name].seconds == pytest.approx(each), name
    assert facts["features"] == "captured", "the learned drafter drafted"
    assert facts["device"] == "cpu" and "save" not in {row.program for row in rows}


def test_a_recorded_table_is_read_back_and_predicts_its_rounds(folder, tmp_path, capsys):
    assert command.main(["--record", str(folder), "--costs", str(tmp_path / "costs.csv")]) == 0
    assert "11 rows" in capsys.readouterr().out
    table = cost_table.read(tmp_path / "costs.csv")
    assert table.round_seconds(4, 256, PLAIN, 0.0) == pytest.approx(0.02, rel=0.02)
    assert np.isclose(table.node, 1 / 8)


def test_chunks_from_the_compile_cache_take_as_long_as_loading(folder):
    """Of each chunk the first time: another group's 0.25 s do not count."""
    tree = "{} chunk of 16 rounds, learned:3_1_4, of {} x 256, group 0 in {} s: 1 MiB\n"
    path = folder / "log.txt"
    log = path.read_text().replace("compiled chunk", "loaded chunk")
    drafting = [("compiled", 4, 6.0), ("loaded", 2, 1.0), ("loaded", 8, 0.5), ("loaded", 4, 9.0)]
    path.write_text(log + "".join(tree.format(*one) for one in drafting))
    found = [row for row in record.of_runs([folder])[0] if row.program == "compile"]
    plain, drafts = sorted(found, key=lambda row: row.strategy.depth)
    assert (plain.seconds, plain.note) == (3.0, "loaded 2 chunks")
    assert (drafts.seconds, drafts.note) == (1.0, "compiled 1, loaded 2 chunks")


def test_a_run_without_chunks_has_no_costs_and_no_acceptance(folder):
    (folder / "speculation/000001.jsonl").unlink()
    with pytest.raises(ConfigError, match="record a run with --speculation.drafter ngram"):
        record.of_runs([folder])
    with pytest.raises(DataError, match="measured no drafter"):
        acceptance.of(str(folder))


# Acceptance


def test_ngrams_accept_by_depth_what_the_chunks_of_a_run_counted(folder):
    """Of 100 rounds 60, 30 and 10 accepted at least 1, 2 and 3 tokens."""
    found = acceptance.of(str(folder))
    assert found.ngram == pytest.approx((0.6, 0.5, 1 / 3))
    assert found.learned == acceptance.NEW.learned and "the learned drafter as in" in found.source
    path = folder / "speculation/000001.jsonl"
    path.write_text(path.read_text().replace("ngram:", ""))
    text = SMALL.replace("speculation: {", "speculation: {drafter: ngram, ")
    (folder / "config.yaml").write_text(text)
    assert acceptance.of(str(folder)).ngram == found.ngram, "the only drafter has no name"


def test_a_learning_curve_is_recovered_from_the_metrics_of_a_run(folder):
    """40 steps of 5,000 tokens, with errors of 0.01 in each measurement."""
    curve, random = Curve((0.1, 0.3), (0.8, 0.7), scale=2e4, power=0.5), np.random.default_rng(0)
    lines = []
    for step in range(1, 41):
        levels = curve.levels((step - 1) * 5000, 2) + random.normal(0, 0.01, 2)
        lines.append({"step": step, "drafter/update_tokens": 4000, "drafter/tokens": 1000})
        lines[-1] |= {f"drafter/acceptance@{depth}": level for depth, level in enumerate(levels, 1)}
    written(folder / "metrics.jsonl", lines)
    found = acceptance.of(str(folder)).learned
    for tokens in (0, 2e4, 2e5):
        np.testing.assert_allclose(found.levels(tokens, 2), curve.levels(tokens, 2), atol=0.03)


def test_chains_of_the_learned_drafter_say_what_it_accepts(folder):
    """Chains of depth 3 and 1 of one step: 200 rounds tried depth 1, and 50 and 20 of 100 depths 2 and 3 after it."""
    lines = [
        {"strategy": "learned:3_1_4", "accepted": [50, 30, 10, 10]},
        {"strategy": "learned:1_1_2", "accepted": [40, 60]},
        {"strategy": "learned:6_4_16", "accepted": [0, 0, 0, 9, 9, 9, 9]},
        {"strategy": "ngram:3_1_4", "accepted": [9, 0, 0, 1]},
    ]
    written(folder / "speculation/000001.jsonl", lines)
    found = acceptance.of(str(folder))
    assert found.learned.levels(0, 3) == pytest.approx((110 / 200, 20 / 50, 10 / 20))
    assert found.learned.levels(1e9, 3) == found.learned.levels(0, 3), "one step shows no rise"
    assert found.ngram == pytest.approx((0.1, 0.995, 0.995))


def test_a_few_longer_chains_do_not_replace_the_others(folder):
    """Six steps with chains of depth 2, and in one of them also of depth 4."""
    usual = {"strategy": "learned:2_1_3", "accepted": [20, 40, 40]}
    longer = {"strategy": "learned:4_1_5", "accepted": [2, 4, 4, 0, 0]}
    for step in range(1, 7):
        lines = [usual, longer] if step == 6 else [usual]
        written(folder / f"speculation/{step:06d}.jsonl", lines)
    found = acceptance.of(str(folder)).learned
    assert found.levels(0, 2) == pytest.approx((0.8, 0.5), abs=0.01)
    assert len(found.start) == 2


def test_chains_of_one_step_do_not_replace_the_curve_of_the_metrics(folder):
    curve = Curve((0.1,), (0.8,), scale=2e3, power=1.0)
    lines = [
        {"step": step, "drafter/update_tokens": 1000, "drafter/acceptance@1": curve.levels(1e3 * (step - 1), 1)[0]}
        for step in range(1, 9)
    ]  # fmt: skip
    written(folder / "metrics.jsonl", lines)
    one = {"strategy": "learned:1_1_2", "accepted": [9, 1]}
    written(folder / "speculation/000001.jsonl", [one])
    found = acceptance.of(str(folder)).learned
    for tokens in (0, 7000):
        assert found.levels(tokens, 1) == pytest.approx(curve.levels(tokens, 1), abs=0.01)
