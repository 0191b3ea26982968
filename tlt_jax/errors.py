"""Errors that a user can correct. No JAX.

Their messages are one line: what is wrong, the value, and what to change.
"""

from __future__ import annotations

# Exit codes: of any other error, of a UserError, and of a run that the same command goes on with (EX_TEMPFAIL).
FAILED, MISTAKE, PREEMPTED = 1, 2, 75


class UserError(Exception):
    """An error that the user can correct; a command prints it and exits with code MISTAKE."""


class ConfigError(UserError, ValueError):
    """An invalid configuration."""


class DataError(UserError, ValueError):
    """Invalid data; the message names each file, line and fix."""


class ModelError(UserError, ValueError):
    """A model or drafter that is invalid or not supported."""


class RewardError(UserError, ValueError):
    """Rewards that cannot be loaded or run."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that is missing, damaged or does not match the run."""


class DamagedCheckpoint(CheckpointError):
    """A checkpoint whose files are missing or changed."""


class Interrupted(Exception):
    """The work was interrupted before its end, and its results are discarded."""
