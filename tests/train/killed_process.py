"""`python -m tlt_jax.train`, in a process that kills itself (SIGKILL) at the third training step of the drafter."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager

from tlt_jax import cli
from tlt_jax.train import __main__ as command


def main() -> int:
    """The command, which never ends by itself."""
    prepared = cli.prepared

    @contextmanager
    def killed(*arguments, **named):
        with prepared(*arguments, **named):  # JAX may be imported from here on
            from tlt_jax.drafter import step_training

            learn, calls = step_training.learn, []

            def third(*given):
                calls.append(1)
                if len(calls) == 3:
                    os.kill(os.getpid(), signal.SIGKILL)
                return learn(*given)

            step_training.learn = third
            yield

    cli.prepared = killed
    return command.main()


if __name__ == "__main__":
    sys.exit(main())
