"""The pages: links lead somewhere, the knobs, metrics and algorithms that they name exist, and they stay short."""

from __future__ import annotations

import re
import tomllib
from functools import cache
from pathlib import Path

import pytest

import tlt_jax
from tlt_jax.config import Config, load as configuration, parse
from tlt_jax.config.knobs import knobs
from tlt_jax.config.validate import validate_rl
from tlt_jax.errors import ConfigError
from tlt_jax.metrics import names
from tlt_jax.models import hf_families

ROOT = Path(tlt_jax.__file__).parents[1]
DOCS = ROOT / "docs"
TODAY = [
    ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "benchmarks/README.md", *sorted(DOCS.rglob("*.md")),
]  # fmt: skip
PAGES = [*TODAY, ROOT / "CHANGELOG.md"]
SECTIONS = "|".join(sorted({name.partition(".")[0] for name in knobs(Config) if "." in name}))
METRICS = "|".join(sorted({row[0].partition("/")[0] for row in names.ROWS}))
# Files and modules that look like a knob or a metric.
OTHERS = {
    "model.safetensors",
    "log.txt",
    "drafter/hf",
    "drafter/lock",
    "train.drafter",
    "train.jsonl",
    "rollout.csv",
}


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


@cache
def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub and mkdocs make them."""
    titles = re.findall(
        r"^#+ (.*)$", re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S), re.M
    )
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings(page):
    links = re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", text_of(page))
    broken = []
    for link in links:
        path, _, anchor = link.partition("#")
        target = (page.parent / path) if path else page
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(link)
    assert broken == []


def spans(page: Path) -> set[str]:
    """The words in code spans of a page; of coming_from.md only our column."""
    text = re.sub(r"^```.*?^```", "", text_of(page), flags=re.M | re.S)
    if page.name == "coming_from.md":
        text = "\n".join(
            line.split(" | ")[1] for line in text.splitlines() if line.count(" | ") == 2
        )
    found = {
        word.lstrip("-").rstrip("/").replace("@k", "@1")
        for span in re.findall(r"`([^`]+)`", text)
        for word in span.split()
    }
    return found - OTHERS


@pytest.mark.parametrize("page", TODAY, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_knob_and_metric_that_a_page_names_exists(page):
    unknown = set()
    for word in spans(page):
        try:
            if re.fullmatch(rf"({SECTIONS})\.\w+", word) and word != "model.lora":
                parse.owner(Config, word)
        except ConfigError:
            unknown.add(word)
        if re.fullmatch(rf"({METRICS})/[\w/@]+", word) and not is_metric(word):
            unknown.add(word)
    assert unknown == set()


def is_metric(name: str) -> bool:
    return any(names.pattern(row[0]).fullmatch(name) for row in names.ROWS)


def test_the_functions_that_the_overview_names_are_there():
    named = re.findall(r"`([\w/]+\.py): ([\w.]+)`", text_of(DOCS / "design.md"))
    missing = [
        (file, name)
        for file, name in named
        if not (path := ROOT / "tlt_jax" / file).is_file()
        or not re.search(rf"\b(def|class) {name.rpartition('.')[2]}\b", path.read_text())
    ]
    assert named and missing == []


def algorithms() -> dict[str, tuple[str, str]]:
    """The rows of the table of algorithms by name: paper and knobs."""
    head, *_ = text_of(DOCS / "algorithms.md").partition("\n## ")
    rows = [line.strip("|").split(" | ") for line in head.splitlines() if line.startswith("| ")]
    return {cells[0].strip(): (cells[1], cells[2]) for cells in rows[2:]}


@pytest.mark.parametrize("name", algorithms())
def test_an_algorithm_of_the_table_is_a_configuration(name):
    paper, setting = algorithms()[name]
    assert re.search(r"\[.+\]\(https://.+\)", paper)
    found = re.findall(r"`([^`]+)`", setting)
    assert found or setting == "the defaults"
    pairs = [tuple(span.split(" ", 1)) for span in found]
    validate_rl(configuration.build({"model": {"init": {"model_type": "qwen2"}}}, pairs))


def test_the_page_of_models_names_the_families():
    (table,) = re.findall(r"^\| `model_type` .*?\n\n", text_of(DOCS / "models.md"), re.M | re.S)
    named = set(re.findall(r"^\| `(\w+)` \| ", table, re.M)) - {"model_type"}
    assert named == hf_families.FAMILIES.keys()


def test_the_page_of_versions_has_the_bounds_of_the_project():
    page = text_of(DOCS / "versions.md")
    project = tomllib.loads(text_of(ROOT / "pyproject.toml"))["project"]
    (jax,) = [one for one in project["dependencies"] if one.startswith("jax>")]
    lower, excluded = re.fullmatch(r"jax>=([\d.]+),!=([\d.]+)", jax).groups()
    assert f"{lower} and newer, not {excluded}" in page
    assert project["requires-python"] == ">=3.11" and "| 3.11 and newer |" in page
