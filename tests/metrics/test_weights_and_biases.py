"""Laws of the Weights & Biases tracker: it has what TensorBoard has, at the same steps, and never fails the run. No network."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import struct
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import TENSORBOARD, WANDB, Log, Mesh
from tlt_jax.errors import ConfigError
from tlt_jax.metrics import ChunkRecord, Record, Writer, weights_and_biases, writer
from tlt_jax.train import loop

needs_wandb = pytest.mark.skipif(find_spec("wandb") is None, reason="needs the extra wandb")
NOWHERE = "http://127.0.0.1:9"  # nothing listens there
SPANS = [SimpleNamespace(group=0, kind="decode", start=0.0, end=1.0, number=0)]


@pytest.fixture
def offline(tmp_path, monkeypatch) -> Iterator[Path]:
    """W&B offline, without telemetry; a home and a working folder, which must stay empty."""
    home = tmp_path / "home"
    home.mkdir()
    monkeypatch.chdir(home)
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    for name in ("WANDB_CACHE_DIR", "WANDB_SILENT"):  # undone after the test
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    given = {"HOME": str(home), "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    yield home
    import wandb

    with contextlib.suppress(ConnectionError):  # for a test that kills its process
        wandb.teardown()


@pytest.fixture
def config(tmp_path, monkeypatch) -> Config:
    monkeypatch.setattr(writer, "TEXTS", 2)
    monkeypatch.setattr(writer, "TEXTS_EVERY", 2)
    log = Log(trackers=[TENSORBOARD, WANDB])
    return Config(run=str(tmp_path / "runs" / "mine"), mesh=Mesh(data=1), log=log)


def write(config: Config, steps, resumed_from: int | None = None, act=None):
    """Writes some steps; `act` is called before the last of them."""
    with Writer(config, 10, resumed_from) as writer:
        for step in steps:
            if act and step == steps[-1]:
                act()
            answers = [Record(i, "2+2=", f"<b>{step}", i / 3, 10 + i, "stop") for i in range(3)]
            shape = (0, 0, 4, 3.5, 256, "2_2_4", "kept", None, 100.0, step, 16, 0.5, [4, 2, 1])
            writer.step(step, {"reward/mean": step / 10}, answers, SPANS, [ChunkRecord(*shape)])
            if step % 2 == 0:
                writer.scalars(step, {"eval/mean@1": step / 7, "eval/pass@16": 0.5})


def records(path: Path) -> Iterator:
    """The records of a W&B run file, by the layout of LevelDB's log: 7 bytes, then blocks of 32 KiB."""
    from google.protobuf.message import DecodeError
    from wandb.proto.wandb_internal_pb2 import Record as Stored

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:
            at += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # complete, or the last part
            try:
                yield Stored.FromString(parts)
            except DecodeError:  # being written
                return
            parts = b""


def attempts(config: Config) -> list[list]:
    """The records of each attempt of a run, in order; W&B's process may write the last ones late."""
    folder, until = Path(config.run) / "wandb", time.monotonic() + 30
    while True:
        files = folder.glob("offline-run-*/*.wandb")
        found = [
            list(records(path)) for path in sorted(files, key=lambda path: path.stat().st_mtime)
        ]
        kinds = [{record.WhichOneof("record_type") for record in attempt} for attempt in found]
        if all({"run", "exit"} <= attempt for attempt in kinds) or time.monotonic() > until:
            return found
        time.sleep(0.1)


def tracked(config: Config) -> dict[str, dict[int, list]]:
    """Name -> step -> value in W&B, from all attempts; media as dictionaries."""
    found: dict[str, dict[int, list]] = defaultdict(lambda: defaultdict(list))
    for attempt in attempts(config):
        for record in attempt:
            row: dict = {}
            for item in record.history.item:
                name, *inner = item.nested_key or [item.key]
                value = json.loads(item.value_json)
                row[name] = row.get(name, {}) | {inner[0]: value} if inner else value
            for name, value in row.items():
                found[name][row["step"]].append(value)
    return {name: dict(steps) for name, steps in found.items() if not name.startswith("_")}


def scalars_of_tensorboard(config: Config) -> dict[str, dict[int, list[float]]]:
    events = EventAccumulator(str(Path(config.run) / "tensorboard"), {"scalars": 0}).Reload()
    found: dict[str, dict[int, list[float]]] = {}
    for name in events.Tags()["scalars"]:
        found[name] = defaultdict(list)
        for event in events.Scalars(name):
            found[name][event.step].append(event.value)
    return {name: dict(steps) for name, steps in found.items()}


def scalars(values: dict[str, dict[int, list]]) -> dict[str, dict[int, list]]:
    """The numbers in `tracked`, in TensorBoard's precision."""
    return {
        name: {step: [float(np.float32(one)) for one in ones] for step, ones in steps.items()}
        for name, steps in values.items()
        if name != "step" and all(isinstance(one, int | float) for one in sum(steps.values(), []))
    }


