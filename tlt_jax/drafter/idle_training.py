"""Idle data groups train the drafter on their finished sequences during the rollout.

The adaptive drafter of TLT (arXiv 2511.16665, section 4): every group trains a local copy without collectives across
groups; the copies are merged before the policy update. Training changes no answer and no weight of the policy.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import numpy as np

from tlt_jax.distributed.job import Job
from tlt_jax.drafter import reports, update
from tlt_jax.drafter.budget import Budget
from tlt_jax.drafter.interface import Copies, Windows
from tlt_jax.drafter.recipe import DrafterState
from tlt_jax.drafter.reports import Trained
from tlt_jax.rollout.events import Look
from tlt_jax.rollout.executables.protocols import Program, Programs
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.driver import WALL, Clock
from tlt_jax.spec_decode.decode_state import Weights

# GAIN: the share of the remaining rollout time that a trained drafter is assumed to save, before any measurement. PROGRAMS:
# compile cost of training and using it (micro-step, harvest, catch-up, chunks), in units of a micro-step's.
GAIN, PROGRAMS = 0.15, 3.0
EVALUATE_EVERY = 16  # micro-steps between evaluations on held-out windows
LEAST_TOKENS, MOST_TOKENS = 128, 8192  # limits of the tokens of a micro-step
MICRO_STEP_S = 0.25  # longest micro-step in seconds: RL work may have to wait for it
FIRST_TOKENS = 256  # of a run's first micro-step; its seconds determine the size of the later ones
# The accept length counts as fallen when its mean over RECENT steps is below FALLEN times the best such mean, which decays
# by MEMORY a step. With few answers, the accept length of a single step varies by a tenth.
FALLEN, MEMORY, RECENT = 0.9, 0.99, 8
# A group is left out after its work raised in this many RL steps in a row; all idle training stops after as many steps in a
# row in which groups failed and none trained.
FAILURES = 2
FEW_PAID = 8  # fewest micro-steps to run in `paid` seconds: the first of each step only evaluates

log = logging.getLogger(__name__)


@dataclass
class Copy:
    """A data group's copy of the drafter in one RL step, and the counts of its training; see Trained."""

    state: DrafterState
    pieces: int = 0
    draws: int = 0
    steps: int = 0
    tokens: int = 0
    depths: list[float] = field(default_factory=list)
    piece: Program | None = None  # the last one dispatched
    metrics: dict[str, Any] | None = None  # of the last piece
    learns: bool = False  # whether the last piece trains; else it evaluates


