#!/usr/bin/env bash
# Installs into .venv what is missing and trains the quickstart; arguments go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."
./launch/install.sh
exec .venv/bin/python -m tlt_jax.train --config configs/quickstart.yaml "$@"
