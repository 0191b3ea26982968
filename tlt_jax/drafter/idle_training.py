"""Idle data groups train the drafter on their finished sequences during the rollout.

The adaptive drafter of TLT (arXiv 2511.16665, section 4): every group trains a local copy without collectives across
groups; the copies are merged before the policy update. Training changes no answer and no weight of the policy.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import jax
import numpy as np

from tlt_jax.distributed.job import Job
from tlt_jax.drafter import update
from tlt_jax.drafter.investment import Budget
from tlt_jax.drafter.recipe import DrafterState
from tlt_jax.drafter.replay import Replay
from tlt_jax.drafter.update import Copies
from tlt_jax.rollout.executables.programs import Program
from tlt_jax.rollout.recorder import Poll
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.driver import WALL, Clock
from tlt_jax.spec_decode.decode_state import Weights

if TYPE_CHECKING:
    from tlt_jax.rollout.executables.compilation import Executables

LEAST_IDLE_S = 0.5  # shortest expected idle time in which a group trains
COMPILING = (
    0.05  # share of the rest of the run's rollouts that compiling micro-steps of a size may take
)
EVALUATE_EVERY = 16  # micro-steps between evaluations on held-out windows
LEAST_TOKENS, MOST_TOKENS = 128, 8192  # limits of the tokens of a micro-step
MICRO_STEP_S = 0.25  # longest micro-step in seconds: RL work may have to wait for it
FIRST_TOKENS = 256  # of a run's first micro-step; its seconds determine the size of the later ones
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
    `piece(group, tokens)` returns the program of a micro-step (update.MicroStep). `job` makes all processes decide
    alike. Training starts by `activate`. Without `is_idle_used` no group trains when idle; `must_pay`: see `resize`.
    """

    kind = "train"

    def __init__(
        self,
        on_devices: Copies,
        replays: Mapping[int, Replay],
        programs: Executables,
        piece: Callable[[int, int], Program],
        bound: float = MICRO_STEP_S,
        job: Job | None = None,
        is_idle_used: bool = True,
        clock: Clock = WALL,
        must_pay: bool = False,
    ):
        self.on_devices, self.replays, self.job = on_devices, dict(replays), job or Job()
        self.programs, self.piece, self.clock = programs, piece, clock
        self.bound, self.is_idle_used, self.must_pay = bound, is_idle_used, must_pay
        self.seconds = 0.0  # of a rollout
        # Held-out acceptance of the drafter by depth, given the depths before.
        self.depths: list[float] = []  # measured in this step
        self.tokens = self.wanted = (
            FIRST_TOKENS  # of a micro-step: in this step, and from the next step on
        )
        self.budget = Budget()
        self.copies: dict[int, Copy] = {}
        self.policies: dict[int, Any] = {}
        self.broken: set[int] = set()  # groups whose work raised in this step
        self.broke: dict[int, int] = {}  # group -> steps in a row in which its work raised
        self.failures = 0  # steps in a row in which groups failed and none trained
        self.pays_off = self.is_stopped = self.is_prepared = False
        self.micro_step_seconds = 0.0  # of the latest micro-step after a rollout
        self.paid_seconds = 0.0  # of the micro-steps after this rollout

    def background_work(self) -> dict[str, Any]:
        """The arguments of Engine.run that make idle groups train; none before the first micro-steps pay."""
        if not (self.is_active and self.is_idle_used and self.is_prepared):
            return {}
        return {
            "harvesters": self.replays,
            "listeners": [self.listen],
            "idle_work": self,
            "least_idle": LEAST_IDLE_S,
        }

    def listen(self, poll: Poll) -> None:
        """Tells the replay of a poll's group."""
        if poll.group in self.replays:
            self.replays[poll.group].listen(poll)

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
        if not self.is_prepared:
            return
        for replay in self.replays.values():
            replay.begin(step, request)
        self.policies = {group: one.target for group, one in weights.items()}
        self.copies = {group: Copy(part) for group, part in self.on_devices.spread(state).items()}

    def resize(self, seconds_left: float) -> None:
        """Compiles the micro-steps of the wanted size and uses them once compiled, if they cost little of the seconds left.

        Else the size stays. With `must_pay` the first size has to cost little too: nothing trains in a run's first rollout,
        where no seconds are known, or in a short run.
        """
        pieces = [self.piece(group, self.wanted) for group in self.replays]
        compile_cost = self.programs.compile_cost(pieces[0])
        is_cheap = not compile_cost or compile_cost < COMPILING * seconds_left
        if self.must_pay and not self.is_prepared:
            is_cheap = self.job.decided(is_cheap)  # the copies of all processes are merged, or none
        elif self.tokens == self.wanted:
            is_cheap = True
        if not is_cheap:
            self.wanted = self.tokens
            return
        self.programs.prepare(pieces)
        self.is_prepared = True
        if not any(map(self.programs.compile_cost, pieces)):
            self.tokens = self.wanted

    def dispatch(self, group: int) -> bool:
        """Dispatches the group's next micro-step or its evaluation on held-out windows; False when it has nothing to do."""
        copy, piece = self.copies.get(group), self.piece(group, self.tokens)
        if copy is None or self.is_left_out(group) or self.programs.compile_cost(piece):
            return False
        evaluates = copy.pieces % EVALUATE_EVERY == 0
        replay, batch = self.replays[group], None
        if evaluates:
            batch = replay.sample(0, self.tokens, held_out=True)
            evaluates = batch is not None  # else nothing is held out yet
        if batch is None and not self.budget.is_paused:
            batch = replay.sample(copy.draws, self.tokens)
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

    def keep_alive(self, seconds: float, least: int = 0) -> float:
        """Runs micro-steps after a rollout: as many as fit in `seconds`, if FEW_PAID do; returns the seconds that they took.

        Every group has at least `least` of this step. All groups run concurrently.
        """
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
        self, state: DrafterState | None, seconds: float, paid: float = 0.0
    ) -> tuple[DrafterState | None, dict[str, float]]:
        """The drafter after a rollout, merged from the groups' copies, and the metrics of its training.

        `seconds`: of the rollout, without compiling. `state`: the drafter before the rollout; None: there is none yet.
        `paid`: seconds that groups may train after the rollout; `paid_seconds` then holds the seconds that they took.
        """
        self.seconds, self.paid_seconds = seconds, self.keep_alive(paid)
        self.leave_out()
        copies, self.copies, self.policies = self.copies, {}, {}
        own = [Trained(group, one.steps, one.tokens, one.depths) for group, one in copies.items()]
        replays = [replay.metrics() for replay in self.replays.values()] if copies else []
        parts = self.job.gather(json.dumps((own, len(self.broken), replays)).encode())
        parts = [json.loads(part) for part in parts]
        trained = sorted(Trained(*one) for every, *_ in parts for one in every)
        broken, tokens = sum(count for _, count, _ in parts), [one.tokens for one in trained]
        metrics = {
            "drafter/steps": float(sum(one.steps for one in trained)),
            "drafter/tokens": float(sum(tokens)),
        }
        self.depths = []
        if broken and not sum(tokens):
            self.failures += 1
            if self.failures >= FAILURES and not self.is_stopped:
                self.is_stopped = True
                log.warning(
                    "idle training failed in %d steps in a row and is stopped",
                    self.failures,
                )
            return state, metrics | {"drafter/failures": float(self.failures)}
        if out := [group for group in sorted(self.broken) if self.broke[group] == FAILURES]:
            log.warning("data groups %s are left out of idle training from here on", out)
        self.failures = 0
        if seen := [one for one in trained if one.depths]:
            self.depths = np.mean([one.depths for one in seen], axis=0).tolist()
            self.budget = self.budget.after(self.depths[0], max(one.steps for one in seen))
            metrics["drafter/acceptance"] = self.depths[0]
        metrics |= summed([one for *_, many in parts for one in many])
        if broken:
            metrics["drafter/failed_groups"] = float(broken)
        if not sum(tokens):
            return state, metrics
        metrics["drafter/merge_weight_max"] = max(tokens) / sum(tokens)
        states = {group: copy.state for group, copy in copies.items()}
        return self.on_devices.merged(states, tokens), metrics


class Trained(NamedTuple):
    """The training of a data group's copy of the drafter: `steps` micro-steps on `tokens` tokens.

    `depths`: the latest acceptance on held-out windows at every depth; empty when not measured.
    """

    group: int
    steps: int
    tokens: int
    depths: list[float]


def summed(replays: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Sums of the metrics of replays; of their age the mean."""
    found = {}
    for name in {name for part in replays for name in part}:
        values = [part[name] for part in replays if name in part]
        found[name] = float(np.mean(values) if name.endswith("age") else np.sum(values))
    return found
