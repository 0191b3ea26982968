"""Whatever a user brings plays the same episode, and what is wrong with it is said in one line."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from environments.faces import Odd

from tlt_jax.config import Config
from tlt_jax.config.task import Environment
from tlt_jax.environments.protocol import Call, Episode, Maker, Reply
from tlt_jax.errors import UserError

PROMPT = [{"role": "user", "content": "2 + 2"}]


def make_maker(name: str = "", **knobs) -> Maker:
    path = name if ":" in name or not name else f"environments.faces:{name}"
    tools = [f"environments.faces:{tool}" for tool in knobs.pop("tools", [])]
    return Maker(replace(Config(), environment=Environment(path=path, tools=tools, **knobs)))


def started(
    name: str = "", row: dict | None = None, seed: int = 7, **knobs
) -> tuple[Episode, Reply]:
    episode = make_maker(name, **knobs).episode(row or {})
    return episode, episode.reset(row or {}, seed)


def user(*texts: str) -> tuple[dict, ...]:
    return tuple({"role": "user", "content": text} for text in texts)


def test_gymnasium_gives_five_values():
    episode, opening = started("Gymnasium", {"question": "q", "options": {}})
    assert opening == Reply(user("seed 7"), info={"start": 1.0})
    assert episode.step("a") == Reply(user("a, 1 left"), 0.25, info={"left": 1.0})
    assert episode.step("b") == Reply(user("b, 0 left"), 0.25, True, info={"left": 0.0})
    assert started("Truncating")[0].step("a") == Reply(done=True)


def test_tunix_gives_four_values():
    episode, opening = started("Tunix", {"question": "q"})
    assert opening == Reply(info={"start": 2.0})
    assert episode.step("a") == Reply(user("a"), 1.0)
    assert episode.step("end") == Reply(user("end"), 1.0, True)


def test_reset_gets_the_columns_that_it_takes():
    row = {"question": "q", "id": 3}
    episode, opening = started("Columns", row)
    assert opening.messages == ({"role": "system", "content": "s"}, *user("q 7"))
    assert episode.step("") == Reply(done=True)
    assert started("Everything", row)[1].messages == user("id question seed")
    assert started("Columns", row | {"seed": 5})[1].messages[1:] == user("q 5")


@pytest.mark.parametrize("prompt", [PROMPT, "2 + 2"])
def test_skyrl_gym_gets_the_prompt_and_the_row(prompt):
    episode, opening = started("SkyRL", {"prompt": prompt, "hint": "think", "answer": "4"})
    assert opening == Reply(user("think"), info={"hints": 1.0})
    assert episode.step("5") == Reply(user("again"), info={"n": 3.0})
    assert episode.step("4") == Reply((), 1.0, True, info={"n": 3.0})
    with pytest.raises(UserError, match="init changed the prompt"):
        started("Replacing", {"prompt": prompt})


def test_a_client_of_openenv_is_made_by_a_function():
    episode, opening = started("openenv", args={"size": 3})
    assert opening == Reply(user("size 3"))
    assert episode.step("go") == Reply(user("GO"), 0.5)
    assert episode.step("stop") == Reply(user("STOP"), 0.5, True)
    assert started("namespace")[0].step("a") == Reply((), 1.0, True)


def test_coroutines_share_a_loop_that_runs_between_turns():
    episode, opening = started("Asynchronous")
    time.sleep(0.1)
    assert opening.messages == user("go")
    assert episode.step("a") == Reply(user("True"), 1.0, True)
    episode.close()
    time.sleep(0.05)
    assert episode.world.ticking.cancelled()


def tool(name: str, content: str) -> dict:
    return {"role": "tool", "name": name, "content": content}


def test_the_methods_of_a_class_without_step_are_tools():
    maker = make_maker("Counter", tools=["double"])
    names = [one["function"]["name"] for one in maker.schemas]
    assert names == ["double", "add", "read"]
    wanted = maker.schemas[1]["function"]["parameters"]
    assert wanted["properties"]["amount"] == {"type": "integer", "description": "what is added"}
    assert wanted["required"] == ["amount"]

    episode = maker.episode({})
    assert episode.reset({"start": 3, "other": 1}, 0) == Reply(user("at 3"))
    calls = [
        Call("add", {"amount": 2, "times": 2}),
        Call("read", {}),
        Call("double", {"number": 4}),
    ]
    said = (tool("add", "7"), tool("read", '{"value": 7}'), tool("double", "8"))
    assert episode.step("x", calls) == Reply(said, info={"tool_errors": 0.0})
    assert episode.step("I am done") == Reply((), 0.7, True)


def test_what_is_wrong_with_a_call_is_told_to_the_policy():
    calls = [
        (Call("multiply", {}), "error: no tool 'multiply', only double, explode"),
        (Call("double", {"x": 1}), "error: missing a required argument: 'number'"),
        (Call("double", [1]), "error: the arguments of double are a list of 1, not an object"),
        (Call("double", {"number": None}), "error: TypeError: unsupported operand"),
        (Call("explode", {"reason": "why"}), "error: KeyError: 'why'"),
        (Call("double", {"number": 1.5}), "3.0"),
    ]
    episode, opening = started(tools=["double", "explode"])
    reply = episode.step("", [call for call, _ in calls])
    for message, (call, content) in zip(reply.messages, calls, strict=True):
        assert message["role"] == "tool" and message["name"] == call.name
        assert message["content"].startswith(content)
    assert (opening, reply.info, reply.done) == (Reply(), {"tool_errors": 5.0}, False)
    assert episode.step("no more") == Reply(done=True)


def test_tools_beside_an_environment_leave_its_steps_alone():
    episode, _ = started("Gymnasium", tools=["double"])
    assert episode.step("x", [Call("double", {"number": 1})]).messages == (tool("double", "2"),)
    assert episode.step("y").messages == user("y, 1 left")
    assert started("Gymnasium")[0].step("z", [Call("a", {})]).messages == user("z, 1 left")


def test_the_last_allowed_turn_is_done():
    episode, _ = started("Gymnasium", turns=1)
    assert episode.step("a") == Reply(user("a, 1 left"), 0.25, True, info={"left": 1.0})
    episode, _ = started("Counter", turns=2)
    rewards = [episode.step("", [Call("add", {"amount": 5})])[1:3] for _ in range(2)]
    assert rewards == [(0.0, False), (1.0, True)]


ODD = {
    "three": "step gave a tuple of 3: it gives (observation, reward, done, info), (observation, reward, terminated, truncated",
    "nothing": "step gave a NoneType: it gives",
    "nan": "the reward of step gave nan",
    "word": "the reward of step gave str, not a number",
    "done": "step gave 'yes' as done: it is True or False",
    "said": "step gave a int as what the environment says: give text, or a list of messages with role and content",
    "roleless": "step gave a list of 1 as what",
    "dict": "step gave a dict with observation, reward: it gives",
}


@pytest.mark.parametrize("action", Odd.RESULTS)
def test_a_wrong_return_is_said_in_one_line(action):
    episode, _ = started("Odd")
    with pytest.raises(UserError) as error:
        episode.step(action)
    assert str(error.value).startswith(ODD[action]) and "\n" not in str(error.value)


REFUSED = [
    ({"name": "Stepless"}, "has no step and no public method"),
    ({"name": "Startless"}, "has no reset and no init"),
    ({"name": "broken"}, "made no environment: OSError: no server at port 1"),
    (
        {"name": "absent"},
        "made no environment: ModuleNotFoundError: No module named 'a_package_that",
    ),
    ({"name": "nowhere:Game"}, "module 'nowhere' cannot be imported"),
    ({"name": "Missing"}, "has no function 'Missing'"),
    ({"name": "openenv", "args": {"length": 1}}, "environment.args {'length': 1} do not fit"),
    ({"tools": ["untyped"]}, "the tool 'untyped' has no schema: Argument number is missing a type"),
    ({"tools": ["undocumented"]}, "the tool 'undocumented' has no schema: Cannot generate JSON"),
    ({"name": "textarena:Nothing-v0"}, "environment.path 'textarena"),
    ({"name": "reasoning_gym:nothing"}, "environment.path 'reasoning_gym"),
]


@pytest.mark.parametrize(("knobs", "part"), REFUSED)
def test_what_cannot_be_an_environment_or_a_tool_is_refused_in_one_line(knobs, part):
    with pytest.raises(UserError) as error:
        make_maker(**knobs)
    assert part in str(error.value) and "\n" not in str(error.value)
