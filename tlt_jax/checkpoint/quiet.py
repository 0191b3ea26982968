"""Silences the checkpoint libraries' messages about a full disk, which the store reports once."""

from __future__ import annotations

import logging
import sys
from functools import cache
from typing import Any

from tlt_jax.errors import is_disk_full


def is_not_disk_full(record: logging.LogRecord) -> bool:
    """Whether a log record is not about a full disk, which the save raises anyway."""
    return not (record.exc_info and is_disk_full(record.exc_info[1]))


@cache
def hush() -> None:
    """Filters the libraries' messages about a full disk, one for each array, from now on."""
    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_not_disk_full)
    shown = sys.unraisablehook

    def show(unraisable: Any) -> None:
        # TensorStore reports its writes to an event loop, which is closed after the first failure.
        if str(unraisable.exc_value) != "Event loop is closed":
            shown(unraisable)

    sys.unraisablehook = show
