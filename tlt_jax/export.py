"""`python -m tlt_jax.export --run RUN --out DIR`: the policy of a checkpoint as a Hugging Face model directory."""

from __future__ import annotations

import sys
from pathlib import Path

from tlt_jax import cli, run_folder
from tlt_jax.config import load as configuration
from tlt_jax.config.schema import DTYPES, Config
from tlt_jax.errors import ConfigError

ABOUT = f"""--run RUN     folder of the run
--out DIR     directory to write
--step N      which checkpoint: a step, latest (default), or best by checkpoint.best_metric
--dtype DTYPE dtype of the written weights: {" | ".join(DTYPES)} (default: model.param_dtype)
Knobs of the run may be overridden, for example --mesh.data 1 where fewer devices are."""


def main() -> int:
    """The command; exit code 0 when the directory is written."""
    arguments = sys.argv[1:]
    if not arguments or "--help" in arguments or "-h" in arguments:
        configuration.load(["--help"], command="python -m tlt_jax.export", about=ABOUT)

    run, out = Path(cli.take(arguments, "--run")), Path(cli.take(arguments, "--out"))
    step = cli.take(arguments, "--step") if "--step" in arguments else "latest"
    dtype = cli.take(arguments, "--dtype") if "--dtype" in arguments else ""

    try:
        config = run_folder.read(run, arguments)
    except ConfigError as error:
        cli.stop(error)

    with cli.prepared(config):
        if dtype and dtype not in DTYPES:
            raise ConfigError(f"--dtype {dtype!r} is unknown: use {', '.join(DTYPES)}")
        print(f"{out}: the policy after step {export(config, run, out, step, dtype)}")
    return 0


def export(config: Config, run: Path, out: Path, step: str = "latest", dtype: str = "") -> int:
    """Writes the policy of a checkpoint of the run, with its tokenizer; returns the step.

    `step`: a number, latest or best; `dtype`: of the written weights, by default model.param_dtype.
    Raises ConfigError or CheckpointError when there is no such checkpoint.
    """
    import jax

    from tlt_jax.checkpoint import Store
    from tlt_jax.config import validate
    from tlt_jax.data import dataset as datasets
    from tlt_jax.distributed import mesh as meshes
    from tlt_jax.models import from_config, hf
    from tlt_jax.train import policy_update
    from tlt_jax.train.recipe import Recipe

    tokenizer = datasets.tokenizer(config)
    model = from_config.model_config(config, tokenizer)
    validate.validate_model(config, model, jax.device_count())
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)

    recipe = Recipe.of(config, model, mesh, total_steps=1)
    with Store(run, config.checkpoint.keep, config.checkpoint.best_metric, create=False) as store:
        chosen = {"latest": store.latest, "best": store.best}.get(step, lambda: number(step))()
        if chosen is None:
            raise ConfigError(
                f"--step {step}: {run} has no such checkpoint, only {store.steps() or 'none'}"
            )
        state = store.restore(chosen, {"policy": policy_update.abstract_state(recipe)}).items[
            "policy"
        ]

    hf.save(state.params, model, out, mesh, tokenizer, dtype or config.model.param_dtype)
    return chosen


def number(text: str) -> int:
    """The step as an integer. Raises ConfigError for other text."""
    if not text.isdecimal():
        raise ConfigError(f"--step {text!r} is neither a number, latest nor best")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
