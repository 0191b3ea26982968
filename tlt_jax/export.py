"""`python -m tlt_jax.export --run RUN --out DIR`: the policy, its adapters or the drafter of a checkpoint as a directory."""

from __future__ import annotations

import sys
from pathlib import Path

from tlt_jax import cli, run_folder
from tlt_jax.config import load as configuration
from tlt_jax.config.schema import ADAPTIVE, DTYPES, Config
from tlt_jax.errors import ConfigError

OWN = {
    "--run RUN": "folder of the run",
    "--out DIR": "directory to write",
    "[--step N]": "the checkpoint: a step, last (default), or best (by checkpoint.best_metric)",
    "[--drafter]": "export the drafter that the run trains (speculation.drafter adaptive), not the policy",
    "[--adapter]": "export the adapters of a run with model.lora as a directory for Hugging Face's peft, not the policy, into "
    "which they are merged",
    "[--dtype DTYPE]": f"dtype of the written weights: {' | '.join(DTYPES)} (default: model.param_dtype)",
}
ABOUT = f"""{cli.COMMANDS["export"].about}
Knobs of the run may be overridden, for example --mesh.data 1 on fewer devices."""


def main() -> int:
    """The command; exit code 0 when the directory is written."""
    arguments = sys.argv[1:]
    if not arguments or "--help" in arguments or "-h" in arguments:
        configuration.load(["--help"], command="python -m tlt_jax.export", about=ABOUT, own=OWN)

    run, out = Path(cli.take(arguments, "--run")), Path(cli.take(arguments, "--out"))
    step = cli.take(arguments, "--step", "last")
    dtype = cli.take(arguments, "--dtype", "")
    writers = {"drafter": export_drafter, "adapter": export_adapter}
    wanted = [what for what in writers if f"--{what}" in arguments]
    for what in wanted:
        arguments.remove(f"--{what}")

    try:
        config = run_folder.read(run, arguments)
    except ConfigError as error:
        cli.stop(error)

    with cli.prepared(config):
        if dtype and dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype!r} is unknown: use {', '.join(DTYPES)}")
        if len(wanted) > 1:
            raise ConfigError(
                "--drafter and --adapter are two directories: export them one after the other"
            )
        what = wanted[0] if wanted else "policy"
        write = writers.get(what, export)
        print(f"{out}: the {what} after step {write(config, run, out, step, dtype)}")
    return 0


def export(config: Config, run: Path, out: Path, step: str = "last", dtype: str = "") -> int:
    """Writes the policy of a checkpoint of the run, with its tokenizer; returns the step.

    `step`: a number, last or best; `dtype`: of the written weights, by default model.param_dtype.
    Raises ConfigError or CheckpointError when no such checkpoint exists.
    """
    from tlt_jax.data import prompt_format
    from tlt_jax.models import from_config, hf
    from tlt_jax.train import run_state, setup

    model, mesh = run_state.sizes(config)
    chosen, params = run_state.saved_policy(config, run, step, model, mesh)
    tokenizer = prompt_format.tokenizer_of(config)
    hf.save(
        params, model, out, mesh, tokenizer, dtype or config.model.param_dtype,
        files=prompt_format.files(config) | setup.lineage_file(run), source=from_config.source_directory(config),
    )  # fmt: skip
    return chosen


def export_adapter(
    config: Config, run: Path, out: Path, step: str = "last", dtype: str = ""
) -> int:
    """Writes the adapters of a checkpoint of the run, for Hugging Face's peft; arguments as for `export`.

    Raises ConfigError also when the run trains all weights.
    """
    from tlt_jax.data import prompt_format
    from tlt_jax.models import hf_adapter, lora
    from tlt_jax.train import run_state, setup

    model, mesh = run_state.sizes(config)
    if not (chosen_lora := lora.chosen(config.model.lora, model)):
        raise ConfigError(
            f"--adapter: {run} trains all weights, its model.lora.rank is 0: export the policy, without --adapter"
        )
    chosen, params = run_state.saved_policy(config, run, step, model, mesh)
    adapters, _ = lora.parted(params)
    base, tokenizer = setup.name_of_base(config, run), prompt_format.tokenizer_of(config)
    hf_adapter.save(
        adapters, chosen_lora, model, out, mesh, base, tokenizer, dtype or config.model.param_dtype,
        prompt_format.files(config) | setup.lineage_file(run),
    )  # fmt: skip
    return chosen


def export_drafter(
    config: Config, run: Path, out: Path, step: str = "last", dtype: str = ""
) -> int:
    """Writes the drafter of a checkpoint of the run, for serving engines; arguments as for `export`.

    Raises ConfigError also when the run trains no drafter, or had not started to at that step.
    """
    from tlt_jax.drafter import recipe as drafter_recipe
    from tlt_jax.models import from_config, hf_drafter
    from tlt_jax.train import run_state

    if config.speculation.drafter != ADAPTIVE:
        raise ConfigError(
            f"--drafter: {run} trains no drafter, its speculation.drafter is {config.speculation.drafter}"
        )
    model, mesh = run_state.sizes(config)
    drafter = from_config.drafter_config(config, model)
    recipe = drafter_recipe.idle_recipe(config, model, drafter, mesh)
    target = drafter_recipe.abstract_state(recipe)
    chosen, state = run_state.restore_item(config, run, step, "drafter", target)
    hf_drafter.save(state.params, drafter, out, dtype or config.model.param_dtype)
    if caveat := hf_drafter.caveat(drafter, model.family):
        print(f"{out}: {caveat}")
    return chosen


if __name__ == "__main__":
    sys.exit(main())
