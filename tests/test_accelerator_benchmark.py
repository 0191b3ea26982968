"""The benchmark of an accelerator: every section measures, its bounds are those counted by hand, and it ends in time."""

from __future__ import annotations

import ast
import json
import math
import re
import time
from types import SimpleNamespace

import pytest

from benchmarks.device import accelerator, sections, setup, tune
from benchmarks.device.setup import SHAPES, Device, TimeIsOver
from benchmarks.device.tune import Case
from tlt_jax import kernels, make_tiny_model
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import attention_sizes, tree_attention, triton_support


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
    assert bool(rows) == (section not in ("graphs", "tune attention", "tune products")), (
        "CUDA graphs and Triton are a GPU's"
    )
    for row in rows:
        assert len(row) == len(sections.COLUMNS) - 1
        case, milliseconds, rate, *_ = row
        assert math.isfinite(rate) and (milliseconds > 0 or "without drafting" in case)
    assert len({row[0] for row in rows}) == len(rows)


def test_the_main_job_says_what_it_was_not_given(monkeypatch, capsys):
    for name in sections.JOB_NEEDS:
        monkeypatch.delenv(name, raising=False)
    assert not list(sections.job(device()))
    assert capsys.readouterr().out.strip() == "job: not run, MODEL_DIR and GSM8K_DIR not given"


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


def test_without_triton_kernels_there_is_nothing_to_tune(capfd):
    assert not list(tune.tune(device(), tune.attention_cases))
    assert "there is nothing to tune" in capfd.readouterr().out


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


def test_attention_is_tuned_with_the_sizes_that_its_table_takes(monkeypatch, capfd):
    """XLA's form stands in for the kernel; of one candidate its result is wrong."""

    def attend(*given):
        *given, arrivals, capability, sizes = given
        assert capability == 90 and arrivals.shape == (
            *given[0].shape[:2],
            sizes.tiles(2 * given[0].shape[3]),
        )
        return tree_attention.attend_in_xla(*given, False) + (sizes.slots == 128), arrivals

    monkeypatch.setattr(
        kernels, "tree_attention_triton", SimpleNamespace(attend=attend), raising=False
    )
    monkeypatch.setattr(triton_support, "capability", lambda mesh: 90)
    monkeypatch.setattr(tune, "NODES", (1,))
    monkeypatch.setattr(tune, "WIDTHS", (16,))
    rows = list(tune.tune(device(), tune.attention_cases))
    assert {row[0].partition(", Sizes")[0] for row in rows} == {
        "tree attention, 2 queries, width 16, 128 slots"
    }
    assert rows and not any("slots=128" in row[0] for row in rows)
    printed = capfd.readouterr().out
    assert "Sizes(queries=16, slots=128, split=128, warps=4, stages=3): differs by" in printed
    table = ast.literal_eval(re.sub(r"Sizes\((.*)\)", r'"\1"', printed.partition("TABLE = ")[2]))
    ((kind, *key),) = table
    assert kind == meshes.device_kind(make_mesh(1, 1)) and key == [2, 16, 128, 4]


@pytest.mark.parametrize("width", tune.WIDTHS)
@pytest.mark.parametrize("nodes", tune.NODES)
def test_candidates_of_attention_are_some_and_begin_with_the_rule(nodes, width):
    queries = 7 * nodes
    found = tune.candidates(queries, width, 4096)
    assert found[0] == attention_sizes.rule(queries, width, 2)
    assert 10 <= len(found) <= 30
    assert all(one.split >= attention_sizes.SLOTS_PER_QUERY * queries for one in found)


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
