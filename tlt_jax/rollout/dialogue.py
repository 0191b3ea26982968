"""Answers of several turns: a partner hears what the policy says, and what it replies is appended to the sequence."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from tlt_jax.rollout.recorder import Emitted, Poll
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.spec_decode.decode_state import RUNNING, STOPPED, TRUNCATED, TURN

APPEND_FROM = 256  # tokens of a sequence; fewer are prefilled in about the time of a round
MORE = 4  # times as many tokens as the reply has


def reply_width(tokens: int) -> int:
    """Tokens of the program that appends a reply: a power of 4 from 16."""
    width = 16
    while width < tokens:
        width *= 4
    return width


class Partner(Protocol):
    """Who replies to the policy; neither method waits."""

    def hear(self, uid: int, turn: np.ndarray, logprobs: np.ndarray) -> None:
        """Gets a turn of the policy in a sequence: its tokens int32[n], with the EOS or stop text, if one ended it."""

    def most(self, uid: int) -> int:
        """Most tokens of the next turn of a sequence, 0: any number."""

    def replies(self) -> dict[int, np.ndarray | None]:
        """What came since the last call: the tokens int32[n] to append, at least one; None: the sequence has ended."""


class Dialogue:
    """The conversations of the local groups of one rollout, shared by these groups.

    A sequence of which the policy has ended a turn keeps its row while no other sequence needs it. Once its reply is there,
    the reply alone is appended to it; of a sequence that has lost its row, or has few tokens (see `appends`), prompt, turns
    and replies are prefilled into a row again. Noise is a function of a sequence's key and of the
    position, so that tokens do not depend on when a reply comes. `turn_tokens`: most tokens of a turn; 0: those that are left.
    `can_append`: whether the target has Target.append.
    """

    def __init__(
        self,
        request: RolloutRequest,
        partner: Partner,
        turn_tokens: int = 0,
        can_append: bool = False,
    ):
        self.request, self.partner, self.turn_tokens = request, partner, turn_tokens
        self.can_append = can_append
        self.parts: dict[int, list[np.ndarray]] = {}  # of open sequences: turns and replies so far
        self.turns: dict[int, list[Emitted]] = {}  # the current turn
        self.known: dict[int, np.ndarray | None] = {}

    def listen(self, poll: Poll) -> None:
        """Passes turns that have ended on to the partner."""
        for event in poll.events:
            if not isinstance(event, Emitted):
                continue
            self.turns.setdefault(event.uid, []).append(event)
            if event.finish == RUNNING:
                continue
            events = self.turns.pop(event.uid)
            turn = np.concatenate([one.tokens for one in events])
            self.parts.setdefault(event.uid, []).append(turn)
            if event.finish == TURN:
                logprobs = np.concatenate([one.logprobs for one in events])
                self.partner.hear(event.uid, turn, logprobs)
            else:
                del self.parts[event.uid]

    def turned(self, new: Emitted, limit: int) -> Emitted:
        """The new tokens of a sequence with the limit of its turn: TURN after a stop, and at a limit below its whole one."""
        is_cut = new.finish == TRUNCATED and limit < self.limit_of(new.uid)
        return new._replace(finish=TURN) if is_cut or new.finish == STOPPED else new

    def take(self, uids: Collection[int]) -> dict[int, np.ndarray | None]:
        """The replies to these sequences that are there; None: it has ended."""
        self.known |= self.partner.replies()
        found = {uid: self.known.pop(uid) for uid in [*self.known] if uid in uids}
        for uid, reply in found.items():
            if reply is None or len(self.text(uid)) + len(reply) >= self.limit_of(uid):
                found[uid] = None
                del self.parts[uid]
            else:
                self.parts[uid].append(np.asarray(reply, np.int32))
        return found

    def text(self, uid: int) -> np.ndarray:
        """Prompt, turns and replies of an open sequence."""
        prompt = self.request.prompts[uid // self.request.samples]
        return np.concatenate([prompt, *self.parts[uid]])

    def reply(self, uid: int) -> np.ndarray:
        """The last reply to an open sequence."""
        return self.parts[uid][-1]

    def appends(self, uid: int, slots: int) -> bool:
        """Whether the last reply is appended alone, in a cache of up to so many slots, where the sequence has its row.

        A program of its own is worth compiling where it computes a few tokens instead of many.
        """
        before, width = (
            len(self.text(uid)) - len(self.reply(uid)),
            reply_width(len(self.reply(uid))),
        )
        fits = before + width <= slots
        return self.can_append and fits and before >= max(APPEND_FROM, MORE * width)

    def limit_of(self, uid: int) -> int:
        """Most tokens of a sequence."""
        prompt = uid // self.request.samples
        return len(self.request.prompts[prompt]) + self.request.max_new_tokens[prompt]

    def limit_at(self, uid: int, tokens: int) -> int:
        """Most tokens of a sequence whose next turn begins after so many."""
        limits = self.turn_tokens, self.partner.most(uid)
        return min([self.limit_of(uid), *(tokens + limit for limit in limits if limit)])
