"""Scores are right, and scoring processes survive whatever a reward does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tlt_jax.config import Config
from tlt_jax.config.task import REWARDS, Reward
from tlt_jax.distributed import workers
from tlt_jax.errors import RewardError
from tlt_jax.rewards import Score, Scorer, scorer as scorer_module, terms

USER_REWARD = """
import ctypes, os, resource, subprocess, sys, time

def probe(prompt, completion, row):
    if completion == "hang":
        time.sleep(1000)
    if completion == "spin":
        while True:
            pass
    if completion == "die":
        os._exit(3)
    if completion == "segfault":
        ctypes.string_at(0)
    if completion == "leave":
        sys.exit()
    if completion == "raise":
        raise KeyError("lost")
    if completion.startswith("child"):
        child = subprocess.Popen(["sleep", "1000"])
        with open(completion.split()[1], "w") as file:
            file.write(str(child.pid))
        child.wait()
    if completion == "modules":
        print("a reward may print")
        heavy = {"jax", "jaxlib", "flax", "torch", "transformers"}
        return {"score": os.getpid(), "heavy": len(heavy & {name.split(".")[0] for name in sys.modules})}
    if completion == "greedy":
        bytearray(resource.getrlimit(resource.RLIMIT_DATA)[0])
    if completion == "secret":
        return {"score": 1.0, "seen": "A_SECRET" in os.environ, "known": "A_KNOWN_ONE" in os.environ}
    if completion == "forge":
        places = {fd: "/proc/self/fd/" + fd for fd in os.listdir("/proc/self/fd")}
        for fd, place in places.items():
            if "socket:" not in os.path.realpath(place):
                continue
            os.write(int(fd), bytes([0, 0, 0, 40]) + b"cos\\nsystem\\n(S'touch forged'\\ntR." + bytes(9))
        time.sleep(1000)
    if completion == "odd":
        return {"score": 1.0, "per cent %": 1.0}
    values = {"huge": 1e300, "nan": float("nan"), "text": "1.0", "none": None, "complex": 1j, "dict": {"reward": 1.0}}
    return values.get(completion, len(completion) == len(row["answer"]))
