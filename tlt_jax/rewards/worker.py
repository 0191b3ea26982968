"""The process that scores: receives jobs and sends results over a socket. No JAX.

It ends when its parent does.
"""

from __future__ import annotations

import os
import pickle
import signal
import traceback
from multiprocessing.connection import Connection

from tlt_jax.rewards import terms


def main(descriptor: int) -> None:
    """Serves jobs until the parent closes its end of the socket.

    Messages to the parent: ("ready",) or ("refused", reason); then for each job ("term", name) as
    each reward starts, and one of ("score", parts) and ("error", reason).
    """
    # Only the parent ends a worker: a signal to the group must not look like a reward's crash.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    os.dup2(2, 1)  # what a reward prints must not enter the program's output

    pipe = Connection(descriptor)
    try:
        config = pipe.recv()
        rewards = {}
        for name in config.reward.terms:
            try:
                rewards[name] = terms.resolve(name, config)
            except Exception as error:  # a user's module may raise anything
                pipe.send(("refused", f"{name!r}: {_describe(error)}"))
                return
        pipe.send(("ready",))
        while True:
            _serve(pipe, rewards, config.reward.timeout_s)
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return


def _serve(pipe: Connection, rewards: dict[str, terms.Reward], timeout_s: float) -> None:
    """Scores the next job. An exception of a reward is this score's error; the worker goes on."""
    job = pipe.recv_bytes()

    # SIGALRM ends a worker that hangs after its parent died, even inside C code.
    signal.setitimer(signal.ITIMER_REAL, 2 * timeout_s + 10)

    parts: dict[str, float] = {}
    try:
        prompt, completion, row = pickle.loads(job)
        for name, reward in rewards.items():
            pipe.send(("term", name))
            parts |= terms.evaluate(name, reward, prompt, completion, row)
    except Exception as error:  # the boundary where model text meets a parser
        pipe.send(("error", _describe(error)))
    else:
        pipe.send(("score", parts))

    signal.setitimer(signal.ITIMER_REAL, 0)


def _describe(error: Exception) -> str:
    return traceback.format_exception_only(error)[-1].strip()[:500]
