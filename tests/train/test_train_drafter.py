"""Laws of the drafter's training: it learns a deterministic policy, resume is exact, and wrong texts are named."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from training_runs import SIZES, assert_equal, built, events, having, preempt, raise_at, saved_steps

from tlt_jax import cli
from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, load as configuration
from tlt_jax.data import dataset as datasets, packing, prompt_format, tasks
from tlt_jax.data.packing import Example
from tlt_jax.data.prompt_format import Encoder
from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter import corpus, recipe as drafter_recipe, update as drafter_update
from tlt_jax.errors import ConfigError, DataError, ModelError
from tlt_jax.keys import DRAFTER_STREAM, EVAL_STREAM, GENERATE_STREAM, TRAIN_STREAM
from tlt_jax.models import (
    architecture,
    drafter as drafters,
    from_config,
    hf,
    hf_config,
    hf_drafter,
)
from tlt_jax.train import drafter

STEPS = 4
TASK = {"min_length": 3, "max_length": 4, "modulus": 9}
KNOBS = {
    "data.task_args": TASK,
    "data.eval_size": 2,
    "data.max_prompt_tokens": 8,
    "rollout.prompts": 16,
    "rollout.samples": 2,
    "rollout.max_new_tokens": 24,
    "speculation.drafter": "none",
    "rollout.temperature": 0.0,
    "rollout.slots": 32,
    "train.row_tokens": 64,
    "train.rows": 8,
    "drafter_training.kind": "eagle",
    "drafter_training.rollouts": 2,
    "drafter_training.steps": STEPS,
    "drafter_training.learning_rate": 0.01,
    "checkpoint.every": 1,
    "checkpoint.keep": 9,
}


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A folder for all tests, with a policy whose next token depends on all earlier ones and is nearly certain."""
    root = tmp_path_factory.mktemp("drafter")
    tokenizer = tasks.make("fold", TASK).tokenizer()
    model = architecture.ModelConfig(
        family="qwen2", vocab_size=len(tokenizer), hidden_size=32, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
        mlp_dim=48, max_positions=64, qkv_bias=True, init_std=0.2, eos_ids=(tokenizer.eos_token_id,),
    )  # fmt: skip
    mesh = meshes.make_mesh(1, 1)
    params = architecture.init(model, mesh, jax.random.key(0), "float32")
    hf.save(
        params.replace(head=20 * params.head), model, root / "policy", mesh, tokenizer, "float32"
    )
    return root


@pytest.fixture(scope="module")
def configure(shared):
    """configure(run folder, {knob: value}) -> the toy configuration."""

    return lambda run, knobs=None: built(
        KNOBS | {"run": run, "model.path": shared / "policy"} | (knobs or {})
    )


@pytest.fixture(scope="module")
def whole(shared, configure):
    """A finished training on answers of the policy, every step saved. Tests copy it, none writes to it."""
    config = configure(shared / "whole")
    assert drafter.train(config) == cli.DONE
    return config


def inside(config: Config) -> Config:
    """The configuration whose run is the drafter's folder."""
    return replace(config, run=str(Path(config.run) / "drafter"))


def state_of(config: Config, step: int = STEPS) -> drafter_recipe.DrafterState:
    """The state that was saved after a step."""
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
    sizes = from_config.new_drafter_config(config, model)
    recipe = drafter_recipe.recipe_of(config, model, sizes, mesh)
    with Store(inside(config).run, create=False) as store:
        return store.restore(step, {"drafter": drafter_recipe.abstract_state(recipe)}).items[
            "drafter"
        ]


def loaded(config: Config):
    """The sizes and weights of the exported drafter."""
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    directory = Path(inside(config).run) / "hf"
    return hf_drafter.load(directory, model, meshes.make_mesh(1, 1), "float32", positions=32)


def weights_of(config: Config) -> bytes:
    """The file of the exported drafter."""
    return (Path(inside(config).run) / "hf" / "model.safetensors").read_bytes()


