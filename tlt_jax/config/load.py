"""Loads the configuration of a run from a file and the command line. Imports no JAX."""

from __future__ import annotations

import dataclasses
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tlt_jax.config import extension, parse as parsing
from tlt_jax.config.knobs import knobs
from tlt_jax.config.parse import flatten_tree, owner, read_yaml, section_of
from tlt_jax.config.schema import COMMON, RESOLVED, Config
from tlt_jax.config.validate import validate
from tlt_jax.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "configs"
# The argument of all commands that take knobs, as `load` wants it.
CONFIG = {"--config FILE": "YAML file, or the name of a shipped configuration"}


def load(
    argv: Sequence[str] | None = None,
    *,
    command: str = "python -m tlt_jax.train",
    about: str = "",
    own: Mapping[str, str] = CONFIG,
) -> Config:
    """The validated configuration of a command line; prints one line and exits with 2 when it is invalid.

    A command removes its other arguments first. --help shows `about`, what it does, and `own`: its arguments that are no
    knobs, each with its meaning, optional ones in brackets ("[--step N]").
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = next((at for at, word in enumerate(arguments) if word in ("--help", "-h")), None)
    try:
        if asked is not None:
            topic = "".join(arguments[asked + 1 : asked + 2])
            listed = help_about("" if topic.startswith("-") else topic)
            show(f"{usage(command, about, own)}\n\n{listed}")
            raise SystemExit(0)
        return parse(arguments)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def usage(command: str, about: str, own: Mapping[str, str]) -> str:
    """How a command is called, what it does, its own arguments, and the shipped configurations if it takes one."""
    names = [name.strip("[]") for name in own]
    lines = [f"usage: {command} {' '.join(own)} [--section.knob VALUE ...]", "", about]
    lines += ["", "arguments:", *columns(dict(zip(names, own.values(), strict=True)))]
    if any("--config" in name for name in own):
        lines += ["", "shipped configurations:", *columns(shipped_configurations())]
    return "\n".join(lines)


def columns(rows: Mapping[str, str]) -> list[str]:
    """Lines of names and their meanings, side by side."""
    width = max(map(len, rows))
    lines = []
    for name, meaning in rows.items():
        start = f"  {name:<{width}}  "
        lines += textwrap.wrap(
            meaning, parsing.WIDTH, initial_indent=start, subsequent_indent=" " * len(start)
        )
    return lines


def shipped_configurations() -> dict[str, str]:
    """The shipped configurations by name, each with the first sentence of its file."""
    first = {file.stem: file.read_text().splitlines()[0] for file in sorted(SHIPPED.glob("*.yaml"))}
    return {name: line.lstrip("# ").split(". ")[0].rstrip(".") for name, line in first.items()}


def show(text: str) -> None:
    """Prints a text; a reader that has gone, as in `--help all | head`, is no error."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        # What is left is written at the end of the process: to nowhere.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def help_about(topic: str) -> str:
    """The text of --help TOPIC: "" for the most used knobs, a section, or "all". Raises ConfigError for another topic."""
    names = list(knobs(Config))
    sections = sorted({name.partition(".")[0] for name in names if "." in name})
    if not topic:
        return (
            "The most used knobs, for the YAML file or the command line:\n\n"
            f"{parsing.help_text(Config, COMMON)}\n\n"
            f"--help all lists all {len(names)} knobs, --help SECTION those of a section:\n"
            f"{', '.join(sections)}"
        )
    if topic == "all":
        return (
            f"Knobs, for the YAML file or the command line:\n\n{parsing.help_text(Config, names)}"
        )
    if topic not in sections:
        raise ConfigError(f"--help {topic}: use --help all, or one of {', '.join(sections)}")
    chosen = [name for name in names if name.startswith(topic + ".")]
    return parsing.help_text(Config, chosen)


def parse(arguments: Sequence[str]) -> Config:
    """The validated configuration of a command line; raises ConfigError."""
    overrides = parsing.read_overrides(Config, arguments)
    files = [text for name, text in overrides if name == "config"]
    if len(files) > 1:
        raise ConfigError(f"--config is given {len(files)} times: give it once")
    if not files:
        return of_run(overrides)
    return build(read_yaml(shipped(files[0])), [pair for pair in overrides if pair[0] != "config"])


