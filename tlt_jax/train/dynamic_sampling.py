"""Dynamic sampling of an RL run (DAPO, arXiv 2503.14476, section 3.2): the prompts of a step, which count, and metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from tlt_jax.config import Config
from tlt_jax.data.dataset import Dataset
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.rewards import Scorer, scorer as scorers
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.rollout.selection import KeptPrompts, Selection
from tlt_jax.train.advantages import zero_variance

MEMORY = 0.5  # weight of the share of prompts that counted before, relative to a step's


class DynamicSampling:
    """What a run selects its prompts with; `share`, of prompts that counted in the last steps, affects time only.

    `lengths`: tokens of this process's answers of the rollout that runs, by uid.
    """

    def __init__(self, config: Config, scorer: Scorer):
        self.config, self.scorer, self.share = config, scorer, 1.0
        self.lengths: dict[int, int] = {}

    def arguments(self) -> dict[str, Any]:
        """The arguments of Engine.run that select prompts; none without rollout.max_prompts."""
        rollout, self.lengths = self.config.rollout, {}
        if not rollout.max_prompts:
            return {}
        return {"selection": Selection(rollout.prompts, self.scores, counts, self.share)}

    def scores(self) -> dict[int, float]:
        """The new rewards of this process's answers, by uid, with the penalty of long ones."""
        news = scorers.penalized(self.config, self.scorer.news(), self.lengths)
        return {uid: score.value for uid, score in news.items()}

    def metrics(self, result: RolloutResult) -> dict[str, float]:
        """What the choice of a rollout's prompts took; learns the share of prompts that count."""
        if (choice := result.choice) is None:
            return {}
        self.share = MEMORY * self.share + (1 - MEMORY) * choice.counted / choice.tried
        begun = {
            uid // self.config.rollout.samples for one in result.decisions for uid in one.joining
        }
        kept = len(choice.prompts)
        return {
            "train/num_gen_batches": choice.tried / kept,
            "groups/tried": choice.tried,
            "groups/replaced": 1 - kept / choice.tried,
            "groups/filled": kept - choice.counted,
            "groups/unused": sum(prompt >= choice.tried for prompt in begun),
            "perf/wasted_ratio": 1 - result.stats["kept_tokens"] / max(result.stats["tokens"], 1),
            "perf/score_wait_s": result.stats["score_wait"],
        }


def counts(scores: np.ndarray) -> bool:
    """Whether the scores float[samples] of a prompt's answers give a gradient."""
    return not zero_variance(scores[None])[0]


def start(config: Config, step: int, position: int | None) -> int:
    """The position in the data of the first prompt of the step after `step` steps; `position`: that of the run's state."""
    return step * config.rollout.prompts if position is None else position


def window(config: Config, dataset: Dataset, step: int, position: int | None) -> list[Prompt]:
    """The prompts that the step after `step` steps may try, in the order of the data."""
    rollout = config.rollout
    size = rollout.max_prompts or rollout.prompts
    return dataset.window(start(config, step, position), size)


def after(
    config: Config, step: int, position: int | None, choice: KeptPrompts | None
) -> int | None:
    """The position after the step that followed `step` steps: after the last prompt that its choice looked at.

    None while every step took rollout.prompts prompts.
    """
    if choice is None:
        return None if position is None else position + config.rollout.prompts
    return start(config, step, position) + choice.tried


def taken(prompts: Sequence[Prompt], choice: KeptPrompts | None) -> list[Prompt]:
    """Those of a step's window that it trains on."""
    return [*prompts] if choice is None else [prompts[index] for index in choice.prompts]


def filled(choice: KeptPrompts | None) -> str:
    """Text that says how many prompts without a gradient a step trained on; empty when it found enough others."""
    if choice is None or choice.counted == len(choice.prompts):
        return ""
    return (
        f"only {choice.counted} of {choice.tried} prompts have answers with different scores: "
        f"{len(choice.prompts) - choice.counted} of the step's {len(choice.prompts)} give no gradient"
    )
