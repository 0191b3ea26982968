"""Knows what a new drafter has learned from answers of the policies of a run: how often held-out drafts are accepted."""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from drafter_setup import arguments

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, load as configuration
from tlt_jax.data import dataset as datasets, packing
from tlt_jax.data.packing import Example
from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter import (
    batch as drafter_batch,
    corpus,
    recipe as drafter_recipe,
    update as drafter_update,
)
from tlt_jax.drafter.recipe import DrafterState, Objective, Recipe
from tlt_jax.models import eagle, from_config
from tlt_jax.models.transformer import Params
from tlt_jax.optimizer import Adam
from tlt_jax.train import run_state
from tlt_jax.train.recipe import Recipe as PolicyRecipe

UPDATES, EVALUATIONS = 150, 8
COLUMNS = ("acceptance_1", "acceptance_3", "long_acceptance_1", "long_acceptance_3", "update_ms")


class Answers:
    """Policies of checkpoints of a run, and answers of theirs; the last policy's are also held out."""

    def __init__(self, config: Config, run: Path, steps: Sequence[int], updates: int):
        self.updates, tokenizer = updates, datasets.tokenizer(config)
        dataset = datasets.load(config, tokenizer)
        self.model, self.mesh = from_config.model_config(config, tokenizer), meshes.make_mesh(1, 1)
        alone = replace(config.mesh, data=1)
        self.config = replace(config, mesh=alone, train=replace(config.train, rows=4))
        with Store(run, create=False) as store:
            self.last = store.latest()
            recipe = PolicyRecipe.of(self.config, self.model, self.mesh, 1)
            like = {"policy": run_state.abstract(self.last, recipe).policy}
            self.policies: dict[int, Params] = {
                step: store.restore(step, like).items["policy"].params
                for step in (*steps, self.last)
            }
        encoder, self.texts = datasets.Encoder(config, tokenizer), {}
        with tempfile.TemporaryDirectory() as folder:
            for step, params in self.policies.items():
                own = replace(self.config, run=f"{folder}/{step}")
                paths = corpus.answer(
                    own, self.model, self.mesh, params, dataset, tokenizer, lambda: False
                )
                found = [
                    one
                    for path in paths
                    for one in corpus.read(str(path), encoder, self.model.vocab_size)
                ]
                self.texts[step] = corpus.fit(found, packing.row_tokens(config))
        all_of_it = self.texts[self.last]
        self.held_out, self.texts[self.last] = all_of_it[::5], [
            one for i, one in enumerate(all_of_it) if i % 5
        ]  # fmt: skip

    def recipe(self, kind: str = "eagle3", objective: Objective | None = None, **flags) -> Recipe:
        """How a new drafter learns: of this kind, with these changes of its sizes."""
        drafter = eagle.for_policy(self.model, kind, **flags)
        recipe = Recipe.of(self.config, self.model, drafter, self.mesh)
        return replace(
            recipe, adam=Adam(1e-3, self.updates), objective=objective or recipe.objective
        )

    def learned(
        self, recipe: Recipe, sources: Sequence[tuple[list[Example], int, float]]
    ) -> list[float]:
        """Acceptance at depths 1 and 3 on held-out answers, and on their long half; milliseconds of an update.

        A source: texts, the checkpoint whose policy's features are read, how often a token is drawn.
        """
        policy, mesh = self.policies[self.last], self.mesh
        params = eagle.init(recipe.drafter, mesh, jax.random.key(5), recipe.param_dtype)
        state = drafter_recipe.create(params, recipe)
        observe = jax.jit(lambda policy, batch: drafter_update.observe(policy, batch, recipe))
        update, random = drafter_update.program(recipe), np.random.default_rng(0)
        tokens = [weight * sum(len(one.answer) for one in texts) for texts, _, weight in sources]
        packed, spent = [corpus.PackedCorpus(texts, self.config) for texts, _, _ in sources], []
        for step in range(self.updates):
            source = random.choice(len(sources), p=np.array(tokens) / sum(tokens))
            batch = drafter_batch.make_batch(packed[source].batch(step), mesh)
            batch = jax.block_until_ready(observe(self.policies[sources[source][1]], batch))
            begin = time.perf_counter()
            state, metrics = update(state, policy, batch)
            jax.block_until_ready(metrics["loss"])
            spent.append(time.perf_counter() - begin)

        found = []
        middle = statistics.median(len(one.answer) for one in self.held_out)
        for texts in (self.held_out, [one for one in self.held_out if len(one.answer) > middle]):
            found += self.measured(recipe, state, observe, texts)
        return [*found, 1e3 * statistics.median(spent)]

    def measured(
        self, recipe: Recipe, state: DrafterState, observe: Callable, texts: list[Example]
    ) -> list[float]:
        """Acceptance at depths 1 and 3 on these texts; the loss looks at least so far."""
        objective = replace(recipe.objective, unroll=max(3, recipe.objective.unroll))
        recipe, policy = replace(recipe, objective=objective), self.policies[self.last]
        measure = jax.jit(
            lambda params, batch: drafter_update.loss(params, eagle.shared(policy), batch, recipe)[
                1
            ]
        )
        rows = corpus.PackedCorpus(texts, self.config)
        batches = [rows.batch(step) for step in range(EVALUATIONS)]
        batches = [drafter_batch.make_batch(batch, self.mesh) for batch in batches]
        seen = [measure(state.params, observe(policy, batch)) for batch in batches]
        weights = [float(one["tokens"]) for one in seen]
        return [
            float(np.average([float(one[f"acceptance@{depth}"]) for one in seen], weights=weights))
            for depth in (1, 3)
        ]


def learning_arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments of what learns from the answers of a run."""
    parser = arguments(description)
    parser.add_argument("--checkpoints-of", type=Path, required=True, help="the run folder")
    parser.add_argument("--updates", type=int, default=UPDATES)
    return parser


def read(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None = None
) -> tuple[argparse.Namespace, Config]:
    """The benchmark's own arguments, and the configuration that the others give."""
    args, overrides = parser.parse_known_args(argv)
    return args, configuration.load(overrides, command=f"benchmarks/{Path(sys.argv[0]).name}")
