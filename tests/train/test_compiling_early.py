"""A run whose programs compile in threads while it starts: the same bits, no program twice, nothing left behind."""

from __future__ import annotations

import threading
from collections import Counter

import jax
import pytest
from training_runs import assert_equal, completions, events, preempt, raise_at, state_of

from tlt_jax import cli
from tlt_jax.data.packing import PackedRows
from tlt_jax.rollout.executables import compilation
from tlt_jax.rollout.executables.background import Background
from tlt_jax.train import loop, policy_update, sft

UPDATE = {"empty", "accumulate", "apply", "score"}
MANY = {"train.steps": 2, "eval.every": 0, "checkpoint.every": 2, "rollout.compile_cache": "off"}

SEVERAL = {
    "algorithm.minibatches": 2,
    "algorithm.kl_coef": 0.1,
    "rollout.deterministic": True,
    "speculation.drafter": "ngram",
    "speculation.strategies": ["2_1_3"],
}


@pytest.fixture
def compiled():
    """(name, whether the main thread did it) of what JAX compiles."""
    found = []

    def listen(event: str, _: float, fun_name: str = "", **__):
        if event.endswith("backend_compile_duration"):
            is_main = threading.current_thread() is threading.main_thread()
            found.append((fun_name.removeprefix("jit(").removesuffix(")"), is_main))

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield found
    jax.monitoring.unregister_event_duration_listener(listen)


def forget() -> None:
    """Drops what JAX has compiled, so that every run compiles all."""
    policy_update.programs.cache_clear()
    jax.clear_caches()


def test_a_run_that_compiles_early_has_the_same_bits_and_compiles_no_program_twice(
    configure, tmp_path, monkeypatch, compiled
):
    def run(name: str, cores: int):
        monkeypatch.setattr(compilation, "processors", lambda: range(cores))
        forget()
        config = configure(tmp_path / name, MANY | SEVERAL)
        assert loop.train(config) == cli.DONE
        found = [one for one in compiled if one[0] in {*UPDATE, "to_rollout"}]
        compiled.clear()
        return config, found

    waits, one_thread = run("waits", 1)
    early, threads = run("early", 99)
    assert_equal(state_of(early, 2), state_of(waits, 2))
    assert completions(early) == completions(waits)
    names = Counter(name for name, _ in one_thread)
    assert names == Counter(name for name, _ in threads) and names["accumulate"] == 1
    assert all(is_main for _, is_main in one_thread)
    assert not any(is_main for name, is_main in threads if name in UPDATE)
    (_, seconds), *_ = events(early)["timing_s/update"]
    waited = dict(events(early).get("perf/compile_s/update", {}))
    assert waited.get(1, 0) <= seconds


def test_rows_of_another_kind_than_expected_compile_in_the_update(
    configure, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(compilation, "processors", lambda: range(99))
    forget()
    real = policy_update.update

    def without_recorded(programs, state, batch: list[PackedRows], step, base):
        return real(
            programs, state, [rows._replace(rollout_logprobs=None) for rows in batch], step, base
        )

    monkeypatch.setattr(policy_update, "update", without_recorded)
    config = configure(tmp_path / "run", MANY | {"train.steps": 1, "checkpoint.every": 0})
    assert loop.train(config) == cli.DONE
    said = "accumulate compiles when it is called: it was expected with other arrays than its"
    assert capsys.readouterr().out.count(said) == 1


def test_an_interrupted_start_drops_what_has_not_begun_to_compile(configure, tmp_path, monkeypatch):
    monkeypatch.setattr(compilation, "processors", lambda: range(99))
    forget()
    made, submit = [], Background.submit

    def seen(self, *job, **how):
        made.append((self, submit(self, *job, **how)))
        return made[-1][1]

    monkeypatch.setattr(Background, "submit", seen)
    raise_at(monkeypatch, sft, "warm_start", 1, preempt)
    config = configure(tmp_path / "run", MANY | {"sft.steps": 3})
    assert loop.train(config) == cli.PREEMPTED
    assert len(made) > 5
    for _, future in made:
        if not future.cancelled():
            future.result(60)
    assert all(background.running == 0 for background, _ in made)
