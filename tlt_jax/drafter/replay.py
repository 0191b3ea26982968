"""The replay buffer of one data group: windows of sequences that finished in this RL step or the previous one.

The group's idle devices train the drafter from it while other groups decode. It is a cache: losing it costs speed, and
changes no answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from tlt_jax.data.packing import PackedRows
from tlt_jax.distributed.mesh import put, sharding
from tlt_jax.rollout.recorder import Emitted, Ended, Harvested, Poll, Replied
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.spec_decode.decode_state import BROKEN, Features

WINDOWS, DRAWS = 0, 1  # random streams: which windows are stored, what is drawn
MOST_BATCHES = 32  # largest expected length of the circle that `draw` cuts from, in batches


@dataclass(frozen=True)
class ReplayConfig:
    """Sizes of a replay buffer.

    `width`: positions of a window. `most`: windows stored of one sequence. `max_bytes`: of features and states of one
    group, in host memory. `held_out`: one sequence in `held_out` is used for evaluation only; 0: none.
    """

    width: int
    max_bytes: int
    most: int = 2
    seed: int = 0
    held_out: int = 0


class Replay:
    """Listener to the polls of one group, and a Harvester; `mesh` is the group's.

    The windows that it wants are a function of seed, step, sequence and length alone, so the replay of any group can
    answer for all. Draws depend on which windows have arrived, and not on their order. Call `begin` before the rollout of
    a step. Features are held in host memory, in the dtype that they came in.
    """

    def __init__(self, config: ReplayConfig, group: int, mesh: Mesh):
        self.config, self.group, self.mesh, self.width = config, group, mesh, config.width
        self.step, self.request = 0, None  # of the current rollout
        # Of answers, by uid: tokens, and whether the policy chose them.
        self.parts: dict[int, list[tuple[np.ndarray, bool]]] = {}
        self.broken: set[int] = set()  # uids of answers whose logits were not finite
        self.answers: dict[
            int, dict[int, int]
        ] = {}  # the policy's tokens of finished answers: step -> uid -> n
        self.awaited: dict[tuple[int, int], Window] = {}  # by uid and first position
        self.held: dict[Window, Features] = {}
        self.shardings: Features | None = None  # of harvested values
        self.drawn = self.aged = 0  # tokens drawn in this step; the sum of their ages in steps

    def begin(self, step: int, request: RolloutRequest) -> None:
        """Starts an RL step, which decodes the request; of earlier steps only the previous one stays."""
        self.step, self.request = step, request
        self.parts, self.broken, self.awaited, self.drawn, self.aged = {}, set(), {}, 0, 0
        self.answers = {step - 1: self.answers.get(step - 1, {}), step: {}}
        self.held = {one: held for one, held in self.held.items() if one.step == step - 1}

    def wanted(self, uid: int, length: int) -> list[int]:
        """First positions of the windows to store of a sequence, see the function wanted."""
        random = np.random.default_rng([self.config.seed, WINDOWS, self.step, uid])
        prompt = len(self.prompt(uid))
        return wanted(prompt, length, self.width, self.config.most, random)

    def prompt(self, uid: int) -> np.ndarray:
        """The prompt of a sequence."""
        return self.request.prompts[uid // self.request.samples]

    def listen(self, poll: Poll) -> None:
        """Handles the events of one poll; those of other groups are ignored."""
        if poll.group != self.group:
            return
        for event in poll.events:
            match event:
                case Emitted(uid, tokens, _, finish):
                    self.parts.setdefault(uid, []).append((tokens, True))
                    if finish == BROKEN:
                        self.broken.add(uid)
                case Replied(uid, tokens) if tokens is not None:
                    self.parts[uid].append((tokens, False))
                case Ended(uid, _, length):
                    self.end(uid, length)
                case Harvested(windows, values):
                    self.keep(windows, values)

    def end(self, uid: int, length: int) -> None:
        """The sequence is finished: its windows are awaited, unless its logits were not finite.

        They take the place of those from before it went on. Windows that only others wrote are left out.
        """
        if uid in self.broken:
            return
        parts, answers = [(self.prompt(uid), False), *self.parts[uid]], self.answers[self.step]
        text = np.concatenate([tokens for tokens, _ in parts]).astype(np.int32)
        own = np.concatenate([np.full(len(tokens), is_own) for tokens, is_own in parts])
        if len(text) != length:
            raise ValueError(f"sequence {uid} has {length} tokens, {len(text)} were reported")
        if uid in answers:
            past = self.step, uid
            self.held = {one: it for one, it in self.held.items() if (one.step, one.uid) != past}
        answers[uid] = int(own.sum())
        for start in self.wanted(uid, length):
            window = cut(text, own, self.step, uid, start, self.width)
            if window.learned:
                self.awaited[uid, start] = window

    def keep(self, windows: tuple[tuple[int, int], ...], values: Features) -> None:
        """Stores values of awaited windows, as far as max_bytes allows.

        Raises ValueError when a single window exceeds max_bytes.
        """
        found = {row: self.awaited.pop(key, None) for row, key in enumerate(windows)}
        new = {row: window for row, window in found.items() if window}
        if not new:
            return
        token = sum(leaf.shape[-1] * leaf.dtype.itemsize for leaf in jax.tree.leaves(values))
        sizes = {one: one.size * token for one in new.values()}
        limit = self.config.max_bytes
        if max(sizes.values()) > limit:
            raise ValueError(
                f"a window of {self.width} positions takes {max(sizes.values())} bytes, the replay "
                f"may have {limit}"
            )
        stay = within({one: bytes_of(held) for one, held in self.held.items()} | sizes, limit)
        self.held = {one: held for one, held in self.held.items() if one in stay}
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, values)
        values = jax.tree.map(np.asarray, values)  # waits until they are copied
        for row, window in new.items():
            if window in stay:
                self.held[window] = jax.tree.map(
                    lambda leaf, row=row, size=window.size: leaf[row, :size].copy(), values
                )

    def sample(self, number: int, row_tokens: int, held_out: bool = False) -> PackedRows | None:
        """The batch of one micro-step: one packed row of T = row_tokens tokens, on the group's devices.

        `held_out`: drawn from the held-out sequences, all windows with equal weight. A function of seed, step, group,
        `number` and the stored windows; None when there are none. Features and states have the dtype and the shardings of
        the harvest; without states, the features serve as states. See weights and draw.
        """
        held = sorted(
            (one for one in self.held if self.is_held_out(one) == held_out),
            key=lambda one: (one.step, one.uid, one.start),
        )
        random = np.random.default_rng([self.config.seed, DRAWS, self.step, self.group, number])
        answers = (list(self.answers.get(step, {}).values()) for step in (self.step, self.step - 1))
        shares = np.ones(len(held)) if held_out else weights(held, self.step, *answers)
        pieces = draw(held, shares, row_tokens, random)
        if not pieces:
            return None
        if not held_out:
            self.drawn += sum(piece.size for piece in pieces)
            self.aged += sum(piece.size * (self.step - piece.window.step) for piece in pieces)
        return self.assemble(pieces, row_tokens)

    def is_held_out(self, window: Window) -> bool:
        """Whether the window's sequence is for evaluation only: a function of seed, RL step and uid."""
        parts = window.uid * 0x9E3779B1 ^ window.step * 0x85EBCA77 ^ self.config.seed * 0xC2B2AE3D
        share = self.config.held_out
        return share > 0 and (parts >> 8 & 0xFFFF) % share == 0

    def assemble(self, pieces: Sequence[Piece], row_tokens: int) -> PackedRows:
        """The packed row of pieces of stored windows, the longest first."""
        pieces = sorted(pieces, key=lambda piece: -piece.size)

        def joined(*leaves: np.ndarray) -> np.ndarray:
            parts = zip(pieces, leaves, strict=True)
            found = np.concatenate([leaf[first : first + size] for (_, first, size), leaf in parts])
            return np.pad(found, ((0, row_tokens - len(found)), (0, 0)))[None]

        values = jax.tree.map(joined, *(self.held[piece.window] for piece in pieces))
        values = jax.device_put(values, self.shardings)
        batch = put(packed(pieces, row_tokens), sharding(self.mesh, ("batch", None), "train"))
        states = values.features if values.states is None else values.states
        return batch._replace(features=values.features, states=states)

    def metrics(self) -> dict[str, float]:
        """Stored tokens and bytes, and the mean age in RL steps of the tokens drawn in this step, if any."""
        found = {
            "drafter/replay_tokens": float(sum(window.size for window in self.held)),
            "drafter/replay_bytes": float(sum(map(bytes_of, self.held.values()))),
        }
        return found | ({"drafter/replay_age": self.aged / self.drawn} if self.drawn else {})


