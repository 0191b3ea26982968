"""examples/quickstart.ipynb runs from top to bottom in a kernel, and shows what its text says."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

import tlt_jax

ROOT = Path(tlt_jax.__file__).parents[1]
PATIENCE_S = 900  # for a cell: the machine may do much else
# What a run in the tests has else: fewer and smaller programs to compile, which is what it waits for.
SMALLER = {
    '"num_hidden_layers": 2': '"num_hidden_layers": 1',
    '"sft.steps": 0,': '"sft.steps": 0, "drafter_training.unroll": 1, "speculation.strategies": ["3_1_4"],',
}


@pytest.fixture(scope="module")
def notebook():
    return nbformat.read(ROOT / "examples" / "quickstart.ipynb", as_version=4)


@pytest.fixture(scope="module")
def executed(notebook, tmp_path_factory):
    """The notebook with its outputs, run in a folder of its own."""
    folder, notebook = tmp_path_factory.mktemp("notebook"), copy.deepcopy(notebook)
    for ours, smaller in SMALLER.items():
        (cell,) = (cell for cell in notebook.cells if ours in cell.source)
        cell.source = cell.source.replace(ours, smaller)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
        patch.setenv("HOME", str(folder))
        place = {"metadata": {"path": str(folder)}}
        return NotebookClient(notebook, timeout=PATIENCE_S, resources=place).execute()


def outputs(notebook, word: str, kind: str) -> str:
    """What the cell below the heading with this word shows, of this MIME type."""
    at = next(i for i, cell in enumerate(notebook.cells) if f"## {word}" in cell.source)
    found = notebook.cells[at + 1].outputs
    if kind == "text":
        return "".join(one.text for one in found if one.get("name") == "stdout")
    return "".join(one.data[kind] for one in found if kind in one.get("data", {}))


def test_it_is_stored_without_outputs(notebook):
    nbformat.validate(notebook)
    assert not any(cell.get("outputs") for cell in notebook.cells)


def test_training_shows_a_table_that_has_grown_to_all_steps(executed):
    table = outputs(executed, "Train", "text/html")
    assert table.count("<table>") == 1, "one output, which is updated"
    rewards = re.findall(r">(\d+)/20</td><td[^>]*>([\d.]+)<", table)
    assert [int(step) for step, _ in rewards] == [*range(1, 21)]
    assert float(rewards[-1][1]) > float(rewards[0][1]) + 0.2, "it learns"
    assert "so rewards run in its threads" in str(executed.cells)


def test_the_rest_plots_answers_evaluates_and_drafts(executed):
    assert outputs(executed, "Look", "image/png")
    assert len(outputs(executed, "Ask", "text").splitlines()) == 4
    score = re.search(r"32 greedy answers: ([\d.]+)", outputs(executed, "Evaluate", "text"))
    assert float(score[1]) > 0.5
    drafts = re.search(
        r"same tokens: True; accept length ([\d.]+)", outputs(executed, "Draft", "text")
    )
    assert float(drafts[1]) > 1.5
