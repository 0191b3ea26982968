"""Answers in many forms are scored as a person scores them, and those of a policy in a loop cost next to nothing.

answers.jsonl: by reference, the answers in a box that are right and wrong by hand, and those that math-verify 0.9.0 and the
string comparison of verl's math reward judge otherwise. completions.jsonl: the same of whole completions, by reward.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.rewards import LOOPS
from tlt_jax.config import Config
from tlt_jax.data import answers
from tlt_jax.rewards import terms

FOLDER = Path(__file__).parent
QUESTION = (
    "Ann has 3 cartons of eggs and buys 4 more. How many times does she bake with the eggs in May?"
)


def groups(name: str) -> list[dict]:
    return [json.loads(line) for line in (FOLDER / name).read_text("utf-8").split("\n") if line]


def misjudged(reward: terms.Reward, group: dict, text: str = "{}") -> list[tuple[str, float]]:
    """The answers of a group whose score is not the one by hand."""
    expected = [(one, 1.0) for one in group["right"]] + [(one, 0.0) for one in group["wrong"]]
    prompt, row = group.get("prompt", QUESTION), {"answer": group["reference"]}
    return [
        (one, score)
        for one, right in expected
        if (score := reward(prompt, text.replace("{}", one), row)) != right
    ]


@pytest.fixture(scope="module")
def rewards() -> dict[str, terms.Reward]:
    names = ("gsm8k", "gsm8k_flexible", "math", "math_flexible", "format")
    return {name: terms.resolve(name, Config()) for name in names}


def test_math_scores_each_answer_as_by_hand(rewards):
    found = groups("answers.jsonl")
    assert sum(len(one["right"]) + len(one["wrong"]) for one in found) > 1000
    wrong = {one["reference"]: misjudged(rewards["math"], one, "So \\boxed{{}}.") for one in found}
    assert not {reference: texts for reference, texts in wrong.items() if texts}


@pytest.mark.matrix
def test_the_table_says_what_math_verify_misjudges():
    math_verify = pytest.importorskip("math_verify")
    for one in groups("answers.jsonl"):
        wanted = math_verify.parse(f"\\boxed{{{one['reference']}}}")
        answers_of = [(text, True) for text in one["right"]]
        answers_of += [(text, False) for text in one["wrong"]]
        found = [
            text
            for text, right in answers_of
            if math_verify.verify(wanted, math_verify.parse(f"So \\boxed{{{text}}}.")) != right
        ]
        assert sorted(found) == sorted(one.get("math_verify", [])), one["reference"]


@pytest.mark.parametrize("group", groups("completions.jsonl"), ids=lambda one: one["reference"])
def test_the_answer_of_a_completion_is_scored_as_by_hand(group, rewards):
    assert not misjudged(rewards[group["reward"]], group)


@pytest.mark.parametrize("group", groups("answers.jsonl"), ids=lambda one: one["reference"])
def test_an_identical_text_never_scores_0(group, rewards):
    reference = group["reference"]
    for text in (f"\\boxed{{{reference}}}", f"#### {reference}"):
        assert all(rewards["math"]("", text, {"answer": one}) == 1 for one in (text, reference))
        if answers.reference(text):
            assert terms.gsm8k("", text, {"answer": text}) == 1


@contextmanager
def counted_calls() -> Iterator[Counter]:
    """The calls of Python and C functions by this thread: a cost that no other work on the machine moves."""
    calls = Counter()
    sys.setprofile(lambda frame, event, argument: calls.update((event,)))
    try:
        yield calls
    finally:
        sys.setprofile(None)


@pytest.mark.parametrize("name", LOOPS)
def test_an_answer_of_a_policy_in_a_loop_costs_little_and_is_no_failure(name, rewards):
    for one, reward in rewards.items():
        with counted_calls() as calls:
            score = terms.evaluate(one, reward, "Go.", LOOPS[name], {"answer": "#### 7"})[one]
        assert calls.total() < 3_000_000, one  # 200 signs are 1.4 million in the parser of formulas
        assert score == 0.0 or one == "format"


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("a \\boxed{\\frac{1}{2}} b", "\\frac{1}{2}"),
        ("\\boxed{1} then \\boxed{2", "1"),
        ("\\boxed{1 \\boxed{2} 3}", "2"),
        ("\\boxed{\\{1, 2\\}}", "\\{1, 2\\}"),
        ("\\boxed{\\left\\{x\\right.}", "\\left\\{x\\right."),
        ("{ \\boxed{5} ", "5"),
        ("$\\boxed 5$", "5"),
        ("$\\boxed -12.5$", "-12.5"),
        ("so \\boxed \\frac{1}{2}.", "\\frac{1}{2}"),
        ("\\boxed \n {5}", "5"),
        ("\\fbox{5}", "5"),
        ("$\\boxed 5x$", ""),
        ("use \\boxed and go", ""),
        ("\\boxedtext{5}", ""),
        ("boxed{1}", ""),
        ("}}} \\boxed{", ""),
    ],
)
def test_the_content_of_the_last_box(text, content):
    assert answers.last_box(text)[0] == content


@pytest.mark.parametrize(
    ("text", "value", "unit"),
    [
        ("$1,234.50", "1234.5", ""),
        ("\\$5", "5", "dollar"),
        ("-3/4", "-0.75", ""),
        ("1\\frac{1}{2}\\text{ hours}", "1.5", "hour"),
        ("1e+22", "1e22", ""),
        ("6.5 \\times 10^{-3}", "0.0065", ""),
        ("0.\\overline{36}", "4/11", ""),
        ("90^\\circ", "90", "degree"),
        ("5\\text{ cm}^2", "5", "centimetre^2"),
        ("5 square feet", "5", "foot^2"),
        ("5 km/h", "5", "kilometre/hour"),
        ("5 mph", "5", "mile/hour"),
        ("5 \\text{ m}", "5", "metre"),
        ("50\\%", "50", "percent"),
        ("25^\\circ\\text{C}", "25", "degree celsius"),
    ],
)
def test_an_amount_is_a_number_with_a_known_unit(text, value, unit):
    from fractions import Fraction

    assert answers.amount(text) == answers.Amount(Fraction(value), unit)


@pytest.mark.parametrize(
    "text", ["", "5 m", "5x", "1/0", "10/12/2024", "10:30", "2^10", "1 or 3", "1,2345", "3,5", "--5", "5 per", "9" * 2000]
)  # fmt: skip
def test_what_is_no_amount(text):
    assert answers.amount(text) is None
