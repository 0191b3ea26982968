"""Background compilation: the rollout continues with compiled programs, and no token changes."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections import Counter
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest
import toys
from jax.experimental.compilation_cache import compilation_cache

from tlt_jax import atomic
from tlt_jax.rollout.executables import compilation, disk_cache
from tlt_jax.rollout.executables.programs import Decode, Program, Start, StateShape, of_group
from tlt_jax.rollout.scheduler.planner import Planner
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner import baselines

V = 12
TABLE = toys.table(V, scale=1.0)
PROMPTS = [[3, 1, 4], [9, 2]]
RULES = DecodingParams(Sampling(1.0))
WANTED = Strategy(2, 2, 4)
pytestmark = pytest.mark.usefixtures("x64")
executables = partial(toys.executables, is_cached=False)  # compiling is what they are about


def is_held(program: Program) -> bool:
    """Whether its compilation is held back until `allowed`: all but plain programs of 6 rows."""
    return program.state.batch != 6 or isinstance(program, Decode) and program.strategy != PLAIN


class Slow:
    """Executables as on an accelerator, whose background compilations end once `allowed` is set."""

    def __init__(self, monkeypatch):
        self.executables = executables(1, V, toys.table_drafter())
        self.allowed, self.requested = threading.Event(), []
        self.executables.waits, make = False, self.executables.make

        def gated(program: Program, *rest):
            if threading.current_thread() is not threading.main_thread() and is_held(program):
                self.requested.append(program)
                assert self.allowed.wait(300)
            return make(program, *rest)

        monkeypatch.setattr(self.executables, "make", gated)


class Scripted(Planner):
    """Chooses `first` for the first chunk and WANTED from then on; calls `after` before each choice."""

    def __init__(self, first: Strategy, after, batches):
        super().__init__(batches, (64,), baselines.fixed(first))
        self.after = after

    def worth_compiling(self, view, candidates):
        self.after()
        if view.retired:
            self.tuner = baselines.fixed(WANTED)
        return super().worth_compiling(view, candidates)


def play(programs, first: Strategy, after=lambda: None, batches=(6,), **rest):
    """A rollout by a Scripted planner."""
    shape = {"capacity": 6, "rounds": 2, "in_flight": 1} | rest
    return toys.play(
        programs, TABLE, PROMPTS, 3, RULES, planner=Scripted(first, after, batches), **shape
    )


def answers(result):
    return [(one.uid, one.tokens.tolist(), one.finish) for one in result.completions]


def test_the_rollout_continues_with_plain_decoding_while_a_strategy_compiles(monkeypatch):
    expected = answers(
        toys.play(executables(1, V), TABLE, PROMPTS, 3, RULES, capacity=6, batches=(6,))
    )
    slow, choices = Slow(monkeypatch), []

    def after():
        choices.append(1)
        if len(choices) >= 4:
            slow.allowed.set()
            for future in list(slow.executables.pending.values()):
                future.result()

    result = play(slow.executables, PLAIN, after)
    assert answers(result) == expected
    used = [decision.strategy for decision in result.decisions]
    # The catch-up compiles after the chunk.
    assert used[:4] == [PLAIN] * 4 and set(used[4:]) == {WANTED}
    assert [decision.reason for decision in result.decisions][1] == "fixed, while 2_2_4 is compiled"
    # Requested once, compiled once.
    assert [program.strategy for program in slow.requested] == [WANTED]
    assert len({one.program for one in slow.executables.compiles}) == len(slow.executables.compiles)


def test_rows_do_not_move_while_the_programs_of_fewer_rows_compile(monkeypatch):
    slow = Slow(monkeypatch)
    result = play(slow.executables, PLAIN, batches=(2, 6), max_new_tokens=40)
    expected = toys.play(
        executables(1, V),
        TABLE,
        PROMPTS,
        3,
        RULES,
        capacity=6,
        batches=(6,),
        max_new_tokens=40,
    )
    assert answers(result) == answers(expected)
    assert {(decision.batch, decision.strategy) for decision in result.decisions} == {(6, PLAIN)}
    slow.allowed.set()


def test_without_a_compiled_alternative_the_rollout_waits(monkeypatch):
    slow = Slow(monkeypatch)
    threading.Timer(0.5, slow.allowed.set).start()
    used = [decision.strategy for decision in play(slow.executables, WANTED).decisions]
    assert used[0] == WANTED


def test_a_failed_compilation_is_raised_where_the_program_is_used(monkeypatch):
    programs = executables(1, V)
    programs.waits = False
    monkeypatch.setattr(programs, "make", lambda *arguments: np.zeros(0)[1])
    start = Start(StateShape(0, 2, 64))
    programs.prepare([start])
    while programs.compile_cost(start):
        pass
    with pytest.raises(IndexError):
        programs.get(start)


def test_an_optimization_level_in_xla_flags_is_obeyed(monkeypatch):
    programs = executables(1, V)
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
    assert programs.options == {"xla_backend_optimization_level": 1}
    monkeypatch.setenv("XLA_FLAGS", "--xla_backend_optimization_level=3")
    assert programs.options == {}


def test_programs_beyond_the_maximum_are_dropped_and_compiled_again(
    monkeypatch,
):
    expected = answers(
        toys.play(executables(1, V), TABLE, PROMPTS, 3, RULES, capacity=6, batches=(6,))
    )
    monkeypatch.setattr(compilation, "MAX_PROGRAMS", 2)
    programs = executables(1, V, toys.table_drafter())
    for first in (PLAIN, Strategy(1, 2, 3)):
        assert answers(play(programs, first)) == expected
        assert len(programs.executables) <= 2 and programs.ran <= programs.executables.keys()
    times = Counter(one.program for one in programs.compiles)
    assert len(times) > 2 and max(times.values()) > 1


def test_the_host_waits_for_lowering_but_not_for_a_background_compilation(monkeypatch):
    slow = Slow(monkeypatch)
    program = Decode(StateShape(0, 6, 64), 2, WANTED, RULES)
    slow.executables.prepare([program])
    assert slow.executables.compile_cost(program)
    ((begin, end),) = slow.executables.waited
    assert 0 < end - begin
    slow.allowed.set()
    slow.executables.pending[program].result()
    slow.executables.get(program)
    first, second = slow.executables.waited
    assert first == (begin, end) and second[1] - second[0] < slow.executables.compiles[0].seconds


def test_a_group_loads_the_programs_of_another_and_they_compute_the_same():
    programs = executables(2, V, toys.table_drafter())
    rest = {"capacity": 3, "batches": (3,), "strategy": WANTED}
    result = toys.play(programs, TABLE, PROMPTS, 3, RULES, **rest)
    alone = toys.play(executables(1, V), TABLE, PROMPTS, 3, RULES, capacity=6, batches=(6,))
    assert answers(result) == answers(alone)
    assert {decision.group for decision in result.decisions} == {0, 1}

    compiled, loaded = [
        {one.program for one in programs.compiles if one.is_loaded == kind}
        for kind in (False, True)
    ]
    assert loaded and {of_group(one, 1 - one.group) for one in loaded} <= compiled
    for one in loaded:
        devices = programs.get(one).runtime_executable().local_devices()
        assert devices == list(programs.shapes[one.group].mesh.devices.flat)
    assert programs.compile_costs.alike.keys() == {compilation.kind(one) for one in compiled}


def test_where_executables_cannot_be_loaded_for_other_devices_every_group_compiles(
    monkeypatch, caplog
):
    monkeypatch.setattr(disk_cache, "PLATFORMS", ("cuda",))
    programs = executables(2, V)
    with caplog.at_level(logging.INFO, "tlt_jax"):
        toys.play(programs, TABLE, PROMPTS, 3, RULES, capacity=3, batches=(3,))
    assert not any(one.is_loaded for one in programs.compiles)
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.endswith("cannot be serialized, and is kept by JAX's cache alone: not on cpu")


def test_a_later_run_loads_an_earlier_runs_programs_and_recompiles_damaged_ones(tmp_path):
    def cached_run():
        first = executables(2, V, toys.table_drafter())
        programs = compilation.Executables(
            first.shapes, lambda compiled: None, disk_cache.ExecutableCache(tmp_path / "kept")
        )
        rest = {"capacity": 3, "batches": (3,), "strategy": WANTED}
        result = toys.play(programs, TABLE, PROMPTS, 3, RULES, **rest)
        return answers(result), sum(not one.is_loaded for one in programs.compiles)

    expected, compiled = cached_run()
    files = sorted(path for path in (tmp_path / "kept").iterdir() if path.is_file())
    assert compiled == len(files) > 3
    assert cached_run() == (expected, 0)
    files[0].write_bytes(files[0].read_bytes()[:300])
    files[1].write_bytes(b"")
    assert cached_run() == (expected, 2) and cached_run() == (expected, 0)


def test_a_compile_cost_is_that_of_the_last_program_of_the_kind_or_scaled_from_others():
    known, shape = compilation.CompileCosts(), StateShape(0, 6, 64)
    plain, drafting = (Decode(shape, 2, arm, RULES) for arm in (PLAIN, WANTED))
    assert known.of(plain) == compilation.FIRST
    known.note(plain, 8.0)
    assert known.of(drafting) == 8.0 * drafting.relative_seconds
    assert known.of(Start(shape)) == 8.0 * Start.relative_seconds
    known.note(drafting, 1.0)
    assert known.of(Decode(StateShape(1, 2, 128), 9, WANTED, RULES)) == 1.0


def test_a_compiled_program_costs_nothing_and_one_of_another_group_little():
    programs = executables(2, V)
    ours, theirs = (Start(StateShape(group, 2, 64)) for group in (0, 1))
    alone, version = programs.compile_cost(theirs), programs.version
    programs.get(ours)
    assert programs.compile_cost(ours) == 0 and programs.version != version
    assert (
        0
        < programs.compile_cost(theirs)
        == compilation.LOADING * programs.compile_costs.of(theirs)
        < alone
    )


def test_a_program_of_an_earlier_run_costs_a_later_one_little_before_lowering(tmp_path):
    def run(**rest) -> compilation.Executables:
        group = executables(2, V, **rest).shapes
        return compilation.Executables(
            group, lambda compiled: None, disk_cache.ExecutableCache(tmp_path)
        )

    start, fewer = (Start(StateShape(1, rows, 64)) for rows in (2, 4))
    first = run()
    unknown = first.compile_cost(start)
    first.get(start)
    (took,) = [one.seconds for one in first.compiles]

    later = run()
    assert later.compile_cost(start) == pytest.approx(compilation.CACHED * took, abs=1e-3)
    assert later.compile_cost(fewer) == pytest.approx(unknown)
    assert run(drafter=toys.table_drafter()).compile_cost(start) == pytest.approx(unknown)
    later.get(start)
    assert later.compiles[0].is_loaded
    assert later.compile_cost(fewer) == pytest.approx(took, abs=1e-3), (
        "a program of its kind that is not in the cache takes as long as it did"
    )


# The disk cache


def test_programs_that_differ_in_arguments_they_ignore_are_kept_apart(tmp_path):
    kept, program = disk_cache.ExecutableCache(tmp_path), jax.jit(lambda x, ignored: x + 1)
    ignored = {"a": 1.0}, {"a": 1.0, "b": 1.0}, {"a": np.ones(2)}, {"a": 1}
    lowered = [program.lower(1.0, one) for one in ignored]
    assert len({one.as_text() for one in lowered}) == 1
    assert len({kept.path(one, {}) for one in lowered}) == len(ignored)
    assert kept.path(lowered[0], {}) == kept.path(program.lower(1.0, {"a": 2.0}), {})


@pytest.fixture
def jax_cache():
    """Restores the settings of JAX's own cache afterwards."""
    names = ("dir", "min_compile_time_secs", "min_entry_size_bytes")
    knobs = ["jax_compilation_cache_dir", *(f"jax_persistent_cache_{name}" for name in names[1:])]
    before = {name: getattr(jax.config, name) for name in knobs}
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def full(*_, **__):
    raise OSError(errno.EDQUOT, "Disk quota exceeded")


