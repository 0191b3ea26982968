"""Knows what the benchmarks of speculation share: their arguments, and an engine with trained weights on one device."""

from __future__ import annotations

import argparse
import math
import os
import platform
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
from result_table import add_csv

from tlt_jax.config import Config, load as configuration, schema
from tlt_jax.config.schema import Speculation
from tlt_jax.data import dataset as datasets
from tlt_jax.data.dataset import Prompt
from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import GENERATE_STREAM
from tlt_jax.models import from_config, hf
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.events import Emitted, Look, Retired
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode.decoding_params import Sampling
from tlt_jax.spec_decode.stopping import RUNNING

CONFIG = Path(__file__).parent / "speculation.yaml"
SEEDS, SEED_T_975 = 4, 3.182  # rollouts of every coupling and recording, and Student's t for them


class Arm:
    """An engine with its weights on one device."""

    def __init__(
        self, config: Config, settings: Speculation, live: int, buckets: Sequence[int] = ()
    ):
        rollout = replace(config.rollout, slots=live, batch_buckets=list(buckets or [live]))
        self.config = replace(config, speculation=settings, rollout=rollout)
        model, mesh = hf.read_config(config.model.path), meshes.make_mesh(1, 1)
        drafter, params = from_config.load_drafter(self.config, model, mesh)
        tokenizer = datasets.tokenizer(config)
        self.engine = Engine(
            self.config, model, mesh, datasets.stop_rules(config, tokenizer), drafter
        )
        self.weights = self.engine.publish(
            hf.load(config.model.path, model, mesh, config.model.param_dtype), params
        )
        self.remember, self.engine.remember, self.news = self.engine.remember, self.listen, []
        self.tuner, self.is_hopeless, self.most = self.engine.tuner.init(), False, math.inf

    def listen(self, look: Look) -> None:
        """Notes when tokens came, and whether they ended their answer."""
        self.remember(look)
        for event in look.events:
            if isinstance(event, Retired):
                self.news.append([time.perf_counter(), event.tokens, 0])
                self.is_hopeless |= stolen() > self.most
            if isinstance(event, Emitted):
                self.news[-1][2] += event.finish != RUNNING

    def full_speed(self, begin: float, live: int) -> float:
        """Tokens per second of a rollout that began then, for as long as so many were live."""
        left, tokens = sum(ended for _, _, ended in self.news), 0
        for now, count, ended in self.news:
            tokens, left = tokens + count, left - ended
            if left < live:
                return tokens / (now - begin)
        return math.nan

    def decode(
        self,
        prompts: Sequence[Prompt],
        temperature: float = 1.0,
        step: int = 0,
        most: float = math.inf,
    ) -> RolloutResult:
        """One answer to each prompt; raises Interrupted when more than `most` processor seconds are `stolen`."""
        self.news, self.is_hopeless, self.most = [], False, most
        limit, tokens = self.config.rollout.max_new_tokens, [prompt.tokens for prompt in prompts]
        request = self.engine.request(
            tokens, 1, Sampling(temperature), limit, stream=GENERATE_STREAM, step=step
        )
        result, self.tuner = self.engine.run(
            request, self.weights, self.tuner, interrupted=lambda: self.is_hopeless
        )
        return result

    def longest_cache(self) -> int:
        """Slots of the cache that the longest answers take."""
        return self.engine.cache_buckets([np.zeros(16)], self.config.rollout.max_new_tokens)[-1]


def stolen() -> float:
    """Processor seconds that a hypervisor gave to others so far; 0 where no system counts them."""
    path = Path("/proc/stat")
    return int(path.read_text().split()[8]) / os.sysconf("SC_CLK_TCK") if path.exists() else 0.0


def label(drafter: str) -> str:
    """A short name: the run of a drafter's directory, or ngram."""
    return Path(drafter).parent.parent.name if drafter != schema.NGRAM else drafter


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments that all of these benchmarks take."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--policy", required=True, help="model directory")
    parser.add_argument("--prompts", type=int, default=64, help="of the evaluation split")
    add_csv(parser)
    return parser


def add_drafters(parser: argparse.ArgumentParser) -> None:
    """The argument for one or more drafters."""
    parser.add_argument(
        "--drafter", action="append", required=True, help="directory or ngram; may be given again"
    )


def listed(text: str) -> list[str]:
    """What a comma separates; nothing for ''."""
    return [one for one in text.split(",") if one]


def read(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Config, list[Prompt]]:
    """The benchmark's own arguments, the configuration that the others change, and the prompts; prints the versions."""
    args, overrides = parser.parse_known_args(argv)
    given = ["--config", args.config, "--model.path", args.policy, "--mesh.data", "1"]
    given += ["--mesh.fake_devices", "0", "--data.eval_size", str(args.prompts)]
    config = configuration.parse([*given, *overrides])
    print(
        f"Python {platform.python_version()}, jax {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores"
    )
    return args, config, datasets.load(config, datasets.tokenizer(config)).eval_prompts()
