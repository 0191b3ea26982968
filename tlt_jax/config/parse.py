"""Frozen dataclasses from YAML and dotted command-line overrides, with one-line errors; knows no knob by name."""

from __future__ import annotations

import dataclasses
import difflib
import math
import os
import re
import textwrap
import typing
from collections.abc import Mapping, Sequence
from dataclasses import field
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from tlt_jax.errors import ConfigError, DataError

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # owner/name; ./name is a path
FUNCTION = re.compile(r"[\w.]+:\w+")  # module:function, a user's own
WIDTH = 110  # of the help
WORD_OR_NUMBER = float | str  # a knob that is a number, or one of a few words
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # YAML 1.1 reads 1e-6 as text


class Spelled(int):
    """A whole number with underscores, as YAML 1.1 reads them, that remembers its spelling: 6_4_16 may be meant as text."""

    text: str


class Loader(yaml.SafeLoader):
    """Reads YAML 1.1 without objects of Python, and whole numbers with underscores as Spelled."""

    def spelled(self, node: yaml.ScalarNode) -> int:
        number = Spelled(self.construct_yaml_int(node))
        number.text = node.value
        return number if "_" in node.value else int(number)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.spelled)


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
    """A field with its one-line meaning and the values it can take; mutable defaults are copied per instance.

    `or_own`: module:function, too.
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
    """One field of a section: its type, default, meaning and limits."""

    kind: Any
    default: Any
    help: str
    limits: Mapping[str, Any]


@lru_cache
def knobs(cls, prefix: str = "") -> dict[str, Knob]:
    """Every knob of a dataclass under its dotted name, in the order of the source."""
    found, kinds = {}, typing.get_type_hints(cls)
    for item in dataclasses.fields(cls):
        if dataclasses.is_dataclass(item.default_factory):
            found.update(knobs(item.default_factory, f"{prefix}{item.name}."))
            continue
        default = (
            item.default if item.default is not dataclasses.MISSING else item.default_factory()
        )
        limits = {name: value for name, value in item.metadata.items() if name != "help"}
        found[prefix + item.name] = Knob(kinds[item.name], default, item.metadata["help"], limits)
    return found


def flatten(config) -> dict[str, Any]:
    """Every value under its dotted name."""
    values = {}
    for name in knobs(type(config)):
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        values[name] = value
    return values


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint that names the closest of the names, or lists where to look."""
    leaf = name.rsplit(".", 1)[-1]
    close = [other for other in names if other.rsplit(".", 1)[-1] == leaf][:1]
    close = close or difflib.get_close_matches(name, names, n=1)
    return f"did you mean {close[0]}?" if close else "--help all lists every knob"


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file; ConfigError when it is missing, malformed or names a key twice."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--config {path}: {reason}: give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {path}: byte {error.start} is not UTF-8: save the file as UTF-8"
        ) from error
    try:
        refuse_duplicates(yaml.compose(text), path)
        tree = yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--config {path}: not valid YAML: {yaml_problem(error)}") from error
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"--config {path}: the file holds a {type(tree).__name__}, not 'section:' blocks of knobs"
        )
    return tree


def refuse_duplicates(node, path: str | Path, prefix: str = "") -> None:
    """Raises ConfigError when a mapping of the YAML tree has a key twice (the first would be lost silently)."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        name = prefix + str(key.value)
        if name in seen:
            raise ConfigError(
                f"--config {path}: line {key.start_mark.line + 1}: {name} is given twice: remove one"
            )
        seen.add(name)
        refuse_duplicates(value, path, name + ".")


def yaml_problem(error: Exception) -> str:
    """Line and problem of a YAML error in one line."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + " ".join((getattr(error, "problem", None) or str(error)).split())


