"""Many environments run beside the caller, and survive whatever one of them does."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from environments import faces
from environments.test_protocol import make_maker

from tlt_jax.config import Config, extension, load
from tlt_jax.config.task import Environment
from tlt_jax.distributed import workers
from tlt_jax.environments import Call, Environments, Reply, pool as pool_module
from tlt_jax.errors import ConfigError, EnvironmentsError


def make_config(name: str = "Trouble", count: int = 1, timeout_s: float = 20.0, **knobs) -> Config:
    path = name and f"environments.faces:{name}"
    return replace(
        Config(), environment=Environment(path=path, workers=count, timeout_s=timeout_s, **knobs)
    )


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    """Nobody waits at the end for environments that sleep."""
    monkeypatch.setattr(pool_module, "CLOSE_S", -1.0)


def until(is_true: Callable[[], bool], limit_s: float = 60.0) -> None:
    end = time.monotonic() + limit_s
    while not is_true():
        assert time.monotonic() < end, "it takes too long"
        time.sleep(0.01)


def replies(pool: Environments, count: int) -> dict:
    """The news until there are so many replies."""
    found: dict = {}

    def is_enough() -> bool:
        found.update(pool.news())
        return len(found) >= count

    until(is_enough)
    return found


def begun(pool: Environments, *keys, **row) -> dict:
    for key in keys:
        pool.begin(key, {"name": key} | row, seed=0)
    found = replies(pool, len(keys))
    assert not [reply for reply in found.values() if reply.failure]
    return found


def said(reply: Reply) -> str:
    (message,) = reply.messages
    return message["content"]


def is_running(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True)
    return state.stdout.strip()[:1] not in ("", "Z")


def group(process_group: int) -> list[str]:
    found = subprocess.run(["ps", "-eo", "pgid=,stat="], capture_output=True, text=True).stdout
    lines = [line.split() for line in found.splitlines()]
    return [state for number, state in lines if int(number) == process_group and state[0] != "Z"]


def test_environments_run_in_processes_without_jax_and_end_with_the_pool():
    with Environments(make_config(count=2)) as pool:
        assert begun(pool, *range(8))[0] == Reply(({"role": "user", "content": "go"},))
        for key in range(8):
            pool.act(key, "end")
        found = replies(pool, 8)
        pids = {int(said(reply)) for reply in found.values()}
        assert len(pids) == 2 and os.getpid() not in pids
        others = {reply._replace(messages=(), info=None) for reply in found.values()}
        assert others == {Reply((), 1.0, True, info=None)}
        assert all(reply.info == {"heavy": 0.0} for reply in found.values())
        with pytest.raises(ValueError, match="environment 0 is not live"):
            pool.act(0, "again")
        begun(pool, 0)
        assert all(group(pid) for pid in pids)
    assert not any(group(pid) for pid in pids)
    pool.close()


def test_a_slow_environment_delays_no_other():
    with Environments(make_config()) as pool:
        begun(pool, *range(100))
        start = time.monotonic()
        for key in range(100):
            pool.act(key, "sleep 5" if key == 50 else "go")
        found = replies(pool, 99)
        assert time.monotonic() - start < 4.0
        assert len(found) == 99 and 50 not in found
        with pytest.raises(ValueError, match="environment 50 has a turn under way"):
            pool.act(50, "go")
        assert replies(pool, 1)[50].reward == 1.0


def test_thousands_of_environments_are_live():
    with Environments(make_config(count=2)) as pool:
        start = time.monotonic()
        keys = range(2000)
        begun(pool, *keys)
        for _ in range(2):
            for key in keys:
                pool.act(key, "go")
            found = replies(pool, 2000)
            assert {reply.reward for reply in found.values()} == {1.0}
        assert sorted(len(host.live) for host in pool._hosts) == [1000, 1000]
        pool.drop(keys)
        begun(pool, *keys)
        assert time.monotonic() - start < 30.0


def test_what_fails_is_told_by_kind_and_leaves_others_alone():
    expected = {
        "raise": ("error", "ValueError: first lost"),
        "leave": ("error", "SystemExit"),
        "long": ("error", "ValueError: the messages of a turn have 2097"),
        "set": ("error", "TypeError: Object of type set is not JSON serializable"),
        "sleep 30": ("timeout", "no answer after 1 s"),
    }
    with Environments(make_config(timeout_s=1.0)) as pool:
        begun(pool, *expected, "good")
        for key in expected:
            pool.act(key, key)
        found = replies(pool, len(expected))
        for key, (failure, detail) in expected.items():
            reply = found[key]
            assert (reply.messages, reply.reward, reply.done, reply.failure) == (
                (),
                0.0,
                True,
                failure,
            )
            assert reply.detail.startswith(detail)
        pool.act("good", "end")
        assert replies(pool, 1)["good"].reward == 1.0
        pool.begin("bad", {"opening": "raise"}, 0)
        assert replies(pool, 1)["bad"].failure == "error"
        pool.begin("slow", {"opening": "sleep 30"}, 0)
        assert replies(pool, 1)["slow"].failure == "timeout"


def test_a_row_that_no_worker_can_read_fails_alone(tmp_path, monkeypatch):
    (tmp_path / "only_here.py").write_text("class Value: pass")
    with Environments(make_config()) as pool:
        monkeypatch.syspath_prepend(tmp_path)
        begun(pool, "good")
        pool.begin("odd", {"value": __import__("only_here").Value()}, 0)
        assert replies(pool, 1)["odd"].detail == "ModuleNotFoundError: No module named 'only_here'"
        pool.act("good", "end")
        assert replies(pool, 1)["good"].reward == 1.0


def test_a_worker_with_a_hung_turn_takes_no_new_environment_and_ends_after_its_last_one():
    with Environments(make_config(timeout_s=0.5)) as pool:
        begun(pool, "hung", "live")
        (first,) = pool._hosts
        pool.act("hung", "sleep 1000")
        assert replies(pool, 1)["hung"].failure == "timeout"
        begun(pool, "new")
        pool.act("new", "go"), pool.act("live", "go")
        found = replies(pool, 2)
        assert int(said(found["live"])) == first.process.pid != int(said(found["new"]))
        time.sleep(0.5)
        assert is_running(first.process.pid)
        pool.act("live", "end")
        assert replies(pool, 1)["live"].done
        until(lambda: not is_running(first.process.pid) and len(pool._hosts) == 1)
        pool.act("new", "end")
        assert replies(pool, 1)["new"].reward == 1.0


def test_a_worker_whose_turn_was_only_late_goes_on():
    with Environments(make_config(timeout_s=0.5)) as pool:
        begun(pool, "late", "live")
        (first,) = pool._hosts
        pool.act("late", "sleep 2")
        assert replies(pool, 1)["late"].failure == "timeout"
        until(lambda: len(pool._hosts) == 2 and pool._hosts[1].is_ready)
        until(lambda: pool._hosts == [first])
        assert begun(pool, "late")


def test_a_dropped_environment_has_no_news_and_its_hung_turn_ends_with_its_worker(tmp_path):
    with Environments(make_config(timeout_s=1.0, args={"folder": str(tmp_path)})) as pool:
        begun(pool, "a", "b", "c", "hung")
        (first,) = pool._hosts
        pool.act("a", "sleep 0.3"), pool.act("b", "go"), pool.act("hung", "sleep 1000")
        pool.drop(["a", "b", "c", "hung", "nobody"])
        pool.begin("a", {"name": "again"}, 0)
        until((tmp_path / "a").exists)
        assert set(replies(pool, 1)) == {"a"} and pool.news() == {}
        assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c"}
        pool.drop(["a"])
        until(lambda: not is_running(first.process.pid))
        assert pool.news() == {} and (tmp_path / "again").exists()


def test_a_worker_that_dies_fails_its_live_environments_and_is_replaced():
    with Environments(make_config(count=2)) as pool:
        begun(pool, *range(4))
        dying = [pool._seats[key].host for key in range(4)]
        pool.act(0, "die")
        found = replies(pool, 2)
        assert set(found) == {key for key in range(4) if dying[key] is dying[0]}
        for reply in found.values():
            assert reply == Reply(
                done=True, failure="crash", detail="the worker died of exit code 3"
            )
        (left,) = {key for key in range(4)} - set(found) - {max(set(range(4)) - set(found))}
        pool.act(left, "end")
        assert replies(pool, 1)[left].reward == 1.0
        until(lambda: sum(host.is_ready for host in pool._hosts) == 2)
        assert begun(pool, *range(10, 14))


def test_acting_on_an_environment_whose_crash_is_not_yet_seen_is_no_mistake():
    with Environments(make_config()) as pool:
        begun(pool, "a")
        pool._hosts[0].process.kill()
        until(lambda: "a" in pool._news)
        pool.act("a", "go")
        assert pool.news()["a"].detail == "the worker died of signal 9"


def test_an_environment_that_stops_its_whole_worker_is_a_timeout(monkeypatch):
    monkeypatch.setattr(pool_module, "SILENT_S", 1.0)
    with Environments(make_config(timeout_s=1.0)) as pool:
        begun(pool, "holding", "idle")
        pool.act("holding", "hold")
        found = replies(pool, 2)
        assert (found["holding"].failure, found["idle"].failure) == ("timeout", "crash")
        assert found["idle"].detail == "its worker said nothing for 2 s"
        assert begun(pool, "new")


def test_environments_are_closed_when_the_pool_is(tmp_path, monkeypatch):
    monkeypatch.setattr(pool_module, "CLOSE_S", 20.0)
    with Environments(make_config(count=2, args={"folder": str(tmp_path)})) as pool:
        begun(pool, *range(20))
    assert len(list(tmp_path.iterdir())) == 20


def test_what_environments_have_started_ends_with_a_trainer_that_is_killed(tmp_path):
    script = f"""
