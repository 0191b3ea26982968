"""`python -m tlt_jax.plan`: compiles a configuration's programs, and reports whether they fit.

It compiles for the local devices, or ahead of time for GPUs or a TPU topology that this machine lacks:
the largest program of each kind, and a drafting chunk for each strategy, which includes extending the
drafter's cache.
"""

from __future__ import annotations

import os
import sys
from dataclasses import replace

import jax

from tlt_jax import cli
from tlt_jax.config import Config, load as configuration, validate
from tlt_jax.config.schema import ADAPTIVE
from tlt_jax.distributed import mesh as meshes, process, topology
from tlt_jax.models import from_config, remat as remats
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.plan import programs, report
from tlt_jax.rollout.engine import Engine
from tlt_jax.train.memory import GIB, budget, device_memory, within
from tlt_jax.train.policy_update import Recipe

TOPOLOGY = (
    "compile for these devices instead of the local ones: GPUs (h200:8, h100:1, or FILE.txtpb:8 with XLA's description of "
    "another) or a TPU topology (v5p:4x4x4); uses no cache"
)


def main() -> int:
    """Exit code 0 when every program compiles and fits, 1 when one does not, 2 for a UserError."""
    arguments = sys.argv[1:]
    if name := cli.take(arguments, "--topology", ""):
        jax.config.update("jax_platforms", os.environ.setdefault("JAX_PLATFORMS", "cpu"))

    config = configuration.load(
        arguments,
        command="python -m tlt_jax.plan",
        about=cli.COMMANDS["plan"].about,
        own=configuration.CONFIG | {"[--topology NAME]": TOPOLOGY},
    )
    if name:  # the persistent cache cannot load programs for devices that this machine lacks
        config = replace(config, rollout=replace(config.rollout, compile_cache="off"))

    with cli.prepared(config):
        model = programs.sizes(config)
        if topology.is_gpu(name):  # as in a run on them
            process.set_accelerator_flags(config)
        found = topology.describe(name) if name else topology.Topology(jax.devices())
        outcomes = compile_all(config, model, found)
        return 0 if all(outcome.fits for outcome in outcomes) else 1


def compile_all(
    config: Config, model: ModelConfig, found: topology.Topology
) -> list[report.Outcome]:
    """Compiles and reports every program for these devices, and says on standard error how many are left."""
    validate.validate_model(config, model, len(found.devices))
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model, found.devices)
    drafter = programs.drafter(config, model)
    directory = from_config.drafter_directory(config)
    if directory and not directory.exists():
        wanted = f"the {drafter.kind} drafter of `drafter_training`"
        print(f"{config.speculation.drafter} does not exist: planning for {wanted}")

    limit = found.memory or device_memory(mesh)
    recipe = within(config, Recipe.of(config, model, mesh, 1), drafter, limit)
    captures = config.speculation.drafter == ADAPTIVE and not config.rollout.deterministic
    records = validate.replays(config.algorithm, recipe.compute_dtype, model)
    engine = Engine(
        config,
        model,
        mesh,
        drafter=drafter,
        captures_states=captures,
        lora=recipe.lora,
        records=records,
    )
    kinds = budget(config, recipe, engine.programs.shapes[0], engine.capacity, drafter)

    shape = f"mesh data {config.mesh.data} x model {config.mesh.model}"
    share = f" ({topology.FRACTIONS[0]} of its memory)" if found.memory else ""
    print(f"{mesh.size} x {meshes.device_kind(mesh)}, {shape}, {limit / GIB:.1f} GiB each{share}")
    for kind, size in kinds.items():
        print(f"  {kind:<17} {size / GIB:9.3f} GiB a device")
    print(f"  {'remat':<17} {remats.spell(recipe.remat)} (model.remat {config.model.remat})")
    planned = list(programs.lower(config, recipe, engine, kinds))
    bandwidth = found.bandwidth or topology.BANDWIDTHS.get(meshes.device_kind(mesh))
    outcomes = []
    for done, program in enumerate(planned):
        left = f"compiling {program.name}, {len(planned) - done} of {len(planned)} programs left"
        print(left, file=sys.stderr, flush=True)
        outcomes.append(report.print_report(program, limit, bandwidth))
    report.print_table(outcomes, bandwidth)
    return outcomes


if __name__ == "__main__":
    sys.exit(main())
