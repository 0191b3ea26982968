"""What a run prints: a line for each step, of columns by width, on a terminal or not; in a notebook a row of a table."""

from __future__ import annotations

import html
import io
import logging
import re
import sys
from types import ModuleType, SimpleNamespace

import pytest
from rich.console import Console

from tlt_jax.config import load as configuration
from tlt_jax.metrics import Writer, console

VALUES = {
    "reward/mean": 0.25,
    "response_length/mean": 31.6,
    "response_length/max": 90,
    "perf/tokens_per_second": 1234,
}
ADAPTIVE = {"speculation/accept_length": 2.34, "idle/ratio": 0.25, "idle/used_ratio": 0.5}
COMPILATION = logging.getLogger("tlt_jax.rollout.executables.compilation")


def opened(total: int, first: int = 0, width: int = 200, **options) -> console.Progress:
    """A display that writes to a string, of a terminal with `force_terminal`."""
    is_terminal = options.pop("force_terminal", False)
    out = Console(file=io.StringIO(), width=width, force_terminal=is_terminal)
    return console.Progress(total, first, console=out, **options)


def lines_of(progress: console.Progress) -> list[str]:
    """What the display left behind, without its bar."""
    progress.close()
    left = re.sub(r"\x1b\[[?0-9;]*[A-Za-z]|[^\n]*\r", "", progress.console.file.getvalue())
    return [line for line in left.splitlines() if "━" not in line]


def test_progress_is_one_plain_line_per_step_where_there_is_no_terminal():
    progress = opened(100, 90)
    progress.step(91, {**VALUES, "timing_s/step": 4.0})
    progress.step(92, {**VALUES, "timing_s/step": 8.0})
    COMPILATION.info("an important message")
    assert lines_of(progress) == [
        "step 91/100  reward 0.250  length 32  1,234 tokens/s  4.0 s/step  0:36 to go",
        "step 92/100  reward 0.250  length 32  1,234 tokens/s  6.0 s/step  0:48 to go",
        "an important message",
    ]
    COMPILATION.info("after the end")
    assert "after" not in progress.console.file.getvalue()


def test_a_terminal_keeps_the_lines_that_a_file_has_above_a_bar():
    piped = opened(3)
    shown = opened(3, width=80, force_terminal=True)
    for step in (1, 2, 3):
        for one in (piped, shown):
            one.step(step, {**VALUES, "timing_s/step": 1.0})
    screen = shown.console.file.getvalue()
    assert lines_of(shown) == lines_of(piped)
    assert "━" in screen and "\x1b[" in screen


def test_compilations_are_summarized(monkeypatch):
    monkeypatch.setattr(console.time, "monotonic", lambda: 1.0)
    progress = opened(2)
    for seconds in (3.0, 0.4, 8.0):
        COMPILATION.debug("compiled a chunk", extra={"compile_seconds": seconds})
    COMPILATION.debug("loaded another")
    progress.step(1, {"timing_s/step": 12.0})
    progress.step(2, {"timing_s/step": 1.0})
    lines = lines_of(progress)
    assert lines[0] == "compiled 3 programs in 11 s" and lines[1].startswith("step 1/2")
    assert len(lines) == 3


