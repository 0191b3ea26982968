"""`python -m tlt_jax.generate`: its output, with and without a tokenizer, in a chat, and one line for each mistake."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest

import tlt_jax
from tlt_jax import generate
from tlt_jax.config import Config, load, parse as parsing
from tlt_jax.data import prompt_format, tasks
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import ConfigError, DataError
from tlt_jax.inference import chat
from tlt_jax.models import architecture, drafter as drafters, hf, hf_config, hf_drafter
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.rollout.engine import Engine
from tlt_jax.spec_decode.interface import Sampling

# A chat template in the letters of the generated task: a turn of the user ends with ":", one of the policy with ",".
TEMPLATE = (
    "{% for message in messages %}{{ 'S' if message['role'] == 'system' else '' }}{{ message['content'] }}"
    "{{ ':' if message['role'] == 'user' else ',' }}{% endfor %}{{ 'A' if add_generation_prompt else '' }}"
    "{{ 'B' if shout else '' }}"
)
SMOLLM2 = "TLT_JAX_SMOLLM2"  # the directory of SmolLM2-135M-Instruct, for a test that runs by hand


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Two directories of one random model: with the generated task's tokenizer, and without any."""
    tokenizer = tasks.make("fold", {}).tokenizer()
    eos_ids = (tokenizer.eos_token_id,)
    config = ModelConfig(
        "qwen2",
        len(tokenizer),
        16,
        2,
        4,
        2,
        4,
        32,
        64,
        qkv_bias=True,
        tied=True,
        init_std=0.4,
        eos_ids=eos_ids,
    )
    mesh = meshes.make_mesh(1, 1)
    params = architecture.init(config, mesh, jax.random.key(0), "float32")
    folder = tmp_path_factory.mktemp("models")
    hf.save(params, config, folder / "text", mesh, tokenizer, "float32")
    hf.save(params, config, folder / "ids", mesh, None, "float32")
    tokenizer.chat_template = TEMPLATE
    hf.save(params, config, folder / "chat", mesh, tokenizer, "float32")
    knobs = {
        "data.chat_template": True,
        "data.system": "1",
        "data.prompt_suffix": " 2",
        "data.chat_template_kwargs.shout": True,
    }
    knobs |= {"rollout.temperature": 0.0, "rollout.max_new_tokens": 5, "rollout.stop": ["3"]}
    files = prompt_format.files(parsing.build(Config, {}, load.pairs(knobs)))
    hf.save(params, config, folder / "made", mesh, tokenizer, "float32", files=files)
    return folder


