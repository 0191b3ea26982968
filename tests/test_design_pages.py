"""docs/: links lead to files, and docs/design/modules.md names every module."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import tlt_jax

ROOT = Path(tlt_jax.__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def named(tree: str) -> set[str]:
    """Modules of a tree as `folder/module`: two columns of indentation a level, descriptions after two blanks."""
    found, folders = set(), []
    for line in filter(None, tree.splitlines()):
        depth = (len(line) - len(line.lstrip())) // 2
        first = re.split("  +", line.strip())[0]
        folders = folders[:depth]
        if first.endswith("/"):
            folders.append(first)
        else:
            found |= {"".join(folders) + name for name in first.split(" ")}
    return found


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page):
    links = re.findall(r"\]\((?!https?:)([^)#\s]+)[^)\s]*\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_the_page_of_modules_names_every_module():
    (tree,) = re.findall(
        r"^```\n(.*?)^```", (ROOT / "docs/design/modules.md").read_text(), re.M | re.S
    )
    folder = ROOT / "tlt_jax"
    modules = {
        "tlt_jax/" + str(file.relative_to(folder).with_suffix(""))
        for file in folder.rglob("*.py")
        if not file.stem.startswith("__")
    }
    assert modules - named(tree) == set()
