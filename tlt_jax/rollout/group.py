"""One data group's rollout as a machine: `advance(state) -> (state, events)`; it never waits and reads no clock."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from tlt_jax.rollout.buckets import admission_size, block_size, bucket_width
from tlt_jax.rollout.events import Decided, Decision, Dispatched, Emitted, Event, Retired
from tlt_jax.rollout.executables import Key, prefill_key
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.state import GroupContext, GroupState, GroupView, InFlight, Joining, Prefilled, Running
from tlt_jax.spec_decode.decode import RUNNING, Admission
from tlt_jax.spec_decode.strategy import PLAIN, Strategy, name

MAX_FLIGHTS = 8  # un-awaited programs of one group: more than about 30 on fake CPU devices abort the process


def advance(group: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """Reads what is ready, then dispatches what there is to do, at most `in_flight` chunks ahead of what was read."""
    events: list[Event] = []
    while state.flights and state.flights[0].marker.is_ready():
        state, more = retire(group, state)
        events += more
    while len(state.flights) < MAX_FLIGHTS:
        if state.decision is None:
            state, more = plan(group, state)
            if not more:
                break
        elif state.joining:
            state, more = join(group, state)
        elif state.behind > most_behind(group, state.decision.strategy):
            state, more = catch_up(group, state)
        else:
            state, more = decode(group, state)
        events += more
    return state, events


def retire(group: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """The oldest flight is read: its tokens become events, and ended sequences leave their rows."""
    flight, *flights = state.flights
    state = replace(state, flights=tuple(flights))
    if flight.report is None:
        return state, [Retired(flight.number, flight.kind)]
    report = jax.device_get(flight.report)
    tokens, rounds = int(report.counts.sum()), int(report.rounds)
    is_first = rounds > 0 and group.registry.is_first_run(flight.key)
    events: list[Event] = [Retired(flight.number, flight.kind, rounds, tokens, report.stats, is_first)]
    news = {}
    for row, uid in enumerate(flight.rows):
        count = int(report.counts[row])
        if uid is not None and count:
            news[uid] = Emitted(uid, report.tokens[row, :count], report.logprobs[row, :count], int(report.finish[row]))
    events += news.values()

    def settle(running: Running | None) -> Running | None:
        new = news.get(running.uid) if running else None
        if new is None:
            return running
        return replace(running, tokens=running.tokens + len(new.tokens)) if new.finish == RUNNING else None

    rows = tuple(settle(running) for running in state.rows)
    return replace(state, rows=rows, retired=state.retired + 1), events


def plan(group: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """Decides the next chunk, deals samples to free rows and moves the rows; no events when there is nothing to do now."""
    job = group.job
    ahead = sum(flight.kind == "decode" for flight in state.flights)
    if ahead >= job.in_flight:
        return state, []
    state, starts = deal(group, state)
    may_live = any(running and running.tokens + ahead * job.rounds < running.limit for running in state.rows)
    if not starts and not may_live:
        return state, []
    sources = blocks(job, state, starts)
    live = [running for running in state.rows if running]
    new = [begin(job, prompt, sample) for prompt, sample in starts]
    most = sum(flight.most for flight in state.flights)
    view = GroupView(
        group.index,
        state.retired,
        len(live) + len(new),
        tokens=max([min(one.tokens + most, one.limit) for one in live] + [one.tokens for one in new]),
        limit=max(running.limit for running in live + new),
        widest=max((source.sizes[1] for source in sources), default=0),
        rounds=job.rounds,
        batch=state.batch,
        slots=state.slots,
        waiting=not state.exhausted,
    )
    decision = replace(available(group, view, group.decide(view)), joining=tuple(running.uid for running in new))
    state = move(group, replace(state, decision=decision), decision)
    free = [row for row, running in enumerate(state.rows) if running is None][: len(new)]
    rows, seat = list(state.rows), {}
    for row, running in zip(free, new, strict=True):
        rows[row], seat[running.uid] = running, row
    joining = tuple(
        Joining(source, tuple((seat[uid], uid) for uid in seat if uid // job.samples in source.rows))
        for source in sources
    )
    return replace(state, rows=tuple(rows), joining=joining), [Decided(decision)]


def available(group: GroupContext, view: GroupView, wanted: Decision) -> Decision:
    """The decision, or while its programs are compiled in the background, the nearest one whose programs are there.

    Without any it is the decision itself, and is waited for.
    """
    stays = replace(wanted, batch=view.batch, slots=view.slots)
    options = [wanted, replace(wanted, strategy=PLAIN)]
    for option in (stays, replace(stays, strategy=PLAIN)):
        if view.live <= view.batch and view.need(option.strategy, option.rounds) <= view.slots:
            options.append(option)
    ready = [option for option in options if all(map(group.registry.has, programs(group, view, option)))]
    if all(map(group.registry.is_ready, programs(group, view, wanted))) or not ready:
        return wanted
    return replace(ready[0], predicted=math.nan, reason=f"{wanted.reason}, while {name(wanted.strategy)} is compiled")


def programs(group: GroupContext, view: GroupView, decision: Decision) -> list[Key]:
    """Keys of what a decision needs: the chunk, and the move to another number of rows or slots."""
    job, sizes = group.job, (decision.batch, decision.slots)
    keys = [key_of(group, decision, "chunk", sizes=(job.rounds,), strategy=decision.strategy, rules=job.rules)]
    if most_behind(group, decision.strategy) < math.inf:
        keys.append(key_of(group, decision, "catch_up"))
    if view.batch and sizes != (view.batch, view.slots):
        keys.append(key_of(group, view, "resize", sizes=sizes))
    return keys


def begin(job: RolloutRequest, prompt: int, sample: int) -> Running:
    """A sequence that has its prompt only."""
    length = len(job.prompts[prompt])
    return Running(prompt * job.samples + sample, length, length + job.max_new_tokens[prompt])


def deal(group: GroupContext, state: GroupState) -> tuple[GroupState, list[tuple[int, int]]]:
    """(prompt, sample) for every free row: samples of prompts that are prefilled here, whole new prompts, then stolen ones."""
    if state.exhausted:
        return state, []
    dealer, starts = group.dealer, []
    free = group.job.capacity - sum(running is not None for running in state.rows)
    for prompt in [prompt for held in state.held for prompt in held.rows]:
        if free > len(starts):
            starts += [(prompt, sample) for sample in dealer.take(prompt, free - len(starts))]
    while free > len(starts) and (prompt := dealer.claim()) is not None:
        starts += [(prompt, sample) for sample in dealer.take(prompt, free - len(starts))]
    exhausted = False
    while free > len(starts) and not exhausted:
        stolen = dealer.steal()
        exhausted = stolen is None
        starts += [stolen] if stolen else []
    return replace(state, exhausted=exhausted), starts


def blocks(job: RolloutRequest, state: GroupState, starts: Iterable[tuple[int, int]]) -> list[Prefilled]:
    """The prefills that these samples come from: those held here, and new ones of few different shapes, longest first."""
    prompts = list(dict.fromkeys(prompt for prompt, _ in starts))
    sources = [held for held in state.held if any(prompt in held.rows for prompt in prompts)]
    new = [prompt for prompt in prompts if not any(prompt in held.rows for held in sources)]
    new = sorted(new, key=lambda prompt: len(job.prompts[prompt]), reverse=True)  # so that few are widened by a longer one
    while new:
        width = bucket_width(len(job.prompts[new[0]]))
        size = block_size(len(new), width)
        sources.append(Prefilled({prompt: row for row, prompt in enumerate(new[:size])}, (size, width), None))
        new = new[size:]
    return sources


def move(group: GroupContext, state: GroupState, decision: Decision) -> GroupState:
    """The state with the decided numbers of rows and slots; live sequences come first."""
    if state.device is not None and (state.batch, state.slots) == (decision.batch, decision.slots):
        return state
    keep = [row for row, running in enumerate(state.rows) if running]
    if keep:
        key = key_of(group, state, "resize", sizes=(decision.batch, decision.slots))
        rows = np.full(decision.batch, -1, np.int32)
        rows[: len(keep)] = keep
        device = group.registry.get(key)(state.device, rows)
    else:
        state = replace(state, device=None)  # its memory is free before the new one's is taken
        device = group.registry.get(key_of(group, decision, "start"))()
    rows = [state.rows[row] for row in keep] + [None] * (decision.batch - len(keep))
    return replace(
        state, device=device, batch=decision.batch, slots=decision.slots, rows=tuple(rows), is_moved=True
    )


def join(group: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """The next joining samples take their rows; their prompts are prefilled first when they are not yet."""
    joining, *rest = state.joining
    source, events = joining.source, []
    if source.values is None:
        source, marker = prefill(group, source)
        flight = InFlight(state.dispatched, "prefill", marker)
        events = [Dispatched(flight.number, "prefill", *source.sizes)]
        state = queued(state, flight)
    program = group.registry.get(key_of(group, state, "admit", sizes=source.sizes))
    device = state.device
    for admission in admissions(group, state, source, joining):
        device = program(device, source.values, admission)
    others = [held for held in state.held if held.rows != source.rows]
    started = {prompt: group.dealer.started(prompt) for held in (*others, source) for prompt in held.rows}
    held = tuple(one for one in (*others, source) if any(started[prompt] < group.job.samples for prompt in one.rows))
    behind = max(state.behind, source.sizes[1])
    return replace(state, device=device, joining=tuple(rest), held=held, behind=behind), events


def prefill(group: GroupContext, source: Prefilled) -> tuple[Prefilled, jax.Array]:
    """The prefill with its values, and an array that is ready when they are."""
    size, width = source.sizes
    tokens, lengths = np.zeros((size, width), np.int32), np.zeros(size, np.int32)
    for prompt, row in source.rows.items():
        body = group.job.prompts[prompt][:-1]  # the last token is the first root
        tokens[row, : len(body)], lengths[row] = body, len(body)
    values, marker = group.registry.get(prefill_key(group.index, size, width))(group.weights.target, tokens, lengths)
    return replace(source, values=values), marker


def admissions(group: GroupContext, state: GroupState, source: Prefilled, joining: Joining) -> Iterator[Admission]:
    """The host arrays that put sequences into their rows, some at a time; what is left over goes to rows past the last."""
    job, remembered = group.job, group.registry.remembered(group.index, source.sizes[1])
    size = admission_size(state.batch)
    for first in range(0, len(joining.rows), size):
        small = {name: np.zeros(size, np.int32) for name in ("source", "roots", "lengths", "limits")}
        keys, history = np.zeros((size, 2), np.uint32), np.zeros((size, remembered), np.int32)
        rows = state.batch + np.arange(size, dtype=np.int32)
        for at, (row, uid) in enumerate(joining.rows[first : first + size]):
            index = uid // job.samples
            prompt = job.prompts[index]
            rows[at], small["source"][at] = row, source.rows[index]
            small["roots"][at], small["lengths"][at] = prompt[-1], len(prompt) - 1
            small["limits"][at] = len(prompt) + job.max_new_tokens[index]
            keys[at] = job.keys[uid]
            history[at, : len(prompt)] = prompt[:remembered]
        yield Admission(rows=rows, keys=keys, history=history, **small)


def most_behind(group: GroupContext, strategy: Strategy) -> float:
    """How many tokens the drafter may lack when a chunk of this strategy begins."""
    catches_up = strategy != PLAIN and group.registry.drafters[group.index].catch_up is not None
    return strategy.path if catches_up else math.inf


def catch_up(group: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """The drafter learns of the tokens that it lacks for the decided chunk."""
    missing = state.decision.strategy.path
    device, marker = group.registry.get(key_of(group, state, "catch_up"))(state.device, group.weights, np.int32(missing))
    flight = InFlight(state.dispatched, "catch_up", marker)
    event = Dispatched(flight.number, "catch_up", state.batch, state.slots)
    return queued(replace(state, device=device, behind=missing), flight), [event]


def decode(group: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """The decided chunk is dispatched."""
    decision = state.decision
    key = key_of(group, state, "chunk", sizes=(group.job.rounds,), strategy=decision.strategy, rules=group.job.rules)
    uids = tuple(running.uid if running else None for running in state.rows)
    program, bounds = group.registry.get(key), np.array([decision.floor, decision.rounds], np.int32)
    guide = () if decision.strategy == PLAIN else group.guide(uids)
    device, report = program(state.device, group.weights, guide, bounds)
    most = min(decision.rounds, group.job.rounds) * decision.strategy.path
    flight = InFlight(state.dispatched, "decode", report.counts, uids, report, most, key)
    expected = (decision.strategy, decision.predicted, decision.reason, state.is_moved)
    event = Dispatched(flight.number, "decode", state.batch, state.slots, *expected)
    behind = state.behind + most if decision.strategy == PLAIN else decision.strategy.path
    state = replace(state, device=device, decision=None, behind=behind, is_moved=False)
    return queued(state, flight), [event]


def queued(state: GroupState, flight: InFlight) -> GroupState:
    """The state with one program more on its way."""
    return replace(state, flights=(*state.flights, flight), dispatched=state.dispatched + 1)


def key_of(group: GroupContext, shape: GroupState | Decision | GroupView, kind: str, **rest: Any) -> Key:
    """Key of one of this group's programs on a state of this shape."""
    return Key(kind, group.index, shape.batch, shape.slots, tail=group.job.rules.tail, **rest)
