"""Progress of a run: a line for each step, on a terminal above a live bar; in a notebook a table that grows."""

from __future__ import annotations

import html
import logging
import sys
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn
from rich.text import Text

RECENT = 20  # latest steps whose mean duration predicts the remaining time
WIDTH = 120  # columns of a line where there is no terminal
COMPILES_EVERY_S = 20.0  # seconds between two lines about compilations without another line
SHOWN = 200  # latest rows of a notebook's table, which is sent again at each step
REDRAW_S = 1.0  # least seconds between two times that a table shows compilations
LEFT = "to go"
BEHIND = "tokens/s", "s/step", LEFT  # titles that stand behind the number in a line
CELL = '<td style="text-align:right">{}</td>'


class Display(ABC):
    """Shows steps, evaluations and messages of a run, of which `first_step` steps are done.

    While it is open, records of the package's loggers are shown too. Those below INFO are for the log alone; compilations
    (records with `compile_seconds`) are summarized.
    """

    width = WIDTH  # columns of a shown line

    def __init__(self, total_steps: int, first_step: int):
        self._total, self._done = total_steps, first_step
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._last = time.monotonic()
        self._widths = [0] * 15  # of the columns so far
        self._programs, self._compile_s = 0, 0.0  # compiled, and not said yet
        self._messages = Messages(self)

    @abstractmethod
    def say(self, text: str) -> None:
        """Shows a message as it is: no text is markup."""

    @abstractmethod
    def show(self, step: int, cells: Sequence[str], texts: Mapping[str, str]) -> None:
        """Shows a finished step: the cells of its line, or the texts of its columns by title."""

    @abstractmethod
    def recount(self) -> None:
        """Shows that one more program was compiled, unless that was shown a moment ago."""

    def close(self) -> None:
        """Ends the display, and restores the loggers."""
        self._messages.close()

    def step(self, step: int, values: Mapping[str, float]) -> str:
        """Shows a finished step, whose seconds are its metric, or else those since the last one; its line of the log."""
        now = time.monotonic()
        self._durations.append(values.get("timing_s/step", now - self._last))
        self._last, self._done = now, step
        per_step = sum(self._durations) / len(self._durations)
        texts = columns(values, per_step, self._left())
        cells = [self._place(step)]
        for title, text in texts.items():
            pair = (text, title) if title in BEHIND else (title, text)
            cells.append(" ".join(pair) if text else "")
        self._widths = [max(one, len(cell)) for one, cell in zip(self._widths, cells, strict=True)]
        pairs = zip(cells, self._widths, strict=True)
        cells = [cell.rjust(width) for cell, width in pairs if width]
        self.show(step, cells, texts)
        return fitted(cells, WIDTH)

    def evaluation(self, step: int, values: Mapping[str, float]) -> str:
        """Shows an evaluation; its line of the log."""
        cells = [self._place(step), "evaluation:", *scores(values)]
        self.say(fitted(cells, self.width))
        return fitted(cells, WIDTH)

    def compiled(self, seconds: float) -> None:
        """Adds a program to the summary of compilations."""
        self._programs, self._compile_s = self._programs + 1, self._compile_s + seconds
        self.recount()

    def _compiles(self) -> str:
        programs = f"{self._programs} program{'s' if self._programs > 1 else ''}"
        return f"compiled {programs} in {self._compile_s:.0f} s"

    def _left(self) -> str:
        """The expected time to the last step."""
        per_step = sum(self._durations) / len(self._durations)
        return clock(per_step * (self._total - self._done))

    def _place(self, step: int) -> str:
        return f"step {step}/{self._total}"


class Messages(logging.Handler):
    """Passes the records of the package's loggers to a display, until it is closed."""

    def __init__(self, display: Display):
        super().__init__()
        self._display, logger = display, logging.getLogger("tlt_jax")
        self._before = logger.level, logger.propagate
        logger.addHandler(self)
        logger.setLevel(logging.DEBUG)
        logger.propagate = False  # a root handler would print everything twice

    def close(self) -> None:
        """Restores the loggers."""
        logger = logging.getLogger("tlt_jax")
        logger.removeHandler(self)
        level, logger.propagate = self._before
        logger.setLevel(level)
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        if record.levelno >= logging.INFO:
            self._display.say(self.format(record))
        elif (seconds := getattr(record, "compile_seconds", None)) is not None:
            self._display.compiled(seconds)


