"""`python -m tlt_jax.train --config FILE` (or `--run RUN`, to continue a run): reads the configuration, and trains."""

from __future__ import annotations

import os
import signal
import sys
from functools import partial
from typing import NoReturn

from tlt_jax import cli
from tlt_jax.config import load as configuration

OWN = {
    "[--run RUN]": "without --config: the run in this folder continues, with its own configuration"
}


def main() -> int:
    """Exit code: 0 done, 1 diverged or a process failed, 2 wrong configuration or file, 75 preempted (run it again)."""
    # Until the loop starts and handles SIGTERM itself there is nothing to save. Exit at once: half-imported extensions crash.
    signal.signal(signal.SIGTERM, stop)
    settings = configuration.load(about=cli.COMMANDS["train"].about, own=configuration.CONFIG | OWN)
    with cli.prepared(settings, is_one_of_many=True):
        # These import JAX, so only after the process is prepared.
        from tlt_jax import run_folder
        from tlt_jax.distributed import watch
        from tlt_jax.train import loop

        with watch.joined(settings, partial(run_folder.record_failure, settings)) as watching:
            return loop.train(settings, watching)


def stop(*_) -> NoReturn:
    """SIGTERM handler: ends the process at once."""
    os.write(2, b"stopped: the same command starts again, or resumes from the last checkpoint\n")
    os._exit(cli.PREEMPTED)


if __name__ == "__main__":
    sys.exit(main())
