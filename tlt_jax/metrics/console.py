"""Progress on the console: a live display on a terminal, otherwise one line per step; knows no files."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress as Bar, TextColumn

RECENT = 20  # latest steps whose mean duration predicts the remaining time
WIDTH = 100  # columns of a line about a step or an evaluation
COMPILES_EVERY_S = 20.0  # seconds between two lines about compilations without another line


class Progress:
    """Shows the step, metrics (reward, answer length; loss, agreement), speed, remaining time.

    While it is open, records of the package's loggers are printed above the display. Records below INFO are printed only
    with `details`; without it compilations (records with `compile_seconds`) are summarized.
    """

    def __init__(
        self,
        total_steps: int,
        first_step: int,
        live: bool,
        console: Console | None = None,
        details: bool = False,
    ):
        self.console = console or Console(soft_wrap=True)
        self._details = details
        self._programs, self._compile_s = 0, 0.0  # compiled since the last line about compilations
        self._compiles_said = time.monotonic()
        self._total, self._done = total_steps, first_step
        self._durations: deque[float] = deque(maxlen=RECENT)
        self._last = time.monotonic()

        self._bar = None
        if live and self.console.is_terminal:
            columns = (
                TextColumn("step"),
                MofNCompleteColumn(),
                BarColumn(None),
                TextColumn("{task.fields[status]}"),
            )
            self._bar = Bar(*columns, console=self.console)
            self._task = self._bar.add_task(
                "train", total=total_steps, completed=first_step, status="starting"
            )
            self._bar.start()

        self._handler = Messages(self)
        logger = logging.getLogger("tlt_jax")
        logger.addHandler(self._handler)
        self._level = logger.level
        logger.setLevel(logging.DEBUG)
        self._propagates, logger.propagate = (
            logger.propagate,
            False,
        )  # a root handler would print everything twice

    def step(self, step: int, values: dict[str, float]) -> None:
        """Shows a finished step with the scalars of `values` that `status` selects."""
        now = time.monotonic()
        self._durations.append(values.get("timing_s/step", now - self._last))
        self._last = now

        self._say_compiles()
        pieces = self.status(step, values)
        if self._bar:
            self._bar.update(self._task, completed=step, status=fitted("", pieces))
        else:
            self.say(fitted(f"step {step}/{self._total}", pieces))

    def status(self, step: int, values: dict[str, float]) -> list[tuple[int, str]]:
        """The (rank, text) pieces to show next to the step number, for `fitted`."""
        pieces = []
        if "reward/mean" in values:
            pieces.append((0, f"reward {values['reward/mean']:.3f}"))
        if "response_length/mean" in values:
            pieces.append((1, lengths(values, "")))
        if "drafter/loss" in values:
            pieces.append((4, f"loss {values['drafter/loss']:.3f}"))
        if "drafter/agreement@1" in values:
            pieces.append((4, f"agreement {values['drafter/agreement@1']:.3f}"))
        is_adaptive = "idle/used_ratio" in values
        if is_adaptive or "speculation/accept_length" in values:
            # Without drafts a round decodes one token.
            pieces.append((2, f"accept {values.get('speculation/accept_length', 1.0):.1f}"))
        if is_adaptive:
            used, idle = values["idle/used_ratio"], values["idle/ratio"]
            pieces.append((3, f"idle {idle:.0%} ({used:.0%} used)"))
        if "perf/tokens_per_second" in values:
            pieces.append((6, f"{values['perf/tokens_per_second']:,.0f} tokens/s"))

        per_step = sum(self._durations) / max(len(self._durations), 1)
        pieces.append((5, f"{per_step:.1f} s/step"))
        pieces.append((0, f"{clock(per_step * (self._total - step))} to go"))
        return pieces

    def hear(self, record: logging.LogRecord, text: str) -> None:
        """Shows a log record, or adds it to the summary of compilations."""
        seconds = getattr(record, "compile_seconds", None)
        if self._details or record.levelno >= logging.INFO:
            self.say(text)
        elif seconds is not None:
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
        """Prints a line above the display."""
        self.console.print(text, markup=False, highlight=False)

    def close(self) -> None:
        """Ends the display, and restores the loggers."""
        logger = logging.getLogger("tlt_jax")
        logger.removeHandler(self._handler)
        logger.setLevel(self._level)
        logger.propagate = self._propagates
        if self._bar:
            self._bar.stop()
            self._bar = None


class Messages(logging.Handler):
    """Passes log records to the progress display."""

    def __init__(self, progress: Progress):
        super().__init__()
        self._progress = progress

    def emit(self, record: logging.LogRecord) -> None:
        self._progress.hear(record, self.format(record))


def evaluation(step: int, steps: int, values: Mapping[str, float]) -> str:
    """The line about an evaluation; mean@k, pass@1, the largest pass@k and the lengths have priority."""
    scores = {
        name.removeprefix("eval/"): value
        for name, value in values.items()
        if not name.startswith("eval/response_length/")
    }
    last = max((name for name in scores if name.startswith("pass@")), key=order, default="")
    pieces = [
        (
            0 if name.startswith("mean@") else 1 if name in ("pass@1", last) else 3,
            f"{name} {value:.3g}",
        )
        for name, value in scores.items()
    ]
    if "eval/response_length/mean" in values:
        pieces.append((2, lengths(values, "eval/")))
    if "eval/response_length/clip_ratio" in values:
        pieces.append((2, f"cut {values['eval/response_length/clip_ratio']:.0%}"))
    return fitted(f"step {step}/{steps}  evaluation:", pieces)


def order(name: str) -> int:
    """The k of pass@k."""
    return int(name.partition("@")[2])


def lengths(values: Mapping[str, float], prefix: str) -> str:
    """The mean and the longest answer."""
    longest = values.get(f"{prefix}response_length/max", float("nan"))
    return f"length {values[f'{prefix}response_length/mean']:.0f} (max {longest:.0f})"


def fitted(head: str, pieces: Sequence[tuple[int, str]]) -> str:
    """The head and the (rank, piece) pairs in their order, in at most WIDTH columns.

    Pieces that do not fit are replaced by "...": those with the highest rank first, the last of a rank first.
    """
    kept = sorted(range(len(pieces)), key=lambda i: (pieces[i][0], i))
    while True:
        texts = [pieces[i][1] for i in sorted(kept)]
        more = ["..."] if len(kept) < len(pieces) else []
        line = "  ".join([head, *texts, *more] if head else texts + more)
        if len(line) <= WIDTH or not kept:
            return line
        kept.pop()


def clock(seconds: float) -> str:
    """Seconds as 1:02:03, or 2:03 below an hour."""
    minutes, seconds = divmod(int(seconds + 0.5), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
