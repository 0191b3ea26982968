"""Frozen dataclasses from YAML mappings and dotted command-line overrides, with one-line errors; knows no knob by name."""

from __future__ import annotations

import dataclasses
import difflib
import math
import operator
import os
import re
import textwrap
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tlt_jax.config.extension import is_own
from tlt_jax.config.knobs import Knob, knobs
from tlt_jax.errors import ConfigError, DataError

HUB_ID = re.compile(r"[\w-][\w.-]*/[\w.-]+")  # owner/name; ./name is a path
WIDTH = 110  # of the help
NEAR = 0.75  # least likeness of a name that is suggested for another one
WORD_OR_NUMBER = float | str  # type of a knob that is a number or a word


LIMITS = (  # of a number: how it is beyond, and what to do
    ("at_least", operator.lt, "small: use at least"),
    ("above", operator.le, "small: use more than"),
    ("at_most", operator.gt, "large: use at most"),
    ("below", operator.ge, "large: use less than"),
)
NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # YAML 1.1 reads 1e-6 as text


class Spelled(int):
    """An integer with underscores, as YAML 1.1 reads them, and its spelling: 6_4_16 may be meant as text."""

    text: str


class YamlLoader(yaml.SafeLoader):
    """A safe YAML 1.1 loader that reads integers with underscores as Spelled."""

    def spelled(self, node: yaml.ScalarNode) -> int:
        number = Spelled(self.construct_yaml_int(node))
        number.text = node.value
        return number if "_" in node.value else int(number)


YamlLoader.add_constructor("tag:yaml.org,2002:int", YamlLoader.spelled)


def read_yaml(path: str | Path) -> dict[str, Any]:
    """The mapping in a YAML file. Raises ConfigError when it is missing, malformed or has a duplicate key."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise ConfigError(f"--config {path}: {reason}: give the path of a YAML file") from error
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"--config {path}: byte {error.start} is not UTF-8: save the file as UTF-8"
        ) from error
    tree = parsed(text, f"--config {path}", f"--config {path}: ")
    if tree is None:
        return {}
    if not isinstance(tree, dict):
        raise ConfigError(
            f"--config {path}: the file holds a {type(tree).__name__}, not 'section:' blocks of knobs"
        )
    return tree


def refuse_duplicates(node, place: str, prefix: str = "") -> None:
    """Raises ConfigError for a duplicate key in a mapping (YAML would silently ignore the first value)."""
    if not isinstance(node, yaml.MappingNode):
        return
    seen = set()
    for key, value in node.value:
        name = prefix + str(key.value)
        if name in seen:
            raise ConfigError(
                f"{place}: line {key.start_mark.line + 1}: {name} is given twice: remove one"
            )
        seen.add(name)
        refuse_duplicates(value, place, name + ".")


def parsed(text: str, place: str, invalid: str) -> Any:
    """The value of a YAML text. Raises ConfigError with `place` for a duplicate key, with `invalid` for what is no YAML."""
    try:
        refuse_duplicates(yaml.compose(text), place)
        return yaml.load(text, YamlLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        problem = " ".join((getattr(error, "problem", None) or str(error)).split())
        raise ConfigError(f"{invalid}not valid YAML: {where}{problem}") from error


def parse_text(name: str, text: str) -> Any:
    """The YAML value of a command-line word. Raises ConfigError when it is malformed or has a duplicate key."""
    return parsed(text, f"--{name}", f"--{name} {text!r} is ")


def plain(raw: Any) -> Any:
    """The value with numbers for Spelled and for what YAML 1.1 reads as text, such as 1e-6; recursive."""
    if isinstance(raw, str) and NUMBER.fullmatch(raw):
        return float(raw)
    if isinstance(raw, Spelled):
        return int(raw)
    if isinstance(raw, list):
        return [plain(one) for one in raw]
    if isinstance(raw, Mapping):
        return {key: plain(one) for key, one in raw.items()}
    return raw


def flatten(config) -> dict[str, Any]:
    """The values by dotted name."""
    values = {}
    for name in knobs(type(config)):
        value = config
        for part in name.split("."):
            value = getattr(value, part)
        values[name] = value
    return values


def nearest(name: str, names: Sequence[str]) -> str:
    """A hint: the name with nearly the same last part, of the same section if there is one; or where all are listed."""
    section, _, leaf = name.rpartition(".")
    alike = sorted(names, key=lambda other: other.rpartition(".")[0] != section)
    leaves = [other.rpartition(".")[2] for other in alike]
    close = difflib.get_close_matches(leaf, leaves, n=1, cutoff=NEAR)
    return (
        f"did you mean {alike[leaves.index(close[0])]}?" if close else "--help all lists every knob"
    )


def read_overrides(cls, arguments: Sequence[str]) -> list[tuple[str, str]]:
    """(dotted name, text) of each `--name value` or `--name=value`; `--name` alone is true for a boolean knob."""
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
    """The knob of a dotted name, and the rest of the name: a key inside a dictionary knob. Raises ConfigError."""
    names = knobs(cls)
    if name in names:
        return name, ""
    for other, item in names.items():
        if name.startswith(other + ".") and typing.get_origin(item.kind) is dict:
            return other, name[len(other) + 1 :]
    if is_section(cls, name):
        raise ConfigError(
            f"{name} is a section: set one of its knobs, for example "
            f"--{next(other for other in names if other.startswith(name + '.'))} VALUE"
        )
    raise ConfigError(f"unknown knob {name}: {nearest(name, list(names))}")


def flatten_tree(cls, tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """The raw values of a nested mapping by dotted name, of knobs or unknown. Raises ConfigError for a section's value."""
    values = {}
    for key, value in tree.items():
        name = f"{prefix}{key}"
        if not is_section(cls, name):
            values[name] = value
        elif value is None or isinstance(value, Mapping):
            values.update(flatten_tree(cls, value or {}, name + "."))
        else:
            raise ConfigError(
                f"{name} is a section, not {value!r}: put its knobs below it, indented"
            )
    return values