def runs(config: Config) -> list:
    """What W&B knows of the run of each attempt."""
    return [
        next(record.run for record in attempt if record.WhichOneof("record_type") == "run")
        for attempt in attempts(config)
    ]


@needs_wandb
def test_wandb_has_what_tensorboard_has_by_name_and_step_also_when_a_run_resumes(
    config, offline, monkeypatch
):
    write(config, range(1, 6))
    found = tracked(config)
    assert scalars(found) == scalars_of_tensorboard(config) and len(scalars(found)) == 3
    for name in ("reward/histogram", "response_length/histogram", "speculation/accepted/histogram"):
        assert list(found[name]) == [1, 2, 4] and found[name][2][0]["_type"] == "histogram"
    (lengths,) = found["response_length/histogram"][4]
    assert sum(lengths["values"]) == 3 and (lengths["bins"][0], lengths["bins"][-1]) == (10, 12)
    assert list(found["rollout/samples"]) == [1, 2, 4] and list(found["config"]) == [0]
    files = next((Path(config.run) / "wandb").glob("offline-run-*/files"))
    page = (files / found["rollout/samples"][4][0]["path"]).read_text()
    assert "    &lt;b&gt;4" in page and page.count("**reward") == 2
    (first,) = runs(config)
    resolved = {one.key: json.loads(one.value_json) for one in first.config.update}
    assert {name: resolved[name] for name in asdict(config)} == asdict(config)
    assert (first.display_name, first.project, first.entity) == ("runs/mine", "tlt_jax", "")

    time.sleep(1)  # W&B names the folders of attempts by the second
    write(config, range(4, 8), resumed_from=3)
    for name, value in {"NAME": "first", "PROJECT": "math"}.items():
        monkeypatch.setenv(f"WANDB_{name}", value)
    write(config, range(1, 3))
    _, second, third = runs(config)
    assert first.run_id == second.run_id != third.run_id and second.resume
    assert (third.display_name, third.project) == ("first", "math")
    assert list(tracked(config)["reward/mean"]) == list(range(1, 8))
    assert list(offline.iterdir()) == [], "nothing is written at home or in the working folder"


@needs_wandb
def test_a_lost_wandb_costs_no_step_and_is_reported_once(config, offline, caplog):
    def kill():
        children = subprocess.run(
            ["ps", "--ppid", str(os.getpid()), "-o", "pid=,args="], capture_output=True, text=True
        ).stdout.splitlines()
        (service,) = (line.split()[0] for line in children if "wandb-core" in line)
        os.kill(int(service), signal.SIGKILL)
        os.waitpid(int(service), 0)

    with caplog.at_level(logging.WARNING):
        write(config, range(1, 7), act=kill)
    assert list(scalars_of_tensorboard(config)["reward/mean"]) == list(range(1, 7))
    log = (Path(config.run) / "log.txt").read_text()
    assert log.count("nothing more of this run is sent") == 1


@needs_wandb
def test_without_a_server_all_is_stored_for_later(config, offline, monkeypatch):
    monkeypatch.delenv("WANDB_MODE")
    monkeypatch.setenv("WANDB_BASE_URL", NOWHERE)
    monkeypatch.setenv("WANDB_API_KEY", "a" * 40)
    monkeypatch.setattr(weights_and_biases, "BEGIN_S", 2)
    write(config, range(1, 4))
    assert scalars(tracked(config)) == scalars_of_tensorboard(config)
    assert (Path(config.run) / "log.txt").read_text().count("`wandb sync` takes") == 1


@pytest.mark.parametrize(
    "message", ["is not installed", pytest.param("no API key is set", marks=needs_wandb)]
)
def test_wandb_that_is_missing_or_has_no_key_is_refused_at_once(message, tmp_path, request):
    monkeypatch = request.getfixturevalue("monkeypatch")
    if "installed" in message:
        monkeypatch.setitem(sys.modules, "wandb", None)
    else:
        request.getfixturevalue("offline")
        monkeypatch.delenv("WANDB_MODE")
        monkeypatch.setenv("WANDB_BASE_URL", NOWHERE)
    words = ["--config", "quickstart", "--run", str(tmp_path / "run"), "--log.trackers", "[wandb]"]
    with pytest.raises(ConfigError, match=f"log.trackers names wandb.* {message}"):
        loop.train(configuration.parse(words))
    assert not (tmp_path / "run").exists()


@needs_wandb
def test_a_project_that_wandb_would_refuse_is_one_line(config, offline, monkeypatch):
    monkeypatch.setenv("WANDB_PROJECT", "a/b")
    with pytest.raises(ValueError, match="WANDB_PROJECT: .*'a/b'.*: use another name"):
        weights_and_biases.check_trackers(config)
