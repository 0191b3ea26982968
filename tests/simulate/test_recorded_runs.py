"""A run that is recorded and simulated again: costs, lengths and seconds come back."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict, replace

import numpy as np
import pytest

from tlt_jax.config import load as loading
from tlt_jax.data import packing
from tlt_jax.errors import ConfigError
from tlt_jax.simulate import acceptance, cost_table, lengths, record
from tlt_jax.simulate.acceptance import Acceptances, Curve
from tlt_jax.simulate.cost_table import CostRow, CostTable, normal
from tlt_jax.simulate.lengths import LogNormal
from tlt_jax.simulate.run import SimulatedTrainer, World, simulate
from tlt_jax.spec_decode.strategy import NGRAM, PLAIN, parse
from tlt_jax.train import step_metrics

CONFIG = """
run: runs/none
mesh: {data: 2, model: 1}
rollout: {prompts: 4, samples: 4, max_new_tokens: 300, chunk: 16}
speculation: {drafter: ngram, strategies: ["3_1_4"]}
model: {init: {model_type: qwen2, hidden_size: 64, num_hidden_layers: 2, num_attention_heads: 4, vocab_size: 512,
        num_key_value_heads: 2, intermediate_size: 128, max_position_embeddings: 512}}
data: {task: fold, max_prompt_tokens: 64}
train: {steps: 5, row_tokens: 512}
"""
STEPS, ACCEPTED = 5, (0.8, 0.8, 0.8)
TREE = parse("3_1_4")
COMPILE_S = 0.01  # so that every program is worth its compilation


def seconds_of(batch, strategy):
    """A round of this made-up device."""
    return 4e-3 + 3e-4 * batch + (0.0 if strategy == PLAIN else 2e-3 + 2e-4 * batch)


def table(config):
    """The costs of the made-up device: rounds of both batches, updates of 1 to 20 accumulation steps, and calls."""
    rows = [
        CostRow("round", seconds_of(batch, arm), "measured", batch, 512, 0.0, arm, "" if arm == PLAIN else NGRAM)
        for batch in (2, 8)
        for arm in (PLAIN, TREE)
    ]  # fmt: skip
    held = packing.step_tokens(config) / config.mesh.data
    rows += [CostRow("update", 0.1 + 0.2 * count, "measured", tokens=count * held) for count in range(1, 20)]  # fmt: skip
    calls = {"publish": 0.125, "reward": 0.25, "other": 0.0625, "compile": COMPILE_S}
    return CostTable((*rows, *(CostRow(name, each, "measured") for name, each in calls.items())))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The run folder of a simulated run: its chunks, answers and scalars, as a real run writes them."""
    path = tmp_path_factory.mktemp("run")
    (path / "config.yaml").write_text(CONFIG)
    config = loading.read_resolved(path / "config.yaml")
    accepted = Acceptances(ACCEPTED, Curve((0.1,), (0.9,)))
    world = World(table(config), LogNormal(80, 0.8), accepted, STEPS, 2)
    one, results, scalars = SimulatedTrainer(config, "ngram", world), [], []
    rollout = one.run.engine.run

    requests = []

    def watched(*inputs, **rest):
        requests.append(inputs[0])
        found = rollout(*inputs, **rest)
        results.append(found[0])
        return found

    one.run.engine.run = watched
    for name in ("speculation", "completions"):
        (path / name).mkdir()
    for number in range(1, STEPS + 1):
        one.step()
        step = one.reported
        chunks = [asdict(step_metrics.line(each)) for each in results[-1].measurements]
        answers = [
            {"uid": each.uid, "group": each.prompt, "length": len(each.tokens), "finish": each.finish}
            for each in results[-1].completions
        ]  # fmt: skip
        write(path / f"speculation/{number:06d}.jsonl", chunks)
        write(path / f"completions/{number:06d}.jsonl", answers[::-1])
        scalars.append(scalars_of(config, number, step, results[-1], requests[-1].prompts))
    write(path / "metrics.jsonl", scalars)
    (path / "log.txt").write_text(
        f"compiled chunk of 16 rounds, off, of 8 x 512, group 0 in {COMPILE_S} s: 1 MiB\n"
    )
    return path


def write(path, lines):
    path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))


def scalars_of(config, number, step, result, prompts):
    """The scalars of a step that a recording reads."""
    parts = {"publish": "update_weights", "other": "other"}
    found = {f"timing_s/{parts.get(name, name)}": each for name, each in step.seconds.items()}
    mean = float(np.mean([len(prompt) for prompt in prompts]))
    tokens = result.stats["tokens"] + 16 * mean
    longest = [len(prompts[one.prompt]) + len(one.tokens) for one in result.completions]
    whole = packing.steps(config, longest) * packing.step_tokens(config)
    return {
        "step": number, "timing_s/step": step.total, "perf/compiles": 0, "perf/total_num_tokens": tokens,
        "actor/packed_ratio": tokens / whole, "prompt_length/mean": mean, "perf/row_rounds": result.stats["row_rounds"],
        "perf/compile_s/rollout": step.compiling,
    } | found  # fmt: skip