"""


def make_config(
    rewards: dict[str, float], timeout_s: float = 5.0, workers: int = 1, failure_score: float = -1.0
):
    return Config(
        reward=Reward(
            terms=rewards, timeout_s=timeout_s, workers=workers, failure_score=failure_score
        )
    )


@pytest.fixture
def user_module(tmp_path, monkeypatch) -> str:
    (tmp_path / "their_rewards.py").write_text(USER_REWARD)
    monkeypatch.syspath_prepend(tmp_path)
    return "their_rewards:probe"


def score_all(config: Config, completions: list[str], answer: str = "abc") -> dict[str, Score]:
    with Scorer(config) as scorer:
        for completion in completions:
            scorer.submit(completion, "p", completion, {"answer": answer})
        return scorer.collect()


def test_failures_are_counted_by_kind_and_leave_other_scores_alone(user_module):
    expected = {
        "hang": ("timeout", "no answer after 2 s"),
        "spin": ("timeout", "no answer after 2 s"),
        "die": ("crash", "exit code 3"),
        "segfault": ("crash", "signal 11"),
        "leave": ("crash", "exit code 0"),
        "raise": ("error", "KeyError: 'lost'"),
        "nan": ("error", "gave nan"),
        "huge": ("error", "gave 1e+300: scores are between -1e+06 and 1e+06"),
        "odd": ("error", "a dict with the key 'per cent %': use letters"),
        "greedy": ("error", "MemoryError"),
        "forge": ("crash", "the worker died"),
        "text": ("error", "gave str, not a number"),
        "none": ("error", "gave NoneType, not a number"),
        "complex": ("error", "gave complex, not a number"),
        "dict": ("error", "a dict without 'score': its keys are ['reward']"),
    }
    config = make_config({user_module: 2.0, "exact": 0.5}, timeout_s=2.0, workers=2)
    mixed = [text for failing in expected for text in (failing, failing + "?")] + ["abc"]
    scores = score_all(config, mixed)
    assert set(scores) == set(mixed)
    for completion, (failure, detail) in expected.items():
        score = scores.pop(completion)
        assert (score.value, score.parts, score.failure) == (-1.0, {}, failure)
        assert score.detail.startswith(f"{user_module}: ") and detail in score.detail
    assert scores.pop("abc") == Score(2.5, {user_module: 1.0, "exact": 1.0})
    assert all(s.failure is None for s in scores.values())


def test_workers_import_no_jax_and_start_once(user_module):
    assert "jax" in sys.modules
    seen = set()
    with Scorer(make_config({user_module: 1.0, "task": 1.0})) as scorer:
        for step in range(5):
            scorer.submit(step, "p", "modules", {"answer": "abc"})
            (score,) = scorer.collect().values()
            assert score.parts[f"{user_module}/heavy"] == 0
            seen.add(score.parts[user_module])
    assert len(seen) == 1


def test_scoring_continues_while_the_caller_does_not_poll(user_module):
    with Scorer(make_config({user_module: 1.0})) as scorer:
        for key in range(500):
            scorer.submit(key, "p", "abc", {"answer": "abc"})
        with pytest.raises(ValueError, match="0 is already being scored"):
            scorer.submit(0, "p", "abc", {"answer": "abc"})
        until(lambda: len(scorer._scores) == 500)
        assert len(scorer.collect()) == 500
        assert scorer.collect() == {}


def until(holds) -> None:
    """Waits for something that another thread or process does."""
    end = time.monotonic() + 300.0
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_new_scores_are_seen_once_before_all_are_collected(user_module):
    config, seen = make_config({user_module: 1.0}, timeout_s=60.0), {}
    with Scorer(config) as scorer:
        assert scorer.news() == {}
        for key in range(3):
            scorer.submit(key, "p", "abc", {"answer": "abc"})
        scorer.submit("late", "p", "hang", {"answer": "abc"})
        until(lambda: seen.update(new := scorer.news()) or len(seen) == 3 and not new)
        assert seen.keys() == {0, 1, 2} and scorer.news() == {}
        scorer.drop_others({0, 2})
        assert scorer.collect().keys() == {0, 2}, "what hangs is not waited for"
        assert scorer.news() == {}


def test_a_dropped_completion_leaves_no_score_under_its_key(user_module):
    """The worker still scores it when another completion gets its key."""
    with Scorer(make_config({user_module: 1.0}, timeout_s=2.0)) as scorer:
        scorer.submit("a", "p", "hang", {"answer": "abc"})
        scorer.submit("b", "p", "never scored", {"answer": "abc"})
        until(lambda: scorer._workers[0].job is not None)
        scorer.drop_others(())
        scorer.submit("a", "p", "abc", {"answer": "abc"})
        assert scorer.collect() == {"a": Score(1.0, {user_module: 1.0})}


def test_closing_does_not_wait_for_a_reward_that_hangs(user_module):
    with Scorer(make_config({user_module: 1.0}, timeout_s=60.0)) as scorer:
        scorer.submit("a", "p", "hang", {"answer": "abc"})
        time.sleep(0.1)
        start = time.monotonic()
    assert time.monotonic() - start < 30.0


def test_what_a_hung_reward_started_is_killed_with_it(user_module, tmp_path):
    completion = f"child {tmp_path / 'pid'}"
    scores = score_all(make_config({user_module: 1.0}, timeout_s=2.0), [completion])
    assert scores[completion].failure == "timeout"
    pid = int((tmp_path / "pid").read_text())
    until(lambda: not is_running(pid))


def test_what_rewards_have_started_ends_with_a_trainer_that_is_killed(user_module, tmp_path):
    script = f"""
