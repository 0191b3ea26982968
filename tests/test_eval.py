"""`python -m tlt_jax.eval`: the drafter that an evaluation uses, and the comparison of two evaluations."""

from __future__ import annotations

import sys
from dataclasses import replace
from itertools import product

import pytest

from tlt_jax import eval, run_folder
from tlt_jax.config import load as configuration
from tlt_jax.errors import DataError
from tlt_jax.metrics import evaluations
from tlt_jax.metrics.evaluations import Record


def test_evaluation_drafts_with_the_drafter_of_the_run_else_with_n_grams(tmp_path, capsys):
    arguments = ["--config", "configs/quickstart.yaml", "--run", str(tmp_path)]
    config = configuration.parse([*arguments, "--speculation.drafter", "adaptive"])

    def drafter() -> str:
        return eval.with_fixed_drafter(config).speculation.drafter

    assert drafter() == "ngram" and "speculation.drafter is ngram" in capsys.readouterr().err
    run_folder.drafter_export(config).mkdir(parents=True)
    assert drafter() == str(run_folder.drafter_export(config)) in capsys.readouterr().err
    for other in ("none", "a directory"):
        fixed = replace(config, speculation=replace(config.speculation, drafter=other))
        assert eval.with_fixed_drafter(fixed) == fixed


def judged(id: str, *correct: bool, split: str = "eval", reference: str = "7") -> list[Record]:
    """Answers to a row, of which these are correct."""
    return [
        Record(
            None,
            f"what is {id}?",
            f"{id}: {one}",
            float(one),
            3,
            "stop",
            id=id,
            reference=reference,
            split=split,
            sample=sample,
            is_correct=one,
        )  # fmt: skip
        for sample, one in enumerate(correct)
    ]


def compared(monkeypatch, capsys, *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["eval", *map(str, words)])
    assert eval.main() == 0
    return capsys.readouterr().out


def refused(monkeypatch, capsys, *words: object) -> str:
    monkeypatch.setattr(sys, "argv", ["eval", *map(str, words)])
    with pytest.raises(SystemExit) as stopped:
        eval.main()
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1
    return error


@pytest.fixture
def two(tmp_path):
    """A run with two evaluations: every kind of row once, won twice, and a row that only one has."""
    first = [*judged("w", False), *judged("x", False), *judged("l", True), *judged("r", True)]
    second = [*judged("w", True), *judged("x", True), *judged("l", False), *judged("r", True)]
    evaluations.keep(
        evaluations.path_of(tmp_path, 0), 0, [*first, *judged("n", False), *judged("o", True)]
    )
    evaluations.keep(evaluations.path_of(tmp_path, 20), 20, [*second, *judged("n", False)])
    return tmp_path


def test_two_evaluations_are_compared_row_by_row(two, monkeypatch, capsys):
    names = [f"{two}:0", two], [evaluations.path_of(two, step) for step in (0, 20)]
    printed = [compared(monkeypatch, capsys, "--compare", *pair) for pair in names]
    assert printed[0] == printed[1]
    assert (
        "5 rows: won 2 (only B is right), lost 1 (only A is right), both right 1, both wrong 1"
        in printed[0]
    )
    assert "A: mean reward 0.400" in printed[0] and "B: mean reward 0.600" in printed[0]
    assert "left out: 1 rows of A alone, 0 of B alone" in printed[0]
    assert "with probability 1\n" in printed[0] and "---" not in printed[0]
    rows = compared(monkeypatch, capsys, "--compare", *names[0], "--rows", "won,lost").splitlines()
    assert [row for row in rows if row.startswith("---")] == [
        "--- won: eval w", "--- won: eval x", "--- lost: eval l",
    ]  # fmt: skip
    at = rows.index("--- lost: eval l")
    assert rows[at + 1 : at + 5] == [
        "what is l?", "reference: 7", "A (1 of 1 correct): l: True", "B (0 of 1 correct): l: False",
    ]  # fmt: skip


def test_a_row_is_right_when_half_of_its_answers_are(tmp_path):
    for answers in product((False, True), repeat=3):
        assert evaluations.is_right(judged("a", *answers)) == (sum(answers) >= 2)
    assert evaluations.is_right(judged("a", True, False))


@pytest.mark.parametrize("won, lost", [(0, 0), (3, 0), (4, 9), (6, 6)])
def test_the_sign_test_counts_the_outcomes_of_fair_coins(won, lost):
    coins = [sum(heads) for heads in product((0, 1), repeat=won + lost)]
    extreme = [max(heads, won + lost - heads) >= max(won, lost) for heads in coins]
    assert evaluations.sign_test(won, lost) == pytest.approx(sum(extreme) / len(coins))


def test_what_cannot_be_compared_is_named(two, monkeypatch, capsys):
    other = two / "other.jsonl"

    def said(*words: object) -> str:
        return refused(monkeypatch, capsys, *words)

    evaluations.keep(other, 0, judged("w", True, reference="8"))
    assert "row eval w has the reference answer" in said("--compare", two, other)
    evaluations.keep(other, 0, [*judged("w", True, split="train")])
    other.write_text("".join(line + "\n" for line in other.read_text().splitlines()[1:]))
    assert "share no row" in said("--compare", two, other)
    evaluations.keep(other, 0, [*judged("w", True), replace(judged("w", True)[0], prompt="?")])
    assert "several prompts have the id eval w" in said("--compare", two, other)
    other.write_text('{"uid": 1}\n')
    assert "other.jsonl:1 is no answer" in said("--compare", two, other)
    assert "has evaluations of steps 0, 20" in said("--compare", two, f"{two}:7")
    assert "nowhere has none" in said("--compare", two, "nowhere")
    assert "write --compare A B" in said("--compare", two)
    assert "--rows 'all' is not known: use won" in said("--compare", two, two, "--rows", "all")
    assert "--k 1,x are no numbers" in said("--run", two, "--k", "1,x")
    assert f"--out {two} is a directory" in said("--run", two, "--out", two)


def test_an_evaluation_is_read_as_it_was_written_with_any_character(tmp_path):
    """Only a line feed ends a line: U+0085, U+2028 and U+2029, which str.splitlines splits at, stay in their text."""
    every = "".join(map(chr, [*range(0xD800), *range(0xE000, 0x110000)]))
    answers = [replace(one, prompt=every, completion=every) for one in judged("a", True, False)]
    path = evaluations.path_of(tmp_path, 0)
    evaluations.keep(path, 0, answers)
    assert evaluations.read(path) == answers
    evaluations.keep(path, 0, judged("a", True, split="train"))
    path.write_bytes(path.read_bytes().replace(b"\n", b"\r\n"))
    assert evaluations.read(path) == [*answers, *judged("a", True, split="train")]


def test_answers_of_other_splits_stay_in_a_file(tmp_path):
    path = evaluations.path_of(tmp_path, 3)
    evaluations.keep(path, 3, [*judged("a", True), *judged("a", True, split="train")])
    evaluations.keep(path, 3, judged("b", False, True))
    assert evaluations.read(path) == [*judged("a", True, split="train"), *judged("b", False, True)]
    for damaged in (b"[]\n", b'{"split": "\xff"}\n'):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match="000003.jsonl:1 is no answer"):
            evaluations.read(path)
