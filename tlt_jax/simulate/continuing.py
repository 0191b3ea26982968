"""Rollouts that continue while the policy is updated: partial rollouts that are resumed, and fully asynchronous ones.

One long rollout on the real scheduler, whose work queue gives prompts up to a bound that grows with the updates. A step trains
on the first `rollout.prompts` prompts that are complete. Both kinds bound prompts as AReaL bounds staleness (arXiv 2505.24298,
areal/infra/staleness_manager.py): after i updates at most (i + 1 + ahead) x rollout.prompts have begun.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np

from tlt_jax.config import Config
from tlt_jax.rollout.buckets import PREFILL_TOKENS
from tlt_jax.rollout.events import Look
from tlt_jax.rollout.executables.programs import Prefill
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.rollout.scheduler.driver import Rollout
from tlt_jax.rollout.scheduler.queue import WorkQueue
from tlt_jax.simulate import engine, simulator
from tlt_jax.simulate.devices import Devices, with_rows
from tlt_jax.simulate.off_policy import off_policy
from tlt_jax.simulate.simulator import POLL_BEFORE_S
from tlt_jax.simulate.world import MakeRun, Step, World
from tlt_jax.simulate.written import Written

# A chunk decodes at least the longest answer over this many rounds: groups are interrupted between chunks, and a complete
# prompt is seen at the end of one.
PIECES = 128
TRAINER = -1  # the group of the trainer's events among those of the programs


class ContinuingRun(engine.SimulatedRun):
    """The rollout; `steps` bounds its queue and drives it."""

    def __init__(self, steps: ContinuingSteps, *inputs: Any):
        self.steps = steps
        super().__init__(*inputs)

    def make_queues(self) -> dict[int, WorkQueue]:
        """One queue of all prompts of the run, up to the bound of the steps."""
        job, sizes = self.engine.job, (len(self.request.prompts), self.request.samples)
        queue = WorkQueue(job.board, self.scope, *sizes, lambda: self.steps.bound)
        return dict.fromkeys(self.engine.local_groups, queue)

    def drive(self, rollout: Rollout, interrupted: Any, background: Any) -> RolloutResult:
        return self.steps.drive(rollout)


class ContinuingSteps:
    """The RL steps of plain decoding on these devices, where answers continue over updates.

    Shared devices: once the prompts of a step are complete, all groups end their chunks and train; then they resume (APRIL,
    arXiv 2509.18521). Split devices: the trainer trains whenever the prompts of a step are complete, and after each update the
    groups of the rollout end their chunks, take the new weights and resume (AReaL). A group that resumes computes keys and
    values of its unfinished answers again, under the new policy. With `ahead` 0 no answer continues.
    """

    def __init__(
        self,
        config: Config,
        world: World,
        devices: Devices,
        ahead: float,
        told: Callable[[int], None],
        make: MakeRun,
    ):
        config = with_rows(
            config, math.floor((1 + ahead) * config.rollout.prompts), devices.rollout
        )
        self.one = make(config, replace(world, groups=devices.rollout))
        self.world, self.config, self.engine, self.clock = (
            world,
            self.one.config,
            self.one.engine,
            self.one.clock,
        )
        self.devices, self.ahead, self.told = devices, ahead, told
        self.version = 0  # updates that are done
        self.steps: list[Step] = []
        self.written = Written(self.config.rollout.samples, devices.rollout)
        self.batch: list[int] = []  # the prompts of the update that runs
        self.update_ends = math.inf
        self.waits_since = 0.0  # when the trainer began to wait for prompts
        self.interrupted: set[int] = set()  # groups that dispatch nothing, and get new weights
        self.resume_at: dict[int, float] = {}  # of groups that have them
        self.seen = self.chunks = self.waited = (
            0  # spans, measurements and compile waits of earlier steps
        )
        self.recomputing = 0.0  # groups' seconds of this step

    @property
    def bound(self) -> int:
        """Prompts that may have begun."""
        return math.floor((self.version + 1 + self.ahead) * self.config.rollout.prompts)

    def run(self) -> list[Step]:
        """All steps."""
        self.request = request = self.whole_request()
        weights = dict.fromkeys(
            range(self.devices.rollout), SimpleNamespace(target=None, drafter=())
        )
        number = next(self.engine.rollouts)
        run = ContinuingRun(self, self.engine, number, request, weights, self.one.state.tuner)
        run.clock, self.planner = self.clock, run.planners[0]
        self.begin_payback()
        self.clock.sleep(self.world.table.seconds("publish"))
        self.waits_since = self.clock.now()
        self.clock.sleep(self.world.table.seconds("begin"))
        run.decode([self.written.listen], None, None, None, 0.0)
        return self.steps

    def whole_request(self) -> Any:
        """The prompts and answers of all steps, those of each step as plain decoding has them."""
        rollout, most = self.config.rollout, max(self.config.data.max_prompt_tokens, 2)
        count = math.floor((self.world.steps + self.ahead) * rollout.prompts)
        draw, seed = self.world.lengths.draw, self.config.train.seed
        drawn = [
            draw(step, rollout.prompts, rollout.samples, seed)
            for step in range(-(-count // rollout.prompts))
        ]
        answers = np.concatenate([one.answers for one in drawn])[:count]
        prompts = np.concatenate([one.prompts for one in drawn])[:count]
        self.one.answers = dict(enumerate(answers.ravel().tolist()))
        request = simulator.request(
            np.clip(prompts, 2, most).astype(int).tolist(),
            rollout.samples,
            rollout.max_new_tokens,
            seed=0,
            capacity=self.engine.capacity,
            rounds=max(rollout.chunk, rollout.max_new_tokens // PIECES),
            rollouts_left=self.world.steps - 1,
        )
        self.one.prompts = request.prompts
        return request

    def begin_payback(self) -> None:
        """Tells the planner's payback of the step that begins, as a new rollout of plain decoding does."""
        sequences = self.config.rollout.prompts * self.config.rollout.samples
        self.planner.payback.begin(self.world.steps - self.version - 1, sequences)

    # The events of the run

    def drive(self, rollout: Rollout) -> RolloutResult:
        """Runs rollout and trainer until the last update; between events the clock jumps, as in simulator.simulate."""
        programs, groups = self.engine.programs, None
        while self.version < self.world.steps:
            rollout.poll(groups)
            if groups := self.advance(rollout):
                continue
            ready, groups = programs.next_ready()
            if math.isinf(ready):
                raise RuntimeError("the steps are not done, but no program runs")
            groups &= rollout.contexts.keys()
            if ready > self.clock.now():
                self.clock.jump(ready - POLL_BEFORE_S)
                for group in groups:
                    rollout.tell(Look(group, self.clock.now(), self.clock.now(), ()))
            self.clock.jump(ready)
        return rollout.result()

    def advance(self, rollout: Rollout) -> Collection[int]:
        """What is due now, of groups and trainer; the groups that may have something to do since then."""
        now, every = self.clock.now(), range(self.devices.rollout)
        woken = {group for group, at in self.resume_at.items() if at <= now}
        for group in woken:
            self.resume(rollout, group)
        if self.update_ends <= now:
            self.end_update(rollout)
            return every
        if not self.devices.are_shared:
            self.renew(rollout)
        is_due = (
            len(self.written.complete) >= self.config.rollout.prompts and now >= self.waits_since
        )
        if is_due and not self.batch:
            if self.devices.are_shared:
                self.interrupt(rollout)
            if not self.devices.are_shared or all(self.is_drained(rollout, one) for one in every):
                self.begin_update(rollout)
        return woken

    def begin_update(self, rollout: Rollout) -> None:
        """Trains on the first complete prompts; the step is known from here."""
        table, now, samples = self.world.table, self.clock.now(), self.config.rollout.samples
        self.batch = self.written.take(self.config.rollout.prompts)
        ages = self.written.ages(self.batch, self.version)
        uids = [one * samples + sample for one in self.batch for sample in range(samples)]
        parts = self.devices.training_seconds(
            self.config, table, self.one.examples(uids), self.version
        )
        self.update_ends = now + sum(parts.values())
        self.wake(self.update_ends, TRAINER)
        wait = now - self.waits_since
        self.note(rollout, {"publish": table.seconds("publish"), "rollout": wait, **parts}, ages)

    def end_update(self, rollout: Rollout) -> None:
        """The policy is new: more prompts may begin, and groups get the weights."""
        self.version += 1
        self.batch, self.update_ends = [], math.inf
        self.planner.state = self.engine.tuner.update_prior(self.planner.state)
        self.begin_payback()
        self.waits_since = self.clock.now() + self.world.table.seconds("publish")
        self.wake(self.waits_since, TRAINER)
        self.told(self.version)
        self.interrupt(rollout)
        self.renew(rollout)

    def note(self, rollout: Rollout, seconds: dict[str, float], ages: Mapping[int, int]) -> None:
        """Keeps the step whose update begins: what was decoded since the one before."""
        recorder, waited, table = rollout.recorder, self.engine.programs.waited, self.world.table
        spans, chunks = recorder.spans[self.seen :], recorder.measurements[self.chunks :]
        self.seen, self.chunks = len(recorder.spans), len(recorder.measurements)
        busy = sum(one.end - one.start for one in spans) + self.recomputing
        whole = self.devices.rollout * (seconds["rollout"] - table.seconds("begin"))
        if not self.devices.are_shared:
            whole = self.devices.groups * sum(seconds.values())
            busy += self.devices.training * (sum(seconds.values()) - seconds["rollout"])
        decoding = sum(one.seconds for one in chunks)
        error = sum(one.seconds * table.shape(one.batch, one.strategy)[2] for one in chunks)
        if self.steps:
            self.steps[-1].spans = []
        compiling = sum(end - start for start, end in waited[self.waited :])
        self.steps.append(
            Step(
                seconds, sum(ages.values()), max(1 - busy / whole, 0.0), compiling, 0.0, 0.0, {"off": decoding},
                error / max(decoding, 1e-9), spans, off_policy(ages), self.devices.split,
                self.recomputing / self.devices.rollout,
            )
        )  # fmt: skip
        self.recomputing, self.waited = 0.0, len(waited)

    def interrupt(self, rollout: Rollout) -> None:
        """No group dispatches a chunk from now on."""
        for group, context in rollout.contexts.items():
            self.interrupted.add(group)
            rollout.contexts[group] = replace(context, request=replace(self.request, in_flight=0))

    def is_drained(self, rollout: Rollout, group: int) -> bool:
        """The group has ended its chunks and has what it needs to go on, if it was interrupted before."""
        ended = self.engine.programs.free_at.get(group, 0.0) <= self.clock.now()
        return ended and group not in self.resume_at and not rollout.states[group].is_busy

    def renew(self, rollout: Rollout) -> None:
        """Interrupted groups that have ended their chunks take the newest weights and recompute keys and values."""
        table, programs = self.world.table, self.engine.programs
        for group in [one for one in self.interrupted if self.is_drained(rollout, one)]:
            self.interrupted.discard(group)
            self.written.version[group] = self.version
            again = self.recompute_seconds(rollout, group)
            begin = table.seconds("begin") if self.devices.are_shared else 0.0
            self.recomputing += again
            marker = programs.dispatched_at(group, table.seconds("publish") + begin + again)
            self.resume_at[group] = marker.at

    def recompute_seconds(self, rollout: Rollout, group: int) -> float:
        """Seconds to compute keys and values of a group's unfinished answers, in prefills of PREFILL_TOKENS tokens."""
        tokens = sum(one.tokens for one in rollout.states[group].rows if one)
        prefill = Prefill(group, 1, PREFILL_TOKENS)
        return tokens / PREFILL_TOKENS * self.engine.programs.seconds(prefill, 1, 0.0, 0.0)

    def resume(self, rollout: Rollout, group: int) -> None:
        """The group goes on, unless the policy has changed again."""
        del self.resume_at[group]
        if group not in self.interrupted:
            rollout.contexts[group] = replace(rollout.contexts[group], request=self.request)

    def wake(self, at: float, group: int) -> None:
        """Lets the clock stop at this time."""
        heapq.heappush(self.engine.programs.due, (at, group))
