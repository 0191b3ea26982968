"""console.Progress in a notebook: the rows that its table has, where it is used, and what it costs."""

from __future__ import annotations

import logging
import re
import sys
from html.parser import HTMLParser
from types import ModuleType, SimpleNamespace

import pytest

from tlt_jax.config import load as configuration
from tlt_jax.metrics import Writer, console

VALUES = {"reward/mean": 0.5, "response_length/mean": 31.6, "timing_s/step": 2.0}


class Cells(HTMLParser):
    """The texts of the rows of a table."""

    def __init__(self, text: str):
        super().__init__()
        self.rows: list[list[str]] = []
        self.is_cell = False
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.rows += [[]] if tag == "tr" else []
        self.is_cell = tag in ("td", "th")
        if self.is_cell:
            self.rows[-1].append("")

    def handle_endtag(self, tag):
        self.is_cell = False

    def handle_data(self, data):
        if self.is_cell:
            self.rows[-1][-1] += data


@pytest.fixture
def shown():
    """A table of ten steps, and every HTML that it has shown."""
    texts: list[str] = []
    table = console.Table(10, 0, texts.append)
    yield table, texts
    table.close()


def test_every_step_and_message_is_a_row_and_a_column_comes_with_its_metric(shown):
    table, texts = shown
    line = table.step(1, VALUES)
    assert line == "step 1/10  reward 0.500  length 32  2.0 s/step  0:18 to go"
    table.say("step 1/10  <b>evaluation</b> :smile:")
    table.step(2, VALUES | {"speculation/accept_length": 1.234, "reward/mean": 0.25})
    assert Cells(texts[-1]).rows == [
        ["step", "reward", "length", "s/step", "accept"],
        ["1/10", "0.500", "32", "2.0", ""],
        ["step 1/10  <b>evaluation</b> :smile:"],
        ["2/10", "0.250", "32", "2.0", "1.23"],
    ]
    assert "step 2 of 10, 0:16 to go" in texts[-1]
    assert [len(Cells(text).rows) for text in texts] == [1, 2, 3, 4], "it grows"


def test_records_of_the_package_are_rows_and_compilations_a_count(shown):
    table, texts = shown
    log = logging.getLogger("tlt_jax.somewhere")
    log.warning("a %s", "warning")
    log.debug("compiled it", extra={"compile_seconds": 2.6})
    log.debug("no row")
    table.step(1, VALUES)
    assert [row[0] for row in Cells(texts[-1]).rows] == ["step", "a warning", "1/10"]
    assert "compiled 1 program in 3 s" in texts[-1]


def test_a_long_run_sends_no_more_than_its_latest_rows(shown):
    table, texts = shown
    for step in range(1, 1001):
        table.step(step, VALUES)
    rows = Cells(texts[-1]).rows
    assert len(rows) == 1 + console.SHOWN and rows[-1][0] == "1000/10"
    assert f"{1000 - console.SHOWN} earlier rows are not shown" in texts[-1]


def test_the_loggers_are_restored():
    logger = logging.getLogger("tlt_jax")
    before = logger.level, logger.propagate, [*logger.handlers]
    console.Table(10, 0, lambda text: None).close()
    assert (logger.level, logger.propagate, logger.handlers) == before


def kernel(monkeypatch, shell: object) -> list[str]:
    """IPython with this shell; the HTML of its only output, each time it changes."""
    texts: list[str] = []
    ipython, module = ModuleType("IPython"), ModuleType("IPython.display")
    ipython.get_ipython = lambda: shell
    module.HTML = str
    module.display = lambda first, display_id: SimpleNamespace(update=texts.append)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", module)
    return texts


@pytest.mark.parametrize(("shell", "kind"), [
    (SimpleNamespace(kernel=object()), console.Table),
    (SimpleNamespace(), console.Progress),  # IPython in a terminal
    (None, console.Progress),
])  # fmt: skip
def test_a_run_in_a_kernel_shows_the_table(monkeypatch, tmp_path, shell, kind):
    texts = kernel(monkeypatch, shell)
    words = ["--config", "quickstart", "--run", str(tmp_path)]
    with Writer(configuration.parse(words), 3) as writer:
        assert type(writer.progress) is kind
        writer.say("one line")
    assert ("one line" in "".join(texts)) == (kind is console.Table)


def test_ipython_is_not_imported_to_find_out(monkeypatch):
    monkeypatch.delitem(sys.modules, "IPython", raising=False)
    assert not console.is_kernel() and "IPython" not in sys.modules
    assert not re.search(r"^(import|from) IPython", open(console.__file__).read(), re.M)


def test_an_evaluation_is_a_row_and_the_line_of_the_log(shown):
    table, texts = shown
    line = table.evaluation(2, {"eval/mean@2": 0.5, "eval/pass@1": 0.25})
    assert line == "step 2/10  evaluation:  mean@2 0.5  pass@1 0.25"
    assert Cells(texts[-1]).rows[-1] == [line]
