"""Loads the configuration of a run from a file and the command line. Imports no JAX."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tlt_jax.config import older, parse as parsing
from tlt_jax.config.knobs import knobs
from tlt_jax.config.schema import COMMON, Config
from tlt_jax.config.validate import validate
from tlt_jax.config.yaml_text import read_yaml
from tlt_jax.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "configs"


def load(
    argv: Sequence[str] | None = None,
    *,
    command: str = "python -m tlt_jax.train",
    about: str = "",
) -> Config:
    """The validated configuration of a command line; prints one line and exits with 2 when it is invalid.

    A command removes its other arguments first and describes them in `about`, shown by --help.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = next((at for at, word in enumerate(arguments) if word in ("--help", "-h")), None)
    try:
        if asked is not None:
            topic = "".join(arguments[asked + 1 : asked + 2])
            listed = help_about("" if topic.startswith("-") else topic)
            print(
                f"usage: {command} --config FILE.yaml [--section.knob VALUE ...]\n{about}\n\n{listed}"
            )
            raise SystemExit(0)
        return parse(arguments)
    except ConfigError as error:
        fail(error)


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


def fail(error: Exception) -> NoReturn:
    """Prints the error as one line and exits with 2."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(2)


def parse(arguments: Sequence[str]) -> Config:
    """The validated configuration of a command line; raises ConfigError."""
    refuse_older(arguments)
    overrides = parsing.read_overrides(Config, arguments)
    files = [text for name, text in overrides if name == "config"]
    if len(files) > 1:
        raise ConfigError(f"--config is given {len(files)} times: give it once")
    if not files:
        raise ConfigError(
            "--config is missing: give a YAML file, for example --config configs/quickstart.yaml"
        )
    tree = read_yaml(shipped(files[0]))
    older.refuse([*map(str, tree), *parsing.unknown(Config, tree)])
    return build(tree, [pair for pair in overrides if pair[0] != "config"])


def shipped(name: str) -> Path:
    """The path of a configuration file, or of a shipped configuration when `name` is a bare word and no file.

    Raises ConfigError, with the names of the shipped ones, when neither exists.
    """
    path = Path(name)
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    names = sorted(file.stem for file in SHIPPED.glob("*.yaml"))
    if name not in names:
        raise ConfigError(
            f"--config {name}: no such file, and no shipped configuration: use one of {', '.join(names)}"
        )
    return SHIPPED / f"{name}.yaml"


def build(tree: Mapping[str, Any], overrides: Sequence[tuple[str, str]]) -> Config:
    """The validated configuration of a file's mapping and command-line overrides."""
    older.refuse(name for name, _ in overrides)
    config = parsing.build(Config, tree, overrides)
    validate(config)
    return config


def read(path: str | Path) -> Config:
    """The configuration in a YAML file."""
    return parse(["--config", str(path)])


def read_resolved(path: str | Path, arguments: Sequence[str] = ()) -> Config:
    """The configuration that `to_yaml` of this or an older version wrote, with command-line overrides.

    Raises ConfigError as `older.update`.
    """
    tree = older.update(read_yaml(path), path)
    refuse_older(arguments)
    return build(tree, parsing.read_overrides(Config, arguments))


def refuse_older(arguments: Sequence[str]) -> None:
    """Raises ConfigError for `--name` of an older version, also of one without a value."""
    older.refuse(word[2:].partition("=")[0] for word in arguments if word.startswith("--"))


def to_yaml(config: Config) -> str:
    """The configuration as YAML, which `read_resolved` reads back."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
