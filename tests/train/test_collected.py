"""Whenever a step continues it has the scores of all processes, whenever one of them gets a stop signal."""

from __future__ import annotations

import threading
import time

import numpy as np

from tlt_jax.distributed.board import LocalBoard
from tlt_jax.distributed.job import Job
from tlt_jax.errors import Interrupted
from tlt_jax.rewards import Score
from tlt_jax.train import evaluation


class Slow:
    """A scorer whose scores arrive one after another."""

    def __init__(self, uids: list[int], seconds: float):
        self.uids, self.seconds = uids, seconds

    def collect(self, interrupted) -> dict[int, Score]:
        """As rewards.Scorer.collect."""
        found = {}
        for uid in self.uids:
            if interrupted():
                break
            time.sleep(self.seconds)
            found[uid] = Score(float(uid))
        return found


class Together(Job):
    """A process simulated by a thread: it gathers over the board."""

    def gather(self, data: bytes, wanted=None) -> list[bytes]:
        """As Job.gather, for all parts or none."""
        heard = self.meeting().heard(data.decode())
        return [heard[index].encode() * (wanted is None) for index in range(self.count)]


def test_scores_are_complete_whenever_a_step_continues():
    """60 steps of three processes; one is signalled at a moment from before the first score to after the last."""
    outcomes = []
    for seed in range(60):
        draw, board, found = np.random.default_rng(seed), LocalBoard(), {}
        signal_sent, signalled = threading.Event(), int(draw.integers(3))

        def run(
            index, draw=draw, board=board, found=found, signal_sent=signal_sent, signalled=signalled
        ):
            uids = [10 * index + i for i in range(3)]
            scorer = Slow(uids, 0.001 * (index + 1))
            job = Together(index, 3, board)
            try:
                scores = evaluation.collected(
                    job, scorer, lambda: index == signalled and signal_sent.is_set()
                )
                texts = evaluation.told_first(job, {uid: f"text {uid}" for uid in uids})
                found[index] = scores, texts
            except Interrupted:
                found[index] = None

        threads = [threading.Thread(target=run, args=(index,)) for index in range(3)]
        signal = threading.Timer(float(draw.uniform(0, 0.02)), signal_sent.set)
        [one.start() for one in [*threads, signal]]
        [one.join(60) for one in threads]
        signal.cancel()
        assert len(found) == 3, "no process failed"
        if found[0] is None:
            assert found == dict.fromkeys(range(3)), "all stop, or none"
        else:
            scores, texts = zip(*(found[index] for index in range(3)), strict=True)
            assert scores[1] == scores[2] == scores[0] and texts[1:] == ({}, {})
            assert texts[0] == {uid: f"text {uid}" for uid in scores[0]}
            assert sorted(scores[0]) == [0, 1, 2, 10, 11, 12, 20, 21, 22]
        outcomes.append(found[0] is None)
    assert 5 < sum(outcomes) < 55, "both outcomes occur"
