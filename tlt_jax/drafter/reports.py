"""Reports of the data groups of all processes on their idle training in an RL step; knows no device."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from tlt_jax.distributed.job import Job


class Trained(NamedTuple):
    """The training of a data group's copy of the drafter: `steps` micro-steps on `tokens` tokens.

    `depths`: the latest acceptance on held-out windows at every depth; empty when not measured.
    """

    group: int
    steps: int
    tokens: int
    depths: list[float]


@dataclass(frozen=True)
class Report:
    """The training of all data groups, in their order; how many of them failed; the metrics of their replays."""

    trained: list[Trained]
    broken: int
    replays: list[dict[str, float]]

    @property
    def is_failed(self) -> bool:
        """Whether groups failed and none trained."""
        return self.broken > 0 and not sum(self.tokens)

    @property
    def tokens(self) -> list[int]:
        """Tokens trained on, by data group."""
        return [one.tokens for one in self.trained]

    @property
    def seen(self) -> list[Trained]:
        """The groups that evaluated on held-out windows."""
        return [one for one in self.trained if one.depths]

    @property
    def depths(self) -> list[float]:
        """Held-out acceptance at every depth given the depths before, mean over the groups."""
        return np.mean([one.depths for one in self.seen], axis=0).tolist() if self.seen else []

    @property
    def training(self) -> dict[str, float]:
        """Steps and tokens of all groups, as metrics."""
        return {
            "drafter/steps": float(sum(one.steps for one in self.trained)),
            "drafter/tokens": float(sum(self.tokens)),
        }

    @property
    def metrics(self) -> dict[str, float]:
        """`training`, sums over the replays (of their age the mean), and the mean held-out acceptance of the groups."""
        found = self.training
        for name in {name for part in self.replays for name in part}:
            values = [part[name] for part in self.replays if name in part]
            found[name] = float(np.mean(values) if name.endswith("age") else np.sum(values))
        if self.seen:
            found["drafter/acceptance"] = self.depths[0]
        if sum(self.tokens):
            found["drafter/merge_weight_max"] = max(self.tokens) / sum(self.tokens)
        if self.broken:
            found["drafter/failed_groups"] = float(self.broken)
        return found


def exchanged(
    job: Job,
    trained: Sequence[Trained],
    broken: int,
    replays: Sequence[Mapping[str, float]],
) -> Report:
    """The report of all processes from each one's own part; a collective, which all call."""
    payload = json.dumps((trained, broken, replays)).encode()
    parts = [json.loads(part) for part in job.gather(payload)]
    return Report(
        sorted(Trained(*one) for every, *_ in parts for one in every),
        sum(broken for _, broken, _ in parts),
        [one for *_, many in parts for one in many],
    )
