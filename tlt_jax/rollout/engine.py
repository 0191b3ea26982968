"""Binds policy and drafters to the data groups, owns their executables, publishes weights and runs rollouts."""

from __future__ import annotations

import itertools
import logging
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax.config import Config
from tlt_jax.config.schema import ADAPTIVE, NGRAM
from tlt_jax.data.stop_rules import StopRules
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.ending import Ending
from tlt_jax.distributed.job import Job
from tlt_jax.errors import ConfigError
from tlt_jax.keys import sequence_keys
from tlt_jax.models import eagle, transformer
from tlt_jax.models.eagle import DrafterConfig, DrafterParams
from tlt_jax.models.transformer import ModelConfig, Params
from tlt_jax.rollout import bindings, exchange
from tlt_jax.rollout.buckets import (
    FIRST_CACHE_BUCKET,
    batch_buckets,
    block_size,
    bucket_width,
    doubling,
)
from tlt_jax.rollout.events import Emitted, Listener, Look
from tlt_jax.rollout.executables.compilation import (
    Executables,
    log_compile,
    time_draft,
    use_compile_cache,
)
from tlt_jax.rollout.executables.programs import (
    Admit,
    CatchUp,
    Decode,
    DraftOnly,
    GroupShapes,
    Prefill,
    StateShape,
)
from tlt_jax.rollout.executables.protocols import Program
from tlt_jax.rollout.idle.driver import IdleDriver, IdleWork
from tlt_jax.rollout.idle.expected_time import Remaining
from tlt_jax.rollout.ngram_memory import NGramMemory
from tlt_jax.rollout.recorder import Completion, RolloutResult
from tlt_jax.rollout.request import RolloutRequest, check
from tlt_jax.rollout.scheduler import deterministic, driver
from tlt_jax.rollout.scheduler.harvest import Harvest
from tlt_jax.rollout.scheduler.payback import MARGIN, Payback, smallest
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.rollout.scheduler.queue import WorkQueue
from tlt_jax.rollout.scheduler.state import GroupContext, Harvester, Needs, Queue, no_context
from tlt_jax.spec_decode.decode import Weights
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, PLAIN, Strategy, name
from tlt_jax.tuner import goodput, make
from tlt_jax.tuner.interface import Cell, State as TunerState

TIMED_ROUNDS = 8
# What features for the drafter take, of the rest of the rollouts; without a clock, by how much drafting has to be faster.
FEATURES, GAIN_BY_COUNTS = 0.02, 0.1
Shape = tuple[int, int, Strategy]  # batch bucket, cache slots, strategy

log = logging.getLogger(__name__)


