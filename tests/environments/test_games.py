"""The game that a small policy learns, its task, and the libraries with an adapter, where they are installed."""

from __future__ import annotations

import random
import re
import sys

import pytest
from environments.test_protocol import make_maker, started, user

from tlt_jax.data import tasks
from tlt_jax.environments import games
from tlt_jax.environments.protocol import Reply
from tlt_jax.errors import ConfigError, UserError

GUESS = "tlt_jax.environments.games:GuessNumber"
CALCULATOR = "tlt_jax.environments.games:Calculator"


def test_a_guess_is_answered_with_the_bounds_that_are_left():
    row = {"low": 1, "high": 9, "answer": "6"}
    episode, opening = started(GUESS, row)
    assert opening.messages == user("guess 1-9:")
    talk = {
        "5": "higher 6-9:",
        "x": "no guess 6-9:",
        "": "no guess 6-9:",
        "2": "higher 6-9:",
        "8": "lower 6-7:",
    }
    for turn, (text, said) in enumerate(talk.items(), 1):
        assert episode.step(text) == Reply(user(said), info={"turns": turn})
    assert episode.step(" 6\n") == Reply(
        user("right"), pytest.approx(0.5), True, info={"turns": 6.0}
    )
    assert started(GUESS, row)[0].step("6").reward == 1.0
    assert started(GUESS, row | {"prompt": "guess 1-9:"})[1] == Reply()


def test_a_number_that_no_row_tells_is_drawn_by_the_seed():
    def number(seed: int) -> int:
        return started(GUESS, {"low": 3, "high": 40}, seed=seed)[0].world.number

    drawn = [number(seed) for seed in range(200)]
    assert drawn == [number(seed) for seed in range(200)]
    assert min(drawn) == 3 and max(drawn) == 40


def test_a_calculator_is_right_and_runs_no_code():
    draw = random.Random(0)
    for _ in range(300):
        text = "".join(f"{draw.randint(1, 999)} {draw.choice('+-*/')} " for _ in range(3)) + "7"
        text = draw.choice(("{}", "({})", "-({})", " {} ")).format(text)
        assert float(games.calculate(text)) == pytest.approx(eval(text), rel=1e-5, abs=1e-12)
    assert games.calculate("9 * " * 15 + "9") == str(9**16)
    assert games.calculate("1 / (2 - 2)") == "error: division by zero"
    strange = (
        "9 ** 9", "7 // 2", "x", "2(3)", "", " ", "()", "(" * 64, "1" * 65, "07", "1e9", "1, 2", "1\n+ 2", "(1).real",
    )  # fmt: skip
    assert {games.calculate(text) for text in strange} == {"error: not a calculation"}


def held(problem: str) -> int:
    """How many things a problem's person has, by its words."""
    boxes = re.search(r"has (?:(\d+) boxes of )?(\d+)", problem)
    changes = re.findall(r"(buys|sells) (\d+)", problem)
    signs = {"buys": 1, "sells": -1}
    return int(boxes[1] or 1) * int(boxes[2]) + sum(signs[verb] * int(n) for verb, n in changes)


def test_a_problem_follows_two_worked_ones_and_its_answer_is_rewarded():
    said = set()
    for seed in range(40):
        episode, opening = started(CALCULATOR, seed=seed)
        text = opening.messages[0]["content"]
        plain, shorter = started(CALCULATOR, seed=seed, args={"tool": False})
        assert shorter.messages == user(re.sub("<<.*\n", "", text))
        *examples, problem = text.split("\n\n")
        for example in examples:
            call, result = re.search("<<(.*)>> (.*)", example).groups()
            assert str(held(example)) == games.calculate(call) == result == example.split()[-1]
        answer = held(problem)
        called = episode.step(f"<<{answer} * 2 - {answer}>>")
        assert called == Reply(user(f" {answer}\n"), info={"calls": 1.0})
        for world, calls in ((episode, 1.0), (plain, 0.0)):
            ended = Reply((), 1.0, True, info={"calls": calls})
            assert world.step(f"Answer: {answer}\n\n") == ended
        assert plain.step(f"<<{answer + 1}>>").reward == 0.0 == episode.step("Answer:").reward
        said.add(tuple(word in problem for word in ("boxes", "buys", "sells")))
    assert len(said) == len(games.PROBLEMS)


