"""The replay buffer of one data group: windows of sequences that finished in this RL step or the previous one.

The group's idle devices train the drafter from it while other groups decode. It knows neither drafter nor coordinator. It
is a cache: losing it costs speed, and changes no answer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jax.sharding import Mesh

from tlt_jax.drafter import batch as drafter_batch, windows as choice
from tlt_jax.drafter.batch import Batch
from tlt_jax.drafter.window_store import STORES, WindowStore
from tlt_jax.drafter.windows import Piece, Window
from tlt_jax.rollout.events import Emitted, Ended, Harvested, Look
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.spec_decode.decode_state import BROKEN, Features

WINDOWS, DRAWS = 0, 1  # random streams: which windows are stored, what is drawn


@dataclass(frozen=True)
class ReplayConfig:
    """Sizes of a replay buffer.

    `width`: positions of a window. `most`: windows stored of one sequence. `max_bytes`: of features and states in one
    group, over all its devices. `place`: where these are stored, "host" or "device". `held_out`: one sequence in
    `held_out` is used for evaluation only; 0: none. Raises ValueError for impossible values.
    """

    width: int
    max_bytes: int
    place: str = "host"
    most: int = 2
    seed: int = 0
    held_out: int = 0

    def __post_init__(self) -> None:
        if self.width < 2 or self.most < 1:
            raise ValueError(
                f"{self.most} windows of {self.width} positions: one of 2 is the least"
            )
        if self.place not in STORES:
            raise ValueError(f"place {self.place!r} is not one of {', '.join(STORES)}")


class Replay:
    """Listener to the polls of one group, and a Harvester; `mesh` is the group's.

    The windows that it wants are a function of seed, step, sequence and length alone, so the replay of any group can
    answer for all. Draws depend on which windows have arrived, and not on their order. Call `begin` before the rollout of
    a step.
    """

    def __init__(self, config: ReplayConfig, group: int, mesh: Mesh):
        self.config, self.group, self.mesh, self.width = config, group, mesh, config.width
        self.store: WindowStore = STORES[config.place]()
        self.step, self.request = 0, None  # of the current rollout
        self.parts: dict[int, list[np.ndarray]] = {}  # of answers so far, by uid
        self.broken: set[int] = set()  # uids of answers whose logits were not finite
        self.answers: dict[int, dict[int, int]] = {}  # tokens of finished answers: step -> uid -> n
        self.awaited: dict[tuple[int, int], Window] = {}  # by uid and first position
        self.held: dict[Window, int] = {}  # bytes of each
        self.drawn = self.aged = 0  # tokens drawn in this step; the sum of their ages in steps

    def begin(self, step: int, request: RolloutRequest) -> None:
        """Starts an RL step, which decodes the request; of earlier steps only the previous one stays."""
        self.step, self.request = step, request
        self.parts, self.broken, self.awaited, self.drawn, self.aged = {}, set(), {}, 0, 0
        self.answers = {step - 1: self.answers.get(step - 1, {}), step: {}}
        self.drop([window for window in self.held if window.step != step - 1])

    def wanted(self, uid: int, length: int) -> list[int]:
        """First positions of the windows to store of a sequence, see windows.wanted."""
        random = np.random.default_rng([self.config.seed, WINDOWS, self.step, uid])
        prompt = len(self.prompt(uid))
        return choice.wanted(prompt, length, self.width, self.config.most, random)

    def prompt(self, uid: int) -> np.ndarray:
        """The prompt of a sequence."""
        return self.request.prompts[uid // self.request.samples]

    def listen(self, look: Look) -> None:
        """Handles the events of one poll; those of other groups are ignored."""
        if look.group != self.group:
            return
        for event in look.events:
            match event:
                case Emitted(uid, tokens, _, finish):
                    self.parts.setdefault(uid, []).append(tokens)
                    if finish == BROKEN:
                        self.broken.add(uid)
                case Ended(uid, _, length):
                    self.end(uid, length)
                case Harvested(windows, values):
                    self.keep(windows, values)

    def end(self, uid: int, length: int) -> None:
        """The sequence is finished: its windows are awaited, unless its logits were not finite."""
        if uid in self.broken:
            del self.parts[uid]
            return
        prompt = self.prompt(uid)
        text = np.concatenate([prompt, *self.parts.pop(uid)]).astype(np.int32)
        if len(text) != length:
            raise ValueError(f"sequence {uid} has {length} tokens, {len(text)} were reported")
        self.answers[self.step][uid] = length - len(prompt)
        for start in self.wanted(uid, length):
            window = choice.cut(text, self.step, uid, start, self.width, len(prompt))
            self.awaited[uid, start] = window

    def keep(self, windows: tuple[tuple[int, int], ...], values: Features) -> None:
        """Stores values of awaited windows, as far as max_bytes allows.

        Raises ValueError when a single window exceeds max_bytes.
        """
        found = {row: self.awaited.pop(key, None) for row, key in enumerate(windows)}
        new = {row: window for row, window in found.items() if window}
        sizes = {window: self.store.bytes_of(window, values) for window in new.values()}
        limit = self.config.max_bytes
        if sizes and max(sizes.values()) > limit:
            raise ValueError(
                f"a window of {self.width} positions takes {max(sizes.values())} bytes, the replay "
                f"may have {limit}"
            )
        stay = choice.within(self.held | sizes, limit)
        self.drop([window for window in self.held if window not in stay])
        new = {row: window for row, window in new.items() if window in stay}
        self.store.put(new, values, limit)
        self.held |= {window: sizes[window] for window in new.values()}

    def drop(self, windows: list[Window]) -> None:
        """Drops stored windows."""
        self.store.drop(windows)
        for window in windows:
            del self.held[window]

    def sample(self, draw: int, rows: int, row_tokens: int, held_out: bool = False) -> Batch | None:
        """The batch of one micro-step: R = rows packed rows of T = row_tokens tokens, on the group's devices.

        `held_out`: drawn from the held-out sequences, all windows with equal weight. A function of seed, step, group,
        `draw` and the stored windows; None when there are none. Features and states have the dtype and the shardings of
        the harvest; without states, the features serve as states. See windows.weights and windows.draw.
        """
        held = sorted(
            (one for one in self.held if self.is_held_out(one) == held_out),
            key=lambda one: (one.step, one.uid, one.start),
        )
        random = np.random.default_rng([self.config.seed, DRAWS, self.step, self.group, draw])
        answers = (list(self.answers.get(step, {}).values()) for step in (self.step, self.step - 1))
        weights = np.ones(len(held)) if held_out else choice.weights(held, self.step, *answers)
        pieces = choice.draw(held, weights, rows * row_tokens, random)
        if not pieces:
            return None
        if not held_out:
            self.drawn += sum(piece.size for piece in pieces)
            self.aged += sum(piece.size * (self.step - piece.window.step) for piece in pieces)
        return self.assemble(pieces, rows, row_tokens)

    def is_held_out(self, window: Window) -> bool:
        """Whether the window's sequence is for evaluation only: a function of seed, RL step and uid."""
        parts = window.uid * 0x9E3779B1 ^ window.step * 0x85EBCA77 ^ self.config.seed * 0xC2B2AE3D
        share = self.config.held_out
        return share > 0 and (parts >> 8 & 0xFFFF) % share == 0

    def assemble(self, pieces: Sequence[Piece], rows: int, row_tokens: int) -> Batch:
        """The packed batch of pieces of stored windows. Raises ValueError for more tokens than R x T."""
        placed = choice.place(pieces, rows, row_tokens)
        batch = drafter_batch.make_batch(choice.packed(placed, rows, row_tokens), self.mesh)
        values = self.store.gather(placed, rows, row_tokens)
        states = values.features if values.states is None else values.states
        return batch.replace(features=values.features, states=states)

    def metrics(self) -> dict[str, float]:
        """Stored tokens and bytes, and the mean age in RL steps of the tokens drawn in this step, if any."""
        found = {
            "drafter/replay_tokens": float(sum(window.size for window in self.held)),
            "drafter/replay_bytes": float(sum(self.held.values())),
        }
        return found | ({"drafter/replay_age": self.aged / self.drawn} if self.drawn else {})
