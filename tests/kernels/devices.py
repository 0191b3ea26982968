"""Runs scripts of this folder on the GPU of this machine, each in a separate process, since the tests have CPUs."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

HIDES_DEVICES = ("JAX_PLATFORMS", "XLA_FLAGS")  # as the tests set them


def on_device(script: str, cases: Sequence[tuple]) -> list[Any]:
    """What the script computes of each case. It skips the test where the device is no GPU.

    The script reads the pickled cases, and writes the platform, the capability for kernels, and the results.
    """
    environment = {name: os.environ[name] for name in os.environ if name not in HIDES_DEVICES}
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name(script)],
        input=pickle.dumps([*map(tuple, cases)]), capture_output=True, env=environment,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr.decode()
    platform, capability, results = pickle.loads(done.stdout)
    if platform != "gpu":
        pytest.skip(f"the device is a {platform}, the kernels are for GPUs")
    assert capability is not None, done.stderr.decode()
    return results