def from_python(source: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
    """The validated configuration of a file or a shipped one, with changed knobs. Raises ConfigError."""
    if not isinstance(source, str | Path):
        raise ConfigError(
            f"the configuration is a {type(source).__name__}: give the path of a YAML file, or a shipped name"
        )
    return build(read_yaml(shipped(str(source))), pairs(changes))


def of_run(overrides: Sequence[tuple[str, str]]) -> Config:
    """The configuration of the run in the folder that the overrides name, with them. Raises ConfigError without one."""
    runs = [text for name, text in overrides if name == "run"]
    if not runs:
        raise ConfigError(
            "--config is missing: give a YAML file, for example --config configs/quickstart.yaml, or --run RUN, the folder "
            "of a run"
        )
    path = Path(runs[-1]) / RESOLVED
    if not path.is_file():
        raise ConfigError(
            f"--run {runs[-1]}: no run is there (no {RESOLVED}): give the folder of one, or --config FILE to start one"
        )
    return build(stored(path), overrides)


def shipped(name: str) -> Path:
    """The path of a configuration file, or of a shipped configuration when `name` is a bare word and no file.

    Raises ConfigError, with the names of the shipped ones, when neither exists.
    """
    path, names = Path(name), shipped_configurations()
    if path.exists() or path.suffix in (".yaml", ".yml") or len(path.parts) > 1:
        return path
    if name not in names:
        raise ConfigError(
            f"--config {name}: no such file, and no shipped configuration: use one of {', '.join(names)}"
        )
    return SHIPPED / f"{name}.yaml"


def build(tree: Mapping[str, Any], overrides: Sequence[tuple[str, Any]]) -> Config:
    """The validated configuration of a file's mapping and overrides: texts of a command line, or other values."""
    config = parsing.build(Config, tree, overrides)
    validate(config)
    return config


def read(path: str | Path) -> Config:
    """The configuration in a YAML file."""
    return parse(["--config", str(path)])


def read_resolved(path: str | Path, arguments: Sequence[str] = ()) -> Config:
    """The configuration that `to_yaml` wrote, with command-line overrides. Raises ConfigError."""
    return build(stored(path), parsing.read_overrides(Config, arguments))


def stored(path: str | Path) -> dict[str, Any]:
    """The mapping in the config.yaml of a run. Raises ConfigError for one with knobs of another version."""
    tree = read_yaml(path)
    if missing := [name for name in flatten_tree(Config, tree) if name not in knobs(Config)]:
        raise ConfigError(
            f"{path}: the run was made by another version of tlt_jax, with {', '.join(missing)}, which this one does not "
            "have: continue it with that version, or start another run folder"
        )
    return tree


def to_yaml(config: Config) -> str:
    """The configuration as YAML, which `read_resolved` reads back."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)


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
        for dotted, one in flatten_tree(Config, section or {name: value}).items():
            knob, key = owner(Config, dotted)
            takes_functions = knobs(Config)[knob].limits["or_own"] and not key
            given.append((dotted, value_of(knob, one, takes_functions)))
    return given


def value_of(name: str, value: Any, takes_functions: bool = False) -> Any:
    """The value, of Python, NumPy or JAX, as a file has it; functions by their names. Raises ConfigError."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [value_of(name, one, takes_functions) for one in value]
    if isinstance(value, Mapping):
        found = {}
        for key, one in value.items():
            is_function = takes_functions and callable(key)
            text = extension.named(name, key) if is_function else key
            if not isinstance(text, str):
                raise ConfigError(f"{name} has the key {key!r}: give text")
            if text in map(str, found):
                raise ConfigError(f"{name} has {text} twice: rename one")
            found[text] = value_of(name, one)
        return found
    if takes_functions and callable(value):
        return extension.named(name, value)
    what = "a function" if callable(value) else f"a {type(value).__name__}"
    takes = ", ".join(one for one, knob in knobs(Config).items() if knob.limits["or_own"])
    hint = f"; functions are for {takes}" if callable(value) else ""
    raise ConfigError(f"{name} is {what}: give a number, text, list or mapping{hint}")
