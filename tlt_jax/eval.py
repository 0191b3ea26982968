"""`python -m tlt_jax.eval`: mean@k and pass@k of a policy on the evaluation split."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import jax

from tlt_jax import cli, run_folder
from tlt_jax.config import Config, load as configuration, validate
from tlt_jax.config.schema import ADAPTIVE, NGRAM
from tlt_jax.data import dataset as datasets
from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import from_config
from tlt_jax.rewards import Scorer
from tlt_jax.rollout.engine import Engine
from tlt_jax.train.evaluation import Evaluator


def main() -> int:
    """Evaluates the model of a configuration (or of `--model.path DIR`) and prints its metrics as one JSON object."""
    config = configuration.load(command="python -m tlt_jax.eval", about=cli.COMMANDS["eval"].about)
    with cli.prepared(config):
        validate.validate_rewards(config)
        with Scorer(config) as scorer:
            config = with_fixed_drafter(config)
            tokenizer = datasets.tokenizer(config)
            dataset = datasets.load(config, tokenizer)
            print(dataset.describe(), file=sys.stderr)
            model = from_config.model_config(config, tokenizer)
            from_config.warn_of_tokenizer(config, tokenizer)
            validate.validate_model(config, model, jax.device_count())
            mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
            drafter, drafter_params = from_config.load_drafter(config, model, mesh)
            engine = Engine(config, model, mesh, datasets.stop_rules(config, tokenizer), drafter)
            weights = engine.publish(from_config.load_policy(config, model, mesh), drafter_params)
            evaluator = Evaluator(config, engine, dataset, tokenizer, scorer)
            metrics, _ = evaluator.evaluate(weights)
            print(json.dumps(metrics))
    return 0


def with_fixed_drafter(config: Config) -> Config:
    """Replaces an adaptive drafter, which would need training, by the drafter in the run folder, else by n-grams."""
    if config.speculation.drafter != ADAPTIVE:
        return config
    trained = run_folder.drafter_export(config)
    drafter = str(trained) if trained.is_dir() else NGRAM
    print(f"evaluation trains no drafter: speculation.drafter is {drafter}", file=sys.stderr)
    return replace(config, speculation=replace(config.speculation, drafter=drafter))


if __name__ == "__main__":
    sys.exit(main())
