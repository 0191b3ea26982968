"""Checkpoints restore on any mesh, the best one is kept, and damaged or foreign ones are refused by name."""

from __future__ import annotations

import asyncio
import errno
import gc
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import struct
from jax.sharding import NamedSharding, PartitionSpec

from tlt_jax.checkpoint import index, store as store_module
from tlt_jax.checkpoint.store import Store
from tlt_jax.distributed.board import LocalBoard
from tlt_jax.distributed.job import Job
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.distributed.process import Preemption
from tlt_jax.errors import CheckpointError, DamagedCheckpoint


@struct.dataclass
class State:
    """A state with the kinds of leaves that a run has."""

    weights: dict
    moments: optax.OptState
    step: jax.Array


def state(mesh, offset: float = 0.0) -> State:
    def put(array, *axes):
        return jax.device_put(array, NamedSharding(mesh, PartitionSpec(*axes)))

    weights = {
        "w": put(np.arange(64, dtype=np.float32).reshape(8, 8) + offset, "data", "model"),
        "half": put(np.arange(16).astype(jnp.bfloat16), "model"),
        "mask": put(np.arange(8) % 3 == 0),
    }
    return State(weights, optax.adam(1e-3).init({"w": weights["w"]}), put(np.int32(7)))


def abstract(tree):
    return jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding), tree
    )


def assert_equal(ours, theirs):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(ours), jax.device_get(theirs))


@pytest.fixture
def saved(tmp_path):
    """A run with steps 1 and 2 saved on a (4, 2) mesh."""
    mesh = make_mesh(4, 2)
    with Store(tmp_path) as store:
        for step in (1, 2):
            store.save(step, {"policy": state(mesh, step)}, {"config": "a: 1"})
    return tmp_path


@pytest.mark.parametrize("shape", [(4, 2), (2, 4), (1, 2), (1, 1)])
def test_a_checkpoint_restores_on_another_mesh_bit_for_bit(shape, saved):
    target = state(make_mesh(*shape))
    with Store(saved) as store:
        got = store.restore(None, {"policy": abstract(target)})
    assert (got.step, got.meta) == (2, {"config": "a: 1"})
    assert_equal(got.items["policy"], state(make_mesh(4, 2), 2))
    assert jax.tree.map(lambda leaf: leaf.sharding, got.items["policy"]) == jax.tree.map(
        lambda leaf: leaf.sharding, target
    )


@struct.dataclass
class NewerState(State):
    """A state with fields that an older version did not know."""

    scales: jax.Array | None = None
    heads: tuple | None = None


def test_a_checkpoint_from_before_a_field_was_there_restores_while_that_is_none(saved):
    target = abstract(state(make_mesh(1, 1)))
    newer = NewerState(target.weights, target.moments, target.step)
    with Store(saved) as store:
        got = store.restore(2, {"policy": newer}).items["policy"]
        assert isinstance(got, NewerState) and (got.scales, got.heads) == (None, None)
        assert_equal(State(got.weights, got.moments, got.step), state(make_mesh(1, 1), 2))
        with pytest.raises(CheckpointError, match=r"policy.scales is missing there"):
            store.restore(2, {"policy": newer.replace(scales=target.step)})


def test_a_saved_state_may_be_donated_at_once(tmp_path):
    bump = jax.jit(
        lambda tree: jax.tree.map(lambda leaf: leaf + jnp.ones_like(leaf), tree), donate_argnums=0
    )
    mesh = make_mesh(2, 2)
    tree, target = {"w": jnp.zeros((256, 256)), "n": jnp.int32(0)}, {}
    tree = jax.device_put(tree, NamedSharding(mesh, PartitionSpec()))
    target = abstract(tree)
    with Store(tmp_path, keep=4) as store:
        for step in range(3):
            store.save(step, {"policy": tree})
            tree = bump(tree)
        store.wait()
        for step in range(3):
            assert float(store.restore(step, {"policy": target}).items["policy"]["w"].max()) == step


def test_items_are_restored_alone_and_a_missing_one_is_named(saved):
    with Store(saved) as store:
        store.save(3, {"policy": {"w": jnp.ones(2)}, "drafter": {"v": jnp.ones(3)}})
        store.wait()
        target = {"v": jax.ShapeDtypeStruct((3,), jnp.float32)}
        assert list(store.restore(3, {"drafter": target}).items) == ["drafter"]
        with pytest.raises(CheckpointError, match="2 has no item 'drafter'"):
            store.restore(2, {"drafter": target})