def run(capsys, *words: object) -> dict:
    assert generate.main([*map(str, words), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_text_and_ids_of_a_prompt_give_the_same_answers(models, capsys, tmp_path):
    tokenizer = tasks.make("fold", {}).tokenizer()
    ids = tokenizer.encode("12 3")
    common = ("--max-new-tokens", 8, "--seed", 3, "--num-samples", 2, "--top-k", 5)
    text = run(capsys, "--model", models / "text", "--prompt", "12 3", *common)
    bare = run(capsys, "--model", models / "ids", "--prompt-ids", ",".join(map(str, ids)), *common)
    (tmp_path / "p.jsonl").write_text(f'{{"prompt": "12 3"}}\n{{"prompt_ids": {ids}}}\n')
    both = run(capsys, "--model", models / "text", "--prompts", tmp_path / "p.jsonl", *common)
    for one, other in zip(text["completions"], bare["completions"], strict=True):
        assert one["token_ids"] == other["token_ids"] and one["logprobs"] == other["logprobs"]
        assert other["text"] is None and one["text"] == tokenizer.decode(
            one["token_ids"], skip_special_tokens=True
        )
        assert len(one["logprobs"]) == len(one["token_ids"]) <= 8 and max(one["logprobs"]) <= 0
        assert one["finish_reason"] in ("stop", "length")
    assert [(one["prompt_index"], one["sample"]) for one in both["completions"]] == [
        (0, 0),
        (0, 1),
        (1, 0),
        (1, 1),
    ]
    assert [one["token_ids"] for one in both["completions"][:2]] == [
        one["token_ids"] for one in text["completions"]
    ]
    assert text["tokens_per_second"] > 0 and text["tokens"] == sum(
        len(one["token_ids"]) for one in text["completions"]
    )


def test_the_speed_leaves_out_what_was_waited_for_and_nothing_else(models, capsys, monkeypatch):
    """A day of background compilation changes nothing."""
    run_of = Engine.run

    def with_waits(self, *args, **knobs):
        result, tuner = run_of(self, *args, **knobs)
        result = replace(result, compile_waits={0: [(0.0, 1.5), (3.0, 4.0)]})
        result.stats.update(seconds=10.0, compile_seconds=86_400.0)
        return result, tuner

    monkeypatch.setattr(Engine, "run", with_waits)
    found = run(capsys, "--model", models / "ids", "--prompt-ids", "1,2", "--max-new-tokens", 4)
    assert found["tokens_per_second"] == pytest.approx(found["tokens"] / 7.5)
    assert (found["seconds"], found["compile_seconds"]) == (7.5, 2.5)


def test_plain_output_shows_text_ids_logprobs_and_speed(models, capsys):
    words = ["--model", str(models / "text"), "--prompt", "1 2", "--max-new-tokens", "4"]
    assert generate.main(words) == 0
    out = capsys.readouterr().out
    for part in ("prompt 0 sample 0", "token ids:", "log-probs:", "tokens/s"):
        assert part in out


@pytest.mark.parametrize("words, message", [
    (("--prompt", "1 2"), "no tokenizer"),
    (("--prompt-ids", "1,x"), "are no token ids"),
    (("--prompt-ids", "1,999", "--max-new-tokens", "4"), "token 999 is outside the vocabulary"),
    (("--prompt-ids", "1", "--max-new-tokens", "64"), "use at most 63 new tokens"),
    (("--prompt-ids", "1", "--top-p", "2"), "top_p 2.0 is too large"),
    (("--prompt-ids", "1", "--temperature", "hot"), "temperature"),
    (("--prompts", "nowhere.jsonl"), "no such file"),
    (("--prompt-ids", "1", "--prompt", "1"), "not allowed with"),
    (("--prompt-ids", "1", "--drafter", "adaptive"), "is trained during an RL run"),
    (("--prompt-ids", "1", "--strategy", "2_1"), "strategy '2_1' is not depth_topk_nodes"),
    (("--prompt-ids", "1", "--strategy", "2_1_3"), "give --drafter ngram"),
    (("--chat", "--json"), "one answer a turn"),
    (("--chat", "--num-samples", "2"), "one answer a turn"),
    ((), "one of the arguments"),
])  # fmt: skip
def test_mistakes_are_one_line(models, capsys, words, message):
    with pytest.raises(SystemExit) as stopped:
        generate.main(["--model", str(models / "ids"), *words])
    error = capsys.readouterr().err
    assert stopped.value.code == 2 and error.count("\n") == 1 and message in error


def test_bad_lines_of_a_prompt_file_are_named(models, capsys, tmp_path):
    (tmp_path / "p.jsonl").write_text('{"prompt_ids": [1]}\n{"question": "1"}\n')
    with pytest.raises(SystemExit):
        generate.main(["--model", str(models / "ids"), "--prompts", str(tmp_path / "p.jsonl")])
    assert "p.jsonl:2: no prompt" in capsys.readouterr().err


@pytest.mark.parity
def test_greedy_equals_transformers(models, capsys):
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(models / "ids", dtype=torch.float64)
    prompts = [[3, 1, 4], [1], [5, 9, 2, 6, 5, 3, 5, 8, 9]]
    for prompt in prompts:
        ours = run(
            capsys, "--model", models / "ids", "--prompt-ids", ",".join(map(str, prompt)), "--temperature", 0,
            "--max-new-tokens", 30,
        )["completions"][0]  # fmt: skip
        inputs = torch.tensor([prompt])
        theirs = model.generate(
            inputs, attention_mask=torch.ones_like(inputs), do_sample=False, max_new_tokens=30
        )
        np.testing.assert_array_equal(ours["token_ids"], theirs[0, len(prompt) :])


def texts_of(*words: object) -> list[str]:
    """What the model reads."""
    arguments = generate.parser().parse_args([*map(str, words)])
    config, _ = chat.as_meant(arguments.model, generate.pairs_of(arguments), arguments.raw)
    return [one.text for one in generate.read_prompts(arguments, config)]


def test_a_chat_model_is_asked_with_its_template_only_when_told_so(models):
    asked = ("--model", models / "chat", "--prompt", "4 5")
    assert texts_of(*asked) == ["4 5"]
    assert texts_of(*asked, "--chat") == ["4 5:A"]
    assert texts_of(*asked, "--chat", "--system", "7") == ["S7,4 5:A"]


def test_messages_always_have_the_template(models, tmp_path):
    turns = [("user", "4"), ("assistant", "5"), ("user", "6")]
    messages = [{"role": role, "content": content} for role, content in turns]
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": messages}) + "\n")
    asked = ("--model", models / "chat", "--prompts", tmp_path / "p.jsonl")
    assert texts_of(*asked) == ["4:5,6:A"]
    model = tlt_jax.open_model(models / "chat", {"rollout.slots": 1})
    (answer,) = model.generate([messages], max_new_tokens=2)
    assert answer["prompt"] == "4:5,6:A"
    with pytest.raises(DataError, match="no chat template for messages"):
        tlt_jax.open_model(models / "text").generate([messages])


def test_the_model_of_a_run_is_asked_as_the_run_asked_it(models, capsys):
    asked = ("--model", models / "made", "--prompt", "4 5")
    assert generate.main([*map(str, asked), "--json"]) == 0
    out, err = capsys.readouterr()
    (answer,) = json.loads(out)["completions"]
    assert answer["prompt"] == "S1,4 5 2:AB" and len(answer["token_ids"]) <= 5
    assert err == (
        "prompts: chat template, shout True, system '1', suffix ' 2', stop ['3'], temperature 0\n"
    )
    assert texts_of(*asked, "--system", "8") == ["S8,4 5 2:AB"]
    assert texts_of(*asked, "--raw") == ["4 5"]
    with pytest.raises(ConfigError, match="data.system needs the chat template: add --chat"):
        texts_of(*asked, "--raw", "--system", "8")


def test_the_stop_strings_of_the_run_end_an_answer(models):
    plain = tlt_jax.open_model(models / "made", {"rollout.stop": [], "rollout.max_new_tokens": 24})
    (free,) = plain.generate(["4 5"], samples=1, temperature=1.0)
    stop = free["text"].split()[2]
    stopping = tlt_jax.open_model(
        models / "made", {"rollout.stop": [stop], "rollout.max_new_tokens": 24}
    )
    (ended,) = stopping.generate(["4 5"], samples=1, temperature=1.0)
    shorter = len(ended["token_ids"])
    assert ended["token_ids"] == free["token_ids"][:shorter] and shorter < len(free["token_ids"])
    assert ended["finish_reason"] == "stop" and ended["text"].endswith(stop)


def test_changes_of_open_model_come_before_the_format_of_the_run(models):
    changes = {"data.system": "", "data.chat_template_kwargs": {}, "data.prompt_suffix": " 9"}
    model = tlt_jax.open_model(models / "made", changes)
    assert model.rollouts.prompts(["4"])[0].text == "4 9:A"
    with pytest.raises(ConfigError, match="generate has no option 'stop': use samples"):
        model.generate(["4"], stop=["1"])


QWEN = {  # as in Qwen2.5-7B-Instruct
    "do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05, "max_new_tokens": 9,
}  # fmt: skip
MAKERS = [
    (QWEN, {"temperature": 0.7, "top_k": 20, "top_p": 0.8}, "not supported: repetition_penalty 1.05 of generation_config.json"),
    ({"temperature": 0.6, "top_k": None, "top_p": 0.9, "repetition_penalty": 1.0}, {"temperature": 0.6, "top_p": 0.9}, ""),
    ({"do_sample": False, "temperature": 0.6, "top_p": 0.5}, {"temperature": 0.0}, ""),
    ({"min_p": 0.1, "num_beams": 4}, {}, "not supported: min_p 0.1, num_beams 4 of"),
    ({}, {}, ""),
]  # fmt: skip


def with_makers(models: Path, folder: Path, written: object, name: str = "chat") -> Path:
    """A model in whose directory generation_config.json has these settings too."""
    shutil.copytree(models / name, folder / "model")
    path = folder / "model" / "generation_config.json"
    is_object = isinstance(written, dict)
    path.write_text(json.dumps(json.loads(path.read_text()) | written if is_object else written))
    return folder / "model"


@pytest.mark.parametrize("written, sampling, unread", MAKERS)
def test_a_model_of_no_run_samples_as_its_makers_say(models, tmp_path, written, sampling, unread):
    model = with_makers(models, tmp_path, written)
    config, said = chat.as_meant(str(model), [])
    assert Sampling.of(config.rollout) == Sampling(**sampling) and unread in said
    assert config.rollout == replace(Config().rollout, samples=1, **sampling), "nothing else"
    assert bool(said) == bool(sampling or unread)
    assert said.startswith(f"; {', '.join(sampling)} from gen") == bool(sampling)
    (tmp_path / "adapter").mkdir()
    base = {"base_model_name_or_path": str(model)}
    (tmp_path / "adapter" / "adapter_config.json").write_text(json.dumps(base))
    assert chat.as_meant(str(tmp_path / "adapter"), [])[0].rollout == config.rollout


def test_options_come_before_the_settings_of_the_makers(models, capsys, tmp_path):
    model = with_makers(models, tmp_path, QWEN)
    for words, said in (
        ([], "temperature 0.7, top-k 20, top-p 0.8; temperature, top_k, top_p from generation_config.json; not"),
        (["--temperature", "0"], "temperature 0, top-k 20, top-p 0.8; top_k, top_p from generation_config.json; not supported"),
        (["--temperature", "0", "--top-k", "3", "--top-p", "1"], "temperature 0, top-k 3; not supported: repetition_"),
        (["--raw"], "prompts: text as it is, temperature 1"),
    ):  # fmt: skip
        arguments = ["--model", str(model), "--prompt", "-", *words]
        pairs = generate.pairs_of(generate.parser().parse_args(arguments))
        config, makers = chat.as_meant(str(model), pairs, "--raw" in words)
        assert said in prompt_format.describe(config) + makers
    opened = tlt_jax.open_model(model, {"rollout.top_k": 3})
    assert "temperature 0.7, top-k 3, top-p 0.8; temperature, top_p from" in capsys.readouterr().err
    assert Sampling.of(opened.config.rollout) == Sampling(0.7, 3, 0.8)


def test_a_model_of_a_run_and_a_training_keep_their_own_sampling(models, tmp_path):
    model = with_makers(models, tmp_path, QWEN, "made")
    config, makers = chat.as_meant(str(model), [])
    assert config.rollout.temperature == 0 and not makers
    with tlt_jax.open_engine(model, {"rollout.prompts": 1}) as engine:
        assert engine.config.rollout == replace(Config().rollout, prompts=1)


@pytest.mark.parametrize("written, message", [
    ({"temperature": "0.7"}, "rollout.temperature '0.7' has the wrong type: write a finite number"),
    ({"temperature": True}, "rollout.temperature True has the wrong type"),
    ({"temperature": float("nan")}, "rollout.temperature nan has the wrong type"),
    ({"temperature": -1}, "rollout.temperature -1.0 is too small"),
    ({"top_p": 1.5}, "rollout.top_p 1.5 is too large: use at most 1"),
    ({"top_k": 2.5}, "rollout.top_k 2.5 has the wrong type: write a whole number"),
    ({"do_sample": "no"}, "do_sample 'no' is not true or false"),
    ([1], "generation_config.json cannot be read"),
])  # fmt: skip
def test_settings_of_makers_that_are_none_are_named(models, tmp_path, written, message):
    model = with_makers(models, tmp_path, written)
    with pytest.raises(DataError) as error:
        chat.as_meant(str(model), [])
    text = str(error.value)
    assert f"{model}/generation_config.json cannot be read" in text and message in text
    assert "ignore it with --raw" in text and "\n" not in text
    assert chat.as_meant(str(model), [], is_raw=True)[0].rollout.temperature == 1


@pytest.mark.parametrize("text, message", [
    ("[1", "prompt_format.json cannot be read"),
    ('{"data.chat_template": "maybe"}', "data.chat_template 'maybe' has the wrong type"),
    ('{"data.train": "x"}', "data.train is not one of data.chat_template"),
])  # fmt: skip
def test_a_damaged_format_is_named(models, tmp_path, text, message):
    shutil.copytree(models / "chat", tmp_path / "model")
    (tmp_path / "model" / prompt_format.NAME).write_text(text)
    with pytest.raises(DataError, match=re.escape(message)):
        chat.as_meant(str(tmp_path / "model"), [])
    chat.as_meant(str(tmp_path / "model"), [], is_raw=True)


def test_the_turns_of_a_chat_are_one_conversation_and_its_text_is_streamed(
    models, capsys, monkeypatch
):
    answers, parts, converse = [], [], chat.converse
    monkeypatch.setattr(chat, "converse", lambda model: answers.extend(converse(model)) or answers)
    monkeypatch.setattr(chat, "write", lambda text: parts.append(text) or print(text, end=""))
    monkeypatch.setattr("sys.stdin", io.StringIO("4 5\n6\n"))
    words = ["--model", str(models / "made"), "--chat", "--max-new-tokens", "12"]
    words += ["--drafter", "ngram", "--strategy", "2_1_3", "--temperature", "1"]
    assert generate.main(words) == 0
    out, err = capsys.readouterr()
    first, second = out.splitlines()
    read = [answer["completions"][0]["prompt"] for answer in answers]
    assert read == ["S1,4 5 2:AB", f"S1,4 5 2:{first},6 2:AB"]
    assert "".join(parts) == first + second and len(parts) > 2, "in parts"
    assert "accept length" in err.splitlines()[-1]


def test_a_chat_needs_a_template(models, capsys):
    with pytest.raises(SystemExit):
        generate.main(["--model", str(models / "text"), "--chat"])
    assert "no chat template for messages" in capsys.readouterr().err


def test_a_conversation_that_fills_the_model_is_refused(models):
    model = tlt_jax.open_model(models / "chat")
    messages = [{"role": "user", "content": "1" * 55}]
    assert len(model.reply(messages)["completions"][0]["token_ids"]) <= 8
    with pytest.raises(
        ConfigError, match="the conversation has 66 tokens, and the model 64 positions"
    ):
        model.reply([{"role": "user", "content": "1" * 65}])


def test_a_block_drafter_of_a_directory_drafts_and_changes_no_token(models, tmp_path, capsys):
    policy, mesh = hf_config.read_config(models / "ids"), meshes.make_mesh(1, 1)
    own = drafters.for_policy(policy, "dspark", block_size=4)
    params = drafters.init(own, mesh, jax.random.key(1), "float32")
    hf_drafter.save(params, own, tmp_path, "float32", [0.5, 0.25])
    asked = ("--model", models / "ids", "--prompt-ids", "1,2,3", "--max-new-tokens", 20)
    plain = run(capsys, *asked)
    drafted = run(capsys, *asked, "--drafter", tmp_path, "--strategy", "3_2_7")
    assert [one["token_ids"] for one in plain["completions"]] == [
        one["token_ids"] for one in drafted["completions"]
    ]
    assert drafted["speculated_rounds"] > 0


def test_a_strategy_is_forced_and_a_reason_is_given_where_nothing_is_drafted(models, capsys):
    asked = ["--model", str(models / "ids"), "--prompt-ids", "1,2,1,2", "--temperature", "0"]
    drafted, plain = (
        [*asked, "--max-new-tokens", str(most), "--drafter", "ngram"] for most in (30, 4)
    )
    assert generate.main([*drafted, "--strategy", "2_1_3"]) == 0
    assert "accept length 1." in capsys.readouterr().out
    assert generate.main(plain) == 0
    out = capsys.readouterr().out
    assert "nothing was drafted: a program that drafts is compiled only if" in out
    assert "--strategy 3_1_4 always drafts" in out and "accept length" not in out
    assert generate.main([*plain, "--strategy", "none"]) == 0
    assert "drafted" not in capsys.readouterr().out


def assert_chats_as_transformers(directory: Path, messages: list[list[dict]], tokens: int) -> None:
    """Greedy answers equal those of apply_chat_template and generate."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(directory)
    theirs = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    ours = tlt_jax.open_model(directory, {"rollout.temperature": 0, "rollout.slots": 1})
    for turns in messages:
        (answer,) = ours.generate([turns], max_new_tokens=tokens)
        read = tokenizer.apply_chat_template(
            turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
        )
        found = theirs.generate(**read, do_sample=False, max_new_tokens=tokens)
        assert answer["token_ids"] == found[0, read["input_ids"].shape[1] :].tolist()


@pytest.mark.parity
def test_a_greedy_chat_equals_transformers(models):
    assert_chats_as_transformers(
        models / "chat",
        [
            [{"role": "user", "content": "4 5 1"}],
            [{"role": "system", "content": "2"}, {"role": "user", "content": "3 1"}],
            [{"role": role, "content": "4 2"} for role in ("user", "assistant", "user")],
        ],
        24,
    )


@pytest.mark.parity
@pytest.mark.skipif(SMOLLM2 not in os.environ, reason=f"{SMOLLM2} names no directory")
def test_a_greedy_chat_with_smollm2_equals_transformers():
    question = {"role": "user", "content": "What is the capital of France?"}
    answer = {"role": "assistant", "content": "Paris."}
    follow_up = {"role": "user", "content": "And how far is it from Berlin?"}
    assert_chats_as_transformers(
        Path(os.environ[SMOLLM2]), [[question], [question, answer, follow_up]], 48
    )
