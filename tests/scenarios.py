"""Scenarios for tests of tuners and scheduling: machines with a cost function, drafters, long tails, a noisy clock."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from tlt_jax.distributed.board import LocalBoard
from tlt_jax.rollout.executables.programs import Decode, Program
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.rollout.scheduler.queue import WorkQueue
from tlt_jax.rollout.scheduler.state import GroupContext, Needs
from tlt_jax.rollout.selection import Selecting
from tlt_jax.simulate import decoding
from tlt_jax.simulate.cost_table import CostTable
from tlt_jax.simulate.decoding import Acceptance, Lengths
from tlt_jax.simulate.simulator import (
    SimulatedPrograms,
    SimulatedState,
    VirtualClock,
    noiseless_seconds,
)
from tlt_jax.simulate.trees import Trees, counted, drafts
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import LEARNED, MERGED, NGRAM, PLAIN, Strategy
from tlt_jax.tuner.interface import Choice, Tuner, unchanged

ROUNDS = 2000  # simulated rounds of each strategy in a scenario
SLOWER = 1.6  # largest slowdown of a first run or a stall

VOCAB = 1 << 15  # tokens are hashes below this
Costs = Callable[[Program, int, float], float]  # program, its rounds, its start time -> seconds
Compiling = Callable[[Program], float]  # program -> the host's seconds to compile it


def table(rank: np.ndarray, sibling: np.ndarray, arm: Strategy) -> np.ndarray:
    """hits[D, N, K] of rounds with these ranks: the counts of accepted nodes."""
    row, depth = np.nonzero(rank >= 0)
    return counted(depth, rank[row, depth], sibling[row, depth], np.ones(len(row)), arm)


def gpu(batch: int, slots: int, arm: Strategy) -> float:
    """Milliseconds of a round that is memory-bound up to 200 nodes."""
    verify = 20 * max(1.0, batch * arm.nodes / 200) + batch * slots / 4096
    return (
        verify + arm.drafted_levels * (0.7 + batch * arm.topk / 400) + draft_overhead(arm, 0.8, 0.1)
    )


def cpu(batch: int, slots: int, arm: Strategy) -> float:
    """Milliseconds of a round that is compute-bound from a few nodes on."""
    verify = 1.2 + 0.12 * (batch * arm.nodes) ** 0.95 + batch * slots / 65536
    return (
        verify
        + arm.drafted_levels * (0.15 + 0.012 * batch * arm.topk)
        + draft_overhead(arm, 0.2, 0.05)
    )


def draft_overhead(arm: Strategy, network: float, text: float) -> float:
    """Milliseconds of a draft besides its levels: of the network, of the n-gram search, or of both."""
    search = text if arm.drafter in (NGRAM, MERGED) else 0.0
    return search + (network if arm.drafted_levels else 0.0)


@dataclass
class Scenario:
    """A machine and a drafter, whose `quality` may change between rollouts.

    `drafters`: quality and agreement of the drafters that arms name. `noise`, `stalls`, `bursts`, `disturbed` (the share
    of turns that take 2 to 4 times as long) and `phases` (seconds of load 3 and of none, in turn) perturb the clock.
    """

    cost: Callable[[int, int, Strategy], float]
    quality: float
    agreement: float = 1.0
    seed: int = 0
    noise: float = 0.04
    stalls: float = 0.02
    bursts: bool = False
    disturbed: float = 0.0
    phases: float = 0.0
    drafters: dict[str, tuple[float, float]] = field(default_factory=dict)
    library: dict = field(default_factory=dict)

    def trees(self, arm: Strategy) -> Trees:
        """A sample of ROUNDS rounds of the arm, from which its rounds are drawn."""
        qualities = self.drafters.get(arm.drafter, (self.quality, self.agreement))
        key = (arm, *qualities)
        if key not in self.library:
            self.library[key] = drafts(self.seed, ROUNDS, *qualities, arm)
        return self.library[key]

    def levels(self, drafter: str, depth: int = 8) -> list[float]:
        """The probability that this drafter's best draft is accepted to each depth, given the depth before."""
        held = (self.trees(Strategy(depth, 1, depth + 1, drafter)).rank >= 0).mean(axis=0)
        return (held / np.maximum([1.0, *held[:-1]], 1e-9)).tolist()

    def accepted(self, arm: Strategy) -> float:
        """Mean accepted tokens of a round."""
        return 0.0 if arm == PLAIN else float(self.trees(arm).accepted.mean())

    def speed(self, batch: int, slots: int, arm: Strategy) -> float:
        """Tokens per second of a live row, without noise."""
        return (1 + self.accepted(arm)) / self.cost(batch, slots, arm) * 1e3

    def best(self, batch: int, slots: int, arms: Sequence[Strategy]) -> Strategy:
        """The fastest arm."""
        return max((PLAIN, *arms), key=lambda arm: self.speed(batch, slots, arm))

    def with_noise(self, random: np.random.Generator, seconds: float, is_first: bool) -> float:
        """Seconds with jitter, and with a slowdown for first runs and stalls."""
        seconds *= random.lognormal(0, self.noise)
        if is_first or random.random() < self.stalls:
            seconds *= random.uniform(1.0, SLOWER)
        if self.disturbed and random.random() < self.disturbed:
            seconds *= random.uniform(2.0, 4.0)
        return seconds

    def load(self, at: float) -> int:
        """The slowdown at this second by other load, which comes in bursts or phases."""
        if self.phases and int(at / self.phases) % 2:
            return 3
        return 2 if self.bursts and int(at / 4) % 3 == 2 else 1

    def taken(self, at: float) -> float:
        """The share of the processors that others take at this second."""
        return 1 - 1 / self.load(at)


