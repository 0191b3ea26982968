"""User functions, as knobs name them: module:function. Knows no knob and imports no JAX itself."""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable
from typing import Any

from tlt_jax.errors import ConfigError

FUNCTION = re.compile(r"[\w.]+:\w+")


def is_own(name: str) -> bool:
    """True for module:function."""
    return FUNCTION.fullmatch(name) is not None


def load(knob: str, name: str) -> Callable[..., Any]:
    """The function that module:function, the value of this knob, names.

    Raises ConfigError for any error of importing the module.
    """
    module, _, function = name.partition(":")
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
