"""What the rollout of an RL step decodes."""

from __future__ import annotations

from collections.abc import Sequence

from tlt_jax.data.dataset import Prompt
from tlt_jax.keys import TRAIN_STREAM
from tlt_jax.rollout.interface import RolloutEngine
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.spec_decode.interface import Sampling
from tlt_jax.train.setup import Setup


def training_request(
    setup: Setup, engine: RolloutEngine, prompts: Sequence[Prompt], step: int, steps: int
) -> RolloutRequest:
    """The request of the rollout that follows `step` of a run of `steps` steps."""
    rollout = setup.config.rollout
    return engine.request(
        [prompt.tokens for prompt in prompts],
        rollout.samples,
        Sampling.of(rollout),
        rollout.max_new_tokens,
        stream=TRAIN_STREAM,
        step=step,
        rollouts_left=steps - step - 1,
    )
