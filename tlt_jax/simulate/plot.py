"""The picture of a sweep: seconds of a step, and gain over plain decoding, by values of a knob. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from tlt_jax.simulate import report
from tlt_jax.simulate.report import Results

FINE = 2  # drawn in so many times the size, and scaled down
WIDTH, HEIGHT, LEFT, TOP, BOTTOM, GAP = (
    FINE * one for one in (560, 360, 52, 56, 44, 20)
)  # of a panel, and its margins
COLORS = (
    (78, 121, 167), (225, 87, 89), (89, 161, 79), (242, 142, 43), (176, 122, 161), (118, 183, 178), (156, 117, 95),
    (237, 201, 72), (100, 100, 100),
)  # fmt: skip
GRID, INK = (225, 225, 225), (60, 60, 60)


class Panel(NamedTuple):
    """A diagram: `lines` of an arm's values, one for each place on the x axis; None where an arm has none."""

    title: str
    lines: Mapping[str, Sequence[float]]

    @property
    def most(self) -> float:
        """The end of the y axis, which begins at 0."""
        return 1.05 * max(max(values) for values in self.lines.values())


def draw(knob: str, found: Mapping[str, Results]) -> np.ndarray:
    """uint8 [height, width, 3]: a panel of seconds and, with the arm `plain`, one of gains; a line for each arm.

    Values of the knob have equal distances on the x axis, in the order in which they were given.
    """
    panels = panels_of(found)
    image = Image.new("RGB", (WIDTH * len(panels), HEIGHT), "white")
    canvas, font = ImageDraw.Draw(image), ImageFont.load_default(11 * FINE)
    names = list(panels[0].lines)
    draw_legend(canvas, font, names)
    for at, panel in enumerate(panels):
        draw_panel(canvas, font, panel, WIDTH * at, (knob, *found), names)
    return np.asarray(image.reduce(FINE))


def panels_of(found: Mapping[str, Results]) -> list[Panel]:
    """The panels of a sweep, over the second half of the steps."""
    seconds = [report.late_seconds(results) for results in found.values()]
    gains = [report.gains_of(results) for results in found.values()]
    panels = [Panel("seconds of a step (simulated)", by_arm(seconds))]
    return (
        [*panels, Panel("gain over plain decoding (simulated)", by_arm(gains))]
        if gains[0]
        else panels
    )


def by_arm(rows: Sequence[Mapping[str, float]]) -> dict[str, list[float]]:
    """The values of each arm, in the order of the rows."""
    return {name: [row[name] for row in rows] for name in rows[0]}


def draw_panel(
    canvas: ImageDraw.ImageDraw,
    font,
    panel: Panel,
    left: int,
    labels: Sequence[str],
    names: Sequence[str],
) -> None:
    """A panel from `left` on; `labels`: the knob and its values. Arms have the colours of `names`."""
    (knob, *values), last, low = labels, left + WIDTH - GAP, HEIGHT - BOTTOM

    def x(at: float) -> float:
        return left + LEFT + (last - left - LEFT) * (at + 0.5) / len(values)

    def y(value: float) -> float:
        return low + (TOP - low) * value / panel.most

    canvas.text((left + LEFT, TOP - 9 * FINE), panel.title, fill=INK, font=font, anchor="lm")
    for tick in ticks(panel.most):
        canvas.line(
            (left + LEFT, y(tick), last, y(tick)), fill=INK if tick == 0 else GRID, width=FINE
        )
        canvas.text(
            (left + LEFT - 6 * FINE, y(tick)), f"{tick:g}", fill=INK, font=font, anchor="rm"
        )
    for at, value in enumerate(values):
        canvas.text((x(at), low + 12 * FINE), value, fill=INK, font=font, anchor="mm")
    canvas.text((x((len(values) - 1) / 2), low + 30 * FINE), knob, fill=INK, font=font, anchor="mm")
    for name, numbers in panel.lines.items():
        points = [(x(at), y(value)) for at, value in enumerate(numbers)]
        canvas.line(points, fill=color_of(names, name), width=2 * FINE)
        for point in points:
            canvas.circle(point, 3 * FINE, fill=color_of(names, name))


def draw_legend(canvas: ImageDraw.ImageDraw, font, names: Sequence[str]) -> None:
    """A dot and a name for each arm."""
    left, middle = LEFT, 16 * FINE
    for name in names:
        canvas.circle((left + 4 * FINE, middle), 4 * FINE, fill=color_of(names, name))
        canvas.text((left + 14 * FINE, middle), name, fill=INK, font=font, anchor="lm")
        left += 30 * FINE + canvas.textlength(name, font=font)


def color_of(names: Sequence[str], name: str) -> tuple[int, int, int]:
    """The colour of an arm."""
    return COLORS[list(names).index(name) % len(COLORS)]


def ticks(most: float) -> list[float]:
    """Round numbers from 0 to `most`, at most seven."""
    raw = most / 6
    power = 10.0 ** np.floor(np.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw)
    return [round(step * at, 9) for at in range(int(most / step) + 1)]