class Progress(Display):
    """A line for each step and each evaluation, and on a terminal a bar below them."""

    def __init__(self, total_steps: int, first_step: int, console: Console | None = None):
        self.console = console or Console(soft_wrap=True)
        self._compiles_said = time.monotonic()
        self._bar = None
        if self.console.is_terminal:
            self.width = self.console.width
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(None),
                TextColumn("{task.fields[status]}", markup=False),
            )
            self._bar = Bar(*columns, console=self.console)
            self._task = self._bar.add_task(
                "train", total=total_steps, completed=first_step, status="starting"
            )
            self._bar.start()
        super().__init__(total_steps, first_step)

    def show(self, step: int, cells: Sequence[str], texts: Mapping[str, str]) -> None:
        self._say_compiles()
        self.say(fitted(cells, self.width))
        if self._bar:
            self._bar.update(self._task, completed=step, status=f"{self._left()} {LEFT}")

    def recount(self) -> None:
        if self._bar:
            self._bar.update(self._task, status=self._compiles())
        elif time.monotonic() - self._compiles_said > COMPILES_EVERY_S:
            self._say_compiles()

    def _say_compiles(self) -> None:
        """Prints the compilations since the last time, when they took a second or more."""
        if self._compile_s >= 1:
            self.say(self._compiles())
            self._programs, self._compile_s = 0, 0.0
        self._compiles_said = time.monotonic()

    def say(self, text: str) -> None:
        self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        super().close()
        if self._bar:
            self._bar.stop()
            self._bar = None


class Table(Display):
    """A table with a row for each step and message, in a notebook. `draw` replaces the HTML of the output."""

    def __init__(
        self, total_steps: int, first_step: int, draw: Callable[[str], None] | None = None
    ):
        super().__init__(total_steps, first_step)
        self._draw = draw or output()
        self._rows: deque[Mapping[str, str] | str] = deque(maxlen=SHOWN)
        self._count = 0  # of rows, with those that are no longer shown
        self._redraw()

    def show(self, step: int, cells: Sequence[str], texts: Mapping[str, str]) -> None:
        self._add({"step": f"{step}/{self._total}", **texts, LEFT: ""})

    def say(self, text: str) -> None:
        self._add(text)

    def recount(self) -> None:
        if time.monotonic() - self._drawn > REDRAW_S:
            self._redraw()

    def close(self) -> None:
        super().close()
        self._redraw()

    def _add(self, row: Mapping[str, str] | str) -> None:
        self._rows.append(row)
        self._count += 1
        self._redraw()

    def _redraw(self) -> None:
        """Shows the table as it is now."""
        self._drawn = time.monotonic()
        steps = [row for row in self._rows if not isinstance(row, str)]
        # Steps have the same titles, and one of them a text in each column.
        titles = [one for one in (steps or [{}])[0] if any(row[one] for row in steps)] or ["step"]
        head = "".join(f"<th>{title}</th>" for title in titles)
        body = "".join(row_of(row, titles) for row in self._rows)
        earlier = self._count - len(self._rows)
        more = f"<p>{earlier} earlier rows are not shown</p>" if earlier else ""
        table = f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
        status = [f"step {self._done} of {self._total}"]
        status += [f"{self._left()} {LEFT}"] if self._durations else []
        status += [self._compiles()] if self._programs else []
        self._draw(f"{more}{table}<p>{html.escape(', '.join(status))}</p>")


def row_of(row: Mapping[str, str] | str, titles: Sequence[str]) -> str:
    """A row as HTML: a step, or a message over all columns."""
    if isinstance(row, str):
        text = html.escape(row)
        return f'<tr><td colspan="{len(titles)}" style="text-align:left">{text}</td></tr>'
    return f"<tr>{''.join(CELL.format(row[title]) for title in titles)}</tr>"


