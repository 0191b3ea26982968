#!/usr/bin/env bash
# Creates .venv and installs the package into it with the given extras ("test", "test,parity", or none);
# does nothing if that was done for the same pyproject.toml. PYTHON names the interpreter (default: python3).
set -euo pipefail
cd "$(dirname "$0")/.."
extras="${1:-}"
python="${PYTHON:-python3}"

stamp=".venv/installed-${extras:-base}"
want="$(cat pyproject.toml | cksum)"
if [[ -x .venv/bin/python && -f "$stamp" && "$(cat "$stamp")" == "$want" ]]; then
  exit 0
fi
if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
  echo "error: $python is $("$python" --version 2>&1 || true), Python 3.11 or newer is needed: set PYTHON, for example PYTHON=python3.12" >&2
  exit 2
fi
if [[ ! -x .venv/bin/python ]]; then
  "$python" -m venv .venv
fi
echo "installing tlt_jax${extras:+ [$extras]} into .venv"
.venv/bin/python -m pip install --quiet --disable-pip-version-check -e ".${extras:+[$extras]}"
echo "$want" > "$stamp"
