"""The writer of a run folder: TensorBoard events, completions and chunks. No JAX.

Each step is there once, also after a resume.
"""

from __future__ import annotations

import json
import logging
import struct
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from google.protobuf.message import DecodeError
from tensorboardX import summary
from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event
from tensorboardX.record_writer import masked_crc32c

from tlt_jax import atomic
from tlt_jax.config import Config
from tlt_jax.config.load import to_yaml
from tlt_jax.metrics import names, timeline
from tlt_jax.metrics.console import Progress

TENSORBOARD = "tensorboard"
LOG = "log.txt"  # every message of the run, each compilation too
COMPLETIONS = "completions"
SPECULATION = "speculation"
TIMELINE = "timeline"

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Record:
    """One answer of a step, a line of the completions file; `length` is in tokens."""

    uid: int
    prompt: str
    completion: str
    reward: float
    length: int
    finish: str
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None


@dataclass(frozen=True)
class ChunkRecord:
    """A decoding chunk of a step, a line of the speculation file.

    `predicted` (None: no prediction) and `measured` are tokens per second; `reason` is why the
    strategy was chosen. accepted[i]: row rounds of drafting that accepted i drafted tokens.
    `is_timed`: nothing that the host did, such as compiling, makes `seconds` uncertain.
    """

    group: int
    number: int
    batch: int
    live: float
    slots: int
    strategy: str
    reason: str
    predicted: float | None
    measured: float
    tokens: int
    rounds: int
    seconds: float
    accepted: Sequence[int] = ()
    is_timed: bool = True