def test_the_newest_and_the_best_are_kept_also_by_the_next_process(tmp_path):
    scores = {1: 0.1, 2: 0.7, 3: 0.2, 5: 0.7 - 1e-12, 6: 0.3, 7: 0.1, 8: 0.2}  # 2 and 5 are equal
    for part in ((1, 2, 3), (4, 5, 6), (7, 8)):
        with Store(tmp_path, keep=2, best_metric="eval/mean@1") as store:
            for step in part:
                metrics = {"eval/mean@1": scores[step]} if step in scores else {}
                assert store.improves(metrics) == (step in (1, 2)), step
                store.save(step, {"policy": {"w": jnp.ones(2)}}, metrics=metrics)
                store.wait()
            assert store.best() == (2 if part[-1] == 3 else 5)  # the latest of equal ones
    assert store.steps() == [5, 7, 8] and store.latest() == 8


def test_the_best_is_one_of_the_latest_kind_of_evaluation(tmp_path):
    """Kinds 0 and 1; the best of the kind before is kept until one of the new kind is complete."""
    name = "eval/mean@1"
    for evaluation, scores, kept in ((0, {1: 0.9, 2: 0.5}, [1, 2]), (1, {3: 0.2, 4: 0.1}, [3, 4])):
        with Store(tmp_path, keep=1, best_metric=name, evaluation=evaluation) as store:
            assert store.best() == (1 if evaluation else None)
            for step, value in scores.items():
                assert store.improves({name: value}) == (step in (1, 3)), step
                store.save(step, {"policy": {"w": jnp.ones(2)}}, metrics={name: value})
                store.wait()
            assert store.best() == kept[0]
        assert store.steps() == kept
    with Store(tmp_path, best_metric=name, create=False) as reader:
        assert reader.best() == 3


def test_a_step_that_is_saved_is_left_alone(saved):
    with Store(saved) as store:
        store.save(2, {"policy": {"w": jnp.zeros(1)}})
        store.wait()
        store.restore(2, {"policy": abstract(state(make_mesh(1, 1)))})


