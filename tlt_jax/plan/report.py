"""What a compiled program needs, printed: memory, collectives, kernels of a round, seconds by bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
from jax.sharding import Mesh

from tlt_jax.distributed import mesh as meshes, topology
from tlt_jax.plan import launches
from tlt_jax.train.memory import GIB, advice, spell


class PlannedProgram(NamedTuple):
    """A program; `holds`: bytes by kind on a device while it runs.

    `layers`: of a chunk's model; `levels`: of its draft trees.
    """

    name: str
    lower: Callable[[], jax.stages.Lowered]
    mesh: Mesh
    holds: dict[str, int]
    layers: int = 0
    levels: int = 0


class Outcome(NamedTuple):
    """What a device needs for a program: its bytes, the capacity, and the text of the seconds by bytes ("" if unknown)."""

    name: str
    needed: int
    capacity: int
    seconds: str

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity


def print_report(program: PlannedProgram, limit: int, bandwidth: float | None = None) -> Outcome:
    """Compiles a program and prints its memory and collectives.

    `limit`: bytes of a device; `bandwidth`: its bytes a second, None if unknown.
    """
    begin, one_round = time.perf_counter(), None
    # XLA dumps nothing for a program that JAX reads from its cache.
    has_dump = meshes.is_gpu(program.mesh) and not jax.config.jax_compilation_cache_dir
    if program.layers and has_dump:
        compiled, one_round = launches.compile_and_read(program.lower())
    else:
        compiled = program.lower().compile()
    seconds = time.perf_counter() - begin

    memory = compiled.memory_analysis()
    resident = program.holds | {"temporaries": memory.temp_size_in_bytes}
    text = compiled.as_text()
    seconds_by_bytes = by_bytes(program, compiled, text, bandwidth) if bandwidth else ""
    outcome = Outcome(program.name, sum(resident.values()), limit, seconds_by_bytes)

    print(f"{program.name}: compiled in {seconds:.1f} s")
    print(f"  memory       {spell(resident)}")
    donated = f"{memory.argument_size_in_bytes / GIB:.2f} GiB, {memory.alias_size_in_bytes / GIB:.2f} of it donated"
    print(f"  arguments    {donated}")
    for name, count in launches.collectives(text, program.mesh).items() or {"none": 0}.items():
        print(f"  collectives  {name}{f': {count}' if count else ''}")
    if one_round:
        print_round(one_round, program, launches.largest_copy(text))
    print("  fits" if outcome.fits else f"  DOES NOT FIT: {advice(resident)}")
    return outcome


def by_bytes(
    program: PlannedProgram, compiled: jax.stages.Compiled, text: str, bandwidth: float
) -> str:
    """The fewest seconds in which a device moves the program's bytes; of a chunk, those of a round."""
    seconds = f"{topology.moved(compiled) / bandwidth:.5f}"
    if program.layers:
        return f"{seconds} a round"
    return f"> {seconds}" if topology.has_counted_loop(text) else seconds


def print_table(outcomes: Sequence[Outcome], bandwidth: float | None) -> None:
    """One line a program: what it needs of the capacity of a device, what is left, and its seconds by bytes."""
    capacity, width = outcomes[0].capacity, max(len(one.name) for one in outcomes)
    print(f"\n{'program':<{width}}  GiB of {capacity / GIB:<6.1f}  margin  seconds by bytes")
    for one in outcomes:
        margin = f"{1 - one.needed / capacity:.0%}" if one.fits else "NONE"
        print(f"{one.name:<{width}}  {one.needed / GIB:13.2f}  {margin:>6}  {one.seconds or '-'}")
    if bandwidth:
        print(
            f"seconds by bytes: at {bandwidth / 1e12:.2f} TB/s, as published; > where a loop's passes count only once"
        )


def print_round(one_round: launches.Round, program: PlannedProgram, copied: int) -> None:
    """Prints the graphs and kernels of a round of a chunk, and its largest copy (bytes) next to the keys of a layer."""
    if one_round.is_one_graph:
        print("  graphs       the chunk is one CUDA graph, with the loop in it")
    else:
        print(
            f"  graphs       the host drives the loop: {one_round.graphs} CUDA graphs and {one_round.outside} kernels "
            f"outside of them a round, and {one_round.host_loops} loops in it"
        )
    parts, others = [f"{one_round.in_layers / program.layers:.1f} a layer"], one_round.kernels
    if program.levels:
        parts.append(f"{one_round.in_levels / program.levels:.1f} a draft level")
    parts.append(f"{one_round.in_end} for noise, filter and choice")
    others -= one_round.in_layers + one_round.in_levels + one_round.in_end
    print(
        f"  kernels      {one_round.kernels} a round, by the scopes of their last operations: {', '.join(parts)}, and "
        f"{others} others"
    )
    keys = program.holds["cache"] / program.layers / 2
    print(f"  copies       at most {copied / 2**20:.2f} MiB; a layer's keys are {keys / 2**20:.2f}")
