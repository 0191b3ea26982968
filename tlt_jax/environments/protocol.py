"""What users bring as environments and tools, behind one interface. Knows no process and no model.

An environment has `reset` or `init`, and either `step(text)` or public methods, which are tools. See Maker and Episode.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import threading
from collections.abc import Awaitable, Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from tlt_jax.config import Config, extension
from tlt_jax.config.task import REASONING_GYM, TEXTARENA
from tlt_jax.distributed.process import skip_warnings
from tlt_jax.distributed.workers import describe
from tlt_jax.environments import games
from tlt_jax.errors import EnvironmentsError, UserError
from tlt_jax.rewards import terms

NO_TOOLS = ("reset", "get_reward", "close")  # public methods of an environment that are no tools
ADDRESS = "base_url"  # the parameter by which a function is an agent, see environments.agents
CLOSE_S = 5.0  # seconds that environments have to close at the end of a run
TOOL_ERRORS = "tool_errors"  # of `info`: calls of a turn that failed
RESULTS = (
    "(observation, reward, done, info), (observation, reward, terminated, truncated, info), a dict with observations, reward "
    "and done, or an object with .observation, .reward and .done"
)


class Call(NamedTuple):
    """A call of a tool, as the policy wrote it."""

    name: str
    arguments: dict[str, Any]


Sampled = tuple[
    list[int], list[float], str
]  # tokens of a turn, their log-probs, and "stop" or "length"


class Reply(NamedTuple):
    """What an environment answers to a turn, or to its start.

    tokens: of an agent, instead of messages: its first prompt, or what it adds. most: tokens of the next turn; 0: any number.
    """

    messages: tuple[dict[str, Any], ...] = ()  # chat messages; often none at the end
    reward: float = 0.0  # of this turn
    done: bool = False
    failure: str = ""  # "timeout" | "crash" | "error", and then done
    detail: str = ""
    info: dict[str, float] = {}  # numbers of the environment, for metrics
    tokens: tuple[int, ...] = ()
    most: int = 0


class Maker:
    """How environments of this configuration are made, and the tools of their policies.

    `schemas`: JSON schemas of the tools. `is_agent`: `make` is one, see environments.agents. Raises EnvironmentsError or
    ConfigError for what cannot be imported or made, has no step and no tools, or is a tool without a schema.
    """

    def __init__(self, config: Config):
        self.knobs = config.environment
        self.make = self._maker()
        self.tools = {}
        for name in self.knobs.tools:
            tool = extension.load("environment.tools", name)
            self.tools[tool.__name__] = tool
        described = list(self.tools.values())

        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, name="environments", daemon=True).start()
        self.is_agent = is_agent(self.make)
        if self.is_agent and self.tools:
            raise EnvironmentsError(
                f"environment.path {self.knobs.path!r} is an agent, whose requests name its tools: remove environment.tools"
            )
        if self.make is not None and not self.is_agent and (sample := self._sample()):
            described += [getattr(sample, name) for name in methods(sample)]
        self.schemas = [schema(tool) for tool in described]

    def episode(self, row: Mapping[str, Any]) -> Episode:
        """An environment that is not yet reset, for a row. SkyRL-Gym's `extras` are the row."""
        given = self.knobs.args
        world = self.make(**extras(self.make, row) | given) if self.make else None
        return Episode(world, self.tools, self.knobs.turns, self.loop)

    def _maker(self) -> Callable[..., Any] | None:
        path, args = self.knobs.path, self.knobs.args
        library, _, name = path.partition(":")
        known = {TEXTARENA: games.TextArena, REASONING_GYM: games.ReasoningGym}
        if not path:
            return None
        if library in known:
            return partial(known[library], name)
        make = extension.load("environment.path", path)
        if is_agent(make):
            return make
        if reason := extension.misfit(make, **extras(make, {}) | args):
            raise EnvironmentsError(f"environment.args {args} do not fit {path!r}: {reason}")
        return make

    def _sample(self) -> Any:
        """The class of the environments, or one that was made and closed; None when only a row makes one."""
        found = self.make if isinstance(self.make, type) else None
        if found is None and not extras(self.make, {}):
            try:
                episode = self.episode({})
                episode.close()
            except UserError:
                raise
            except Exception as error:  # the user's code may raise anything
                raise EnvironmentsError(
                    f"environment.path {self.knobs.path!r} made no environment: {describe(error)}"
                ) from error
            found = episode.world
        if found is None:
            return None
        has_start = any(callable(getattr(found, name, None)) for name in ("reset", "init"))
        if not has_start or not (is_stepped(found) or methods(found)):
            missing = "step and no public method" if has_start else "reset and no init"
            raise EnvironmentsError(
                f"environment.path {self.knobs.path!r} has no {missing}: an environment has reset(...) or init(messages), and "
                "step(text) or public methods, which are tools"
            )
        return found


