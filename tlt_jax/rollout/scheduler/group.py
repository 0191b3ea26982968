"""The rollout of one data group as a state machine: `advance(state) -> (state, events)`; it never waits and reads no clock."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

import jax
import numpy as np

from tlt_jax.rollout.dialogue import reply_width
from tlt_jax.rollout.executables.programs import (
    Admit,
    Append,
    CatchUp,
    Decode,
    Harvest,
    Prefill,
    Resize,
    Start,
    StateShape,
    history_width,
)
from tlt_jax.rollout.recorder import (
    Decided,
    Decision,
    Dispatched,
    Emitted,
    Ended,
    Event,
    Harvested,
    PromptsRecorded,
    Replied,
    ReplyRecorded,
    Retired,
    WentIdle,
)
from tlt_jax.rollout.request import admission_size, block_size, bucket_width
from tlt_jax.rollout.scheduler.planner import GroupCandidates, extends, most_lag
from tlt_jax.rollout.scheduler.state import (
    GroupContext,
    GroupState,
    GroupView,
    InFlight,
    Joining,
    Prefilled,
    Running,
    WindowCopy,
    queued,
)
from tlt_jax.spec_decode.decode import Report
from tlt_jax.spec_decode.decode_state import BROKEN, RUNNING, TURN, Admission, Appended
from tlt_jax.spec_decode.strategy import PLAIN

# Limit on the un-awaited programs of one group: more than about 30 on fake CPU devices abort the process.
MAX_UNAWAITED = 16
MOST_PER_STEP = (
    2  # most programs that one step of `advance` needs room for: a prefill and an admission
)


def advance(
    context: GroupContext, state: GroupState, is_stopping: bool = False
) -> tuple[GroupState, list[Event]]:
    """Reads finished programs, then dispatches new ones, at most `in_flight` chunks ahead of the last one read.

    When stopping, no new decision is taken. Ended rows are harvested before any other program takes the decoding state. A
    group that has finished, or waits for the queue, releases it. With `is_in_order`, one flight is read at a time, once
    nothing more can be dispatched: listeners see its events before any decision depends on them.
    """
    events: list[Event] = []
    if state.away:
        state, events = hear(context, state)
    if context.is_in_order and state.flights and state.is_blocked:
        if not is_ready(state):
            return state, events
        state, more = retire(context, state.replace(is_blocked=False))
        return state, events + more
    while not context.is_in_order and is_ready(state):
        state, more = retire(context, state)
        events += more

    while True:
        if state.unawaited + MOST_PER_STEP > MAX_UNAWAITED:
            if state.flights or not state.device.lengths.is_ready():
                break
            state = state.replace(unmarked=0)

        if state.windows:
            state, more = harvest(context, state, shape_of(context, state))
        elif state.decision is None:
            state, more = (state, []) if is_stopping else plan(context, state)
            if not more:
                break
        elif state.appending:
            state, more = append(context, state)
        elif state.joining:
            state, more = join(context, state)
        elif state.drafter_lag > most_lag(context, state.decision.strategy):
            state, more = catch_up(context, state)
        else:
            state, more = decode(context, state)
        events += more

    state = state.replace(is_blocked=True)
    is_stopped = is_stopping and not state.is_busy
    if (state.is_idle or is_stopped) and not state.is_released:
        released = GroupState(dispatched=state.dispatched, retired=state.retired)
        state = replace(released, is_exhausted=True, is_released=True)
        events.append(WentIdle())
    elif (
        state.is_waiting and not state.away and state.device is not None
    ):  # as at the start, but for its counts
        counts = {name: getattr(state, name) for name in ("dispatched", "retired", "finished")}
        state = GroupState(**counts, may_get_more=True, is_blocked=True)
    return state, events


def is_ready(state: GroupState) -> bool:
    """Whether the oldest flight can be read without waiting."""
    return bool(state.flights) and state.flights[0].marker.is_ready()


def retire(context: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """Reads the oldest flight: its tokens become events, and ended sequences leave their rows."""
    flight, *flights = state.flights
    state = state.replace(flights=tuple(flights))
    if flight.report is None:
        events = [Retired(flight.number, flight.kind)]
        if flight.values is not None:
            windows = tuple((window.uid, window.start) for window in flight.windows)
            events.append(Harvested(windows, flight.values, flight.marker))
        if context.request.records and flight.prompts:
            record = np.asarray(flight.marker)
            rows = {
                key: record[row, : len(context.tokens(key)) - 1]
                for key, row in flight.prompts.items()
            }
            events.append(PromptsRecorded(rows))
        if context.request.records and flight.uids:
            record, reply = np.asarray(flight.marker), context.dialogue.reply
            for uid, one in zip(flight.uids, record, strict=False):
                events.append(ReplyRecorded(uid, one[: len(reply(uid))]))
        return state, events

    report = context.programs.read(flight.report, context.request.records)
    tokens, rounds = int(report.counts.sum()), int(report.rounds)
    is_first = rounds > 0 and context.programs.is_first_run(flight.program)
    is_untimed = is_first or flight.compiling_alongside or context.programs.compiling_alongside
    events = [Retired(flight.number, flight.kind, rounds, tokens, report.stats, is_untimed)]
    news = emitted(flight.rows, report) if rounds else {}
    if context.dialogue:
        limits = {one.uid: one.limit for one in state.rows if one}
        news = {uid: context.dialogue.turned(new, limits[uid]) for uid, new in news.items()}
    events += news.values()
    state, ends = reap(context, state, ended(state.rows, news))
    events += ends
    if not news:
        return state.replace(retired=state.retired + 1), events

    rows = tuple([running and settled(running, news.get(running.uid)) for running in state.rows])
    finished = state.finished + sum([new.finish not in (RUNNING, TURN) for new in news.values()])
    away, held = dict(state.away), dict(state.held)
    for row, one in enumerate(state.rows):
        if one and one.uid in news and news[one.uid].finish == TURN:
            away[one.uid], held[one.uid] = one.tokens + len(news[one.uid].tokens), row
    state = state.replace(
        rows=rows, retired=state.retired + 1, finished=finished, away=away, held=held
    )
    return state, events


def hear(context: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """Takes the replies that are there: sequences go on, or have ended."""
    found = context.dialogue.take(state.away)
    if not found:
        return state, []
    back = [uid for uid, reply in found.items() if reply is not None]
    finished = state.finished + len(found) - len(back)
    most = context.planner.slots[-1]
    lost = found.keys() - {uid for uid in back if context.dialogue.appends(uid, most)}
    over = [uid for uid, reply in found.items() if reply is None and uid in state.held]
    state, ends = reap(context, state, held_ends(state, over))
    held = {uid: row for uid, row in state.held.items() if uid not in lost}
    away = {uid: tokens for uid, tokens in state.away.items() if uid not in found}
    state = state.replace(away=away, back=(*state.back, *back), finished=finished, held=held)
    return state, [*(Replied(uid, reply) for uid, reply in found.items()), *ends]


def emitted(rows: Sequence[int | None], report: Report) -> dict[int, Emitted]:
    """The new tokens of the sequences that had these rows in a chunk, by uid."""
    counts, finish = report.counts.tolist(), report.finish.tolist()
    # Each round also adds the target's token.
    accepted = (report.counts - report.stats.row_rounds).tolist()
    tokens, logprobs = report.tokens, report.logprobs
    record, support = report.record, report.support
    return {
        uid: Emitted(
            uid, tokens[row, :count], logprobs[row, :count], finish[row], accepted[row],
            None if record is None else record[row, :count],
            None if support is None else support[row, :count],
        )
        for row, (uid, count) in enumerate(zip(rows, counts, strict=True))
        if count and uid is not None
    }  # fmt: skip


def settled(running: Running, new: Emitted | None) -> Running | None:
    """The sequence with its new tokens; None once it has ended."""
    if new is None:
        return running
    if new.finish != RUNNING:
        return None
    return Running(running.uid, running.tokens + len(new.tokens), running.limit)


def plan(context: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """Decides the next chunk, assigns samples to free rows and moves the rows; no events when there is nothing to decode."""
    request = context.request
    ahead = sum(flight.kind == "decode" for flight in state.flights)
    if ahead >= request.in_flight:
        return state, []
    state = regain(context, state)
    state, starts = take(context, state)
    may_live = bool(state.appending) or any(
        running and running.tokens + ahead * request.rounds < running.limit
        for running in state.rows
    )
    if not starts and not may_live:
        return state, []

    sources = prefill_sources(context, state, [key for key, _ in starts])
    live = [running for running in state.rows if running]
    new = []
    for key, uid in starts:
        length, prompt = len(context.tokens(key)), uid // request.samples
        limit = len(request.prompts[prompt]) + request.max_new_tokens[prompt]
        if context.dialogue:
            limit = context.dialogue.limit_at(uid, length)
        new.append(Running(uid, length, limit))
    most = sum(flight.most for flight in state.flights)
    view = GroupView(
        context.index,
        state.retired,
        len(live) + len(new),
        tokens=max(
            [min(one.tokens + most, one.limit) for one in live] + [one.tokens for one in new]
        ),
        limit=max(running.limit for running in live + new),
        widest=max(
            [source.sizes[1] for source in sources]
            + [appended_end(context, uid) for uid in state.appending],
            default=0,
        ),
        rounds=request.rounds,
        batch=state.batch,
        slots=state.slots,
        waiting=not (state.is_exhausted or state.may_get_more),
        sources=tuple(sorted({source.sizes for source in sources})),
        finished=state.finished,
    )
    candidates = GroupCandidates(context, view)
    if cell := context.planner.worth_compiling(view, candidates):
        context.programs.prepare(candidates.needed(cell))
    decision = context.planner.decide(view, candidates)
    if new:
        decision = replace(decision, joining=tuple(running.uid for running in new))
    left = decision.batch - len(live) - len(new)
    state, events = lend(context, state, [*state.held][left:])
    state = move(context, state.replace(decision=decision), decision)

    held = {*state.held.values()}
    rows, seat = list(state.rows), {}
    free = [row for row, running in enumerate(rows) if running is None and row not in held]
    for row, running in zip(free, new, strict=False):
        rows[row], seat[running.uid] = running, row
    key_of = {uid: key for key, uid in starts}
    joining = tuple(
        Joining(source, tuple((seat[uid], uid) for uid in seat if key_of[uid] in source.rows))
        for source in sources
    )
    return state.replace(rows=tuple(rows), joining=joining), [*events, Decided(decision)]


def regain(context: GroupContext, state: GroupState) -> GroupState:
    """The state in which sequences with a reply have the rows again that still hold their cache."""
    back = [uid for uid in state.back if uid in state.held]
    if not back:
        return state
    rows, held = list(state.rows), dict(state.held)
    for uid in back:
        tokens = len(context.tokens(~uid))
        rows[held.pop(uid)] = Running(uid, tokens, context.dialogue.limit_at(uid, tokens))
    rest = tuple(uid for uid in state.back if uid not in back)
    return state.replace(
        rows=tuple(rows), held=held, back=rest, appending=(*state.appending, *back)
    )


def appended_end(context: GroupContext, uid: int) -> int:
    """Slots that the program needs which appends the reply to a sequence."""
    reply = len(context.dialogue.reply(uid))
    return len(context.tokens(~uid)) - reply + reply_width(reply)


def take(context: GroupContext, state: GroupState) -> tuple[GroupState, list[tuple[int, int]]]:
    """Takes (key of its tokens, uid) for every free row: sequences that go on, then new ones as long as the queue has some.

    Where programs are read in order, a group to which the queue gave nothing asks again once it has nothing left: when
    the queue gives more depends on a clock, and the shapes that the group has then do not.
    """
    free = context.request.capacity - sum(running is not None for running in state.rows)
    found = [(~uid, uid) for uid in state.back[:free]]
    if found:
        started = state.started | {key for key, _ in found}
        state, free = state.replace(back=state.back[free:], started=started), free - len(found)
    if state.is_exhausted or (
        context.is_in_order and state.may_get_more and state.device is not None
    ):
        return state, found
    prefilled = [key for one in state.prefills for key in one.rows if key >= 0]
    taken = context.queue.take(free, prefilled)
    started = state.started | taken.started
    state = state.replace(
        started=started, is_exhausted=taken.is_exhausted, may_get_more=taken.may_get_more
    )
    samples = context.request.samples
    return state, found + [(prompt, prompt * samples + sample) for prompt, sample in taken.samples]


def prefill_sources(
    context: GroupContext, state: GroupState, keys: Iterable[int]
) -> list[Prefilled]:
    """The prefills of these prompts: cached ones, and new ones of few different shapes, longest first."""
    prompts = list(dict.fromkeys(keys))
    sources = [one for one in state.prefills if any(prompt in one.rows for prompt in prompts)]
    new = [prompt for prompt in prompts if not any(prompt in one.rows for one in sources)]
    # Longest first, so that few are padded to a larger width.
    new.sort(key=lambda prompt: len(context.tokens(prompt)), reverse=True)
    while new:
        width = bucket_width(len(context.tokens(new[0])))
        size = block_size(len(new), width)
        rows = {prompt: row for row, prompt in enumerate(new[:size])}
        sources.append(Prefilled(rows, (size, width), None))
        new = new[size:]
    return sources


def move(context: GroupContext, state: GroupState, decision: Decision) -> GroupState:
    """Resizes the state to the decided numbers of rows and slots; live sequences move to the front."""
    if state.device is not None and (state.batch, state.slots) == (decision.batch, decision.slots):
        return state
    keep = [row for row, running in enumerate(state.rows) if running]
    held = {uid: len(keep) + place for place, uid in enumerate(state.held)}
    keep += state.held.values()
    if keep:
        rows = np.full(decision.batch, -1, np.int32)
        rows[: len(keep)] = keep
        resize = Resize(shape_of(context, state), decision.batch, decision.slots)
        device = resize(context.programs, state.device, rows)
    else:
        state = state.replace(device=None)  # free its memory before the new state is allocated
        device = Start(shape_of(context, decision))(context.programs)
    rows = [state.rows[row] for row in keep] + [None] * (decision.batch - len(keep))
    return state.replace(
        device=device,
        batch=decision.batch,
        slots=decision.slots,
        rows=tuple(rows),
        held=held,
        unmarked=state.unmarked + 1,
        is_moved=True,
    )


def append(context: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """Appends the next replies of one width to sequences that have their rows."""
    dialogue, places = context.dialogue, {one.uid: row for row, one in enumerate(state.rows) if one}
    width = reply_width(len(dialogue.reply(state.appending[0])))
    alike = [uid for uid in state.appending if reply_width(len(dialogue.reply(uid))) == width]
    uids = alike[: block_size(len(alike), width)]
    size = block_size(len(alike), width)
    rows, counts, limits = np.zeros((3, size), np.int32)
    tokens = np.zeros((size, width), np.int32)
    for at in range(size):
        uid = uids[min(at, len(uids) - 1)]
        reply = dialogue.reply(uid)
        rows[at], counts[at], tokens[at, : len(reply)] = places[uid], len(reply), reply
        limits[at] = state.rows[places[uid]].limit
    program = Append(shape_of(context, state), size, width)
    new = Appended(rows, tokens, counts, limits)
    device, marker = program(context.programs, state.device, context.weights, new)
    flight = InFlight(state.dispatched, "append", marker, uids=tuple(uids))
    event = Dispatched(flight.number, "append", size, width)
    left = tuple(uid for uid in state.appending if uid not in uids)
    lag = max(state.drafter_lag, width)
    state = state.replace(device=device, appending=left, drafter_lag=lag)
    return queued(state, flight), [event]


def join(context: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """Admits the next joining samples, as many as one program admits; new prompts are prefilled first."""
    joining, *rest = state.joining
    source, events = joining.source, []
    if source.values is None:
        source, marker = prefill(context, source)
        flight = InFlight(state.dispatched, "prefill", marker, prompts=source.rows)
        events = [Dispatched(flight.number, "prefill", *source.sizes)]
        state = state.replace(flights=(*state.flights, flight), dispatched=state.dispatched + 1)

    size = admission_size(state.batch)
    now, later = joining.rows[:size], joining.rows[size:]
    admit = Admit(shape_of(context, state), Prefill(context.index, *source.sizes))
    new = admission(context, state, source, now)
    device = admit(context.programs, state.device, source.values, new)
    if later:
        rest = [Joining(source, later), *rest]

    kept = (*(one for one in state.prefills if one.rows != source.rows), source)
    state = state.replace(
        device=device,
        joining=tuple(rest),
        prefills=tuple(one for one in kept if later or not state.started.issuperset(one.rows)),
        drafter_lag=max(state.drafter_lag, source.sizes[1]),
        unmarked=state.unmarked + 1,
    )
    return state, events


def prefill(context: GroupContext, source: Prefilled) -> tuple[Prefilled, jax.Array]:
    """Dispatches a prefill: the prefill with its values, and an array that is ready when they are."""
    size, width = source.sizes
    tokens, lengths = np.zeros((size, width), np.int32), np.zeros(size, np.int32)
    for prompt, row in source.rows.items():
        body = context.tokens(prompt)[:-1]  # the last token is the first root
        tokens[row, : len(body)], lengths[row] = body, len(body)
    program = Prefill(context.index, size, width)
    values, marker = program(context.programs, context.weights.target, tokens, lengths)
    return replace(source, values=values), marker


def admission(
    context: GroupContext, state: GroupState, source: Prefilled, joining: Iterable[tuple[int, int]]
) -> Admission:
    """The host arrays that put sequences into their rows; unused entries have row numbers past the last row."""
    request, size = context.request, admission_size(state.batch)
    width = history_width(source.sizes[1], context.reads_history)
    small = {field: np.zeros(size, np.int32) for field in ("source", "roots", "lengths", "limits")}
    keys, history = np.zeros((size, 2), np.uint32), np.zeros((size, width), np.int32)
    rows = state.batch + np.arange(size, dtype=np.int32)
    for at, (row, uid) in enumerate(joining):
        key = ~uid if ~uid in source.rows else uid // request.samples
        prompt = context.tokens(key)
        rows[at], small["source"][at] = row, source.rows[key]
        small["roots"][at], small["lengths"][at] = prompt[-1], len(prompt) - 1
        small["limits"][at] = state.rows[row].limit
        keys[at] = request.keys[uid]
        history[at, : len(prompt)] = prompt[:width]
    return Admission(rows=rows, keys=keys, history=history, **small)


def catch_up(context: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """Dispatches the drafter's catch-up, so that it lacks no more tokens than the decided chunk allows."""
    missing = state.decision.strategy.path
    program = CatchUp(shape_of(context, state))
    device, marker = program(context.programs, state.device, context.weights, np.int32(missing))
    flight = InFlight(state.dispatched, "catch_up", marker)
    event = Dispatched(flight.number, "catch_up", state.batch, state.slots)
    return queued(state.replace(device=device, drafter_lag=missing), flight), [event]


