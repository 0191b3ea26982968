"""The command `python benchmarks/algorithms.py`, which is benchmarks.whole_runs.algorithms."""

import runpy
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
    runpy.run_module("benchmarks.whole_runs.algorithms", run_name="__main__", alter_sys=True)
