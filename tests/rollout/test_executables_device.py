"""Executables as bytes, on the devices of this machine: where they load they compute the same, elsewhere the log says why."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.device
TESTS = Path(__file__).parents[1]


def run(folder: Path) -> list[dict]:
    """Two engines, one after the other in one process, on the devices of this machine."""
    script = Path(__file__).with_name("programs_on_device.py")
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(TESTS.parent), str(TESTS)])}
    done = subprocess.run(
        [sys.executable, script, folder], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def test_programs_load_in_this_process_and_in_a_new_one_and_compute_the_same(tmp_path):
    first, again = run(tmp_path)
    later, _ = run(tmp_path)
    assert first["compiled"] > 2
    for one in (again, later):
        assert one["answers"] == first["answers"]
        assert not one["said"] and not one["compiled"], (one["platform"], one["said"])