def test_an_unwritable_cache_folder_is_reported_once_and_does_no_harm(jax_cache, caplog):
    for _ in range(2):
        kept = disk_cache.use_compile_cache("/proc/nowhere")
        assert kept.folder is None and jax.config.jax_compilation_cache_dir != "/proc/nowhere"
        kept.note("chunk", 1.0)
    expected = "programs are not cached: /proc/nowhere cannot be written ("
    said = [one.getMessage() for one in caplog.records if expected in one.getMessage()]
    assert len(said) == 2 and "set rollout.compile_cache to a folder of yours, or off" in said[0]


def test_a_read_only_cache_folder_is_read(jax_cache, tmp_path, monkeypatch, caplog):
    disk_cache.use_compile_cache(str(tmp_path)).note("chunk", 2.5)
    x = jax.numpy.arange(3.0)
    jax.jit(lambda x: x * 3 + 1)(x)
    before = sorted(path.name for path in tmp_path.rglob("*"))
    assert any(name.startswith("jit") for name in before)
    monkeypatch.setattr(disk_cache, "unwritable", lambda folder: "Read-only file system")
    kept = disk_cache.use_compile_cache(str(tmp_path))
    kept.note("another", 1.0)
    jax.jit(lambda x: x * 5 + 1)(x)
    assert kept.seconds("chunk") == 2.5 and len(caplog.records) == 1
    assert sorted(path.name for path in tmp_path.rglob("*")) == before
    hits = len(compilation.CACHE_HITS)
    jax.clear_caches()
    jax.jit(lambda x: x * 3 + 1)(x)
    assert len(compilation.CACHE_HITS) > hits


