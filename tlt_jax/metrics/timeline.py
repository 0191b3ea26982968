"""The rollout as an image and as a trace, one lane per data group, and its idle share; knows only spans."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple, Protocol

import numpy as np
from PIL import Image, ImageDraw, ImageFont

COLORS = {
    "prefill": (242, 142, 43),
    "decode": (78, 121, 167),
    "speculate": (118, 183, 178),
    "catch_up": (176, 122, 161),
    "harvest": (237, 201, 72),
    "train": (89, 161, 79),
    "compile": (225, 87, 89),
    "wait": (225, 225, 225),
}
OTHER = (150, 150, 150)
WIDTH, LANE, LEFT, TOP, BOTTOM = 1200, 30, 70, 30, 26


Interval = tuple[float, float]  # start and end
Waits = Mapping[int, Sequence[Interval]]  # by data group
NO_WAITS: Waits = MappingProxyType({})


class Span(Protocol):
    """The activity of one data group from start to end, in seconds of any clock."""

    group: int
    kind: str
    start: float
    end: float


class GroupSeconds(NamedTuple):
    """How a data group spent some time, in seconds; they add up to it."""

    busy: float
    compile_wait: float
    idle: float


def group_seconds(
    spans: Sequence[Span], waits: Waits, group: int, window: Interval
) -> GroupSeconds:
    """How a group spent the window, in which its host `waits` for compilations now and then.

    While the host waits it gives no group work, and sees no program end: this time is neither busy
    nor idle.
    """
    first, last = window
    work = [(one.start, one.end) for one in spans if one.group == group and one.kind != "wait"]
    waited, both = (
        covered([(max(first, start), min(last, end)) for start, end in intervals])
        for intervals in (waits.get(group, ()), [*work, *waits.get(group, ())])
    )
    return GroupSeconds(both - waited, waited, last - first - both)


def idle_share(spans: Sequence[Span], groups: int, waits: Waits = NO_WAITS) -> float:
    """Share of the groups' time during which a group has no span other than "wait".

    The time is from the first start to the last end. A group is not idle while its host `waits`
    for a compilation.
    """
    if not spans:
        return 0.0
    window = min(span.start for span in spans), max(span.end for span in spans)
    idle = sum(group_seconds(spans, waits, group, window).idle for group in range(groups))
    return idle / (groups * (window[1] - window[0])) if idle else 0.0


def covered(intervals: Iterable[Interval]) -> float:
    """Seconds that at least one interval covers."""
    total, until = 0.0, -np.inf
    for start, end in sorted(intervals):
        total += max(0.0, end - max(until, start))
        until = max(until, end)
    return total


def draw(spans: Sequence[Span], groups: int) -> np.ndarray:
    """uint8 [height, width, 3]: a lane per group, colours by kind, legend, axis in seconds."""
    first = min((span.start for span in spans), default=0.0)
    seconds = max((span.end for span in spans), default=0.0) - first or 1.0
    image = Image.new("RGB", (WIDTH, TOP + LANE * groups + BOTTOM), "white")
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default()

    def x(time: float) -> float:
        return LEFT + (WIDTH - LEFT - 10) * time / seconds

    for group in range(groups):
        top = TOP + LANE * group
        canvas.text((6, top + 8), f"group {group}", fill="black", font=font)
        canvas.rectangle((x(0), top + 3, x(seconds), top + LANE - 3), fill=COLORS["wait"])

    for span in sorted(spans, key=lambda span: (span.kind != "wait", span.start)):
        top = TOP + LANE * span.group
        left, right = x(span.start - first), x(span.end - first)
        canvas.rectangle(
            (left, top + 3, max(left, right), top + LANE - 3), fill=COLORS.get(span.kind, OTHER)
        )
        if right - left > 6:  # a line between adjacent spans
            canvas.line((right, top + 3, right, top + LANE - 3), fill="white")

    draw_legend(canvas, font, {*(span.kind for span in spans), "wait"})
    for tick in ticks(seconds):
        canvas.line((x(tick), TOP, x(tick), TOP + LANE * groups + 3), fill=(120, 120, 120))
        canvas.text((x(tick) - 8, TOP + LANE * groups + 6), f"{tick:g} s", fill="black", font=font)
    return np.asarray(image)


def trace(spans: Iterable[Span]) -> dict[str, list[dict]]:
    """The spans in Chrome's trace event format, as Perfetto reads it: a thread per data group, times in microseconds."""
    return {
        "traceEvents": [
            {
                "name": span.kind,
                "ph": "X",
                "pid": 0,
                "tid": span.group,
                "ts": round(1e6 * span.start),
                "dur": round(1e6 * (span.end - span.start)),
            }
            for span in spans
        ]
    }


def draw_legend(canvas: ImageDraw.ImageDraw, font, kinds: set[str]) -> None:
    """One square and name per kind, in the order of COLORS."""
    left = LEFT
    for kind in [kind for kind in COLORS if kind in kinds] + sorted(kinds - set(COLORS)):
        canvas.rectangle((left, 8, left + 12, 20), fill=COLORS.get(kind, OTHER))
        canvas.text((left + 18, 8), kind, fill="black", font=font)
        left += 40 + canvas.textlength(kind, font=font)


def ticks(seconds: float) -> list[float]:
    """Round times in seconds, at most ten, from 0 to the end."""
    raw = seconds / 8
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [round(step * i, 9) for i in range(int(seconds / step) + 1)]
