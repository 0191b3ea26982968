"""The benchmark of algorithms: what it runs and skips, what it says of its rows, and the picture of them."""

from __future__ import annotations

import csv
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.common.results import MEASURED_WITH
from benchmarks.whole_runs import algorithms, algorithms_picture
from benchmarks.whole_runs.arms import Failure
from benchmarks.whole_runs.runs import Run
from tlt_jax.config import load as configuration
from tlt_jax.config.validate import validate_rl

ROOT = Path(__file__).parents[1]
# Held-out accuracies by hand: GRPO's mean is 0.6, its standard deviation 0.1.
ENDS = {"grpo": (0.5, 0.6, 0.7), "rloo": (0.5, 0.5, 0.51), "dr_grpo": (0.4, 0.5, 0.59)}


@pytest.mark.parametrize("arm", algorithms.ARMS)
@pytest.mark.parametrize("drafting", algorithms.DRAFTING)
def test_every_arm_is_a_configuration(arm, drafting):
    trial = algorithms.Trial(arm, drafting, 0, 60, False)
    validate_rl(configuration.load(["--config", "quickstart", *algorithms.flags(trial.knobs)]))


def row(arm: str, seed: int, end: float, steps: int = 4, knobs: str = "") -> dict[str, str]:
    values = (
        arm,
        "none",
        str(seed),
        str(steps),
        knobs,
        f"0:0.3 {steps}:{end}",
        "0",
        "abc",
        "",
        "9",
    )
    return dict(zip(algorithms.COLUMNS, values, strict=True))


@pytest.fixture
def rows() -> list[dict[str, str]]:
    """Three seeds of each arm, after a shorter trial of GRPO and one of RLOO with other knobs."""
    found = [row("grpo", 0, 0.9, steps=2), row("rloo", 0, 0.9, steps=8, knobs="--old.knob 1")]
    return found + [
        row(arm, seed, end) for arm, ends in ENDS.items() for seed, end in enumerate(ends)
    ]


def test_an_arm_keeps_up_whose_mean_is_at_least_grpos_less_its_scatter(rows):
    found = {one.arm: one for one in algorithms.summaries(rows)}
    assert [(one.arm, str(one)) for one in found.values()] == [
        ("grpo", "0.600 ± 0.100"), ("rloo", "0.503 ± 0.006"), ("dr_grpo", "0.497 ± 0.095"),
    ]  # fmt: skip
    assert [one.verdict for one in found.values()] == ["keeps up with GRPO"] * 2 + ["below GRPO"]
    (alone,) = algorithms.summaries([row("rloo", 0, 0.5)])
    assert alone.verdict == "GRPO was not measured" and alone.scatter == 0


def test_the_report_has_an_arm_a_line_with_what_speculation_changed(rows, capsys):
    for arm, drafting, equal in (("grpo", "ngram", "yes"), ("grpo", "learned", "no")):
        rows.append(row(arm, 0, 0) | {"drafting": drafting, "equal": equal, "accuracies": ""})
    algorithms.report(rows)
    lines = capsys.readouterr().out.splitlines()
    assert "| grpo | 3 | 0.600 ± 0.100 | keeps up with GRPO | yes | no |" in lines
    assert "| dr_grpo | 3 | 0.497 ± 0.095 | below GRPO | not run | not run |" in lines


@pytest.fixture
def started(monkeypatch) -> list[list[str]]:
    """The arguments of every training that is started; the policies of forced n-grams with RLOO are other ones."""
    found: list[list[str]] = []

    def command(module: str, *arguments: str) -> float:
        found.append([module, *arguments])
        return 1.0

    def read_run(folder: Path, wall: float) -> Run:
        policy = "2" if "rloo_ngram" in folder.name else "1"
        return Run({1: {"speculation/share": 0.5}}, {}, {}, wall, policy=policy * 64)

    monkeypatch.setattr(algorithms, "command", command)
    monkeypatch.setattr(algorithms, "read_run", read_run)
    monkeypatch.setattr(algorithms, "accuracies", lambda folder: "0:0.25 2:0.5")
    return found


