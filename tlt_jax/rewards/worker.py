"""The worker: receives pickled completions and sends scores as JSON, over a socket. No JAX.

It is a process, which ends with its parent, together with the processes that its rewards started; or a thread, for
rewards that no other process can import.
"""

from __future__ import annotations

import contextlib
import pickle
import threading
from multiprocessing.connection import Connection

from tlt_jax.config import Config
from tlt_jax.distributed.workers import describe, tell
from tlt_jax.errors import UserError
from tlt_jax.rewards import terms


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
            tell(pipe, "refused", f"reward.terms {name!r}: {describe(error)}")
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
            tell(pipe, "error", describe(error))
        else:
            tell(pipe, "score", parts)
