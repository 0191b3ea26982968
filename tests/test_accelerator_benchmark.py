"""The benchmark of an accelerator: every section measures, its bounds are those counted by hand, and it ends in time."""

from __future__ import annotations

import json
import math
import time

import pytest

from benchmarks.device import accelerator, sections, setup
from benchmarks.device.setup import SHAPES, Device, TimeIsOver
from tlt_jax import make_tiny_model
from tlt_jax.distributed.mesh import make_mesh


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
    assert bool(rows) == (section != "graphs"), "CUDA graphs are a GPU's"
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
    """By hand: tiny has matrices of 64 x (64 + 2 * 32 + 64 + 3 * 128) in 2 layers, norms and biases, and a head of 256 x 64."""
    monkeypatch.setattr(setup, "seconds", lambda call: 1.0)
    one = device()
    _, flop = sections.update_seconds(one, one.model(), 2, 128)
    matrices = 2 * 64 * (64 + 2 * 32 + 64 + 3 * 128) + 256 * 64
    vectors = 2 * (2 * 64 + 64 + 2 * 32) + 64
    causal = 2 * 64 * 128  # layers, width of the heads, tokens
    assert flop == 6 * 2 * 128 * (matrices + vectors + causal)


def test_the_bound_of_decoding_is_weights_and_half_full_cache(monkeypatch):
    monkeypatch.setattr(setup, "round_seconds", lambda *given: 1.0)
    monkeypatch.setattr(setup, "copy_rate", lambda device: (1.0, 1.0))
    shares = [row[4] for row in sections.decode(device())]
    weights = 2 * 64 * (64 + 2 * 32 + 64 + 3 * 128) + 256 * 64 + 2 * (2 * 64 + 64 + 2 * 32) + 64
    cache = 2 * 2 * 32 * 64  # keys and values, layers, width, slots
    assert shares == [4 * (weights + batch * cache) for batch in (1, 4)]


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
