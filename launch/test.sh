#!/usr/bin/env bash
# Installs into .venv what is missing, then lints and tests, a file of tests at a time on every core; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
./launch/install.sh test
.venv/bin/python -m ruff check .
.venv/bin/python -m ruff format --check --quiet .
exec .venv/bin/python -m pytest -n auto --maxprocesses 8 --dist loadfile --no-loadscope-reorder --durations=15 "$@"
