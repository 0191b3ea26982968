"""The shelf of drafters: what is put is found whole, the oldest go, and a policy is known by its weights and its lineage."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tlt_jax.models import shelf

FACTS = {
    "bases": ["policy"], "tokenizer": "t", "kind": "eagle3", "draft_vocab": 8, "captures": [1, 2], "tokens": 1200, "steps": 30,
    "data": "math", "started_from": "", "run": "runs/a", "policy": "owner/policy",
}  # fmt: skip


WRITTEN = FACTS | {"weights": "", "at": 0}


@pytest.fixture
def drafter(tmp_path) -> Path:
    """A drafter's directory with 1,000 bytes of weights."""
    directory = tmp_path / "run" / "drafter" / "hf"
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "made_from.json").write_text("{}")
    (directory / "acceptance.json").write_text('{"acceptance": [0.5, 0.5]}')
    (directory / "model.safetensors").write_bytes(bytes(1000))
    return directory


def test_an_entry_has_the_files_and_facts_of_the_drafter_and_replaces_that_of_its_run(
    drafter, tmp_path
):
    folder = tmp_path / "shelf"
    assert not list(shelf.entries(folder))
    shelf.put(folder, "a", drafter, FACTS)
    (one,) = shelf.entries(folder)
    assert one.per_round == 1 + 0.5 + 0.25
    assert (one.bases, one.captures, one.tokens) == (("policy",), (1, 2), 1200)
    assert one.weights == shelf.checksum(drafter / "model.safetensors")
    assert {path.name for path in one.directory.iterdir()} == {
        "config.json", "acceptance.json", "model.safetensors", "shelf.json",
    }  # fmt: skip
    assert os.path.samefile(one.directory / "model.safetensors", drafter / "model.safetensors")
    (drafter / "acceptance.json").unlink()
    shelf.put(folder, "a", drafter, FACTS | {"tokens": 5})
    (one,) = shelf.entries(folder)
    assert one.tokens == 5 and one.per_round == 1 and "unknown" in one.describe()
    names = {shelf.name_of(Path(path)) for path in ("x/run", "y/run", "x/run/", "x/other")}
    assert len(names) == 3 and all("/" not in name for name in names)


def test_the_entries_not_used_for_longest_go_first(drafter, tmp_path, monkeypatch):
    folder, sizes = tmp_path / "shelf", 1000 + 2 * len("{}") + 700
    monkeypatch.setattr(shelf, "MOST_BYTES", 3 * sizes)
    for number, name in enumerate("abc"):
        shelf.put(folder, name, drafter, FACTS)
        os.utime(folder / name / shelf.FACTS, (number, number))
    left = folder / "z.host.0.partial"
    left.mkdir()
    os.utime(left, (1, 1))
    shelf.touch(shelf.read(folder / "a"))
    shelf.put(folder, "d", drafter, FACTS)
    assert {path.name for path in folder.iterdir()} == {"a", "c", "d"}


@pytest.mark.parametrize(
    "damage",
    ["", "[]", json.dumps(WRITTEN | {"bases": []}), json.dumps(WRITTEN | {"tokens": "many"})],
)
def test_a_damaged_entry_is_left_out_with_a_line(drafter, tmp_path, damage, caplog):
    shelf.put(tmp_path / "shelf", "a", drafter, FACTS)
    shelf.put(tmp_path / "shelf", "b", drafter, FACTS)
    (tmp_path / "shelf" / "a" / shelf.FACTS).write_text(damage)
    shutil.copytree(tmp_path / "shelf" / "b", tmp_path / "shelf" / "c.partial")  # not finished
    assert [one.directory.name for one in shelf.entries(tmp_path / "shelf")] == ["b"]
    (line,) = caplog.messages
    assert "cannot be read, and is not used" in line


