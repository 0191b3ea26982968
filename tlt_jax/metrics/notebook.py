"""Progress in a notebook: a table with a row for each step, and with the messages between them; knows no files."""

from __future__ import annotations

import html
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from tlt_jax.metrics import console
from tlt_jax.metrics.console import Messages, Pace

SHOWN = 200  # latest rows: the whole table is sent again at each step
REDRAW_S = 1.0  # least seconds between two times that compilations are shown
# Title, metric and format of each column; one appears with the first step that has its metric.
COLUMNS = (
    ("reward", "reward/mean", "{:.3f}"),
    ("length", "response_length/mean", "{:.0f}"),
    ("loss", "drafter/loss", "{:.3f}"),
    ("agreement", "drafter/agreement@1", "{:.3f}"),
    ("tokens/s", "perf/tokens_per_second", "{:,.0f}"),
    ("s/step", "timing_s/step", "{:.1f}"),
    ("accept", "speculation/accept_length", "{:.2f}"),
    ("idle", "idle/ratio", "{:.0%}"),
    ("ratio", "actor/sequence_ratio_max", "{:.3f}"),
    ("masked", "rollout_corr/rollout_rs_seq_masked_fraction", "{:.1%}"),
)
CELL = '<td style="text-align:right">{}</td>'


def is_kernel() -> bool:
    """Whether this process is the kernel of a notebook. IPython is not imported for it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def display() -> Callable[[str], None]:
    """A new output of the current cell; the function replaces its HTML."""
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


class Table:
    """Shows steps and messages in a table that grows. Takes the place of console.Progress.

    `show` replaces the HTML of the output. While it is open, records of the package's loggers are messages, as
    console.Messages says; compilations are summarized in the line below the table.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        show: Callable[[str], None] | None = None,
    ):
        self._show, self._pace = show or display(), Pace(total_steps, first_step)
        self._rows: deque[Mapping[str, float] | str] = deque(maxlen=SHOWN)
        self._count = 0  # of rows, with those that are no longer shown
        self._drawn = time.monotonic()
        self._programs, self._compile_s = 0, 0.0
        self._messages = Messages(self)
        self.draw()

    def step(self, step: int, values: Mapping[str, float]) -> str:
        """Adds the row of a finished step; its line, as a console without a terminal has it."""
        self._pace.add(step, values)
        self.add({"step": step, **{name: values[name] for _, name, _ in COLUMNS if name in values}})
        cells = filter(None, console.columns(values, self._pace))
        return console.fitted([self._pace.place(step), *cells], console.WIDTH)

    def evaluation(self, step: int, values: Mapping[str, float]) -> str:
        """Adds a row about an evaluation; its line, as a console without a terminal has it."""
        cells = [self._pace.place(step), "evaluation:", *console.scores(values)]
        line = console.fitted(cells, console.WIDTH)
        self.add(line)
        return line

    def say(self, text: str) -> None:
        """Adds a row with a message."""
        self.add(text)

    def compiled(self, seconds: float) -> None:
        """Adds a program to the compilations in the line below the table."""
        self._programs, self._compile_s = self._programs + 1, self._compile_s + seconds
        if time.monotonic() - self._drawn > REDRAW_S:
            self.draw()

    def add(self, row: Mapping[str, float] | str) -> None:
        self._rows.append(row)
        self._count += 1
        self.draw()

    def draw(self) -> None:
        """Shows the table as it is now."""
        self._drawn = time.monotonic()
        steps = [row for row in self._rows if not isinstance(row, str)]
        columns = [one for one in COLUMNS if any(one[1] in row for row in steps)]
        head = "".join(f"<th>{title}</th>" for title in ("step", *(one[0] for one in columns)))
        body = "".join(row_of(row, columns, self._pace.total) for row in self._rows)
        earlier = self._count - len(self._rows)
        more = f"<p>{earlier} earlier rows are not shown</p>" if earlier else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        self._show(f"{more}{table}<p>{html.escape(self.status())}</p>")

    def status(self) -> str:
        """The line below the table: how far the run is, the time left, and what was compiled."""
        pieces = [f"step {self._pace.done} of {self._pace.total}"]
        if self._pace.durations:
            pieces.append(self._pace.left)
        if self._programs:
            pieces.append(f"{self._programs} programs compiled in {self._compile_s:.0f} s")
        return ", ".join(pieces)

    def close(self) -> None:
        """Draws the table for the last time, and restores the loggers."""
        self._messages.close()
        self.draw()


def row_of(row: Mapping[str, float] | str, columns: Any, total: int) -> str:
    """A row as HTML: a step, or a message over all columns. A missing value is empty."""
    if isinstance(row, str):
        text = html.escape(row)
        return f'<tr><td colspan="{1 + len(columns)}" style="text-align:left">{text}</td></tr>'
    cells = [f"{row['step']}/{total}"]
    cells += [form.format(row[name]) if name in row else "" for _, name, form in columns]
    return f"<tr>{''.join(map(CELL.format, cells))}</tr>"
