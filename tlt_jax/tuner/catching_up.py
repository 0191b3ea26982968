"""What drafters take to learn of tokens that were decoded without them; knows neither choices nor acceptance.

The state is JSON-able: {"groups": how many there are, "drafters": {drafter: {"rate": seconds by token
that it lacks (0 before one was measured), "caught": {group: clock of its last chunk in this rollout},
"spent": seconds of catching up, "seconds": those of the chunks it was for}}}; the latter two of chunks
that did not explore, with half the weight after each rollout. The clock counts rounds of all groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from tlt_jax.spec_decode.strategy import LEARNED, MERGED, PLAIN, Strategy
from tlt_jax.tuner.interface import Measurement

NOTHING = {"rate": 0.0, "caught": {}, "spent": 0.0, "seconds": 0.0}
NEWEST = 0.3  # weight of the newest catch-up in the rate


def begin() -> dict:
    """Nothing is known."""
    return {"groups": 1, "drafters": {}}


def drafter_of(arm: Strategy) -> str:
    """The drafter that must know the text: of merged trees the learned one."""
    return LEARNED if arm.drafter == MERGED else arm.drafter


def measured(known: Mapping, clock: int, seen: Measurement) -> dict:
    """With one chunk more, after which the clock is this."""
    known = {**known, "groups": max(known["groups"], seen.group + 1)}
    if seen.strategy == PLAIN:
        return known

    drafter, group = drafter_of(seen.strategy), str(seen.group)
    old = known["drafters"].get(drafter, NOTHING)
    rate = old["rate"]
    if seen.catch_up > 0:
        since = clock - seen.rounds - old["caught"][group] if group in old["caught"] else None
        newest = seen.catch_up / lacking(known, since, seen.batch, seen.slots)
        rate = rate + NEWEST * (newest - rate) if rate else newest
    new = {**old, "rate": rate, "caught": {**old["caught"], group: clock}}
    if not seen.is_exploring:
        new |= {"spent": old["spent"] + seen.catch_up, "seconds": old["seconds"] + seen.seconds}
    return {**known, "drafters": {**known["drafters"], drafter: new}}


def lacking(known: Mapping, since: float | None, batch: int, slots: int) -> float:
    """Tokens that a drafter lacks of so many rows, so many rounds after its last chunk (None: there was none)."""
    return batch * (slots if since is None else min(max(since / known["groups"], 1.0), slots))


def expected(
    known: Mapping, clock: int, arms: Sequence[Strategy], batch: int, slots: int
) -> np.ndarray:
    """Seconds of catching up before a chunk of each arm [A]."""

    def of(arm: Strategy) -> float:
        one = known["drafters"].get(drafter_of(arm)) if arm != PLAIN else None
        if one is None:
            return 0.0
        since = clock - max(one["caught"].values()) if one["caught"] else None
        return one["rate"] * lacking(known, since, batch, slots)

    return np.array([of(arm) for arm in arms])


def overhead(known: Mapping, arms: Sequence[Strategy]) -> np.ndarray:
    """log(1 + seconds of catching up / seconds of chunks) of each arm [A]; 0 once it is paid in this rollout."""

    def of(arm: Strategy) -> float:
        one = known["drafters"].get(drafter_of(arm)) if arm != PLAIN else None
        is_due = one is not None and not one["caught"] and one["seconds"] > 0
        return np.log1p(one["spent"] / one["seconds"]) if is_due else 0.0

    return np.array([of(arm) for arm in arms])


def renewed(known: Mapping) -> dict:
    """At the end of a rollout: the drafters know nothing of the next one."""
    drafters = {
        drafter: {**one, "caught": {}, "spent": one["spent"] / 2, "seconds": one["seconds"] / 2}
        for drafter, one in known["drafters"].items()
    }
    return {**known, "drafters": drafters}
