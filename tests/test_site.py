"""The site of the pages (extra `docs`): it builds without a warning, and every link in it leads somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

for name in ("mkdocs", "material", "mkdocstrings_handlers"):
    pytest.importorskip(name, reason="needs the extra docs")


def build(root: Path, out: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)]
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True)


def test_the_site_is_built_strictly_and_its_links_lead_to_files(tmp_path):
    done = build(ROOT, tmp_path)
    assert done.returncode == 0 and "WARNING" not in done.stderr, done.stderr
    pages = {page: page.read_text() for page in tmp_path.rglob("*.html")}
    titles = [re.search(r"<h1[^>]*>(.*?)<", page)[1] for page in pages.values()]
    assert len(titles) > 20 and {"Knobs", "Metrics", "Benchmarks"} <= set(titles)
    broken = [
        (page.name, link)
        for page, text in pages.items()
        for link in re.findall(r'(?:href|src)="(?![a-z]+:|/)([^"#?]+)', text)
        if not (page.parent / link).exists()
    ]
    assert broken == []
    api = (tmp_path / "docs/api/index.html").read_text()
    assert all(
        f'id="{one}"' in api
        for one in (
            "tlt_jax.open_model",
            "tlt_jax.data.tasks.Task",
            "tlt_jax.tuner.interface.Tuner",
        )
    )