def request(
    prompts: Sequence[int],
    samples: int,
    max_new_tokens: int,
    *,
    seed: int,
    capacity: int,
    rounds: int = 16,
    in_flight: int = 2,
) -> RolloutRequest:
    """A request for answers to prompts with these numbers of tokens; a sequence's key is its seed and uid."""
    uids = np.arange(len(prompts) * samples, dtype=np.uint32)
    return RolloutRequest(
        prompts=tuple(np.zeros(tokens, np.int32) for tokens in prompts),
        samples=samples,
        max_new_tokens=(max_new_tokens,) * len(prompts),
        keys=np.stack([np.full_like(uids, seed), uids], axis=1),
        params=DecodingParams(),
        rounds=rounds,
        in_flight=in_flight,
        capacity=capacity,
    )


def lengths(random: np.random.Generator, count: int, longest: int = 2000) -> np.ndarray:
    """Heavy-tailed answer lengths."""
    return np.clip(random.lognormal(5.3, 0.9, count), 8, longest).astype(int)


def oracle(
    scenario: Scenario,
    arms: Sequence[Strategy],
    allowed: Callable[[int], Sequence[Strategy]] | None = None,
) -> Tuner:
    """A tuner that knows every cost and hit rate."""

    def choose(state, live, batch, slots, compiled=()):
        known = compiled or (allowed(batch) if allowed else arms)
        arm = scenario.best(batch, slots, [arm for arm in known if arm != PLAIN])
        return state, Choice(arm, live * scenario.speed(batch, slots, arm), "oracle")

    def predict(state, cells):
        speeds = [math.log(scenario.speed(*cell)) for cell in cells]
        return np.array(speeds), np.zeros(len(cells))

    return Tuner(
        dict, choose, unchanged, unchanged, lambda *_: arms, predict, has_fixed_policy=False
    )


def no_compile_time(program: Program) -> float:
    """Compiling takes no time."""
    return 0.0