def read_overrides(cls, arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(dotted name, text) of each `--name value` or `--name=value`; `--name` alone is true where that is a value."""
    pairs, waiting, names = [], list(arguments), knobs(cls)
    while waiting:
        word = waiting.pop(0)
        if not word.startswith("--") or word == "--":
            raise ConfigError(f"unexpected argument {word!r}: write --section.knob value")
        name, has_value, text = word[2:].partition("=")
        is_flag = name in names and names[name].kind is bool
        if not has_value and is_flag and (not waiting or waiting[0].startswith("--")):
            text = "true"
        elif not has_value:
            if (
                not waiting
                or waiting[0].startswith("--")
                and waiting[0][2:].partition("=")[0] in names
            ):
                raise ConfigError(f"--{name} has no value: write --{name} VALUE")
            text = waiting.pop(0)
        pairs.append((name, text))
    return pairs


def owner(cls, name: str) -> tuple[str, str]:
    """The knob that a dotted name belongs to, and what is left of the name (a key inside a dictionary knob)."""
    names = knobs(cls)
    if name in names:
        return name, ""
    for other, item in names.items():
        if name.startswith(other + ".") and typing.get_origin(item.kind) is dict:
            return other, name[len(other) + 1 :]
    if any(other.startswith(name + ".") for other in names):
        raise ConfigError(
            f"{name} is a section: set one of its knobs, for example "
            f"--{next(other for other in names if other.startswith(name + '.'))} VALUE"
        )
    raise ConfigError(f"unknown knob {name}: {nearest(name, list(names))}")


def flatten_tree(cls, tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Knob -> raw value of a nested mapping; ConfigError for a key that is no knob."""
    names, values = knobs(cls), {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if name in names:
            values[name] = value
        elif any(other.startswith(name + ".") for other in names):
            if value is not None and not isinstance(value, Mapping):
                raise ConfigError(
                    f"{name} is a section, not {value!r}: put its knobs below it, indented"
                )
            values.update(flatten_tree(cls, value or {}, name + "."))
        else:
            owner(cls, name)  # raises, or the key is dotted inside a dictionary knob
            values[name] = value
    return values


def unknown(cls, tree: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Dotted names of the keys in a nested mapping that are neither knobs nor sections."""
    names, found = knobs(cls), []
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if any(other.startswith(name + ".") for other in names):
            found += unknown(cls, value, name + ".") if isinstance(value, Mapping) else []
        elif name not in names:
            found.append(name)
    return found


def build(cls, tree: Mapping[str, Any], overrides: Sequence[tuple[str, str]] = ()):
    """The dataclass with the values of the tree, then of the overrides; every value has been checked alone."""
    values = flatten(cls())
    given = list(flatten_tree(cls, tree).items())
    for dotted, text in overrides:
        is_text = knobs(cls)[owner(cls, dotted)[0]].kind is str
        given.append((dotted, text if is_text else parse_text(dotted, text)))
    for dotted, raw in given:
        name, rest = owner(cls, dotted)
        item = knobs(cls)[name]
        values[name] = checked(name, item, graft(values[name], item, rest, raw) if rest else raw)
    return unflatten(cls, values)


def unflatten(cls, values: Mapping[str, Any], prefix: str = ""):
    """The dataclass with every value under its dotted name; `flatten` undone."""
    made = {}
    for item in dataclasses.fields(cls):
        name = prefix + item.name
        if dataclasses.is_dataclass(item.default_factory):
            made[item.name] = unflatten(item.default_factory, values, name + ".")
        else:
            made[item.name] = values[name]
    return cls(**made)


def parse_text(name: str, text: str) -> Any:
    """The YAML value of a command-line word."""
    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{name} {text!r} is not valid YAML: {yaml_problem(error)}") from error


def graft(value: dict[str, Any], item: Knob, rest: str, raw: Any) -> dict[str, Any]:
    """A copy of a dictionary knob with one key set; a dotted key is a path in a dictionary of anything."""
    head, _, tail = rest.partition(".") if typing.get_args(item.kind)[1] is Any else (rest, "", "")
    inner = value.get(head)
    return {
        **value,
        head: graft(inner if isinstance(inner, dict) else {}, item, tail, raw) if tail else raw,
    }


def checked(name: str, item: Knob, raw: Any) -> Any:
    """The value in the knob's own type; ConfigError when it is of another type or outside the knob's range."""
    value, limits = convert(name, item.kind, raw), item.limits
    for one in (
        value if isinstance(value, list) else value.values() if isinstance(value, dict) else [value]
    ):
        is_own = limits["or_own"] and FUNCTION.fullmatch(str(one))
        is_number = item.kind == WORD_OR_NUMBER and isinstance(one, float)
        if limits["one_of"] and one not in limits["one_of"] and not (is_own or is_number):
            others = ["module:function"] * limits["or_own"]
            others += ["a number"] * (item.kind == WORD_OR_NUMBER)
            known = " | ".join((*limits["one_of"], *others))
            raise ConfigError(f"{name} {one!r} is not known: use {known}")
        if isinstance(one, bool) or not isinstance(one, int | float):
            continue
        if one < limits["at_least"]:
            raise ConfigError(f"{name} {one} is too small: use at least {limits['at_least']}")
        if one <= limits["above"]:
            raise ConfigError(f"{name} {one} is too small: use more than {limits['above']}")
        if one > limits["at_most"]:
            raise ConfigError(f"{name} {one} is too large: use at most {limits['at_most']}")
        if one >= limits["below"]:
            raise ConfigError(f"{name} {one} is too large: use less than {limits['below']}")
    return value


def convert(name: str, kind: Any, raw: Any) -> Any:
    """The raw YAML value as `kind`, without guessing; ConfigError otherwise."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return plain(raw)
    if kind == WORD_OR_NUMBER:
        is_number = not isinstance(plain(raw), str) and not isinstance(raw, bool)
        return convert(name, float if is_number else str, raw)
    if origin is list and isinstance(raw, list):
        return [convert(f"{name}[{i}]", inner[0], one) for i, one in enumerate(raw)]
    if origin is dict and isinstance(raw, Mapping):
        return {str(key): convert(f"{name}.{key}", inner[1], one) for key, one in raw.items()}
    if kind is str and isinstance(raw, str | Spelled) or kind is bool and isinstance(raw, bool):
        return getattr(raw, "text", raw)
    if kind is int and isinstance(raw, int) and not isinstance(raw, bool):
        return int(raw)
    if kind is float and not isinstance(raw, bool):
        number = plain(raw)
        if isinstance(number, int | float) and math.isfinite(number):
            return float(number)
    wanted = {
        str: "text (quote it)", int: "a whole number", float: "a finite number", bool: "true or false",
        list: "a list such as [a, b]", dict: "a mapping such as {key: value}",
    }[origin or kind]  # fmt: skip
    raise ConfigError(
        f"{name} {raw.text if isinstance(raw, Spelled) else repr(raw)} has the wrong type: write {wanted}"
    )


def plain(raw: Any) -> Any:
    """Numbers that YAML 1.1 reads as text, such as 1e-6, and Spelled ones as numbers, also inside lists and mappings."""
    if isinstance(raw, str) and NUMBER.fullmatch(raw):
        return float(raw)
    if isinstance(raw, Spelled):
        return int(raw)
    if isinstance(raw, list):
        return [plain(one) for one in raw]
    if isinstance(raw, Mapping):
        return {key: plain(one) for key, one in raw.items()}
    return raw


def help_text(cls, names: Sequence[str]) -> str:
    """These knobs with type, default and meaning, one section after the other."""
    lines, last = [], None
    for name, item in knobs(cls).items():
        if name not in names:
            continue
        head = name.partition(".")[0] if "." in name else ""
        if head != last:
            lines += ["", f"{head}:" if head else "general:"]
            last = head
        kind = (
            item.kind.__name__.upper()
            if isinstance(item.kind, type)
            else str(item.kind).replace("typing.", "")
        )
        lines.append(f"  --{name} {kind}  (default: {item.default!r})")
        lines += textwrap.wrap(
            item.help, WIDTH, initial_indent="      ", subsequent_indent="      "
        )
    return "\n".join(lines[1:])


def expand(text: str, knob: str) -> str:
    """The text with $NAME, ${NAME} and ~ replaced; an unset variable is an error that names it."""
    for plain, braced in re.findall(r"\$(?:([A-Za-z_]\w*)|\{(\w+)\})", text):
        name = plain or braced
        if name not in os.environ:
            raise DataError(
                f"{knob} {text!r}: environment variable {name} is not set: export {name}=... or change {knob}"
            )
    return os.path.expanduser(os.path.expandvars(text))
