"""The engine as a library: answers of the weights it was given, whatever drafts, and a drafter that learns from them."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jobs import PATIENCE_S, address, free_port
from library_process import PROMPTS, use

import tlt_jax
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.process import COUNT
from tlt_jax.errors import ConfigError, DataError, UserError
from tlt_jax.models import architecture, hf
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.rollout import learned_drafter

ROOT = Path(tlt_jax.__file__).parents[1]
MODEL = ModelConfig(
    "qwen2", 37, 16, 2, 4, 2, 4, 32, 64, qkv_bias=True, tied=True, init_std=0.4, eos_ids=(0,)
)
KNOBS = {
    "rollout.compile_cache": os.environ["TLT_JAX_TEST_PROGRAMS"], "rollout.samples": 2, "rollout.prompts": 4,
    "rollout.max_new_tokens": 24, "speculation.tuner": "fixed", "train.row_tokens": 64, "data.max_prompt_tokens": 8,
}  # fmt: skip
LEARNED = {"speculation.drafter": "adaptive", "speculation.strategies": ["learned:2_1_3"]}


def weights(seed: int) -> architecture.Params:
    return architecture.init(MODEL, meshes.make_mesh(1, 1), jax.random.key(seed), "float32")


def opened(seed: int = 0, **changes):
    knobs = KNOBS | LEARNED | {name.replace("__", "."): one for name, one in changes.items()}
    return tlt_jax.open_engine((MODEL, weights(seed)), knobs)


def tokens(answers) -> list[list[int]]:
    return [one.tokens.tolist() for one in answers]


@pytest.fixture(scope="module")
def plain():
    """Answers of plain decoding, of the weights of two seeds, in calls 0 and 1."""
    found = {}
    for seed in (0, 1):
        with opened(seed, speculation__drafter="none", speculation__strategies=["3_1_4"]) as engine:
            found |= {(seed, call): tokens(engine.generate(PROMPTS, call)) for call in (0, 1)}
    return found


@pytest.fixture(scope="module")
def engine():
    """An engine on two data groups, whose drafter learns. A test leaves the weights of seed 0 in it."""
    knobs = {"mesh__data": 2, "rollout__slots": 2, "idle_training__learning_rate": 0.02}
    with opened(**knobs) as engine:
        yield engine


def test_the_loop_of_the_example_trains_and_drafts():
    train = runpy.run_path(str(ROOT / "examples" / "reinforce.py"))["train"]
    names = ["compile_cache", "tuner", "row_tokens", "max_prompt_tokens"]
    knobs = {name: value for name, value in KNOBS.items() if name.split(".")[1] in names}
    first, last = train("adaptive", 2, knobs | {"speculation.strategies": ["3_2_4"]})
    assert first[0] != last[0] and min(first[2], last[2]) > 1, "tokens, accept length"
    assert len((ROOT / "examples/reinforce.py").read_text()) < 5000


def test_answers_are_those_of_the_weights_whatever_drafts_and_on_any_mesh(plain, engine):
    first = engine.generate(PROMPTS, 0)
    assert tokens(first) == plain[0, 0] and first.accept_length > 1
    assert [(one.prompt, one.sample) for one in first] == [
        (i, j) for i in range(4) for j in range(2)
    ]
    for one in first:
        assert one.prompt_tokens.tolist() == PROMPTS[one.prompt] and one.text is None
        assert one.tokens.dtype == np.int32 and one.logprobs.shape == one.tokens.shape
        assert (one.logprobs <= 0).all() and one.finish in ("stop", "length")
    assert first.num_tokens == sum(map(len, plain[0, 0])) >= first.speculated_tokens > 0
    short = engine.generate(PROMPTS, 0, samples=1, max_new_tokens=3)
    assert tokens(short)[0] == plain[0, 0][0][:3] and len(short) == 4


def test_the_kept_prompts_are_the_first_whose_answers_score_differently(plain, engine):
    def score(answer) -> float:
        return float(answer.tokens.sum() % 2)

    kept = set()
    for call in (0, 1):
        everything = [plain[0, call][2 * prompt : 2 * prompt + 2] for prompt in range(4)]
        scores = np.array([[sum(one) % 2 for one in answers] for answers in everything])
        counting = np.flatnonzero(scores[:, 0] != scores[:, 1])[:2]
        others = np.flatnonzero(scores[:, 0] == scores[:, 1])[: 2 - len(counting)]
        expected = sorted([*counting, *others])
        answers = engine.generate(PROMPTS, call, keep=2, score=score)
        assert [(one.prompt, one.sample) for one in answers] == [
            (prompt, sample) for prompt in expected for sample in range(2)
        ]
        assert tokens(answers) == [one for prompt in expected for one in everything[prompt]]
        kept.add(tuple(expected))
    assert kept != {(0, 1)}, "some prompt was replaced"


class Own(Exception):
    """An error of a score."""


def fails(_):
    raise Own("here")


SCORES = [
    (lambda engine: lambda one: None, "gave NoneType, not a number"),
    (lambda engine: lambda one: np.ones(2), "gave ndarray, not a number"),
    (lambda engine: lambda one: 10**400, "gave int, not a number"),
    (lambda engine: lambda one: float("nan") if one.prompt == 1 else 0, "prompt 1, gave nan: scores are"),
    (lambda engine: lambda one: len(engine.generate(PROMPTS)), "score calls the engine that waits for it"),
    (lambda engine: lambda one: engine.update_weights(engine.params), "score calls the engine that waits"),
    (lambda engine: lambda one: engine.close(), "score calls the engine that waits for it"),
    (lambda engine: fails, "here"),
]  # fmt: skip


def test_a_score_that_is_no_number_is_named_and_the_engine_goes_on(plain, engine):
    for score, message in SCORES:
        with pytest.raises(Own if score(engine) is fails else UserError) as error:
            engine.generate(PROMPTS, 0, keep=2, score=score(engine))
        assert message in str(error.value) and "\n" not in str(error.value)
    assert tokens(engine.generate(PROMPTS, np.int64(1))) == plain[0, 1]
    kinds = np.float32, np.int64, bool, jax.numpy.asarray  # as a reward's
    answers = engine.generate(PROMPTS, 0, keep=4, score=lambda one: kinds[one.prompt](1))
    assert tokens(answers) == plain[0, 0]


def test_new_weights_answer_as_in_a_new_engine(plain, engine):
    """Those of another mesh, of NumPy, and of the engine's own mesh."""
    engine.update_weights(weights(1))
    assert tokens(engine.generate(PROMPTS, 0)) == plain[1, 0] != plain[0, 0]
    engine.update_weights(jax.tree.map(np.asarray, weights(0)))
    assert tokens(engine.generate(PROMPTS, 0)) == plain[0, 0]
    engine.update_weights(engine.params)
    assert tokens(engine.generate(PROMPTS, 0)) == plain[0, 0]


