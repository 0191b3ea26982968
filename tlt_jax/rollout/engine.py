"""Publishes weights to the data groups and rolls prompts out."""

from __future__ import annotations

import itertools
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax.config import Config, schema
from tlt_jax.data.dataset import Prompt
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.board import LocalBoard
from tlt_jax.errors import ConfigError
from tlt_jax.keys import sequence_keys
from tlt_jax.models import eagle, transformer
from tlt_jax.models.eagle import DrafterConfig, DrafterParams
from tlt_jax.models.transformer import ModelConfig, Params
from tlt_jax.rollout import bindings
from tlt_jax.rollout.buckets import FIRST_CACHE_BUCKET, batch_buckets, bucket_width, doubling
from tlt_jax.rollout.events import Emitted, Event
from tlt_jax.rollout.executables import Executables, Key, log_compile, time_draft, use_compile_cache
from tlt_jax.rollout.ngram_memory import NGramMemory
from tlt_jax.rollout.planner import Planner
from tlt_jax.rollout.queue import WorkQueue
from tlt_jax.rollout.recorder import Completion, RolloutResult, rollout
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.state import GroupContext
from tlt_jax.spec_decode.decode import DecodingParams, Weights
from tlt_jax.spec_decode.sampling import Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner import goodput, make

TIMED_ROUNDS = 8
Shape = tuple[int, int, Strategy]  # batch bucket, cache slots, strategy

log = logging.getLogger(__name__)


