"""`python -m tlt_jax.plan`: compiles a configuration's programs, and reports whether they fit.

It compiles for the local devices, or ahead of time for GPUs or a TPU topology that this machine lacks:
the largest program of each kind, and a drafting chunk for each strategy, which includes extending the
drafter's cache.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax import cli
from tlt_jax.config import Config, load as configuration, validate
from tlt_jax.config.schema import ADAPTIVE
from tlt_jax.data import dataset as datasets, packing
from tlt_jax.distributed import (
    launches,
    mesh as meshes,
    process,
    round_counts,
    topology,
    traffic,
)
from tlt_jax.distributed.collectives import collectives
from tlt_jax.drafter import (
    batch as drafter_batch,
    merge,
    recipe as drafter_recipe,
    recipes,
    update as drafter_update,
)
from tlt_jax.drafter.idle_training import MOST_TOKENS
from tlt_jax.drafter.micro_step import MicroStep
from tlt_jax.errors import ConfigError
from tlt_jax.models import from_config, hf, remat as remats
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.rollout.buckets import block_size, bucket_width
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import Admit, CatchUp, Decode, Prefill, StateShape
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.rollout.scheduler.harvest import Harvest
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.train import adaptive, minibatches, policy_update
from tlt_jax.train.memory import (
    GIB,
    RESIDENT,
    ROLLOUT,
    advice,
    budget,
    cache_slots,
    caches,
    device_bytes,
    device_memory,
    pick,
    spell,
    within,
)
from tlt_jax.train.recipe import Recipe
from tlt_jax.tuner import make

TOPOLOGY = (
    "compile for these devices instead of the local ones: GPUs (h200:8, h100:1, or FILE.txtpb:8 with XLA's description of "
    "another) or a TPU topology (v5p:4x4x4); uses no cache"
)
COUNTS = "with --topology: write bytes, FLOP and kernels of each chunk's round, for python -m tlt_jax.simulate --counts FILE"


@dataclass(frozen=True)
class PlannedProgram:
    """A program that `lowering` lowers; `holds`: bytes by kind on a device while it runs.

    `layers`: of a chunk's model; `levels`: of its draft trees; `chunk`: the chunk.
    """

    name: str
    lowering: Callable[[], jax.stages.Lowered]
    mesh: Mesh
    holds: dict[str, int]
    layers: int = 0
    levels: int = 0
    chunk: Decode | None = None

    @property
    def lowered(self) -> jax.stages.Lowered:
        return self.lowering()


class Outcome(NamedTuple):
    """What a device needs for a program: its bytes, the capacity, and the text of the seconds by bytes ("" if unknown).

    `counts`: bytes, FLOP and kernels of a chunk's round, (0.0, 0.0, 0) for other programs. `chunk`: the chunk.
    """

    name: str
    needed: int
    capacity: int
    seconds: str
    counts: tuple[float, float, int] = (0.0, 0.0, 0)
    chunk: Decode | None = None

    @property
    def fits(self) -> bool:
        return self.needed <= self.capacity


def lower(
    config: Config, recipe: Recipe, engine: Engine, kinds: dict[str, int]
) -> Iterator[PlannedProgram]:
    """The largest programs of a step: prefill, rollout chunks, reshards, updates."""
    resident, rollout = pick(kinds, *RESIDENT), pick(kinds, *RESIDENT, *ROLLOUT)
    yield from lower_rollout(config, recipe, engine, rollout)
    params = policy_update.abstract_policy(recipe)
    copy = resident | pick(kinds, "rollout copy")
    yield PlannedProgram(
        "rollout reshard", partial(engine.reshard.lower, params), recipe.mesh, copy
    )

    rows = minibatches.abstract_rows(config, recipe)
    programs, sums = policy_update.programs(recipe), policy_update.abstract_sums(recipe, rows)
    names = "log-probs", "log-probs of the reference"
    base = policy_update.abstract_base(recipe)
    for name, scored in zip(names, minibatches.scored_policies(config, params, base), strict=False):
        scores = partial(programs.score.lower, scored, rows.replace(old=None, reference=None))
        yield PlannedProgram(name, scores, recipe.mesh, resident)
    accumulate = partial(programs.accumulate.lower, sums, params, rows)
    holds = resident | pick(kinds, "gradients")
    yield PlannedProgram("policy gradients", accumulate, recipe.mesh, holds)
    apply = partial(programs.apply.lower, policy_update.abstract_state(recipe), sums)
    yield PlannedProgram("policy update", apply, recipe.mesh, holds)

    if engine.drafter:
        drafting = recipes.recipe_of(config, recipe.model, engine.drafter, recipe.mesh)
        state = drafter_recipe.abstract_state(drafting)
        reshard = partial(engine.reshard_drafter.lower, state.params)
        yield PlannedProgram(
            "drafter reshard", reshard, recipe.mesh, copy | pick(kinds, "drafter copy")
        )
        is_adaptive = config.speculation.drafter == ADAPTIVE
        if is_adaptive and not config.rollout.deterministic:
            yield from lower_idle_training(config, recipe, engine, kinds)
        if not is_adaptive or config.drafter_training.share:
            batch = drafter_batch.abstract_batch(
                recipe.mesh, packing.rows(config), packing.row_tokens(config)
            )
            update = partial(drafter_update.program(drafting).lower, state, params, batch)
            held = resident | {"drafter optimizer": device_bytes(state.opt_state)}
            yield PlannedProgram("drafter update", update, recipe.mesh, held)


def lower_idle_training(
    config: Config, recipe: Recipe, engine: Engine, kinds: dict[str, int]
) -> Iterator[PlannedProgram]:
    """The programs of idle training: the copies, the largest micro-step of data group 0, and the merge.

    Other groups decode during a micro-step; the group that trains has freed its decoding state.
    """
    training = recipes.idle_recipe(config, recipe.model, engine.drafter, recipe.mesh)
    programs, copies = merge.programs(training), merge.abstract_copies(training)
    held = pick(kinds, *RESIDENT, "drafter in training")
    spread = partial(programs.spread.lower, drafter_recipe.abstract_state(training))
    yield PlannedProgram("drafter copies", spread, recipe.mesh, held)
    piece = MicroStep(0, 1, MOST_TOKENS, training)
    resident = held | pick(kinds, "rollout copy", "drafter copy", "replay")
    lowering = partial(engine.programs.lower, piece)
    yield PlannedProgram("drafter micro-step", lowering, engine.groups[0], resident)
    tokens = jax.ShapeDtypeStruct((recipe.mesh.shape["data"],), jnp.float32)
    lowering = partial(programs.merge.lower, copies, tokens)
    yield PlannedProgram("drafter merge", lowering, recipe.mesh, held)


def lower_rollout(
    config: Config, recipe: Recipe, engine: Engine, holds: dict[str, int]
) -> Iterator[PlannedProgram]:
    """The largest program of each kind in a rollout, and the drafting chunk of each strategy."""
    params = DecodingParams(Sampling.of(config.rollout), tuple(recipe.model.eos_ids), engine.stops)
    sizes = config.data.max_prompt_tokens, config.rollout.prompts, cache_slots(config)
    window = 0
    if config.speculation.drafter == ADAPTIVE:
        training = recipes.idle_recipe(config, recipe.model, engine.drafter, recipe.mesh)
        window = adaptive.replay_config(config, training).width
    for name, program in largest_programs(engine, params, *sizes, window).items():
        now = holds
        if isinstance(program, Decode | CatchUp) and program.state.batch != engine.capacity:
            now = holds | caches(config, engine.programs.shapes[0], program.state.batch)
        layers = levels = 0
        if isinstance(program, Decode):
            layers, levels = recipe.model.num_layers, program.strategy.depth
        lowering = partial(engine.programs.lower, program)
        chunk = program if layers else None
        yield PlannedProgram(name, lowering, engine.groups[0], now, layers, levels, chunk)


def largest_programs(
    engine: Engine,
    params: DecodingParams,
    prompt_tokens: int,
    prompts: int,
    slots: int,
    window: int = 0,
) -> dict[str, Program]:
    """The largest program of each kind of data group 0, by name: prefill, admission, chunks, catching up.

    With a `window` also the harvest of windows of this width. Each strategy has its chunk with the largest batch that the
    tuner may use it for.
    """
    width, rounds = bucket_width(prompt_tokens), engine.config.rollout.chunk
    prefill = Prefill(0, block_size(prompts, width), width)
    state = StateShape(0, engine.capacity, slots)
    found: dict[str, Program] = {
        "prefill": prefill,
        "admission": Admit(state, prefill),
        "rollout chunk": Decode(state, rounds, PLAIN, params),
    }

    drafters = {arm.drafter for arm in engine.arms}
    largest = make.largest_batches(engine.tuner, engine.batches, drafters)
    drafter_of = engine.programs.shapes[0].drafter_of
    if caught_up := [batch for arm, batch in largest.items() if drafter_of(arm).catch_up]:
        batch = max(caught_up)
        found[f"catching up of {batch}"] = CatchUp(StateShape(0, batch, slots))
    for arm in engine.arms:
        if arm in largest:
            shape = StateShape(0, largest[arm], slots)
            title = f"rollout chunk {strategies.name(arm)} of {largest[arm]}"
            found[title] = Decode(shape, rounds, arm, params)
    if window:
        found["harvest"] = Harvest(state, block_size(engine.capacity, window), window)
    return found


def print_report(program: PlannedProgram, limit: int, bandwidth: float | None = None) -> Outcome:
    """Compiles a program and prints its memory and collectives.

    `limit`: bytes of a device; `bandwidth`: its bytes a second, None if unknown.
    """
    begin, one_round = time.perf_counter(), None
    # XLA dumps nothing for a program that JAX reads from its cache.
    has_dump = meshes.is_gpu(program.mesh) and not jax.config.jax_compilation_cache_dir
    if program.layers and has_dump:
        compiled, one_round = launches.compile_and_read(program.lowered)
    else:
        compiled = program.lowered.compile()
    seconds = time.perf_counter() - begin

    memory = compiled.memory_analysis()
    resident = program.holds | {"temporaries": memory.temp_size_in_bytes}
    text = compiled.as_text()
    seconds_by_bytes = by_bytes(program, compiled, text, bandwidth) if bandwidth else ""
    outcome = Outcome(program.name, sum(resident.values()), limit, seconds_by_bytes)
    if program.chunk:
        kernels = one_round.kernels if one_round else 0
        counts = *traffic.counted(compiled), kernels
        outcome = outcome._replace(counts=counts, chunk=program.chunk)

    print(f"{program.name}: compiled in {seconds:.1f} s")
    print(f"  memory       {spell(resident)}")
    donated = f"{memory.argument_size_in_bytes / GIB:.2f} GiB, {memory.alias_size_in_bytes / GIB:.2f} of it donated"
    print(f"  arguments    {donated}")
    for name, count in collectives(text, program.mesh).items() or {"none": 0}.items():
        print(f"  collectives  {name}{f': {count}' if count else ''}")
    if one_round:
        print_round(one_round, program, launches.largest_copy(text))
    print("  fits" if outcome.fits else f"  DOES NOT FIT: {advice(resident)}")
    return outcome


def by_bytes(
    program: PlannedProgram, compiled: jax.stages.Compiled, text: str, bandwidth: float
) -> str:
    """The fewest seconds in which a device moves the program's bytes; of a chunk, those of a round."""
    seconds = f"{traffic.moved(compiled) / bandwidth:.5f}"
    if program.layers:
        return f"{seconds} a round"
    return f"> {seconds}" if traffic.has_counted_loop(text) else seconds


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