@pytest.mark.parametrize("platforms", [disk_cache.PLATFORMS, ()])
def test_an_executable_that_outlived_a_change_of_the_sources_says_how_long_compiling_takes(
    jax_cache, tmp_path, monkeypatch, platforms
):
    """From our cache or, as on a TPU, whose executables cannot be serialized, from that of JAX."""
    kept = disk_cache.use_compile_cache(str(tmp_path))
    monkeypatch.setattr(disk_cache, "PLATFORMS", platforms)
    start, fewer = (Start(StateShape(0, rows, 64)) for rows in (2, 4))

    def run():
        jax.clear_caches()
        compilation_cache.reset_cache()
        group = executables(1, V).shapes
        return compilation.Executables(group, lambda compiled: None, kept)

    first = run()
    first.get(start)
    monkeypatch.setattr(disk_cache, "sources", lambda: "others")
    kept.found.clear()
    later = run()
    unknown = later.compile_cost(start)
    later.get(start)
    assert not first.compiles[0].is_loaded and later.compiles[0].is_loaded
    assert kept.seconds(later.cache_key(start)) is None
    assert 0 < later.compile_cost(fewer) <= first.compiles[0].seconds + 1e-3
    assert later.compile_cost(fewer) != unknown


def test_a_quota_that_is_reached_in_a_run_is_reported_once_and_training_continues(
    tmp_path, monkeypatch, caplog
):
    kept = disk_cache.ExecutableCache(tmp_path)
    kept.note("chunk", 2.5)
    monkeypatch.setattr(Path, "write_bytes", full)
    for name in ("one", "two", "three"):
        kept.note(name, 1.0)
    assert [one.levelname for one in caplog.records] == ["WARNING"]
    assert "Disk quota exceeded" in caplog.text and kept.seconds("chunk") == 2.5
    assert not list(tmp_path.rglob(f"*{atomic.TEMPORARY}"))