def test_later_metrics_are_added_and_the_arrays_stay(saved, monkeypatch):
    """A kill at any moment leaves the step with its arrays: only the metrics are written, atomically."""
    target = {"policy": abstract(state(make_mesh(1, 1)))}
    arrays = {
        path: path.stat().st_mtime_ns
        for path in (saved / "checkpoints" / "2" / "policy").rglob("*")
    }
    with Store(saved, best_metric="eval/mean@1") as store:
        monkeypatch.setattr(store_module.atomic, "write_text", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(
                2, {"policy": state(make_mesh(4, 2), 9)}, {"config": "b"}, {"eval/mean@1": 0.5}
            )
    monkeypatch.undo()
    with Store(saved, best_metric="eval/mean@1") as store:
        assert store.index(2)["metrics"] == {} and store.best() is None
        store.save(2, {"policy": state(make_mesh(4, 2), 9)}, {"config": "b"}, {"eval/mean@1": 0.5})
        assert store.index(2)["metrics"] == {"eval/mean@1": 0.5} and store.best() == 2
    with Store(saved, create=False) as store:
        got = store.restore(2, target)
        assert got.meta == {"config": "b"} and store.index(2)["metrics"] == {"eval/mean@1": 0.5}
        assert_equal(got.items["policy"], state(make_mesh(4, 2), 2))
    assert arrays == {path: path.stat().st_mtime_ns for path in arrays}


def killed(*_, **__):
    raise KeyboardInterrupt


def test_a_deletion_that_is_interrupted_leaves_no_half_of_a_checkpoint(saved, monkeypatch):
    """Folders are renamed before they are deleted; the next process deletes the rest."""
    monkeypatch.setattr(Store, "_empty_deleted", lambda self: None)
    with Store(saved, keep=1) as store:
        store.save(3, {"policy": state(make_mesh(1, 1), 3)})
    assert sorted(path.name for path in (saved / "checkpoints").iterdir()) == ["3", "deleted"]
    monkeypatch.undo()
    with Store(saved, keep=1) as store:
        assert store.steps() == [3]
    assert sorted(path.name for path in (saved / "checkpoints").iterdir()) == ["3"]


def test_the_only_checkpoint_stays_until_the_next_one_is_whole(tmp_path, monkeypatch):
    with Store(tmp_path, keep=1) as store:
        store.save(1, {"policy": {"w": jnp.ones(2)}})
        store.wait()
        monkeypatch.setattr(store._manager, "save", killed)
        with pytest.raises(KeyboardInterrupt):
            store.save(2, {"policy": {"w": jnp.ones(2)}})
        assert store.steps() == [1]


def test_a_checkpoint_of_another_run_or_another_name_is_refused(tmp_path):
    target = {"policy": {"w": jax.ShapeDtypeStruct((2,), jnp.float32)}}
    identity = {"train.seed": "0", "optim.learning_rate": "0.1"}
    with Store(tmp_path, identity=identity) as store:
        store.save(2, {"policy": {"w": jnp.ones(2)}})
    with Store(tmp_path, identity=identity | {"new knob": "1"}) as store:
        store.restore(2, target)
    with Store(tmp_path, create=False) as store:
        store.restore(2, target)
    with (
        Store(tmp_path, identity={"train.seed": "1", "optim.learning_rate": "0.2"}) as store,
        pytest.raises(
            CheckpointError,
            match="train.seed is 0 there and 1 here, and optim.learning_rate: use the",
        ),
    ):
        store.restore(2, target)
    (tmp_path / "checkpoints" / "2").rename(tmp_path / "checkpoints" / "3")
    with (
        Store(tmp_path, identity=identity) as store,
        pytest.raises(CheckpointError, match="3 holds step 2: rename the folder back"),
    ):
        store.restore(3, target)


def arrays(folder):
    """The files with the arrays of a checkpoint."""
    return [path for path in (folder / "policy").rglob("d/*") if path.is_file()]


def changed(folder):
    path = folder / "meta" / "metadata"
    meta = json.loads(path.read_text())
    meta["items"]["policy"][".weights['w']"]["checksum"] += 1
    path.write_text(json.dumps(meta))


def emptied(folder):
    shutil.rmtree(folder)
    folder.mkdir()


DAMAGE = {
    "truncated": lambda at: [
        one.write_bytes(one.read_bytes()[: one.stat().st_size // 2]) for one in arrays(at)
    ],
    "removed": lambda at: [one.unlink() for one in arrays(at)],
    "ocdbt": lambda at: [one.write_bytes(b"\x0c\xdb" + bytes(40)) for one in arrays(at)],
    "unlisted": lambda at: (at / "policy" / "manifest.ocdbt").unlink(),
    "empty": emptied,
    "garbled": lambda at: (at / "meta" / "metadata").write_text("{"),
    "foreign": lambda at: (at / "meta" / "metadata").write_text("{}"),
    "changed": changed,
}


def test_a_failed_restore_waits_for_all_its_reads(tmp_path, monkeypatch):
    tree = {f"w{i}": jnp.full(100_000, i, jnp.float32) + jnp.arange(100_000) for i in range(64)}
    with Store(tmp_path) as store:
        store.save(1, {"policy": tree})
    for path in (tmp_path / "checkpoints" / "1" / "policy").glob("ocdbt.process_0/d/*"):
        path.unlink()
    unseen = []
    monkeypatch.setattr(sys, "unraisablehook", unseen.append)
    with Store(tmp_path, create=False) as store:
        for _ in range(12):
            with pytest.raises(CheckpointError, match="corrupt .*reading"):
                store.restore(1, {"policy": abstract(tree)})
        time.sleep(0.3)  # reads end in threads of TensorStore
    gc.collect()
    assert [str(one.exc_value) for one in unseen] == []


def test_an_event_loop_closes_after_its_tasks_and_the_tasks_that_they_start():
    ended = []

    async def slow(depth: int):
        await asyncio.sleep(0.05)
        if depth:
            asyncio.ensure_future(slow(depth - 1))
        ended.append(depth)

    async def fails():
        raise ValueError("a file is missing")

    async def both():
        await asyncio.gather(fails(), slow(2))

    factory = asyncio.new_event_loop
    with pytest.raises(ValueError, match="a file is missing"):
        with index.all_reads_end():
            loop = asyncio.new_event_loop()
            try:
                loop.run_until_complete(both())
            finally:
                loop.close()
    assert ended == [2, 1, 0] and loop.is_closed() and asyncio.new_event_loop is factory


@pytest.mark.parametrize("kind", DAMAGE)
def test_a_damaged_or_foreign_checkpoint_is_refused_by_name_and_the_one_before_it_works(
    kind, saved
):
    folder = saved / "checkpoints" / "2"
    DAMAGE[kind](folder)
    target = {"policy": abstract(state(make_mesh(1, 1)))}
    with Store(saved) as store:
        with pytest.raises(CheckpointError) as error:
            store.restore(None, target)
        message = str(error.value)
        assert (
            message.startswith(f"{folder} ")
            and "\n" not in message
            and "resumes from step 1" in message
        )
        assert_equal(store.restore(1, target).items["policy"], state(make_mesh(1, 1), 1))


def test_whatever_bit_of_a_checkpoint_flips_it_restores_or_is_refused_in_one_line(saved):
    """300 random bits of all files, half of them in files without arrays."""
    folder = saved / "checkpoints" / "2"
    target, whole = {"policy": abstract(state(make_mesh(1, 1)))}, state(make_mesh(1, 1), 2)
    files = sorted(path for path in folder.rglob("*") if path.is_file() and path.stat().st_size)
    small = [path for path in files if path.parent.name != "d"]
    draw, refused = random.Random(0), set()
    with Store(saved) as store:
        for number in range(300):
            path = draw.choice(small if number % 2 else files)
            content = path.read_bytes()
            flipped = bytearray(content)
            flipped[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
            path.write_bytes(flipped)
            try:
                found = store.restore(2, target)
                assert_equal(found.items["policy"], whole)
                assert found.meta == {"config": "a: 1"}
            except DamagedCheckpoint as error:
                refused.add(path.name)
                message = str(error)
                assert (
                    message.startswith(f"{folder} ") and "\n" not in message and "step 1" in message
                )
            path.write_bytes(content)
        assert_equal(store.restore(2, target).items["policy"], whole)
    assert {"metadata", "_METADATA", "manifest.ocdbt"} <= refused


@pytest.mark.parametrize("bit", range(8))
def test_whatever_bit_of_the_index_of_arrays_flips_it_restores_or_is_refused(bit, saved):
    """This bit of every seventh byte: keys, types of containers, names of flags and numbers."""
    path = saved / "checkpoints" / "2" / "policy" / "_METADATA"
    target, whole = {"policy": abstract(state(make_mesh(1, 1)))}, state(make_mesh(1, 1), 2)
    content = path.read_bytes()
    with Store(saved) as store:
        for place in range(bit % 7, len(content), 7):
            flipped = bytearray(content)
            flipped[place] ^= 1 << bit
            path.write_bytes(flipped)
            try:
                assert_equal(store.restore(2, target).items["policy"], whole)
            except DamagedCheckpoint as error:
                assert "2 is corrupt (" in str(error), place


def test_an_index_without_a_digest_is_read_and_one_without_its_parts_refused(saved):
    path = saved / "checkpoints" / "2" / "meta" / "metadata"
    earlier = json.loads(path.read_text())
    del earlier["digest"]  # as in older versions
    target = {"policy": abstract(state(make_mesh(1, 1)))}
    with Store(saved) as store:
        path.write_text(json.dumps(earlier))
        assert_equal(store.restore(2, target).items["policy"], state(make_mesh(1, 1), 2))
        path.write_text(json.dumps(earlier).replace('"shape"', '"shapf"', 1))
        with pytest.raises(DamagedCheckpoint, match="2 is corrupt .*metadata"):
            store.restore(2, target)


OTHERS = [
    OSError(errno.ESTALE, "Stale file handle"),
    OSError(errno.EIO, "Input/output error"),
    ValueError("UNAVAILABLE: Error reading local file: connection reset"),
    ValueError("PERMISSION_DENIED: Error opening local file"),
    jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory while trying to allocate"),
    MemoryError(),
    RuntimeError("another process failed"),
]


@pytest.mark.parametrize("error", OTHERS, ids=repr)
def test_other_errors_are_not_called_damage(error, saved, monkeypatch):
    def fails(*_):
        raise error

    monkeypatch.setattr(index, "read", fails)
    with Store(saved) as store:
        with pytest.raises((CheckpointError, type(error))) as found:
            store.restore(2, {"policy": abstract(state(make_mesh(1, 1)))})
    assert not isinstance(found.value, DamagedCheckpoint)
    if isinstance(error, (OSError, ValueError)):
        assert "2 cannot be read" in str(found.value) and "it may be intact" in str(found.value)


def in_two_threads(run) -> None:
    """run(0) and run(1), in threads of these names."""
    threads = [threading.Thread(target=run, args=(i,), name=str(i)) for i in range(2)]
    [thread.start() for thread in threads], [thread.join(60) for thread in threads]


@pytest.mark.parametrize("first_reads", [True, False])
def test_an_error_in_one_process_is_raised_in_all(saved, monkeypatch, first_reads):
    """Two processes on a board; the arrays of one are damaged."""
    board, read, sums, found = LocalBoard(), index.read, [], {}
    leaf_index = index.leaf_index

    def part(folder, targets):
        if threading.current_thread().name == ("1" if first_reads else "0"):
            raise ValueError("DATA_LOSS: CRC-32C checksum verification failed")
        return read(folder, targets)

    monkeypatch.setattr(index, "read", part)
    monkeypatch.setattr(store_module, "leaf_index", lambda tree: sums.append(0) or leaf_index(tree))

    def run(process):
        with Store(saved, job=Job(process, 2, board)) as store:
            try:
                store.restore(2, {"policy": abstract(state(make_mesh(1, 1)))})
            except DamagedCheckpoint as error:
                found[process] = str(error)
                store.set_aside(2)
                found[process, "left"] = store.steps()

    in_two_threads(run)
    assert found[0] == found[1] and "DATA_LOSS" in found[0]
    assert found[0, "left"] == found[1, "left"] == [1]
    assert not sums, "checksums are a program of all devices"


def test_processes_with_different_checkpoints_are_refused(saved, tmp_path_factory):
    board, other, found = LocalBoard(), tmp_path_factory.mktemp("other"), []

    def run(process):
        try:
            Store((saved, other)[process], job=Job(process, 2, board))
        except CheckpointError as error:
            found.append(str(error))

    in_two_threads(run)
    assert len(found) == 1 and "process 1 sees the checkpoints [] in " in found[0]
    assert "process 0 [1, 2]: all processes need the same file system" in found[0]


def test_a_process_that_fails_waits_for_its_saves_and_deletes_nothing(saved, monkeypatch):
    """Deleting is a collective of the checkpoint library, which the other processes do not join."""
    deleted = []
    with pytest.raises(ZeroDivisionError), Store(saved, keep=1) as store:
        monkeypatch.setattr(store._manager, "delete", lambda step: deleted.append(step))
        store.save(3, {"policy": state(make_mesh(1, 1), 3)})
        deleted.clear()
        raise ZeroDivisionError
    assert not deleted and (saved / "checkpoints" / "3").is_dir()


def test_a_newer_format_another_shape_and_another_dtype_are_refused(saved):
    path = saved / "checkpoints" / "1" / "meta" / "metadata"
    later = {**json.loads(path.read_text()), "format": 99}
    del later["digest"]
    path.write_text(json.dumps(index.signed(later)))
    target = abstract(state(make_mesh(1, 1)))
    with Store(saved) as store:
        with pytest.raises(CheckpointError, match="format 99, this version reads up to 1"):
            store.restore(1, {"policy": target})
        wide = target.replace(step=jax.ShapeDtypeStruct((2,), jnp.int32))
        with pytest.raises(
            CheckpointError, match=r"policy.step is int32\[\] there and int32\[2\] here"
        ):
            store.restore(2, {"policy": wide})
        half = target.replace(step=jax.ShapeDtypeStruct((), jnp.int8))
        with pytest.raises(CheckpointError, match=r"int32\[\] there and int8\[\] here"):
            store.restore(2, {"policy": half})
        with pytest.raises(CheckpointError, match="is missing there|and missing here"):
            store.restore(2, {"policy": {"w": target.step}})


def test_an_absent_checkpoint_is_an_error_that_lists_the_others(saved, tmp_path):
    with (
        Store(saved) as store,
        pytest.raises(CheckpointError, match=r"has no checkpoint 9; it has \[1, 2\]"),
    ):
        store.restore(9, {})
    with pytest.raises(CheckpointError, match="does not exist"):
        Store(tmp_path / "nothing", create=False)
    with (
        Store(tmp_path / "new") as store,
        pytest.raises(CheckpointError, match="has no checkpoint; it has none"),
    ):
        store.restore(None, {})


KILLED = """
import sys
import jax.numpy as jnp
from tlt_jax.checkpoint.store import Store

store = Store(sys.argv[1], keep=3)
print("ready", flush=True)
for step in range(1, 10_000):
    store.save(step, {"policy": {"w": jnp.full((512, 1024), step, jnp.float32)}})
    print(step, flush=True)
"""


def test_kill_9_during_saves_leaves_only_whole_checkpoints(tmp_path):
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    while process.stdout.readline().strip() not in ("5", ""):
        pass
    time.sleep(0.005)
    process.kill()
    process.wait()
    target = {"policy": {"w": jax.ShapeDtypeStruct((512, 1024), jnp.float32)}}
    with Store(tmp_path, create=False) as store:
        assert store.latest() >= 3
        for step in store.steps():
            assert (np.asarray(store.restore(step, target).items["policy"]["w"]) == step).all()


def test_sigterm_is_noted_and_the_handler_is_put_back():
    before = signal.getsignal(signal.SIGTERM)
    with Preemption() as preemption:
        assert not preemption.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert preemption.requested and preemption()
    assert signal.getsignal(signal.SIGTERM) is before
