"""The errors of the user's making, each one line: what is wrong, which value, and what to change. No JAX."""

from __future__ import annotations


class UserError(Exception):
    """Something that the user can put right; a command prints it and exits with 2."""


class ConfigError(UserError, ValueError):
    """A mistake in the configuration."""


class DataError(UserError, ValueError):
    """Data that cannot be used; the message names each file, line and fix."""


class ModelError(UserError, ValueError):
    """A model or drafter that cannot be used."""


class RewardError(UserError, ValueError):
    """The rewards of the configuration cannot run."""


class CheckpointError(UserError, RuntimeError):
    """A checkpoint that cannot be used."""


class Interrupted(Exception):
    """The work was asked to stop before it was done; nothing of it is kept."""
