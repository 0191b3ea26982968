"""Errors that a user can correct. No JAX.

Their messages are one line: what is wrong, the value, and what to change.
"""

from __future__ import annotations

import errno
from typing import Any

# Exit codes: any other error; a UserError; a preempted run, which the same command resumes (EX_TEMPFAIL).
FAILED, MISTAKE, PREEMPTED = 1, 2, 75


class UserError(Exception):
    """An error that the user can correct; a command prints it and exits with its `code`."""

    code = MISTAKE


class ConfigError(UserError, ValueError):
    """An invalid configuration."""


class DataError(UserError, ValueError):
    """Invalid data; the message names each file, line and fix."""


class ModelError(UserError, ValueError):
    """A model or drafter that is invalid or not supported."""


class RewardError(UserError, ValueError):
    """Rewards that cannot be loaded or run."""


class EnvironmentsError(UserError, ValueError):
    """Environments or tools that cannot be loaded or run, or that break their protocol."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that is missing, damaged or does not match the run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are missing or changed."""


class Diverged(UserError, RuntimeError):
    """Training whose loss or weights are not finite; nothing of it is saved."""

    code = FAILED


class DiskFull(UserError, RuntimeError):
    """A file system of the run is full; earlier checkpoints are intact."""

    code = FAILED


class Interrupted(Exception):
    """The work was interrupted before its end, and its results are discarded."""


FULL = ("No space left on device", "Disk quota exceeded")  # messages of libraries that set no errno


def is_disk_full(error: BaseException | None) -> bool:
    """Whether an error, or one of its causes, is that of a full file system or quota."""
    if error is None:
        return False
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    return any(text in str(error) for text in FULL) or is_disk_full(error.__cause__)


def refuse(*rules: tuple[Any, str]) -> None:
    """Raises ModelError with the message of the first rule that holds."""
    for holds, message in rules:
        if holds:
            raise ModelError(message)