class Writer:
    """Writes a run folder and shows progress. Data is on disk when a method returns.

    `resumed_from`: step of the checkpoint that the run resumes from; output of later steps, written
    by an interrupted run, is removed, so that each step is there once. None: a new run, which
    removes the output of earlier attempts.
    """

    def __init__(self, config: Config, total_steps: int, resumed_from: int | None = None):
        first_step = 0 if resumed_from is None else resumed_from + 1
        self._config, self._folder = config, Path(config.run)

        for name in (COMPLETIONS, SPECULATION, TIMELINE):
            for path in (self._folder / name).glob("*"):
                if (
                    path.suffix == atomic.TEMPORARY
                    or path.stem.isdigit()
                    and int(path.stem) >= first_step
                ):
                    path.unlink()

        events = self._folder / TENSORBOARD
        events.mkdir(parents=True, exist_ok=True)
        earlier = sorted(events.iterdir())
        self._log = logging.FileHandler(self._folder / LOG, encoding="utf-8", delay=True)
        self._log.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
        logging.getLogger("tlt_jax").addHandler(self._log)
        is_detailed = config.log.level == "debug"
        self.progress = Progress(
            total_steps, resumed_from or 0, config.log.progress, details=is_detailed
        )
        for path in earlier:
            forget(path, first_step)

        self._events = EventsWriter(
            str(events / "events"), f".{len(earlier):04d}"
        )  # sorts also within a second
        self.text(first_step, "config", f"```yaml\n{to_yaml(config)}\n```")

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars of a step. Raises MetricError for a name that is not in the list."""
        for name, value in values.items():
            names.find(name, "scalar")
            scalar = summary.scalar(name, float(value))
            scalar.value[
                0
            ].tag = name  # tensorboardX writes _ for @ and :, which TensorBoard itself takes
            self._write(step, summary=scalar)
        self._events.flush()

    def histogram(self, step: int, name: str, values: Sequence[float] | np.ndarray) -> None:
        """Writes a histogram of the values."""
        names.find(name, "histogram")
        self._write(step, summary=summary.histogram(name, np.asarray(values, np.float64), bins=30))
        self._events.flush()

    def text(self, step: int, name: str, markdown: str) -> None:
        """Writes a text, shown as Markdown."""
        names.find(name, "text")
        self._write(step, summary=summary.text(name, markdown))
        self._events.flush()

    def image(self, step: int, name: str, pixels: np.ndarray) -> None:
        """Writes an image [height, width, 3] of uint8."""
        names.find(name, "image")
        self._write(step, summary=summary.image(name, pixels, dataformats="HWC"))
        self._events.flush()

    def step(
        self,
        step: int,
        scalars: Mapping[str, float],
        records: Sequence[Record],
        spans: Sequence[timeline.Span],
        chunks: Sequence[ChunkRecord] = (),
    ) -> None:
        """Writes an RL step.

        Completions and chunks at every step; scalars every log.every steps; texts, histograms and
        the timeline every log.texts_every steps.
        """
        self.lines(COMPLETIONS, step, records)
        if chunks:
            self.lines(SPECULATION, step, chunks)

        log = self._config.log
        if step % log.every == 0:
            self.scalars(step, scalars)

        if step % log.texts_every == 0:
            self.histogram(step, "response_length/histogram", [record.length for record in records])
            self.histogram(step, "reward/histogram", [record.reward for record in records])

            drafted = [
                np.repeat(np.arange(len(chunk.accepted)), chunk.accepted)
                for chunk in chunks
                if chunk.accepted
            ]
            if drafted:
                self.histogram(step, "speculation/accepted/histogram", np.concatenate(drafted))

            self.image(step, "rollout/timeline", timeline.draw(spans, self._config.mesh.data))
            self.file(TIMELINE, f"{step:06d}.json", json.dumps(timeline.trace(spans)))
            if log.texts:
                self.text(
                    step,
                    "rollout/samples",
                    "\n\n---\n\n".join(sample(one) for one in records[: log.texts]),
                )

        self.progress.step(step, dict(scalars))

    def lines(self, folder: str, step: int, records: Sequence[Record | ChunkRecord]) -> None:
        """Writes FOLDER/STEP.jsonl atomically."""
        lines = (
            json.dumps({"step": step, **asdict(record)}, ensure_ascii=False) for record in records
        )
        self.file(folder, f"{step:06d}.jsonl", "".join(f"{line}\n" for line in lines))

    def file(self, folder: str, name: str, text: str) -> None:
        """Writes FOLDER/NAME atomically."""
        path = self._folder / folder / name
        path.parent.mkdir(exist_ok=True)
        atomic.write_text(path, text)

    def say(self, text: str) -> None:
        """Prints a line above the progress display."""
        self.progress.say(text)

    def close(self) -> None:
        """Closes the files and ends the display."""
        self.progress.close()
        logging.getLogger("tlt_jax").removeHandler(self._log)
        self._log.close()
        self._events.close()

    def _write(self, step: int, **content) -> None:
        self._events.write_event(Event(step=step, wall_time=time.time(), **content))


class NoWriter:
    """The writer of a process that leaves writing to another: does nothing."""

    def __enter__(self) -> NoWriter:
        return self

    def __exit__(self, *_) -> None:
        pass

    def nothing(self, *_) -> None:
        pass

    scalars = histogram = text = image = step = lines = file = say = close = nothing


def forget(path: Path, first_step: int) -> None:
    """Removes the events of `first_step` and later from a TensorBoard file, and a last one that is not whole.

    Events of the supervised warm start stay, unless first_step is 0 (a new run). Of a damaged file the events before the
    damage stay, and a copy of all of it is kept beside the folder, which is logged.
    """
    content, kept, start, is_damaged = path.read_bytes(), [], 0, False
    while start + 12 <= len(content):  # a record is: 8 bytes of length, checksum, event, checksum
        length, checksum = struct.unpack_from("<QI", content, start)
        end = start + 16 + length
        is_damaged = masked_crc32c(content[start : start + 8]) != checksum
        if is_damaged or end > len(content):
            break
        try:
            event = Event.FromString(content[start + 12 : end - 4])
        except DecodeError:
            is_damaged = True
            break
        if event.step < first_step or event.file_version or first_step and is_warm_start(event):
            kept.append(content[start:end])
        start = end

    if is_damaged:
        copy = path.parent.with_name(f"{TENSORBOARD}_damaged") / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(content)
        log.warning(
            "%s is damaged at byte %d: what comes after it is not shown any more; all of it is in %s",
            path,
            start,
            copy,
        )
    if sum(map(len, kept)) < len(content):
        outside = path.parent.with_suffix(atomic.TEMPORARY)  # of the folder that TensorBoard reads
        with atomic.replacing(path, outside) as temporary:
            temporary.write_bytes(b"".join(kept))


def is_warm_start(event: Event) -> bool:
    """True for scalars of the supervised warm start.

    It counts its own steps, all of them before the first checkpoint.
    """
    return event.HasField("summary") and all(
        value.tag.startswith("sft/") for value in event.summary.value
    )


def sample(record: Record) -> str:
    """One answer as Markdown, indented so that none of it is interpreted as markup."""
    parts = ", ".join(f"{name} {value:g}" for name, value in record.parts.items())
    head = f"**reward {record.reward:g}** ({parts or 'no parts'}), {record.length} tokens, {record.finish}"
    return "\n\n".join(
        [head, "prompt", indented(record.prompt), "answer", indented(record.completion)]
    )


def indented(text: str) -> str:
    """The text as a Markdown code block."""
    return "\n".join(f"    {line}" for line in text.splitlines() or [""])
