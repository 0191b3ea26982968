"""A bounded host memory of answers by prompt, the source of n-gram drafts; affects speed, but no token."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import numpy as np

from tlt_jax.errors import ConfigError
from tlt_jax.spec_decode.ngram import LONGEST, MAX_MATCH, SEPARATOR

POOL = 2048  # tokens of other answers to the prompt that each sequence can search
CAPACITY = 4_000_000  # tokens of all remembered answers
MARGIN = 256  # slots that the cache of a sequence may have beyond its tokens


def check_longest(tokens: int) -> None:
    """Raises ConfigError when a sequence of `tokens` and its pool are longer than n-grams can search."""
    most = LONGEST - POOL - MARGIN
    if tokens > most:
        raise ConfigError(
            f"a sequence can have {tokens} tokens, and n-grams search {most} at most: lower data.max_prompt_tokens or "
            "max_new_tokens of rollout and eval, or set speculation.drafter to none"
        )


@dataclass
class Text:
    """An answer, possibly incomplete; uid None: from an earlier rollout."""

    uid: int | None
    parts: list[np.ndarray]

    @property
    def tokens(self) -> np.ndarray:
        if len(self.parts) > 1:
            self.parts = [np.concatenate(self.parts)]
        return self.parts[0]


class NGramMemory:
    """Answers by prompt, oldest first: those of earlier rollouts and of this one, finished or not.

    A text starts with the last `context` tokens of its prompt, so that an answer's first tokens have matches too. At most
    `capacity` tokens are stored (the least recently used prompts are dropped), from earlier rollouts `budget` per prompt.
    Without `keeps_earlier` answers of earlier rollouts are dropped, and equal prompts share no answers.
    """

    def __init__(
        self,
        budget: int,
        capacity: float,
        context: int = MAX_MATCH,
        keeps_earlier: bool = True,
    ):
        self.budget, self.capacity, self.context, self.size = budget, capacity, context, 0
        self.keeps_earlier = keeps_earlier
        self.by_prompt: OrderedDict[bytes, list[Text]] = OrderedDict()
        self.keys: list[bytes] = []
        self.begin((), 1)

    def begin(self, prompts: Sequence[np.ndarray], samples: int) -> None:
        """Starts a rollout of `samples` answers to each prompt int32[P]; keeps earlier answers with `keeps_earlier`."""
        if not self.keeps_earlier:
            self.by_prompt.clear()
            self.size, self.keys = 0, []
        for key in self.by_prompt.keys() & self.keys:  # the prompts of the last rollout
            texts = self.by_prompt[key]
            kept = [Text(None, [part.copy()]) for part in newest(texts, self.budget)]
            self.size += sum(len(text.tokens) for text in kept)
            self.size -= sum(len(text.tokens) for text in texts)
            self.by_prompt[key] = kept
        self.prompts, self.samples, self.begun = prompts, samples, set()
        self.keys = [self.key_of(index) for index in range(len(prompts))]

    def key_of(self, index: int) -> bytes:
        """The key of the answers to a prompt."""
        if not self.keeps_earlier:
            return index.to_bytes(8)
        return blake2b(np.asarray(self.prompts[index], np.int32).tobytes(), digest_size=16).digest()

    def write(self, uid: int, tokens: np.ndarray) -> None:
        """Appends tokens int32[n] to an answer, unless it was dropped; of a request that grows also to a new one."""
        for index in range(len(self.keys), len(self.prompts)):
            self.keys.append(self.key_of(index))
        key = self.keys[uid // self.samples]
        if uid not in self.begun:
            prompt = np.asarray(self.prompts[uid // self.samples], np.int32)
            start = prompt[max(len(prompt) - self.context, 0) :]
            self.begun.add(uid)
            self.by_prompt.setdefault(key, []).append(Text(uid, [start]))
            self.by_prompt.move_to_end(key)
            self.reserve(len(start))
        for text in self.by_prompt.get(key, ()):
            if text.uid == uid:
                text.parts.append(np.asarray(tokens, np.int32))
                self.reserve(len(tokens))

    def reserve(self, tokens: int) -> None:
        """Counts new tokens, and drops the least recently used prompts until they fit."""
        self.size += tokens
        while self.size > self.capacity:
            _, texts = self.by_prompt.popitem(last=False)
            self.size -= sum(len(text.tokens) for text in texts)

    def siblings(self, uids: Sequence[int | None]) -> np.ndarray:
        """int32 [B, budget]: for each row the newest texts of its prompt except its own, newest last; padded with SEPARATOR."""
        pools = np.full((len(uids), self.budget), SEPARATOR, np.int32)
        for row, uid in enumerate(uids):
            known = uid is not None and uid // self.samples < len(self.keys)
            texts = self.by_prompt.get(self.keys[uid // self.samples], ()) if known else ()
            end = self.budget
            for part in reversed(newest([text for text in texts if text.uid != uid], self.budget)):
                pools[row, end - len(part) : end] = part
                end -= len(part) + 1
        return pools


def newest(texts: Sequence[Text], budget: int) -> list[np.ndarray]:
    """The last texts, oldest first, that fit into `budget` tokens with separators between them; the first may be cut."""
    parts: list[np.ndarray] = []
    for text in reversed(texts):
        if budget <= 0:
            break
        parts.append(text.tokens[-budget:])
        budget -= len(parts[-1]) + 1
    return parts[::-1]
