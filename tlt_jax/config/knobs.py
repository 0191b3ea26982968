"""Knobs as fields of frozen dataclasses: type, default, meaning and range."""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from typing import Any, NamedTuple


def knob(
    default: Any,
    help: str,
    *,
    one_of: Sequence[str] = (),
    or_own: bool = False,
    at_least: float = -math.inf,
    above: float = -math.inf,
    at_most: float = math.inf,
    below: float = math.inf,
):
    """A field with its meaning and its allowed values; mutable defaults are copied per instance.

    `or_own`: module:function is allowed, too, and from Python the function itself.
    """
    metadata = {
        "help": help,
        "one_of": tuple(one_of),
        "or_own": or_own,
        "at_least": at_least,
        "above": above,
        "at_most": at_most,
        "below": below,
    }
    if isinstance(default, list | dict):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def section(cls):
    """A nested section."""
    return field(default_factory=cls)


class Knob(NamedTuple):
    """A field of a section: its type, default, meaning and allowed values."""

    kind: Any
    default: Any
    help: str
    limits: Mapping[str, Any]


@lru_cache
def knobs(cls, prefix: str = "") -> dict[str, Knob]:
    """The knobs of a dataclass by dotted name, in source order."""
    found, kinds, defaults = {}, typing.get_type_hints(cls), cls()
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(item.default_factory):
            found.update(knobs(item.default_factory, f"{prefix}{item.name}."))
            continue
        default = getattr(defaults, item.name)
        limits = {name: value for name, value in item.metadata.items() if name != "help"}
        found[prefix + item.name] = Knob(kinds[item.name], default, item.metadata["help"], limits)
    return found