class Engine:
    """Owns the executables of every data group and the memory that n-grams are drawn from; no state that a run needs.

    `drafter` is the learned drafter's configuration, when there is one that is used (`use_learned`); `tuner` holds the
    functions of the tuner, whose state a rollout is given and returns. Losing an engine costs compilations and speed. With
    `captures_states` its programs are others: they keep the policy's normed last hidden states beside the features, for
    harvesters. Of several processes of a `job` each has an engine, for its `own` data groups, and all take part in
    `publish` and `run`. Raises ConfigError when a data group lies on several processes.
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
    ):
        kept = use_compile_cache(config.rollout.compile_cache)
        self.config, self.model_config, self.mesh = config, model_config, mesh
        self.stops = stops
        self.groups = [meshes.data_group(mesh, index) for index in range(mesh.shape["data"])]
        self.job = job or Job()
        try:
            is_alone = self.job.count == 1
            self.local_groups = (
                [*range(len(self.groups))] if is_alone else meshes.local_groups(mesh)
            )
        except ValueError as error:
            raise ConfigError(str(error)) from error
        speculation, dtype, self.drafter = config.speculation, config.model.compute_dtype, drafter
        self.drafter_kind = drafter.kind if drafter else speculation.drafter

        self.arms = make.arms(speculation)
        self.learned, self.captures_states = drafter, captures_states
        self.programs = Executables(self.shapes(drafter), log_compile, kept)
        self.draft_seconds: dict[Shape, float] = {}
        # What is decoded by counts alone remembers nothing that a resumed run has lost, or that another group says.
        by_counts, is_cpu = config.rollout.deterministic, meshes.is_cpu(mesh)
        self.cost_table = deterministic.cost_table(make.node_cost(is_cpu)) if by_counts else None
        memory = NGramMemory(
            speculation.pool,
            math.inf if by_counts else speculation.memory,
            speculation.max_match,
            keeps_earlier=not by_counts,
        )
        self.ngram_memory = memory if speculation.drafter in (NGRAM, ADAPTIVE) else None

        self.tuner = make.make_tuner(speculation, self.arms, is_cpu)
        knobs = {"speculation": asdict(speculation), "mesh": asdict(config.mesh)}
        self.basis = {
            f"{section}.{knob}": value
            for section in knobs
            for knob, value in knobs[section].items()
        }
        del self.basis["speculation.time_drafting"]  # it only measures
        self.basis["version"] = goodput.VERSION
        self.basis["devices"] = meshes.device_kind(mesh)
        if speculation.drafter == ADAPTIVE:
            self.basis["drafter"] = self.drafter_kind  # else it is that of the directory

        self.rollouts = itertools.count()
        self.lengths: list[int] = []  # tokens of the answers of the rollout before
        self.payback: dict[DecodingParams, Payback] = defaultdict(Payback)
        self.capacity = config.rollout.slots or self.share(
            config.rollout.prompts, config.rollout.samples
        )
        self.batches = config.rollout.batch_buckets or batch_buckets(self.capacity)
        if self.batches[-1] < self.capacity:
            raise ConfigError(
                f"rollout.batch_buckets end at {self.batches[-1]}, and a data group decodes {self.capacity} sequences at "
                f"once: add {self.capacity}, or set rollout.slots {self.batches[-1]}"
            )

        reshard = partial(
            transformer.to_rollout, config=model_config, mesh=mesh, dtype=config.model.compute_dtype
        )
        self.reshard = jax.jit(
            reshard, out_shardings=transformer.shardings(model_config, mesh, "rollout")
        )
        if drafter:
            reshard = partial(eagle.to_rollout, config=drafter, mesh=mesh, dtype=dtype)
            self.reshard_drafter = jax.jit(
                reshard, out_shardings=eagle.shardings(drafter, mesh, "rollout")
            )

    def shapes(self, drafter: DrafterConfig | None) -> list[GroupShapes]:
        """Policy and drafters bound to every data group; with a learned drafter the policy captures its features."""
        speculation, dtype = self.config.speculation, self.config.model.compute_dtype
        path = max(arm.path for arm in (PLAIN, *self.arms))
        captures, shapes = drafter.captures if drafter else (), []
        for group in self.groups:
            target = bindings.bind_target(
                self.model_config,
                group,
                dtype,
                captures,
                path,
                self.captures_states and drafter is self.learned,
            )
            own, named = bindings.bind_drafters(speculation, drafter, target, group, dtype)
            shapes.append(GroupShapes(target, own, group, named))
        return shapes

    def use_learned(self, is_used: bool) -> None:
        """Whether the next rollouts capture features, and can draft with the learned drafter beside n-grams.

        Both cost time, which an adaptive drafter does not save before it has learned. Weights are
        to be published again; programs that are there are dropped, since they are for other arrays.
        """
        if is_used != (self.drafter is not None):
            self.drafter = self.learned if is_used else None
            self.programs.rebind(self.shapes(self.drafter))

    def learned_compile_cost(self) -> float:
        """Seconds of compiling that `use_learned` is expected to cost."""
        return 0.0 if self.drafter else self.programs.rebinding(self.shapes(self.learned))

    def knows_learned(self, tuner: TunerState) -> bool:
        """Whether this state may choose to draft with the learned drafter, which has to be used then."""
        return any(arm.drafter in (LEARNED, MERGED) for arm in self.tuner.usable(tuner, 1, 1))

    def worth_of_learned(self, tuner: TunerState, depths: Sequence[float]) -> tuple[float, float]:
        """Seconds that drafting with the learned drafter saves in the rest of the run, and those that starting it takes.

        `depths`: its acceptance by depth, each given the depths before; `tuner`: the state that knows the rest. Nothing is
        saved while no chunk was measured, or of a drafter that is used already. What is decided without a clock costs
        nothing to start, and saves something where drafting is faster by GAIN_BY_COUNTS with a quarter of all rows.
        """
        arms = [arm for arm in self.arms if arm.drafter in (LEARNED, MERGED)]
        speeds = partial(self.tuner.predict, self.tuner.update_prior(tuner, {LEARNED: depths}))
        if self.drafter or not arms:
            return 0.0, 0.0
        if self.cost_table:
            usual = smallest(self.batches, self.capacity / 4), FIRST_CACHE_BUCKET
            plain, *drafted = speeds([Cell(*usual, arm) for arm in (PLAIN, *arms)])[0]
            return 1 - math.exp(GAIN_BY_COUNTS + plain - max(drafted)), 0.0
        payback = max(self.payback.values(), key=lambda one: sum(one.tokens.values()), default=None)
        if payback is None or not payback.tokens:
            return 0.0, 0.0
        chunks = [one for one in self.programs.executables if isinstance(one, Decode)]
        compiled = {PLAIN, *(one.strategy for one in chunks)}
        compiled = [Cell(*where, arm) for where in payback.tokens for arm in compiled]
        cells = [Cell(*where, arm) for where in payback.tokens for arm in arms]
        if not chunks or not np.isfinite(speeds([*cells, *compiled])[1]).all():
            return 0.0, 0.0
        seconds_S, share_SC, _ = payback.shares(cells, compiled, speeds)
        saved = seconds_S @ share_SC.max(axis=1) - FEATURES * seconds_S.sum()
        best = cells[int(np.argmax(seconds_S @ share_SC))].strategy
        chunk = self.programs.compile_costs.of(replace(chunks[-1], strategy=best))
        return float(saved), self.learned_compile_cost() + MARGIN * chunk

    def share(self, prompts: int, samples: int) -> int:
        """Sequences of one data group when whole prompts are dealt evenly."""
        return -(-prompts // len(self.groups)) * samples

    def publish(self, params: Params, drafter: DrafterParams | None = None) -> dict[int, Weights]:
        """The rollout's copy of policy and drafter, by data group: one reshard over the mesh, then zero-copy views."""
        weights = Weights(
            self.reshard(params), self.reshard_drafter(drafter) if self.drafter else ()
        )
        return {index: meshes.view(weights, self.groups[index]) for index in self.local_groups}

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
    ) -> RolloutRequest:
        """`samples` answers to each prompt int32[P]; `max_new_tokens` may differ by prompt.

        The tokens of its rollout are a function of (weights, prompt, sampling, train.seed, stream,
        step, uid), where uid = position of the prompt * samples + sample. EOS defaults to that of
        the model. `rollouts_left`: how many like it the run decodes after it, for which programs
        may pay. Raises ConfigError for prompts that cannot be decoded.
        """
        tokens = tuple(np.asarray(prompt, np.int32) for prompt in prompts)
        model = self.model_config
        check(tokens, max_new_tokens, model.max_positions, model.vocab_size)
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
            ),
            rounds=self.config.rollout.chunk,
            in_flight=self.config.rollout.in_flight,
            capacity=min(self.capacity, self.share(len(tokens), samples)),
            rollouts_left=rollouts_left,
        )

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
    ) -> tuple[RolloutResult, TunerState]:
        """The rollout of a request, and the tuner's state after it; without one before it the tuner knows nothing.

        The result is that of all processes; listeners, `on_finish` and harvesters, one of each group, are told of the own
        groups alone. What the harvesters want comes to the listeners as `Harvested`, with states when the engine
        captures them. A group that has nothing left to decode does `idle_work` while the rollout is expected to take at
        least `least_idle` seconds more; stats have its seconds, idle_used, and how long the end waited for it, idle_delay.
        `wanted` gives the uids of the answers that this process needs of those that others decode: of the rest it has
        zeros of their lengths. Raises Interrupted, in all processes, soon after `interrupted()` is true in one: what the
        tuner learned meanwhile
        is lost.
        """
        number = next(self.rollouts)
        scope, board = f"rollout/{number}", self.job.board
        if self.job.is_first:  # nobody reads any more what belongs to the one before the last
            board.delete(f"rollout/{number - 2}/")
        ending = Ending(len(self.groups), board, scope, self.job.index, self.job.count)
        slots = self.cache_buckets(request.prompts, request.max_new_tokens)
        longest = max(
            len(prompt) + limit
            for prompt, limit in zip(request.prompts, request.max_new_tokens, strict=True)
        )
        payback = self.payback[request.params]
        payback.begin(request.rollouts_left, len(request.keys))
        tuner = self.tuner.init() if tuner is None else tuner
        count = len(request.prompts), request.samples
        shared = WorkQueue(board, scope, *count)
        planner = partial(
            Planner,
            self.batches,
            slots,
            self.tuner,
            tuner,
            payback,
            longest,
            len(self.local_groups),
            self.cost_table,
        )
        planners = dict.fromkeys(self.local_groups, planner())
        queues = dict.fromkeys(self.local_groups, shared)
        if self.cost_table:
            planners = {index: planner() for index in self.local_groups}
            queues = {
                i: deterministic.DealtQueue(i, len(self.groups), *count) for i in self.local_groups
            }
        if self.ngram_memory:
            self.ngram_memory.begin(request.prompts, request.samples)
        before, waited = len(self.programs.compiles), len(self.programs.waited)
        contexts = self.contexts(request, weights, queues, planners, harvesters)
        rollout = driver.start(contexts, [self.remember, *listeners], on_finish)
        background = idle_work and self.background(rollout, number, idle_work, least_idle, ending)
        result = driver.run(rollout, interrupted, background, ending)

        began = rollout.recorder.begin
        waits = [(start - began, end - began) for start, end in self.programs.waited[waited:]]
        result = replace(result, compile_waits=dict.fromkeys(self.local_groups, waits))
        new = self.programs.compiles[before:]
        result.stats.update(
            programs=len(self.programs.executables),
            compiles=len(new),
            compile_seconds=sum(compiled.seconds for compiled in new),
            **self.memory_held(),
        )
        if background:
            result.stats.update(
                idle_used=sum(background.used.values()), idle_delay=background.delay
            )
        if self.job.count > 1:
            result = exchange.exchanged(self.job, result, wanted)
        if self.cost_table:
            tuner = deterministic.learned(self.tuner, tuner, result.measurements, self.cost_table)
        elif self.job.count > 1:
            for measurement in result.measurements:  # all learn the same, in the same order
                tuner = self.tuner.observe(tuner, measurement)
        else:
            tuner = planners[self.local_groups[0]].state
        self.lengths = [len(one.tokens) for one in result.completions]
        return result, tuner

    def background(
        self, rollout: driver.Rollout, number: int, work: IdleWork, least: float, ending: Ending
    ) -> IdleDriver:
        """What gives the idle groups of a rollout this work."""

        left, recorder = Remaining(rollout.contexts[0].request, self.lengths), rollout.recorder

        def expected() -> float:
            now = rollout.clock.now()
            seconds = left.seconds(rollout.states, recorder.measurements, recorder.lengths)
            ending.tell(seconds, now)
            return max(seconds, ending.others(now))

        def is_over() -> bool:
            return bool(ending.how)

        return IdleDriver(rollout, work, number, len(self.groups), least, expected, is_over)

    def contexts(
        self,
        request: RolloutRequest,
        weights: Mapping[int, Weights],
        queues: Mapping[int, Queue],
        planners: Mapping[int, Planner],
        harvesters: Mapping[int, Harvester] | None = None,
    ) -> list[GroupContext]:
        """The fixed side of this process's data groups in a rollout."""
        drafters = {"": self.programs.shapes[0].drafter, **self.programs.shapes[0].drafters}
        needs = {
            name: Needs(
                self.ngram_memory.siblings if jax.tree.leaves(one.host_context(1)) else no_context,
                one.catch_up is not None,
            )
            for name, one in drafters.items()
        }
        return [
            GroupContext(
                index, self.programs, weights[index], request, queues[index], planners[index], needs,
                drafters[""].remembers, harvesters[index] if harvesters else None, self.cost_table is not None,
            )
            for index in self.local_groups
        ]  # fmt: skip

    def memory_held(self) -> dict[str, int]:
        """Programs that draft, and the most memory that those of one data group take beyond their arguments and results."""
        held = {
            one.program: one
            for one in self.programs.compiles
            if one.program in self.programs.executables
        }
        drafting = [
            one
            for one in held.values()
            if isinstance(one.program, Decode) and one.program.strategy != PLAIN
        ]
        groups = [
            [one for one in drafting if one.program.group == index] for index in self.local_groups
        ]
        sizes = [
            sum(one.code for one in group) + max((one.temporary for one in group), default=0)
            for group in groups
        ]
        return {"pool_programs": len(drafting), "pool_bytes": max(sizes)}

    def largest_programs(
        self, params: DecodingParams, prompt_tokens: int, prompts: int, slots: int, window: int = 0
    ) -> dict[str, Program]:
        """Of each kind of program of data group 0 the largest, by name: prefill, admission, chunks, catching up.

        With a `window` also the harvest of windows of this width. Of drafting chunks that is one for each strategy, with the
        most rows that the tuner may use it for.
        """
        width, rounds = bucket_width(prompt_tokens), self.config.rollout.chunk
        prefill = Prefill(0, block_size(prompts, width), width)
        state = StateShape(0, self.capacity, slots)
        found: dict[str, Program] = {
            "prefill": prefill,
            "admission": Admit(state, prefill),
            "rollout chunk": Decode(state, rounds, PLAIN, params),
        }

        largest = make.largest_batches(self.tuner, self.batches, {arm.drafter for arm in self.arms})
        drafter_of = self.programs.shapes[0].drafter_of
        if caught_up := [batch for arm, batch in largest.items() if drafter_of(arm).catch_up]:
            batch = max(caught_up)
            found[f"catching up of {batch}"] = CatchUp(StateShape(0, batch, slots))
        for arm in self.arms:
            if arm in largest:
                shape = StateShape(0, largest[arm], slots)
                found[f"rollout chunk {name(arm)} of {largest[arm]}"] = Decode(
                    shape, rounds, arm, params
                )
        if window:
            found["harvest"] = Harvest(state, block_size(self.capacity, window), window)
        return found

    def time_drafting(
        self, weights: Mapping[int, Weights], result: RolloutResult
    ) -> Mapping[Shape, float]:
        """Seconds of a round's drafting alone, by shape.

        Of the shapes that drafted in the rollout the most used one that was not timed yet is timed now: a compilation of the
        drafter, and a few rounds.
        """
        used = Counter()
        for one in result.measurements:
            if one.strategy != PLAIN:
                used[one.batch, one.slots, one.strategy] += one.rounds
        fresh = [
            shape
            for shape, rounds in used.most_common()
            if rounds and shape not in self.draft_seconds
        ]
        for batch, slots, strategy in fresh[:1]:
            group = self.local_groups[0]
            state = StateShape(group, batch, slots)
            draft = DraftOnly(state, TIMED_ROUNDS, strategy, self.config.rollout.temperature)
            seconds = time_draft(self.programs, draft, weights[group])
            self.draft_seconds[batch, slots, strategy] = seconds
        return self.draft_seconds

    def remember(self, look: Look) -> None:
        """Keeps the answers that n-grams are drawn from."""
        for event in look.events:
            if self.ngram_memory and isinstance(event, Emitted):
                self.ngram_memory.write(event.uid, event.tokens)

    def cache_buckets(
        self, prompts: Sequence[np.ndarray], max_new_tokens: int | Sequence[int]
    ) -> list[int]:
        """Cache lengths to compile: those of the configuration, and what these prompts need beyond it."""
        lengths, limit = (
            np.asarray([len(prompt) for prompt in prompts]),
            int(np.max(max_new_tokens)),
        )
        need = max(int(np.max(lengths + max_new_tokens)), bucket_width(int(lengths.max())))
        usual = self.config.data.max_prompt_tokens
        usual = max(usual + max(limit, self.config.rollout.max_new_tokens), bucket_width(usual))
        buckets = self.config.rollout.cache_buckets or doubling(FIRST_CACHE_BUCKET, usual)
        return [*buckets, *doubling(2 * buckets[-1], need)] if need > buckets[-1] else buckets
