"""Knows what the benchmarks of speculation share: their arguments, and an engine with trained weights on one device."""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import jax

from benchmarks.common import results
from benchmarks.common.processes import ROOT
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

CONFIG = ROOT / "benchmarks" / "speculation.yaml"


class Arm:
    """An engine with its weights, and the tuner's state between its rollouts; `live`: rows of its group, 0 as configured."""

    def __init__(
        self, config: Config, settings: Speculation, live: int = 0, buckets: Sequence[int] = ()
    ):
        rows = {"slots": live, "batch_buckets": list(buckets or [live])} if live else {}
        rollout = replace(config.rollout, **rows)
        self.config = config = replace(config, speculation=settings, rollout=rollout)
        model = hf.read_config(from_config.policy_directory(config))
        mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
        stops = datasets.stop_rules(config, datasets.tokenizer(config))
        drafter, params = from_config.load_drafter(config, model, mesh)
        self.engine = Engine(config, model, mesh, stops, drafter)
        self.weights = self.engine.publish(from_config.load_policy(config, model, mesh), params)
        self.tuner, self.chunks, self.is_hopeless = self.engine.tuner.init(), [], False

    def full_speed(self, begin: float, live: int) -> float:
        """Tokens per second of the last rollout, which started at `begin`, while this many sequences were live."""
        left, tokens = sum(ended for _, _, ended in self.chunks), 0
        for now, count, ended in self.chunks:
            tokens, left = tokens + count, left - ended
            if left < live:
                return tokens / (now - begin)
        return math.nan

    def decode(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = Sampling(),  # noqa: B008
        step: int = 0,
        most: float = math.inf,
    ) -> RolloutResult:
        """One answer to each prompt; raises Interrupted when more than `most` processor seconds are `stolen`."""
        self.chunks, self.is_hopeless = [], False

        def listen(look: Look) -> None:
            """Notes when a chunk ended, its tokens, and the answers that ended in it."""
            for event in look.events:
                if isinstance(event, Retired):
                    self.chunks.append([time.perf_counter(), event.tokens, 0])
                    self.is_hopeless |= stolen() > most
                if isinstance(event, Emitted):
                    self.chunks[-1][2] += event.finish != RUNNING

        limit, tokens = self.config.rollout.max_new_tokens, [prompt.tokens for prompt in prompts]
        request = self.engine.request(tokens, 1, sampling, limit, stream=GENERATE_STREAM, step=step)
        result, self.tuner = self.engine.run(
            request, self.weights, self.tuner, interrupted=lambda: self.is_hopeless, listeners=[listen]
        )  # fmt: skip
        return result


def stolen() -> float:
    """Processor seconds that a hypervisor gave to others so far; 0 where no system counts them."""
    path = Path("/proc/stat")
    return int(path.read_text().split()[8]) / os.sysconf("SC_CLK_TCK") if path.exists() else 0.0


def label(drafter: str) -> str:
    """A short name: the run of a drafter's directory, or ngram."""
    return Path(drafter).parent.parent.name if drafter != schema.NGRAM else drafter


def arguments(description: str | None) -> argparse.ArgumentParser:
    """The arguments of all benchmarks of speculation."""
    parser = results.arguments(description)
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--policy", required=True, help="model directory")
    parser.add_argument("--prompts", type=int, default=64, help="of the evaluation split")
    parser.add_argument("--strategies", default="2_1_3,3_1_4,5_1_6,4_2_8,6_4_16")
    parser.add_argument("--tuners", default="goodput,threshold,beg_mab", help="'' for none")
    return parser


def read(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Config, list[Prompt]]:
    """The benchmark's own arguments, the configuration that the others change, and the prompts; prints the versions."""
    args, overrides = parser.parse_known_args(argv)
    given = ["--config", args.config, "--model.path", args.policy, "--mesh.data", "1"]
    given += ["--mesh.fake_devices", "0", "--data.eval_size", str(args.prompts)]
    config = configuration.parse([*given, *overrides])
    print(f"{results.versions()}, {jax.devices()[0].device_kind}")
    return args, config, datasets.load(config, datasets.tokenizer(config)).eval_prompts()