def is_section(cls, name: str) -> bool:
    """Whether knobs lie below the dotted name."""
    return any(other.startswith(name + ".") for other in knobs(cls))


def section_of(cls, dotted: str, value: Any) -> dict[str, Any]:
    """The override as a tree when it gives a mapping, or the text of one, to a section; empty for other overrides."""
    if not is_section(cls, dotted):
        return {}
    tree = parse_text(dotted, value) if isinstance(value, str) else value
    return {dotted: tree} if isinstance(tree, Mapping) else {}


def build(cls, tree: Mapping[str, Any], overrides: Sequence[tuple[str, Any]] = ()):
    """The dataclass with the values of the tree, then of the overrides: texts of a command line, or other values.

    Of two values of a knob the later holds, also when one is in a mapping of its section. Raises ConfigError for an
    invalid value.
    """
    values = flatten(cls())
    given = list(flatten_tree(cls, tree).items())
    for dotted, value in overrides:
        if section := section_of(cls, dotted, value):
            given += flatten_tree(cls, section).items()
            continue
        is_value = knobs(cls)[owner(cls, dotted)[0]].kind is str or not isinstance(value, str)
        given.append((dotted, value if is_value else parse_text(dotted, value)))
    for dotted, raw in given:
        name, rest = owner(cls, dotted)
        item = knobs(cls)[name]
        values[name] = checked(name, item, graft(values[name], item, rest, raw) if rest else raw)
    return unflatten(cls, values)


def unflatten(cls, values: Mapping[str, Any], prefix: str = ""):
    """The dataclass of values by dotted name: the inverse of `flatten`."""
    made = {}
    for item in dataclasses.fields(cls):
        name = prefix + item.name
        if dataclasses.is_dataclass(item.default_factory):
            made[item.name] = unflatten(item.default_factory, values, name + ".")
        else:
            made[item.name] = values[name]
    return cls(**made)