class ScenarioPrograms(SimulatedPrograms):
    """Programs with the seconds of `costs`, which write tokens.

    The first `get` of a program takes the host its seconds of `compiling`, recorded in `compiled`; `began`: at which second.
    """

    def __init__(
        self,
        costs: Costs,
        acceptance: Acceptance,
        lengths: Lengths,
        clock: VirtualClock,
        compiling: Compiling = no_compile_time,
    ):
        super().__init__(CostTable(()), acceptance, lengths, clock)
        self.costs, self.compiling, self.compiled, self.began = costs, compiling, {}, {}

    def decode(self, program: Decode, state: SimulatedState, *rest: Any) -> tuple:
        after, pending = super().decode(program, state, *rest)
        places = state.rows.tokens[:, None] + np.arange(pending.report.tokens.shape[1])
        hashes = decoding.hashed(*state.rows.keys.T[..., None], places)
        tokens = (hashes % np.uint64(VOCAB)).astype(np.int32)
        report = pending.report.replace(tokens=tokens, logprobs=np.zeros(tokens.shape, np.float32))
        return after, replace(pending, report=report)

    def get(self, program: Program) -> Callable[..., Any]:
        if program not in self.compiled:
            self.compiled[program], self.began[program] = self.compiling(program), self.clock.now()
            self.clock.sleep(self.compiled[program])
        return partial(self.kinds[type(program)], program)

    @property
    def version(self) -> int:
        return len(self.compiled)

    def compile_cost(self, program: Program) -> float:
        return 0.0 if program in self.compiled else self.compiling(program)

    def prepare(self, programs: Iterable[Program]) -> None:
        for program in programs:
            self.get(program)

    def seconds(self, program: Program, rounds: int, start: float, held: float) -> float:
        return self.costs(program, rounds, start)


class ScenarioCosts:
    """The costs of a scenario with the noise of its clock; each group has its own noise. `quiet`: their sum without it."""

    def __init__(self, scenario: Scenario):
        self.scenario, self.random, self.seen, self.quiet = scenario, {}, set(), 0.0

    def __call__(self, program: Program, rounds: int, at: float) -> float:
        is_first, group = program not in self.seen, program.group
        self.seen.add(program)
        seed = [self.scenario.seed, group]
        random = self.random.setdefault(group, np.random.default_rng(seed))
        seconds = noiseless_seconds(self.scenario.cost, program, rounds)
        self.quiet += seconds
        return self.scenario.with_noise(random, seconds, is_first) * self.scenario.load(at)


class LoadedClock(VirtualClock):
    """The virtual clock of a scenario's machine."""

    def __init__(self, scenario: Scenario):
        super().__init__()
        self.scenario = scenario

    def taken(self) -> float:
        return self.scenario.taken(self.time)


def long_tailed(longest: int) -> Lengths:
    """Heavy-tailed answer lengths, as `lengths` draws them."""
    return lambda key: int(lengths(np.random.default_rng(key.tolist()), 1, longest)[0])


def in_scenario(
    scenario: Scenario, lengths: Lengths, compiling: Compiling = no_compile_time
) -> ScenarioPrograms:
    """Programs with the costs and drafts of a scenario, on a new virtual clock."""
    return ScenarioPrograms(
        ScenarioCosts(scenario), scenario.trees, lengths, LoadedClock(scenario), compiling
    )


def contexts(
    programs: SimulatedPrograms,
    request: RolloutRequest,
    planner: Planner,
    groups: int = 1,
    catches_up: bool = True,
    selecting: Selecting | None = None,
) -> list[GroupContext]:
    """Groups that share one queue, up to the bound of `selecting`, and one planner; the drafter NGRAM never catches up."""
    bound = (lambda: selecting.bound) if selecting else None
    queue = WorkQueue(LocalBoard(), "simulator", len(request.prompts), request.samples, bound)
    learned = Needs(catches_up=catches_up)
    needs = {"": learned, NGRAM: Needs(), LEARNED: learned, MERGED: learned}
    fixed = {"weights": Weights((), ()), "request": request, "queue": queue, "planner": planner}
    return [GroupContext(group, programs, **fixed, needs=needs) for group in range(groups)]
