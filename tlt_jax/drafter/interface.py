"""What idle drafter training works on, per data group: copies of the drafter and windows of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from tlt_jax.drafter.batch import Batch
from tlt_jax.drafter.recipe import DrafterState
from tlt_jax.rollout.events import Listener
from tlt_jax.rollout.request import RolloutRequest


class Copies(Protocol):
    """The data groups' copies of the drafter: merge.DeviceCopies on devices, simulated in virtual time."""

    def spread(self, state: DrafterState) -> dict[int, DrafterState]: ...

    def blank(self, group: int) -> DrafterState: ...

    def merged(self, copies: Mapping[int, DrafterState], tokens: Sequence[int]) -> DrafterState: ...


class Windows(Protocol):
    """What a data group trains on: replay.Replay has the windows of its answers, and is a Harvester too."""

    listen: Listener

    def begin(self, step: int, request: RolloutRequest) -> None: ...

    def sample(
        self, draw: int, rows: int, row_tokens: int, held_out: bool = False
    ) -> Batch | None: ...

    def metrics(self) -> dict[str, float]: ...