def test_the_costs_of_a_simulated_run_are_recorded_as_they_are(folder):
    config = loading.read_resolved(folder / "config.yaml")
    given, found = table(config), CostTable(tuple(record.of_runs([folder])[0]))
    measured = {row: normal(row.strategy, row.drafter) for row in found.of("round")}
    assert PLAIN in measured.values()
    for row, arm in measured.items():
        expected = given.round_seconds(row.rows, row.slots, arm, 0.0)
        assert row.seconds == pytest.approx(expected, rel=0.05)  # those read together share it
    assert len(measured) >= 2, "plain rounds, and rounds that draft"
    for row in found.of("update"):
        assert row.seconds == pytest.approx(given.seconds("update", row.tokens), rel=0.01)
    for program in ("publish", "reward", "other"):
        assert found.seconds(program) == pytest.approx(given.seconds(program))


def drafting(folder, path, devices=1):
    """A copy of the run, in `path`, that kept only the chunks that drafted."""
    for name in ("metrics.jsonl", "log.txt"):
        (path / name).write_text((folder / name).read_text())
    (path / "config.yaml").write_text(CONFIG.replace("model: 1", f"model: {devices}"))
    (path / "speculation").mkdir()
    shutil.copytree(folder / "completions", path / "completions")
    for one in (folder / "speculation").iterdir():
        lines = [line for line in one.read_text().splitlines(keepends=True) if '"off"' not in line]
        (path / "speculation" / one.name).write_text("".join(lines))
    return path


def test_runs_that_always_drafted_are_recorded_with_one_that_did_not(folder, tmp_path):
    (tmp_path / "two").mkdir()
    with pytest.raises(ConfigError, match="their data groups have different devices"):
        record.of_runs([folder, drafting(folder, tmp_path / "two", devices=2)])
    other = drafting(folder, tmp_path)
    with pytest.raises(ConfigError, match="no plain chunks were kept to measure"):
        record.of_runs([other])
    rows, facts = record.of_runs([folder, other])
    alone = record.of_runs([folder])[0]
    plain = [row for row in alone if row.program == "round" and row.strategy == PLAIN]
    assert plain and len(rows) == 2 * len(alone) - len(plain)
    assert "features" not in facts, "n-grams need none"
    assert facts["measured"] == f"{folder.name}, 5 steps, {other.name}, 5 steps"
    both, one = CostTable(tuple(rows)), CostTable(tuple(alone))
    for row in one.of("round"):
        cell = row.rows, row.slots, normal(row.strategy, row.drafter), 0.0
        assert both.round_seconds(*cell) == pytest.approx(one.round_seconds(*cell), rel=0.01)


def test_a_run_that_is_simulated_again_takes_as_long_step_by_step(folder, tmp_path):
    """With its own costs, lengths and acceptance; prefills, which are not recorded, follow from the rounds."""
    config = loading.read_resolved(folder / "config.yaml")
    path = tmp_path / "costs.csv"
    path.write_text(cost_table.text_of(*record.of_runs([folder])))
    accepted = acceptance.of(str(folder))
    world = World(cost_table.read(path), lengths.recorded(folder), accepted, STEPS, 2)
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = simulate(config, "ngram", world)
    ratios = {
        part: [step.seconds[part] / line[f"timing_s/{part}"] for step, line in zip(steps, lines, strict=True)]
        for part in ("rollout", "update")
    }  # fmt: skip
    assert ratios["update"] == pytest.approx([1.0] * STEPS, abs=0.08)
    # What a round accepts is drawn anew from the counted levels: a chunk that waits for one of three rows may take 13 rounds
    # for 4.
    assert ratios["rollout"] == pytest.approx([1.0] * STEPS, abs=0.15)
    assert np.mean(ratios["rollout"]) == pytest.approx(1.0, abs=0.03)


def test_an_update_takes_whole_accumulation_steps(folder):
    """A row of 512 tokens for each of two groups: three answers of 300 tokens need three rows, so two steps."""
    config = loading.read_resolved(folder / "config.yaml")
    assert packing.step_tokens(config) == 1024
    assert [packing.steps(config, [300] * count) for count in (1, 2, 3, 4, 5)] == [1, 1, 2, 2, 3]
    assert packing.steps(config, [200, 300, 212, 312, 9999]) == 2
    halves = replace(config, algorithm=replace(config.algorithm, minibatches=2))
    assert [packing.steps(halves, [300] * count) for count in (1, 2, 4, 6)] == [2, 2, 2, 4]
    # The answers of the first prompts fill no row of the second minibatch.
    assert packing.steps(config, [300, 200, 300, 200, 500, 500]) == 2
    assert packing.steps(halves, [300, 200, 300, 200, 500, 500]) == 3