def test_a_folder_that_cannot_be_written_costs_a_line(drafter, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    shelf.put(tmp_path / "file", "a", drafter, FACTS)
    assert "set drafter_training.shelf to a folder of yours, or off" in caplog.text


def test_readers_see_entries_whole_while_others_replace_and_remove_them(drafter, tmp_path, caplog):
    folder, ends, seen = tmp_path / "shelf", threading.Event(), []

    def write(name):
        for number in range(40):
            shelf.put(folder, name, drafter, FACTS | {"tokens": number})
            if number % 5 == 4:
                shelf.remove(folder / name)

    def look():
        while not ends.is_set():
            seen.extend(one.tokens for one in shelf.entries(folder))

    writers = [threading.Thread(target=write, args=(name,)) for name in "abc"]
    reader = threading.Thread(target=look)
    for thread in (reader, *writers):
        thread.start()
    for thread in writers:
        thread.join()
    ends.set()
    reader.join()
    assert seen and not caplog.messages
    assert not list(folder.iterdir())


def test_a_drafter_is_for_a_policy_its_ancestors_and_those_trained_from_it(drafter, tmp_path):
    shelf.put(tmp_path, "a", drafter, FACTS | {"bases": ["child", "policy", "root"]})
    one = shelf.read(tmp_path / "a")
    assert one.is_related(["child", "policy"]) and one.is_related(["policy", "root"])
    assert one.is_related(["grandchild", "child"]) and one.is_related(["root"])
    assert not one.is_related(["other", "policy", "root"])


def policy(directory: Path, tensors: dict[str, np.ndarray], files: int = 1) -> Path:
    """A model directory with these tensors in so many files."""
    directory.mkdir(exist_ok=True)
    names = sorted(tensors)
    parts = {f"model-{part}.safetensors": names[part::files] for part in range(files)}
    if files == 1:
        parts = {"model.safetensors": names}
    else:
        index = {name: file for file, own in parts.items() for name in own}
        (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    for file, own in parts.items():
        save_file({name: tensors[name] for name in own}, directory / file)
    return directory


def test_a_policy_is_known_by_its_weights_and_not_by_its_files(tmp_path):
    random = np.random.default_rng(0)
    tensors = {f"layers.{i}.w": random.normal(size=(6, 4)).astype("f4") for i in range(3)}
    tensors |= {"norm": np.ones(4, "f4"), "empty": np.zeros((0, 4), "f4")}
    digest = shelf.weights_digest(policy(tmp_path / "one", tensors))
    assert shelf.weights_digest(policy(tmp_path / "three", tensors, 3)) == digest
    others = [tensors | {name: tensors[name] * 1.001} for name in tensors if tensors[name].size]
    others += [tensors | {"norm": np.ones(4, "f2")}, tensors | {"more": np.ones(1, "f4")}]
    others += [tensors | {"norm": np.zeros(4, dtype)} for dtype in ("f4", "i4")]
    others += [tensors | {"layers.0.w": tensors["layers.0.w"].reshape(4, 6)}]
    found = {shelf.weights_digest(policy(tmp_path / str(n), one)) for n, one in enumerate(others)}
    assert len(found | {digest}) == len(others) + 1


def test_adapters_are_known_by_themselves_and_their_base(tmp_path):
    base = policy(tmp_path / "base", {"w": np.ones((4, 4), "f4")})
    adapters = tmp_path / "adapters"
    adapters.mkdir()
    config = {"base_model_name_or_path": str(base)}
    (adapters / "adapter_config.json").write_text(json.dumps(config))
    save_file({"a": np.ones((2, 4), "f4")}, adapters / "adapter_model.safetensors")
    digests = [shelf.weights_digest(base), shelf.weights_digest(adapters)]
    policy(base, {"w": np.zeros((4, 4), "f4")})
    digests.append(shelf.weights_digest(adapters))
    save_file({"a": np.zeros((2, 4), "f4")}, adapters / "adapter_model.safetensors")
    digests.append(shelf.weights_digest(adapters))
    assert len(set(digests)) == 4


def test_a_damaged_lineage_is_left_out_with_a_line(tmp_path, caplog):
    assert shelf.lineage(tmp_path) == ()
    for number, text in enumerate(("{", '{"bases": [1]}', '{"bases": "x"}'), 1):
        (tmp_path / shelf.LINEAGE).write_text(text)
        assert shelf.lineage(tmp_path) == () and len(caplog.messages) == number
