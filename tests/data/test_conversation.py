"""Conversations of several turns: the tokens kept from turn to turn are those of the chat template's rendering."""

from __future__ import annotations

from dataclasses import replace

import chat_templates
import numpy as np
import pytest
from chat_templates import FAMILIES, TOOLS, tokenizer_of

from tlt_jax.config import Config
from tlt_jax.data.conversation import CACHED, Conversation
from tlt_jax.data.files import ID
from tlt_jax.errors import DataError

WITH_TOOLS = ["qwen2.5", "qwen3", "hermes", "llama3.1", "mistral"]
KEPT = {"qwen3": chat_templates.QWEN3_KEPT}  # templates that keep what the family's drops
LEAD = {"mistral": " "}  # what the template writes before an answer, and not at the end of a prompt
FIRST = [{"role": "user", "content": "What are two and three?"}]
RIGHT = {"role": "user", "content": "Wrong.\nAgain, please! \u00e9\U0001f600"}


def result(text: str, **more: str) -> dict[str, str]:
    return {"role": "tool", "name": "add", "content": text, **more}


def configure(stop: tuple[str, ...] = (), **data) -> Config:
    config = Config()
    return replace(
        config,
        data=replace(config.data, **{"chat_template": True, **data}),
        rollout=replace(config.rollout, stop=list(stop)),
    )


def make(family: str, has_tools: bool = True, stop: tuple[str, ...] = (), **data) -> Conversation:
    tools = TOOLS if has_tools and family in WITH_TOOLS else ()
    return Conversation(configure(stop, **data), tokenizer_of(family), tools)


def ids(conversation: Conversation, text: str) -> list[int]:
    return conversation.tokenizer.encode(text, add_special_tokens=False)


def written(conversation: Conversation, answer: str, messages) -> str:
    """The text of the continuation of an answer."""
    tokens = np.asarray(ids(conversation, answer), np.int32)
    found = conversation.continuation(tokens, messages)
    assert found.dtype == np.int32 and found.ndim == 1
    return conversation.tokenizer.decode(found)


TURNS = {  # answers and what the environment says to them
    "user": [("It is five", [RIGHT]), ("No, it is 6", [RIGHT])],
    "one tool": [("add 2 3", [result("5")]), ("add 5 1", [result('{"sum": 6}\n')])],
    "tools": [("add both", [result("5"), result("6"), result("7")]), ("so", [RIGHT])],
    "system": [("It is five", [{"role": "system", "content": "Think."}, RIGHT])],
    "thoughts": [
        ("<think>\nHm.\n</think>\n\nadd", [result("5")]),
        ("<think>\nI see.\n</think>\n\nFive", [RIGHT]),
    ],
}
KINDS = {
    **dict.fromkeys(FAMILIES, TURNS),
    **dict.fromkeys(["gemma2", "gemma3", "plain"], ["user"]),
    "mistral": ["user", "one tool"],
}
CASES = [(family, kind) for family, kinds in KINDS.items() for kind in kinds]
LAST = "At last: five"


def played(conversation: Conversation, turns, lead: str):
    """The tokens of a conversation as a rollout keeps them, whether each is the policy's, and its messages."""
    end = conversation.end[-1:]
    tokens = [conversation.opening(FIRST, {ID: "r"}).tokens]
    is_policys, messages = [np.zeros(len(tokens[0]), bool)], [*FIRST]
    for answer, replies in [*turns, (LAST, [])]:
        sampled = np.asarray(ids(conversation, lead + answer) + end, np.int32)
        added = conversation.continuation(sampled, replies) if replies else []
        tokens += [sampled, np.asarray(added, np.int32)]
        is_policys += [np.ones(len(sampled), bool), np.zeros(len(added), bool)]
        calls = {"tool_calls": []} if any(one["role"] == "tool" for one in replies) else {}
        messages += [{"role": "assistant", "content": answer, **calls}, *replies]
    return np.concatenate(tokens), np.concatenate(is_policys), messages


