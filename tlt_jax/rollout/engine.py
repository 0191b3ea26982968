"""Binds policy and drafters to the data groups, publishes weights, and starts rollouts."""

from __future__ import annotations

import itertools
import logging
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax.config import Config
from tlt_jax.config.schema import ADAPTIVE, NGRAM
from tlt_jax.config.validate import answer_limit, kept
from tlt_jax.data.stop_rules import StopRules
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.job import Job
from tlt_jax.errors import ConfigError
from tlt_jax.kernels.fused import Fused
from tlt_jax.keys import sequence_keys
from tlt_jax.models import architecture, drafter as drafters, low_rank
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.models.drafter import DrafterConfig, DrafterParams
from tlt_jax.models.low_rank import Lora
from tlt_jax.rollout import bindings, exchange, kernel_check, ngram_memory
from tlt_jax.rollout.dialogue import Partner
from tlt_jax.rollout.executables.background import Early
from tlt_jax.rollout.executables.compilation import Executables, log_compile
from tlt_jax.rollout.executables.disk_cache import use_compile_cache
from tlt_jax.rollout.executables.programs import GroupShapes
from tlt_jax.rollout.idle import IdleWork
from tlt_jax.rollout.ngram_memory import NGramMemory
from tlt_jax.rollout.recorder import Completion, Listener, RolloutResult
from tlt_jax.rollout.request import (
    FIRST_CACHE_BUCKET,
    RolloutRequest,
    bucket_width,
    check,
    doubling,
)
from tlt_jax.rollout.run import RolloutRun
from tlt_jax.rollout.scheduler import driver, planner
from tlt_jax.rollout.scheduler.payback import SOON, Payback
from tlt_jax.rollout.scheduler.queue import OpenQueue
from tlt_jax.rollout.scheduler.state import Harvester
from tlt_jax.rollout.selection import Selection
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN, name
from tlt_jax.tuner import cost_model, goodput, make
from tlt_jax.tuner.interface import State as TunerState

IN_FLIGHT = 2  # chunks that a data group may have queued

log = logging.getLogger(__name__)


