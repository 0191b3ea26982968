"""The generated tasks: correct solutions, disjoint splits, heavy-tailed lengths."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tlt_jax.data import tasks


def worked(name: str, digits: list[int], modulus: int) -> str:
    """The reference solution, one operation at a time."""
    write = lambda values: "".join(tasks.DIGITS[v] for v in values)  # noqa: E731
    lines, rest, sums = [], list(digits), [digits[0]]
    while len(rest) > 1:
        rest = [(rest[0] + rest[1]) % modulus, *rest[2:]]
        lines.append(write(rest))
        sums.append(rest[0])
    return (
        " ".join(lines[:-1]) + "=" + lines[-1]
        if name == "fold"
        else write(sums[1:-1]) + "=" + write(sums[-1:])
    )


def test_a_list_is_folded_and_scanned_as_by_hand():
    assert tasks.Fold().solve("3725", "3027") == "025 25=7"
    assert tasks.Fold(scan=True).solve("3725", "3027") == "02=7"


@pytest.mark.parametrize("name", ["fold", "scan"])
def test_solutions_are_worked_step_by_step_and_verify(name):
    args = {"modulus": 9, "min_length": 2, "max_length": 7, "tail": 0}
    task = tasks.make("fold", args | {"scan": name == "scan"})
    rows = task.rows(3, range(200), "train")
    digits = {row.id: [int(c) for c in row.prompt if c.isdigit()] for row in rows}
    assert {len(numbers) for numbers in digits.values()} == {2, 3, 4, 5, 6, 7}
    for row in rows:
        assert row.prompt.endswith(":")
        assert row.solution == worked(name, digits[row.id], 9)
        assert row.solution.endswith("=" + row.answer)
        assert task.verify(row.solution, row.answer) == 1.0
        assert task.verify(row.solution + "0", row.answer) == 0.0


def test_only_the_text_after_the_last_equals_sign_is_the_answer():
    task = tasks.Fold()
    assert task.verify("12=3 0=7 ", "7") == 1.0
    assert [task.verify(text, "7") for text in ("7", "=", "", "7=", "=7=1", "=77")] == [0.0] * 6


def test_a_row_is_a_function_of_seed_index_and_split():
    task = tasks.Fold()
    rows = task.rows(5, range(100), "train")
    assert task.rows(5, [17, 3, 99], "train") == [rows[17], rows[3], rows[99]]
    for other in (task.rows(6, range(100), "train"), task.rows(5, range(100), "sft")):
        assert sum(a.prompt == b.prompt for a, b in zip(rows, other, strict=True)) < 10


def test_training_and_evaluation_share_no_list_for_any_seed():
    task = tasks.Fold(min_length=2)
    trained = {
        r.prompt
        for seed in (0, 1)
        for split in ("train", "sft")
        for r in task.rows(seed, range(5000), split)
    }
    held_out = {r.prompt for seed in (0, 1) for r in task.rows(seed, range(2000), "eval")}
    assert len(held_out) > 500
    assert not trained & held_out


def test_solution_lengths_have_a_heavy_tail():
    lengths = [len(row.solution) + 1 for row in tasks.Fold().rows(0, range(512), "train")]
    assert max(lengths) >= 4 * np.percentile(lengths, 75)


@pytest.mark.parametrize("family", ["", "qwen2", "qwen3", "llama"])
def test_the_tokenizer_reads_every_character_also_when_saved_beside_a_model(family, tmp_path):
    from transformers import AutoTokenizer

    task = tasks.Fold(modulus=36)
    task.tokenizer().save_pretrained(tmp_path)
    if family:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    text = f"{tasks.DIGITS}:{task.longest_row().solution}"
    for tokenizer in (task.tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        assert (tokenizer.eos_token, tokenizer.pad_token) == (tasks.EOS, tasks.PAD)


@pytest.mark.parametrize(
    ("name", "args", "part"),
    [
        ("sort", {}, "'sort' is not a task: choose one of fold, word_problems"),
        ("fold", {"length": 3}, "data.task_args.length is not an argument"),
        ("fold", {"modulus": 37}, "modulus 37 is not between 2 and 36"),
        ("fold", {"max_length": 2}, "min_length 3 <= max_length 2"),
        ("fold", {"modulus": 2}, "modulus 2 ** min_length 3 is below 64"),
        ("fold", {"tail": "1"}, "data.task_args.tail '1' is not of type float"),
        ("fold", {"max_length": 4.5}, "data.task_args.max_length 4.5 is not of type int"),
    ],
)
def test_bad_difficulty_is_refused_with_both_numbers(name, args, part):
    with pytest.raises(ValueError) as error:
        tasks.make(name, args)
    assert part in str(error.value)