class IdleTraining:
    """Drafter training as idle work; implements rollout.idle.driver.IdleWork.

    Call `begin` before each rollout and `end` after it. All state but the drafter's is a cache: a restart loses replay,
    copies, sizes and compile costs, which costs speed only. `replays`: of the data groups of this process.
    `piece(group, rows, tokens)` returns the program of a micro-step (micro_step.MicroStep). `starting()`: seconds to
    recompile the rollout's programs with features for the drafter. `job` makes all processes decide alike. With
    `follows` and no floor, training starts only by `activate`: once drafting with the drafter that the policy update
    trains pays off. Without `is_idle_used` no group trains when idle.
    """

    kind = "train"

    def __init__(
        self,
        on_devices: Copies,
        replays: Mapping[int, Windows],
        programs: Programs,
        piece: Callable[[int, int, int], Program],
        bound: float = MICRO_STEP_S,
        least_idle: float = 0.0,
        floor: int = 0,
        rescue: int = 0,
        starting: Callable[[], float] = lambda: 0.0,
        job: Job | None = None,
        follows: bool = False,
        is_idle_used: bool = True,
        clock: Clock = WALL,
    ):
        self.on_devices, self.replays, self.job = on_devices, dict(replays), job or Job()
        self.programs, self.make_piece, self.clock = programs, piece, clock
        self.bound, self.least_idle, self.floor, self.rescue = bound, least_idle, floor, rescue
        self.starting, self.follows, self.is_idle_used = starting, follows, is_idle_used
        self.accept_lengths: deque[float] = deque(maxlen=RECENT)
        self.best_accept_length = 0.0
        self.seconds = self.idle = (
            0.0  # of the previous rollout: all of it, and those its idlest group was idle
        )
        # Held-out acceptance of the drafter by depth, given the depths before.
        self.depths: list[float] = []  # measured in this step
        self.known_depths: list[float] = []  # the last measurement
        self.tokens = self.wanted = (
            FIRST_TOKENS  # of a micro-step: in this step, and from the next step on
        )
        self.budget = Budget()
        self.copies: dict[int, Copy] = {}
        self.policies: dict[int, Any] = {}
        self.broken: set[int] = set()  # groups whose work raised in this step
        self.broke: dict[int, int] = {}  # group -> steps in a row in which its work raised
        self.failures = 0  # steps in a row in which groups failed and none trained
        self.pays_off = self.is_stopped = False
        self.micro_step_seconds = 0.0  # of the latest micro-step after a rollout
        self.paid_seconds = 0.0  # of the micro-steps after this rollout

    def background_work(self) -> dict[str, Any]:
        """The arguments of Engine.run that make idle groups train."""
        if not self.is_active or not self.is_idle_used:
            return {}
        return {
            "harvesters": self.replays,
            "listeners": [self.listen],
            "idle_work": self,
            "least_idle": self.least_idle,
        }

    def listen(self, look: Look) -> None:
        """Tells the replay of a look's group."""
        if look.group in self.replays:
            self.replays[look.group].listen(look)

    @property
    def is_active(self) -> bool:
        """Whether training pays off, and has not failed too often."""
        return self.pays_off and not self.is_stopped

    def activate(self) -> None:
        """From the next rollout on, the drafter drafts and idle groups train it."""
        self.pays_off = True

    def begin(
        self,
        step: int,
        request: RolloutRequest,
        weights: Mapping[int, Weights],
        state: DrafterState | None,
    ) -> None:
        """Prepares a rollout that decodes with these weights of every group.

        The programs of its micro-steps are compiled here and nowhere else.
        """
        self.copies, self.broken = {}, set()
        if not self.is_active or not self.is_idle_used:
            return
        self.resize(self.seconds * (request.rollouts_left + 1))
        for replay in self.replays.values():
            replay.begin(step, request)
        self.policies = {group: one.target for group, one in weights.items()}
        self.copies = {group: Copy(part) for group, part in self.on_devices.spread(state).items()}

    def is_worth(self, seconds_left: float, start: float = 0.0) -> bool:
        """Whether a drafter's expected payback exceeds `start` and the compile cost of training and using it, in seconds."""
        compile_cost = self.programs.compile_cost(self.piece(min(self.replays), self.wanted))
        return GAIN * seconds_left > start + PROGRAMS * compile_cost

    def pays(self, seconds_left: float) -> bool:
        """Whether training pays off in the remaining `seconds_left` of rollouts; with a floor it always does.

        Checked after every step until it does: the rest of the run must be long enough, and a group idle for more than
        `least_idle` seconds.
        """
        if seconds_left <= 0:
            return False
        is_idle = self.idle > self.least_idle
        return self.floor > 0 or (is_idle and self.is_worth(seconds_left, self.starting()))

    def resize(self, seconds_left: float) -> None:
        """Compiles the micro-steps of the wanted size and uses them once compiled; keeps the size if that would not pay off."""
        pieces = [self.piece(group, self.wanted) for group in self.replays]
        if self.tokens != self.wanted and not self.is_worth(seconds_left):
            self.wanted = self.tokens
            return
        self.programs.prepare(pieces)
        if not any(map(self.programs.compile_cost, pieces)):
            self.tokens = self.wanted

    def piece(self, group: int, tokens: int) -> Program:
        """The program of a group's micro-steps of `tokens` tokens."""
        return self.make_piece(group, 1, tokens)

    def dispatch(self, group: int) -> bool:
        """Dispatches the group's next micro-step or its evaluation on held-out windows; False when it has nothing to do."""
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
        """Whether a group does no work in this step, or in the rest of the run."""
        return group in self.broken or self.broke.get(group, 0) >= FAILURES

    def is_ready(self, group: int) -> bool:
        """Whether the group's piece is done."""
        return self.copies[group].metrics["loss"].is_ready()

    def done(self, group: int, least: float, most: float) -> None:
        """Counts a piece that is done and took between `least` and `most` seconds."""
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
        """Tokens of the next micro-steps, which are to stay below the bound; one of `tokens` took `least` to `most` seconds.

        Every size is another program: it changes by powers of two, and grows only when less than a quarter of the bound
        is used. When the host polled rarely, `least` and `most` are far apart, and the size stays.
        """
        while least > self.bound and tokens > LEAST_TOKENS:
            tokens, least, most = tokens // 2, least / 2, most / 2
        while most < self.bound / 4 and tokens < MOST_TOKENS:
            tokens, most = tokens * 2, most * 2
        return tokens

    def failed(self, group: int, error: Exception) -> None:
        """A piece raised: the group's training in this step is lost, that of the other groups counts."""
        level = logging.DEBUG if self.broken else logging.WARNING  # one line a step
        kind = type(error).__name__
        log.log(level, "idle training of group %d failed in this step: %s: %s", group, kind, error)
        self.broken.add(group)

    def keep_alive(self, accept_length: float, seconds: float = 0.0) -> float:
        """Runs the micro-steps due after a rollout with this accept length, and returns the seconds that they took.

        Every group makes at least `floor`, at least `rescue` when the accept length fell and no group of this process
        trained, and as many as fit in `seconds`, if FEW_PAID do. All groups run concurrently.
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
            start, dispatched = self.clock.now(), []
            has_time = spent + self.micro_step_seconds <= seconds and seconds > 0
            for group, copy in self.copies.items():
                if (copy.steps < least or has_time) and self.tried(
                    group, partial(self.dispatch, group)
                ):
                    dispatched.append(group)
            if not dispatched:
                return spent
            for group in dispatched:
                metrics = self.copies[group].metrics
                self.tried(group, partial(jax.block_until_ready, metrics["loss"]))
                taken = self.clock.now() - start
                self.tried(group, partial(self.done, group, taken, taken))
            self.micro_step_seconds = self.clock.now() - start
            spent += self.micro_step_seconds

    def tried(self, group: int, work: Callable[[], Any]) -> Any:
        """The result of `work`; None when it raises: idle work never ends a run."""
        if group in self.broken:
            return None
        try:
            return work()
        except Exception as error:
            self.failed(group, error)
            return None

    def leave_out(self) -> None:
        """Replaces the copy of every group that failed in this step by zeros that count as untrained.

        A failed program may have left the arrays of a copy invalid or deleted.
        """
        for group in list(self.copies):
            if group not in self.broken:
                if not self.is_left_out(group):
                    self.broke[group] = 0
            else:
                self.broke[group] = self.broke.get(group, 0) + 1
                self.copies[group] = Copy(self.on_devices.blank(group))

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

        `seconds`: of the rollout, without compiling; `idle`: seconds in which its idlest group had nothing to decode.
        `accept_length`: of its chunks that drafted; 0: none did. `state`: the drafter before the rollout; None: there is
        none yet. `rollouts_left`: rollouts of this length still to come. `paid`: seconds that groups may train after the
        rollout; `paid_seconds` then holds the seconds that they took.
        """
        self.seconds, self.idle = seconds, idle
        may_start = self.is_idle_used and not self.pays_off and (self.floor > 0 or not self.follows)
        if may_start and self.job.decided(self.pays(seconds * rollouts_left)):
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
                    "idle training failed in %d steps in a row and is stopped",
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
        states = {group: copy.state for group, copy in copies.items()}
        return self.on_devices.merged(states, report.tokens), report.metrics
