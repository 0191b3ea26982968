#!/usr/bin/env bash
# Installs what .venv lacks, then lints and tests, one test file at a time per core; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
./launch/install.sh test
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check --quiet .
exec .venv/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=15 "$@"