import time
from dataclasses import replace
from tlt_jax.config import Config
from tlt_jax.config.task import Environment
from tlt_jax.environments import Environments
path = "environments.faces:Trouble"
with Environments(replace(Config(), environment=Environment(path=path, workers=2))) as pool:
    pool.begin(0, dict(opening="child"), 0)
    while not pool.news():
        time.sleep(0.01)
    open({str(tmp_path / "pids")!r}, "w").write(" ".join(str(host.process.pid) for host in pool._hosts) + " .")
    time.sleep(1000)
"""
    place = tmp_path / "pids"
    path = os.pathsep.join(map(str, [Path(__file__).parents[2], Path(__file__).parents[1]]))
    trainer = subprocess.Popen(
        [sys.executable, "-c", script], env=os.environ | {"PYTHONPATH": path}
    )
    until(lambda: place.exists() and place.read_text().endswith("."))
    pids = list(map(int, place.read_text().split()[:-1]))
    assert len(pids) == 2 and all(group(pid) for pid in pids)
    trainer.kill()
    trainer.wait()
    until(lambda: not any(group(pid) for pid in pids))


def test_tools_run_in_workers_and_their_schemas_are_known():
    config = make_config("Counter", tools=["environments.faces:double"])
    with Environments(config) as pool:
        assert pool.schemas == make_maker("Counter", tools=["double"]).schemas
        begun(pool, "a", start=3)
        pool.act("a", "", [Call("add", {"amount": 2}), Call("double", {})])
        reply = replies(pool, 1)["a"]
        assert [one["content"][:9] for one in reply.messages] == ["5", "error: mi"]
        assert reply.info == {"tool_errors": 1.0}
        pool.act("a", "done")
        assert replies(pool, 1)["a"] == Reply(done=True, reward=0.5)


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("Stepless", "has no step and no public method"),
        ("broken", "no server at port 1"),
        ("none", "no function 'none'"),
        ("Untyped", "the tool 'add' has no schema: Argument amount is missing a type hint"),
    ],
)
def test_what_cannot_start_is_said_by_the_constructor(name, part):
    with pytest.raises(EnvironmentsError) as error:
        Environments(make_config(name))
    assert part in str(error.value) and "\n" not in str(error.value)


def test_a_module_that_a_worker_cannot_import_is_said_by_the_constructor(tmp_path, monkeypatch):
    (tmp_path / "raising.py").write_text("raise RuntimeError('no licence\\nfor this game')")
    monkeypatch.syspath_prepend(tmp_path)
    reasons = {
        "raising:Game": "(RuntimeError: no licence for this game)",
        "nowhere:Game": "(ModuleNotFoundError: No module named 'nowhere'): correct it, or put its folder on PYTHONPATH",
    }
    for path, reason in reasons.items():
        with pytest.raises(EnvironmentsError) as error:
            Environments(replace(Config(), environment=Environment(path=path, workers=1)))
        assert reason in str(error.value) and "\n" not in str(error.value)


def test_workers_that_die_while_starting_are_said_by_the_constructor(tmp_path, monkeypatch):
    (tmp_path / "deadly.py").write_text("import os\nos._exit(9)")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(workers, "MAX_FAILED_STARTS", 2)
    config = replace(Config(), environment=Environment(path="deadly:Game", workers=1))
    with pytest.raises(
        EnvironmentsError, match="do not start: the worker died of exit code 9, 2 times"
    ):
        Environments(config)


def test_functions_that_no_worker_can_import_are_refused():
    class Here:
        pass

    with pytest.raises(EnvironmentsError, match="put it in a module"):
        Environments(
            replace(
                Config(), environment=Environment(path=extension.named("environment.path", Here))
            )
        )


def test_a_key_begins_once():
    with Environments(make_config()) as pool:
        pool.begin("a", {}, 0)
        with pytest.raises(ValueError, match="environment 'a' has already begun"):
            pool.begin("a", {}, 0)
        with pytest.raises(ValueError, match="environment 'b' is not live"):
            pool.act("b", "go")


@pytest.mark.parametrize(
    "message",
    [
        '["reply", 1, [], 0.0, true, "", ""]',
        '["reply", 1, ["x"], 0.0, true, "", "", {}]',
        '["beat", 1]',
        "x",
        "{}",
    ],
)
def test_what_is_no_message_of_a_worker_is_refused(message):
    with pytest.raises(ValueError):
        pool_module.read(message.encode())


KNOBS = [
    (
        "environment.path",
        "Game",
        "environment.path 'Game' is not known: use module:name, textarena:GAME-ID",
    ),
    ("environment.path", "textarena:", "is not known"),
    ("environment.path", "<local>:Game", "put it in a module"),
    ("environment.tools", ["double"], "environment.tools 'double' is not known: use module:name"),
    ("environment.args", {"a": 1}, "environment.args {'a': 1} without environment.path"),
    ("environment.turn_tokens", 10**6, "more than an answer has"),
    ("environment.reward", "mean", "use sum | last"),
]


@pytest.mark.parametrize(("knob", "value", "part"), KNOBS)
def test_knobs_that_make_no_sense_are_refused(knob, value, part):
    with pytest.raises(ConfigError) as error:
        load.build({"model": {"path": "a"}}, [(knob, value)])
    assert part in str(error.value)


def test_the_lines_of_the_page_are_knobs():
    page = Path(__file__).parents[2] / "docs" / "environments.md"
    found = re.findall(r"`(\{path: .*?\})`", page.read_text())
    for line in found:
        knobs = {"model": {"path": "a"}, "environment": yaml.safe_load(line)}
        assert load.build(knobs, [("reward.terms", {"environment": 1.0})]).environment.path
    assert len(found) == 7


def test_tools_may_be_given_as_functions():
    assert load.pairs({"environment.tools": [faces.double]}) == [
        ("environment.tools", ["environments.faces:double"])
    ]
