"""Progress on the console: a line for each step, on a terminal above a live bar; knows no files."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn
from rich.text import Text

RECENT = 20  # latest steps whose mean duration predicts the remaining time
WIDTH = 120  # columns of a line where there is no terminal
COMPILES_EVERY_S = 20.0  # seconds between two lines about compilations without another line


class Progress:
    """Shows a line for each step and each evaluation, and on a terminal a bar below them.

    While it is open, records of the package's loggers are printed too, as `Messages` says; compilations are summarized. No
    text is read as markup.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        console: Console | None = None,
    ):
        self.console = console or Console(soft_wrap=True)
        self._programs, self._compile_s = 0, 0.0  # compiled since the last line about compilations
        self._compiles_said = time.monotonic()
        self._pace, self._widths = Pace(total_steps, first_step), [0] * 15  # of the columns so far

        self._bar = None
        if self.console.is_terminal:
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

        self._messages = Messages(self)

    def step(self, step: int, values: Mapping[str, float]) -> str:
        """Shows a finished step; its line, as wide as where there is no terminal."""
        self._pace.add(step, values)
        self._say_compiles()
        cells = self._aligned([self._pace.place(step), *columns(values, self._pace)])
        self.say(fitted(cells, self._width))
        if self._bar:
            self._bar.update(self._task, completed=step, status=self._pace.left)
        return fitted(cells, WIDTH)

    def evaluation(self, step: int, values: Mapping[str, float]) -> str:
        """Shows an evaluation; its line, as wide as where there is no terminal."""
        cells = [self._pace.place(step), "evaluation:", *scores(values)]
        self.say(fitted(cells, self._width))
        return fitted(cells, WIDTH)

    @property
    def _width(self) -> int:
        return self.console.width if self.console.is_terminal else WIDTH

    def _aligned(self, cells: Sequence[str]) -> list[str]:
        """The cells that this step has, each as wide as the widest of its column so far."""
        self._widths = [
            max(width, len(cell)) for width, cell in zip(self._widths, cells, strict=True)
        ]
        return [cell.rjust(width) for cell, width in zip(cells, self._widths, strict=True) if width]

    def compiled(self, seconds: float) -> None:
        """Adds a program to the summary of compilations."""
        self._programs, self._compile_s = self._programs + 1, self._compile_s + seconds
        if self._bar:
            self._bar.update(self._task, status=self._compiles())
        elif time.monotonic() - self._compiles_said > COMPILES_EVERY_S:
            self._say_compiles()

    def _compiles(self) -> str:
        programs = f"{self._programs} program{'s' if self._programs > 1 else ''}"
        return f"compiled {programs} in {self._compile_s:.0f} s"

    def _say_compiles(self) -> None:
        """Prints the compilations since the last time, when they took a second or more."""
        if self._compile_s >= 1:
            self.say(self._compiles())
            self._programs, self._compile_s = 0, 0.0
        self._compiles_said = time.monotonic()

    def say(self, text: str) -> None:
        """Prints a line above the bar, as it is."""
        self.console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Ends the display, and restores the loggers."""
        self._messages.close()
        if self._bar:
            self._bar.stop()
            self._bar = None


class Display(Protocol):
    """What shows the messages of a run."""

    def say(self, text: str) -> None:
        """Shows a message."""

    def compiled(self, seconds: float) -> None:
        """Counts a program that was compiled in so many seconds."""


class Messages(logging.Handler):
    """Passes the records of the package's loggers to a display, until it is closed.

    Those below INFO are for the log alone; compilations (records with `compile_seconds`) are counted.
    """

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


class Pace:
    """How far a run of `total` steps is, of which `done` are done, and how fast its latest steps are."""

    def __init__(self, total: int, done: int):
        self.total, self.done = total, done
        self.durations: deque[float] = deque(maxlen=RECENT)
        self._last = time.monotonic()

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Notes a finished step: its seconds are its metric, or else those since the last one."""
        now = time.monotonic()
        self.durations.append(values.get("timing_s/step", now - self._last))
        self._last, self.done = now, step

    @property
    def per_step(self) -> float:
        """Mean seconds of the latest steps."""
        return sum(self.durations) / len(self.durations)

    @property
    def left(self) -> str:
        """The expected time to the last step."""
        return f"{clock(self.per_step * (self.total - self.done))} to go"

    def place(self, step: int) -> str:
        """`step 3/10`."""
        return f"step {step}/{self.total}"


def columns(values: Mapping[str, float], pace: Pace) -> list[str]:
    """The columns after the step, the most important first; "" for those that the step has no value for.

    Reward, length, number of nonfinite answers, loss and agreement (of a drafter's training), speed, seconds per step, what
    is left, accept length, share of prompts replaced, idle time, the largest ratio of an answer, the shares of clipped
    tokens and of masked answers.
    """

    def cell(form: str, name: str) -> str:
        return form.format(values[name]) if name in values else ""

    is_adaptive = "idle/used_ratio" in values
    accept = cell("accept {:.1f}", "speculation/accept_length")
    idle = ""
    if is_adaptive:
        accept = accept or "accept 1.0"  # without drafts a round decodes one token
        idle = f"idle {values['idle/ratio']:.0%} ({values['idle/used_ratio']:.0%} used)"
    speed = values.get("perf/tokens_per_second")
    return [
        cell("reward {:.3f}", "reward/mean"),
        cell("length {:.0f}", "response_length/mean"),
        cell("nonfinite {:.0f}", "response_length/nonfinite")
        if values.get("response_length/nonfinite")
        else "",
        cell("loss {:.3f}", "drafter/loss"),
        cell("agreement {:.3f}", "drafter/agreement@1"),
        "" if speed is None else f"{short(speed)} tokens/s",
        f"{pace.per_step:.{1 if pace.per_step < 9.95 else 0}f} s/step",
        pace.left,
        accept,
        cell("replaced {:.0%}", "groups/replaced"),
        idle,
        cell("ratio {:.3f}", "actor/sequence_ratio_max"),
        cell("clipped {:.1%}", "actor/pg_clipfrac") if values.get("actor/pg_clipfrac") else "",
        cell("masked {:.1%}", "rollout_corr/rollout_rs_seq_masked_fraction"),
    ]


def scores(values: Mapping[str, float]) -> list[str]:
    """The cells of an evaluation, the most important first: mean@k, pass@1, the largest pass@k, lengths, other pass@k."""
    shown = {
        name.removeprefix("eval/"): value
        for name, value in values.items()
        if not name.startswith("eval/response_length/")
    }
    last = max((name for name in shown if name.startswith("pass@")), key=order, default="")

    def rank(name: str) -> int:
        return 0 if name.startswith("mean@") else 1 if name in ("pass@1", last) else 3

    cells = [(rank(name), f"{name} {value:.3g}") for name, value in shown.items()]
    if "eval/response_length/mean" in values:
        mean, longest = (values[f"eval/response_length/{name}"] for name in ("mean", "max"))
        cells.append((2, f"length {mean:.0f} (max {longest:.0f})"))
    if "eval/response_length/clip_ratio" in values:
        cells.append((2, f"cut {values['eval/response_length/clip_ratio']:.0%}"))
    return [text for _, text in sorted(cells, key=lambda one: one[0])]


def order(name: str) -> int:
    """The k of pass@k."""
    return int(name.partition("@")[2])


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
