#!/usr/bin/env bash
# Installs what .venv lacks, then trains the quickstart; arguments go to the training command.
set -euo pipefail
cd "$(dirname "$0")/.."
./launch/install.sh
exec .venv/bin/python -m tlt_jax.train --config configs/quickstart.yaml "$@"