def bytes_of(values: Features) -> int:
    """Bytes of a window's features and states."""
    return sum(leaf.nbytes for leaf in jax.tree.leaves(values))


@dataclass(frozen=True, eq=False)
class Window:
    """Positions start, start + 1, ... of a sequence that finished in RL step `step`; tokens: int32[n].

    `answer`: tokens of the whole answer that the policy chose; `loss_mask`: bool[n], the next token is one of them. The
    sequence's last token is in no window: the policy has no features of it, and no loss reads the drafter's slot there.
    """

    step: int
    uid: int
    start: int
    answer: int
    tokens: np.ndarray
    loss_mask: np.ndarray

    @property
    def size(self) -> int:
        return len(self.tokens)

    @cached_property
    def learned(self) -> int:
        """Positions that the mask keeps."""
        return int(self.loss_mask.sum())


def cut(text: np.ndarray, own: np.ndarray, step: int, uid: int, start: int, width: int) -> Window:
    """The window of `width` positions of a whole sequence int32[length], shorter at its end; `own`: the policy's tokens."""
    end = min(start + width, len(text) - 1)
    return Window(step, uid, start, int(own.sum()), text[start:end], own[start + 1 : end + 1])


def wanted(
    prompt: int, length: int, width: int, most: int, random: np.random.Generator
) -> list[int]:
    """First positions of the windows to store of a sequence, ascending; empty when there is nothing to train on.

    One window from position 0 if it covers the sequence. Otherwise the fewest windows that cover the answer, evenly
    spaced, with at most half a window of the prompt; of these at most `most`, drawn at random: every part of a long
    answer is equally likely to be stored (the reference keeps its end).
    """
    known = length - 1
    if known <= max(prompt - 1, 1):
        return []
    if known <= width:
        return [0]
    last = known - width
    first = max(0, min(prompt - width // 2, last))
    count = -(-(known - first) // width)
    starts = [first + (last - first) * i // max(count - 1, 1) for i in range(count)]
    return [starts[i] for i in sorted(random.choice(count, min(most, count), replace=False))]


def within(sizes: Mapping[Window, int], limit: int) -> set[Window]:
    """The windows to keep within `limit` bytes together; `sizes`: bytes of each.

    Those of the oldest step are dropped first, within a step those of the shortest answers. If all windows have one size,
    what is left does not depend on the order in which windows arrived.
    """
    order = sorted(sizes, key=lambda one: (-one.step, -one.answer, one.uid, one.start))
    fits = np.cumsum([sizes[window] for window in order]) <= limit
    return {window for window, stays in zip(order, fits, strict=True) if stays}


def weights(
    windows: Sequence[Window], step: int, current: Sequence[int], previous: Sequence[int]
) -> np.ndarray:
    """float64[n]: expected number of draws of each window in one pass over the stored windows, in this RL step.

    `current`, `previous`: tokens of each answer that finished in this step so far, and in the previous step; answers
    without a stored window count too.

    One-step-offset sampling (arXiv 2511.16665): a group that is idle early has short answers, so the previous step's
    answers stand in for those still being generated. Sequences that started together finish in order of length: answers
    up to the longest in `current` have finished, longer ones have not. So windows of previous answers are drawn if these
    are longer than all of `current`, and their share of the tokens is the share of such answers in the previous step. If
    both steps have the same lengths, the expected tokens have the lengths of a whole step; there is no quota to tune.

    In either part the stored windows represent all of its answers, and those of one answer all of that answer: its tokens
    are drawn as often as if it were stored whole.
    """
    longest, held = max(current, default=0), Counter()
    for window in windows:
        held[window.step, window.uid] += window.learned
    drawn = np.array([one.answer / held[one.step, one.uid] for one in windows], np.float64)

    is_current = np.array([one.step == step for one in windows], bool)
    stands_in = np.array([one.step == step - 1 and one.answer > longest for one in windows], bool)
    long = sum(answer for answer in previous if answer > longest)
    rest = sum(previous) - long
    tokens = drawn * [one.learned for one in windows]
    share = sum(current) / max(rest, 1) if current else 1.0
    for part, mass in ((is_current, sum(current)), (stands_in, long * share)):
        drawn[part] *= mass / max(tokens[part].sum(), 1)
    return np.where(is_current | stands_in, drawn, 0.0)


class Piece(NamedTuple):
    """`size` tokens of a window, from its index `first` on."""

    window: Window
    first: int
    size: int


def draw(
    windows: Sequence[Window], weights: np.ndarray, tokens: int, random: np.random.Generator
) -> list[Piece]:
    """Pieces of windows with `tokens` tokens in total, or all windows when they have fewer.

    The windows lie on a circle in random order, each as many times as its weight says, rounded up or down at random (of
    many, a random part). An arc is cut out from a random token on. Expected tokens are proportional to the weights
    whatever the windows' sizes, up to the rounding's part in the length of the circle. At most two windows are cut.
    """
    sizes = np.array([window.size for window in windows], np.int64)
    expected = float(weights @ sizes) if len(windows) else 0.0
    scale = min(1.0, MOST_BATCHES * tokens / max(expected, 1.0))
    # By size: rounding then hardly changes the circle's length.
    order = np.argsort(sizes, kind="stable")
    ends = np.floor(np.cumsum(scale * weights[order]) + random.random())
    copies = np.diff(ends, prepend=0).astype(np.int64)
    circle = random.permutation(np.repeat(order, copies))
    total = int(sizes[circle].sum())
    if total <= tokens:
        return [Piece(windows[i], 0, int(sizes[i])) for i in circle]

    pieces, ends = [], np.cumsum(sizes[circle])
    begin = int(random.integers(total))
    place = int(np.searchsorted(ends, begin, side="right"))
    first = begin - int(ends[place] - sizes[circle[place]])
    while tokens:
        window = windows[circle[place]]
        size = min(window.size - first, tokens)
        pieces.append(Piece(window, first, size))
        tokens, first, place = tokens - size, 0, (place + 1) % len(circle)
    return pieces


def packed(pieces: Sequence[Piece], row_tokens: int) -> PackedRows:
    """The row [1, T] of the pieces side by side, without features and states.

    Positions count from the start of the whole sequence. `is_answer` is False at the first token of a piece, which has no
    slot before it. The loss masks further tokens that draft step j cannot predict, as their slot is in another segment.
    """
    shape, column = (1, row_tokens), 0
    rows = PackedRows(*np.zeros((3, *shape), np.int32), is_answer=np.zeros(shape, bool))
    for segment, (window, first, size) in enumerate(pieces, start=1):
        there, here = np.s_[0, column : column + size], slice(first, first + size)
        rows.tokens[there] = window.tokens[here]
        rows.positions[there] = window.start + first + np.arange(size)
        rows.segments[there] = segment
        rows.is_answer[there] = window.loss_mask[here]
        rows.is_answer[0, column] = False
        column += size
    return rows
