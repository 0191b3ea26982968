"""The command `python benchmarks/update.py`, which is benchmarks.device.update."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    runpy.run_module("benchmarks.device.update", run_name="__main__", alter_sys=True)
