"""Answers of several turns: tokens depend on weights, seed, prompt and replies alone, whenever these come."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import references
import tiny_engine as tiny
from test_harvest_engine import WIDTH, fresh
from test_speculation import MANY, NO, ONE, WIDE, speculating
from test_unusual_policies import SPARSE

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.drafter.replay import Replay, ReplayConfig
from tlt_jax.errors import ConfigError
from tlt_jax.keys import TRAIN_STREAM, sequence_keys
from tlt_jax.models import architecture, transformer
from tlt_jax.rollout import dialogue
from tlt_jax.rollout.recorder import Dispatched
from tlt_jax.spec_decode import noise
from tlt_jax.spec_decode.interface import Sampling

small_pool = tiny.small_pool
pytestmark = pytest.mark.usefixtures("small_pool")
LIMIT, TURN_TOKENS, SETTING = 24, 9, Sampling(1.0)
POLICY = replace(tiny.MODEL, eos_ids=(0, 5, 9, 12, 20, 31))


def reply_to(uid: int, turn: list[int], count: int) -> list[int] | None:
    """The tokens of a reply to turn number `count` of a sequence; None after some turns."""
    if count > 1 + uid % 4:
        return None
    return [(uid + 3 * token) % 37 for token in (turn[-1], len(turn), count)][: 1 + uid % 3]


class Partner:
    """Replies after some calls: sequences wait for different times."""

    def __init__(self, wait=lambda uid, count: 0):
        self.wait, self.heard, self.due, self.calls = wait, {}, [], 0

    def most(self, uid):
        return 0

    def hear(self, uid, turn, logprobs):
        self.heard.setdefault(uid, []).append(turn.tolist())
        count = len(self.heard[uid])
        reply = reply_to(uid, turn.tolist(), count)
        self.due.append((self.calls + self.wait(uid, count), uid, reply))

    def replies(self):
        self.calls += 1
        ready = [one for one in self.due if one[0] < self.calls]
        self.due = [one for one in self.due if one[0] >= self.calls]
        return {
            uid: None if reply is None else np.array(reply, np.int32) for _, uid, reply in ready
        }


@cache
def expected(policy=POLICY) -> list[tuple[int, list[int], list[bool], str]]:
    """Turn by turn, by the training forward over each whole prefix: tokens, whose they are, and why the answer ended."""
    params = architecture.init(policy, make_mesh(1, 1), jax.random.key(0), "float64")
    keys = jnp.asarray(
        sequence_keys(0, TRAIN_STREAM, 0, np.arange(len(tiny.PROMPTS) * tiny.SAMPLES))
    )

    @jax.jit
    def next_logits(tokens, length):
        segments = (jnp.arange(48) < length).astype(jnp.int32)[None]
        x, _ = transformer.hidden(
            params, policy, tokens[None], jnp.arange(48)[None], segments, compute_dtype="float64"
        )
        return transformer.logits(params, policy, x[0, length - 1])[: policy.vocab_size]

    def logits_of(prefix):
        return next_logits(np.pad(np.int32(prefix), (0, 48 - len(prefix))), len(prefix))

    draw = jax.jit(
        lambda key, t: noise.gumbel(key[None], t[None, None], policy.vocab_size, jnp.float64)[0, 0]
    )
    found = []
    for uid, key in enumerate(keys):
        prompt = tiny.PROMPTS[uid // tiny.SAMPLES]
        text, own, count = list(prompt), [], 0
        while True:
            left = min(LIMIT - len(own), TURN_TOKENS)
            turn, _, finish = references.decode(
                logits_of, lambda t, key=key: draw(key, jnp.int32(t)), text, SETTING, policy.eos_ids, tiny.STOPS, left
            )  # fmt: skip
            text, own, count = text + turn, own + [True] * len(turn), count + 1
            if finish == "length" and len(own) == LIMIT:
                break
            reply, finish = reply_to(uid, turn, count), "stop"
            if reply is None or len(own) + len(reply) >= LIMIT:
                break
            text, own = text + reply, own + [False] * len(reply)
        found.append((uid, text[len(prompt) :], own, finish))
    return found


@pytest.mark.parametrize(
    "drafter, strategies, data, model, wait",
    [
        ("none", NO, 1, 1, lambda uid, count: 0),
        ("none", NO, 2, 1, lambda uid, count: 50 * (uid % 5 == 0)),
        ("eagle3", WIDE, 1, 2, lambda uid, count: 7 * uid),
        ("ngram", ONE, 2, 1, lambda uid, count: 200 // (1 + uid)),
        pytest.param("dspark", MANY, 1, 1, lambda uid, count: (uid * 31 + count * 17) % 40, marks=pytest.mark.matrix),
    ],
)  # fmt: skip
def test_tokens_do_not_depend_on_drafts_groups_or_when_replies_come(
    x64, drafter, strategies, data, model, wait
):
    engine, weights = speculating(
        drafter, strategies, data, model, policy=POLICY, slots=5, chunk=3, batch_buckets=[1, 5], cache_buckets=[48],
        max_new_tokens=LIMIT,
    )  # fmt: skip
    partner = Partner(wait)
    result = talk(engine, weights, partner)
    found = [
        (one.uid, one.tokens.tolist(), one.own.tolist(), one.finish) for one in result.completions
    ]
    truth = expected()
    assert found == truth
    assert {finish for *_, finish in truth} == {"stop", "length"}
    heard = [turn for turns in partner.heard.values() for turn in turns[:-1]]
    assert max(len(turns) for turns in partner.heard.values()) > 2, "several turns were taken"
    assert any(len(turn) == TURN_TOKENS and turn[-1] not in POLICY.eos_ids for turn in heard)
    for one in result.completions:
        assert (one.logprobs[~one.own] == 0).all() and (one.logprobs[one.own] < 0).all()


def test_experts_of_all_turns_and_replies_are_recorded(x64):
    policy = replace(SPARSE, eos_ids=POLICY.eos_ids)
    engine, weights = speculating(
        "none", NO, policy=policy, slots=5, chunk=3, batch_buckets=[5], cache_buckets=[48], max_new_tokens=LIMIT, records=True
    )  # fmt: skip
    result = talk(engine, weights, Partner(), records=True)
    assert any(one.replies for one in result.completions)
    check_records(engine, policy, result)


def check_records(engine, policy, result):
    """Compares records with those of prefills of the whole texts."""
    layout = partial(architecture.to_rollout, config=policy, mesh=engine.mesh, dtype="float64")
    rollout = jax.jit(layout)(tiny.params_of(engine))
    prefill = jax.jit(partial(transformer.prefill, rollout, policy))
    for one in result.completions:
        text = [*tiny.PROMPTS[one.prompt], *one.tokens][:-1]
        whole = prefill(jnp.array([text + [0] * (48 - len(text))]), jnp.array([len(text)]))
        np.testing.assert_array_equal(one.record, whole.experts[0, : len(text)])


def test_a_deterministic_rollout_has_no_partner(x64):
    engine, weights = speculating("none", NO, policy=POLICY, deterministic=True)
    with pytest.raises(ConfigError, match="rollout.deterministic with an environment"):
        talk(engine, weights, Partner())


def talk(engine, weights, partner, listeners=(), replays=(), **which):
    prompts = [np.asarray(prompt, np.int32) for prompt in tiny.PROMPTS]
    request = engine.request(
        prompts, tiny.SAMPLES, SETTING, LIMIT, stream=TRAIN_STREAM, step=0, **which
    )
    for replay in replays:
        replay.begin(0, request)
    return engine.run(
        request, weights, partner=partner, turn_tokens=TURN_TOKENS, harvesters=replays or None,
        listeners=[*listeners, *(replay.listen for replay in replays)],
    )[0]  # fmt: skip


@pytest.mark.parametrize(
    "drafter, strategies, data, model, slots",
    [
        ("none", NO, 1, 1, 12),
        ("eagle3", WIDE, 1, 2, 12),
        ("ngram", ONE, 2, 1, 5),
        ("dspark", MANY, 1, 1, 5),
    ],
)
def test_replies_that_are_appended_alone_change_no_token(
    x64, monkeypatch, drafter, strategies, data, model, slots
):
    """With 12 rows all sequences keep theirs; with 5 some are lent to others."""
    monkeypatch.setattr(dialogue, "APPEND_FROM", 0)
    monkeypatch.setattr(dialogue, "MORE", 0)
    policy = replace(SPARSE, eos_ids=POLICY.eos_ids) if drafter == "none" else POLICY
    engine, weights = speculating(
        drafter, strategies, data, model, policy=policy, slots=slots, chunk=3, batch_buckets=[1, slots], cache_buckets=[64],
        max_new_tokens=LIMIT, records=policy is not POLICY,
    )  # fmt: skip
    appended = []
    listen = [lambda poll: appended.extend(e for e in poll.events if kind_of(e) == "append")]
    config, groups = ReplayConfig(WIDTH, 10**6, most=9), engine.groups if engine.drafter else []
    replays = [Replay(config, group, mesh) for group, mesh in enumerate(groups)]
    partner = Partner(lambda uid, count: 7 * (uid % 3))
    result = talk(engine, weights, partner, listen, replays, records=policy is not POLICY)
    found = [
        (one.uid, one.tokens.tolist(), one.own.tolist(), one.finish) for one in result.completions
    ]
    assert found == expected(policy)
    replies = sum(len(one.replies) for one in result.completions)
    assert appended and (slots == 5 or len(appended) > replies // 4)
    if policy is not POLICY:
        check_records(engine, policy, result)
    if replays:
        check_harvest(replays, drafter)


def check_harvest(replays, drafter):
    """Compares what was harvested with a forward over whole texts, and what is learned with the policy's turns."""
    texts, own = {}, {}
    for uid, tokens, chosen, _ in expected():
        prompt = tiny.PROMPTS[uid // tiny.SAMPLES]
        texts[uid], own[uid] = (*prompt, *tokens), [False] * len(prompt) + chosen
    _, features = fresh(tuple(texts.values()), drafter)
    learned = defaultdict(list)
    for window, values in (pair for replay in replays for pair in replay.held.items()):
        uid, first, end = window.uid, window.start, window.start + window.size
        assert window.tokens.tolist() == [*texts[uid][first:end]]
        assert window.loss_mask.tolist() == own[uid][first + 1 : end + 1]
        np.testing.assert_allclose(values.features, features[uid, first:end], atol=1e-9)
        learned[uid] += [first + i + 1 for i in np.flatnonzero(window.loss_mask)]
        assert window.answer == sum(own[uid])
    for uid, chosen in own.items():
        assert {*learned[uid]} == {*np.flatnonzero(chosen)}, "all of its turns, and nothing else"


@pytest.mark.parametrize("slots", [60, 330, 600, 1500, 9000])
def test_the_largest_program_that_appends_a_reply_is_the_widest_that_any_reply_needs(slots):
    request, widths = SimpleNamespace(prompts=[np.zeros(1)], samples=1), {0}
    talk = dialogue.Dialogue(request, None, can_append=True)
    for tokens in range(15, slots, 7):
        for reply in (1, 16, 17, 64, 65, 256, 257, 1024, 1025, 4096):
            talk.parts[0] = [np.zeros(tokens), np.zeros(reply)]
            if talk.appends(0, slots):
                widths.add(dialogue.reply_width(reply))
                assert tokens + 1 + dialogue.reply_width(reply) <= slots
    rows, width = dialogue.largest_append(99, slots) or (1, 0)
    assert width == max(widths) and rows * width <= dialogue.MOST


def kind_of(event) -> str:
    return getattr(event, "kind", "") if isinstance(event, Dispatched) else ""