def write_counts(path: Path, outcomes: Sequence[Outcome], name: str, devices: int) -> None:
    """Writes what the rounds of the chunks move, compute and launch; `devices` of a data group, of the topology `name`."""
    kind = name.partition(":")[0]
    rows = (
        round_counts.RoundCounts(
            kind, devices, one.chunk.state.batch, one.chunk.state.slots, strategies.name(one.chunk.strategy), *one.counts
        )
        for one in outcomes
        if one.chunk
    )  # fmt: skip
    round_counts.write(path, rows)


def sizes(config: Config) -> ModelConfig:
    """The model of model.init if it has a vocab_size (no files needed), else that of the model directory."""
    if "vocab_size" in config.model.init:
        return hf.new_config(config.model.init, config.model.init["vocab_size"], ())
    return from_config.model_config(config, datasets.tokenizer(config))


def main() -> int:
    """Exit code 0 when every program compiles and fits, 1 when one does not, 2 for a UserError."""
    arguments, name = sys.argv[1:], ""
    if "--topology" in arguments:
        name = cli.take(arguments, "--topology")
        jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))

    counts = cli.take(arguments, "--counts") if "--counts" in arguments else ""
    if counts and not name:
        cli.stop(
            ConfigError(
                f"--counts {counts} counts for devices that are not here: add --topology NAME"
            )
        )

    config = configuration.load(
        arguments,
        command="python -m tlt_jax.plan",
        about=cli.COMMANDS["plan"].about,
        own=configuration.CONFIG | {"[--topology NAME]": TOPOLOGY, "[--counts FILE]": COUNTS},
    )
    if name:  # the persistent cache cannot load programs for devices that this machine lacks
        config = replace(config, rollout=replace(config.rollout, compile_cache="off"))

    with cli.prepared(config):
        model = sizes(config)
        if topology.is_gpu(name):  # as in a run on them
            process.set_accelerator_flags(config)
        found = topology.describe(name) if name else topology.Topology(jax.devices())
        outcomes = report(config, model, found)
        if counts:
            write_counts(Path(counts), outcomes, name, config.mesh.model)
        return 0 if all(outcome.fits for outcome in outcomes) else 1


