"""The configuration of a run: its sections, and the way from files and command lines; knows nothing of JAX and imports none."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import yaml

from tlt_jax.config import parse as parsing
from tlt_jax.config.schema import COMMON, RENAMED, Config
from tlt_jax.config.validate import validate
from tlt_jax.errors import ConfigError

SHIPPED = Path(__file__).parents[1] / "configs"


def load(
    argv: Sequence[str] | None = None,
    *,
    command: str = "python -m tlt_jax.train",
    about: str = "",
) -> Config:
    """The checked configuration of a command line; prints one line and exits with 2 when it is wrong.

    A command with arguments of its own takes them out first and describes them in `about`, shown by --help.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    asked = next((at for at, word in enumerate(arguments) if word in ("--help", "-h")), None)
    try:
        if asked is not None:
            topic = "".join(arguments[asked + 1 : asked + 2])
            knobs = help_about("" if topic.startswith("-") else topic)
            print(
                f"usage: {command} --config FILE.yaml [--section.knob VALUE ...]\n{about}\n\n{knobs}"
            )
            raise SystemExit(0)
        return parse(arguments)
    except ConfigError as error:
        fail(error)


def help_about(topic: str) -> str:
    """What --help TOPIC says: of the most used knobs, of a section, or of "all". Raises ConfigError for another topic."""
    names = list(parsing.knobs(Config))
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
    """The checked configuration of a command line; raises ConfigError."""
    overrides = parsing.read_overrides(Config, arguments)
    files = [text for name, text in overrides if name == "config"]
    if len(files) > 1:
        raise ConfigError(f"--config is given {len(files)} times: give it once")
    if not files:
        raise ConfigError(
            "--config is missing: give a YAML file, for example --config configs/quickstart.yaml"
        )
    tree = parsing.read_yaml(shipped(files[0]))
    refuse_old_names(tree)
    return build(tree, [pair for pair in overrides if pair[0] != "config"])


def shipped(name: str) -> Path:
    """The file of this name; a bare word that is none is one of the configurations that the package brings.

    Raises ConfigError, with their names, when there is no such one either.
    """
    path = Path(name)
    if path.exists() or path.suffix or len(path.parts) > 1:
        return path
    names = sorted(file.stem for file in SHIPPED.glob("*.yaml"))
    if name not in names:
        raise ConfigError(
            f"--config {name}: no such file, and no configuration of the package: use one of {', '.join(names)}"
        )
    return SHIPPED / f"{name}.yaml"


def build(tree: Mapping[str, Any], overrides: Sequence[tuple[str, str]]) -> Config:
    """The checked configuration of a file's mapping and what a command line changes of it."""
    refuse_old_names([name for name, _ in overrides])
    config = parsing.build(Config, tree, overrides)
    validate(config)
    return config


def refuse_old_names(names: Iterable[str]) -> None:
    """Raises ConfigError, with the new name, when a section is called as in an older version."""
    for name in names:
        section, dot, knob = str(name).partition(".")
        if section in RENAMED:
            raise ConfigError(f"{name} has a new name: write {RENAMED[section]}{dot}{knob}")


def read(path: str | Path) -> Config:
    """The configuration in a YAML file."""
    return parse(["--config", str(path)])


def read_resolved(path: str | Path, arguments: Sequence[str] = ()) -> Config:
    """What `to_yaml` of this version or an older one wrote, with the changes of a command line.

    Sections with a new name are read under it. Raises ConfigError when knobs are no longer there.
    """
    tree = {RENAMED.get(name, name): value for name, value in parsing.read_yaml(path).items()}
    unknown = parsing.unknown(Config, tree)
    if unknown:
        raise ConfigError(
            f"{path}: the run was made by an older version of tlt_jax, with {', '.join(unknown)}, "
            "which this version does not have: continue it with that version, or start another run folder"
        )
    return build(tree, parsing.read_overrides(Config, arguments))


def to_yaml(config: Config) -> str:
    """The whole configuration as YAML that `load` reads back."""
    return yaml.safe_dump(dataclasses.asdict(config), sort_keys=False)
