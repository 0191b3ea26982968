"""What others use of a rollout engine: rollout.engine.Engine has it, and so may an engine of yours."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from jax.sharding import Mesh

from tlt_jax.distributed.job import Job
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.models.drafter import DrafterConfig, DrafterParams
from tlt_jax.rollout.executables.compilation import Executables
from tlt_jax.rollout.ngram_memory import NGramMemory
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.deterministic import CostTable
from tlt_jax.rollout.scheduler.payback import Payback
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.tuner.interface import State as TunerState, Tuner


class RolloutEngine(Protocol):
    """Decodes requests on data groups; rollout.engine.Engine documents the methods.

    `groups`: the mesh of each data group; `local_groups`: the indices of those of this process. `drafter`: the learned
    drafter while it is used, `learned` whether it is used or not. `lengths`: tokens of each answer of the last rollout.
    `payback`: what the run's rollouts decode, by decoding parameters; a missing key makes a new one.
    `cost_table`: of a deterministic rollout only.
    """

    model_config: ModelConfig
    mesh: Mesh
    groups: Sequence[Mesh]
    local_groups: Sequence[int]
    job: Job
    programs: Executables
    arms: Sequence[Strategy]
    tuner: Tuner
    basis: Mapping[str, Any]
    drafter: DrafterConfig | None
    learned: DrafterConfig | None
    drafter_kind: str
    batches: Sequence[int]
    capacity: int
    payback: defaultdict[DecodingParams, Payback]
    ngram_memory: NGramMemory | None
    lengths: Sequence[int]
    cost_table: CostTable | None

    cache_buckets: Callable[..., list[int]]
    request: Callable[..., RolloutRequest]
    run: Callable[..., tuple[RolloutResult, TunerState]]

    def publish(
        self, params: Params, drafter: DrafterParams | None = None
    ) -> dict[int, Weights]: ...

    def use_learned(self, is_used: bool) -> None: ...

    def learned_compile_cost(self) -> float: ...
