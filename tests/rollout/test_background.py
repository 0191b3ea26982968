"""Compilation in threads: who waits, what is taken over, what is dropped, and what a call finds."""

from __future__ import annotations

import logging
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tiny_engine import PLAIN, PROMPTS, SAMPLES, engine_of, params_of

from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.rollout import run
from tlt_jax.rollout.executables import background, compilation
from tlt_jax.rollout.executables.background import WAIT, Background, Early
from tlt_jax.rollout.executables.programs import Admit, CatchUp, Decode

SMALL = jax.ShapeDtypeStruct((3,), jnp.float32)


@pytest.fixture
def threads():
    """One thread, and one for programs of the whole mesh."""
    made = Background(1)
    yield made
    made.close()


@pytest.fixture
def compiled():
    """The threads in which JAX has compiled, and the seconds of the waits for them."""
    found, waits = [], []

    def listen(event: str, seconds: float, **_):
        if event.endswith("backend_compile_duration"):
            found.append(threading.get_ident())
        if event == WAIT:
            waits.append(seconds)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found, waits
    jax.monitoring.unregister_event_duration_listener(listen)


def test_a_call_finds_what_was_compiled_early_and_compiles_nothing(threads, compiled):
    found, waits = compiled
    early = Early(jax.jit(lambda x, y: x @ x * 1.75 + y, donate_argnums=0), threads)
    square = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    given = np.arange(16, dtype=np.float32).reshape(4, 4)
    expected = given @ given * 1.75 + given
    arguments = jnp.asarray(given), jnp.asarray(given)
    found.clear()

    def late() -> tuple:
        time.sleep(0.3)  # a call that did not wait would compile before
        return square, square

    early.compile(late)
    while not threads.futures[0].running():
        time.sleep(0.001)
    np.testing.assert_allclose(early(*arguments), expected, rtol=1e-6)
    assert len(found) == 1 and found[0] != threading.get_ident() and len(waits) <= 1


def test_other_shapes_than_expected_compile_when_they_are_given_and_are_logged(threads, caplog):
    early = Early(jax.jit(lambda x: x * 2.25), threads)
    early.compile(lambda: (SMALL,))
    with caplog.at_level(logging.INFO, "tlt_jax"):
        for _ in range(2):
            np.testing.assert_array_equal(early(jnp.ones(5)), 2.25 * np.ones(5))
        assert early(jnp.ones(3)).shape == (3,)
    (said,) = [one.getMessage() for one in caplog.records]
    assert said.endswith("expected with other arrays than its 1, not with float32[5]")


def test_an_error_in_a_thread_is_raised_by_the_call(threads):
    def wrong(x):
        raise ValueError("3 is not 4")

    early = Early(jax.jit(wrong), threads)
    early.compile(lambda: (SMALL,))
    while threads.running:
        time.sleep(0.001)
    with pytest.raises(ValueError, match="3 is not 4"):
        early(jnp.ones(3))


def test_where_xla_fails_in_a_thread_the_call_compiles_again(threads, caplog):
    """XLA tunes kernels in memory that a rollout may hold at that moment."""

    class Stub:
        def lower(self, x):
            return self

        def compile(self):
            raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: 3 GiB")

        def __call__(self, x):
            return x + 1

    early = Early(Stub(), threads)
    early.compile(lambda: (SMALL,))
    while threads.running:
        time.sleep(0.001)
    with caplog.at_level(logging.INFO, "tlt_jax"):
        assert early(np.ones(3)).tolist() == early(np.ones(3)).tolist() == [2, 2, 2]
    (said,) = [one.getMessage() for one in caplog.records]
    assert "compiles when it is called" in said and "RESOURCE_EXHAUSTED: 3 GiB" in said


def test_a_job_that_has_not_begun_is_run_by_who_needs_it_and_one_that_has_is_waited_for(
    threads, compiled
):
    may_end, ran = threading.Event(), []

    def slow() -> str:
        assert may_end.wait(60)
        return "slow"

    def quick() -> str:
        ran.append(threading.current_thread())
        return "quick"

    begun, queued = threads.submit(slow), threads.submit(quick)
    while not begun.running():
        time.sleep(0.001)
    assert threads.running == 2
    assert background.result(queued, quick) == "quick" and ran == [threading.main_thread()]
    threading.Timer(0.2, may_end.set).start()
    assert background.result(begun, slow) == "slow"
    assert 0.1 < compiled[1][-1] < 60


