"""An engine with speculation.drafter adaptive on a tiny policy: n-grams, an EAGLE drafter, and both in one tree."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import jax
import numpy as np
import pytest
import test_speculation as speculation
import tiny_engine as tiny

from tlt_jax.config.schema import Speculation
from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.metrics import names
from tlt_jax.models import drafter as drafters, eagle
from tlt_jax.plan import programs as planned_programs
from tlt_jax.rollout import learned_drafter
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables import compilation
from tlt_jax.rollout.executables.programs import CatchUp, Decode, StateShape
from tlt_jax.rollout.scheduler.payback import SOON
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import DRAFTERS, PLAIN, name
from tlt_jax.train import step_metrics

small_pool = tiny.small_pool
pytestmark = pytest.mark.usefixtures("small_pool")
SETTINGS = Speculation(drafter="adaptive", strategies=["2_1_3", "3_2_7"])
ARMS = ["ngram:2_1_3", "learned:2_1_3", "learned:3_2_7", "merged:3_2_7"]


def adaptive(kind: str = "eagle3", data: int = 1, settings=SETTINGS, **rollout) -> Engine:
    """The engine; the sizes of the learned drafter are those of an untrained one."""
    learned = drafters.for_policy(tiny.MODEL, kind)
    return tiny.with_drafter(tiny.engine_of(data, **rollout), settings, learned)


@pytest.mark.parametrize(
    "kind", ["trained", "block of some ids", *(pytest.param(it, marks=pytest.mark.matrix) for it in ("eagle", "dflash"))]
)  # fmt: skip
def test_three_drafters_in_turn_change_no_token(x64, kind):
    engine, weights = speculation.speculating(
        kind, SETTINGS.strategies, adaptive=True, slots=5, chunk=1, cache_buckets=[32], batch_buckets=[5]
    )  # fmt: skip
    assert [name(arm) for arm in engine.arms] == ARMS
    shape = tiny.PROMPTS, tiny.SAMPLES, tiny.COLD, tiny.LIMIT
    results = [
        tiny.roll_out(engine, weights, *shape, stream=TRAIN_STREAM, step=0, in_flight=1)
        for _ in range(2)
    ]
    expected, _ = tiny.reference(tiny.COLD)
    hits = Counter()
    for result in results:  # the second finds the answers of the first in the n-gram memory
        assert tiny.answers(result) == expected
        for one in result.measurements:
            hits[name(one.strategy)] += int(one.hits.sum())
            assert one.tokens == int(one.hits.sum()) + one.row_rounds, "no accepted node is lost"
    assert hits.keys() == {*ARMS, "off"}
    if kind == "trained":
        assert min(hits[text] for text in ARMS) > 0, hits
        check_metrics(engine, results[1])


def check_metrics(engine: Engine, result) -> None:
    """Checks that the metrics of a step with every drafter are listed, and that chunk lines name the arms."""
    found = step_metrics.of_drafting(engine.drafter_kind, result)
    lengths = []
    for drafter in DRAFTERS:
        mine = [one for one in result.measurements if one.strategy.drafter == drafter]
        tokens, row_rounds = (
            sum(getattr(one, of) for one in mine) for of in ("tokens", "row_rounds")
        )
        lengths.append(tokens / row_rounds)
        assert found[f"speculation/accept_length/{drafter}"] == lengths[-1]
    assert min(lengths) <= found["speculation/accept_length"] <= max(lengths)
    assert sum("accept_length" in one for one in found) == 4
    for one in found:
        names.find(one, "scalar")
    lines = step_metrics.chunks(engine.drafter_kind, result)
    assert {line.strategy for line in lines} == {*ARMS, "off"}


def forbidden(*_, **__):
    raise AssertionError("the learned drafter is computed")


def test_the_programs_of_ngrams_compute_nothing_of_the_learned_drafter(monkeypatch):
    engine = adaptive()
    shape = StateShape(0, 2, 32)
    for part in ("extend", "draft_level", "logits", "fill"):
        monkeypatch.setattr(eagle, part, forbidden)
    engine = adaptive()  # traces the patched functions
    for arm in (PLAIN, *engine.arms):
        program = Decode(shape, 2, arm, DecodingParams())
        if arm.drafter in ("", "ngram"):
            engine.programs.lower(program)
        else:
            with pytest.raises(AssertionError, match="is computed"):
                engine.programs.lower(program)


def test_only_ngram_drafters_get_texts_and_features_are_stored_for_all():
    engine = adaptive(dtype="float32")
    shapes = engine.programs.shapes[0]
    for arm in engine.arms:
        context = Decode(StateShape(0, 2, 32), 2, arm).lower(shapes, None).args_info[0][2]
        assert bool(jax.tree.leaves(context)) == (arm.drafter != "learned")
    captures = drafters.for_policy(tiny.MODEL, "eagle3").captures
    features = shapes.target.features(shapes.state(StateShape(0, 2, 32)).cache)
    assert features.shape[2] == len(captures) * tiny.MODEL.hidden_size


def test_a_plan_has_the_programs_of_every_arm_before_any_drafter_is_trained():
    engine = adaptive(settings=replace(SETTINGS, tuner="goodput"))
    found = planned_programs.largest_programs(engine, DecodingParams(), 16, 4, 32)
    chunks = [one.strategy for one in found.values() if isinstance(one, Decode)]
    assert chunks == [PLAIN, *engine.arms]
    assert sum(isinstance(one, CatchUp) for one in found.values()) == 1
    state = engine.tuner.init()
    assert {arm.drafter for arm in engine.tuner.usable(state, 1, 1)} == {"ngram"}


def test_until_the_learned_drafter_is_used_nothing_is_captured_and_no_token_changes(x64):
    engine = adaptive("eagle", 2, batch_buckets=[6], cache_buckets=[32])
    params, drafter = tiny.params_of(engine), speculation.drafter_of("eagle", engine.mesh)
    expected, _ = tiny.reference(tiny.COLD)
    shape = tiny.PROMPTS, tiny.SAMPLES, tiny.COLD, tiny.LIMIT
    engine.tuner, rounds = speculation.in_turn((engine.arms[0], PLAIN)), {}
    for is_used in (False, True):
        engine.use_learned(is_used)
        state = engine.programs.shapes[0].state(StateShape(0, 2, 32))
        assert bool(state.cache.features.size) == bool(jax.tree.leaves(state.drafter)) == is_used
        weights = engine.publish(params, drafter)
        assert bool(jax.tree.leaves(weights[0].drafter)) == is_used
        result = tiny.roll_out(engine, weights, *shape, stream=TRAIN_STREAM, step=0)
        assert tiny.answers(result) == expected
        rounds[is_used] = {one.strategy for one in result.measurements}
        programs = dict(engine.programs.executables)
        engine.use_learned(is_used)
        assert programs == engine.programs.executables, "no program was dropped"
    assert rounds[False] <= {PLAIN, engine.arms[0]} and PLAIN in rounds[True]


def test_the_compile_cost_of_the_learned_drafter_is_that_of_recompiling_every_program(monkeypatch):
    engine = adaptive("eagle", 2, cache_buckets=[32])
    assert engine.learned_compile_cost() == 0.0, "it is in use already"
    engine.use_learned(False)
    assert engine.learned_compile_cost() == 0.0, "nothing was compiled"
    monkeypatch.setattr(engine.programs.compile_costs, "of", lambda program: 5.0)
    monkeypatch.setattr(engine.programs, "is_shared", lambda program: True)
    shapes = [StateShape(group, 2, 32) for group in (0, 1)]
    for program in (Decode(shapes[0], 2), Decode(shapes[1], 2), CatchUp(shapes[0])):
        engine.programs.executables[program] = None
    assert engine.learned_compile_cost() == pytest.approx(5.0 * (2 + compilation.LOADING))
    with_learned = compilation.sizes_of(engine.shapes(engine.learned)[0])
    cached = engine.programs.cache_key(CatchUp(shapes[0]), with_learned)
    monkeypatch.setattr(
        engine.programs.disk_cache, "seconds", lambda key: 2.0 if key == cached else None
    )
    expected = 5.0 * (1 + compilation.LOADING) + 2.0 * compilation.CACHED
    assert engine.learned_compile_cost() == pytest.approx(expected), "an earlier run compiled one"


def test_the_payback_of_the_learned_drafter_is_the_time_its_best_arms_save_over_compiled_ones(
    monkeypatch,
):
    engine = adaptive(cache_buckets=[32])
    engine.use_learned(False)
    speeds = {PLAIN: 10.0, "ngram:2_1_3": 12.0, "learned:2_1_3": 15.0, "learned:3_2_7": 20.0}

    def predict(state, cells):
        known = [speeds.get(cell.strategy, speeds.get(name(cell.strategy), 1.0)) for cell in cells]
        # With four rows the larger tree is no faster than plain decoding.
        known = [
            10.0 if cell.batch == 4 and cell.strategy.nodes == 7 else speed
            for cell, speed in zip(cells, known, strict=True)
        ]
        return np.log(known), np.full(len(cells), error)

    error, estimates = 0.0, []
    update_prior = lambda state, estimated={}: estimates.append(estimated) or state  # noqa: E731
    engine.tuner = engine.tuner._replace(predict=predict, update_prior=update_prior)
    assert learned_drafter.payback(engine, {}, [0.5]) == (0.0, 0.0), "nothing was decoded yet"
    payback = engine.payback[DecodingParams(tiny.COLD)]
    assert payback.ahead == SOON, "of a CPU"
    payback.begin(3, 8)
    payback.progress(0, 8)
    for batch in (2, 4):
        payback.add((batch, 32), 100.0)
    chunk = Decode(StateShape(0, 2, 32), 2)
    engine.programs.executables[chunk] = None
    monkeypatch.setattr(engine.programs.compile_costs, "of", lambda program: 4.0)
    saved, compile_cost = learned_drafter.payback(engine, {}, [0.5])
    assert estimates[-1] == {"learned": [0.5]}
    # 100 tokens of each situation in each of 3 rollouts, 10 a second: two rows at twice, four at 1.5 times the speed.
    assert saved == pytest.approx(30 * (1 - 10 / 20) + 30 * (1 - 10 / 15) - 0.02 * 60, rel=1e-4)
    assert compile_cost == pytest.approx(4.0 + 1.5 * 4.0), (
        "the plain chunk again, and one that drafts"
    )

    # N-grams are used: it has to be faster than these.
    drafting = replace(chunk, strategy=engine.arms[0])
    engine.programs.executables[drafting] = None
    saved, again = learned_drafter.payback(engine, {}, [0.5])
    assert saved == pytest.approx(25 * (1 - 12 / 20) + 25 * (1 - 12 / 15) - 0.02 * 50, rel=1e-4)
    assert again == compile_cost, "chunks that draft are recompiled only where they pay off"
    error = math.inf
    assert learned_drafter.payback(engine, {}, [0.5]) == (0.0, 0.0), (
        "no chunk's seconds were measured"
    )
