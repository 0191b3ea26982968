"""Idle data groups train the drafter on their own finished sequences, until the last group is done.

The adaptive drafter of TLT (arXiv 2511.16665, section 4): every group trains its own copy, without
collectives across groups, and the copies are merged before the policy update. It changes no answer
and no weight of the policy.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tlt_jax.distributed.job import Job
from tlt_jax.drafter import merge, reports, update
from tlt_jax.drafter.budget import Budget
from tlt_jax.drafter.recipe import DrafterState, Recipe
from tlt_jax.drafter.replay import Replay, ReplayConfig
from tlt_jax.drafter.reports import Trained
from tlt_jax.rollout.executables.protocols import Program, Programs
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.spec_decode.decode import Weights

# What a trained drafter is expected to save of the rest of the run's rollouts, before anything is known of it: at least
# this share. What training and using it compiles, in micro-steps: itself, harvests, catching up, chunks.
GAIN, PROGRAMS = 0.15, 3.0
EVALUATE_EVERY = 16  # micro-steps from one evaluation on held-out windows to the next
LEAST_TOKENS, MOST_TOKENS = 128, 8192  # of a micro-step
FIRST_TOKENS = (
    256  # of the first micro-step of a run, from whose seconds the size of the others follows
)
# Accept length of the last RECENT steps over the best of these means that counts as fallen; what a step leaves of the best.
# That of a single step varies by a tenth where its answers are few.
FALLEN, MEMORY, RECENT = 0.9, 0.99, 8
# RL steps in a row in which the idle work of a group raised, after which it is left out; the same of all work, after which
# there is no more.
FAILURES = 2
FEW_PAID = 8  # micro-steps in a step's update that are too few: the first one of each step measures, and learns nothing

log = logging.getLogger(__name__)


@dataclass
class Copy:
    """A data group's copy of the drafter in an RL step, and what became of it: see Trained."""

    state: DrafterState
    pieces: int = 0
    draws: int = 0
    steps: int = 0
    tokens: int = 0
    depths: list[float] = field(default_factory=list)
    piece: Program | None = None  # that was dispatched last
    metrics: dict[str, Any] | None = None  # of it
    learns: bool = False  # whether it does


