"""What a compiled program does on a GPU: the collectives that it exchanges, and what it launches."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax
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
            int(n or whole) for n, whole in zip(wanted.get(name, ("", "")), (1, size), strict=True)
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


GRAPH, LOOP = "kCommandBuffer", "kWhile"
BODY = f"{LOOP} body"
CONTROL = (LOOP, "kConditional")
# Thunks that run others, or wait for them.
AROUND = (GRAPH, "kSequential", "kAsyncStart", "kAsyncDone", *CONTROL)
SCOPES = ("layer", "commit")  # the name scopes of a layer, and of its cache commit
DRAFT, ONCE = "draft", ("extend", "rerank")  # of drafting, and of what is not in every level
END = ("noise", "filter", "sample")  # of the vocabulary-wide end of a round
COPIES = ("copy", "copy-start", "transpose", "concatenate", "pad")

THUNK = re.compile(r"( *)(\d+): (k\w+)")
PART = re.compile(r"( *)(condition|body):")
ANNOTATION = re.compile(r'profile_annotation: "([^"]*)"')
NUMBER = re.compile(r"thunk_id: (\d+)")
COMPUTATION = re.compile(r"(?:ENTRY )?%?([\w.\-]+) \(.*\{$")
INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(?.*?) ([a-z][\w\-]*)\(([^)]*)\)")
ARRAY = re.compile(r"(pred|[a-z]+\d+\w*)\[([\d,]*)\]")
CALLED = re.compile(r"calls=%?([\w.\-]+)")
OPERATION = re.compile(r'op_name="([^"]*)"')


class Thunk(NamedTuple):
    """A step of a GPU program; `within`: the kinds of the enclosing steps, outermost first, with a loop's part."""

    number: int
    kind: str
    within: tuple[str, ...]


@dataclass(frozen=True)
class Round:
    """What runs in one pass through the loop of a chunk; an inner loop counts as one pass.

    `in_layers`: those `kernels` (with copies and collectives) whose last operation lies in one of SCOPES and not in DRAFT;
    `in_levels`: in DRAFT and not in ONCE; `in_end`: in END and not in DRAFT. `outside`: those that the host launches singly,
    next to `graphs` CUDA graphs. `host_loops`: inner loops and branches that the host drives. `is_one_graph`: the chunk is
    one CUDA graph that contains the loop, and the host launches nothing else.
    """

    kernels: int
    in_layers: int
    outside: int
    graphs: int
    host_loops: int
    is_one_graph: bool
    in_levels: int = 0
    in_end: int = 0


def compile_and_read(lowered: jax.stages.Lowered) -> tuple[jax.stages.Compiled, Round]:
    """Compiles a chunk for a GPU; also its round. Raises ValueError when XLA writes unexpected files."""
    with TemporaryDirectory() as folder:
        compiled = lowered.compile(compiler_options={"xla_dump_to": folder})
        before, after, metadata = (
            sorted(Path(folder).glob(f"*.{name}.txt"))
            for name in ("thunk_sequence", "thunk_sequence_after_thunk_passes", "thunk_metadata")
        )
        # XLA writes a program without graphs only once, before the thunk passes.
        thunks = after or before
        if len(thunks) != 1 or len(metadata) != 1:
            found = [path.name for path in thunks + metadata]
            raise ValueError(f"XLA {jax.__version__} wrote of one program's thunks: {found}")
        thunks, metadata = thunks[0].read_text(), metadata[0].read_text()
    return compiled, read_round(thunks, metadata, compiled.as_text())


