"""Simulated runs of published jobs: the benchmark of table 4, a rollout with a long tail, RL on 64 H100, NeMo-RL's rollout."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import numpy as np

from benchmarks.published import numbers
from tlt_jax.config import Config
from tlt_jax.config.schema import Data, Rollout, Speculation, Train
from tlt_jax.simulate import lengths, run
from tlt_jax.simulate.acceptance import PAPER, Acceptances
from tlt_jax.simulate.cost_table import CostTable
from tlt_jax.simulate.lengths import LogNormal
from tlt_jax.simulate.run import World

# Batch sizes that the paper's engine captures as CUDA graphs (fork of SGLang, cuda_graph_runner.py).
CAPTURED = [*range(1, 9), *range(10, 33, 2), *range(40, 61, 4), *range(72, 257, 8)]


def frozen(found: Acceptances) -> Acceptances:
    """Drafters that accept as much as they ever will, in every step."""
    return replace(found, learned=replace(found.learned, forget=0.0), pretrained=1e15)


def rollout_seconds(config: Config, arm: str, world: World) -> float:
    """Mean seconds of a rollout."""
    return float(
        np.mean([step.seconds["rollout"] for step in run.simulate(config, arm, world=world)])
    )


def config_of(
    prompts: int,
    samples: int,
    limit: int,
    running: int,
    speculation: Speculation,
    kind: str = "eagle",
) -> Config:
    """A configuration with at most `running` sequences of a data group at once, in the sizes that the paper's engine has."""
    sizes = [size for size in CAPTURED if size < running] + [running]
    rollout = Rollout(
        prompts=prompts,
        samples=samples,
        max_new_tokens=limit,
        slots=running,
        batch_buckets=sizes,
        chunk=16,
    )
    base = Config(
        rollout=rollout,
        data=Data(max_prompt_tokens=1024),
        train=Train(steps=1),
        speculation=speculation,
    )
    return replace(base, drafter_training=replace(base.drafter_training, kind=kind))


@cache
def benchmark(table: Callable[[], CostTable], text: str, requests: int) -> float:
    """The speed-up of the paper's benchmark: 32 prompts, at most 2,048 tokens, so many running requests at most."""
    config = config_of(32, 1, 2048, requests, Speculation(tuner="fixed", strategies=[text]))
    answers = lengths.PRESETS["paper_bench"]
    world = World(table(), answers, frozen(PAPER), 1, 1, compiles=False)
    plain, drafted = (rollout_seconds(config, arm, world) for arm in ("plain", "frozen"))
    return plain / drafted


# The paper's strategies by running requests, and the bound on them below which it drafts (section 5 and its code).
STRATEGIES = ["8_4_48", "8_4_32", "8_4_16", "7_4_8"]
CHAINS = ["7_1_8"]  # of n-grams, which are assumed to draft chains
THRESHOLD, MOST = 32, 512  # requests that draft, and that an engine decodes at once
LIMIT = 32768  # tokens of an answer, in the paper's runs


@cache
def long_tail(
    table: Callable[[], CostTable],
    prompts: int,
    samples: int = 1,
    groups: int = 1,
    arm: str = "frozen",
) -> float:
    """How many times as fast as a plain one a rollout of the paper's is, whose engines draft once at most THRESHOLD run."""
    running = min(-(-prompts * samples // groups), MOST)
    strategies = CHAINS if arm == "ngram" else STRATEGIES
    speculation = Speculation(tuner="threshold", threshold=THRESHOLD, strategies=strategies)
    config = config_of(prompts, samples, LIMIT, running, speculation)
    world = World(table(), lengths.PRESETS["paper_32b"], frozen(PAPER), 1, groups, compiles=False)
    plain, drafted = (rollout_seconds(config, one, world) for one in ("plain", arm))
    return plain / drafted


def step(*job: object) -> float:
    """The same of an RL step: the rollout is numbers.ROLLOUT_SHARE of a plain one, and the rest takes as long."""
    share = numbers.ROLLOUT_SHARE
    return 1 / (1 - share + share / long_tail(*job))


@cache
def nemo(table: Callable[[], CostTable], found: Acceptances, depth: int) -> float:
    """How many times as fast as a plain one NeMo-RL's rollout with chains of this depth is.

    Assumed, since not published: one GPU an engine, 64 prompts x 8 answers of at most 16,384 tokens.
    """
    speculation = Speculation(tuner="fixed", strategies=[f"{depth}_1_{depth + 1}"])
    config = config_of(64, 8, 16384, 16, speculation, "eagle3")
    world = World(table(), LogNormal(2000, 1.0), frozen(found), 1, 32, compiles=False)
    plain, drafted = (rollout_seconds(config, one, world) for one in ("plain", "frozen"))
    return plain / drafted
