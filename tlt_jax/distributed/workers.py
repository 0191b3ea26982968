"""Worker processes: new interpreters without JAX that end with their parent. Knows not what they compute.

A worker and its parent talk over a socket. Messages of a worker are JSON, so that nothing that it says is run.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from tlt_jax.config import Config
from tlt_jax.distributed.process import processors

# Environment variables that workers get; names that end in * are prefixes.
PASSED = ("PATH", "HOME", "USER", "LANG", "LC_*", "TZ", "TMPDIR", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "PYTHON*", "OMP_*",
          "OPENBLAS_*", "MKL_*", "HF_*")  # fmt: skip
# Bytes of data memory; a worker may have an eighth of the host's, and always so many.
LEAST_MEMORY = 2**33
START_S = 120.0  # seconds a worker may take to import what it runs
LONGEST = 2**20  # most bytes of a worker's message
MAX_FAILED_STARTS = 5
FEWEST, MOST = 2, 4  # workers by default: one for each core, within these


def by_cores() -> int:
    """The workers of a process that is told no number: one for each core that it may use, within FEWEST and MOST."""
    return min(max(len(processors()), FEWEST), MOST)


def environment(names: Sequence[str]) -> dict[str, str]:
    """The environment of a worker: the variables of PASSED, and these names."""
    prefixes = tuple(name[:-1] for name in PASSED if name.endswith("*"))
    passed = {
        name: value
        for name, value in os.environ.items()
        if name in PASSED or name in names or name.startswith(prefixes)
    }
    return passed | {"PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def start(module: str, config: Config, alive: int) -> tuple[subprocess.Popen, Connection]:
    """A process that runs `serve(pipe, config)` of the module, and the parent's end of the socket.

    A fresh interpreter, since multiprocessing's spawn would import the caller's main module. `alive`: read end of a pipe
    that the parent holds open.
    """
    ours, theirs = Pipe()
    ours.send(config)
    with theirs:
        descriptors = theirs.fileno(), alive
        code = f"from tlt_jax.distributed import workers; from {module} import serve; workers.main(serve, *{descriptors})"
        process = subprocess.Popen(
            [sys.executable, "-c", code],
            env=environment(config.reward.environment),
            stdin=subprocess.DEVNULL,
            pass_fds=descriptors,
            process_group=0,  # so that processes started by the user's code are killed with it
        )
    return process, ours


def main(serve: Callable[[Connection, Config], None], descriptor: int, alive: int) -> None:
    """The worker process. `alive`: read end of a pipe that the parent holds open."""
    # Only the parent ends a worker: a signal to the group must not look like a crash of the user's code.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    guard(alive, descriptor)
    os.dup2(2, 1)  # prints of the user's code go to standard error

    pipe = Connection(descriptor)
    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        config = pipe.recv()
        host = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        limit = max(LEAST_MEMORY, host // 8)
        resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        serve(pipe, config)


def guard(alive: int, descriptor: int) -> None:
    """Forks a guard that kills this process group, including processes of the user's code, once the parent is gone."""
    if os.fork():
        os.close(alive)
        return
    os.close(descriptor)  # so that the parent notices the end of this worker
    os.read(alive, 1)  # nobody writes to it: it returns when the parent's end closes
    os.killpg(0, signal.SIGKILL)


def tell(pipe: Connection, *message: Any) -> None:
    """Sends one message to the parent."""
    pipe.send_bytes(json.dumps(message).encode())


def describe(error: BaseException) -> str:
    """The end of an error's traceback, in one line."""
    return " ".join(traceback.format_exception_only(error)[-1].split())[:500]


def end(process: subprocess.Popen, grace_s: float = 0.0) -> int:
    """Kills the process and its children; returns the exit code.

    Waits `grace_s` seconds first, in which the process may exit by itself.
    """
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(grace_s)
    with contextlib.suppress(ProcessLookupError, PermissionError):  # the process group is gone
        os.killpg(process.pid, signal.SIGKILL)
    return process.wait()


def cause(code: int) -> str:
    """What a worker with this exit code died of."""
    return f"the worker died of {f'signal {-code}' if code < 0 else f'exit code {code}'}"