def test_a_long_compilation_is_printed_before_the_step_ends(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    progress = opened(2)
    for at in (15.0, 30.0, 45.0, 60.0):
        now[0] = at
        COMPILATION.debug("compiled a chunk", extra={"compile_seconds": 15.0})
    assert lines_of(progress) == ["compiled 2 programs in 30 s"] * 2


@pytest.mark.parametrize(("values", "shown"), [
    ({"drafter/loss": 1.2345, "drafter/agreement@1": 0.5, "drafter/agreement@2": 0.25}, "loss 1.234  agreement 0.500  TIME"),
    ({"idle/ratio": 0.25, "idle/used_ratio": 0.5}, "TIME  accept 1.0  idle 25% (50% used)"),
    (VALUES | ADAPTIVE, "reward 0.250  length 32  1,234 tokens/s  TIME  accept 2.3  idle 25% (50% used)"),
    ({"actor/sequence_ratio_max": 1.0004, "actor/pg_clipfrac": 0.123, "rollout_corr/rollout_rs_seq_masked_fraction": 0.25},
     "TIME  ratio 1.000  clipped 12.3%  masked 25.0%"),
    ({"actor/pg_clipfrac": 0.0}, "TIME"),
])  # fmt: skip
def test_a_file_has_all_that_a_step_measured_in_its_line(values, shown):
    progress = opened(100, width=80)
    line = progress.step(25, values | {"timing_s/step": 1.0})
    shown = shown.replace("TIME", "1.0 s/step  1:15 to go")
    assert lines_of(progress) == [line] == [f"step 25/100  {shown}"]


ORDER = ["step", "reward", "length", "tokens/s", "s/step", "to go", "accept", "idle"]


def shown_at(width: int, values: dict, step: int, total: int) -> list[str]:
    """The columns of a step's line on a terminal of this width."""
    progress = opened(total, width=width, force_terminal=True)
    progress.step(step, values)
    (line,) = lines_of(progress)
    assert len(line) <= width and "..." not in line
    cells = re.split("  +", line)
    for cell, name in zip(cells, ORDER, strict=False):
        assert cell.startswith(name) or cell.endswith(name), "in this order, none left out"
    return cells


@pytest.mark.parametrize("values, step, total", [
    ({"timing_s/step": 0.9}, 60, 60),
    ({"reward/mean": -0.25, "response_length/mean": 8192, "timing_s/step": 95.2}, 120, 1000),
    ({"response_length/mean": 2048, "perf/tokens_per_second": 234567, "timing_s/step": 320.0}, 1, 200),
    ({"response_length/mean": 32000, "perf/tokens_per_second": 2.5e6, "timing_s/step": 28.4}, 900, 2000),
])  # fmt: skip
def test_a_terminal_of_eighty_columns_shows_all_up_to_the_remaining_time(values, step, total):
    whole = VALUES | ADAPTIVE | values
    shown = [len(shown_at(width, whole, step, total)) for width in range(20, 140)]
    assert shown == sorted(shown) and shown[80 - 20] >= 6 and shown[-1] == len(ORDER)


def test_numbers_of_a_column_end_below_one_another():
    progress = opened(99)
    for step, length in ((1, 1234.0), (2, 9.0), (3, 99.0)):
        progress.step(step, VALUES | {"response_length/mean": length, "timing_s/step": 1.0})
    ends = [re.search(r"length \d+", line).end() for line in lines_of(progress)]
    assert len(set(ends)) == 1


@pytest.mark.parametrize(
    "text", ["bad_rewards:two", ":smile:", "[red]x[/red] [/]", "[bold]", "\\[x]"]
)
def test_texts_are_printed_as_they_are(text):
    for options in ({}, {"force_terminal": True}):
        progress = opened(2, **options)
        progress.say(text)
        logging.getLogger("tlt_jax").warning("%s", text)
        assert lines_of(progress) == [text] * 2


@pytest.mark.parametrize("samples", [1, 16, 4096])
@pytest.mark.parametrize("value", [0.5, -0.000123456])
def test_an_evaluation_is_one_line_that_keeps_what_matters_most(samples, value):
    powers = [1 << i for i in range(samples.bit_length())]
    values = {f"eval/mean@{samples}": value, **{f"eval/pass@{k}": value for k in powers}}
    values |= {f"eval/response_length/{name}": 131072.0 for name in ("mean", "max")}
    values["eval/response_length/clip_ratio"] = 1.0
    progress = opened(1_000_000)
    line = progress.evaluation(999_999, values)
    assert lines_of(progress) == [line] and len(line) <= console.WIDTH and "..." not in line
    shown = dict.fromkeys([f"mean@{samples}", "pass@1", f"pass@{samples}"])
    first = ["step 999999/1000000", "evaluation:", *(f"{name} {value:.3g}" for name in shown)]
    assert line.split("  ")[: len(first)] == first
    progress = opened(4)
    progress.evaluation(0, {"eval/mean@2": 0.5, "eval/pass@1": 0.25, "eval/pass@2": 1.0})
    assert lines_of(progress) == ["step 0/4  evaluation:  mean@2 0.5  pass@1 0.25  pass@2 1"]


def test_numbers_read_as_people_write_them():
    seconds = (0, 59.6, 61, 3599.6, 4321, 35_999, 360_000)
    clocks = ["0:00", "1:00", "1:01", "1.0 h", "1.2 h", "10 h", "100 h"]
    assert [console.clock(one) for one in seconds] == clocks
    numbers = (0.4, 999, 9_999.4, 9_999.6, 999_499, 999_501, 12_345_678)
    shown = ["0", "999", "9,999", "10k", "999k", "1.0M", "12.3M"]
    assert [console.short(one) for one in numbers] == shown


# In a notebook

STEP = {"reward/mean": 0.5, "response_length/mean": 31.6, "timing_s/step": 2.0}


def rows_of(text: str) -> list[list[str]]:
    """The texts of the rows of a table."""
    rows = re.findall("<tr>(.*?)</tr>", text)
    return [[html.unescape(one) for one in re.findall("<t[dh].*?>(.*?)</t", row)] for row in rows]


@pytest.fixture
def shown():
    """A table of ten steps, and every HTML that it has shown."""
    texts: list[str] = []
    table = console.Table(10, 0, texts.append)
    yield table, texts
    table.close()


def test_every_step_and_message_is_a_row_and_a_column_comes_with_its_metric(shown):
    table, texts = shown
    line = table.step(1, STEP)
    assert line == "step 1/10  reward 0.500  length 32  2.0 s/step  0:18 to go"
    said = table.evaluation(1, {"eval/mean@2": 0.5, "eval/pass@1": 0.25})
    assert said == "step 1/10  evaluation:  mean@2 0.5  pass@1 0.25"
    table.say("<b>it</b> :smile:")
    table.step(2, STEP | {"speculation/accept_length": 1.234, "reward/mean": 0.25})
    assert rows_of(texts[-1]) == [
        ["step", "reward", "length", "s/step", "accept"],
        ["1/10", "0.500", "32", "2.0", ""],
        [said],
        ["<b>it</b> :smile:"],
        ["2/10", "0.250", "32", "2.0", "1.2"],
    ]
    assert "step 2 of 10, 0:16 to go" in texts[-1]
    assert [len(rows_of(text)) for text in texts] == [1, 2, 3, 4, 5], "it grows"


def test_records_of_the_package_are_rows_and_compilations_a_count(shown):
    table, texts = shown
    log = logging.getLogger("tlt_jax.somewhere")
    log.warning("a %s", "warning")
    log.debug("compiled it", extra={"compile_seconds": 2.6})
    log.debug("no row")
    table.step(1, STEP)
    assert [row[0] for row in rows_of(texts[-1])] == ["step", "a warning", "1/10"]
    assert "compiled 1 program in 3 s" in texts[-1]


def test_a_long_run_sends_no_more_than_its_latest_rows(shown):
    table, texts = shown
    for step in range(1, 1001):
        table.step(step, STEP)
    rows = rows_of(texts[-1])
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
