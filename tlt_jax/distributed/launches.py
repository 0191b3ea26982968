"""Counts what a GPU runs in a round of a compiled rollout chunk: kernels, CUDA graphs, loops, copies.

Reads only texts that XLA writes: a program's thunks, their metadata, and its HLO.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import jax

GRAPH, LOOP = "kCommandBuffer", "kWhile"
BODY = f"{LOOP} body"
CONTROL = (LOOP, "kConditional")
# Thunks that run others, or wait for them.
AROUND = (GRAPH, "kSequential", "kAsyncStart", "kAsyncDone", *CONTROL)
SCOPES = ("layer", "commit")  # the name scopes of a layer, and of its cache commit
DRAFT, ONCE = (
    "draft",
    ("extend", "rerank"),
)  # of drafting, and of what it does once and not in every level
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
        thunks = (
            after or before
        )  # XLA writes a program without graphs only once, before the thunk passes
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
