#!/usr/bin/env bash
# Installs into .venv what is missing, then lints and tests; arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
./launch/install.sh test
.venv/bin/python -m ruff check .
exec .venv/bin/python -m pytest --durations=15 "$@"
