"""The values of --sweep: numbers of data groups, or values of a knob. No JAX."""

from __future__ import annotations

from typing import NamedTuple

from tlt_jax.config.knobs import knobs
from tlt_jax.config.schema import Config
from tlt_jax.errors import ConfigError

GROUPS = "groups"


class Sweep(NamedTuple):
    """A knob, or GROUPS, and the texts of its values."""

    name: str
    values: list[str]

    def words(self, value: str) -> list[str]:
        """The value as arguments of the configuration: none for GROUPS."""
        return [] if self.name == GROUPS else [f"--{self.name}", value]

    def groups(self, value: str) -> int:
        """The number of data groups, 0 for a knob."""
        return int(value) if self.name == GROUPS else 0


def parse(text: str) -> Sweep:
    """Of "NAME=A..B" (A, 2 A, ... and B) or "NAME=A,B,C". Raises ConfigError for another form or an unknown knob."""
    name, equals, values = text.partition("=")
    if not equals or not values:
        raise ConfigError(
            f"--sweep {text}: write groups=A..B, or KNOB=A,B,C, such as groups=1..64 or rollout.max_new_tokens=1024,4096"
        )
    if name == "mesh.data":
        name = GROUPS  # other knobs may have been chosen for another mesh
    if name != GROUPS and name not in knobs(Config):
        raise ConfigError(
            f"--sweep {text}: unknown knob {name!r}: write groups, or a knob that --help all lists, such as rollout.samples"
        )
    first, dots, last = values.partition("..")
    if not dots:
        found = values.split(",")
    elif first.isdecimal() and last.isdecimal() and 1 <= int(first) <= int(last):
        found = [*map(str, doubled(int(first), int(last)))]
    else:
        found = [""]
    if "" in found or (name == GROUPS and not all(one.isdecimal() and int(one) for one in found)):
        raise ConfigError(
            f"--sweep {text}: write {name}=A..B or {name}=A,B,C, with A..B whole numbers from 1, such as groups=1..64"
        )
    return Sweep(name, list(dict.fromkeys(found)))


def doubled(first: int, last: int) -> list[int]:
    """first, twice that, ... below last, and last."""
    found = [first]
    while 2 * found[-1] < last:
        found.append(2 * found[-1])
    return [*found, last] if found[-1] < last else found