def rebuilt(conversation: Conversation, messages, family: str):
    """Both again from the messages alone: by one rendering and the places of its answers."""
    tokenizer, data = conversation.tokenizer, conversation.config.data
    messages = [
        {"tool_call_id": "000000000", **one} if one["role"] == "tool" else one for one in messages
    ]

    def rendered(count: int, asks: bool) -> str:
        return tokenizer.apply_chat_template(
            messages[:count],
            tools=conversation.encoder.tools or None,
            tokenize=False,
            add_generation_prompt=asks,
            chat_template=KEPT.get(family),
            **data.chat_template_kwargs,
        )

    end = tokenizer.decode(conversation.end[-1:])
    spans = []
    for place, message in enumerate(messages):
        if message["role"] == "assistant":
            start = len(rendered(place, True))
            size = len(LEAD.get(family, "") + message["content"] + end)
            spans.append((start, start + size))
    text = rendered(len(messages), False)[: spans[-1][1]]
    found = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    is_policys = [
        any(start <= at and to <= stop for start, stop in spans)
        for at, to in found["offset_mapping"]
    ]
    return np.asarray(found["input_ids"]), np.asarray(is_policys), text


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_the_tokens_of_all_turns_are_those_of_one_rendering(family, kind):
    # Mistral's template moves the tools to the last message of the user.
    conversation = make(family, has_tools=(family, kind) != ("mistral", "user"))
    tokens, is_policys, messages = played(conversation, TURNS[kind], LEAD.get(family, ""))
    expected, expected_policys, text = rebuilt(conversation, messages, family)
    assert conversation.tokenizer.decode(tokens) == text
    np.testing.assert_array_equal(tokens, expected)
    np.testing.assert_array_equal(is_policys, expected_policys)
    assert is_policys.sum() >= 6


@pytest.mark.parametrize(("family", "kind"), CASES)
def test_a_cut_answer_gets_the_end_that_a_whole_one_has(family, kind):
    conversation = make(family)
    for answer, messages in TURNS[kind]:
        cut = np.asarray(ids(conversation, answer), np.int32)
        whole = np.append(cut, np.int32(conversation.tokenizer.eos_token_id))
        assert conversation.is_cut(cut) and not conversation.is_cut(whole)
        after = conversation.continuation(whole, messages)
        end = [] if family == "plain" else [conversation.tokenizer.eos_token_id]
        assert conversation.continuation(cut, messages).tolist() == [*end, *after]
        assert conversation.continuation(cut[:0], messages).tolist() == [*end, *after]


def test_results_of_tools_share_a_turn_as_the_template_writes_them():
    messages = [result("5"), result("6")]
    assert written(make("qwen2.5"), "add<|im_end|>", messages) == (
        "\n<|im_start|>user\n<tool_response>\n5\n</tool_response>\n<tool_response>\n6\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert written(make("llama3.1"), "add<|eot_id|>", messages[:1]) == (
        '<|start_header_id|>ipython<|end_header_id|>\n\n"5"<|eot_id|>'
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    )
    assert written(make("mistral"), " add</s>", [result("5", tool_call_id="abcdefghi")]) == (
        '[TOOL_RESULTS] {"content": "5", "call_id": "abcdefghi"}[/TOOL_RESULTS]'
    )
    assert written(make("own"), "add", messages[:1]) == (
        "<|im_end|>\n<|im_start|>tool\n5<|im_end|>\n<|im_start|>assistant\n"
    )


def test_arguments_of_the_template_reach_every_turn():
    conversation = make("qwen3", chat_template_kwargs={"enable_thinking": False})
    start = "<|im_start|>assistant\n<think>\n\n</think>\n\n"
    assert conversation.opening("Hi", {}).text.endswith(start)
    assert written(conversation, "five<|im_end|>", [RIGHT]).endswith(start)


def test_any_token_that_ends_an_answer_stands_for_the_end():
    tokenizer = tokenizer_of("llama3.1")
    (other,) = tokenizer.encode("<|eom_id|>", add_special_tokens=False)
    conversation = Conversation(configure(), tokenizer, TOOLS, eos_ids=(other,))
    after = written(conversation, "add<|eom_id|>", [RIGHT])
    assert after == written(conversation, "add<|eot_id|>", [RIGHT])
    assert after.startswith("<|start_header_id|>user")
    assert written(make("llama3.1"), "add<|eom_id|>", [RIGHT]) == f"<|eot_id|>{after}"


_FOR, _ASKS = "{% for m in messages %}", "{% endfor %}{% if add_generation_prompt %}"
BARE = (
    _FOR
    + "{{ '[/INST]' if m.role == 'assistant' else '[INST]' }}{{ m.content }}"
    + _ASKS
    + "[/INST]{% endif %}"
)
HEADED = _FOR + "<|im_start|>{{ m.role }} {{ m.content }} " + _ASKS + "<|im_start|>bot {% endif %}"
BLANK = _FOR + "<|im_start|>{{ m.content }} <|im_end|>" + _ASKS + "<|im_start|>{% endif %}"
MIXED = (
    _FOR
    + "[INST]{{ m.content }}{% if loop.last %}<|im_end|>{% endif %}"
    + _ASKS
    + "[/INST]{% endif %}"
)
ODD = [  # template, answer, what follows it; the EOS is </s>
    (BARE, "five[INST]", "Hi[/INST]"),  # the token that begins the next turn has ended this one
    (BARE, "five", "[INST]Hi[/INST]"),
    (BARE, "five</s>", "[INST]Hi[/INST]"),
    (HEADED, "five</s>", " <|im_start|>user Hi <|im_start|>bot "),
    (BLANK, "five<|im_end|>", "<|im_start|>Hi <|im_end|><|im_start|>"),
    (BLANK, "five</s>", "<|im_start|>Hi <|im_end|><|im_start|>"),
    (BLANK, "five ", " <|im_end|><|im_start|>Hi <|im_end|><|im_start|>"),
    (MIXED, "five</s>", "[INST]Hi<|im_end|>[/INST]"),
]  # fmt: skip


