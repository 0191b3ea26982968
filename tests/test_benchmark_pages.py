"""Pages and files of measurements: rows are complete, and the pages name and link to files that exist."""

from __future__ import annotations

import csv
import importlib
import re
import sys
from pathlib import Path

import pytest
from result_table import MEASURED_WITH, ResultTable

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text()
FILES = sorted((BENCHMARKS / "results").glob("*.csv"))
OTHERS = {"in_turns", "tunix_sampler"}  # started by benchmarks; they take no --help
SCRIPTS = sorted(
    path.stem
    for path in BENCHMARKS.glob("*.py")
    if "__main__" in path.read_text() and path.stem not in OTHERS
)
PAGES = [ROOT / "README.md", BENCHMARKS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_row_of_a_result_is_whole_and_the_page_names_the_file(path):
    assert f"`{path.name}`" in PAGE
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert tuple(header[: len(MEASURED_WITH)]) == MEASURED_WITH
    assert len(set(header)) == len(header) and rows
    assert {len(row) for row in rows} == {len(header)}


def test_the_page_names_no_file_of_results_that_is_missing():
    assert set(re.findall(r"`(?:results/)?(\w+\.csv)`", PAGE)) == {path.name for path in FILES}


def test_every_script_that_a_page_or_a_row_names_exists():
    texts = [page.read_text() for page in PAGES] + [path.read_text() for path in FILES]
    named = {name for text in texts for name in re.findall(r"benchmarks/(\w+\.py)", text)}
    named |= set(re.findall(r"`(\w+\.py)`", PAGE))
    assert named - {path.name for path in BENCHMARKS.glob("*.py")} == set()
    assert {"end_to_end.py", "speculation_speed.py"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_of_a_page_leads_somewhere(page):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    local = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_script_says_what_it_measures_and_takes(name, monkeypatch, capsys):
    module = importlib.import_module(name)
    monkeypatch.setattr(sys, "argv", [f"benchmarks/{name}.py", "--help"])
    with pytest.raises(SystemExit) as end:
        module.main()
    assert end.value.code == 0
    assert f"benchmarks/{name}.py" in capsys.readouterr().out, "its usage"


def test_a_table_is_printed_and_appended_to_its_file(tmp_path, capsys):
    path = tmp_path / "new.csv"
    for value in (0.12345, 2.0):
        ResultTable(("what", "value"), path).row("a, b", value)
    with path.open(newline="") as file:
        header, *rows = csv.reader(file)
    assert header == [*MEASURED_WITH, "what", "value"]
    assert [row[-2:] for row in rows] == [["a, b", "0.123"], ["a, b", "2"]]
    assert capsys.readouterr().out.endswith("| what | value |\n|---|---|\n| a, b | 2 |\n")
    with pytest.raises(ValueError, match="has the columns"):
        ResultTable(("what", "other"), path)
    assert len(path.read_text().splitlines()) == 3


@pytest.mark.parametrize(
    "name", [name for name in SCRIPTS if (BENCHMARKS / "results" / f"{name}.csv").exists()]
)
def test_a_script_appends_to_the_file_of_its_name(name):
    module = importlib.import_module(name)
    with (BENCHMARKS / "results" / f"{name}.csv").open(newline="") as file:
        header = next(csv.reader(file))[len(MEASURED_WITH) :]
    columns = getattr(module, "COLUMNS", None)
    if columns:
        assert header[-len(columns) :] == list(columns)
