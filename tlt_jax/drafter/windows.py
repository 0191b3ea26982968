"""Windows of finished sequences: which are stored, how they are drawn and packed into rows; knows no device."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

MOST_BATCHES = 32  # largest expected length of the circle that `draw` cuts from, in batches


@dataclass(frozen=True, eq=False)
class Window:
    """Positions start, start + 1, ... of a sequence that finished in RL step `step`; tokens: int32[n].

    `prompt`, `length`: tokens of the sequence's prompt and of the whole sequence. Its last token is in no window: the
    policy has no features of it, and no loss reads the drafter's slot there.
    """

    step: int
    uid: int
    start: int
    prompt: int
    length: int
    tokens: np.ndarray

    @property
    def size(self) -> int:
        return len(self.tokens)

    @property
    def answer(self) -> int:
        """Tokens of the whole answer."""
        return self.length - self.prompt

    @property
    def learned(self) -> int:
        """Positions whose next token is one of the answer."""
        return self.start + self.size - max(self.start, self.prompt - 1)

    @property
    def loss_mask(self) -> np.ndarray:
        """bool[n]: the next token is one of the answer."""
        return np.arange(self.start, self.start + self.size) >= self.prompt - 1


def cut(text: np.ndarray, step: int, uid: int, start: int, width: int, prompt: int) -> Window:
    """The window of `width` positions of a whole sequence int32[length], shorter at its end."""
    tokens = text[start : min(start + width, len(text) - 1)]
    return Window(step, uid, start, prompt, len(text), tokens)


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


class Placed(NamedTuple):
    """A piece in a packed row, from `column` on; `segment` counts the row's pieces from 1."""

    piece: Piece
    row: int
    column: int
    segment: int


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
    order = np.argsort(
        sizes, kind="stable"
    )  # by size: rounding then hardly changes the circle's length
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


def place(pieces: Sequence[Piece], rows: int, row_tokens: int) -> list[Placed]:
    """The pieces, placed in R = rows rows of T = row_tokens tokens; first-fit, longest first.

    A piece that fits no row is split: the emptiest row takes what it can. Raises ValueError for more than R x T tokens.
    """
    total = sum(piece.size for piece in pieces)
    if total > rows * row_tokens:
        raise ValueError(f"{total} tokens do not fit {rows} rows of {row_tokens}")
    filled, segments, placed = np.zeros(rows, np.int64), Counter(), []
    for piece in sorted(pieces, key=lambda piece: -piece.size):
        while piece.size:
            free = row_tokens - filled
            row = int(np.argmax(free >= piece.size))
            row = row if free[row] >= piece.size else int(np.argmax(free))
            size = min(piece.size, int(free[row]))
            segments[row] += 1
            part = piece._replace(size=size)
            placed.append(Placed(part, row, int(filled[row]), segments[row]))
            filled[row] += size
            piece = piece._replace(first=piece.first + size, size=piece.size - size)
    return placed


def packed(placed: Sequence[Placed], rows: int, row_tokens: int) -> dict[str, np.ndarray]:
    """The arrays of a Batch but features and states: tokens, positions, segments, loss_mask [R, T].

    Positions count from the start of the whole sequence. `loss_mask` is False at the first token of a piece, which has no
    slot before it. The loss masks further tokens that draft step j cannot predict, as their slot is in another segment.
    """
    shape = (rows, row_tokens)
    arrays = {name: np.zeros(shape, np.int32) for name in ("tokens", "positions", "segments")}
    arrays["loss_mask"] = np.zeros(shape, bool)
    for (window, first, size), row, column, segment in placed:
        there, here = np.s_[row, column : column + size], slice(first, first + size)
        arrays["tokens"][there] = window.tokens[here]
        arrays["positions"][there] = window.start + first + np.arange(size)
        arrays["segments"][there] = segment
        arrays["loss_mask"][there] = window.loss_mask[here]
        arrays["loss_mask"][row, column] = False
    return arrays