class IdleTraining:
    """Drafter training as idle work; implements rollout.idle.IdleWork.

    `begin` comes before each rollout, `end` after it. What is not in the drafter's state is a cache:
    replay, copies, sizes and prices are lost with the process, and cost speed only. `piece(group,
    rows, tokens)` names the program of a micro-step: micro_step.MicroStep. `starting()`: seconds that
    the rollout's programs take to be compiled again, with features for the drafter. `groups` are those
    of this process; what all decide together is told by `job`. One that `follows` does not begin by itself, but when
    it is told to (`activate`): when drafting with what the drafter learns elsewhere pays. Without `is_idle_used` no
    group trains: all that the drafter knows it learns elsewhere.
    """

    kind = "train"

    def __init__(
        self,
        recipe: Recipe,
        groups: Mapping[int, Mesh],
        programs: Programs,
        piece: Callable[[int, int, int], Program],
        replay: ReplayConfig,
        bound: float,
        least_idle: float = 0.0,
        floor: int = 0,
        rescue: int = 0,
        starting: Callable[[], float] = lambda: 0.0,
        job: Job | None = None,
        follows: bool = False,
        is_idle_used: bool = True,
    ):
        self.recipe, self.groups, self.job = recipe, dict(groups), job or Job()
        self.programs, self.make_piece = programs, piece
        self.replays = {index: Replay(replay, index, mesh) for index, mesh in self.groups.items()}
        self.bound, self.least_idle, self.floor, self.rescue = bound, least_idle, floor, rescue
        self.starting, self.follows, self.is_idle_used = starting, follows, is_idle_used
        self.accept_lengths: deque[float] = deque(maxlen=RECENT)
        self.best_accept_length = 0.0
        self.seconds = self.idle = (
            0.0  # of the rollout before: all of it, and what its idlest group was idle
        )
        # Held-out acceptance in this step, by depth, given the depths before.
        self.depths: list[float] = []  # acceptance of the drafter by depth, measured in this step
        self.known_depths: list[float] = []  # and when it was measured last
        self.tokens = self.wanted = (
            FIRST_TOKENS  # of a micro-step: in this step, and from the next on
        )
        self.budget = Budget()
        self.copies: dict[int, Copy] = {}
        self.policies: dict[int, Any] = {}
        self.broken: set[int] = set()  # groups whose work raised in this step
        self.broke: dict[int, int] = {}  # group -> steps in a row in which it did
        self.failures = 0  # steps in a row in which a group's did, and none trained
        self.pays_off = self.is_stopped = False
        self.micro_step_seconds = 0.0  # of those after a rollout, the latest
        self.paid_seconds = 0.0  # what those of this step took

    def background_work(self) -> dict[str, Any]:
        """What Engine.run is given so that idle groups train."""
        if not self.is_active or not self.is_idle_used:
            return {}
        return {
            "harvesters": self.replays,
            "listeners": [replay.listen for replay in self.replays.values()],
            "idle_work": self,
            "least_idle": self.least_idle,
        }

    @property
    def is_active(self) -> bool:
        """Whether it trains in this run: it pays off, and has not failed too often."""
        return self.pays_off and not self.is_stopped

    def activate(self) -> None:
        """From the next rollout on the drafter drafts, and idle groups train it."""
        self.pays_off = True

    def begin(
        self,
        step: int,
        request: RolloutRequest,
        weights: Mapping[int, Weights],
        state: DrafterState | None,
    ) -> None:
        """A rollout begins, with these weights of every group.

        What its micro-steps need is compiled here, and nowhere else.
        """
        self.copies, self.broken = {}, set()
        if not self.is_active or not self.is_idle_used:
            return
        self.resize(self.seconds * (request.rollouts_left + 1))
        for replay in self.replays.values():
            replay.begin(step, request)
        self.policies = {group: one.target for group, one in weights.items()}
        copies = merge.programs(self.recipe).spread(state)
        parts = merge.parts(copies, self.groups.values())
        self.copies = {group: Copy(part) for group, part in zip(self.groups, parts, strict=True)}

    def is_worth(self, seconds_left: float, start: float = 0.0) -> bool:
        """Whether what a drafter is expected to save exceeds what training and using it compiles."""
        compile_cost = self.programs.compile_cost(self.piece(min(self.groups), self.wanted))
        return GAIN * seconds_left > start + PROGRAMS * compile_cost

    def pays(self, seconds_left: float) -> bool:
        """Whether training pays off in the rest of the run, of so many seconds in rollouts.

        It is asked anew after every step, until it does: the rest of the run has to be long enough,
        and its groups idle for as long as work takes to be started.
        """
        if seconds_left <= 0:
            return False
        is_idle = self.idle > self.least_idle
        return self.floor > 0 or (is_idle and self.is_worth(seconds_left, self.starting()))

    def resize(self, seconds_left: float) -> None:
        """Compiles the micro-steps of the wanted size, and turns to them once they are there.

        Where this would not pay off the size stays.
        """
        pieces = [self.piece(group, self.wanted) for group in self.groups]
        if self.tokens != self.wanted and not self.is_worth(seconds_left):
            self.wanted = self.tokens
            return
        self.programs.prepare(pieces)
        if not any(map(self.programs.compile_cost, pieces)):
            self.tokens = self.wanted

    def piece(self, group: int, tokens: int) -> Program:
        """The program of a group's micro-steps of so many tokens."""
        return self.make_piece(group, 1, tokens)

    def dispatch(self, group: int) -> bool:
        """The next micro-step of a group, or an evaluation on held-out windows."""
        copy, piece = self.copies.get(group), self.piece(group, self.tokens)
        if copy is None or self.is_left_out(group) or self.programs.compile_cost(piece):
            return False
        evaluates = copy.pieces % EVALUATE_EVERY == 0
        replay, batch = self.replays[group], None
        if evaluates:
            batch = replay.sample(0, 1, self.tokens, held_out=True)
            evaluates = batch is not None  # else nothing is held out yet
        if batch is None and not self.budget.is_paused:
            batch = replay.sample(copy.draws, 1, self.tokens)
        if batch is None:
            return False
        copy.piece, copy.learns = piece, not evaluates
        run = self.programs.get(piece)
        copy.state, copy.metrics = run(
            copy.state, self.policies[group], batch, np.bool_(copy.learns)
        )
        copy.pieces, copy.draws = copy.pieces + 1, copy.draws + 1
        return True

    def is_left_out(self, group: int) -> bool:
        """Whether a group does no work: in this step, or any more."""
        return group in self.broken or self.broke.get(group, 0) >= FAILURES

    def is_ready(self, group: int) -> bool:
        """Whether the group's piece is done."""
        return self.copies[group].metrics["loss"].is_ready()

    def done(self, group: int, least: float, most: float) -> None:
        """The piece is done, and took between so many seconds."""
        copy = self.copies[group]
        metrics, copy.metrics = jax.device_get(copy.metrics), None
        if not np.isfinite(metrics["loss"]):
            raise FloatingPointError(f"the drafter's loss is {metrics['loss']}")
        if copy.learns:
            copy.steps, copy.tokens = copy.steps + 1, copy.tokens + int(metrics["tokens"])
        else:
            copy.depths = update.depths(metrics)
        if not self.programs.is_first_run(copy.piece):
            self.wanted = self.sized(self.tokens, least, most)

    def sized(self, tokens: int, least: float, most: float) -> int:
        """Tokens of the next micro-steps, when one of so many took between these seconds: it is to stay below the bound.

        A size is a program: it changes only by powers of two, upwards only where less than a quarter
        of the bound is used. Where the host did not look for long nothing is known, and nothing changes.
        """
        while least > self.bound and tokens > LEAST_TOKENS:
            tokens, least, most = tokens // 2, least / 2, most / 2
        while most < self.bound / 4 and tokens < MOST_TOKENS:
            tokens, most = tokens * 2, most * 2
        return tokens

    def failed(self, group: int, error: Exception) -> None:
        """A piece raised: what this group learned in this step is lost, that of the others counts."""
        level = logging.DEBUG if self.broken else logging.WARNING  # one line a step
        kind = type(error).__name__
        log.log(level, "idle training of group %d failed in this step: %s: %s", group, kind, error)
        self.broken.add(group)

    def keep_alive(self, accept_length: float, seconds: float = 0.0) -> float:
        """Every group makes the micro-steps that it has to after a rollout that drafted with this accept length.

        That is the floor, and `rescue` where no group of this process trained although the accept length fell; and as many
        as fit in `seconds`, where these are more than a few. All groups work side by side. The seconds that it took.
        """
        is_low = False
        if accept_length:
            self.accept_lengths.append(accept_length)
        if accept_length and len(self.accept_lengths) == RECENT:
            recent = sum(self.accept_lengths) / RECENT
            is_low = recent < FALLEN * self.best_accept_length
            self.best_accept_length = max(MEMORY * self.best_accept_length, recent)
        is_unused = not any(copy.steps for copy in self.copies.values())
        least = max(self.floor, self.rescue if is_low and is_unused else 0)
        if seconds < FEW_PAID * self.micro_step_seconds:
            seconds = 0.0
        spent = 0.0
        while True:
            began, going = time.perf_counter(), []
            may_go_on = spent + self.micro_step_seconds <= seconds and seconds > 0
            for group, copy in self.copies.items():
                if (copy.steps < least or may_go_on) and self.tried(
                    group, partial(self.dispatch, group)
                ):
                    going.append(group)
            if not going:
                return spent
            for group in going:
                metrics = self.copies[group].metrics
                self.tried(group, partial(jax.block_until_ready, metrics["loss"]))
                taken = time.perf_counter() - began
                self.tried(group, partial(self.done, group, taken, taken))
            self.micro_step_seconds = time.perf_counter() - began
            spent += self.micro_step_seconds

    def tried(self, group: int, work: Callable[[], Any]) -> Any:
        """What it gives; None when it raises: idle work never ends a run."""
        if group in self.broken:
            return None
        try:
            return work()
        except Exception as error:
            self.failed(group, error)
            return None

    def leave_out(self) -> None:
        """Of a group that failed in this step nothing counts: its copy is as one that was not trained.

        Its arrays may be those of a program that failed, or be gone.
        """
        for group in list(self.copies):
            if group not in self.broken:
                if not self.is_left_out(group):
                    self.broke[group] = 0
            else:
                self.broke[group] = self.broke.get(group, 0) + 1
                blank = jax.tree.map(
                    lambda leaf: jnp.zeros(leaf.shape, leaf.dtype, device=leaf.sharding),
                    merge.abstract_copy(self.recipe, self.groups[group]),
                )
                self.copies[group] = Copy(blank)

    def end(
        self,
        state: DrafterState | None,
        seconds: float,
        idle: float,
        accept_length: float,
        rollouts_left: float,
        paid: float = 0.0,
    ) -> tuple[DrafterState | None, dict[str, float]]:
        """The drafter after a rollout, merged from the groups' copies, and the metrics of its training.

        `seconds` it took, without compiling; `idle`: those that its idlest group had nothing to
        decode. `accept_length`: of its chunks that drafted; 0: none did. `state` is as it was;
        None: there is none yet.
        `rollouts_left`: how many like it the run decodes after it. `paid`: seconds that groups may go on learning for now
        that it is over; `paid_seconds` then says how long they did.
        """
        self.seconds, self.idle = seconds, idle
        begins = self.is_idle_used and not self.pays_off and (self.floor > 0 or not self.follows)
        if begins and self.job.decided(self.pays(seconds * rollouts_left)):
            log.info("the drafter is trained from here on")
            self.activate()
        self.paid_seconds = self.keep_alive(accept_length, paid)
        self.leave_out()
        copies, self.copies, self.policies = self.copies, {}, {}
        self.depths = []
        trained = [
            Trained(group, one.steps, one.tokens, one.depths) for group, one in copies.items()
        ]
        replays = [replay.metrics() for replay in self.replays.values()] if copies else []
        report = reports.exchanged(self.job, trained, len(self.broken), replays)
        if report.is_failed:
            self.failures += 1
            if self.failures >= FAILURES and not self.is_stopped:
                self.is_stopped = True
                log.warning(
                    "idle training failed in %d steps in a row: there is no more of it",
                    self.failures,
                )
            return state, report.training | {"drafter/failures": float(self.failures)}
        if out := [group for group in sorted(self.broken) if self.broke[group] == FAILURES]:
            log.warning("data groups %s are left out of idle training from here on", out)
        self.failures, self.depths = 0, report.depths
        self.known_depths = report.depths or self.known_depths
        if report.seen:
            after, steps = report.depths[0], report.seen
            self.budget = self.budget.after(after, steps=max(one.steps for one in steps))
        if not sum(report.tokens):
            return state, report.metrics
        ordered = [copies[group].state for group in self.groups]
        return merge.merged(ordered, report.tokens, self.recipe), report.metrics
