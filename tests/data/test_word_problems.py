"""Word problems: true answers, splits without a shared problem, any tokenizer and chat template."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest

from tlt_jax.config import Config
from tlt_jax.config.schema import Data
from tlt_jax.data import dataset, tasks
from tlt_jax.errors import DataError

SEED = 3
TEMPLATE = (
    "{% for message in messages %}[{{ message['role'] }}]{{ message['content'] }}"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)


def told(prompt: str) -> list[int]:
    """The numbers that a problem tells, in order; what is lost, sold or given away is negative."""
    *sentences, question = re.findall(r"[^.?]+[.?]", prompt)
    person = re.match(r"\w+", prompt)[0]
    assert re.fullmatch(rf" How many \w+ does {person} have now\?", question)
    found = [int(number) for number in re.findall(r"\d+", sentences[0])]
    for sentence in map(str.strip, sentences[1:]):
        (number,) = map(int, re.findall(r"\d+", sentence))
        is_gain = re.fullmatch(
            rf"{person} (finds|buys) \d+ more\.|(?!{person})\w+ gives {person} \d+ more\.", sentence
        )
        is_loss = re.fullmatch(
            rf"{person} (loses|sells) \d+\.|{person} gives \d+ to (?!{person})\w+\.", sentence
        )
        assert bool(is_gain) != bool(is_loss), sentence
        found.append(number if is_gain else -number)
    return found


def start(prompt: str) -> int:
    """How many things there are before the first change."""
    numbers = [int(number) for number in re.findall(r"\d+", prompt.split(".")[0])]
    return numbers[0] * numbers[1] if len(numbers) == 2 else numbers[0]


@pytest.mark.parametrize("split", ["train", "eval", "sft"])
def test_an_answer_and_its_solution_are_what_the_sentences_tell(split):
    task = tasks.make("word_problems", {"min_operations": 1, "max_operations": 4, "largest": 30})
    counts = Counter()
    for row in task.rows(SEED, range(300), split):
        total, numbers = start(row.prompt), told(row.prompt)
        is_product = " of " in row.prompt.split(".")[0]
        changes = numbers[1 + is_product :]
        assert all(2 <= number <= (9 if is_product else 30) for number in numbers[: 1 + is_product])
        assert all(1 <= abs(change) <= 30 for change in changes)

        lines = [f"{numbers[0]} * {numbers[1]} = {total}"] if is_product else []
        for change in changes:
            lines.append(f"{total} {'+' if change > 0 else '-'} {abs(change)} = {total + change}")
            total += change
            assert total >= 1
        assert (row.solution, row.answer) == (", ".join(lines), str(total))
        assert task.verify(row.solution, row.answer) == 1
        counts[len(lines)] += 1
    assert set(counts) == {1, 2, 3, 4} and min(counts.values()) >= 40  # expected: 75 each


def test_the_final_number_after_the_reasoning_is_the_answer():
    task = tasks.WordProblems()
    right = ("12", "Tom has 5 + 7 = 12 pens.", "7\n#### 12", "It is 5?</think>12", "12.0 pens")
    assert [task.verify(text, "12") for text in right] == [1] * len(right)
    wrong = ("", "none", "12, 13", "1,2", "-12", "12 of 20", "12</think>no")
    assert [task.verify(text, "12") for text in wrong] == [0] * len(wrong)


def test_a_row_is_a_function_of_seed_index_and_split():
    task = tasks.WordProblems()
    rows = task.rows(SEED, range(60), "train")
    assert task.rows(SEED, [17, 3, 59], "train") == [rows[17], rows[3], rows[59]]
    for other in (task.rows(SEED + 1, range(60), "train"), task.rows(SEED, range(60), "sft")):
        assert sum(a.prompt == b.prompt for a, b in zip(rows, other, strict=True)) < 6


def test_training_and_evaluation_share_no_arithmetic_for_any_seed():
    task = tasks.make("word_problems", {"max_operations": 2, "largest": 10})

    def numbers(split: str, count: int) -> set[tuple]:
        rows = [row for seed in (0, 1) for row in task.rows(seed, range(count), split)]
        return {(" of " in row.prompt.split(".")[0], *told(row.prompt)) for row in rows}

    held_out = numbers("eval", 600)
    assert len(held_out) > 150
    assert not held_out & (numbers("train", 1500) | numbers("sft", 1500))


@pytest.mark.parametrize(
    "args", [{}, {"max_operations": 1}, {"max_operations": 8, "largest": 10}, {"largest": 900}]
)
def test_no_row_is_longer_than_the_longest(args):
    task = tasks.make("word_problems", args)
    longest, rows = task.longest_row(), task.rows(SEED, range(400), "train")
    assert max(len(row.prompt) for row in rows) <= len(longest.prompt)
    assert max(len(row.solution) for row in rows) <= len(longest.solution)
    assert longest.solution.endswith(f" = {longest.answer}")


def test_its_own_tokenizer_reads_every_character():
    task = tasks.WordProblems()
    tokenizer, row = task.tokenizer(), task.longest_row()
    text = f"{row.prompt}\n{row.solution}"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert len(ids) == len(text) and tokenizer.unk_token_id not in ids
    assert tokenizer.decode(ids) == text


def chatting(**data) -> tuple[Config, object]:
    """A configuration that wraps word problems with a chat template, and a tokenizer that has one."""
    tokenizer = tasks.WordProblems().tokenizer()
    tokenizer.chat_template = TEMPLATE
    given = Data(
        task="word_problems", task_args={"max_operations": 1}, chat_template=True, system="Count.",
        eval_size=5, max_prompt_tokens=160,
    )  # fmt: skip
    return Config(data=replace(given, **data)), tokenizer


def test_every_split_is_asked_with_the_chat_template_of_any_tokenizer():
    config, tokenizer = chatting(prompt_suffix=" Answer:")
    config = replace(config, sft=replace(config.sft, steps=1))
    data = dataset.load(config, tokenizer)
    task = tasks.make("word_problems", config.data.task_args)
    for prompts, rows in (
        (data.prompts(2), task.rows(0, range(16, 24), "train")),
        (data.part(), task.rows(0, range(5), "eval")),
    ):
        texts = [f"[system]Count.[user]{row.prompt} Answer:[assistant]" for row in rows]
        assert [tokenizer.decode(prompt.tokens) for prompt in prompts] == texts
    (row,) = task.rows(0, [3], "sft")
    prompt, solution = data.solutions(1, 3)[0]
    assert tokenizer.decode(prompt) == f"[system]Count.[user]{row.prompt} Answer:[assistant]"
    assert tokenizer.decode(solution) == row.solution + tokenizer.eos_token


def test_a_limit_below_the_longest_prompt_in_its_template_is_refused_with_both_numbers():
    config, tokenizer = chatting(max_prompt_tokens=100)
    longest = tasks.make("word_problems", config.data.task_args).longest_row().prompt
    tokens = len(f"[system]Count.[user]{longest}[assistant]")
    with pytest.raises(DataError, match=rf"has {tokens} tokens and data.max_prompt_tokens is 100"):
        dataset.load(config, tokenizer)


@pytest.mark.parametrize(
    ("args", "part"),
    [
        ({"modulus": 3}, "data.task_args.modulus is not an argument of 'word_problems': it takes"),
        ({"min_operations": 3, "max_operations": 2}, "min_operations 3 <= max_operations 2"),
        ({"min_operations": 0}, "1 <= min_operations 0"),
        ({"max_operations": 9}, "max_operations 9 <= 8"),
        ({"largest": 9}, "data.task_args.largest 9 is below 10: raise it"),
        ({"largest": 10.5}, "data.task_args.largest 10.5 is not of type int"),
    ],
)
def test_bad_arguments_are_refused_with_the_numbers(args, part):
    with pytest.raises(ValueError) as error:
        tasks.make("word_problems", args)
    assert part in str(error.value)
