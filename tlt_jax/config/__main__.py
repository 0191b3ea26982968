"""Prints the page of all knobs, as the site has it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import yaml

from tlt_jax.config.changes import FREE, LENGTH, OVERRIDABLE
from tlt_jax.config.knobs import Knob, knobs
from tlt_jax.config.parse import LIMITS, kind_of
from tlt_jax.config.schema import Config

HEAD = """# Knobs

Every knob of a configuration, for the YAML file and the command line: `rollout: {samples: 8}` in the file is
`--rollout.samples 8` on the command line, or `--rollout '{samples: 8}'`, which takes precedence; of two values the later holds.
`--help` lists the most used ones, `--help SECTION` those of a section. [coming_from.md](coming_from.md) has
the names in verl, TRL and tunix.

*Resume* says whether the same run folder may be continued with another value: `yes`; `override`: with `--override`, and the
change is recorded; `no`: it needs another run folder.
"""
TABLE = ["| knob | type | default | meaning | resume |", "| --- | --- | --- | --- | --- |"]


def page() -> str:
    """The text of the page."""
    found = knobs(Config)
    lines = [HEAD, "## General", "", *TABLE]
    lines += [row(name, item) for name, item in found.items() if "." not in name]
    for section in dataclasses.fields(Config):
        if not dataclasses.is_dataclass(section.default_factory):
            continue
        lines += ["", f"## {section.name}", ""]
        about = section.default_factory.__doc__ or ""
        if not about.startswith(
            f"{section.default_factory.__name__}("
        ):  # dataclasses write that one
            lines += [about, ""]
        lines += TABLE
        lines += [
            row(name, item) for name, item in found.items() if name.startswith(section.name + ".")
        ]
    return "\n".join(lines) + "\n"


def row(name: str, item: Knob) -> str:
    """The row of a knob."""
    meaning = item.help.replace("|", "\\|").replace("<", "&lt;").replace("*", "\\*")
    if allowed := limits(item):
        meaning += f" ({allowed})"
    return f"| `{name}` | {kind_of(item)} | {spelled(item.default)} | {meaning} | {resume(name)} |"


def spelled(value: Any) -> str:
    """A default as YAML has it."""
    if value == "":
        return "empty"
    if isinstance(value, float):
        return f"`{value:g}`"
    return f"`{yaml.safe_dump(value, default_flow_style=True, width=math.inf).splitlines()[0]}`"


def limits(item: Knob) -> str:
    """The range of a number; "" without one."""
    found = [(said.partition("use ")[2], item.limits[name]) for name, _, said in LIMITS]
    return ", ".join(f"{word} {limit:g}" for word, limit in found if math.isfinite(limit))


def resume(name: str) -> str:
    """Whether a resumed run may change the knob."""
    if name in LENGTH:
        return "yes; override with a schedule"
    if name.startswith(FREE):
        return "yes"
    return "override" if name.startswith(OVERRIDABLE) else "no"


if __name__ == "__main__":
    print(page(), end="")
