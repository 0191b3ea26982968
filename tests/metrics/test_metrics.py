"""Output of a run: the closed list of names, each step once also after a resume, the timeline."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tlt_jax.config import Config
from tlt_jax.config.schema import Mesh
from tlt_jax.metrics import (
    NAMES,
    ChunkRecord,
    MetricError,
    Record,
    Writer,
    evaluations,
    group_seconds,
    idle_share,
    names,
    timeline,
    writer,
)

SPANS = [
    SimpleNamespace(group=group, kind=kind, start=start, end=end, number=number)
    for number, (group, kind, start, end) in enumerate([
        (0, "prefill", 10.0, 11.0), (0, "decode", 11.0, 14.0),
        (1, "decode", 10.0, 12.0), (1, "speculate", 11.0, 12.0), (1, "wait", 12.0, 14.0),
    ])
]  # fmt: skip


def records(step: int, count: int = 3) -> list[Record]:
    rest = {"group": 0, "reference": "4", "advantage": 0.5, "logprob": -2.0, "accepted": 6}
    made = "2+2=", f"<b>{step}\n"
    return [
        Record(uid, *made, float(uid), 10 + uid, "stop", {"task": 1.0}, id=f"train:{uid}", **rest)
        for uid in range(count)
    ]


def chunks(step: int, count: int = 2) -> list[ChunkRecord]:
    shape = (4, 3.5, 256, "2_2_4", "kept")
    return [
        ChunkRecord(0, n, *shape, None if n else 90.0, 100.0, step, 16, 0.5, [4 * n, 2, 1])
        for n in range(count)
    ]


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    monkeypatch.setattr(writer, "TEXTS", 2)
    monkeypatch.setattr(writer, "TEXTS_EVERY", 2)
    return Config(run=str(tmp_path / "run"), mesh=Mesh(data=2))


def write(config: Config, steps, resumed_from: int | None = None):
    with Writer(config, 10, resumed_from) as writer:
        for step in steps:
            scalars = {"reward/mean": step / 10, "actor/lr": 1e-3}
            writer.step(step, scalars, records(step), SPANS, chunks(step))
            if step % 2 == 0:
                writer.scalars(step, {"eval/mean@1": step / 10, "eval/pass@16": 0.5})


def read(config: Config) -> EventAccumulator:
    folder = Path(config.run) / "tensorboard"
    return EventAccumulator(str(folder), {"tensors": 0, "histograms": 0}).Reload()


def steps_of(events) -> list[int]:
    return [event.step for event in events]


def files_of(config: Config, folder: str) -> list[str]:
    return sorted(path.stem for path in (Path(config.run) / folder).iterdir())


def numbered(*steps: int) -> list[str]:
    return [f"{step:06d}" for step in steps]


def test_a_run_writes_scalars_histograms_texts_images_and_completions(config):
    write(config, range(1, 5))
    events = read(config)
    assert [(e.step, round(10 * e.value)) for e in events.Scalars("reward/mean")] == [
        (n, n) for n in range(1, 5)
    ]
    assert steps_of(events.Scalars("eval/pass@16")) == [2, 4]
    histogram = events.Histograms("response_length/histogram")[1]
    lengths = histogram.histogram_value
    assert (histogram.step, lengths.num, lengths.max) == (2, 3, 12)
    depths = events.Histograms("speculation/accepted/histogram")[1].histogram_value
    assert (depths.num, depths.max, depths.sum) == (10, 2, 8)
    text = events.Tensors("rollout/samples/text_summary")[1].tensor_proto.string_val[0].decode()
    assert "    <b>2" in text and text.count("**reward") == 2
    assert (
        "prompts: 8" in events.Tensors("config/text_summary")[0].tensor_proto.string_val[0].decode()
    )
    lines = (Path(config.run) / "completions" / "000003.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "step": 3, "uid": 1, "prompt": "2+2=", "completion": "<b>3\n", "reward": 1.0, "length": 11, "finish": "stop",
        "parts": {"task": 1.0}, "failure": None, "id": "train:1", "group": 0, "reference": "4", "advantage": 0.5,
        "logprob": -2.0, "accepted": 6,
    }  # fmt: skip
    lines = (Path(config.run) / "speculation" / "000003.jsonl").read_text().splitlines()
    assert json.loads(lines[1]) == {
        "step": 3, "group": 0, "number": 1, "batch": 4, "live": 3.5, "slots": 256, "strategy": "2_2_4", "reason": "kept",
        "predicted": None, "measured": 100.0, "tokens": 3, "rounds": 16, "seconds": 0.5,
        "accepted": [4, 2, 1], "is_timed": True, "taken": 0.0,
    }  # fmt: skip


def test_the_metrics_do_not_import_an_installed_torch_which_others_can_import_later(tmp_path):
    (tmp_path / "torch.py").write_text("Tensor = int")
    code = "import sys, tlt_jax.metrics.tensorboard; print('torch' in sys.modules); import torch; print(torch.Tensor)"
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.split("\n")[:2] == ["False", "<class 'int'>"]


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
    samples = events.Tensors("rollout/samples/text_summary")
    for shown in (events.Histograms("reward/histogram"), samples):
        assert steps_of(shown) == [1, 2, 4, 6, 8], "the first one and every second one"
    assert steps_of(events.Tensors("config/text_summary")) == [0, 5]
    for folder in ("completions", "speculation", "timeline"):
        assert files_of(config, folder) == numbered(*range(1, 9))
    for folder in ("completions", "speculation"):
        lines = (Path(config.run) / folder / "000005.jsonl").open()
        assert {json.loads(line)["step"] for line in lines} == {5}
    lines = list(map(json.loads, (Path(config.run) / "metrics.jsonl").open()))
    assert [line["step"] for line in lines] == [*range(1, 9)]
    assert [line["step"] for line in lines if "eval/mean@1" in line] == [2, 4, 6, 8]


def test_the_last_step_has_samples_and_a_timeline_too(config):
    with Writer(config, 3) as writer:
        for step in (1, 2, 3):
            writer.step(step, {}, records(step), SPANS)
    assert steps_of(read(config).Tensors("rollout/samples/text_summary")) == [1, 2, 3]
    assert len(list((Path(config.run) / "timeline").iterdir())) == 3


def test_every_scalar_of_tensorboard_has_the_sentence_of_the_page(config):
    write(config, range(1, 3))
    write(config, range(2, 4), resumed_from=1)
    events = read(config)
    for name in events.Tags()["scalars"]:
        found = events.SummaryMetadata(name)
        assert found.summary_description == names.find(name, "scalar").help
        assert found.plugin_data.plugin_name == "scalars"


def test_the_log_has_every_line_of_the_console(config, capsys):
    with Writer(config, 2) as writer:
        writer.evaluation(0, {"eval/mean@1": 0.5})
        writer.step(1, {"reward/mean": 0.25}, records(1), SPANS)
        writer.say("step 1/2  8 of 8 rewards failed: bad_rewards:two %s [red]")
    said = capsys.readouterr().out.splitlines()
    noted = (Path(config.run) / "log.txt").read_text().splitlines()
    assert [line.split(" ", 2)[2] for line in noted] == said and len(said) == 3


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


def test_a_run_removes_the_evaluations_and_chunks_of_steps_that_it_repeats(config):
    write(config, range(1, 6))
    with Writer(config, 10, 5) as writer:
        for step in (0, 2, 4):
            writer.lines(evaluations.FOLDER, step, [])
    with Writer(config, 10, 2) as writer:
        writer.step(3, {}, records(3), SPANS)  # without drafting
    assert files_of(config, evaluations.FOLDER) == numbered(0, 2)
    assert files_of(config, "speculation") == numbered(1, 2)
    write(config, range(1, 3))  # anew, without a checkpoint
    events = read(config)
    assert steps_of(events.Scalars("reward/mean")) == [1, 2]
    assert steps_of(events.Scalars("eval/mean@1")) == [2] and not files_of(config, "evaluation")


def test_what_is_written_survives_a_kill(config, tmp_path):
    code = (
        "import os, signal, sys\n"
        "from tlt_jax.config import Config\n"
        "from tlt_jax.metrics import Writer\n"
        "writer = Writer(Config(run=sys.argv[1]), 10)\n"
        "for step in range(2, 7): writer.step(step, {'reward/mean': 1.0}, [], [])\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    subprocess.run([sys.executable, "-c", code, config.run], capture_output=True)
    assert steps_of(read(config).Scalars("reward/mean")) == [2, 3, 4, 5, 6]
    lines = (Path(config.run) / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [2, 3, 4, 5, 6]


def test_a_name_outside_the_list_is_refused_with_the_closest_one(config):
    with Writer(config, 10) as writer:
        with pytest.raises(MetricError, match="no histogram is called 'reward/mean'"):
            writer.histogram(1, "reward/mean", [1.0])
        for name in ("reward/meen", "eval/mean@k", "speculation/accept_length/eagle2"):
            with pytest.raises(MetricError, match=f"'{name}': did you mean"):
                writer.scalars(1, {name: 1.0})
        known = "reward/terms/my.module:score", "eval/mean@8", "speculation/accept_length/eagle"
        writer.scalars(1, dict.fromkeys(known, 1.0))


def test_the_names_are_unique():
    assert len({metric.name for metric in NAMES}) == len(NAMES)
    assert {metric.kind for metric in NAMES} == {"scalar", "histogram", "text"}


def test_the_idle_share_is_exact():
    assert idle_share(SPANS, 2, {}) == pytest.approx(2 / 8)
    assert idle_share([], 2, {}) == 0


def test_groups_are_ordered_by_the_end_of_their_decoding():
    ends = {group: 1.0 + (7 * group) % 1000 for group in range(1000)}
    spans = [SimpleNamespace(group=group, kind="decode", start=0.0, end=end) for group, end in ends.items()]  # fmt: skip
    # Idle work does not count as decoding.
    spans += [SimpleNamespace(group=5, kind="train", start=36.0, end=1000.0)]
    latest = sorted(ends, key=ends.get)[-16:]
    assert timeline.latest(spans, 1000)[:16] == latest[::-1] and 5 not in latest


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
    assert idle_share(spans, 1000, {}) == 0.0
    assert Looked.looks <= 2 * len(spans)


def test_the_trace_has_a_named_row_for_each_group_and_one_for_the_phases():
    spans = [
        SimpleNamespace(group=1, kind="speculate", start=0.0, end=0.25, number=7),
        SimpleNamespace(group=1, kind="train", start=0.25, end=1.5, number=8),
        SimpleNamespace(group=0, kind="decode", start=0.0, end=1.5, number=7),
    ]
    lines = [ChunkRecord(1, 7, 4, 2.0, 64, "3_1_4", "kept", None, 1.0, 50, 10, 0.25)]
    phases = ("eval", -0.5, 0.0), ("reward", 1.5, 1.5), ("update", 1.5, 2.0)
    phases = [timeline.Phase(*one) for one in phases]
    events = timeline.trace(spans, lines, phases)["traceEvents"]
    named = [one for one in events if one["name"] == "thread_name"]
    rows = {(one["pid"], one["tid"]): one["args"]["name"] for one in named}
    assert rows == {(0, 0): "data group 0", (0, 1): "data group 1", (1, 0): "phases"}
    work = {(rows[one["pid"], one["tid"]], one["name"]): one for one in events if one["ph"] == "X"}
    times = {place: (one["ts"], one["dur"]) for place, one in work.items()}
    assert times == {
        ("data group 1", "speculate"): (500_000, 250_000),
        ("data group 1", "train"): (750_000, 1_250_000),
        ("data group 0", "decode"): (500_000, 1_500_000),
        ("phases", "eval"): (0, 500_000),
        ("phases", "update"): (2_000_000, 500_000),
    }, "from the first event on: Perfetto drops what is before 0"
    found = work["data group 1", "speculate"]["args"]
    assert (found["strategy"], found["accept_length"], found["reason"]) == ("3_1_4", 2.5, "kept")
    places = [place for place, one in work.items() if "args" in one]
    assert places == [("data group 1", "speculate")]
    assert json.loads(json.dumps(events)) == events


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
    waits = dict.fromkeys((0, 1), [(12.0, 14.0)])
    assert idle_share(SPANS, 2, {}) > idle_share(SPANS, 2, waits) == 0
    assert group_seconds([], {}, 1, (0.0, 4.0)) == [(0, 0, 4)]
