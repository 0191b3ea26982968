"""The generated tasks: correct solutions, disjoint splits, heavy-tailed lengths, tokenizers that read every character."""

from __future__ import annotations

import json
import re
from collections import Counter

import numpy as np
import pytest

from tlt_jax.data import tasks


def worked(name: str, digits: list[int], modulus: int) -> str:
    """The reference solution of a list, one operation at a time."""
    write = lambda values: "".join(tasks.DIGITS[v] for v in values)  # noqa: E731
    lines, rest, sums = [], list(digits), [digits[0]]
    while len(rest) > 1:
        rest = [(rest[0] + rest[1]) % modulus, *rest[2:]]
        lines.append(write(rest))
        sums.append(rest[0])
    if name == "scan":
        return write(sums[1:-1]) + "=" + write(sums[-1:])
    return " ".join(lines[:-1]) + "=" + lines[-1]


def told(prompt: str) -> list[int]:
    """The numbers that a word problem tells, in order; what is lost, sold or given away is negative."""
    *sentences, question = re.findall(r"[^.?]+[.?]", prompt)
    person = re.match(r"\w+", prompt)[0]
    assert re.fullmatch(rf" How many \w+ does {person} have now\?", question)
    found = [int(number) for number in re.findall(r"\d+", sentences[0])]
    other = rf"(?!{person})\w+"
    for sentence in map(str.strip, sentences[1:]):
        (number,) = map(int, re.findall(r"\d+", sentence))
        gain = rf"({person} (finds|buys)|{other} gives {person}) \d+ more\."
        loss = rf"{person} (loses|sells) \d+\.|{person} gives \d+ to {other}\."
        is_gain, is_loss = (re.fullmatch(one, sentence) is not None for one in (gain, loss))
        assert is_gain != is_loss, sentence
        found.append(number if is_gain else -number)
    return found


def has_product(prompt: str) -> bool:
    return " of " in prompt.split(".")[0]


def test_a_list_is_folded_and_scanned_as_by_hand():
    assert tasks.Fold().solve("3725", "3027") == "025 25=7"
    assert tasks.Fold(scan=True).solve("3725", "3027") == "02=7"


@pytest.mark.parametrize("name", ["fold", "scan"])
def test_solutions_of_lists_are_worked_step_by_step_and_verify(name):
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


@pytest.mark.parametrize("split", ["train", "eval", "sft"])
def test_a_word_problem_and_its_solution_are_what_the_sentences_tell(split):
    task = tasks.make("word_problems", {"min_operations": 1, "max_operations": 4, "largest": 30})
    counts = Counter()
    for row in task.rows(3, range(300), split):
        numbers, is_product = told(row.prompt), has_product(row.prompt)
        first, changes = numbers[: 1 + is_product], numbers[1 + is_product :]
        assert all(2 <= number <= (9 if is_product else 30) for number in first)
        assert all(1 <= abs(change) <= 30 for change in changes)

        total = int(np.prod(first))
        lines = [f"{first[0]} * {first[1]} = {total}"] if is_product else []
        for change in changes:
            lines.append(f"{total} {'+' if change > 0 else '-'} {abs(change)} = {total + change}")
            total += change
            assert total >= 1
        assert (row.solution, row.answer) == (", ".join(lines), str(total))
        assert task.verify(row.solution, row.answer) == 1
        counts[len(lines)] += 1
    assert set(counts) == {1, 2, 3, 4} and min(counts.values()) >= 40  # expected: 75 each


def test_the_text_after_the_last_equals_sign_or_the_final_number_is_the_answer():
    fold, problems = tasks.Fold(), tasks.WordProblems()
    assert fold.verify("12=3 0=7 ", "7") == 1.0
    assert [fold.verify(text, "7") for text in ("7", "=", "", "7=", "=7=1", "=77")] == [0.0] * 6
    right = ("12", "Tom has 5 + 7 = 12 pens.", "7\n#### 12", "It is 5?</think>12", "12.0 pens")
    assert [problems.verify(text, "12") for text in right] == [1] * len(right)
    wrong = ("", "none", "12, 13", "1,2", "-12", "12 of 20", "12</think>no")
    assert [problems.verify(text, "12") for text in wrong] == [0] * len(wrong)


@pytest.mark.parametrize("task", [tasks.Fold(), tasks.WordProblems()])
def test_a_row_is_a_function_of_seed_index_and_split(task):
    rows = task.rows(5, range(100), "train")
    assert task.rows(5, [17, 3, 99], "train") == [rows[17], rows[3], rows[99]]
    for other in (task.rows(6, range(100), "train"), task.rows(5, range(100), "sft")):
        assert sum(a.prompt == b.prompt for a, b in zip(rows, other, strict=True)) < 10


@pytest.mark.parametrize(
    ("task", "numbers"),
    [
        (tasks.Fold(min_length=2), str),
        (
            tasks.WordProblems(max_operations=2, largest=10),
            lambda prompt: (has_product(prompt), *told(prompt)),
        ),
    ],
)
def test_training_and_evaluation_share_no_problem_for_any_seed(task, numbers):
    def problems(split: str, count: int) -> set:
        return {
            numbers(row.prompt) for seed in (0, 1) for row in task.rows(seed, range(count), split)
        }

    held_out = problems("eval", 600)
    assert len(held_out) > 150
    assert not held_out & (problems("train", 1500) | problems("sft", 1500))


def test_solution_lengths_have_a_heavy_tail():
    lengths = [len(row.solution) + 1 for row in tasks.Fold().rows(0, range(512), "train")]
    assert max(lengths) >= 4 * np.percentile(lengths, 75)


@pytest.mark.parametrize(
    "args", [{}, {"max_operations": 1}, {"max_operations": 8, "largest": 10}, {"largest": 900}]
)
def test_no_word_problem_is_longer_than_the_longest(args):
    task = tasks.make("word_problems", args)
    longest, rows = task.longest_row(), task.rows(3, range(400), "train")
    assert max(len(row.prompt) for row in rows) <= len(longest.prompt)
    assert max(len(row.solution) for row in rows) <= len(longest.solution)
    assert longest.solution.endswith(f" = {longest.answer}")


@pytest.mark.parametrize(
    ("task", "more"), [(tasks.Fold(modulus=36), tasks.DIGITS), (tasks.WordProblems(), "\n")]
)
@pytest.mark.parametrize("family", ["", "qwen2", "qwen3", "llama"])
def test_the_tokenizer_reads_every_character_also_when_saved_beside_a_model(
    family, task, more, tmp_path
):
    from transformers import AutoTokenizer

    task.tokenizer().save_pretrained(tmp_path)
    if family:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": family}))
    text = task.longest_row().prompt + more + task.longest_row().solution
    for tokenizer in (task.tokenizer(), AutoTokenizer.from_pretrained(tmp_path)):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
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
        ("word_problems", {"modulus": 3}, "data.task_args.modulus is not an argument of"),
        ("word_problems", {"min_operations": 4}, "min_operations 4 <= max_operations 3"),
        ("word_problems", {"min_operations": 0}, "1 <= min_operations 0"),
        ("word_problems", {"max_operations": 9}, "max_operations 9 <= 8"),
        ("word_problems", {"largest": 9}, "data.task_args.largest 9 is below 10: raise it"),
    ],
)
def test_bad_arguments_are_refused_with_the_numbers(name, args, part):
    with pytest.raises(ValueError) as error:
        tasks.make(name, args)
    assert part in str(error.value)
