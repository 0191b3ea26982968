"""Knows what benchmarks of the drafter share: their arguments, a small policy, an untrained drafter, heavy-tailed answers."""

from __future__ import annotations

import argparse

import jax
import numpy as np
from result_table import add_csv

from tlt_jax.data.packing import Example
from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter import recipe as drafter_recipe
from tlt_jax.drafter.recipe import DrafterState, Objective, Recipe
from tlt_jax.models import eagle
from tlt_jax.models.transformer import ModelConfig
from tlt_jax.optimizer import Adam

SMALL = ModelConfig(
    "qwen2", 4096, 256, 12, 4, 2, 64, 768, 1024, qkv_bias=True, tied=True, init_std=0.05
)
LONGEST, MEDIAN, SPREAD = 512, 90, 0.9  # answers: log-normal, cut


def new_drafter(policy: ModelConfig, vocab: int) -> tuple[Recipe, DrafterState]:
    """An untrained EAGLE-3 drafter of the policy, on one device."""
    drafter = eagle.for_policy(policy, "eagle3", draft_vocab_size=vocab)
    mesh, ids = meshes.make_mesh(1, 1), np.arange(vocab, dtype=np.int32)
    recipe = Recipe(policy, drafter, mesh, Adam(3e-4, 100), Objective(unroll=5))
    params = eagle.init(drafter, mesh, jax.random.key(0), "float32", ids)
    return recipe, drafter_recipe.create(params, recipe)


def answers(count: int, seed: int) -> list[Example]:
    """Prompts of 32 random tokens with answers of heavy-tailed length."""
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(np.log(MEDIAN), SPREAD, count)), 4, LONGEST - 32)
    return [
        Example(uid, *(random.integers(0, SMALL.vocab_size, size).astype(np.int32) for size in (32, int(length))))
        for uid, length in enumerate(lengths)
    ]  # fmt: skip


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all benchmarks of a drafter take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_csv(parser)
    return parser
