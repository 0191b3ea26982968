"""The command `python benchmarks/rollout.py`, which is benchmarks.device.rollout."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    runpy.run_module("benchmarks.device.rollout", run_name="__main__", alter_sys=True)