def test_two_containers_that_write_one_file_both_write_it_whole(tmp_path, monkeypatch):
    """In containers every process id is 1: with it as temporary name, the second rename found no file."""
    monkeypatch.setattr(os, "getpid", lambda: 1)
    path = tmp_path / "program"
    with atomic.replacing(path) as one:
        one.write_bytes(b"one")
        with atomic.replacing(path) as two:
            two.write_bytes(b"two")
        assert one != two and path.read_bytes() == b"two"
    assert path.read_bytes() == b"one" and [*tmp_path.iterdir()] == [path]


def test_a_write_that_fails_leaves_nothing_behind(tmp_path):
    def fails(at: Path):
        at.mkdir(exist_ok=True)
        (at / "weights").write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(OSError), atomic.replacing(tmp_path / "file") as temporary:
        temporary.write_bytes(b"half")
        full()
    with pytest.raises(OSError):
        atomic.write_directory(tmp_path / "folder", fails)
    assert not list(tmp_path.iterdir())


def test_unused_files_are_pruned_and_then_the_least_recently_used(tmp_path, monkeypatch):
    now, day = 1e9, 86400.0

    def file(name, days, size, folder="rollout"):
        path = tmp_path / folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(b"x" * size)
        os.utime(path, (now - days * day, now - 100 * day))  # read at this time, written long ago
        return path

    monkeypatch.setattr(disk_cache, "MOST_BYTES", 100)
    new, other = file("new", 0, 40), file("other", 1, 40, "seconds")
    file("long ago", 31, 1), file("a temporary one.tmp", 2, 1)
    writing = file("being written.tmp", 0.1, 1)
    disk_cache.prune(tmp_path, now)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {new, other, writing}
    bigger = file("bigger", 0.5, 60)
    disk_cache.prune(tmp_path, now)
    assert {path for path in tmp_path.rglob("*") if path.is_file()} == {new, writing}, bigger
    disk_cache.prune(tmp_path / "nothing", now)
