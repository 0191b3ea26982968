"""The files of the site, for mkdocs (mkdocs.yml): pages and what they link to, under their paths in the repository."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.structure.files import File, Files

from tlt_jax.config.__main__ import page as knobs
from tlt_jax.metrics.names import page as metrics

ROOT = Path(__file__).resolve().parents[1]
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "benchmarks/README.md", "docs/**/*.md")
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")
# What a user's code calls or implements.
API = (
    "tlt_jax", "tlt_jax.inference.chat.Model", "tlt_jax.inference.engine", "tlt_jax.inference.rollouts",
    "tlt_jax.data.tasks.Row", "tlt_jax.data.tasks.Task", "tlt_jax.tuner.interface", "tlt_jax.train.losses.policy_loss",
    "tlt_jax.train.advantages", "tlt_jax.errors",
)  # fmt: skip


def on_files(files: Files, config) -> Files:
    """Every page, the files that pages link to, and the pages that are made here, instead of the files of docs_dir alone."""
    pages = sorted({path for pattern in PAGES for path in ROOT.glob(pattern)})
    linked = {
        (page.parent / link).resolve() for page in pages for link in LINK.findall(page.read_text())
    }
    others = sorted(path for path in linked - set(pages) if path.is_file())
    theme = [file for file in files if file.src_dir != config.docs_dir]
    found = Files([*theme, *(at(path, config) for path in (*pages, *others))])
    for name, page in (("api", api), ("knobs", knobs), ("metrics", metrics)):
        found.append(File.generated(config, f"docs/{name}.md", content=page()))
    return found


def at(path: Path, config) -> File:
    """A file of the repository under its path there."""
    name = path.relative_to(ROOT).as_posix()
    return File(name, str(ROOT), config.site_dir, config.use_directory_urls)


def api() -> str:
    """The page of the API: docstrings."""
    parts = ["# Python", "What your own code calls or implements; from the docstrings."]
    return "\n\n".join([*parts, *(f"::: {name}" for name in API)]) + "\n"
