"""The import contracts in pyproject.toml hold."""

from __future__ import annotations

from pathlib import Path

from importlinter import cli

ROOT = Path(__file__).parent.parent


def test_every_import_contract_holds():
    assert cli.lint_imports(config_filename=str(ROOT / "pyproject.toml"), no_cache=True) == cli.EXIT_STATUS_SUCCESS