def decode(context: GroupContext, state: GroupState) -> tuple[GroupState, list[Event]]:
    """Dispatches the decided chunk."""
    decision, strategy, request = state.decision, state.decision.strategy, context.request
    program = Decode(shape_of(context, state), request.rounds, strategy, request.params)
    uids = tuple(running.uid if running else None for running in state.rows)
    bounds = np.array([decision.min_live, decision.rounds], np.int32)
    host = () if strategy == PLAIN else context.needs[strategy.drafter].host_context(uids)
    device, report = program(context.programs, state.device, context.weights, host, bounds)

    most = min(decision.rounds, request.rounds) * strategy.path
    flight = InFlight(
        state.dispatched,
        "decode",
        report.counts,
        rows=uids,
        report=report,
        most=most,
        program=program,
        compiling_alongside=context.programs.compiling_alongside,
    )
    event = Dispatched(flight.number, "decode", state.batch, state.slots, decision, state.is_moved)
    lag = strategy.path if extends(context, strategy) else state.drafter_lag + most
    state = state.replace(device=device, decision=None, drafter_lag=lag, is_moved=False)
    return queued(state, flight), [event]


def ended(rows: Sequence[Running | None], news: Mapping[int, Emitted]) -> list[Ended]:
    """The sequences that end with these tokens, with their current rows; not those whose logits were not finite."""
    return [
        Ended(running.uid, row, running.tokens + len(news[running.uid].tokens))
        for row, running in enumerate(rows)
        if running and running.uid in news
        and news[running.uid].finish not in (RUNNING, BROKEN, TURN)
    ]  # fmt: skip


