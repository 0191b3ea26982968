"""Decodes on the devices of this machine with programs that were compiled, and with the same loaded from a folder.

Prints a JSON object for each engine: answers, programs compiled and loaded, what the log says. `test_executables_device.py`
calls it, twice with one folder: the second process has nothing but what the first one left there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path

for name in ("JAX_PLATFORMS", "XLA_FLAGS"):  # of a test on the CPU
    os.environ.pop(name, None)
os.environ["TLT_JAX_TEST_PROGRAMS"] = sys.argv[1]

import jax  # noqa: E402
from tiny_engine import CACHE, PLAIN, engine_of, play  # noqa: E402

said: list[str] = []


class Listener(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        said.append(record.getMessage())


def decode(data: int) -> dict:
    """One engine's rollout; JAX's own cache beside the folder of executables is emptied before."""
    said.clear()
    for path in Path(CACHE).glob("*"):
        if path.is_file():
            path.unlink()
    jax.clear_caches()
    engine = engine_of(data, dtype="float32", slots=3)
    result = play(engine, PLAIN)
    compiled = [one for one in engine.programs.compiles if not one.is_loaded]
    engine.close()
    return {
        "platform": jax.default_backend(),
        "answers": [
            [one.uid, one.tokens.tolist(), one.logprobs.tolist()] for one in result.completions
        ],
        "compiled": len(compiled),
        "loaded": len(engine.programs.compiles) - len(compiled),
        "said": [line for line in said if "compiled again" in line or "serialized" in line],
    }


if __name__ == "__main__":
    log = logging.getLogger("tlt_jax")
    log.setLevel(logging.INFO)
    log.addHandler(Listener())
    groups = min(2, jax.device_count())
    print(json.dumps([decode(groups), decode(groups)]))
