"""When a run drafts, how much faster that is, and why it does not, in words; knows only measured chunks and decisions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from tlt_jax.rollout.interface import RolloutEngine
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.tuner.interface import Measurement, State as TunerState

LEAST = 0.05  # share of a step's tokens from drafting rounds above which the step drafts
PATIENCE = 3  # steps in a row after which what cannot be measured is said without a number


class DraftingWords:
    """Says once when a run of `steps` steps begins or ceases to draft; explored strategies do not count.

    `plain`: measured seconds of a plain round, by batch and cache slots.
    """

    def __init__(self, steps: int):
        self.patience = min(PATIENCE, steps)
        self.plain: dict[tuple[int, int], float] = {}
        self.is_drafting, self.since = False, 0  # since which step; 0: no step was seen
        self.said: bool | None = None  # what was said last, None: nothing

    def after(self, step: int, measurements: Sequence[Measurement], reason: str) -> str:
        """What to say after a step; empty when nothing changed. `reason`: why it does not draft, if it does not."""
        drafted = [one for one in measurements if one.strategy != PLAIN]
        tokens = sum(one.tokens for one in drafted if not one.is_exploring)
        share = tokens / max(sum(one.tokens for one in measurements), 1)
        self.learn(measurements)
        if (share >= LEAST) != self.is_drafting or not self.since:
            self.is_drafting, self.since = share >= LEAST, step
        if self.is_drafting == self.said:
            return ""
        is_lasting = step - self.since + 1 >= self.patience
        gain = self.gain(drafted)
        if not is_lasting and not (self.is_drafting and gain):
            return ""
        is_first, self.said = self.said is None, self.is_drafting
        if not self.is_drafting:
            return f"not drafting{'' if is_first else f' since step {self.since}'}: {reason}"
        how = f"{gain:.1f} times as fast as plain decoding" if gain else accepted(drafted)
        return f"drafts from step {self.since}: {how}, {share:.0%} of the tokens"

    def learn(self, measurements: Sequence[Measurement]) -> None:
        """Updates the seconds of plain rounds."""
        seconds, rounds = Counter(), Counter()
        for one in measurements:
            if one.strategy == PLAIN and one.is_timed:
                seconds[one.batch, one.slots] += one.seconds
                rounds[one.batch, one.slots] += one.rounds
        self.plain |= {shape: seconds[shape] / rounds[shape] for shape in seconds}

    def gain(self, drafted: Sequence[Measurement]) -> float:
        """Seconds of as many tokens in plain rounds over the measured seconds; 0 when no chunk has both.

        A chunk of plain rounds with as many live rows needs as many rounds as a row got tokens.
        """
        plain = measured = 0.0
        for one in drafted:
            if one.is_timed and (one.batch, one.slots) in self.plain:
                rounds = one.tokens / one.row_rounds * one.rounds
                plain += rounds * self.plain[one.batch, one.slots]
                measured += one.seconds + one.catch_up
        return plain / measured if measured else 0.0


def accepted(drafted: Sequence[Measurement]) -> str:
    """The accept length, where no speed is known."""
    tokens, rounds = (
        sum(getattr(one, name) for one in drafted) for name in ("tokens", "row_rounds")
    )
    return f"{tokens / rounds:.1f} tokens a round"


def reason(engine: RolloutEngine, tuner: TunerState, rollout: RolloutResult) -> str:
    """Why a rollout did not draft, from the tuner's decisions."""
    if engine.tuner.has_fixed_policy:
        plain = Counter(one.reason for one in rollout.measurements if one.strategy == PLAIN)
        return plain.most_common(1)[0][0] if plain else ""
    if not engine.tuner.usable(tuner, 1, 1):
        return "no drafter is trained"
    if rollout.stats["pool_programs"] or engine.cost_table:
        return "plain decoding is expected to be as fast"
    return "its programs cost more than the rest of this run can gain"
