"""Answers of several turns: a partner hears what the policy says, and what it replies is appended to the sequence."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

import numpy as np

from tlt_jax.rollout.recorder import Emitted, Poll
from tlt_jax.rollout.request import RolloutRequest, block_size
from tlt_jax.spec_decode.decode_state import RUNNING, STOPPED, TRUNCATED, TURN

# Fewest tokens of a sequence before its reply, and how many times as many as the reply's program has. Computing these again
# takes 2 to 39 times as long as appending, and the program takes as long to compile as a prefill with its admission
# (benchmarks/results/replies.csv): of SmolLM2-135M, 10 replies to 180 tokens pay for it on two cores.
APPEND_FROM, MORE = 128, 1
# Tokens of the narrowest program, and most of one: their attention to the whole cache is computed at once.
FIRST, MOST = 16, 1024


def reply_width(tokens: int) -> int:
    """Tokens of the program that appends a reply: a power of 4 from 16."""
    width = FIRST
    while width < tokens:
        width *= 4
    return width


def append_size(replies: int, width: int) -> int:
    """Rows of the next program that appends replies of this width."""
    return block_size(replies, width, MOST)


def largest_append(capacity: int, slots: int) -> tuple[int, int] | None:
    """Rows and width of the largest of these programs in a cache of this size; None: it has room for none."""
    width = reply_width(MOST)
    while width >= FIRST and max(APPEND_FROM, MORE * width) + width > slots:
        width //= 4
    return (append_size(capacity, width), width) if width >= FIRST else None


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

        Short conversations are prefilled: of a small policy, too few replies pay for a program.
        """
        before, reply = len(self.text(uid)) - len(self.reply(uid)), len(self.reply(uid))
        width = reply_width(reply)
        fits = before + width <= slots and reply <= MOST
        return self.can_append and fits and before >= max(APPEND_FROM, MORE * width)

    def limit_of(self, uid: int) -> int:
        """Most tokens of a sequence."""
        prompt = uid // self.request.samples
        return len(self.request.prompts[prompt]) + self.request.max_new_tokens[prompt]

    def limit_at(self, uid: int, tokens: int) -> int:
        """Most tokens of a sequence whose next turn begins after so many."""
        limits = self.turn_tokens, self.partner.most(uid)
        return min([self.limit_of(uid), *(tokens + limit for limit in limits if limit)])