class EngineBase:
    """What an engine with `groups` data groups decides with, on devices or in virtual time.

    `drafter` is the configuration of the learned drafter while it is used, `learned` the same whether it is used or not;
    `cost_table`: of a deterministic rollout, whose decisions do not depend on a clock. Raises ConfigError for batch
    buckets that do not hold a group's sequences.

    Ascending `batch_buckets` and `cache_buckets`: the rows and cache slots to compile when that pays; by default powers of
    two and the rows of a group, and doubling from 256 to prompt + answer. All that is measured is measured on `clock`, and
    `drive` polls a rollout to its end.
    """

    clock, drive, records = driver.WALL, staticmethod(driver.run), False

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        drafter: DrafterConfig | None,
        groups: int,
        is_cpu: bool,
        job: Job,
        batch_buckets: Sequence[int] = (),
        cache_buckets: Sequence[int] = (),
    ):
        self.config, self.model_config, self.job, self.group_count = config, model, job, groups
        self.drafter = self.learned = drafter
        self.drafter_kind = drafter.kind if drafter else config.speculation.drafter

        speculation = config.speculation
        arms = make.arms(speculation)
        self.arms = make.within(arms, drafter.depth if drafter else None)
        if len(self.arms) < len(arms) and job.is_first:
            deep = ", ".join(name(arm) for arm in arms if arm not in self.arms)
            log.warning("%s: deeper than the drafter drafts in a round, so left out", deep)
        block = drafters.block_pass(drafter)
        networks = cost_model.Networks(block, model.num_experts, model.experts_per_token)
        self.is_cpu = is_cpu
        self.tuner = make.make_tuner(speculation, self.arms, is_cpu, networks)
        self.cost_table = None
        if config.rollout.deterministic:
            self.cost_table = planner.cost_table(make.node_cost(is_cpu), networks)

        self.capacity = config.rollout.slots or self.share(
            config.rollout.prompts, config.rollout.samples
        )
        self.batches, self.caches = batch_buckets or doubling(1, self.capacity), cache_buckets
        if self.batches[-1] < self.capacity:
            raise ConfigError(
                f"batch_buckets end at {self.batches[-1]}, and a data group decodes {self.capacity} sequences at "
                f"once: add {self.capacity}, or set rollout.slots {self.batches[-1]}"
            )
        self.rollouts = itertools.count()
        self.lengths: list[int] = []  # tokens of each answer of the last rollout
        ahead = SOON if is_cpu else math.inf
        self.payback: dict[DecodingParams, Payback] = defaultdict(partial(Payback, ahead))

    def share(self, prompts: int, samples: int) -> int:
        """Sequences of one data group when whole prompts are dealt evenly."""
        return -(-prompts // self.group_count) * samples

    def cache_buckets(
        self,
        prompts: Sequence[np.ndarray],
        max_new_tokens: int | Sequence[int],
        may_go_on: bool = False,
    ) -> list[int]:
        """Cache lengths to compile: those of the engine, and what these prompts need beyond it.

        `may_go_on`: sequences of any length are prefilled too.
        """
        lengths = np.asarray([len(prompt) for prompt in prompts])
        limit, longest = int(np.max(max_new_tokens)), int(np.max(lengths + max_new_tokens))
        need = max(longest, bucket_width(longest if may_go_on else int(lengths.max())))
        usual = self.config.data.max_prompt_tokens
        usual = max(usual + max(limit, self.config.rollout.max_new_tokens), bucket_width(usual))
        buckets = self.caches or doubling(FIRST_CACHE_BUCKET, usual)
        return [*buckets, *doubling(2 * buckets[-1], need)] if need > buckets[-1] else buckets

    def use_learned(self, is_used: bool) -> None:
        """Whether the next rollouts capture features, and can draft with the learned drafter in addition to n-grams.

        Both cost time, which an adaptive drafter does not save before it has learned. When this changes, the compiled
        programs are dropped, and weights must be published again.
        """
        if is_used != (self.drafter is not None):
            self.drafter = self.learned if is_used else None
            self.programs.rebind(self.shapes(self.drafter))

    def learned_compile_cost(self) -> float:
        """Expected seconds of compiling after `use_learned(True)`; 0 while the learned drafter is used."""
        return 0.0 if self.drafter else self.programs.rebinding(self.shapes(self.learned))

    def run(
        self,
        request: RolloutRequest,
        weights: Mapping[int, Weights],
        tuner: TunerState | None = None,
        *,
        on_finish: Callable[[Completion], None] | None = None,
        interrupted: Callable[[], bool] | None = None,
        harvesters: Mapping[int, Harvester] | None = None,
        listeners: Sequence[Listener] = (),
        idle_work: IdleWork | None = None,
        least_idle: float = 0.0,
        wanted: Callable[[Sequence[Completion]], set[int]] = exchange.everything,
        selection: Selection | None = None,
        partner: Partner | None = None,
        turn_tokens: int = 0,
        arrivals: OpenQueue | None = None,
    ) -> tuple[RolloutResult, TunerState]:
        """The result of a rollout, the same in all processes, and the tuner's state after it (None: an initial one before).

        Listeners, `on_finish` and `harvesters` (one for each local group) get the events of the local groups. Windows that
        a harvester wants reach the listeners as `Harvested`, with states when the engine captures them. A group that has
        nothing left to decode does `idle_work` while the rollout is expected to last at least `least_idle` seconds longer;
        the stats idle_used and idle_delay are its seconds, and how long the end of the rollout waited for it. `wanted`
        returns the uids whose tokens this process needs of answers that other processes decode; it gets zeros for the
        others. Raises Interrupted in all processes soon after `interrupted()` is true in one; what the tuner learned in
        this rollout is then lost. With a `selection` (in all processes) the result has the answers to the chosen prompts
        alone, `on_finish` gets those that may be chosen, and the rollout ends as soon as the choice is known. A `partner`
        replies to the turns of the local groups' sequences, each of at most `turn_tokens` tokens (0: any number), see
        Dialogue. `arrivals`: the sequences of the request, which come meanwhile. Raises ConfigError for a partner in a
        deterministic rollout, since what is decoded together depends on when replies come.
        """
        if partner and self.cost_table:
            raise ConfigError(
                "rollout.deterministic with an environment: what is decoded together depends on when it replies: set it false"
            )
        given = request, weights, tuner, harvesters, selection, partner, turn_tokens, arrivals
        run = RolloutRun(self, next(self.rollouts), *given)
        result = run.decode(listeners, on_finish, interrupted, idle_work, least_idle)
        result = run.exchanged(result, wanted)
        self.lengths = [len(one.tokens) for one in result.completions]
        return result, run.learned(result)


class Engine(EngineBase):
    """Owns the executables of every data group and the memory that n-grams are drawn from; no state that a run needs.

    `use_learned` decides whether the learned drafter is used; `tuner` holds the functions of the tuner, whose state a rollout
    is given and returns. With `captures_states` the programs keep the policy's normed last hidden states next to the
    features, for harvesters; with `records` completions have the experts of their tokens where a request asks for them.
    `lora`: the adapters of the policies that are published. Each process of a `job` has an engine for its `local_groups`; all
    of them call `publish` and `run` together. Ascending `batch_buckets` and `cache_buckets`: see EngineBase. Losing an engine
    costs compilations and speed.
    Raises ConfigError when a data group lies on several processes, and for sequences that are too long for n-grams.
    """

    def __init__(
        self,
        config: Config,
        model_config: ModelConfig,
        mesh: Mesh,
        stops: StopRules | None = None,
        drafter: DrafterConfig | None = None,
        captures_states: bool = False,
        job: Job | None = None,
        lora: Lora | None = None,
        batch_buckets: Sequence[int] = (),
        cache_buckets: Sequence[int] = (),
        records: bool = False,
    ):
        job, is_cpu = job or Job(), meshes.is_cpu(mesh)
        cache = use_compile_cache(config.rollout.compile_cache)
        buckets = batch_buckets, cache_buckets
        super().__init__(config, model_config, drafter, mesh.shape["data"], is_cpu, job, *buckets)
        self.mesh, self.stops = mesh, stops
        self.clock = driver.SharedClock() if is_cpu else driver.WALL
        self.captures_states, self.records = captures_states, records
        self.lora = low_rank.kept_apart(lora, config.model.compute_dtype)
        self.groups = [meshes.data_group(mesh, index) for index in range(mesh.shape["data"])]
        self.local_groups = [*range(len(self.groups))]
        if job.count > 1:
            try:
                self.local_groups = meshes.local_groups(mesh)
            except ValueError as error:
                raise ConfigError(str(error)) from error
        self.fused = self.checked_kernels()
        self.basis = tuner_basis(config, mesh, self.drafter_kind)
        self.ngram_memory = None
        if config.speculation.drafter in (NGRAM, ADAPTIVE):
            ngram_memory.check_longest(config.data.max_prompt_tokens + answer_limit(config))
            # A deterministic rollout keeps nothing that a resumed run would lack.
            is_whole = config.rollout.deterministic
            capacity = math.inf if is_whole else ngram_memory.CAPACITY
            self.ngram_memory = NGramMemory(ngram_memory.POOL, capacity, keeps_earlier=not is_whole)

        self.programs = Executables(self.shapes(drafter), log_compile, cache)
        dtype = config.model.compute_dtype
        reshard = partial(
            architecture.to_rollout, config=model_config, mesh=mesh, dtype=dtype, lora=self.lora
        )
        shardings = architecture.shardings(model_config, mesh, "rollout", self.lora, dtype)
        self.reshard = Early(jax.jit(reshard, out_shardings=shardings), self.programs.background)
        if drafter:
            reshard = partial(drafters.to_rollout, config=drafter, mesh=mesh, dtype=dtype)
            self.reshard_drafter = jax.jit(
                reshard, out_shardings=drafters.shardings(drafter, mesh, "rollout", dtype)
            )

    def checked_kernels(self) -> list[Fused]:
        """The fused kernels of each data group: those that are right on the devices of every process."""
        nodes, dtype = (
            max(arm.nodes for arm in (PLAIN, *self.arms)),
            self.config.model.compute_dtype,
        )
        shapes = kernel_check.Shapes(self.model_config, self.learned, nodes, dtype, self.lora)
        fused = Fused.of(self.groups[self.local_groups[0]])
        fused = kernel_check.checked(fused, shapes, self.job)
        return [replace(fused, mesh=group) for group in self.groups]

    def shapes(self, drafter: DrafterConfig | None) -> list[GroupShapes]:
        """Policy and drafters bound to every data group; with a learned drafter the policy captures its features."""
        speculation, dtype = self.config.speculation, self.config.model.compute_dtype
        path = max(arm.path for arm in (PLAIN, *self.arms))
        captures, shapes = drafter.captures if drafter else (), []
        for group, fused in zip(self.groups, self.fused, strict=True):
            target = bindings.bind_target(
                self.model_config,
                fused,
                dtype,
                captures,
                path,
                self.captures_states and drafter is self.learned,
                self.lora,
                self.records,
            )
            learned, named = bindings.bind_drafters(speculation, drafter, target, fused, dtype)
            shapes.append(GroupShapes(target, learned, group, named))
        return shapes

    def close(self) -> None:
        """Drops the programs, and those that wait to be compiled; the engine runs no further rollout."""
        self.programs.close()

    def publish(self, params: Params, drafter: DrafterParams | None = None) -> dict[int, Weights]:
        """The rollout's copy of policy and drafter, by data group: one reshard over the mesh, then zero-copy views."""
        target = self.reshard(params)
        views = {index: meshes.view(target, self.groups[index]) for index in self.local_groups}
        return self.with_drafter(
            {index: Weights(view, ()) for index, view in views.items()}, drafter
        )

    def with_drafter(
        self, weights: Mapping[int, Weights], drafter: DrafterParams | None
    ) -> dict[int, Weights]:
        """Published weights with another drafter; without one while no learned drafter is used."""
        learned = self.reshard_drafter(drafter) if self.drafter else ()

        def bound(index: int, target: Params) -> DrafterParams | tuple:
            view, group = meshes.view(learned, self.groups[index]), self.groups[index]
            return drafters.bind(view, self.drafter, target, group) if self.drafter else ()

        return {
            index: one.replace(drafter=bound(index, one.target)) for index, one in weights.items()
        }

    def request(
        self,
        prompts: Sequence[np.ndarray],
        samples: int,
        sampling: Sampling,
        max_new_tokens: int | Sequence[int],
        *,
        stream: int,
        step: int,
        eos_ids: Sequence[int] | None = None,
        rollouts_left: float = 0,
        records: bool = False,
    ) -> RolloutRequest:
        """`samples` answers to each prompt int32[P]; `max_new_tokens` may differ by prompt.

        The tokens of its rollout are a function of (weights, prompt, sampling, train.seed, stream,
        step, uid), where uid = position of the prompt * samples + sample. EOS defaults to that of
        the model. `rollouts_left`: how many like it the run decodes after it, for which programs
        may pay. `records`: completions have what the update needs of their tokens: the record of an engine that makes one, and
        the support with algorithm.support_replay. Raises ConfigError for
        prompts that cannot be decoded.
        """
        tokens = tuple(np.asarray(prompt, np.int32) for prompt in prompts)
        model = self.model_config
        check(tokens, max_new_tokens, model.longest, model.vocab_size)
        return RolloutRequest(
            prompts=tokens,
            samples=samples,
            max_new_tokens=tuple(np.broadcast_to(max_new_tokens, len(tokens)).tolist()),
            keys=sequence_keys(
                self.config.train.seed, stream, step, np.arange(len(tokens) * samples)
            ),
            params=DecodingParams(
                sampling,
                tuple(self.model_config.eos_ids if eos_ids is None else eos_ids),
                self.stops,
                kept(self.config) if records else 0,
            ),
            rounds=self.config.rollout.chunk,
            in_flight=IN_FLIGHT,
            capacity=min(self.capacity, self.share(len(tokens), samples)),
            rollouts_left=rollouts_left,
            records=records and self.records,
        )


def tuner_basis(config: Config, mesh: Mesh, drafter_kind: str) -> dict[str, Any]:
    """The settings that a saved tuner state is valid for; the tuner of a run with others starts anew."""
    knobs = {"speculation": asdict(config.speculation), "mesh": asdict(config.mesh)}
    basis = {
        f"{section}.{knob}": value for section in knobs for knob, value in knobs[section].items()
    }
    basis["version"] = goodput.VERSION
    basis["devices"] = meshes.device_kind(mesh)
    if config.speculation.drafter == ADAPTIVE:
        basis["drafter"] = drafter_kind  # otherwise speculation.drafter names its directory
    return basis
