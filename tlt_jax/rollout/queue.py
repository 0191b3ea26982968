"""Who decodes which sample: whole prompts from a queue, then single waiting samples; knows no device and no clock."""

from __future__ import annotations

from dataclasses import dataclass

from tlt_jax.distributed.board import Board


@dataclass(frozen=True)
class WorkQueue:
    """The queue of one rollout: `prompts` prompts of `samples` samples each, on the counters below `scope`."""

    board: Board
    scope: str
    prompts: int
    samples: int

    def claim(self) -> int | None:
        """The next prompt that nobody has, or None."""
        if self.board.get(f"{self.scope}/claimed") >= self.prompts:
            return None
        index = self.board.increment(f"{self.scope}/claimed") - 1
        return index if index < self.prompts else None

    def take(self, prompt: int, count: int) -> list[int]:
        """Up to `count` samples of a prompt that nobody has started; they are started now."""
        end = self.board.increment(f"{self.scope}/started/{prompt}", count)
        return list(range(min(end - count, self.samples), min(end, self.samples)))

    def started(self, prompt: int) -> int:
        """How many samples of a prompt are started."""
        return min(self.board.get(f"{self.scope}/started/{prompt}"), self.samples)

    def steal(self) -> tuple[int, int] | None:
        """A single sample that its group has not started, or None when there is none."""
        for prompt in range(min(self.board.get(f"{self.scope}/claimed"), self.prompts)):
            if self.started(prompt) < self.samples:
                for sample in self.take(prompt, 1):
                    return prompt, sample
        return None

    def close(self) -> None:
        """Forgets this rollout's counters."""
        self.board.delete(self.scope + "/")