def read_round(thunks: str, metadata: str, hlo: str) -> Round:
    """The round of a chunk. Raises ValueError unless it has exactly one outermost loop."""
    steps = list(read_thunks(thunks))
    loops = [step for step in steps if step.kind == LOOP and BODY not in step.within]
    if len(loops) != 1:
        raise ValueError(f"the thunks of a chunk have {len(loops)} loops, not one")
    within = [step for step in steps if BODY in step.within]
    kernels = [step for step in within if step.kind not in AROUND]
    scopes = scopes_of_numbers(metadata, hlo)

    def count(inside: tuple[str, ...], outside: tuple[str, ...] = ()) -> int:
        each = (scopes.get(step.number, frozenset()) for step in kernels)
        return sum(not it.isdisjoint(inside) and it.isdisjoint(outside) for it in each)

    alone = [step for step in within if GRAPH not in step.within]
    return Round(
        kernels=len(kernels),
        in_layers=count(SCOPES, (DRAFT,)),
        outside=sum(step.kind not in AROUND for step in alone),
        graphs=sum(step.kind == GRAPH for step in alone),
        host_loops=sum(step.kind in CONTROL for step in alone),
        is_one_graph=GRAPH in loops[0].within and sum(not step.within for step in steps) == 1,
        in_levels=count((DRAFT,), ONCE),
        in_end=count(END, (DRAFT,)),
    )


def read_thunks(text: str) -> Iterator[Thunk]:
    """The thunks of a program, nested by their indentation."""
    around: list[tuple[int, str]] = []
    for line in text.splitlines():
        if part := PART.match(line):
            if part[2] == "body":
                while around[-1][0] >= len(part[1]):
                    around.pop()
            around[-1] = around[-1][0], f"{LOOP} {part[2]}"
        elif thunk := THUNK.match(line):
            while around and around[-1][0] >= len(thunk[1]):
                around.pop()
            yield Thunk(int(thunk[2]), thunk[3], tuple(kind for _, kind in around))
            around.append((len(thunk[1]), thunk[3]))


def scopes_of_numbers(metadata: str, hlo: str) -> dict[int, frozenset[str]]:
    """The name scopes of the operation of each thunk's instruction, by the thunk's number."""
    scopes, found = {}, {}
    for line in hlo.splitlines():
        instruction, operation = INSTRUCTION.match(line), OPERATION.search(line)
        if instruction and operation:
            scopes[instruction[2]] = frozenset(operation[1].split("/"))
    for block in metadata.split("thunk_metadata {"):
        name, number = ANNOTATION.search(block), NUMBER.search(block)
        if name and number and name[1] in scopes:
            found[int(number[1])] = scopes[name[1]]
    return found


class Instruction(NamedTuple):
    """A line of HLO; `shape` is the text of its type."""

    shape: str
    operation: str
    operands: tuple[str, ...]
    called: str


def largest_copy(hlo: str) -> int:
    """Bytes of the largest array that the program writes as a copy, alone or as the result of a fusion.

    Transpositions, concatenations and paddings count as copies.
    """
    computations, roots = read_hlo(hlo)
    fused = {one.called for inner in computations.values() for one in inner.values() if one.called}
    largest = 0
    for name, instructions in computations.items():
        for one in instructions.values() if name not in fused else ():
            results = [one]
            if one.called:
                results = written(computations[one.called], roots[one.called])
            largest = max([largest, *(size(it.shape) for it in results if it.operation in COPIES)])
    return largest


def written(instructions: dict[str, Instruction], root: str) -> list[Instruction]:
    """The instructions whose results a fused computation returns."""
    one = instructions[root]
    if one.operation not in ("tuple", "bitcast"):
        return [one]
    return [found for name in one.operands for found in written(instructions, name)]


def read_hlo(hlo: str) -> tuple[dict[str, dict[str, Instruction]], dict[str, str]]:
    """The instructions of each computation by name, and the name of its root."""
    computations: dict[str, dict[str, Instruction]] = {}
    roots: dict[str, str] = {}
    name = ""
    for line in hlo.splitlines():
        if head := COMPUTATION.match(line):
            name = head[1]
            computations[name] = {}
        elif name and (found := INSTRUCTION.match(line)):
            called = CALLED.search(line) if found[4] == "fusion" else None
            operands = tuple(re.findall(r"%([\w.\-]+)", found[5]))
            computations[name][found[2]] = Instruction(
                found[3], found[4], operands, called[1] if called else ""
            )
            if found[1]:
                roots[name] = found[2]
    return computations, roots


def size(shape: str) -> int:
    """Bytes of the first array in the text of a type."""
    kind, lengths = ARRAY.search(shape).groups()
    bits = 8 if kind == "pred" else int(re.search(r"\d+", kind)[0])
    for length in lengths.split(",") if lengths else ():
        bits *= int(length)
    return bits // 8
