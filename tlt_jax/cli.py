"""The command `tlt`, and the setup, one-line errors and exit codes that all commands share."""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from tlt_jax.config import Config
from tlt_jax.distributed.process import refuse_many, set_environment
from tlt_jax.errors import MISTAKE, PREEMPTED as PREEMPTED, ConfigError, UserError

DONE, DIVERGED = 0, 1
# The module of `tlt NAME`, run as by `python -m MODULE`.
COMMANDS = {
    "train": "tlt_jax.train",
    "drafter": "tlt_jax.train.drafter",
    "sft": "tlt_jax.train.sft",
    "eval": "tlt_jax.eval",
    "generate": "tlt_jax.generate",
    "export": "tlt_jax.export",
    "plan": "tlt_jax.plan",
    "make-tiny-model": "tlt_jax.make_tiny_model",
}


def main() -> NoReturn:
    """`tlt NAME ARGUMENTS...`; exits with the code of the command, or with 2 when no command is given."""
    names, name = ", ".join(COMMANDS), "".join(sys.argv[1:2])
    if name in ("", "-h", "--help"):
        print(f"usage: tlt NAME [ARGUMENTS...]; tlt NAME --help says more\nnames: {names}")
        raise SystemExit(0 if name else MISTAKE)
    if name not in COMMANDS:
        stop(ConfigError(f"tlt has no command {name!r}: use one of {names}"))
    del sys.argv[1]
    runpy.run_module(COMMANDS[name], run_name="__main__", alter_sys=True)
    raise SystemExit(0)


@contextmanager
def prepared(config: Config, is_one_of_many: bool = False) -> Iterator[None]:
    """Context that prepares the process for JAX, before JAX is imported.

    A UserError inside ends the process with a one-line message and its exit code. So does a start as
    one of many processes, unless `is_one_of_many`: the command supports that.
    """
    try:
        if not is_one_of_many:
            refuse_many(os.environ)
        set_environment(config)
        yield
    except UserError as error:
        stop(error)


def stop(error: UserError) -> None:
    """Prints the error and exits with its code."""
    print(f"error: {error}", file=sys.stderr)
    raise SystemExit(error.code)


def take(arguments: list[str], name: str) -> str:
    """Removes `--name VALUE` from the arguments, and returns VALUE. Exits with code 2 when it is missing."""
    if name not in arguments[:-1]:
        stop(ConfigError(f"{name} is missing: give {name} VALUE"))
    index = arguments.index(name)
    value = arguments[index + 1]
    del arguments[index : index + 2]
    return value
