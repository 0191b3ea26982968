"""`python -m tlt_jax.plan`: compiles a configuration's programs, and reports whether they fit.

For the local devices, or ahead of time for a TPU topology. Of each kind of program the largest is
compiled; of drafting chunks one for each strategy, which includes extending the drafter's cache.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax import cli
from tlt_jax.config import Config, load as configuration, validate
from tlt_jax.config.schema import ADAPTIVE
from tlt_jax.data import dataset as datasets, packing
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.collectives import collectives
from tlt_jax.drafter import (
    batch as drafter_batch,
    merge,
    recipe as drafter_recipe,
    update as drafter_update,
)
from tlt_jax.drafter.idle_training import MOST_TOKENS
from tlt_jax.drafter.micro_step import MicroStep
from tlt_jax.errors import ConfigError
from tlt_jax.models import from_config, hf, transformer
from tlt_jax.models.transformer import ModelConfig
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.programs import CatchUp, Decode
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling
from tlt_jax.train import adaptive, policy_batch, policy_update
from tlt_jax.train.memory import (
    GIB,
    RESIDENT,
    ROLLOUT,
    advice,
    budget,
    cache_slots,
    caches,
    device_memory,
    pick,
    spell,
)
from tlt_jax.train.recipe import Recipe


@dataclass(frozen=True)
class PlannedProgram:
    """A lowered program; `holds`: bytes by kind that a device holds while it runs."""

    name: str
    lowered: Any
    mesh: Mesh
    holds: dict[str, int]


def lower(
    config: Config, recipe: Recipe, engine: Engine, kinds: dict[str, int]
) -> Iterator[PlannedProgram]:
    """The largest programs of a step: prefill, rollout chunks, reshards, updates."""
    resident, rollout = pick(kinds, *RESIDENT), pick(kinds, *RESIDENT, *ROLLOUT)
    yield from lower_rollout(config, recipe, engine, rollout)
    params = transformer.abstract(recipe.model, recipe.mesh, "train", config.model.param_dtype)
    copy = resident | pick(kinds, "rollout copy")
    yield PlannedProgram("rollout reshard", engine.reshard.lower(params), recipe.mesh, copy)

    given = ("recorded",)
    if config.algorithm.kl_coef:
        given += ("reference",)
    if config.algorithm.minibatches > 1:
        given += ("old",)
    rows = policy_batch.abstract_rows(
        recipe.mesh, packing.rows(config), packing.row_tokens(config), given
    )
    programs, sums = policy_update.programs(recipe), policy_update.abstract_sums(recipe, rows)
    if given != ("recorded",):
        scores = programs.score.lower(params, rows.replace(old=None, reference=None))
        yield PlannedProgram("log-probs", scores, recipe.mesh, resident)
    accumulate = programs.accumulate.lower(sums, params, rows)
    holds = resident | pick(kinds, "gradients")
    yield PlannedProgram("policy gradients", accumulate, recipe.mesh, holds)
    apply = programs.apply.lower(policy_update.abstract_state(recipe), sums)
    yield PlannedProgram("policy update", apply, recipe.mesh, holds)

    if engine.drafter:
        drafting = drafter_recipe.Recipe.of(config, recipe.model, engine.drafter, recipe.mesh)
        state = drafter_recipe.abstract_state(drafting)
        reshard = engine.reshard_drafter.lower(state.params)
        yield PlannedProgram(
            "drafter reshard", reshard, recipe.mesh, copy | pick(kinds, "drafter copy")
        )
        if config.speculation.drafter == ADAPTIVE:
            yield from lower_idle_training(config, recipe, engine, kinds)
            return
        batch = drafter_batch.abstract_batch(
            recipe.mesh, packing.rows(config), packing.row_tokens(config)
        )
        update = drafter_update.program(drafting).lower(state, params, batch)
        yield PlannedProgram(
            "drafter update", update, recipe.mesh, resident | pick(kinds, "drafter optimizer")
        )


def lower_idle_training(
    config: Config, recipe: Recipe, engine: Engine, kinds: dict[str, int]
) -> Iterator[PlannedProgram]:
    """The programs of idle training: the copies, the largest micro-step of data group 0, and the merge.

    Beside a micro-step other groups decode; its own has released its decoding state.
    """
    training = drafter_recipe.Recipe.while_idle(config, recipe.model, engine.drafter, recipe.mesh)
    programs, copies = merge.programs(training), merge.abstract_copies(training)
    held = pick(kinds, *RESIDENT, "drafter optimizer", "drafter in training")
    spread = programs.spread.lower(drafter_recipe.abstract_state(training))
    yield PlannedProgram("drafter copies", spread, recipe.mesh, held)
    piece = MicroStep(0, 1, MOST_TOKENS, training)
    beside = held | pick(kinds, "rollout copy", "drafter copy", "replay")
    lowered = engine.programs.lower(piece)
    yield PlannedProgram("drafter micro-step", lowered, engine.groups[0], beside)
    tokens = jax.ShapeDtypeStruct((recipe.mesh.shape["data"],), jnp.float32)
    yield PlannedProgram("drafter merge", programs.merge.lower(copies, tokens), recipe.mesh, held)


def lower_rollout(
    config: Config, recipe: Recipe, engine: Engine, holds: dict[str, int]
) -> Iterator[PlannedProgram]:
    """The largest program of each kind in a rollout; drafting chunks for each strategy."""
    params = DecodingParams(Sampling.of(config.rollout), tuple(recipe.model.eos_ids), engine.stops)
    sizes = config.data.max_prompt_tokens, config.rollout.prompts, cache_slots(config)
    window = 0
    if config.speculation.drafter == ADAPTIVE:
        training = drafter_recipe.Recipe.while_idle(
            config, recipe.model, engine.drafter, recipe.mesh
        )
        window = adaptive.replay_config(config, training).width
    for name, program in engine.largest_programs(params, *sizes, window).items():
        now = holds
        if isinstance(program, Decode | CatchUp) and program.state.batch != engine.capacity:
            now = holds | caches(config, engine.programs.shapes[0], program.state.batch)
        yield PlannedProgram(name, engine.programs.lower(program), engine.groups[0], now)


def print_report(program: PlannedProgram, limit: int) -> bool:
    """Compiles a program and prints its memory and collectives; True when it fits."""
    begin = time.perf_counter()
    compiled = program.lowered.compile()
    seconds = time.perf_counter() - begin

    memory = compiled.memory_analysis()
    resident = program.holds | {"temporaries": memory.temp_size_in_bytes}
    fits = sum(resident.values()) <= limit

    print(f"{program.name}: compiled in {seconds:.1f} s")
    print(f"  memory       {spell(resident)}")
    donated = f"{memory.argument_size_in_bytes / GIB:.2f} GiB, {memory.alias_size_in_bytes / GIB:.2f} of it donated"
    print(f"  arguments    {donated}")
    for name, count in collectives(compiled.as_text(), program.mesh).items() or {"none": 0}.items():
        print(f"  collectives  {name}{f': {count}' if count else ''}")
    print("  fits" if fits else f"  DOES NOT FIT: {advice(resident)}")
    return fits


def topology_devices(name: str) -> Sequence[Any]:
    """Device descriptions of a TPU topology, such as v5p:4x4x4.

    Raises ConfigError when libtpu does not know it.
    """
    os.environ["TPU_SKIP_MDS_QUERY"] = "1"
    from jax.experimental import topologies

    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name).devices
    except (RuntimeError, ValueError, NotImplementedError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"--topology {name}: {reason}: name one such as v5p:2x2x2, and install tlt_jax[tpu]"
        ) from error


def sizes(config: Config) -> ModelConfig:
    """The model of model.init when that has a vocab_size, which needs no files.

    Else that of the model directory.
    """
    if "vocab_size" in config.model.init:
        return hf.new_config(config.model.init, config.model.init["vocab_size"], ())
    return from_config.model_config(config, datasets.tokenizer(config))


def main() -> int:
    """Exit code 0 when every program compiles and fits, 1 when one does not, 2 for a UserError."""
    arguments, topology = sys.argv[1:], ""
    if "--topology" in arguments:
        topology = cli.take(arguments, "--topology")
        os.environ.setdefault("JAX_PLATFORMS", "cpu")

    about = "--topology NAME: compile for this TPU topology (for example v5p:4x4x4) instead of the devices here; uses no cache"
    config = configuration.load(arguments, command="python -m tlt_jax.plan", about=about)
    if topology:  # the persistent cache cannot load programs for absent devices
        config = replace(config, rollout=replace(config.rollout, compile_cache="off"))

    with cli.prepared(config):
        model = sizes(config)
        devices = topology_devices(topology) if topology else jax.devices()
        validate.validate_model(config, model, len(devices))

        mesh = meshes.make_mesh(config.mesh.data, config.mesh.model, devices)
        drafter = from_config.drafter_config(config, model)
        directory = from_config.drafter_directory(config)
        if directory and not directory.exists():
            wanted = f"the {drafter.kind} drafter of `drafter_training`"
            print(f"{config.speculation.drafter} is not there: planning for {wanted}")

        recipe, engine = (
            Recipe.of(config, model, mesh, 1),
            Engine(
                config,
                model,
                mesh,
                drafter=drafter,
                captures_states=config.speculation.drafter == ADAPTIVE,
            ),
        )
        limit, kinds = (
            device_memory(mesh),
            budget(config, recipe, engine.programs.shapes[0], engine.capacity, drafter),
        )

        shape = f"mesh data {config.mesh.data} x model {config.mesh.model}"
        print(f"{mesh.size} x {meshes.device_kind(mesh)}, {shape}, {limit / GIB:.1f} GiB each")
        for kind, size in kinds.items():
            print(f"  {kind:<17} {size / GIB:9.3f} GiB a device")

        return (
            0
            if all(
                [print_report(program, limit) for program in lower(config, recipe, engine, kinds)]
            )
            else 1
        )


if __name__ == "__main__":
    sys.exit(main())
