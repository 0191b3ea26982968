"""Mappings and values from YAML, with one-line errors; knows no knob."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from tlt_jax.errors import ConfigError

NUMBER = re.compile(r"[-+]?\d+(\.\d*)?[eE][-+]?\d+")  # YAML 1.1 reads 1e-6 as text


class Spelled(int):
    """An integer with underscores, as YAML 1.1 reads them, and its spelling: 6_4_16 may be meant as text."""

    text: str


class Loader(yaml.SafeLoader):
    """A safe YAML 1.1 loader that reads integers with underscores as Spelled."""

    def spelled(self, node: yaml.ScalarNode) -> int:
        number = Spelled(self.construct_yaml_int(node))
        number.text = node.value
        return number if "_" in node.value else int(number)


Loader.add_constructor("tag:yaml.org,2002:int", Loader.spelled)


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
    try:
        refuse_duplicates(yaml.compose(text), f"--config {path}")
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


def yaml_problem(error: Exception) -> str:
    """Line and problem of a YAML error in one line."""
    mark = getattr(error, "problem_mark", None)
    where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
    return where + " ".join((getattr(error, "problem", None) or str(error)).split())


def parse_text(name: str, text: str) -> Any:
    """The YAML value of a command-line word. Raises ConfigError when it is malformed or has a duplicate key."""
    try:
        refuse_duplicates(yaml.compose(text), f"--{name}")
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ConfigError(f"--{name} {text!r} is not valid YAML: {yaml_problem(error)}") from error


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