def test_the_task_of_guesses_has_its_bounds_its_symbols_and_disjoint_splits():
    task = tasks.make("guess", {"largest": 20})
    rows = {split: task.rows(1, range(300), split) for split in tasks.SPLITS}
    assert rows["train"][7:9] == task.rows(1, [7, 8], "train")
    pairs = {split: {(row.low, row.high) for row in found} for split, found in rows.items()}
    assert not pairs["eval"] & (pairs["train"] | pairs["sft"]) and len(pairs["train"]) > 50
    tokenizer = task.tokenizer()
    for row in rows["train"] + rows["eval"]:
        assert row.prompt == f"guess {row.low}-{row.high}:"
        assert 1 <= row.low <= int(row.answer) <= row.high <= 20
        assert task.verify(row.answer, row.answer) == 1.0 == 1 - task.verify("0", row.answer)
        episode, _ = started(GUESS, vars(row))
        for text in ("1", "20", "?", row.solution, row.answer):
            reply = episode.step(text)
            (message,) = reply.messages
            ids = tokenizer(message["content"] + row.prompt + row.solution)["input_ids"]
            assert tokenizer.unk_token_id not in ids
            assert tokenizer.decode(ids) == message["content"] + row.prompt + row.solution
            if reply.done:
                break
        assert reply.done
    assert len(task.longest_row().prompt) == max(len(row.prompt) for row in rows["train"])
    with pytest.raises(ConfigError, match="largest 3 is below"):
        tasks.make("guess", {"largest": 3})


def test_a_game_of_textarena_says_only_what_is_new_and_gives_its_reward_at_the_end():
    pytest.importorskip("textarena", reason="the extra games")
    episode, opening = started("textarena:GuessTheNumber-v0", seed=3)
    assert "between 1 and 20" in opening.messages[0]["content"]
    for guess in ("10", "[5]"):
        reply = episode.step(guess)
        (message,) = reply.messages
        said = message["content"]
        assert said.startswith("[GAME] The target number is ") and len(said) < 60
        assert (reply.reward, reply.done) == (0.0, False)
    number = episode.world.game.state.game_state["game_number"]
    assert episode.step(f"I say\n[{number}]")[:3] == ((), 1.0, True)
    (message,) = started("textarena:GuessTheNumber-v0-raw", seed=3)[0].step("[9]").messages
    assert message["content"] in ("The target number is lower.", "The target number is higher.")
    episode, _ = started("textarena:Countdown-v0", seed=3)
    assert [episode.step("?")[1:3] for _ in range(2)][-1] == (0.0, True)
    with pytest.raises(UserError, match="textarena:Nothing-v0': Environment Nothing-v0 not found"):
        make_maker("textarena:Nothing-v0")


def test_a_problem_of_reasoning_gym_is_one_turn():
    pytest.importorskip("reasoning_gym", reason="the extra reasoning")
    knobs = {"args": {"min_terms": 2, "max_terms": 2}}
    episode, opening = started("reasoning_gym:chain_sum", **knobs)
    (message,) = opening.messages
    total = eval(message["content"].partition(":")[2].rstrip("= "))
    right = f"<think>1</think> It is <answer> {total} </answer>"
    assert episode.step(right)[:3] == ((), 1.0, True)
    for text, reward in ((f"\\boxed{{{total}}}", 1.0), (f"{total}", 1.0), (f"{total + 1}", 0.0)):
        assert started("reasoning_gym:chain_sum", **knobs)[0].step(text).reward == reward
    with pytest.raises(UserError, match="reasoning_gym:nothing': Dataset 'nothing' not registered"):
        make_maker("reasoning_gym:nothing")


def test_an_environment_of_skyrl_gym_runs_unchanged():
    pytest.importorskip("skyrl_gym", reason="not installed")
    row = {"prompt": [{"role": "user", "content": "2 + 2"}], "reward_spec": {"ground_truth": "4"}}
    path = "skyrl_gym.envs.gsm8k.env:GSM8kEnv"
    assert started(path, row)[1] == Reply()
    assert started(path, row)[0].step("#### 4") == Reply((), 1.0, True)


def test_a_game_of_gem_is_made_by_its_own_function():
    pytest.importorskip("gem", reason="not installed")
    episode, opening = started("gem:make", args={"env_id": "game:GuessTheNumber-v0-easy"}, seed=3)
    assert "number" in opening.messages[0]["content"]
    reply = episode.step("\\boxed{5}")
    assert reply.messages and not reply.failure


@pytest.mark.parametrize(
    ("path", "extra"), [("textarena:A-v0", "games"), ("reasoning_gym:a", "reasoning")]
)
def test_a_library_that_is_not_installed_is_said_with_its_extra(monkeypatch, path, extra):
    monkeypatch.setitem(sys.modules, path.partition(":")[0], None)
    with pytest.raises(UserError) as error:
        make_maker(path)
    assert f"pip install tlt-jax[{extra}]" in str(error.value)
