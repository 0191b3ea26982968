"""Values of Python as values of knobs, functions included; with one-line errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tlt_jax.config import extension
from tlt_jax.config.knobs import knobs
from tlt_jax.config.parse import flatten_tree, owner, section_of
from tlt_jax.config.schema import Config
from tlt_jax.errors import ConfigError


def pairs(changes: Mapping[str, Any] | None) -> list[tuple[str, Any]]:
    """(dotted knob, value) of each change, as parse.build takes them: a text is one of the command line.

    Raises ConfigError for an unknown knob, and for a value that no file could have.
    """
    if not isinstance(changes, Mapping | None):
        raise ConfigError(
            f'the changes are a {type(changes).__name__}: give a dict, such as {{"train.steps": 10}}'
        )
    for name in changes or {}:
        if not isinstance(name, str):
            raise ConfigError(f'{name!r} is no knob: give its name as text, such as "train.steps"')
    given: list[tuple[str, Any]] = []
    for name, value in (changes or {}).items():
        section = section_of(Config, name, value)
        given += flatten_tree(Config, section).items() if section else [(name, value)]
    return [(name, value_of(name, value)) for name, value in given]


def value_of(dotted: str, value: Any) -> Any:
    """A value for this knob. Raises ConfigError."""
    name, rest = owner(Config, dotted)
    takes_functions = knobs(Config)[name].limits["or_own"] and not rest
    if isinstance(value, Mapping):
        found = {key_of(name, key, takes_functions): entry(name, one) for key, one in value.items()}
        if len({str(key) for key in found}) < len(value):
            raise ConfigError(f"{name} {[*map(str, found)]} has a name twice: rename one")
        return found
    is_function = takes_functions and callable(value)
    return extension.named(name, value) if is_function else entry(name, value)


def key_of(name: str, key: Any, takes_functions: bool) -> str:
    """A key of the mapping that is this knob's value. Raises ConfigError."""
    if takes_functions and callable(key):
        return extension.named(name, key)
    if not isinstance(key, str):
        raise ConfigError(f"{name} has the key {key!r}: give text")
    return key


def entry(name: str, value: Any) -> Any:
    """A number, text, list or mapping, also one of NumPy or a path. Raises ConfigError."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):  # of NumPy or JAX
        return value.tolist()
    if isinstance(value, list | tuple):
        return [entry(name, one) for one in value]
    if isinstance(value, Mapping):
        return {key_of(name, key, False): entry(name, one) for key, one in value.items()}
    what = "a function" if callable(value) else f"a {type(value).__name__}"
    takes = ", ".join(one for one, knob in knobs(Config).items() if knob.limits["or_own"])
    hint = f"; functions are for {takes}" if callable(value) else ""
    raise ConfigError(f"{name} is {what}: give a number, text, list or mapping{hint}")