def report(config: Config, model: ModelConfig, found: topology.Topology) -> list[Outcome]:
    """Compiles and reports every program for these devices, and says on standard error how many are left."""
    validate.validate_model(config, model, len(found.devices))
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model, found.devices)
    drafter = from_config.drafter_config(config, model)
    directory = from_config.drafter_directory(config)
    if directory and not directory.exists():
        wanted = f"the {drafter.kind} drafter of `drafter_training`"
        print(f"{config.speculation.drafter} does not exist: planning for {wanted}")

    limit = found.memory or device_memory(mesh)
    recipe = within(config, Recipe.of(config, model, mesh, 1), drafter, limit)
    knobs = config
    captures = knobs.speculation.drafter == ADAPTIVE and not knobs.rollout.deterministic
    engine = Engine(config, model, mesh, drafter=drafter, captures_states=captures)
    kinds = budget(config, recipe, engine.programs.shapes[0], engine.capacity, drafter)

    shape = f"mesh data {config.mesh.data} x model {config.mesh.model}"
    share = f" ({topology.FRACTIONS[0]} of its memory)" if found.memory else ""
    print(f"{mesh.size} x {meshes.device_kind(mesh)}, {shape}, {limit / GIB:.1f} GiB each{share}")
    for kind, size in kinds.items():
        print(f"  {kind:<17} {size / GIB:9.3f} GiB a device")
    print(f"  {'remat':<17} {remats.spell(recipe.remat)} (model.remat {config.model.remat})")
    programs = list(lower(config, recipe, engine, kinds))
    bandwidth = found.bandwidth or traffic.BANDWIDTHS.get(meshes.device_kind(mesh))
    outcomes = []
    for done, program in enumerate(programs):
        left = f"compiling {program.name}, {len(programs) - done} of {len(programs)} programs left"
        print(left, file=sys.stderr, flush=True)
        outcomes.append(print_report(program, limit, bandwidth))
    print_table(outcomes, bandwidth)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
