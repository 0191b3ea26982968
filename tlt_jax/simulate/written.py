"""Which policy wrote the tokens of a rollout that continues over updates, and which prompts are complete; knows no clock."""

from __future__ import annotations

from collections import Counter, defaultdict

from tlt_jax.rollout.events import Dispatched, Emitted, Look, Retired
from tlt_jax.spec_decode.stopping import RUNNING


class Written:
    """The tokens that each prompt's answers have so far, by the policy's number of updates when they were decoded.

    `version`: updates of the policy that a group decodes with, for the chunks that are dispatched from now on. `complete`:
    prompts all of whose `samples` answers have ended, and that were not taken.
    """

    def __init__(self, samples: int, groups: int):
        self.samples = samples
        self.version = dict.fromkeys(range(groups), 0)
        self.tokens: defaultdict[int, Counter[int]] = defaultdict(Counter)
        self.ended: Counter[int] = Counter()
        self.complete: set[int] = set()
        self.dispatched: dict[tuple[int, int], int] = {}

    def listen(self, look: Look) -> None:
        """A listener of the rollout: the tokens that follow a retired chunk are those of its version."""
        version = 0
        for event in look.events:
            match event:
                case Dispatched(number):
                    self.dispatched[look.group, number] = self.version[look.group]
                case Retired(number):
                    version = self.dispatched.pop((look.group, number))
                case Emitted(uid):
                    self.add(
                        uid // self.samples, version, len(event.tokens), event.finish != RUNNING
                    )

    def add(self, prompt: int, version: int, tokens: int, has_ended: bool) -> None:
        """Adds tokens of an answer."""
        self.tokens[prompt][version] += tokens
        self.ended[prompt] += has_ended
        if self.ended[prompt] == self.samples:
            self.complete.add(prompt)

    def take(self, prompts: int) -> list[int]:
        """The complete prompts that were begun first: the oldest, as in tinker-cookbook's asynchronous training."""
        taken = sorted(self.complete)[:prompts]
        self.complete.difference_update(taken)
        return taken

    def ages(self, prompts: list[int], version: int) -> Counter[int]:
        """Tokens of these prompts by age, for the policy after `version` updates."""
        ages: Counter[int] = Counter()
        for prompt in prompts:
            for written, tokens in self.tokens.pop(prompt).items():
                ages[version - written] += tokens
        return ages
