"""Reads a compiled program's collectives, and the mesh axes that they cross, from its HLO text."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
from jax.sharding import Mesh

OPERATIONS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
CALL = re.compile(rf" ({'|'.join(OPERATIONS)})(?:-start)?\(")
EXPLICIT = re.compile(r"(?:replica_groups|source_target_pairs)=\{((?:\{[\d,]*\},?)*)\}")
IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
NAMED = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{([^}]*)\}"
)
AXIS = re.compile(r"'(\w+)'(?:=(\d+))?(?::\((\d+)\)(\d+))?")


def collectives(hlo: str, mesh: Mesh) -> dict[str, int]:
    """Counts the collectives in the text of a compiled program, as {"all-gather over data": 3, ...}.

    A collective in the body of a loop counts once. Devices are numbered by their position in the mesh.
    """
    found: Counter[str] = Counter()
    for line in hlo.splitlines():
        call = CALL.search(line)
        if call:
            axes = axes_crossed(device_groups(line, mesh.size), mesh)
            found[f"{call[1]} over {' x '.join(axes) or 'nothing'}"] += 1
    return dict(sorted(found.items()))


def device_groups(line: str, devices: int) -> list[list[int]]:
    """The device groups of one instruction; all devices when it names none."""
    iota, named_axes = IOTA.search(line), NAMED.search(line)
    if iota:
        return numbered(iota[2], iota[3]).reshape(numbers(iota[1])).tolist()
    if named_axes:
        return groups_of_axes(named_axes)
    explicit = EXPLICIT.search(line)
    named = re.findall(r"\{([\d,]+)\}", explicit[1]) if explicit else []
    return [[int(n) for n in group.split(",")] for group in named] or [list(range(devices))]


def numbers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]


def numbered(shape: str, order: str | None) -> np.ndarray:
    """Device numbers in row-major order over a shape, then transposed to this order of axes."""
    devices = np.arange(np.prod(numbers(shape))).reshape(numbers(shape))
    return devices.transpose(numbers(order)) if order else devices


def groups_of_axes(found: re.Match) -> list[list[int]]:
    """The groups along named axes, or parts ('axis':(stride)size) of axes, of the mesh in the instruction."""
    sizes = {name: int(size) for name, size, _, _ in AXIS.findall(found[1])}
    devices = numbered(found[2], found[3]) if found[2] else np.arange(np.prod(list(sizes.values())))
    wanted = {name: (before, size) for name, _, before, size in AXIS.findall(found[4])}
    shape, crossed = [], []
    for name, size in sizes.items():
        before, inner = (
            (int(n) for n in wanted.get(name, ("", "")))
            if all(wanted.get(name, ("",)))
            else (1, size)
        )
        crossed += [len(shape) + 1] if name in wanted else []
        shape += [before, inner, size // before // inner]
    devices = np.moveaxis(devices.reshape(shape), crossed, range(-len(crossed), 0))
    return devices.reshape(-1, int(np.prod([shape[axis] for axis in crossed]))).tolist()


def axes_crossed(device_groups: list[list[int]], mesh: Mesh) -> list[str]:
    """The mesh axes along which the members of some group differ."""
    places = np.stack(np.unravel_index(np.arange(mesh.size), mesh.devices.shape), axis=1)
    differs = np.zeros(len(mesh.axis_names), bool)
    for members in device_groups:
        differs |= (places[members] != places[members[0]]).any(axis=0)
    return [axis for axis, crosses in zip(mesh.axis_names, differs, strict=True) if crosses]