def test_programs_of_the_whole_mesh_compile_in_the_order_in_which_they_were_submitted():
    threads, order = Background(4), []

    def job(number: int):
        time.sleep(0.01 * (3 - number))
        order.append((number, threading.get_ident()))

    futures = [threads.submit(lambda n=n: job(n), is_whole_mesh=True) for n in range(3)]
    for future in futures:
        future.result()
    threads.close()
    assert [number for number, _ in order] == [0, 1, 2] and len({one for _, one in order}) == 1


def test_what_has_not_begun_when_a_run_ends_is_dropped(threads):
    may_end, ran = threading.Event(), []
    begun = threads.submit(lambda: may_end.wait(60))
    queued = [threads.submit(lambda: ran.append(1)) for _ in range(3)]
    while not begun.running():
        time.sleep(0.001)
    threads.cancel()
    may_end.set()
    assert begun.result() and all(one.cancelled() for one in queued) and not ran


@pytest.mark.parametrize(
    "rollout",
    [
        pytest.param({"data": 1}, marks=pytest.mark.matrix),
        {"data": 2, "slots": 3, "batch_buckets": [1, 3]},
        {"data": 2, "deterministic": True},
    ],
)
def test_the_first_programs_are_those_that_the_rollout_needs_before_its_second_chunk(
    rollout, monkeypatch
):
    monkeypatch.setattr(compilation, "processors", lambda: range(99))
    engine = engine_of(**rollout, dtype="float32", compile_cache="off")
    weights = engine.publish(params_of(engine))
    prompts = [np.asarray(prompt, np.int32) for prompt in PROMPTS]
    request = engine.request(prompts, SAMPLES, PLAIN, 12, stream=TRAIN_STREAM, step=0)
    tuner = engine.tuner.init()
    expected = run.first_programs(engine, request, tuner)
    run.begin_compiling(engine, request, tuner)
    assert engine.programs.pending.keys() == set(expected)
    engine.run(request, weights, tuner)

    used = [one.program for one in engine.programs.compiles if one.program.group == 0]
    until = next(place for place, one in enumerate(used) if isinstance(one, Decode))
    begun = {one for one in used[: until + 1] if not isinstance(one, Admit)}
    assert begun == set(expected) and not any(isinstance(one, CatchUp) for one in expected)
    assert not engine.programs.pending
    engine.close()


def test_a_program_that_reads_the_shardings_of_another_does_not_block_its_caller(monkeypatch):
    monkeypatch.setattr(compilation, "processors", lambda: range(99))
    engine = engine_of(dtype="float32", compile_cache="off")
    programs, may_end, make = engine.programs, threading.Event(), engine.programs.make

    def slow(*given):
        assert may_end.wait(60)
        return make(*given)

    monkeypatch.setattr(programs, "make", slow)
    request = engine.request(
        [np.asarray(PROMPTS[0], np.int32)], SAMPLES, PLAIN, 12, stream=TRAIN_STREAM, step=0
    )
    prefill, chunk, _ = run.first_programs(engine, request, engine.tuner.init())
    programs.begin(prefill)
    programs.begin(Admit(chunk.state, prefill))
    assert list(programs.pending) == [prefill]
    may_end.set()
    programs.get(prefill)
    programs.begin(Admit(chunk.state, prefill))
    assert list(programs.pending) == [Admit(chunk.state, prefill)]
    engine.close()


@pytest.mark.parametrize(
    ("spare", "is_cpu", "processes", "expected"),
    [(1, True, 1, False), (2, True, 1, True), (2, True, 2, False), (2, False, 2, True)],
)
def test_nothing_compiles_early_where_devices_or_processes_share_the_cores(
    spare, is_cpu, processes, expected
):
    programs = SimpleNamespace(spare_cores=spare, is_cpu=is_cpu)
    engine = SimpleNamespace(programs=programs, job=SimpleNamespace(count=processes))
    assert run.compiles_early(engine) == expected