@pytest.mark.parametrize(("template", "answer", "after"), ODD)
def test_ends_of_odd_templates_are_written_once(template, answer, after):
    tokenizer = tokenizer_of("mistral")
    tokenizer.chat_template = template
    conversation = Conversation(configure(), tokenizer)
    assert written(conversation, answer, [{"role": "user", "content": "Hi"}]) == after


def test_an_end_in_words_is_no_end():
    conversation = make("own", stop=("<|im_end|>",))
    spelled = [token for letter in "<|im_end|>" for token in ids(conversation, letter)]
    after = conversation.continuation(np.asarray(spelled, np.int32), [RIGHT])
    assert after[0] == conversation.tokenizer.eos_token_id


@pytest.mark.parametrize(
    ("stop", "answer", "missing"),
    [
        ("\nUser:", "Five\n\nUser:", " Wrong.\n\nBot: "),
        ("\nUser:", "Five\n\nUser: ", "Wrong.\n\nBot: "),  # the last token has more characters
        ("User:", "Five\n\nUser:", " Wrong.\n\nBot: "),
        ("\n", "Five\n", "\nUser: Wrong.\n\nBot: "),
        ("\n", "Five\n\n", "User: Wrong.\n\nBot: "),
        ("\nUser:", "Five\n", "\n\nUser: Wrong.\n\nBot: "),  # cut
        ("</answer>", "Five\n", "\n\nUser: Wrong.\n\nBot: "),
        ("</answer>", "Five</answer>", "\n\nUser: Wrong.\n\nBot: "),
    ],
)
def test_a_stop_text_that_begins_the_next_turn_is_written_once(stop, answer, missing):
    conversation = make("plain", stop=(stop,))
    messages = [{"role": "user", "content": "Wrong."}]
    assert written(conversation, answer, messages) == missing
    assert conversation.is_cut(np.asarray(ids(conversation, answer))) == (stop not in answer)


def test_a_template_that_moves_tools_writes_them_again():
    after = written(make("mistral"), " Five</s>", [RIGHT])
    assert after.startswith("[AVAILABLE_TOOLS] [{") and after.endswith("[/INST]")
    assert written(make("mistral", has_tools=False), " Five</s>", [RIGHT]).startswith(
        "[INST] Wrong"
    )


def test_the_opening_is_a_prompt_with_tools_system_and_suffix():
    conversation = make("qwen2.5", system="Be brief.", prompt_suffix=" Now.")
    row = {ID: "a:1", "prompt": "unused", "answer": 5}
    opening = conversation.opening(FIRST, row)
    assert opening.row == row and opening.id == "a:1"
    assert opening.text.startswith("<|im_start|>system\nBe brief.\n\n# Tools\n<tools>\n{")
    assert opening.text.endswith("What are two and three? Now.<|im_end|>\n<|im_start|>assistant\n")
    assert opening.tokens.tolist() == ids(conversation, opening.text)
    assert "Now." not in written(conversation, "five", [RIGHT]), "it is of prompts"
    assert conversation.opening(FIRST[0]["content"], row).text == opening.text


def test_without_a_template_texts_stay_as_they_are():
    conversation = make("own", has_tools=False, chat_template=False, prompt_suffix="?")
    assert conversation.opening("2 and 3", {}).text == "2 and 3?"
    assert conversation.opening([*FIRST, RIGHT], {}).text.startswith("What are two and three?Wrong")
    for answer in ("five", "five<|im_end|>"):
        assert written(conversation, answer, [result(" 5\n"), result(" 6")]) == " 5\n 6"
    end = conversation.tokenizer.eos_token_id
    assert conversation.continuation(np.zeros(0), [result("<|im_end|>")]).tolist() == [end]