class Engine:
    """Owns the executables of every data group, the queue that deals prompts to them, and what speculation learned.

    `drafter` is the learned drafter's configuration, when there is one.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        mesh: Mesh,
        stop_ids: Sequence[Sequence[int]] = (),
        drafter: DrafterConfig | None = None,
    ):
        use_compile_cache(config.rollout.compile_cache)
        self.config, self.model_config, self.mesh = config, model_config, mesh
        self.stop_ids = tuple(tuple(stop) for stop in stop_ids)
        self.groups = [meshes.data_group(mesh, index) for index in range(mesh.shape["data"])]
        settings, dtype, self.drafter = config.speculation, config.model.compute_dtype, drafter
        self.drafter_kind = drafter.kind if drafter else settings.drafter
        arms = make.arms(settings)
        self.path = max(arm.path for arm in (PLAIN, *arms))
        captures = drafter.captures if drafter else ()
        bound = [bindings.bind_target(model_config, group, dtype, captures, self.path) for group in self.groups]
        guesses = [bindings.bind_drafter(settings, drafter, *pair, dtype) for pair in zip(bound, self.groups, strict=True)]
        self.registry = Executables(bound, guesses, self.groups, log_compile)
        self.tuner = make.make_tuner(settings, arms, mesh.devices.flat[0].platform)
        self.tuner_state, self.is_published = self.tuner.init(), False
        self.draft_seconds: dict[Shape, float] = {}
        knobs = {"speculation": asdict(settings), "mesh": asdict(config.mesh)}
        self.basis = {f"{section}.{knob}": value for section in knobs for knob, value in knobs[section].items()}
        self.basis["version"] = goodput.VERSION
        self.basis["devices"] = mesh.devices.flat[0].device_kind
        texts = NGramMemory(settings.pool, settings.memory, settings.max_match)
        self.texts = texts if settings.drafter == schema.NGRAM else None
        self.board, self.rollouts = LocalBoard(), itertools.count()
        self.capacity = config.rollout.slots or self.share(config.rollout.prompts, config.rollout.samples)
        self.batches = config.rollout.batch_buckets or batch_buckets(self.capacity)
        if self.batches[-1] < self.capacity:
            raise ConfigError(
                f"rollout.batch_buckets end at {self.batches[-1]}, and a data group decodes {self.capacity} sequences at "
                f"once: add {self.capacity}, or set rollout.slots {self.batches[-1]}"
            )
        reshard = partial(transformer.to_rollout, config=model_config, mesh=mesh, dtype=config.model.compute_dtype)
        self.reshard = jax.jit(reshard, out_shardings=transformer.shardings(model_config, mesh, "rollout"))
        if drafter:
            reshard = partial(eagle.to_rollout, config=drafter, mesh=mesh, dtype=dtype)
            self.reshard_drafter = jax.jit(reshard, out_shardings=eagle.shardings(drafter, mesh, "rollout"))

    def share(self, prompts: int, samples: int) -> int:
        """Sequences of one data group when whole prompts are dealt evenly."""
        return -(-prompts // len(self.groups)) * samples

    def publish(self, params: Params, drafter: DrafterParams | None = None) -> list[Weights]:
        """The rollout's copy of policy and drafter: one reshard over the mesh, then each data group's zero-copy views.

        The tuner hears of every change of weights; the first ones are those that its state was saved with.
        """
        if self.is_published:
            self.tuner_state = self.tuner.renew(self.tuner_state)
        self.is_published = True
        weights = Weights(self.reshard(params), self.reshard_drafter(drafter) if self.drafter else ())
        return [meshes.view(weights, group) for group in self.groups]

    def learned(self) -> dict[str, Any]:
        """What the tuner learned and what it depends on, for a checkpoint: plain JSON."""
        return {"basis": self.basis, "state": self.tuner_state}

    def resume(self, learned: Mapping[str, Any] | None) -> None:
        """Goes on from what was `learned` before; anew, and says so, when there is none or it was learned in other ways."""
        saved = learned or {"basis": {}, "state": {}}
        other = [name for name, value in self.basis.items() if saved["basis"].get(name) != value]
        if learned and not other and saved["state"].keys() == self.tuner.init().keys():
            self.tuner_state = saved["state"]
        elif self.path > 1:
            reason = "of another version" if learned else "not in the checkpoint"
            reason = f"of another {', '.join(other)}" if learned and other else reason
            log.info("the tuner starts anew: what it had learned is %s", reason)

    def rollout(
        self,
        weights: Sequence[Weights],
        prompts: Sequence[Prompt],
        samples: int,
        sampling: Sampling,
        max_new_tokens: int | Sequence[int],
        *,
        stream: int,
        step: int,
        seed: int | None = None,
        eos_ids: Sequence[int] | None = None,
        stop_ids: Sequence[Sequence[int]] | None = None,
        on_finish: Callable[[Completion], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
    ) -> RolloutResult:
        """`samples` answers to each prompt; the tokens are a function of (weights, prompt, sampling, seed, stream, step, uid).

        uid = position of the prompt in `prompts` * samples + sample. `max_new_tokens` may differ by prompt. Seed, EOS and
        stop sequences default to those of the configuration, the model and the engine. Raises Interrupted soon after
        `interrupted()` is true.
        """
        tokens = tuple(np.asarray(prompt.tokens, np.int32) for prompt in prompts)
        self.check(tokens, max_new_tokens)
        seed = self.config.train.seed if seed is None else seed
        job = RolloutRequest(
            prompts=tokens,
            samples=samples,
            max_new_tokens=tuple(np.broadcast_to(max_new_tokens, len(tokens)).tolist()),
            keys=sequence_keys(seed, stream, step, np.arange(len(tokens) * samples)),
            rules=DecodingParams(
                sampling,
                tuple(self.model_config.eos_ids if eos_ids is None else eos_ids),
                self.stop_ids if stop_ids is None else tuple(tuple(stop) for stop in stop_ids),
            ),
            rounds=self.config.rollout.chunk,
            in_flight=self.config.rollout.in_flight,
            capacity=min(self.capacity, self.share(len(tokens), samples)),
        )
        dealer = WorkQueue(self.board, f"rollout/{next(self.rollouts)}", len(tokens), samples)
        pilot = Planner(self.batches, self.cache_buckets(tokens, max_new_tokens), self.tuner, self.tuner_state)
        if self.texts:
            self.texts.begin(tokens, samples)
        guide = self.texts.pool if self.texts else lambda rows: ()
        groups = [
            GroupContext(index, self.registry, weights[index], job, dealer, pilot.decide, guide)
            for index in range(len(self.groups))
        ]
        before = len(self.registry.compiles)
        try:
            result = rollout(groups, on_finish, interrupted, pilot.observe, self.listen)
        finally:
            dealer.close()
            self.tuner_state = pilot.state
        new = self.registry.compiles[before:]
        result.stats.update(compiles=len(new), compile_seconds=sum(compiled.seconds for compiled in new), **self.held())
        return result

    def held(self) -> dict[str, int]:
        """Programs that draft, and the most memory that those of one data group take beyond their arguments and results."""
        held = {one.key: one for one in self.registry.compiles if one.key in self.registry.executables}
        drafting = [one for one in held.values() if one.key.kind == "chunk" and one.key.strategy != PLAIN]
        groups = [[one for one in drafting if one.key.group == index] for index in range(len(self.groups))]
        sizes = [sum(one.code for one in group) + max((one.temporary for one in group), default=0) for group in groups]
        return {"pool_programs": len(drafting), "pool_bytes": max(sizes)}

    def time_drafting(self, weights: Sequence[Weights], result: RolloutResult) -> dict[Shape, float]:
        """Seconds of a round's drafting alone, by shape.

        Of the shapes that drafted in the rollout the most used one that was not timed yet is timed now: a compilation of the
        drafter, and a few rounds.
        """
        used = Counter()
        for one in result.measurements:
            used[one.batch, one.slots, one.strategy] += one.rounds * (one.strategy != PLAIN)
        fresh = [shape for shape, rounds in used.most_common() if rounds and shape not in self.draft_seconds]
        for batch, slots, strategy in fresh[:1]:
            rules = DecodingParams(Sampling(self.config.rollout.temperature))  # drafting knows no top-k or top-p
            key = Key("draft", 0, batch, slots, (TIMED_ROUNDS,), strategy=strategy, rules=rules)
            self.draft_seconds[batch, slots, strategy] = time_draft(self.registry, key, weights[0])
        return self.draft_seconds

    def listen(self, event: Event) -> None:
        """Remembers the answers that n-grams are drawn from."""
        if self.texts and isinstance(event, Emitted):
            self.texts.write(event.uid, event.tokens)

    def check(self, prompts: Sequence[np.ndarray], max_new_tokens: int | Sequence[int]) -> None:
        """Raises ConfigError for prompts that cannot be decoded."""
        if not prompts or min(len(prompt) for prompt in prompts) == 0:
            raise ConfigError("a rollout needs at least one prompt, and at least one token in each prompt")
        if np.size(max_new_tokens) not in (1, len(prompts)):
            raise ConfigError(f"{np.size(max_new_tokens)} answer limits for {len(prompts)} prompts: give one, or one for each")
        limits = np.broadcast_to(max_new_tokens, len(prompts)).tolist()
        if min(limits) < 1:
            raise ConfigError(f"an answer of at most {min(limits)} tokens: allow at least one")
        longest, limit = max(((len(prompt), limit) for prompt, limit in zip(prompts, limits, strict=True)), key=sum)
        positions = self.model_config.max_positions
        if longest + limit > positions:
            raise ConfigError(
                f"a prompt of {longest} tokens and an answer of {limit} exceed the model's {positions} positions: "
                f"use at most {positions - longest} new tokens"
            )
        every, vocab = np.concatenate(prompts), self.model_config.vocab_size
        if every.min() < 0 or every.max() >= vocab:
            worst = every.min() if every.min() < 0 else every.max()
            raise ConfigError(f"prompt token {worst} is outside the vocabulary of {vocab}: use ids from 0 to {vocab - 1}")

    def cache_buckets(self, prompts: Sequence[np.ndarray], max_new_tokens: int | Sequence[int]) -> list[int]:
        """Cache lengths to compile: those of the configuration, and what these prompts need beyond it."""
        lengths, limit = np.asarray([len(prompt) for prompt in prompts]), int(np.max(max_new_tokens))
        need = max(int(np.max(lengths + max_new_tokens)), bucket_width(int(lengths.max())))
        usual = self.config.data.max_prompt_tokens
        usual = max(usual + max(limit, self.config.rollout.max_new_tokens), bucket_width(usual))
        buckets = self.config.rollout.cache_buckets or doubling(FIRST_CACHE_BUCKET, usual)
        return [*buckets, *doubling(2 * buckets[-1], need)] if need > buckets[-1] else buckets