def is_kernel() -> bool:
    """Whether this process is the kernel of a notebook. IPython is not imported for it."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return getattr(shell, "kernel", None) is not None


def output() -> Callable[[str], None]:
    """A new output of the current cell; the function replaces its HTML."""
    from IPython.display import HTML, display

    handle = display(HTML(""), display_id=True)
    return lambda text: handle.update(HTML(text))


def columns(values: Mapping[str, float], per_step: float, left: str) -> dict[str, str]:
    """The texts of the columns after the step by title, the most important first; "" for those that the step has no value for.

    Accept length and idle time of an adaptive drafter; `ratio`: the largest of an answer; the shares of prompts replaced, of
    clipped tokens and of masked answers.
    """

    def cell(form: str, name: str) -> str:
        return form.format(values[name]) if name in values else ""

    def some(form: str, name: str) -> str:
        return cell(form, name) if values.get(name) else ""

    accept, idle = cell("{:.1f}", "speculation/accept_length"), ""
    if "idle/used_ratio" in values:
        accept = accept or "1.0"  # without drafts a round decodes one token
        idle = f"{values['idle/ratio']:.0%} ({values['idle/used_ratio']:.0%} used)"
    speed = values.get("perf/tokens_per_second")
    return {
        "reward": cell("{:.3f}", "reward/mean"),
        "length": cell("{:.0f}", "response_length/mean"),
        "nonfinite": some("{:.0f}", "response_length/nonfinite"),
        "loss": cell("{:.3f}", "drafter/loss"),
        "agreement": cell("{:.3f}", "drafter/agreement@1"),
        "tokens/s": "" if speed is None else short(speed),
        "s/step": f"{per_step:.{1 if per_step < 9.95 else 0}f}",
        LEFT: left,
        "accept": accept,
        "replaced": cell("{:.0%}", "groups/replaced"),
        "idle": idle,
        "ratio": cell("{:.3f}", "actor/sequence_ratio_max"),
        "clipped": some("{:.1%}", "actor/pg_clipfrac"),
        "masked": cell("{:.1%}", "rollout_corr/rollout_rs_seq_masked_fraction"),
    }


def scores(values: Mapping[str, float]) -> list[str]:
    """The cells of an evaluation, the most important first: mean@k, pass@1, the largest pass@k, lengths, other pass@k."""
    shown = {
        name.removeprefix("eval/"): value
        for name, value in values.items()
        if not name.startswith("eval/response_length/")
    }
    powers = (name for name in shown if name.startswith("pass@"))
    last = max(powers, key=lambda name: int(name.partition("@")[2]), default="")

    def rank(name: str) -> int:
        return 0 if name.startswith("mean@") else 1 if name in ("pass@1", last) else 3

    cells = [(rank(name), f"{name} {value:.3g}") for name, value in shown.items()]
    if "eval/response_length/mean" in values:
        mean, longest = (values[f"eval/response_length/{name}"] for name in ("mean", "max"))
        cells.append((2, f"length {mean:.0f} (max {longest:.0f})"))
    if "eval/response_length/clip_ratio" in values:
        cells.append((2, f"cut {values['eval/response_length/clip_ratio']:.0%}"))
    return [text for _, text in sorted(cells, key=lambda one: one[0])]


def fitted(cells: Sequence[str], width: int) -> str:
    """The cells that fit the width, from the first on; the first one always."""
    line = cells[0]
    for cell in cells[1:]:
        if len(line) + 2 + len(cell) > width:
            break
        line = f"{line}  {cell}"
    return line.rstrip()


def short(number: float) -> str:
    """A number of at most six characters: 1,234 or 12k or 1.2M."""
    if number < 9_999.5:
        return f"{number:,.0f}"
    return f"{number / 1e3:.0f}k" if number < 999_500 else f"{number / 1e6:.1f}M"


def clock(seconds: float) -> str:
    """Seconds as 2:03, from an hour on as 1.2 h, from ten hours on as 14 h."""
    minutes, rest = divmod(int(seconds + 0.5), 60)
    hours = seconds / 3600
    return f"{minutes}:{rest:02}" if minutes < 60 else f"{hours:.{1 if hours < 9.95 else 0}f} h"