def test_a_drafter_learns_from_the_answers_and_more_of_its_drafts_are_accepted(
    plain, engine, tmp_path
):
    before = engine.generate(PROMPTS, 0)
    lessons = [engine.learn(before, passes=10)["drafter/acceptance@1"] for _ in range(4)]
    after = engine.generate(PROMPTS, 0)
    assert lessons[-1] > lessons[0] + 0.05, lessons
    assert tokens(after) == tokens(before) == plain[0, 0]
    assert after.accept_length > before.accept_length + 0.1
    engine.save_drafter(tmp_path / "drafter")
    knobs = {"speculation__drafter": tmp_path / "drafter", "speculation__strategies": ["2_1_3"]}
    with opened(**knobs) as other:
        again = other.generate(PROMPTS, 0)
        assert tokens(again) == plain[0, 0]
        assert again.accept_length == pytest.approx(after.accept_length)


def test_a_drafter_is_used_once_that_pays(plain, monkeypatch):
    gain = iter([0.0, 5.0])
    monkeypatch.setattr(learned_drafter, "payback", lambda *_: (next(gain), 1.0))
    with opened(speculation__tuner="goodput") as engine:
        answers = engine.generate(PROMPTS, 0)
        for is_used in (False, True):
            engine.learn(answers)
            assert (engine.engine.drafter is not None) == is_used
            assert tokens(engine.generate(PROMPTS, 0)) == plain[0, 0]
            assert ("learned" in engine.tuner["estimates"]) == is_used, "the tuner is told"


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The directory of a model, and what a loop gets from the engine on it in this process."""
    model = tmp_path_factory.mktemp("model") / "model"
    hf.save(weights(0), MODEL, model, meshes.make_mesh(1, 1), None, "float32")
    with tlt_jax.open_engine(model, KNOBS | LEARNED | {"mesh.data": 2}) as engine:
        return model, use(engine)


@pytest.mark.parametrize(
    "joins", [pytest.param("itself", marks=pytest.mark.matrix), "by open_engine"]
)
def test_several_processes_get_all_answers_and_those_of_one(alone, joins):
    model, expected = alone
    devices = {"mesh.data": 2, "mesh.fake_devices": 0 if joins == "itself" else 2}
    script, shared = Path(__file__).with_name("library_process.py"), f"localhost:{free_port()}"
    words = [sys.executable, script, model, json.dumps(KNOBS | LEARNED | devices), joins]
    # An earlier test of this worker may have changed the number of fake devices.
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if not flag.startswith(COUNT)]
    flags = " ".join([*flags, f"{COUNT}=1"])
    inherited = os.environ | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": flags}
    started = [
        subprocess.Popen(
            words,
            env=inherited | address(shared, 2, index),
            text=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )  # fmt: skip
        for index in range(2)
    ]
    try:
        said = [one.communicate(timeout=PATIENCE_S)[0] for one in started]
    finally:
        for one in started:
            one.kill()
    found = [json.loads(line) for one in said for line in one.splitlines() if line.startswith("{")]
    assert len(found) == 2, said
    assert expected["refused"] == "score, of an answer to prompt 1, gave NoneType, not a number"
    for one in found:
        assert one["refused"].endswith(expected["refused"]), "in both processes"
        assert one["answers"] == expected["answers"]
        np.testing.assert_allclose(
            np.concatenate(one["logprobs"]), np.concatenate(expected["logprobs"]), atol=1e-5
        )
        assert one["update"] == pytest.approx(expected["update"], rel=1e-4)
        assert one["acceptance"] == pytest.approx(expected["acceptance"], abs=1e-4)


MISTAKES = [
    (lambda engine: engine.generate("1 2"), "prompts are a str: give a list of texts"),
    (lambda engine: engine.generate(["1 2"]), "prompt 0: the model directory has no tokenizer"),
    (lambda engine: engine.generate([[1.5]]), "prompt 0: [1.5] are no token ids"),
    (lambda engine: engine.generate([[1], [2, 2**40]]), "prompt 1: [1099511627776] are no token ids"),
    (lambda engine: engine.generate([[None, 1]]), "prompt 0: [None] are no token ids"),
    (lambda engine: engine.generate(np.ones((1, 2, 2), int)), "are no token ids"),
    (lambda engine: engine.generate([[99]]), "prompt token 99 is outside the vocabulary of 37"),
    (lambda engine: engine.generate(PROMPTS, -1), "call -1: give a whole number from 0 to 4294967295"),
    (lambda engine: engine.generate(PROMPTS, True), "call True: give a whole number"),
    (lambda engine: engine.generate(PROMPTS, keep=2.0, score=len), "keep 2.0: give a whole number from 1 to 4"),
    (lambda engine: engine.generate(PROMPTS, keep=2, score=1), "score is a int: give a function"),
    (lambda engine: engine.generate(PROMPTS, keep=2), "keep without score: give both"),
    (lambda engine: engine.generate(PROMPTS, score=len), "score without keep: give both"),
    (lambda engine: engine.learn(engine.generate(PROMPTS, samples=1), "2"), "passes '2': give a whole number"),
    (lambda engine: engine.generate(PROMPTS, stop=["x"]), "generate has no option 'stop'"),
    (lambda engine: engine.generate(PROMPTS, temperature=-1), "rollout.temperature -1.0 is too small"),
    (lambda engine: engine.learn([]), "there are no answers to learn from"),
    (lambda engine: engine.update_weights({}), "the weights are a dict that does not fit the model"),
    (lambda engine: engine.update_weights(cut(engine.params)), "weight .embed has shape (32, 16), and the model"),
    (lambda engine: engine.update_weights(donated(weights(2))), "the weights were donated to another program"),
    (lambda engine: (donated(engine.params), engine.learn(engine.generate(PROMPTS))), "were donated to another"),
    (lambda engine: (engine.close(), engine.generate(PROMPTS)), "this engine is closed"),
]  # fmt: skip


def cut(params):
    return params.replace(embed=params.embed[:32])


def donated(params):
    jax.tree.map(lambda leaf: leaf.delete(), params)
    return params


def test_calls_are_counted_and_a_mistake_is_one_line(plain):
    with opened() as engine:
        assert [tokens(engine.generate(PROMPTS)) for _ in range(2)] == [plain[0, 0], plain[0, 1]]
        for mistake, message in MISTAKES:
            with pytest.raises((ConfigError, DataError)) as error:
                mistake(engine)
            assert message in str(error.value) and "\n" not in str(error.value)
    with opened(speculation__drafter="none", speculation__strategies=["3_1_4"]) as engine:
        with pytest.raises(ConfigError, match="speculation.drafter 'none' is not trained"):
            engine.learn(engine.generate(PROMPTS))
    for model, changes, message in (
        (3, {}, "the model is a int: give a directory"),
        ((3, weights(0)), {}, "the model is a int: give (ModelConfig, Params)"),
        ("/nowhere", {}, "'/nowhere' is neither a directory nor a hub id"),
        ((MODEL, weights(0)), {"mesh.data": 16}, "mesh 16 x 1 needs 16 devices"),
        ((MODEL, weights(0)), {"rollout.temprature": 1}, "did you mean rollout.temperature"),
    ):
        with pytest.raises(ValueError) as error:
            tlt_jax.open_engine(model, changes)
        assert message in str(error.value)