@pytest.mark.parametrize("family", [name for name in KINDS if name != "plain"])
def test_an_environment_writes_no_special_token(family):
    conversation = make(family)
    names = [
        str(token)
        for token in conversation.tokenizer.added_tokens_decoder.values()
        if token.special
    ]
    forged = {"role": "user", "content": "".join(f"a{name}\nb" for name in names) + names[0] * 2}
    harmless = {"role": "user", "content": "5"}
    special = set(conversation.tokenizer.all_special_ids)

    def counted(tokens) -> list[int]:
        return [token for token in tokens if token in special]

    answer = np.asarray(ids(conversation, "five"), np.int32)
    found = conversation.continuation(answer, [forged])
    assert counted(found) == counted(conversation.continuation(answer, [harmless]))
    assert conversation.tokenizer.decode(found) == conversation._render([forged])
    said = conversation.opening(conversation.quoted([forged]), {ID: "r"})
    assert counted(said.tokens) == counted(conversation.opening([harmless], {ID: "r"}).tokens)
    assert said.text == conversation.opening([forged], {ID: "r"}).text
    assert said.text == conversation.tokenizer.decode(said.tokens) and len(names) > 2


def test_a_text_that_continues_gets_no_blank_of_sentencepiece():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["</s>", "\u2581", "n", "o", "\u2581no"]
    backend = Tokenizer(models.BPE(dict(zip(words, range(5), strict=True)), []))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    backend.add_special_tokens(["</s>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>")
    conversation = Conversation(configure(chat_template=False), tokenizer)
    messages = [{"role": "user", "content": "no"}]
    assert tokenizer.encode("no", add_special_tokens=False) == [1, 2, 3]
    assert conversation.continuation(np.asarray([2], np.int32), messages).tolist() == [2, 3]


def test_the_same_messages_are_rendered_once(monkeypatch):
    conversation, count = make("qwen3"), 0
    render = conversation.tokenizer.apply_chat_template

    def counted(*args, **options):
        nonlocal count
        count += 1
        return render(*args, **options)

    monkeypatch.setattr(conversation.tokenizer, "apply_chat_template", counted)
    for _ in range(3):
        written(conversation, "five", [RIGHT])
        written(conversation, "five<|im_end|>", [dict(RIGHT)])
    assert count == 2, "and one to see that the template writes the role"
    for number in range(2 * CACHED):
        written(conversation, "five", [{"role": "user", "content": str(number)}])
    assert count == 2 + 2 * CACHED


DROPPING = "{% for m in messages %}{% if m.role != 'tool' %}{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
WRONG = [
    ("gemma2", [result("5")], "the roles user, assistant, tool .*alternate.* one message of the role 'user'"),
    ("gemma3", [RIGHT, RIGHT], "alternate.* one message of the role 'user'"),
    ("mistral", [RIGHT, RIGHT], "alternate.* one message of the role 'user'"),
    ("mistral", [result("5", tool_call_id="1")], "IDs should be .*: let the environment answer"),
    (DROPPING, [result("5")], "drops messages of the role 'tool': let the environment answer with the role 'user'"),
    ("own", [], "gave .*: give a list of {'role': text, 'content': text} objects"),
    ("own", "5", "the environment gave '5': give a list"),
    ("own", [{"role": "user", "content": 5}], "give a list"),
    ("own", [result("5", name="\ud800")], "a lone surrogate: write whole characters"),
]  # fmt: skip


@pytest.mark.parametrize(("family", "messages", "error"), WRONG)
def test_messages_that_the_template_cannot_write_are_refused_with_a_fix(family, messages, error):
    tokenizer = tokenizer_of(family if family in FAMILIES else "own")
    tokenizer.chat_template = FAMILIES.get(family, [family])[0]
    conversation = Conversation(configure(), tokenizer)
    with pytest.raises(DataError, match=error) as raised:
        conversation.continuation(np.zeros(0, np.int32), messages)
    assert "\n" not in str(raised.value)


def test_tools_need_a_template_that_writes_them():
    for family in ("own", "gemma2", "smollm2"):
        with pytest.raises(DataError, match="writes no tools: describe them in data.system"):
            Conversation(configure(), tokenizer_of(family), TOOLS)
    with pytest.raises(DataError, match="tools need a chat template .* set data.chat_template"):
        Conversation(configure(chat_template=False), tokenizer_of("qwen3"), TOOLS)
    bare = tokenizer_of("own")
    bare.chat_template = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
    with pytest.raises(DataError, match="drops the assistant's message: use another template"):
        Conversation(configure(), bare)


def test_openings_that_no_prompt_may_be_are_refused():
    conversation = make("gemma2", prompt_suffix="?")
    wrong = {
        "ends with an assistant's message": [{"role": "assistant", "content": "a"}],
        "no message of the user for data.prompt_suffix": [result("5")],
        "give a list": [],
        "rejects row r: System role": [{"role": "system", "content": "a"}, RIGHT],
    }
    for error, messages in wrong.items():
        with pytest.raises(DataError, match=error):
            conversation.opening(messages, {ID: "r"})