def held_ends(state: GroupState, uids: Iterable[int]) -> list[Ended]:
    """Of sequences that wait for a reply and have their rows: what is known of them, if they end here."""
    return [Ended(uid, state.held[uid], state.away[uid]) for uid in uids]


def reap(
    context: GroupContext, state: GroupState, ends: list[Ended]
) -> tuple[GroupState, list[Event]]:
    """The windows that the harvester wants of these sequences wait to be copied."""
    if not context.harvester:
        return state, []
    windows = [
        WindowCopy(end.uid, end.row, start)
        for end in ends
        for start in context.harvester.wanted(end.uid, end.length)
    ]
    return state.replace(windows=(*state.windows, *windows)), [*ends]


def lend(
    context: GroupContext, state: GroupState, uids: Sequence[int]
) -> tuple[GroupState, list[Event]]:
    """Takes their rows from sequences that wait for a reply, after a harvest, since they may end with that reply.

    Windows for which there is no room among the programs in flight are dropped: one place is the resize's.
    """
    state, events = reap(context, state, held_ends(state, uids))
    while state.windows and state.unawaited + 1 < MAX_UNAWAITED:
        state, more = harvest(context, state, shape_of(context, state))
        events += more
    held = {uid: row for uid, row in state.held.items() if uid not in uids}
    return state.replace(windows=(), held=held), events


