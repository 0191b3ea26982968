"""Laws of a run in virtual time: the clock is exact, groups help, free drafting gains its accept length, seeds repeat."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from tlt_jax.config import Config
from tlt_jax.config.schema import Model, Rollout, Speculation, Train
from tlt_jax.config.task import Data
from tlt_jax.errors import DataError
from tlt_jax.rollout import engine
from tlt_jax.rollout.executables.programs import Decode, StateShape
from tlt_jax.simulate import acceptance, lengths, run
from tlt_jax.simulate.acceptance import Acceptances, Curve
from tlt_jax.simulate.cost_table import CostRow, CostTable
from tlt_jax.simulate.lengths import Drawn, LogNormal
from tlt_jax.simulate.run import SimulatedTrainer, World
from tlt_jax.spec_decode.strategy import LEARNED, PLAIN, parse
from tlt_jax.train import adaptive

TREE = parse("3_1_4")
GOOD = Acceptances((0.5,), Curve((0.1,), (0.9,), scale=1e4))
FIXED = {"publish": 0.25, "reward": 0.5, "other": 0.125}


def configuration(**rollout):
    knobs = {"prompts": 8, "samples": 4, "max_new_tokens": 600, "chunk": 16} | rollout
    return Config(
        rollout=Rollout(**knobs), data=Data(max_prompt_tokens=32), train=Train(steps=6),
        speculation=Speculation(strategies=["3_1_4", "1_1_2"]),
    )  # fmt: skip


def table(drafted=1.2, rows=(1, 4, 32), held=0.0):
    """Rounds of 10 ms and more; a round of a tree takes `drafted` times as long."""
    rounds = []
    for batch in rows:
        plain = CostRow("round", 0.01 + 2e-5 * batch, "measured", batch, 1024, held)
        rounds.append(plain)
        for arm in (TREE, parse("1_1_2")):
            seconds = drafted * plain.seconds
            rounds.append(plain._replace(seconds=seconds, strategy=arm, drafter="eagle3"))
    calls = [CostRow(name, seconds, "measured") for name, seconds in FIXED.items()]
    for name in ("update", "drafter_update", "micro_step"):
        calls.append(CostRow(name, 1.0, "measured", tokens=1e4))
    return CostTable((*rounds, *calls, CostRow("compile", 0.5, "measured")))


class Given:
    """Answers of these lengths, by prompt and sample."""

    def __init__(self, *answers):
        self.answers = np.array(answers)

    def draw(self, step, prompts, samples, seed):
        return Drawn(np.full(prompts, 20), self.answers.reshape(prompts, samples))

    def describe(self):
        return "given"


def world(costs=None, answers=None, steps=3, groups=1, compiles=False, accepted=GOOD):
    answers = answers or LogNormal(150, 0.8)
    return World(costs or table(), answers, accepted, steps, groups, compiles)


def steps_of(name, given, config=None):
    return run.simulate(config or configuration(), name, given)


def programs_of(name, given, config=None):
    """The programs of an arm."""
    return SimulatedTrainer(config or configuration(), name, given).run.engine.programs


def test_virtual_time_is_exact_for_a_plain_rollout_of_one_group(monkeypatch):
    """Two rows in one bucket: 100 rounds of both, then 60 of one; what a row reads grows by one token a round."""
    costs = table(rows=(2,), held=512.0)
    config = configuration(prompts=1, samples=2, chunk=50, slots=2, max_new_tokens=992)
    monkeypatch.setattr(engine, "doubling", lambda first, last: [last])  # one bucket each
    (step,) = steps_of("plain", world(costs, Given(100, 160), steps=1), config)
    fixed, each, _ = costs.shape(2, PLAIN)
    read = sum((20 + t + 0.5) / 2 * (2 if t < 100 else 1) for t in range(160))
    cost = programs_of("plain", world(costs), config).round_cost(0.0)
    empty = cost(2, 0, PLAIN)
    start, admit = ((cost(2, slots, PLAIN) - empty) / 1e3 for slots in (1024, 32))
    prefill = cost(1, 32, replace(PLAIN, nodes=32)) / 1e3
    known = start + prefill + admit + 160 * fixed + each * read
    chunks_without_rounds = step.seconds["rollout"] - known
    assert chunks_without_rounds == pytest.approx(0.0, abs=3 * 0.01 * fixed)
    assert step.seconds["publish"] == pytest.approx(0.25)
    padded = 2 * 1024  # a row for two of the longest examples, 32 + 992 tokens
    assert step.seconds["update"] == pytest.approx(costs.seconds("update", padded))
    assert step.total == sum(step.seconds.values())


@pytest.mark.parametrize(("kind", "terms"), [("qwen3", 5), ("qwen3_moe", 6)])
def test_the_tuner_of_a_run_knows_the_experts_of_its_policy(kind, terms):
    policy = run.STAND_IN | {"model_type": kind, "vocab_size": 512, "head_dim": 16}
    if kind == "qwen3_moe":
        policy |= {"num_experts": 16, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    config = replace(configuration(), model=Model(init=policy))
    trainer = SimulatedTrainer(config, "ngram", world())
    trainer.step()
    assert len(trainer.state.tuner["law"]["weights"]) == terms


def test_a_rollout_waits_for_its_first_programs_as_long_as_they_compile():
    """Start, prefill, admission and a chunk: 0.07, 0.4, 0.3 and 1 times the 0.5 s of a plain chunk; once for all groups."""
    config = configuration(prompts=4, samples=1, slots=2)
    given = world(answers=Given(20, 20, 20, 20), groups=2, steps=2, compiles=True)
    cold, again = steps_of("plain", given, config)
    warm, _ = steps_of("plain", replace(given, compiles=False), config)
    assert cold.compiling == pytest.approx(0.5 * (0.07 + 0.4 + 0.3 + 1)) and again.compiling == 0
    apart = cold.seconds["rollout"] - warm.seconds["rollout"]
    assert apart == pytest.approx(cold.compiling, rel=0.02)


def test_the_host_delays_a_rollout_and_every_program_on_an_idle_device():
    """One row, one chunk at a time in flight would wait for each; of two in flight only the first waits."""
    config = configuration(prompts=1, samples=1, slots=1)
    costs = table(rows=(1,))
    delayed = CostTable(
        (*costs.rows, CostRow("begin", 0.5, "measured"), CostRow("host", 0.03, "measured"))
    )
    given = [world(one, Given(500), steps=1) for one in (costs, delayed)]
    first, second = (steps_of("plain", one, config)[0] for one in given)
    apart = second.seconds["rollout"] - first.seconds["rollout"]
    assert apart == pytest.approx(0.5 + 0.03, abs=1e-6)


@pytest.mark.parametrize("name", ["plain", "frozen"])
def test_more_groups_never_slow_a_step(name):
    """With one strategy for all; a tuner may explore more often in more groups."""
    config = replace(configuration(), speculation=Speculation(tuner="fixed", strategies=["3_1_4"]))
    worlds = [world(groups=groups) for groups in (1, 2, 4, 8)]
    taken = [[step.total for step in steps_of(name, given, config)] for given in worlds]
    for fewer, more in zip(taken, taken[1:], strict=False):
        assert all(b <= a * (1 + 1e-9) for a, b in zip(fewer, more, strict=True))
    assert taken[-1][0] < taken[0][0]


@pytest.mark.parametrize("levels", [(0.95,), (0.7, 0.5)])
def test_drafting_that_costs_nothing_is_as_many_times_faster_as_its_accept_length(levels):
    """One row of 6,000 tokens; the mean of its rounds has a standard error of 1 %."""
    accepted = Acceptances((0.1,), Curve(levels, levels))
    config = configuration(prompts=1, samples=1, max_new_tokens=8000, slots=1)
    config = replace(config, speculation=Speculation(tuner="fixed", strategies=["3_1_4"]))
    given = world(table(drafted=1.0, rows=(1,)), Given(6000), steps=1, accepted=accepted)
    costs = [CostRow("round", 0.01, "measured", 1, 1024, 0.0, arm) for arm in (PLAIN, TREE)]
    given = replace(given, table=CostTable(tuple(costs)))
    (plain,), (drafted,) = steps_of("plain", given, config), steps_of("frozen", given, config)
    chain = np.cumprod([*levels, *levels[-1:] * 3][:3])
    assert drafted.accept_length == pytest.approx(1 + chain.sum(), rel=0.04)
    gain = plain.seconds["rollout"] / drafted.seconds["rollout"]
    assert gain == pytest.approx(drafted.accept_length, rel=0.03)


def test_a_run_of_ngrams_alone_accepts_what_ngrams_do():
    """Its strategies name no drafter. Chains of three: 1 + 0.9 + 0.81 + 0.73 tokens a round, less the ends of answers."""
    accepted = Acceptances((0.9,), Curve((0.1,), (0.1,)))
    config = replace(configuration(), speculation=Speculation(tuner="fixed", strategies=["3_1_4"]))
    (step,) = steps_of("ngram", world(steps=1, accepted=accepted), config)
    assert step.accept_length == pytest.approx(3.44, rel=0.08)
    assert step.decoding_seconds.keys() == {"ngram"}


def test_a_seed_repeats_to_the_bit():
    def told(seed):
        config = configuration()
        config = replace(config, train=replace(config.train, seed=seed))
        return [repr(step) for step in steps_of("adaptive", world(groups=2, compiles=True), config)]

    assert told(0) == told(0) != told(1)


def test_an_adaptive_run_learns_and_drafts_once_it_pays():
    """14 steps; idle groups and updates teach the same drafter, which the rollout uses once it is worth its compilations."""
    accepted = Acceptances((0.02,), Curve((0.02,), (0.95,), scale=3e3))
    config = configuration(max_new_tokens=1200)
    given = world(steps=14, groups=2, accepted=accepted, compiles=True, answers=LogNormal(150, 1.0))
    alone = replace(config, drafter_training=replace(config.drafter_training, share=0))
    found = {name: steps_of(name, given, config) for name in ("plain", "adaptive")}
    found["idle"] = steps_of("adaptive", given, alone)
    last = {name: steps[-1] for name, steps in found.items()}
    assert last["adaptive"].seconds["rollout"] < 0.8 * last["plain"].seconds["rollout"]
    assert last["adaptive"].decoding_seconds.keys() - {"off"}
    assert last["plain"].decoding_seconds.keys() == {"off"}
    assert last["plain"].learned == 0 < min(last["idle"].learned, last["adaptive"].learned)
    assert not found["adaptive"][0].learned
    spent = {name: sum(step.seconds.get("drafter", 0) for step in steps) for name, steps in found.items()}  # fmt: skip
    assert spent["idle"] == pytest.approx(0, abs=1.0) and spent["adaptive"] > 0.1


def test_idle_micro_steps_fill_the_bubble_and_the_rollout_waits_for_one_at_most():
    accepted = Acceptances((0.02,), Curve((0.02,), (0.95,), scale=3e3))
    given = world(steps=12, groups=4, accepted=accepted, answers=LogNormal(150, 1.2))
    config = configuration()
    config = replace(config, drafter_training=replace(config.drafter_training, share=0))
    one, results = SimulatedTrainer(config, "adaptive", given), []
    rollout = one.run.engine.run

    def watched(*inputs, **rest):
        found, tuner = rollout(*inputs, **rest)
        results.append(found.stats | {"idle": idle_seconds(found), "micro_step": micro_step()})
        return found, tuner

    def micro_step():
        return given.table.seconds("micro_step", one.run.drafter.idle.tokens)

    one.run.engine.run = watched
    for _ in range(given.steps):
        one.step()
    trained = [found for found in results if found.get("idle_used")]
    assert len(trained) >= 6 and any(found["idle_delay"] > 0 for found in trained)
    for found in trained:
        assert found["idle_delay"] <= found["micro_step"] + 1e-9
        most = found["idle"] + 4 * (found["micro_step"] + found["idle_delay"])
        assert 0.5 * found["idle"] < found["idle_used"] <= most


def idle_seconds(result):
    """Seconds in which groups had nothing to decode."""
    groups = adaptive.decoding_seconds(result, 4, "train")
    return sum(group.idle for group in groups)


# Inputs


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ({"acceptance": [2]}, "probabilities by depth"), ({"acceptance": []}, "probabilities by depth"),
        ({"medusa": [0.5]}, "write"), ([0.5], "write"), ({"start": [0.5]}, "best"),
        ({"start": [0.5], "best": [0.8], "forget": -1}, "forget"),
    ],
)  # fmt: skip
def test_a_wrong_acceptance_is_refused_by_name(tmp_path, found, message):
    (tmp_path / "acceptance.json").write_text(json.dumps(found))
    with pytest.raises(DataError, match=message):
        acceptance.of(str(tmp_path / "acceptance.json"))


def test_a_file_states_what_a_drafter_accepts_before_it_learns_or_forgets(tmp_path):
    """With scale and power 1, three times the scale leaves a quarter of the way from start to best."""
    found = {
        "start": [0.4, 0.2],
        "best": [0.8, 0.6],
        "scale": 100,
        "power": 1,
        "forget": 0.1,
        "pretrained": 300,
    }
    (tmp_path / "curve.json").write_text(json.dumps(found))
    accepted = acceptance.of(str(tmp_path / "curve.json"))
    assert accepted.learned.levels(accepted.pretrained, 3) == pytest.approx((0.7, 0.5, 0.5))
    assert accepted.learned.forget == 0.1


def test_log_normal_lengths_have_their_median_spread_and_correlation():
    """200 prompts x 50 samples: the standard error of the median is 2.5 %, that of the shared variance 0.05."""
    drawn = LogNormal(400, 0.9, alike=0.4).draw(10, 200, 50, 3).answers
    logs = np.log(drawn)
    assert np.median(drawn) == pytest.approx(400, rel=0.1)
    assert logs.std() == pytest.approx(0.9, rel=0.08)
    assert logs.mean(1).var() == pytest.approx(0.4 * 0.81, abs=0.12)
    assert lengths.of("400,0.9", 100) == LogNormal(400, 0.9)


def test_recorded_answers_are_read_step_by_step(tmp_path):
    (tmp_path / "config.yaml").write_text("{}")
    (tmp_path / "completions").mkdir()
    for step, tokens in ((1, (5, 7, 9, 11)), (2, (6, 8, 10, 12))):
        rows = [
            {"uid": uid, "group": uid // 2, "length": n, "finish": "length" if n > 9 else "stop"}
            for uid, n in enumerate(tokens)
        ]
        path = tmp_path / f"completions/{step:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in reversed(rows)))
    found = lengths.of(str(tmp_path), 100)
    assert found.draw(0, 2, 2, 0).answers.tolist() == [[5, 7], [9, 12]]
    assert found.draw(3, 2, 2, 0).answers.tolist() == [[6, 8], [11, 13]]
    assert set(found.draw(0, 9, 3, 0).answers.ravel()) <= {5, 7, 9, 12}


@pytest.mark.parametrize("level", [0.05, 0.3, 0.6, 0.9])
def test_a_chain_accepts_what_its_levels_say(level):
    """2,000 drawn rounds: the standard error of the first level is at most 0.011."""
    found = Acceptances((level,), Curve((level,), (level,))).trees(parse("4_1_5"), 0.0)
    assert (found.rank[:, 0] >= 0).mean() == pytest.approx(level, abs=0.035)


def test_acceptance_rises_with_the_tokens_learned_towards_its_best():
    curve = Curve((0.1, 0.2), (0.8, 0.9), scale=1e4)
    first, later, last = (curve.levels(tokens, 3) for tokens in (0, 1e5, 1e12))
    assert first == pytest.approx((0.1, 0.2, 0.2))
    assert last == pytest.approx((0.8, 0.9, 0.9), abs=1e-3)
    assert all(a < b < c for a, b, c in zip(first, later, last, strict=True))


@pytest.mark.parametrize("start", ["", "trained"])
def test_a_run_that_starts_from_a_drafter_knows_what_it_accepts(start):
    """As a real one, whose drafter directory records it; without a start nothing is known before the first step."""
    config, given = configuration(), replace(GOOD, pretrained=2e4)
    config = replace(config, drafter_training=replace(config.drafter_training, start=start))
    one = SimulatedTrainer(config, "adaptive", world(accepted=given))
    known = one.state.tuner["estimates"]
    assert (LEARNED in known) == bool(start)
    if start:
        levels = given.learned.levels(given.pretrained, TREE.depth)
        np.testing.assert_allclose(known[LEARNED]["levels"], levels, rtol=1e-6)


@pytest.mark.parametrize("drafter", ["", "learned", "ngram", "merged"])
def test_compiling_a_chunk_that_drafts_takes_as_long_as_its_row_says(drafter):
    costs = table()
    rows = (*costs.rows, CostRow("compile", 7.0, "measured", strategy=TREE))
    costs = replace(costs, rows=rows, facts={"device": "cpu"})
    programs = programs_of("adaptive", world(costs, compiles=True))
    chunk = Decode(StateShape(0, 4, 1024), 16, replace(TREE, drafter=drafter))
    assert programs.compile_cost(chunk) == 7.0
    assert programs.compile_cost(replace(chunk, strategy=PLAIN)) == 0.5


@pytest.mark.parametrize("is_captured", [False, True])
def test_rounds_that_capture_features_cost_two_percent_more_than_others_once(is_captured):
    """Whether the rounds of the table do it or not."""
    costs = replace(table(), facts={"features": "captured"} if is_captured else {})
    chunk = Decode(StateShape(0, 4, 1024), 16, PLAIN)
    config = configuration()
    start = replace(config, drafter_training=replace(config.drafter_training, start="trained"))
    learned, plain = (
        programs_of(arm, world(costs), one).seconds(chunk, 16, 0.0, 0.0)
        for one, arm in ((start, "adaptive"), (config, "plain"))
    )
    alone = 16 * costs.round_seconds(4, 1024, PLAIN, 1024)
    assert learned / plain == pytest.approx(1.02)
    assert (learned if is_captured else plain) == pytest.approx(alone)


@pytest.mark.parametrize(("device", "share", "waited"), [("cpu", 1.0, 0.5), ("h200", 0.3, 0.0)])
def test_a_rollout_waits_for_what_it_prepares_on_a_cpu_alone(device, share, waited):
    """As Executables: elsewhere a compilation in the background costs the rollout 0.3 of its 0.5 seconds."""
    costs = replace(table(), facts={"device": device})
    programs = programs_of("plain", world(costs, compiles=True))
    chunk = Decode(StateShape(0, 4, 1024), 16, PLAIN)
    assert programs.compile_cost(chunk) == pytest.approx(0.5 * share)
    programs.prepare([chunk])
    assert programs.clock.now() == waited
    assert (programs.compile_cost(chunk) == 0) == bool(waited)
