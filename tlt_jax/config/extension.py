"""User functions, as knobs name them: module:function, or the function itself. Knows no knob and imports no JAX itself."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from tlt_jax.errors import ConfigError

LOCAL = "<local>"  # in the place of the module: a function of a notebook or script, or of another function
FUNCTION = re.compile(rf"(?:[\w.]+|{LOCAL}):\w+")


class Local(str):
    """`<local>:name`, with the `function` of that name, which no other process can import.

    It equals this text without a function, as a run folder has it, but not the name of another function. A copy or a
    pickle of it is the text alone.
    """

    function: Callable[..., Any]

    def __eq__(self, other: Any) -> bool:
        is_other = isinstance(other, Local) and other.function is not self.function
        return not is_other and str.__eq__(self, other)

    def __ne__(self, other: Any) -> bool:
        return not self == other

    __hash__ = str.__hash__

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return str, (str.__str__(self),)


def is_own(name: str) -> bool:
    """True for module:function and <local>:function."""
    return FUNCTION.fullmatch(name) is not None


def named(knob: str, function: Callable[..., Any]) -> str:
    """A function as the value of a knob: module:function, or Local where other processes cannot import it.

    Raises ConfigError for one without a name, such as a lambda.
    """
    name, module = getattr(function, "__name__", ""), getattr(function, "__module__", None) or ""
    if not name.isidentifier():
        raise ConfigError(f"{knob} {function!r} has no name: define it with def")
    if is_importable(module, name, function):
        return f"{module}:{name}"
    found = Local(f"{LOCAL}:{name}")
    found.function = function
    return found


def is_importable(module: str, name: str, function: Callable[..., Any]) -> bool:
    """Whether a new process that imports the module finds the function under this name."""
    if module == "__main__" or getattr(sys.modules.get(module), name, None) is not function:
        return False
    parent = module.rpartition(".")[0]
    path = getattr(sys.modules.get(parent), "__path__", None)
    finders = (finder for finder in sys.meta_path if hasattr(finder, "find_spec"))
    return any(finder.find_spec(module, path) for finder in finders)


def load(knob: str, name: str) -> Callable[..., Any]:
    """The function that module:function, the value of this knob, names.

    Raises ConfigError for any error of importing the module, and for <local>:function without the function.
    """
    if isinstance(name, Local):
        return name.function
    module, _, function = name.partition(":")
    if module == LOCAL:
        raise ConfigError(
            f"{knob} {name!r} is a function of another notebook, script or process: pass {function} itself in the changes "
            "of load_config"
        )
    try:
        found = importlib.import_module(module)
    except Exception as error:  # a user module may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        raise ConfigError(
            f"{knob} {name!r}: module {module!r} cannot be imported ({reason}): correct it, or put its folder on PYTHONPATH"
        ) from error
    found = getattr(found, function, None)
    if not callable(found):
        raise ConfigError(
            f"{knob} {name!r}: module {module!r} has no function {function!r}: correct the name"
        )
    return found


def call(knob: str, name: str, *arguments: Any) -> Any:
    """What the function that this knob names returns. Raises ConfigError when it takes other arguments."""
    function = load(knob, name)
    if reason := misfit(function, *arguments):
        raise ConfigError(
            f"{knob} {name!r} is called with {len(arguments)} arguments, and takes others: {reason}"
        )
    return function(*arguments)


def misfit(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Why a function does not take these arguments; empty when it does, or when that is unknown."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # some that are built in
        return ""
    try:
        signature.bind(*arguments, **named)
    except TypeError as error:
        return str(error)
    return ""