def texts_of(config: Config) -> dict[str, str]:
    return {
        path.name: path.read_text()
        for path in sorted((Path(config.run) / "drafter" / "answers").iterdir())
    }


def text_file(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


# Training


@pytest.mark.parametrize(
    ("kind", "least", "depths"),
    [("eagle3", 0.96, 2), ("dspark", 0.85, 4), pytest.param("dflash2", 0.85, 3, marks=pytest.mark.matrix)],
)  # fmt: skip
def test_a_drafter_of_a_deterministic_policy_is_nearly_always_right(
    kind, least, depths, whole, configure, tmp_path, capsys, monkeypatch
):
    unroll = {} if drafters.KINDS[kind].is_block else {"drafter_training.unroll": 2}
    if not unroll:
        new = from_config.new_drafter_config
        monkeypatch.setattr(
            from_config, "new_drafter_config", lambda *given: replace(new(*given), block_size=4)
        )
    knobs = {"drafter_training.kind": kind, "drafter_training.steps": 150, "checkpoint.every": 0}
    knobs["drafter_training.texts"] = Path(whole.run) / "drafter" / "answers"
    config = configure(tmp_path, knobs | unroll)
    assert drafter.train(config) == cli.DONE
    written = {name: values[-1] for name, values in events(inside(config)).items()}
    for name in ("agreement@1", "agreement@2", "acceptance@1", "acceptance@2"):
        assert written[f"drafter/{name}"][0] == 150
        assert written[f"drafter/{name}"][1] > least, name
    directory = tmp_path / "drafter" / "hf"
    described, params = loaded(config)
    assert described.kind == kind
    np.testing.assert_allclose(
        hf_drafter.read_acceptance(directory),
        [written[f"drafter/acceptance@{depth + 1}"][1] for depth in range(depths)],
        rtol=1e-6,
    )
    trained = state_of(config, 150).params
    for name in ("layer", "layers"):
        assert_equal(getattr(params, name, None), getattr(trained, name, None))
    shown = capsys.readouterr().out
    assert f"step 150/150  loss {written['drafter/loss'][1]:.3f}  agreement" in shown
    assert drafter.train(config) == cli.DONE
    assert f"{directory} is finished: it has all 150 steps" in capsys.readouterr().out


def test_what_has_more_steps_than_requested_is_finished(whole, tmp_path, capsys):
    shutil.copytree(whole.run, tmp_path / "run")
    config = having(
        whole, run=str(tmp_path / "run"), drafter_training__steps=STEPS - 1, override=True
    )
    assert drafter.train(config) == cli.DONE
    assert f"is finished: it has all {STEPS} steps" in capsys.readouterr().out
    made_from = tmp_path / "run" / "drafter" / "hf" / "made_from.json"
    made_from.write_text('{"command": "tlt_jax.train", "step": 4}')
    assert drafter.train(config) == cli.DONE, "a drafter that a run trained does not count"
    assert json.loads(made_from.read_text())["command"] == "tlt_jax.train.drafter"


@pytest.mark.parametrize("where", ["answers", "training"])
def test_sigterm_saves_and_the_training_resumes_to_the_same_bits(
    whole, tmp_path, monkeypatch, where
):
    config = having(whole, run=str(tmp_path), checkpoint__every=0)
    target, name = {"answers": (corpus, "write"), "training": (drafter_update, "on_mesh")}[where]
    with monkeypatch.context() as patch:
        raise_at(patch, target, name, 2, preempt)
        assert drafter.train(config) == cli.PREEMPTED
    if where == "training":
        assert saved_steps(inside(config)) == [2]
        monkeypatch.setattr(corpus, "Engine", None)  # nothing is answered anew
    assert drafter.train(config) == cli.DONE
    assert texts_of(config) == texts_of(whole)
    assert_equal(state_of(config), state_of(whole))
    for name in ("drafter/loss", "drafter/acceptance@1"):
        assert events(inside(config))[name] == events(inside(whole))[name]


def test_answers_are_the_policys_own_in_a_stream_that_rl_never_sees(whole, tmp_path, monkeypatch):
    files = texts_of(whole)
    assert list(files) == ["000000.jsonl", "000001.jsonl"]
    rows = [json.loads(line) for text in files.values() for line in text.splitlines()]
    assert len(rows) == 2 * 16 * 2
    prompts = [
        prompt.tokens.tolist()
        for step in (0, 1)
        for prompt in datasets.load(whole, prompt_format.tokenizer_of(whole)).prompts(step)
    ]
    assert [row["prompt"] for row in rows[::2]] == prompts
    assert DRAFTER_STREAM not in (TRAIN_STREAM, EVAL_STREAM, GENERATE_STREAM)
    requests = []

    class Recorder:
        def __init__(self, *_):
            self.publish = lambda params: None

        def request(self, prompts, *_, stream, step):
            requests.append((stream, step, len(prompts)))

        def run(self, request, weights, *, interrupted):
            return SimpleNamespace(completions=[], stats={"tokens_per_second": 1.0}), None

    monkeypatch.setattr(corpus, "Engine", Recorder)
    tokenizer = prompt_format.tokenizer_of(whole)
    dataset = datasets.load(whole, tokenizer)
    corpus.answer(
        replace(whole, run=str(tmp_path)), None, None, None, dataset, tokenizer, lambda: False
    )
    assert requests == [(DRAFTER_STREAM, step, 16) for step in (0, 1)]


def test_a_drafter_can_be_trained_on_and_given_texts_without_any_answers(
    whole, configure, tmp_path, monkeypatch
):
    first = Path(whole.run) / "drafter" / "hf"
    monkeypatch.setattr(corpus, "Engine", None)
    knobs = {
        "drafter_training.texts": Path(whole.run) / "drafter" / "answers",
        "drafter_training.start": first,
        "drafter_training.learning_rate": 0.0,
    }
    config = configure(tmp_path / "run", knobs)
    assert drafter.train(config) == cli.DONE
    assert weights_of(config) == weights_of(whole)
    own = drafters.for_policy(hf_config.read_config(Path(whole.model.path)), "dspark")
    raw = hf_drafter.to_raw(own, np.dtype("float32"))
    (tmp_path / "block").mkdir()
    (tmp_path / "block" / "config.json").write_text(json.dumps(raw))
    start, block = {"drafter_training.start": tmp_path / "block"}, {"drafter_training.start": ""}
    for wrong, message in (
        ({"drafter_training.vocab": 9}, "has its own"),
        (block | {"drafter_training.vocab": 9}, "every token"),
        (start | {"drafter_training.unroll": 2}, "unroll 2: a dspark drafter drafts all positions"),
        (block | {"drafter_training.kind": "dflash", "drafter_training.unroll": 2}, "unroll 2: a dfl"),
    ):  # fmt: skip
        with pytest.raises(ConfigError, match=message):
            drafter.train(configure(tmp_path / "wrong", knobs | wrong))
    playing = {"environment.path": "toy_environments:Echo", "drafter_training.texts": ""}
    with pytest.raises(ConfigError, match="one turn alone: set environment.path ''"):
        drafter.train(configure(tmp_path / "playing", knobs | playing))
    narrow = {"model.path": "", "model.tokenizer": whole.model.path, "model.init": SIZES}
    with pytest.raises(ModelError, match="hidden_size 32 is not the policy's 16"):
        drafter.train(configure(tmp_path / "narrow", knobs | narrow))


def test_token_ids_need_no_tokenizer_and_nothing_is_scored(whole, configure, tmp_path):
    texts = {"drafter_training.texts": Path(whole.run) / "drafter" / "answers"}
    with_tokenizer = configure(tmp_path / "with", texts)
    policy = tmp_path / "policy"
    policy.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(Path(whole.model.path) / name, policy)
    knobs = texts | {"model.path": policy, "reward.terms": {}, "data.train": "missing.jsonl"}
    without = configure(tmp_path / "without", knobs)
    for config in (with_tokenizer, without):
        assert drafter.train(config) == cli.DONE
    assert weights_of(with_tokenizer) == weights_of(without)
    rows = [{"prompt": [5, 6], "response": [7, 1]}, {"prompt": [5], "response": "3"}]
    knobs |= {"drafter_training.texts": text_file(tmp_path / "rows.jsonl", rows)}
    with pytest.raises(DataError, match=":2: column 'response' is text, and the policy has no tok"):
        drafter.train(configure(tmp_path / "text", knobs))


def test_a_reduced_vocabulary_holds_the_most_frequent_tokens(configure, whole, tmp_path):
    answers = Path(whole.run) / "drafter" / "answers"
    knobs = {"texts": answers, "kind": "eagle3", "vocab": 5, "unroll": 1}
    knobs = {f"drafter_training.{name}": value for name, value in knobs.items()}
    config = configure(tmp_path, knobs)
    assert drafter.train(config) == cli.DONE
    _, params = loaded(config)
    rows = [json.loads(line) for text in texts_of(whole).values() for line in text.splitlines()]
    responses = np.concatenate([row["response"] for row in rows])
    counts = np.bincount(responses, minlength=len(prompt_format.tokenizer_of(config)))
    assert sorted(counts[np.asarray(params.ids)]) == sorted(counts)[-5:]
    answers = [np.array([3, 3, 1, 2]), np.array([2, 5])]
    np.testing.assert_array_equal(drafters.frequent_ids(answers, 3, 9), [1, 2, 3])  # 1 before 5


def test_a_training_that_is_not_finite_stops(whole, tmp_path, configure, capsys, monkeypatch):
    monkeypatch.setattr(drafter, "LOG_EVERY", 2)
    monkeypatch.setattr(drafter, "MAX_NONFINITE", 1)
    knobs = {
        "drafter_training.texts": Path(whole.run) / "drafter" / "answers",
        "drafter_training.learning_rate": 1e30,
    }
    assert drafter.train(configure(tmp_path, knobs)) == cli.DIVERGED
    assert (
        "updates in a row were not finite: lower drafter_training.learning_rate"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "drafter" / "hf").exists()


def test_the_command_trains_and_prints_where_the_drafter_is_and_what_does_not_load_it(
    whole, tmp_path, monkeypatch, capsys
):
    config = replace(whole, run=str(tmp_path / "run"))
    (tmp_path / "config.yaml").write_text(configuration.to_yaml(config))
    shutil.copytree(
        Path(whole.run) / "drafter" / "answers", tmp_path / "run" / "drafter" / "answers"
    )
    monkeypatch.setattr("tlt_jax.cli.set_environment", lambda config: None)
    monkeypatch.setattr(sys, "argv", ["drafter", "--config", str(tmp_path / "config.yaml")])
    assert drafter.main() == 0
    *_, caveat, where = capsys.readouterr().out.splitlines()
    directory = tmp_path / "run/drafter/hf"
    assert caveat.startswith(f"{directory}: vLLM has no EAGLE class for Qwen2")
    assert where == f"{directory}: the drafter after {STEPS} steps"


# Texts


def test_answers_whose_logits_were_not_finite_are_no_texts(tmp_path):
    prompts = [SimpleNamespace(tokens=np.array([5, 6]))]
    answers = [
        SimpleNamespace(prompt=0, tokens=np.array([one]), finish=finish)
        for one, finish in enumerate(("stop", "nonfinite", "length"))
    ]
    corpus.write(tmp_path / "one.jsonl", prompts, answers)
    found = [json.loads(line) for line in (tmp_path / "one.jsonl").read_text().splitlines()]
    assert [one["response"] for one in found] == [[0], [2]]


def encoder_of(configure, tmp_path: Path) -> Encoder:
    config = configure(tmp_path)
    return Encoder(config, prompt_format.tokenizer_of(config))


def test_texts_and_token_ids_are_read_in_their_order(configure, tmp_path):
    encoder = encoder_of(configure, tmp_path)
    rows = [
        {"prompt": "12=", "response": "3"}, {"prompt": [5, 6], "response": [7, 1]}, {"prompt": "21=", "response": [4]},
    ]  # fmt: skip
    found = corpus.read(str(text_file(tmp_path / "rows.jsonl", rows)), encoder, 15)
    tokenizer = encoder.tokenizer
    expected = [
        (tokenizer.encode("12="), [*tokenizer.encode("3"), tokenizer.eos_token_id]),
        ([5, 6], [7, 1]), (tokenizer.encode("21="), [4]),
    ]  # fmt: skip
    assert [(one.prompt.tolist(), one.answer.tolist()) for one in found] == expected
    assert [one.uid for one in found] == [0, 1, 2]


def test_everything_that_is_wrong_with_texts_is_named_at_once(configure, tmp_path):
    rows = [
        {"prompt": [1]}, {"prompt": "", "response": "3"}, {"prompt": [1], "response": [15]},
        {"prompt": [1], "response": {"text": "3"}}, {"prompt": [1, -2], "response": "3"},
        {"prompt": "3", "response": "\ud800"},
    ]  # fmt: skip
    with pytest.raises(DataError) as refused:
        corpus.read(
            str(text_file(tmp_path / "rows.jsonl", rows)), encoder_of(configure, tmp_path), 15
        )
    text = str(refused.value)
    for part in (
        "the data has 6 problems", ":1: column 'response' is missing", ":2: column 'prompt' is empty",
        ":3: column 'response' has token 15, the policy has 15", ":4: column 'response' holds a dict",
        ":5: column 'prompt' has token -2",
        ":6: column 'response' has a lone surrogate (\\ud800 at character 1): use text",
    ):  # fmt: skip
        assert part in text, text


def test_long_texts_are_cut_to_rows_and_prompts_that_fill_one_are_dropped():
    lengths = [(3, 4), (3, 9), (8, 2), (7, 5)]
    examples = [Example(uid, np.arange(p), np.arange(a)) for uid, (p, a) in enumerate(lengths)]
    kept = corpus.fit(examples, 8)
    assert [(one.uid, len(one.prompt), len(one.answer)) for one in kept] == [
        (0, 3, 4),
        (1, 3, 5),
        (3, 7, 1),
    ]
    with pytest.raises(DataError, match="none of the 1 texts fits rows of 8"):
        corpus.fit(examples[2:3], 8)


def test_every_pass_deals_every_row_once_in_another_order(configure, tmp_path):
    random = np.random.default_rng(0)
    examples = [
        Example(uid, random.integers(0, 9, 3), np.full(random.integers(20, 40), uid, np.int32))
        for uid in range(23)
    ]
    config = configure(tmp_path, {"train.rows": 2})
    rows = corpus.PackedCorpus(examples, config)
    count = len(rows.rows.tokens)
    dealt = np.concatenate([rows.batch(step).tokens for step in range(count)])  # two passes
    for part in (dealt[:count], dealt[count:]):
        assert sorted(map(tuple, part)) == sorted(map(tuple, rows.rows.tokens))
    assert (dealt[:count] != dealt[count:]).any()
    again = corpus.PackedCorpus(examples, config)
    np.testing.assert_array_equal(again.batch(3).segments, rows.batch(3).segments)
    assert rows.rows.is_answer.sum() == sum(len(one.answer) for one in examples)
    batch = rows.batch(0)
    assert batch.tokens.shape == (2, packing.row_tokens(config))
    for row, place in zip(*np.nonzero(batch.is_answer), strict=True):
        assert batch.segments[row, place] == batch.segments[row, place + 1] > 0