def harvest(
    context: GroupContext, state: GroupState, shape: StateShape
) -> tuple[GroupState, list[Event]]:
    """Dispatches the copy of the next windows out of the decoding state of this shape.

    One program copies as many windows as a prefill of their width has prompts: few sizes. While it
    is still compiling in the background, these windows are dropped.
    """
    width = context.harvester.width
    size = block_size(len(state.windows), width)
    now, later = state.windows[:size], state.windows[size:]
    rows, starts = np.zeros((2, size), np.int32)
    rows[: len(now)] = [window.row for window in now]
    starts[: len(now)] = [window.start for window in now]
    program = Harvest(shape, size, width)
    if context.programs.compile_cost(program):
        context.programs.prepare([program])
        if context.programs.compile_cost(program):
            return state.replace(windows=later), []
    values = program(context.programs, state.device, rows, starts)
    # Features may have width 0.
    marker = values.features if values.states is None else values.states
    flight = InFlight(state.dispatched, "harvest", marker, windows=now, values=values)
    event = Dispatched(flight.number, "harvest", state.batch, state.slots)
    return queued(state.replace(windows=later), flight), [event]


def shape_of(context: GroupContext, sizes: GroupState | Decision | GroupView) -> StateShape:
    """The shape of this group's decoding state with these numbers of rows and slots."""
    return StateShape(context.index, sizes.batch, sizes.slots)
