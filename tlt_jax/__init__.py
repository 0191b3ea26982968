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
    from tlt_jax.inference.model import Model

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


def open_model(
    directory: str | Path, changes: Mapping[str, Any] | None = None, raw: bool = False
) -> Model:
    """The model of a directory or hub id, to answer prompts: `open_model(DIR).generate(["12 7 3:"])`.

    A prompt is a text, a list of chat messages, or token ids. `changes`: dotted knob -> value, such as data.chat_template,
    speculation.drafter, model.compute_dtype, train.seed, and rollout.slots (sequences decoded at once). A model that a run
    made is asked as the run asked it (its prompt_format.json), except for the changes, and unless `raw`; one line on
    stderr says how. Raises UserError.
    """
    import sys

    from tlt_jax import generate
    from tlt_jax.data import prompt_format
    from tlt_jax.distributed import process
    from tlt_jax.inference.model import Model

    pairs = texts({"rollout.slots": 32} | dict(changes or {}))
    process.set_environment(generate.configuration_of(str(directory), pairs))
    config = generate.as_its_run(str(directory), pairs, raw)
    print(prompt_format.describe(config), file=sys.stderr)
    return Model(config)


def texts(changes: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """Knobs and their values as command-line arguments."""
    return [
        (name, str(value) if isinstance(value, str | Path) else json.dumps(value))
        for name, value in (changes or {}).items()
    ]
