"""The structure of the package: import contracts, short chains, few files at the root."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

import tlt_jax

ROOT = Path(tlt_jax.__file__).parent
# Imports from a command down (of them the trainer and a rollout's run, which are objects of their own), files at the top.
LONGEST, MODULES = 12, 13


def test_import_contracts_hold():
    pytest.importorskip("grimp", reason="import-linter: the test extra")
    # In a subprocess: import-linter reconfigures logging, which disables existing loggers.
    code = (
        "from importlinter.cli import lint_imports; raise SystemExit(lint_imports(no_cache=True))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT.parent, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_no_chain_of_imports_is_long():
    grimp = pytest.importorskip("grimp", reason="import-linter: the test extra")
    graph = grimp.build_graph("tlt_jax", exclude_type_checking_imports=True)

    @cache
    def below(module: str) -> tuple[str, ...]:
        chains = (below(other) for other in graph.find_modules_directly_imported_by(module))
        return (module, *max(chains, key=len, default=()))

    longest = max(map(below, graph.modules), key=len)
    assert len(longest) - 1 <= LONGEST, " > ".join(longest)


def test_few_files_are_next_to_the_packages():
    files = sorted(path.name for path in ROOT.glob("*.py") if path.name != "__init__.py")
    assert len(files) <= MODULES, files


@pytest.mark.parametrize(
    "module", ["tuner.make", "config.load", "cli", "rewards", "environments", "metrics"]
)
def test_importing_what_needs_no_jax_starts_none(module):
    """The linter does not see that importing a module runs its package's __init__."""
    code = f"import sys, tlt_jax.{module}; sys.exit('jax' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_class_name_stands_for_one_thing():
    """Sections of the configuration are named as what they configure; a Protocol as the class that has its fields."""
    named = Counter(
        node.name
        for path in ROOT.rglob("*.py")
        if path.parts[-2:] not in (("config", "schema.py"), ("config", "task.py"))
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef) and "Protocol" not in map(ast.unparse, node.bases)
    )
    assert not [name for name, count in named.items() if count > 1]