from tests_rewards_config import config
from tlt_jax.rewards import Scorer
with Scorer(config) as scorer:
    scorer.submit(0, "p", "child {tmp_path / "pid"}", {{"answer": ""}})
    scorer.collect()
"""
    (tmp_path / "tests_rewards_config.py").write_text(
        "from dataclasses import replace\nfrom tlt_jax.config import Config\nconfig = Config()\n"
        f"config = replace(config, reward=replace(config.reward, terms={{{user_module!r}: 1.0}}, timeout_s=600.0))\n"
    )
    path = os.pathsep.join([str(Path(__file__).parents[2]), str(tmp_path)])
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}
    )
    until((tmp_path / "pid").exists)
    until((tmp_path / "pid").read_text)
    child = int((tmp_path / "pid").read_text())
    group = os.getpgid(child)
    assert is_running(child) and is_running(group)
    trainer.kill()
    trainer.wait()
    until(lambda: not is_running(child) and not is_running(group))


def test_workers_get_the_variables_that_are_named(user_module, monkeypatch):
    monkeypatch.setenv("A_SECRET", "1")
    monkeypatch.setenv("A_KNOWN_ONE", "1")
    config = make_config({user_module: 1.0})
    config = replace(config, reward=replace(config.reward, environment=["A_KNOWN_ONE"]))
    parts = score_all(config, ["secret"])["secret"].parts
    assert (parts[f"{user_module}/seen"], parts[f"{user_module}/known"]) == (0.0, 1.0)


def test_what_is_no_message_of_a_worker_is_refused():
    odd = (
        '["score", {"a": "b"}]',
        '["score", {"a": NaN}, 1]',
        '["term", 1]',
        "cos\n",
        "{}",
        "[]",
        "",
    )
    for message in odd:
        with pytest.raises(ValueError):
            scorer_module.read(message.encode())


@pytest.mark.parametrize(("cores", "count"), [(1, 2), (3, 3), (64, 4)])
def test_the_host_says_how_many_processes_score(monkeypatch, cores, count):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)))
    config = make_config({"exact": 1.0}, workers=0)
    assert scorer_module.workers(config) == count
    assert scorer_module.workers(config, is_local=True) == 1
    assert scorer_module.workers(make_config({"exact": 1.0}, workers=7)) == 7


SLOW_TO_START = """
import os, time
time.sleep({seconds})
if os.path.exists({lock!r}):
    raise RuntimeError("one process at a time")
{claim}

def probe(prompt, completion, row):
    if completion == "die":
        os._exit(3)
    return os.getpid()
