"""Output of a run: the closed list of names, each step once also after a resume, the timeline, the progress line."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tlt_jax.config import Config
from tlt_jax.config.inputs import Mesh
from tlt_jax.config.outputs import Log
from tlt_jax.metrics import (
    NAMES,
    ChunkRecord,
    MetricError,
    Record,
    Writer,
    console,
    evaluations,
    group_seconds,
    idle_share,
    names,
    timeline,
)

SPANS = [
    SimpleNamespace(group=0, kind="prefill", start=10.0, end=11.0),
    SimpleNamespace(group=0, kind="decode", start=11.0, end=14.0),
    SimpleNamespace(group=1, kind="decode", start=10.0, end=12.0),
    SimpleNamespace(group=1, kind="speculate", start=11.0, end=12.0),
    SimpleNamespace(group=1, kind="wait", start=12.0, end=14.0),
]


def records(step: int, count: int = 3) -> list[Record]:
    return [
        Record(uid, "2+2=", f"<b>{step}\n", float(uid), 10 + uid, "stop", {"task": 1.0})
        for uid in range(count)
    ]


def chunks(step: int, count: int = 2) -> list[ChunkRecord]:
    shape = (4, 3.5, 256, "2_2_4", "kept")
    return [
        ChunkRecord(0, n, *shape, None if n else 90.0, 100.0, step, 16, 0.5, [4 * n, 2, 1])
        for n in range(count)
    ]


@pytest.fixture
def config(tmp_path) -> Config:
    return Config(run=str(tmp_path / "run"), mesh=Mesh(data=2), log=Log(texts=2, texts_every=2))


def write(config: Config, steps, resumed_from: int | None = None):
    with Writer(config, 10, resumed_from) as writer:
        for step in steps:
            writer.step(
                step,
                {"reward/mean": step / 10, "actor/lr": 1e-3},
                records(step),
                SPANS,
                chunks(step),
            )
            if step % 2 == 0:
                writer.scalars(step, {"eval/mean@1": step / 10, "eval/pass@16": 0.5})


def read(config: Config) -> EventAccumulator:
    events = EventAccumulator(
        str(Path(config.run) / "tensorboard"), {"tensors": 0, "images": 0, "histograms": 0}
    )
    return events.Reload()


def steps_of(events) -> list[int]:
    return [event.step for event in events]


def test_a_run_writes_scalars_histograms_texts_images_and_completions(config):
    write(config, range(1, 5))
    events = read(config)
    assert [(e.step, round(10 * e.value)) for e in events.Scalars("reward/mean")] == [
        (n, n) for n in range(1, 5)
    ]
    assert steps_of(events.Scalars("eval/pass@16")) == [2, 4]
    histogram = events.Histograms("response_length/histogram")[0]
    assert (histogram.step, histogram.histogram_value.num, histogram.histogram_value.max) == (
        2,
        3,
        12,
    )
    depths = events.Histograms("speculation/accepted/histogram")[0].histogram_value
    assert (depths.num, depths.max, depths.sum) == (10, 2, 8)
    image = events.Images("rollout/timeline")[-1]
    assert (image.step, image.width, image.height) == (4, timeline.WIDTH, 116)
    text = events.Tensors("rollout/samples/text_summary")[0].tensor_proto.string_val[0].decode()
    assert "    <b>2" in text and text.count("**reward") == 2
    assert (
        "prompts: 8" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    )
    lines = (Path(config.run) / "completions" / "000003.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "step": 3, "uid": 1, "prompt": "2+2=", "completion": "<b>3\n", "reward": 1.0, "length": 11, "finish": "stop",
        "parts": {"task": 1.0}, "failure": None,
    }  # fmt: skip
    lines = (Path(config.run) / "speculation" / "000003.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "step": 3, "group": 0, "number": 1, "batch": 4, "live": 3.5, "slots": 256, "strategy": "2_2_4", "reason": "kept",
        "predicted": None, "measured": 100.0, "tokens": 3, "rounds": 16, "seconds": 0.5,
        "accepted": [4, 2, 1], "is_timed": True,
    }  # fmt: skip


def test_each_step_appears_once_after_resumes_from_a_checkpoint(config):
    write(config, range(1, 8))
    for folder in ("completions", "speculation"):
        (Path(config.run) / folder / "000008.tmp").write_text('{"step": 8')
    events = next((Path(config.run) / "tensorboard").iterdir())
    events.write_bytes(events.read_bytes() + events.read_bytes()[-40:-3])
    write(config, range(5, 10), resumed_from=4)
    write(config, range(5, 9), resumed_from=4)
    events = read(config)
    assert steps_of(events.Scalars("reward/mean")) == list(range(1, 9))
    assert steps_of(events.Scalars("eval/mean@1")) == [2, 4, 6, 8]
    assert steps_of(events.Histograms("reward/histogram")) == [2, 4, 6, 8]
    assert steps_of(events.Images("rollout/timeline")) == [2, 4, 6, 8]
    assert steps_of(events.Tensors("rollout/samples/text_summary")) == [2, 4, 6, 8]
    assert steps_of(events.Tensors("config/text_summary")) == [0, 5]
    for folder in ("completions", "speculation"):
        files = sorted(path.name for path in (Path(config.run) / folder).iterdir())
        assert files == [f"{step:06d}.jsonl" for step in range(1, 9)]
        assert {
            json.loads(line)["step"] for line in (Path(config.run) / folder / files[4]).open()
        } == {5}
    traces = sorted(path.name for path in (Path(config.run) / "timeline").iterdir())
    assert traces == [f"{step:06d}.json" for step in (2, 4, 6, 8)]


@pytest.mark.parametrize("place", ["length", "event"])
def test_a_damaged_event_file_is_copied_and_logged(config, place):
    write(config, range(1, 8))
    (path,) = (Path(config.run) / "tensorboard").iterdir()
    content, starts = bytearray(path.read_bytes()), [0]
    while starts[-1] < len(content):
        starts.append(
            starts[-1] + 16 + int.from_bytes(content[starts[-1] : starts[-1] + 8], "little")
        )
    at = starts[len(starts) // 2]
    for byte in range(4) if place == "length" else range(12, 24):
        content[at + byte] ^= 0xFF
    path.write_bytes(content)
    write(config, range(6, 9), resumed_from=5)
    assert f"is damaged at byte {at}" in (Path(config.run) / "log.txt").read_text()
    assert (Path(config.run) / "tensorboard_damaged" / path.name).read_bytes() == content
    steps = steps_of(read(config).Scalars("reward/mean"))
    assert steps[-3:] == [6, 7, 8] and 0 < len(steps[:-3]) < 5 and steps == sorted(set(steps))


def test_evaluations_after_the_resumed_step_are_removed(config):
    with Writer(config, 10) as writer:
        for step in (0, 2, 4):
            writer.lines(evaluations.FOLDER, step, [])
    with Writer(config, 10, 2):
        folder = Path(config.run) / "evaluation"
        assert sorted(path.name for path in folder.iterdir()) == ["000000.jsonl", "000002.jsonl"]


def test_a_resumed_run_without_drafting_removes_the_chunks_of_repeated_steps(config):
    write(config, range(1, 6))
    with Writer(config, 10, 2) as writer:
        for step in range(3, 6):
            writer.step(step, {}, records(step), SPANS)
    assert sorted(path.name for path in (Path(config.run) / "speculation").iterdir()) == [
        "000001.jsonl",
        "000002.jsonl",
    ]


def test_a_new_run_removes_the_output_of_an_attempt_without_checkpoint(config):
    with Writer(config, 10) as writer:
        writer.scalars(0, {"eval/mean@1": 0.5})
    write(config, range(1, 4))
    write(config, range(1, 3))
    events = read(config)
    assert steps_of(events.Scalars("reward/mean")) == [1, 2] and steps_of(
        events.Scalars("eval/mean@1")
    ) == [2]


def test_what_is_written_survives_a_kill(config, tmp_path):
    code = (
        "import os, signal, sys\n"
        "from tlt_jax.config import Config\n"
        "from tlt_jax.metrics import Writer\n"
        "writer = Writer(Config(run=sys.argv[1]), 10)\n"
        "for step in range(1, 6): writer.step(step, {'reward/mean': 1.0}, [], [])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, config.run], capture_output=True)
    assert steps_of(read(config).Scalars("reward/mean")) == [1, 2, 3, 4, 5]


def test_a_name_outside_the_list_is_refused_with_the_closest_one(config):
    with Writer(config, 10) as writer:
        with pytest.raises(
            MetricError, match="no scalar is called 'reward/meen': did you mean reward/mean?"
        ):
            writer.scalars(1, {"reward/meen": 1.0})
        with pytest.raises(MetricError, match="no histogram is called 'reward/mean'"):
            writer.histogram(1, "reward/mean", [1.0])
        with pytest.raises(MetricError):
            writer.scalars(1, {"eval/mean@k": 1.0})
        with pytest.raises(MetricError):
            writer.scalars(1, {"speculation/accept_length/eagle2": 1.0})
        writer.scalars(
            1,
            {
                "reward/terms/my.module:score": 1.0,
                "eval/mean@8": 1.0,
                "speculation/accept_length/eagle": 1.0,
            },
        )


def test_the_names_are_unique_and_their_page_is_current():
    assert len({metric.name for metric in NAMES}) == len(NAMES)
    assert {metric.kind for metric in NAMES} == {"scalar", "histogram", "image", "text"}
    page = Path(__file__).parents[2] / "docs" / "metrics.md"
    assert page.read_text() == names.page(), "run: python -m tlt_jax.metrics > docs/metrics.md"


def test_the_timeline_shows_each_group_in_its_lane_and_the_idle_share_is_exact():
    pixels = timeline.draw(SPANS, 2)
    middle = timeline.LEFT + (timeline.WIDTH - timeline.LEFT - 10) // 4

    def color(fraction: float, group: int) -> tuple[int, ...]:
        column = timeline.LEFT + int((timeline.WIDTH - timeline.LEFT - 10) * fraction)
        return tuple(pixels[timeline.TOP + timeline.LANE * group + timeline.LANE // 2, column])

    assert middle and pixels.dtype == np.uint8
    assert (
        color(0.1, 0) == timeline.COLORS["prefill"] and color(0.6, 0) == timeline.COLORS["decode"]
    )
    assert (
        color(0.1, 1) == timeline.COLORS["decode"] and color(0.4, 1) == timeline.COLORS["speculate"]
    )
    assert (
        len(set(timeline.COLORS.values())) == len(timeline.COLORS)
        and color(0.8, 1) == timeline.COLORS["wait"]
    )
    assert idle_share(SPANS, 2) == pytest.approx(2 / 8)
    assert idle_share([], 2) == 0 and timeline.draw([], 2).shape == pixels.shape


def test_with_more_than_sixteen_groups_the_latest_have_a_lane():
    ends = {group: 1.0 + (7 * group) % 1000 for group in range(1000)}
    spans = [SimpleNamespace(group=group, kind="decode", start=0.0, end=end) for group, end in ends.items()]  # fmt: skip
    spans += [
        SimpleNamespace(group=5, kind="train", start=36.0, end=1000.0)
    ]  # idle work does not count as decoding
    latest = sorted(ends, key=ends.get)[-16:]
    assert timeline.latest(spans, 1000)[:16] == latest[::-1] and 5 not in latest
    pixels = timeline.draw(spans, 1000)
    assert len(pixels) == timeline.TOP + 16 * timeline.LANE + timeline.BOTTOM
    for lane in range(16):
        middle = pixels[timeline.TOP + lane * timeline.LANE + timeline.LANE // 2]
        assert tuple(middle[timeline.LEFT + 20]) == timeline.COLORS["decode"]
    assert len(timeline.draw([], 17)) == len(pixels) == len(timeline.draw([], 16))


class Looked(SimpleNamespace):
    """A span that counts the accesses to its group."""

    looks = 0

    def __getattribute__(self, name):
        if name == "group":
            Looked.looks += 1
        return super().__getattribute__(name)


def test_the_seconds_of_a_thousand_groups_take_one_pass_over_their_spans():
    spans = [Looked(group=i % 1000, kind="decode", start=0.0, end=1.0) for i in range(20_000)]
    assert group_seconds(spans, {}, 1000, (0.0, 2.0)) == [(1.0, 0.0, 1.0)] * 1000
    assert idle_share(spans, 1000) == 0.0
    assert Looked.looks <= 2 * len(spans)


def test_the_trace_has_a_thread_for_each_group_and_microseconds():
    spans = [SimpleNamespace(group=1, kind="train", start=0.25, end=1.5)]
    assert timeline.trace(spans) == {
        "traceEvents": [
            {"name": "train", "ph": "X", "pid": 0, "tid": 1, "ts": 250_000, "dur": 1_250_000}
        ]
    }


def test_a_group_is_busy_or_waits_for_the_compiler_or_is_idle():
    waits = [(1.5, 2.5), (2.0, 3.0), (13.0, 20.0)]
    both = dict.fromkeys((0, 1), waits)
    seconds = group_seconds(SPANS, both, 2, (0.0, 16.0))
    assert [one.compile_wait for one in seconds] == [1.5 + 3] * 2, "each second once, in the window"
    for group, found in enumerate(seconds):
        assert sum(found) == 16
        moments = np.arange(0, 16, 0.25) + 0.1
        works = [
            any(s.group == group and s.kind != "wait" and s.start <= t < s.end for s in SPANS)
            for t in moments
        ]
        waited = [any(start <= t < end for start, end in waits) for t in moments]
        assert found.busy == 0.25 * sum(
            work and not wait for work, wait in zip(works, waited, strict=True)
        )
    assert idle_share(SPANS, 2) > idle_share(SPANS, 2, dict.fromkeys((0, 1), [(12.0, 14.0)])) == 0
    assert group_seconds([], {}, 1, (0.0, 4.0)) == [(0, 0, 4)]


@pytest.mark.parametrize("seconds", [0.003, 0.9, 1.0, 7.0, 59.0, 12345.0])
def test_ticks_are_few_and_inside(seconds):
    ticks = timeline.ticks(seconds)
    assert 2 <= len(ticks) <= 10 and ticks[0] == 0 and ticks[-1] <= seconds


VALUES = {
    "reward/mean": 0.25,
    "response_length/mean": 31.6,
    "response_length/max": 90,
    "perf/tokens_per_second": 1234,
}


def test_progress_is_one_plain_line_per_step_where_there_is_no_terminal():
    out = io.StringIO()
    progress = console.Progress(100, 90, live=True, console=Console(file=out, width=200))
    progress.step(91, {**VALUES, "timing_s/step": 10.0})
    progress.step(92, {**VALUES, "timing_s/step": 20.0})
    logging.getLogger("tlt_jax.rollout.executables.compilation").info("an important message")
    progress.close()
    logging.getLogger("tlt_jax.rollout.executables.compilation").info("after the end")
    assert out.getvalue().splitlines() == [
        "step 91/100  reward 0.250  length 32 (max 90)  1,234 tokens/s  10.0 s/step  1:30 to go",
        "step 92/100  reward 0.250  length 32 (max 90)  1,234 tokens/s  15.0 s/step  2:00 to go",
        "an important message",
    ]


@pytest.mark.parametrize("details", [False, True])
def test_compilations_are_summarized_without_details(details, monkeypatch):
    out, log = io.StringIO(), logging.getLogger("tlt_jax.rollout.executables.compilation")
    monkeypatch.setattr(console.time, "monotonic", lambda: 1.0)
    progress = console.Progress(
        2, 0, live=False, console=Console(file=out, width=200), details=details
    )
    for seconds in (3.0, 0.4, 8.0):
        log.debug("compiled a chunk", extra={"compile_seconds": seconds})
    log.debug("loaded another")
    progress.step(1, {"timing_s/step": 12.0})
    progress.step(2, {"timing_s/step": 1.0})
    progress.close()
    lines = out.getvalue().splitlines()
    if details:
        assert lines[:4] == ["compiled a chunk"] * 3 + ["loaded another"]
    else:
        assert lines[0] == "compiled 3 programs in 11 s" and lines[1].startswith("step 1/2")
    assert len(lines) == (6 if details else 3)


def test_a_long_compilation_is_printed_before_the_step_ends(monkeypatch):
    out, log = io.StringIO(), logging.getLogger("tlt_jax.rollout.executables.compilation")
    now = [0.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    progress = console.Progress(2, 0, live=False, console=Console(file=out, width=200))
    for at in (15.0, 30.0, 45.0, 60.0):
        now[0] = at
        log.debug("compiled a chunk", extra={"compile_seconds": 15.0})
    progress.close()
    assert out.getvalue().splitlines() == ["compiled 2 programs in 30 s"] * 2


def test_progress_of_a_drafter_shows_its_loss_and_agreement():
    out = io.StringIO()
    progress = console.Progress(100, 0, live=False, console=Console(file=out, width=200))
    values = {
        "drafter/loss": 1.2345,
        "drafter/agreement@1": 0.5,
        "drafter/agreement@2": 0.25,
        "timing_s/step": 1.0,
    }
    progress.step(25, values)
    progress.close()
    assert out.getvalue() == "step 25/100  loss 1.234  agreement 0.500  1.0 s/step  1:15 to go\n"


@pytest.mark.parametrize(
    "drafted, shown", [({"speculation/accept_length": 2.34}, "accept 2.3"), ({}, "accept 1.0")]
)
def test_progress_of_an_adaptive_run_shows_accept_length_and_idle_use_in_every_step(drafted, shown):
    out = io.StringIO()
    progress = console.Progress(2, 0, live=False, console=Console(file=out, width=200))
    progress.step(1, {"idle/ratio": 0.25, "idle/used_ratio": 0.5, "timing_s/step": 1.0, **drafted})
    progress.close()
    assert out.getvalue() == f"step 1/2  {shown}  idle 25% (50% used)  1.0 s/step  0:01 to go\n"


def test_progress_is_live_on_a_terminal_and_plain_when_switched_off():
    for live in (True, False):
        out = io.StringIO()
        progress = console.Progress(
            10, 0, live, console=Console(file=out, width=160, force_terminal=True)
        )
        progress.step(1, VALUES)
        progress.close()
        assert "reward 0.250" in out.getvalue() and ("\x1b[" in out.getvalue()) == live


WIDEST_STEP = {
    "reward/mean": -123.456, "response_length/mean": 131072.0, "response_length/max": 131072.0,
    "speculation/accept_length": 12.3, "idle/ratio": 1.0, "idle/used_ratio": 1.0,
    "perf/tokens_per_second": 1234567.0, "timing_s/step": 12345.6, "drafter/loss": 12.345, "drafter/agreement@1": 0.5,
}  # fmt: skip


def test_the_widest_step_is_one_line_that_keeps_reward_length_and_remaining_time():
    out = io.StringIO()
    progress = console.Progress(1_000_000, 0, live=False, console=Console(file=out, width=999))
    progress.step(999_000, WIDEST_STEP)
    progress.step(1, {name: WIDEST_STEP[name] for name in ("reward/mean", "timing_s/step")})
    progress.close()
    widest, narrow = out.getvalue().splitlines()
    assert len(widest) <= 100 < len(narrow) + 60 and widest.endswith("...")
    assert "reward -123.456  length 131072 (max 131072)  " in widest
    assert "  3429:20:00 to go" in widest and "tokens/s" not in widest
    assert narrow == "step 1/1000000  reward -123.456  12345.6 s/step  3429329:54:14 to go"


@pytest.mark.parametrize("samples", [1, 16, 4096])
@pytest.mark.parametrize("value", [0.5, -0.000123456])
def test_the_widest_evaluation_is_one_line_that_keeps_what_matters_most(samples, value):
    powers = [1 << i for i in range(samples.bit_length())]
    values = {f"eval/mean@{samples}": value, **{f"eval/pass@{k}": value for k in powers}}
    values |= {f"eval/response_length/{name}": 131072.0 for name in ("mean", "max")}
    values["eval/response_length/clip_ratio"] = 1.0
    line = console.evaluation(999_999, 1_000_000, values)
    assert len(line) <= 100
    pieces = line.split("  ")
    assert pieces[:3] == ["step 999999/1000000", "evaluation:", f"mean@{samples} {value:.3g}"]
    for piece in (f"pass@1 {value:.3g}", f"pass@{samples} {value:.3g}"):
        assert piece in pieces
    scores = [f"{name.removeprefix('eval/')} {value:.3g}" for name in values if "@" in name]
    whole = "  ".join([*pieces[:2], *scores, "length 131072 (max 131072)", "cut 100%"])
    assert line == whole if len(whole) <= 100 else pieces[-1] == "..."
    short = console.evaluation(0, 4, {"eval/mean@2": 0.5, "eval/pass@1": 0.25, "eval/pass@2": 1.0})
    assert short == "step 0/4  evaluation:  mean@2 0.5  pass@1 0.25  pass@2 1"


def test_lines_with_names_of_any_length_fit_and_leave_out_the_least():
    pieces = [
        (rank, f"{'name' * size}{rank} 0.5") for rank, size in [(2, 1), (0, 9), (1, 5), (3, 40)]
    ]
    line = console.fitted("step 1/2", pieces)
    assert len(line) <= 100 and line.split("  ")[1:] == [
        *(text for rank, text in pieces if rank < 3), "...",
    ]  # fmt: skip


def test_clocks_read_as_people_write_them():
    assert [console.clock(seconds) for seconds in (0, 59.6, 61, 3723)] == [
        "0:00",
        "1:00",
        "1:01",
        "1:02:03",
    ]