class Episode:
    """One environment, from its start to its end: any of the interfaces that `Maker` accepts, or tools alone.

    Methods raise what the environment raises, and EnvironmentsError for returns of another form.
    """

    def __init__(self, world: Any, tools: Mapping[str, Callable[..., Any]], turns: int, loop: Any):
        self.world = world
        self.is_stepped = is_stepped(world)
        self.tools = dict(tools) | {name: getattr(world, name) for name in methods(world)}
        self.turns = turns  # that are left
        self.loop = loop

    def reset(self, row: Mapping[str, Any], seed: int) -> Reply:
        """The start. A `reset` gets those of `seed` and the row's columns that it takes; an `init` the row's prompt.

        The messages follow the prompt of the row.
        """
        if self.world is None:
            return Reply()
        if not hasattr(self.world, "init"):
            found = self._run(self.world.reset, **fitting(self.world.reset, {"seed": seed, **row}))
            found = getattr(found, "observation", found)
            is_pair = isinstance(found, tuple) and len(found) == 2 and isinstance(found[1], dict)
            observation, info = found if is_pair else (found, {})
            return Reply(messages("reset", observation), info=numbers(info))

        prompt = list(messages("the prompt", row.get("prompt")))
        found = self._run(self.world.init, [dict(message) for message in prompt])
        if not (isinstance(found, tuple) and len(found) == 2):
            raise EnvironmentsError(f"init gave {shape(found)}: it gives (messages, info)")
        opening = list(messages("init", found[0]))
        if opening[: len(prompt)] != prompt:
            raise EnvironmentsError("init changed the prompt: it may only add messages after it")
        return Reply(tuple(opening[len(prompt) :]), info=numbers(found[1]))

    def step(self, text: str, calls: Sequence[Call] = ()) -> Reply:
        """One turn of the policy: its tool calls, if there are tools, or else its text. The last allowed turn is done.

        Without `step`, a turn that calls no tool is the last one, and `get_reward`, if there is one, gives its reward.
        """
        self.turns -= 1
        if self.is_stepped and not (calls and self.tools):
            reply = self._stepped(self._run(self.world.step, text))
            return reply._replace(done=reply.done or self.turns <= 0)

        called = [call_tool(self.tools, call, self._run) for call in calls]
        is_done, reward = not calls or self.turns <= 0, 0.0
        if is_done and not self.is_stepped and hasattr(self.world, "get_reward"):
            reward = number("get_reward", self._run(self.world.get_reward))
        errors = float(sum(is_error for _, is_error in called))
        info = {TOOL_ERRORS: errors} if calls else {}
        return Reply(tuple(message for message, _ in called), reward, is_done, info=info)

    def close(self) -> None:
        """Closes the environment, if it can be closed."""
        if callable(close := getattr(self.world, "close", None)):
            self._run(close)

    def _stepped(self, found: Any) -> Reply:
        """The reply that `step` returned."""
        if isinstance(found, tuple) and len(found) in (4, 5):
            observation, reward, *ends, info = found
        elif isinstance(found, dict) and {"observations", "reward", "done"} <= found.keys():
            observation, reward, ends = found["observations"], found["reward"], [found["done"]]
            info = found.get("metadata")
        elif all(hasattr(found, name) for name in ("observation", "reward", "done")):
            observation, reward, ends = found.observation, found.reward, [found.done]
            info = getattr(found, "metadata", None)
        else:
            raise EnvironmentsError(f"step gave {shape(found)}: it gives {RESULTS}")
        if odd := [one for one in ends if one not in (True, False)]:
            raise EnvironmentsError(f"step gave {odd[0]!r} as done: it is True or False")
        said, value = messages("step", observation), number("step", reward)
        return Reply(said, value, any(ends), info=numbers(info))

    def _run(self, function: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """What the function returns; what is awaited for it runs in the event loop of all environments."""
        found = function(*args, **named)
        if not inspect.isawaitable(found):
            return found

        async def wait(one: Awaitable[Any]) -> Any:
            return await one

        return asyncio.run_coroutine_threadsafe(wait(found), self.loop).result()


def call_tool(
    functions: Mapping[str, Callable[..., Any]], call: Call, run: Callable[..., Any]
) -> tuple[dict[str, Any], bool]:
    """The message of a tool, and whether it tells of an error: of the tool, its name or its arguments.

    `run`: calls a function with the arguments that follow it.
    """
    error = ""
    if call.name not in functions:
        error = f"no tool {call.name!r}, only {', '.join(functions) or 'none'}"
    elif not isinstance(call.arguments, dict):
        error = f"the arguments of {call.name} are {shape(call.arguments)}, not an object"
    else:
        error = extension.misfit(functions[call.name], **call.arguments)
    if not error:
        try:
            found = run(functions[call.name], **call.arguments)
            text = found if isinstance(found, str) else json.dumps(found, default=str)
        except Exception as raised:  # the boundary where arguments of a model meet a tool
            error = describe(raised)
    content = f"error: {error}" if error else text
    return {"role": "tool", "name": call.name, "content": content}, bool(error)


def is_agent(make: Any) -> bool:
    """Whether a function has the parameter `base_url`."""
    is_function = callable(make) and not isinstance(make, type | partial)
    return is_function and ADDRESS in inspect.signature(make).parameters


def is_stepped(world: Any) -> bool:
    """Whether an environment, or its class, takes the text of a turn."""
    return callable(getattr(world, "step", None))


def methods(world: Any) -> list[str]:
    """The methods of an environment, or of its class, that are tools: none for one with `step`."""
    if world is None or is_stepped(world):
        return []
    kind = world if isinstance(world, type) else type(world)  # of an instance, properties would run
    public = [name for name, _ in inspect.getmembers(kind, inspect.isfunction) if name[0] != "_"]
    return [name for name in public if name not in NO_TOOLS]


def extras(make: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The row as the argument `extras`, for what makes environments and has it."""
    return {"extras": dict(row)} if "extras" in inspect.signature(make).parameters else {}


def schema(tool: Callable[..., Any]) -> dict[str, Any]:
    """The JSON schema of a tool. Raises EnvironmentsError without type hints, or without a docstring that says enough."""
    skip_warnings()
    from transformers.utils import chat_template_utils as templates

    try:
        return templates.get_json_schema(tool)
    except (templates.TypeHintParsingException, templates.DocstringParsingException) as error:
        raise EnvironmentsError(
            f"the tool {tool.__name__!r} has no schema: {' '.join(str(error).split())}: give type hints, and a docstring that "
            "describes each argument under Args:"
        ) from error


def fitting(function: Callable[..., Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Those of the keyword arguments that a function names; all if it takes any."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some that are built in
        return {}
    if any(one.kind is one.VAR_KEYWORD for one in parameters):
        return dict(given)
    named = {
        one.name for one in parameters if one.kind in (one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    }
    return {name: value for name, value in given.items() if name in named}


def messages(source: str, found: Any) -> tuple[dict[str, Any], ...]:
    """The chat messages that an observation is: text is one of the user. Raises EnvironmentsError for other forms."""
    if isinstance(found, str):
        return ({"role": "user", "content": found},) if found else ()
    if found is None or (isinstance(found, dict | list | tuple) and not found):
        return ()
    if isinstance(found, list | tuple) and all(
        isinstance(one, Mapping) and {"role", "content"} <= one.keys() for one in found
    ):
        return tuple(dict(one) for one in found)
    raise EnvironmentsError(
        f"{source} gave {shape(found)} as what the environment says: give text, or a list of messages with role and content"
    )


def number(source: str, reward: Any) -> float:
    """A reward; None is 0. Raises EnvironmentsError for what is no number, not finite or too large."""
    try:
        return 0.0 if reward is None else terms.number(f"the reward of {source}", reward)
    except ValueError as error:
        raise EnvironmentsError(str(error)) from error


def numbers(info: Any) -> dict[str, float]:
    """The finite numbers of an environment's info whose keys can be names of metrics."""
    found = {}
    for key, value in info.items() if isinstance(info, Mapping) else ():
        if isinstance(key, str) and terms.KEY.fullmatch(key):
            try:
                found[key] = terms.number(key, value)
            except ValueError:
                continue
    return found


def shape(found: Any) -> str:
    """What a value is, in a few words: its type, and how many or which parts it has."""
    kind = type(found).__name__
    if isinstance(found, dict):
        return f"a {kind} with {', '.join(map(str, found)) or 'nothing'}"[:200]
    return f"a {kind} of {len(found)}" if isinstance(found, tuple | list) else f"a {kind}"