"""


def ready(scorer: Scorer, count: int) -> bool:
    return sum(worker.is_ready for worker in list(scorer._workers)) == count


def test_a_spare_process_takes_over_for_one_that_died(tmp_path, monkeypatch):
    (tmp_path / "slow_rewards.py").write_text(SLOW_TO_START.format(seconds=2.0, lock="", claim=""))
    monkeypatch.syspath_prepend(tmp_path)
    with Scorer(make_config({"slow_rewards:probe": 1.0})) as scorer:
        until(lambda: ready(scorer, 2))
        started = {worker.process.pid for worker in scorer._workers}
        for completion in ("die", "fine"):
            scorer.submit(completion, "p", completion, {})
        scores = scorer.collect()
        assert scores["fine"].parts["slow_rewards:probe"] in started
        assert [scores[one].failure for one in ("die", "fine")] == ["crash", None]
        until(lambda: ready(scorer, 2))


def test_only_reward_workers_processes_score_at_a_time(user_module):
    with Scorer(make_config({user_module: 1.0}, timeout_s=60.0)) as scorer:
        until(lambda: ready(scorer, 2))
        scorer.submit("a", "p", "hang", {"answer": "abc"})
        scorer.submit("b", "p", "abc", {"answer": "abc"})
        until(lambda: scorer._workers[0].term)
        time.sleep(0.2)
        assert not scorer.news()


def test_a_run_goes_on_without_a_spare_process_that_does_not_start(tmp_path, monkeypatch, caplog):
    lock = str(tmp_path / "lock")
    claim = f"open({lock!r}, 'w').close()"
    module = SLOW_TO_START.format(seconds=0.0, lock=lock, claim=claim)
    (tmp_path / "lone_rewards.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    with Scorer(make_config({"lone_rewards:probe": 1.0})) as scorer:
        until(lambda: "no spare scoring process" in caplog.text)
        assert "one process at a time" in caplog.text
        scorer.submit("a", "p", "fine", {})
        assert scorer.collect()["a"].failure is None


def test_an_answer_that_earns_every_term_gets_their_exact_sum():
    """Added one by one, 0.7, 0.2 and 0.1 are 0.9999999999999999."""
    weights = {"exact": 0.7, "gsm8k": 0.2, "gsm8k_flexible": 0.1}
    assert score_all(make_config(weights), ["#### 5"], "#### 5")["#### 5"].value == 1.0


def test_partial_credit_is_for_the_number_and_for_the_form():
    earned = {
        "5 </reasoning>\n<answer>\\boxed{1,234}</answer>": 1.0,
        "so \\boxed{1234}": 0.5,
        "<answer>\\boxed{1234}</answer></reasoning>": 0.5,
        "</reasoning><answer>\\boxed{1234}</answer></reasoning>": 0.5,
        "</reasoning><answer>\\boxed{5}</answer>": 0.1,
        "</reasoning><answer>5</answer>": 0.0,
        "so \\boxed{5}": 0.0,
    }
    scores = score_all(
        make_config({"tlt_jax.rewards.terms:partial_credit": 1.0}), [*earned], "#### 1,234"
    )
    assert {text: score.value for text, score in scores.items()} == earned


def is_running(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] not in "ZX"


def test_a_worker_killed_from_outside_is_replaced(user_module):
    with Scorer(make_config({user_module: 1.0})) as scorer:
        for step in range(3):
            scorer.submit(step, "p", "modules", {"answer": "abc"})
            (score,) = scorer.collect().values()
            assert score.failure is None
            os.kill(int(score.parts[user_module]), 9)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("no_such_module:f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("their_rewards:f", "module 'their_rewards' has no function 'f'"),
        (
            "exakt",
            "no reward 'exakt': use task, math, math_flexible, gsm8k, gsm8k_flexible, exact, format, environment or "
            "module:function",
        ),
    ],
)
def test_a_reward_that_cannot_be_loaded_stops_at_start(user_module, name, part):
    with pytest.raises(RewardError) as error:
        Scorer(make_config({"exact": 1.0, name: 1.0}))
    assert part in str(error.value)


def test_the_page_on_rewards_names_all_terms_and_variables():
    page = (Path(__file__).parents[2] / "docs" / "rewards.md").read_text()
    assert [word for word in (*REWARDS, *workers.PASSED) if f"`{word}`" not in page] == []


def test_rewards_that_make_no_sense_are_refused():
    config = make_config({"task": 1.0})
    with pytest.raises(RewardError, match="'task' needs a generated task, but data.train is set"):
        Scorer(replace(config, data=replace(config.data, train="a.jsonl")))
    with pytest.raises(RewardError, match="reward.terms is empty"):
        Scorer(make_config({}))


def test_a_script_that_imports_jax_without_a_main_guard_can_score(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        textwrap.dedent("""
        import jax
        from tlt_jax.config import Config
        from tlt_jax.rewards import Scorer
        with Scorer(Config()) as scorer:
            scorer.submit(0, "12:", "=3", {"answer": "3"})
            print(scorer.collect()[0].value)
        """)
    )
    path = os.pathsep.join(
        [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    )
    environment = os.environ | {"PYTHONPATH": path}
    done = subprocess.run(
        [sys.executable, script], capture_output=True, text=True, timeout=120, env=environment
    )
    assert (done.stdout, done.returncode) == ("1.0\n", 0), done.stderr


@pytest.mark.skipif("GSM8K_DIR" not in os.environ, reason="GSM8K_DIR is not set")
def test_gold_answers_score_one_and_perturbed_ones_zero():
    files = [Path(os.environ["GSM8K_DIR"]) / f"{name}.jsonl" for name in ("train", "test")]
    lines = [line for path in files for line in path.open(encoding="utf-8")]
    assert len(lines) == 8792
    formulas = terms.math_reward()
    for i, line in enumerate(lines):
        row = json.loads(line)
        solution, _, gold = row["answer"].rpartition("####")
        value = int(gold.replace(",", ""))
        wrong = (value + 1, value - 1, value * 10 + 3, value + 100)[i % 4]
        for given, score in ((value, 1.0), (wrong, 0.0)):
            text = f"The answer is {given:,}.00 dollars."
            assert terms.gsm8k("", text, row) == 0.0, text
            for form in (f"{solution}#### {given:,}", f"\\boxed{{{given}}}", text):
                assert terms.gsm8k_flexible("", form, row) == score, (form, row)
                assert form is text or terms.gsm8k("", form, row) == score, (form, row)
            assert i % 8 or formulas("", f"{solution}#### {given:,}", row) == score, row
        assert terms.gsm8k("", row["answer"], row) == 1.0


def test_no_model_text_is_compiled(monkeypatch):
    import sympy.parsing.sympy_parser as parser

    def refuse(*_, **__):
        raise AssertionError("sympy was about to evaluate text")

    monkeypatch.setattr(parser, "eval_expr", refuse)
    compiled, is_watching = [], True
    sys.addaudithook(
        lambda event, args: is_watching and event == "compile" and compiled.append(str(args[0]))
    )
    attack = "__import__('os').system('marker')"
    texts = [attack, f"\\boxed{{{attack}}}", f"${attack}$", f"#### {attack}"]
    texts += [f"the answer is {attack}", "1/2*(marker)"]
    row = {"answer": "4", "environment": {"failure": "", "reward": 0.0, "numbers": {}}}
    for name in REWARDS:
        reward = terms.resolve(name, Config())
        for text in texts:
            assert terms.evaluate(name, reward, "", text, row)[name] in (0.0, 0.5)
    is_watching = False
    assert not [source for source in compiled if "marker" in source]


def test_a_reference_that_math_verify_cannot_read_is_an_error_not_a_zero():
    scores = score_all(make_config({"math": 1.0}), ["\\boxed{4}"], answer="$$")
    assert scores["\\boxed{4}"].failure == "error"


@pytest.mark.parametrize(
    ("prompt", "completion", "think", "answer"),
    [
        ("", "<think>a</think> \\boxed{3}", 1, 1),
        ("Go. <think>\n", "a</think>#### 3", 1, 1),
        ("", "<think>a</think> 3", 1, 0),
        ("", "\\boxed{3}", 0, 1),
        ("", "x <think>a</think> \\boxed{3}", 0, 1),
        ("", "<think> </think> 3", 0, 0),
        ("", "<think>a</think>b</think> #### 3", 0, 1),
        ("", "<think>\\boxed{3}</think> ####", 1, 0),
        ("", "<think>a \\boxed{3}", 0, 1),
    ],
)
def test_format_wants_thoughts_in_tags_and_a_marked_answer(prompt, completion, think, answer):
    expected = {"score": (think + answer) / 2, "think": think, "answer": answer}
    assert terms.tagged(prompt, completion, {}) == expected


def test_exact_ignores_thoughts_and_outer_whitespace():
    assert terms.exact("", "<think>no</think>\n yes \n", {"answer": "yes"}) == 1.0
    assert terms.exact("", "yes!", {"answer": "yes"}) == 0.0
