"""The command `tlt`, and the setup, one-line errors and exit codes that all commands share."""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, NoReturn

from tlt_jax.config import Config, load as loading
from tlt_jax.distributed.process import refuse_many, set_environment
from tlt_jax.errors import MISTAKE, PREEMPTED as PREEMPTED, ConfigError, UserError

DONE, DIVERGED = 0, 1


class Command(NamedTuple):
    """The module of `tlt NAME`, run as by `python -m MODULE`, and what it does."""

    module: str
    about: str


COMMANDS = {
    "train": Command(
        "tlt_jax.train",
        "Trains a policy by RL; the same command continues a run that was stopped.",
    ),
    "drafter": Command(
        "tlt_jax.train.drafter",
        "Trains an EAGLE or EAGLE-3 drafter for a policy, and writes it for serving engines.",
    ),
    "drafters": Command(
        "tlt_jax.drafter",
        "Lists the drafters that a run can start from: those that runs left, and published ones.",
    ),
    "sft": Command(
        "tlt_jax.train.sft",
        "Trains on worked solutions alone: the supervised warm start of a run.",
    ),
    "eval": Command(
        "tlt_jax.eval",
        "Answers the evaluation prompts of a configuration with its model: mean@k and pass@k.",
    ),
    "generate": Command(
        "tlt_jax.generate",
        "Answers prompts with a model, and says how fast, and how much was drafted.",
    ),
    "serve": Command(
        "tlt_jax.inference.serve",
        "Serves a model over HTTP, with the routes of vLLM and OpenAI: tokens in, tokens and log-probs out.",
    ),
    "export": Command(
        "tlt_jax.export",
        "Writes the policy or the drafter of a checkpoint as a Hugging Face model directory.",
    ),
    "show": Command(
        "tlt_jax.show",
        "Prints the best and the worst answers of a step of a run.",
    ),
    "plan": Command(
        "tlt_jax.plan",
        "Compiles every program of a configuration ahead of time, also for devices that are not here, and says whether "
        "they fit.",
    ),
    "simulate": Command(
        "tlt_jax.simulate",
        "Runs RL steps in virtual time on a table of costs: what they would take with and without drafting.",
    ),
    "doctor": Command(
        "tlt_jax.doctor",
        "Says what of this machine and installation is wrong, and what to do; its output belongs into a bug report.",
    ),
    "make-tiny-model": Command(
        "tlt_jax.make_tiny_model",
        "Makes a tokenizer and a small random model from a text file, for dry runs.",
    ),
}


def main() -> NoReturn:
    """`tlt NAME ARGUMENTS...`; exits with the code of the command, or with 2 when no command is given."""
    name = "".join(sys.argv[1:2])
    if name in ("", "-h", "--help"):
        loading.show(overview())
        raise SystemExit(0 if name else MISTAKE)
    if name not in COMMANDS:
        stop(ConfigError(f"tlt has no command {name!r}: use one of {', '.join(COMMANDS)}"))
    del sys.argv[1]
    if not sys.flags.safe_path:  # modules of the current folder are found, as by `python -m`
        sys.path.insert(0, os.getcwd())
    runpy.run_module(COMMANDS[name].module, run_name="__main__", alter_sys=True)
    raise SystemExit(0)


def overview() -> str:
    """The text of `tlt --help`: every command and every shipped configuration, with a sentence each."""
    lines = ["usage: tlt NAME [ARGUMENTS...]; tlt NAME --help says more", "", "commands:"]
    lines += loading.columns({name: command.about for name, command in COMMANDS.items()})
    lines += ["", "shipped configurations, for --config NAME:"]
    return "\n".join(lines + loading.columns(loading.shipped_configurations()))


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


class Parser(argparse.ArgumentParser):
    """The arguments of a command without knobs; an error is one line."""

    def error(self, message: str) -> NoReturn:
        stop(ConfigError(message))


def take(arguments: list[str], name: str, default: str | None = None) -> str:
    """Removes `--name VALUE` from the arguments of a command with knobs, and returns VALUE, or the default without it.

    Exits with code 2 when a value is missing.
    """
    if name not in arguments and default is not None:
        return default
    if name not in arguments[:-1]:
        stop(ConfigError(f"{name} is missing: give {name} VALUE"))
    index = arguments.index(name)
    value = arguments[index + 1]
    del arguments[index : index + 2]
    return value
