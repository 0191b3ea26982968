"""Pages and files of measurements: rows are complete, and the pages name and link to files that exist."""

from __future__ import annotations

import csv
import importlib
import re
import runpy
import sys
from pathlib import Path

import pytest
from PIL import Image

from benchmarks.common.results import MEASURED_WITH, ResultTable
from benchmarks.whole_runs import claim, learning

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / "benchmarks"
PAGE = (BENCHMARKS / "README.md").read_text()
FILES = sorted((BENCHMARKS / "results").glob("*.csv"))
OTHERS = {"in_turns.py"}  # is started by a benchmark, and takes no --help
SCRIPTS = sorted(
    path.relative_to(BENCHMARKS)
    for path in BENCHMARKS.rglob("*.py")
    if "__main__" in path.read_text() and path.name not in OTHERS
)
PAGES = [ROOT / "README.md", BENCHMARKS / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


def module_of(script: Path) -> str:
    return ".".join(("benchmarks", *script.with_suffix("").parts))


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


def test_every_script_that_a_page_or_a_row_names_is_there_or_named_as_deleted():
    texts = [page.read_text() for page in PAGES] + [path.read_text() for path in FILES]
    named = {name for text in texts for name in re.findall(r"benchmarks/([\w/]+\.py)", text)}
    modules = {name for text in texts for name in re.findall(r"-m benchmarks\.([\w.]+)", text)}
    named |= {f"{name.replace('.', '/')}.py" for name in modules}
    (deleted,) = re.findall(r"^Deleted scripts.*?1aaca68.*?\n\n", PAGE, re.M | re.S)
    gone = set(re.findall(r"`(\w+\.py)`", deleted))
    named |= set(re.findall(r"`([\w/]+\.py)`", PAGE.replace(deleted, "")))
    there = {str(path) for path in SCRIPTS}
    assert gone & there == set() and named - there - gone == set()
    assert {"end_to_end.py", "speculation/speed.py"} <= named


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_relative_link_of_a_page_leads_somewhere(page):
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text())]
    local = [link for link in links if link and not re.match(r"[a-z]+:", link)]
    assert [link for link in local if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_every_script_says_what_it_measures_and_takes(script, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(BENCHMARKS / script), "--help"])
    with pytest.raises(SystemExit) as end:
        if script.parent.name:
            importlib.import_module(module_of(script)).main()
        else:
            runpy.run_path(BENCHMARKS / script, run_name="__main__")
    assert end.value.code == 0
    path = f"benchmarks/{script.name}"
    how = path if (ROOT / path).exists() else f"-m {module_of(script)}"
    assert f"python {how} " in capsys.readouterr().out, "how it is called"


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


@pytest.mark.parametrize("script", [one for one in SCRIPTS if one.parent.name], ids=str)
def test_a_script_appends_to_the_file_of_its_name(script):
    columns = getattr(importlib.import_module(module_of(script)), "COLUMNS", None)
    names = script.stem, "_".join(script.with_suffix("").parts)
    for path in FILES:
        if columns and path.stem in names:
            with path.open(newline="") as file:
                assert next(csv.reader(file))[-len(columns) :] == list(columns)


def test_the_picture_of_the_readme_is_drawn_from_the_newest_rows_and_says_what_its_text_says(
    tmp_path,
):
    found = claim.speeds()
    drawn = Image.open(ROOT / "docs" / "rollout_speed.png")
    assert drawn.text["Description"] == claim.caption(found), claim.__doc__.splitlines()[2]
    (alternative,) = re.findall(
        r"!\[([^]]*)\]\(docs/rollout_speed\.png\)", ROOT.joinpath("README.md").read_text()
    )
    assert all(str(one) in alternative for one in found)
    text = ROOT.joinpath("README.md").read_text().replace("95 % interval ", "")
    assert f"with TLT is {found[0]} times" in text
    pytest.importorskip("matplotlib", reason="the benchmarks extra")
    claim.main(["--out", str(tmp_path / "new.png")])
    assert Image.open(tmp_path / "new.png").size == drawn.size


def test_the_picture_of_learning_is_drawn_from_the_newest_rows_and_readme_says_the_same():
    said = learning.caption(learning.points(learning.RESULTS))
    assert Image.open(ROOT / "docs" / "learning.png").text["Description"] == said
    assert f"![{said}](docs/learning.png)" in (ROOT / "README.md").read_text()
