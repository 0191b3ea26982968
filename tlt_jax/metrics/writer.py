"""The writer of a run folder: metrics for the trackers, completions and chunks. No JAX.

Each step appears once, also after a resume (except at Weights & Biases, where repeated steps appear twice).
"""

from __future__ import annotations

import contextlib
import json
import logging
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from tlt_jax import atomic
from tlt_jax.config import Config
from tlt_jax.config.load import to_yaml
from tlt_jax.config.schema import COMPLETIONS, LOG, TENSORBOARD, WANDB
from tlt_jax.errors import Interrupted, is_disk_full
from tlt_jax.metrics import console, evaluations, names, timeline
from tlt_jax.metrics.evaluations import Record
from tlt_jax.metrics.run import MetricsFiles
from tlt_jax.metrics.tensorboard import TensorBoard
from tlt_jax.metrics.timeline import ChunkRecord
from tlt_jax.metrics.weights_and_biases import WeightsAndBiases

SPECULATION = "speculation"
TIMELINE = "timeline"
# Sample answers sent to the trackers, and steps between them, which histograms have too.
TEXTS, TEXTS_EVERY = 4, 10

TRACKERS = {TENSORBOARD: TensorBoard, WANDB: WeightsAndBiases}


class LogFile(logging.FileHandler):
    """The log of a run. It ignores a full disk, which the next other write of the run reports."""

    def handleError(self, record: logging.LogRecord) -> None:
        if not is_disk_full(sys.exc_info()[1]):
            super().handleError(record)

    def close(self) -> None:
        with contextlib.suppress(OSError):  # of an earlier write
            super().close()


class Writer:
    """Writes a run folder and shows progress. Data is on disk when a method returns, except that of W&B.

    `resumed_from`: step of the checkpoint that the run resumes from; output of later steps, which an
    interrupted run wrote, is removed. None: a new run, which removes the output of earlier attempts.
    """

    def __init__(self, config: Config, total_steps: int, resumed_from: int | None = None):
        first_step = 0 if resumed_from is None else resumed_from + 1
        self._config, self._folder, self._steps = config, Path(config.run), total_steps

        for name in (COMPLETIONS, SPECULATION, TIMELINE, evaluations.FOLDER):
            for path in (self._folder / name).glob("*"):
                if (
                    path.suffix == atomic.TEMPORARY
                    or path.stem.isdigit()
                    and int(path.stem) >= first_step
                ):
                    path.unlink()

        self._folder.mkdir(parents=True, exist_ok=True)
        self._log = LogFile(self._folder / LOG, encoding="utf-8", delay=True)
        self._log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logging.getLogger("tlt_jax").addHandler(self._log)
        show = console.Table if console.is_kernel() else console.Progress
        self.progress = show(total_steps, resumed_from or 0)
        self._files = MetricsFiles(config, first_step)
        made = [make for name, make in TRACKERS.items() if name in config.log.trackers]
        self._trackers = [make(config, first_step) for make in made]
        self.text(first_step, "config", f"```yaml\n{to_yaml(config)}\n```")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, error: type[BaseException] | None, *_) -> None:
        self.close(is_failed=error is not None and not issubclass(error, Interrupted))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars of a step. Raises MetricError for an unlisted name."""
        for name in values:
            names.find(name, "scalar")
        for one in (self._files, *self._trackers):
            one.scalars(step, {name: float(value) for name, value in values.items()})

    def histogram(self, step: int, name: str, values: Sequence[float] | np.ndarray) -> None:
        """Writes a histogram of the values."""
        names.find(name, "histogram")
        for tracker in self._trackers:
            tracker.histogram(step, name, values)

    def text(self, step: int, name: str, markdown: str) -> None:
        """Writes a text in Markdown."""
        names.find(name, "text")
        for tracker in self._trackers:
            tracker.text(step, name, markdown)

    def step(
        self,
        step: int,
        scalars: Mapping[str, float],
        records: Sequence[Record],
        spans: Sequence[timeline.Span],
        chunks: Sequence[ChunkRecord] = (),
        phases: Sequence[timeline.Phase] = (),
    ) -> None:
        """Writes an RL step.

        Completions, chunks, the timeline and scalars at every step; texts and histograms at the first, the last
        and every TEXTS_EVERY-th step.
        """
        self.lines(COMPLETIONS, step, records)
        if chunks:
            self.lines(SPECULATION, step, chunks)
        self.file(TIMELINE, f"{step:06d}.json", json.dumps(timeline.trace(spans, chunks, phases)))
        self.scalars(step, scalars)

        if step in (1, self._steps) or step % TEXTS_EVERY == 0:
            self.histogram(step, "response_length/histogram", [record.length for record in records])
            self.histogram(step, "reward/histogram", [record.reward for record in records])

            drafted = [
                np.repeat(np.arange(len(chunk.accepted)), chunk.accepted)
                for chunk in chunks
                if chunk.accepted
            ]
            if drafted:
                self.histogram(step, "speculation/accepted/histogram", np.concatenate(drafted))

            shown = "\n\n---\n\n".join(map(sample, records[:TEXTS]))
            self.text(step, "rollout/samples", shown)

        self.progressed(step, scalars)

    def progressed(self, step: int, values: Mapping[str, float]) -> None:
        """Prints the line of a step, and writes it to the log."""
        self._note(self.progress.step(step, values))

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the scalars of an evaluation, prints its line, and writes that to the log."""
        self.scalars(step, values)
        self._note(self.progress.evaluation(step, values))

    def lines(self, folder: str, step: int, records: Sequence[Record | ChunkRecord]) -> None:
        """Writes FOLDER/STEP.jsonl atomically."""
        self.file(folder, f"{step:06d}.jsonl", evaluations.to_text(step, records))

    def file(self, folder: str, name: str, text: str) -> None:
        """Writes FOLDER/NAME atomically."""
        path = self._folder / folder / name
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, text)

    def say(self, text: str) -> None:
        """Prints a line above the progress display, and writes it to the log."""
        self.progress.say(text)
        self._note(text)

    def _note(self, text: str) -> None:
        """Writes a line to the log alone."""
        self._log.handle(logging.makeLogRecord({"msg": text}))

    def close(self, is_failed: bool = False) -> None:
        """Closes the files and ends the display."""
        with ExitStack() as closing:  # closes all of them, also when one raises
            closing.callback(self._log.close)
            closing.callback(logging.getLogger("tlt_jax").removeHandler, self._log)
            closing.callback(self.progress.close)
            for tracker in self._trackers:
                closing.callback(tracker.close, is_failed)


class NoWriter:
    """The writer of processes other than 0: does nothing."""

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *_) -> None:
        pass

    def nothing(self, *_) -> None:
        pass

    scalars = histogram = text = step = progressed = evaluation = nothing
    lines = file = say = close = nothing


def sample(record: Record) -> str:
    """One answer as Markdown, in code blocks so that none of it is interpreted as markup."""
    parts = ", ".join(f"{name} {value:g}" for name, value in record.parts.items())
    head = f"**reward {record.reward:g}** ({parts or 'no parts'}), {record.length} tokens, {record.finish}"
    return "\n\n".join(
        [head, "prompt", indented(record.prompt), "answer", indented(record.completion)]
    )


def indented(text: str) -> str:
    """The text as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
