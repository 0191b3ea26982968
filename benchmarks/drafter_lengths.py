"""Who is idle early has short answers: how much shorter are those that a drafter learns from than those of the whole step?

python benchmarks/drafter_lengths.py

Mean length of the answers that tokens are drawn from, over that of all answers of a step, when a share of a group's sequences
has ended; with and without those of the step before. Means over many steps of 64 sequences that begin together.
"""

from __future__ import annotations

import statistics

import numpy as np
from drafter_setup import answers, arguments
from result_table import ResultTable

from tlt_jax.drafter import windows

SEQUENCES, SHARES = 64, (0.25, 0.5, 0.75, 0.9)
COLUMNS = ("ended_share", "this_step_alone", "with_the_step_before")


def bias(seed: int, share: float) -> tuple[float, float]:
    """Length over that of the whole step, from this step's answers alone and with those of the step before."""
    steps = [[len(one.answer) for one in answers(SEQUENCES, 2 * seed + k)] for k in (0, 1)]
    ended = sorted(steps[1])[: int(share * SEQUENCES)]
    held = [
        windows.Window(step, uid, 0, 32, 32 + size, np.zeros(32 + size - 1, np.int32))
        for step, sizes in enumerate((steps[0], ended))
        for uid, size in enumerate(sizes)
    ]
    drawn = windows.weights(held, 1, ended, steps[0])
    now = np.array([one.step == 1 for one in held], float)
    size, answer = (
        np.array([getattr(one, name) for one in held], float) for name in ("learned", "answer")
    )
    whole = np.array(steps[1], float)
    expected = (whole**2).sum() / whole.sum()  # of the answer that a token is of
    alone, both = (
        float(tokens @ answer / tokens.sum() / expected) for tokens in (now * size, drawn * size)
    )
    return alone, both


def main() -> None:
    """The command; prints the table."""
    parser = arguments(__doc__)
    parser.add_argument("--steps", type=int, default=200)
    args = parser.parse_args()
    table = ResultTable(COLUMNS, args.csv)
    for share in SHARES:
        found = [bias(seed, share) for seed in range(args.steps)]
        table.row(share, *(statistics.mean(each) for each in zip(*found, strict=True)))


if __name__ == "__main__":
    main()
