"""Replays filled with texts, and the segments of the batches drawn from them."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import jax
import numpy as np

from tlt_jax.data.packing import PackedRows
from tlt_jax.distributed.mesh import make_mesh, sharding
from tlt_jax.drafter.replay import Replay, ReplayConfig
from tlt_jax.rollout.recorder import Emitted, Ended, Harvested, Poll
from tlt_jax.spec_decode.decode_state import BROKEN, RUNNING, TRUNCATED, Features

SAMPLES, T = 2, 64  # tokens of the packed row
TOKEN = (6 + 4) * 4  # bytes of a position in `numbers`
LONG = ((2, 27), (7, 15), (3, 4), (1, 50), (6, 30), (2, 2))  # tokens of prompts and answers


def texts_of(sizes=LONG, seed=0) -> dict[int, tuple[np.ndarray, np.ndarray]]:
    """Prompts and answers by uid; samples of a prompt share it, so only even uids are used."""
    random = np.random.default_rng(seed)
    return {
        SAMPLES * i: tuple(random.integers(0, 11, n).astype(np.int32) for n in pair)
        for i, pair in enumerate(sizes)
    }


def request_of(texts) -> SimpleNamespace:
    """The part of a RolloutRequest that the replay reads."""
    return SimpleNamespace(prompts=tuple(prompt for prompt, _ in texts.values()), samples=SAMPLES)


def feed(
    replay: Replay, texts, features, states, together=3, junk=np.nan, order=1, broken=()
) -> None:
    """The polls of a group in which these sequences finish; values behind the known positions are junk.

    `features`, `states`: [n, S, ...] of the texts. The values of `together` windows and a row of padding arrive at once,
    in this order or (-1) the last first. `broken`: uids whose logits were not finite at the end.
    """
    where = sharding(replay.mesh, ("batch", None, "features"), "rollout")
    found, windows = [], []
    for row, (uid, (prompt, answer)) in enumerate(texts.items()):
        length, half = len(prompt) + len(answer), len(answer) // 2
        parts = (answer[:half], RUNNING), (answer[half:], BROKEN if uid in broken else TRUNCATED)
        found += [Emitted(uid, part, np.zeros(len(part)), finish) for part, finish in parts]
        found.append(Ended(uid, row, length))
        windows += [(uid, start, row, length) for start in replay.wanted(uid, length)]
    for first in range(0, len(windows), together):
        chosen = windows[first : first + together][::order]

        def values(source, chosen=chosen):
            array = np.full((len(chosen) + 1, replay.width, source.shape[-1]), junk, source.dtype)
            for target, (_, start, row, length) in zip(array, chosen, strict=False):
                known = source[row, start : min(start + replay.width, length - 1)]
                target[: len(known)] = known
            return jax.device_put(array, where)

        harvested = Features(values(features), None if states is None else values(states))
        names = tuple((uid, start) for uid, start, *_ in chosen)
        found.append(Harvested(names, harvested, harvested.features))
    for begin in range(0, len(found), 4):
        replay.listen(Poll(replay.group, 0.0, 0.0, tuple(found[begin : begin + 4])))
        other = Poll(replay.group + 1, 0.0, 0.0, tuple(found[begin : begin + 4]))
        replay.listen(other)  # of another group


def replay_of(width=24, max_bytes=10**6, mesh=None, **rest) -> Replay:
    config = ReplayConfig(width, max_bytes, **rest)
    return Replay(config, group=3, mesh=mesh or make_mesh(1, 1))


def numbers(texts) -> tuple[np.ndarray, np.ndarray]:
    """Features that encode their row and position, and different ones as states."""
    longest = max(len(prompt) + len(answer) for prompt, answer in texts.values())
    place = np.arange(len(texts))[:, None, None] * 100 + np.arange(longest)[None, :, None]
    found = (place + np.arange(6) / 8 + 1).astype(np.float32)
    return found, -found[..., :4]


def filled(texts=None, step=0, dtype=np.float32, **rest) -> Replay:
    """A replay of LONG with features that encode their row and position."""
    texts = texts or texts_of()
    replay = replay_of(**{"width": 10} | rest)
    replay.begin(step, request_of(texts))
    feed(replay, texts, *(one.astype(dtype) for one in numbers(texts)))
    return replay


def segments_of(batch: PackedRows) -> Iterator[tuple[np.ndarray, ...]]:
    """tokens, positions, loss_mask, features and states of every segment."""
    arrays = [
        np.asarray(getattr(batch, name))
        for name in ("tokens", "positions", "is_answer", "features", "states")
    ]
    for row, segments in enumerate(np.asarray(batch.segments)):
        for segment in range(1, segments.max(initial=0) + 1):
            yield tuple(array[row][segments == segment] for array in arrays)
