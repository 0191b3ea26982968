"""RL of reasoning language models in JAX, with adaptive speculative rollout (TLT, arXiv 2511.16665).

For notebooks: `load_config`, `run_training`, `open_model`. Importing this starts no JAX.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlt_jax.config import Config
    from tlt_jax.generate import Model

__all__ = ["load_config", "open_model", "run_training"]


def load_config(source: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
    """The validated configuration of a YAML file, or of one that the package ships ("quickstart").

    `changes`: dotted knob -> value, as on the command line. Raises ConfigError.
    """
    from tlt_jax.config import load

    words = [word for name, text in texts(changes) for word in (f"--{name}", text)]
    return load.parse(["--config", str(source), *words])


def run_training(config: Config) -> int:
    """Trains as `python -m tlt_jax.train` does, in this process: 0 when it is done, 1 diverged, 75 after SIGTERM.

    Fake devices are created only if JAX has created no devices yet. Raises UserError for mistakes in
    the configuration, its files or checkpoints.
    """
    from tlt_jax.distributed import process

    process.set_environment(config)
    from tlt_jax.train import loop

    return loop.train(config)


def open_model(directory: str | Path, changes: Mapping[str, Any] | None = None) -> Model:
    """The model of a directory or hub id, to answer prompts: `open_model(DIR).generate(["12 7 3:"])`.

    `changes`: dotted knob -> value, such as speculation.drafter, model.compute_dtype, train.seed, and
    rollout.slots (sequences decoded at once). Raises UserError.
    """
    from tlt_jax import generate
    from tlt_jax.distributed import process

    config = generate.configuration_of(
        str(directory), texts({"rollout.slots": 32} | dict(changes or {}))
    )
    process.set_environment(config)
    return generate.Model(config)


def texts(changes: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Knobs and their values as command-line arguments."""
    return [
        (name, str(value) if isinstance(value, str | Path) else json.dumps(value))
        for name, value in (changes or {}).items()
    ]