def graft(value: dict[str, Any], item: Knob, rest: str, raw: Any) -> dict[str, Any]:
    """A copy of a dictionary knob with one key set; in a dictionary of Any a dotted key is a path."""
    head, _, tail = rest.partition(".") if typing.get_args(item.kind)[1] is Any else (rest, "", "")
    inner = value.get(head)
    return {
        **value,
        head: graft(inner if isinstance(inner, dict) else {}, item, tail, raw) if tail else raw,
    }


def checked(name: str, item: Knob, raw: Any) -> Any:
    """The value in the knob's type. Raises ConfigError for another type or a value out of range."""
    value, limits = convert(name, item.kind, raw), item.limits
    values = list(value.values()) if isinstance(value, dict) else value
    for one in values if isinstance(values, list) else [values]:
        is_allowed = limits["or_own"] and is_own(str(one))
        is_number = item.kind == WORD_OR_NUMBER and isinstance(one, float)
        if limits["one_of"] and one not in limits["one_of"] and not (is_allowed or is_number):
            others = ["module:function"] * limits["or_own"]
            others += ["a number"] * (item.kind == WORD_OR_NUMBER)
            known = " | ".join((*limits["one_of"], *others))
            raise ConfigError(f"{name} {one!r} is not known: use {known}")
        if isinstance(one, bool) or not isinstance(one, int | float):
            continue
        for name_of_limit, is_beyond, said in LIMITS:
            if is_beyond(one, limits[name_of_limit]):
                raise ConfigError(f"{name} {one} is too {said} {limits[name_of_limit]}")
    return value


def convert(name: str, kind: Any, raw: Any) -> Any:
    """The raw YAML value converted to `kind`. Raises ConfigError when they do not match."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if kind is Any:
        return plain(raw)
    if kind == WORD_OR_NUMBER:
        is_number = not isinstance(plain(raw), str) and not isinstance(raw, bool)
        return convert(name, float if is_number else str, raw)
    if origin is list and isinstance(raw, list):
        return [convert(f"{name}[{i}]", inner[0], one) for i, one in enumerate(raw)]
    if origin is dict and isinstance(raw, Mapping):
        named = {key if isinstance(key, str) else str(key): one for key, one in raw.items()}
        return {key: convert(f"{name}.{key}", inner[1], one) for key, one in named.items()}
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


def help_text(cls, names: Sequence[str]) -> str:
    """Type, default and meaning of these knobs, by section."""
    lines, last = [], None
    for name, item in knobs(cls).items():
        if name not in names:
            continue
        head = name.partition(".")[0] if "." in name else ""
        if head != last:
            lines += ["", f"{head}:" if head else "general:"]
            last = head
        lines.append(f"  --{name} {kind_of(item)}  (default: {item.default!r})")
        lines += textwrap.wrap(
            item.help, WIDTH, initial_indent="      ", subsequent_indent="      "
        )
    return "\n".join(lines[1:])


def kind_of(item: Knob) -> str:
    """The type of a knob as the help spells it: INT, STR, list[int]."""
    if isinstance(item.kind, type) and not typing.get_args(item.kind):
        return item.kind.__name__.upper()
    return str(item.kind).replace("typing.", "")


def expand(text: str, knob: str) -> str:
    """The text with $NAME, ${NAME} and ~ expanded. Raises DataError for an unset variable."""
    for bare, braced in re.findall(r"\$(?:([A-Za-z_]\w*)|\{(\w+)\})", text):
        name = bare or braced
        if name not in os.environ:
            raise DataError(
                f"{knob} {text!r}: environment variable {name} is not set: export {name}=... or change {knob}"
            )
    return os.path.expanduser(os.path.expandvars(text))
