"""RL of reasoning language models in JAX, with adaptive speculative rollout (TLT, arXiv 2511.16665).

For notebooks: `load_config`, `run_training`, `open_run`, `open_model`; for a training loop of one's own: `open_engine`.
Importing this starts no JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tlt_jax.config import Config
    from tlt_jax.inference.chat import Model
    from tlt_jax.inference.engine import RolloutModel
    from tlt_jax.metrics.run import Run
    from tlt_jax.models.architecture import ModelConfig, Params

__all__ = ["load_config", "open_engine", "open_model", "open_run", "run_training"]


def load_config(source: str | Path, changes: Mapping[str, Any] | None = None) -> Config:
    """The validated configuration of a YAML file, or of one that the package ships ("quickstart").

    `changes`: dotted knob -> value: a value of Python, or a text as on the command line. Where a knob takes
    module:function, it takes the function too: {"reward.terms": {my_reward: 1.0}}. Raises ConfigError.
    """
    from tlt_jax.config import load

    return load.from_python(source, changes)


def run_training(config: Config) -> Run:
    """Trains as `python -m tlt_jax.train` does, in this process; `code` of the run: 0 done, 1 diverged, 75 SIGTERM.

    Fake devices are created only if JAX has created no devices yet. Raises UserError for mistakes in
    the configuration, its files or checkpoints.
    """
    from tlt_jax.distributed import process

    process.set_environment(config)
    from tlt_jax.metrics.run import Run
    from tlt_jax.train import loop

    return Run(Path(config.run), loop.train(config))


def open_run(folder: str | Path) -> Run:
    """The metrics and answers that a run has written so far. Raises ConfigError for a folder without a run."""
    from tlt_jax.metrics import run

    return run.open_run(folder)


def open_model(
    directory: str | Path, changes: Mapping[str, Any] | None = None, raw: bool = False
) -> Model:
    """The model of a directory or hub id, to answer prompts: `open_model(DIR).generate(["12 7 3:"])`.

    A prompt is a text, a list of chat messages, or token ids. `changes`: dotted knob -> value, such as data.chat_template,
    speculation.drafter, model.compute_dtype, train.seed, and rollout.slots (sequences decoded at once). A model that a run
    made is asked as the run asked it (its prompt_format.json), another one is sampled as its makers say (temperature, top_k
    and top_p of its generation_config.json), except for the changes, and unless `raw`; one line on stderr says how. Raises
    UserError.
    """
    import sys

    from tlt_jax.config.load import pairs
    from tlt_jax.data import prompt_format
    from tlt_jax.distributed import process
    from tlt_jax.inference import chat
    from tlt_jax.inference.chat import Model

    given = [("rollout.slots", 32), *pairs(changes)]
    process.set_environment(chat.configuration_of(str(directory), given))
    config, makers = chat.as_meant(str(directory), given, raw)
    print(prompt_format.describe(config) + makers, file=sys.stderr)
    return Model(config)


def open_engine(
    model: str | Path | tuple[ModelConfig, Params], changes: Mapping[str, Any] | None = None
) -> RolloutModel:
    """Rollout and update of a model, for a training loop of one's own: generate, forward_backward, optim_step, learn, close.

    `model`: a directory, a hub id, or sizes with weights ("train" layout). `changes`: dotted knob -> value, such as
    mesh.data, rollout.max_new_tokens or speculation.drafter. Fake devices are created only if JAX has created no devices
    yet. Raises UserError.
    """
    from tlt_jax.config import Config, load, parse
    from tlt_jax.distributed import process
    from tlt_jax.errors import ConfigError

    is_given = isinstance(model, tuple) and len(model) == 2
    if not is_given and not isinstance(model, str | Path):
        raise ConfigError(
            f"the model is a {type(model).__name__}: give a directory, a hub id, or (ModelConfig, Params)"
        )
    tree = {} if is_given else {"model": {"path": str(model)}}
    config = parse.build(Config, tree, load.pairs(changes))
    if not is_given:  # else JAX runs already, as its owner wants it
        process.set_environment(config)
    from tlt_jax.inference.engine import RolloutModel

    return RolloutModel.opened(config, model if is_given else None)
