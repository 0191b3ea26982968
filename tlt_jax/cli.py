"""What all commands share: preparing the process, one-line errors, exit codes."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from tlt_jax.config import Config
from tlt_jax.distributed.process import refuse_many, set_environment
from tlt_jax.errors import MISTAKE, ConfigError, UserError

DONE, DIVERGED, PREEMPTED = 0, 1, 75  # 75 is EX_TEMPFAIL: the same command resumes the run


@contextmanager
def prepared(config: Config, is_one_of_many: bool = False) -> Iterator[None]:
    """Context that prepares the process for JAX, before JAX is imported.

    A UserError inside ends the process with a one-line message and exit code 2. So does a start as
    one of many processes, unless the command can be that.
    """
    try:
        if not is_one_of_many:
            refuse_many(os.environ)
        set_environment(config)
        yield
    except UserError as error:
        stop(error)


def stop(error: Exception) -> None:
    """Prints the error and exits with code 2."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(MISTAKE)


def take(arguments: list[str], name: str) -> str:
    """Removes `--name VALUE` from the arguments, and returns VALUE.

    Exits with code 2 when it is missing.
    """
    if name not in arguments[:-1]:
        stop(ConfigError(f"{name} is missing: give {name} VALUE"))
    index = arguments.index(name)
    value = arguments[index + 1]
    del arguments[index : index + 2]
    return value
