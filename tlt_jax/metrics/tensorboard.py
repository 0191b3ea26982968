"""The TensorBoard events of a run folder, each scalar with its sentence of metrics.names; knows no values."""

from __future__ import annotations

import logging
import struct
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from google.protobuf.message import DecodeError

from tlt_jax import atomic
from tlt_jax.config import Config
from tlt_jax.config.schema import TENSORBOARD
from tlt_jax.metrics import names


@contextmanager
def without(module: str) -> Iterator[None]:
    """Context in which a module that was not imported yet cannot be."""
    hides = module not in sys.modules
    if hides:
        sys.modules[module] = None
    try:
        yield
    finally:
        if hides:
            del sys.modules[module]


# Where PyTorch is installed tensorboardX imports it, for a writer that is not used here: starting would take that much longer.
with without("torch"):
    from tensorboardX import summary
    from tensorboardX.event_file_writer import EventsWriter
    from tensorboardX.proto.event_pb2 import Event
    from tensorboardX.proto.summary_pb2 import SummaryMetadata
    from tensorboardX.record_writer import masked_crc32c

log = logging.getLogger(__name__)


class TensorBoard:
    """Writes events to <run>/tensorboard. They are on disk when a method returns.

    Removes events of `first_step` and later, which an interrupted run wrote.
    """

    def __init__(self, config: Config, first_step: int):
        folder = Path(config.run) / TENSORBOARD
        folder.mkdir(parents=True, exist_ok=True)
        earlier = sorted(folder.iterdir())
        for path in earlier:
            forget(path, first_step)
        # The number sorts the file after earlier ones of the same second.
        self._events = EventsWriter(str(folder / "events"), f".{len(earlier):04d}")
        self._described: set[str] = set()

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes scalars of a step; the first of a name has the name's meaning as its description."""
        scalars = []
        for name, value in values.items():
            scalar = summary.scalar(name, value)
            # tensorboardX replaces @ and : by _, which TensorBoard allows
            scalar.value[0].tag = name
            if name not in self._described:
                self._described.add(name)
                shown = SummaryMetadata(
                    plugin_data=SummaryMetadata.PluginData(plugin_name="scalars"),
                    summary_description=names.find(name, "scalar").help,
                )
                scalar.value[0].metadata.CopyFrom(shown)
            scalars.append(scalar)
        self._write(step, *scalars)

    def histogram(self, step: int, name: str, values: Sequence[float] | np.ndarray) -> None:
        """Writes a histogram of the values."""
        self._write(step, summary.histogram(name, np.asarray(values, np.float64), bins=30))

    def text(self, step: int, name: str, markdown: str) -> None:
        """Writes a text, shown as Markdown."""
        self._write(step, summary.text(name, markdown))

    def close(self, is_failed: bool) -> None:
        """Closes the file."""
        self._events.close()

    def _write(self, step: int, *contents: Any) -> None:
        for content in contents:
            self._events.write_event(Event(step=step, wall_time=time.time(), summary=content))
        self._events.flush()


def forget(path: Path, first_step: int) -> None:
    """Removes the events of `first_step` and later from a TensorBoard file, and an incomplete last one.

    Keeps the events of the supervised warm start unless first_step is 0 (a new run). In a damaged file it keeps the events
    before the damage, copies the file to a folder next to this one, and logs both.
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
        tags = [value.tag for value in event.summary.value] if event.HasField("summary") else [""]
        is_warm_start = all(tag.startswith("sft/") for tag in tags)  # which counts its own steps
        if event.step < first_step or event.file_version or first_step and is_warm_start:
            kept.append(content[start:end])
        start = end

    if is_damaged:
        copy = path.parent.with_name(f"{TENSORBOARD}_damaged") / path.name
        copy.parent.mkdir(exist_ok=True)
        copy.write_bytes(content)
        said = "%s is damaged at byte %d: later events are removed; a copy of the file is in %s"
        log.warning(said, path, start, copy)
    if sum(map(len, kept)) < len(content):
        # Outside of the folder, where TensorBoard reads all files.
        outside = path.parent.with_suffix(atomic.TEMPORARY)
        with atomic.replacing(path, outside) as temporary:
            temporary.write_bytes(b"".join(kept))
