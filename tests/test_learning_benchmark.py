"""The table and the picture of learning: shares and intervals are right, and runs that differ are not called equal."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from PIL import Image
from scipy import stats

from benchmarks.whole_runs import learning
from tlt_jax.metrics import evaluations
from tlt_jax.metrics.evaluations import Judged

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


def test_seconds_are_of_the_steps_after_since(plain, tmp_path, capsys):
    adaptive = write(tmp_path / "adaptive", [4.0, 6.0, 10.0, 18.0])
    _, below = table(plain, adaptive, capsys, "--since", "2")
    assert below[2].startswith("steps 3 to 4, rollout: plain / adaptive 0.50 (")


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


def test_an_evaluation_that_differs_is_not_equal(plain, tmp_path, capsys):
    adaptive = write(tmp_path / "adaptive", ADAPTIVE_S)
    path = evaluations.path_of(adaptive, 0)
    first, *others = evaluations.read(path)
    evaluations.keep(path, 0, [replace(first, completion="4 + 1 = 5."), *others])
    rows, _ = table(plain, adaptive, capsys)
    assert (rows[0]["equal"], rows[4]["equal"]) == ("no", "yes")


def test_of_a_run_that_goes_on_the_shared_steps_are_compared(plain, tmp_path, capsys):
    adaptive = write(tmp_path / "adaptive", ADAPTIVE_S[:2], weights=b"none yet")
    evaluations.path_of(adaptive, 4).unlink()
    rows, below = table(plain, adaptive, capsys)
    assert list(rows) == [0] and below[0] == "steps 1 to 2: all answers are equal"


def test_the_picture_says_what_the_newest_rows_say(plain, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib", reason="the benchmarks extra")
    rows = tmp_path / "learning.csv"
    monkeypatch.setattr(learning, "RESULTS", rows)
    for folder in (plain, write(tmp_path / "adaptive", ADAPTIVE_S)):
        table(plain, folder, capsys, "--csv", str(rows))
    picture = tmp_path / "learning.png"
    learning.main(["--picture", str(picture)])
    found = learning.points(rows)
    assert [(point.step, point.accuracy) for point in found] == [(0, 0.25), (4, 0.75)]
    assert Image.open(picture).text["Description"] == (
        "Held-out accuracy of SmolLM2-135M-Instruct on word problems: 0.250 (0.071 to 0.591) before, "
        "0.750 (0.409 to 0.929) after 4 steps"
    )
