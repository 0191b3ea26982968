"""The worker: receives pickled completions and sends scores as JSON, over a socket. No JAX.

It is a process, which ends with its parent, together with the processes that its rewards started; or a thread, for
rewards that no other process can import.
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Sequence
from multiprocessing.connection import Connection
from typing import Any

from tlt_jax.config import Config
from tlt_jax.errors import UserError
from tlt_jax.rewards import terms

# Environment variables that workers get; names that end in * are prefixes.
PASSED = ("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHON*", "OMP_*",
          "OPENBLAS_*", "MKL_*", "HF_*")  # fmt: skip
# Bytes of data memory; a worker may have an eighth of the host's, and always so many.
LEAST_MEMORY = 2**33


def environment(names: Sequence[str]) -> dict[str, str]:
    """The environment of a worker: the variables of PASSED, and these names."""
    prefixes = tuple(name[:-1] for name in PASSED if name.endswith("*"))
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name in names or name.startswith(prefixes)
    }
    return passed | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def main(descriptor: int, alive: int) -> None:
    """The worker process. `alive`: read end of a pipe that the parent holds open."""
    # Only the parent ends a worker: a signal to the group must not look like a reward's crash.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    guard(alive, descriptor)
    os.dup2(2, 1)  # prints of a reward go to standard error

    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        config = pipe.recv()
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = max(LEAST_MEMORY, host // 8)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        serve(pipe, config)


def start_thread(pipe: Connection, config: Config) -> threading.Thread:
    """A worker in a thread of this process. It closes its end of the socket however it ends."""

    def run() -> None:
        with pipe, contextlib.suppress(EOFError, OSError, SystemExit):
            serve(pipe, config)

    thread = threading.Thread(target=run, name="reward", daemon=True)
    thread.start()
    return thread


def serve(pipe: Connection, config: Config) -> None:
    """Loads the rewards, and scores jobs until the parent closes its end of the socket, which raises EOFError or OSError.

    Messages to the parent: ["ready"] or ["refused", reason]; then for each job ["term", name] as
    each reward starts, and one of ["score", parts] and ["error", reason].
    """
    rewards = {}
    for name in config.reward.terms:
        try:
            rewards[name] = terms.resolve(name, config)
        except UserError as error:
            tell(pipe, "refused", str(error))
            return
        except Exception as error:  # a user's task may raise anything
            tell(pipe, "refused", f"reward.terms {name!r}: {_describe(error)}")
            return
    tell(pipe, "ready")
    while True:
        job = pipe.recv_bytes()
        parts: dict[str, float] = {}
        try:
            prompt, completion, row = pickle.loads(job)
            for name, reward in rewards.items():
                tell(pipe, "term", name)
                parts |= terms.evaluate(name, reward, prompt, completion, row)
        except Exception as error:  # the boundary where model text meets a parser: this score fails
            tell(pipe, "error", _describe(error))
        else:
            tell(pipe, "score", parts)


def guard(alive: int, descriptor: int) -> None:
    """Forks a guard that kills this process group, including processes that rewards started, once the parent is gone."""
    if os.fork():
        os.close(alive)
        return
    os.close(descriptor)  # so that the parent notices the end of this worker
    os.read(alive, 1)  # nobody writes to it: it returns when the parent's end closes
    os.killpg(0, signal.SIGKILL)


def tell(pipe: Connection, *message: Any) -> None:
    """Sends one message to the parent."""
    pipe.send_bytes(json.dumps(message).encode())


def _describe(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip()[:500]