def words(tmp_path: Path, *more: str) -> list[str]:
    return [
        "--work",
        str(tmp_path),
        "--csv",
        str(tmp_path / "rows.csv"),
        "--seeds",
        "0,1",
        "--steps",
        "2",
        *more,
    ]


def test_what_the_file_has_is_not_run_again(started, tmp_path):
    given = words(tmp_path, "--arms", "grpo,rloo")
    assert algorithms.main([*given, "--compared-steps", "0"]) == 0
    assert [one[0] for one in started].count("tlt_jax.train") == 4
    started.clear()
    assert algorithms.main([*given, "--drafting", "none,ngram"]) == 0
    assert [one[0] for one in started].count("tlt_jax.train") == 4
    with (tmp_path / "rows.csv").open(newline="") as file:
        found = list(csv.DictReader(file))
    assert tuple(found[0]) == (*MEASURED_WITH, *algorithms.COLUMNS)
    assert [(one["arm"], one["drafting"], one["equal"]) for one in found[4:]] == [
        ("grpo", "none", ""), ("grpo", "ngram", "yes"), ("rloo", "none", ""), ("rloo", "ngram", "no"),
    ]  # fmt: skip
    started.clear()
    assert algorithms.main([*given, "--drafting", "none,ngram"]) == 0
    assert not [one for one in started if one[0] == "tlt_jax.train"]


def test_runs_of_a_seed_begin_with_one_policy_and_have_their_knobs(started, tmp_path):
    assert algorithms.main(words(tmp_path, "--arms", "grpo,rloo", "--optim.beta2", "0.9")) == 0
    made = [one for one in started if one[0] == "tlt_jax.train.sft"]
    trained = [one for one in started if one[0] == "tlt_jax.train"]
    assert all("--optim.beta2" in one for one in started)
    starts = {
        (one[one.index("--train.seed") + 1], one[one.index("--model.path") + 1]) for one in trained
    }
    assert starts == {(str(seed), str(tmp_path / "start" / str(seed))) for seed in (0, 1)}
    assert {one[one.index("--out") + 1] for one in made} == {path for _, path in starts}
    assert all(("rloo" in one) == ("rloo_" in one[one.index("--run") + 1]) for one in trained)
    learned = next(one for one in trained if "learned" in one[one.index("--run") + 1])
    assert "[learned:3_1_4]" in learned and learned[learned.index("--eval.every") + 1] == "0"
    assert trained[0][trained[0].index("--eval.every") + 1] == "10"


def test_a_run_that_fails_ends_the_command_and_leaves_no_row(
    started, tmp_path, monkeypatch, capsys
):
    def fails(*_):
        raise Failure("tlt_jax.train ended with code 2:\nerror: no such knob")

    monkeypatch.setattr(algorithms, "command", fails)
    assert algorithms.main(words(tmp_path, "--arms", "grpo")) == 1
    assert "error: tlt_jax.train ended with code 2" in capsys.readouterr().err
    assert len((tmp_path / "rows.csv").read_text().splitlines()) == 1


def test_an_arm_that_is_not_there_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        algorithms.main(words(tmp_path, "--arms", "grpo,ppo"))
    assert "ppo: there are grpo, dr_grpo" in capsys.readouterr().err


def test_the_picture_of_the_page_is_drawn_from_the_newest_rows():
    found = algorithms.summaries(
        algorithms.rows_of(ROOT / "benchmarks" / "results" / "algorithms.csv")
    )
    assert {one.arm for one in found} == {*algorithms.ARMS}
    assert all(len(one.accuracies) == 3 for one in found)
    drawn = Image.open(ROOT / "docs" / "algorithms_quickstart.png")
    assert drawn.text["Description"] == algorithms_picture.caption(found)


def test_the_picture_says_what_the_rows_say(rows, tmp_path):
    pytest.importorskip("matplotlib", reason="the benchmarks extra")
    algorithms_picture.write(tmp_path / "new.png", rows)
    said = Image.open(tmp_path / "new.png").text["Description"]
    assert said == algorithms_picture.caption(algorithms.summaries(rows))
    assert "rloo 0.503 ± 0.006; dr_grpo 0.497 ± 0.095" in said
    assert algorithms_picture.means(rows)["grpo"] == [
        (0, pytest.approx(0.3)),
        (4, pytest.approx(0.6)),
    ]
