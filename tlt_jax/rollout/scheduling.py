"""What an engine decides with: strategies and tuner, sizes to compile, and what its rollouts have decoded so far.

Knows no device: an engine on devices (rollout.engine) and one in virtual time (simulate.engine) decide alike.
"""

from __future__ import annotations

import itertools
import logging
from collections import defaultdict
from collections.abc import Sequence

import numpy as np

from tlt_jax.config import Config
from tlt_jax.distributed.job import Job
from tlt_jax.errors import ConfigError
from tlt_jax.models import drafter as drafters
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.rollout.buckets import FIRST_CACHE_BUCKET, bucket_width, doubling
from tlt_jax.rollout.scheduler import deterministic
from tlt_jax.rollout.scheduler.payback import Payback
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import name
from tlt_jax.tuner import cost_model, make

log = logging.getLogger(__name__)


class Scheduling:
    """The decisions' inputs of an engine with `groups` data groups.

    `drafter` is the configuration of the learned drafter while it is used, `learned` the same whether it is used or not;
    `cost_table`: of a deterministic rollout, whose decisions do not depend on a clock. Raises ConfigError for batch
    buckets that do not hold a group's sequences.

    Ascending `batch_buckets` and `cache_buckets`: the rows and cache slots to compile when that pays; by default powers of
    two and the rows of a group, and doubling from 256 to prompt + answer.
    """

    def __init__(
        self,
        config: Config,
        drafter: DrafterConfig | None,
        groups: int,
        is_cpu: bool,
        job: Job,
        batch_buckets: Sequence[int] = (),
        cache_buckets: Sequence[int] = (),
    ):
        self.config, self.job, self.group_count = config, job, groups
        self.drafter = self.learned = drafter
        self.drafter_kind = drafter.kind if drafter else config.speculation.drafter

        speculation = config.speculation
        arms, block = make.arms(speculation), drafters.block_pass(drafter)
        self.arms = make.within(arms, drafter.depth if drafter else None)
        if len(self.arms) < len(arms) and job.is_first:
            deep = ", ".join(name(arm) for arm in arms if arm not in self.arms)
            log.warning("%s: deeper than the drafter drafts in a round, so left out", deep)
        one_pass = cost_model.OnePass(*block) if block else None
        self.tuner = make.make_tuner(speculation, self.arms, is_cpu, one_pass)
        self.cost_table = None
        if config.rollout.deterministic:
            self.cost_table = deterministic.cost_table(make.node_cost(is_cpu), one_pass)

        self.capacity = config.rollout.slots or self.share(
            config.rollout.prompts, config.rollout.samples
        )
        self.batches, self.caches = batch_buckets or doubling(1, self.capacity), cache_buckets
        if self.batches[-1] < self.capacity:
            raise ConfigError(
                f"batch_buckets end at {self.batches[-1]}, and a data group decodes {self.capacity} sequences at "
                f"once: add {self.capacity}, or set rollout.slots {self.batches[-1]}"
            )
        self.rollouts = itertools.count()
        self.lengths: list[int] = []  # tokens of each answer of the last rollout
        self.payback: dict[DecodingParams, Payback] = defaultdict(Payback)

    def share(self, prompts: int, samples: int) -> int:
        """Sequences of one data group when whole prompts are dealt evenly."""
        return -(-prompts // self.group_count) * samples

    def cache_buckets(
        self, prompts: Sequence[np.ndarray], max_new_tokens: int | Sequence[int]
    ) -> list[int]:
        """Cache lengths to compile: those of the engine, and what these prompts need beyond it."""
        lengths, limit = (
            np.asarray([len(prompt) for prompt in prompts]),
            int(np.max(max_new_tokens)),
        )
        need = max(int(np.max(lengths + max_new_tokens)), bucket_width(int(lengths.max())))
        usual = self.config.data.max_prompt_tokens
        usual = max(usual + max(limit, self.config.rollout.max_new_tokens), bucket_width(usual))
        buckets = self.caches or doubling(FIRST_CACHE_BUCKET, usual)
        return [*buckets, *doubling(2 * buckets[-1], need)] if need > buckets[-1] else buckets
