"""Answers as people read them, and the kept ones of evaluations: written, read, compared. Imports no JAX."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from tlt_jax import atomic
from tlt_jax.errors import DataError

FOLDER = "evaluation"
WON, LOST, RIGHT, WRONG = KINDS = ("won", "lost", "right", "wrong")
# Fields of a Record that an evaluation has not, and those that a step has not.
OF_STEP = "uid", "group", "advantage", "logprob", "accepted", "turns"
OF_EVALUATION = "split", "sample", "is_correct"


@dataclass(frozen=True)
class Record:
    """An answer with its score, as people read it: a line of completions/STEP.jsonl or evaluation/STEP.jsonl.

    id: of the prompt's row, whose answer is `reference`; length: tokens; finish: stop, length or nonfinite; parts: the
    reward's terms, unweighted; failure: why there is no score, None when there is one. The others are None where they do
    not apply. Of a step: uid: number of the answer; group: number of its prompt, whose answers share a baseline; logprob:
    sum of the tokens' log-probabilities under the policy that gave the answer; accepted: how many of the tokens a drafter
    had proposed; turns: with an environment, the reward of each turn. Of an evaluation: split: of the row; sample: from 0, of
    each row; is_correct: whether the reward is at least eval.correct_at.
    """

    uid: int | None
    prompt: str
    completion: str
    reward: float
    length: int
    finish: str
    parts: Mapping[str, float] = field(default_factory=dict)
    failure: str | None = None
    id: str = ""
    reference: str = ""
    group: int | None = None
    advantage: float | None = None
    logprob: float | None = None
    accepted: int | None = None
    turns: list[float] | None = None
    split: str | None = None
    sample: int | None = None
    is_correct: bool | None = None


Row = tuple[str, str]  # split and id of a row


class Comparison(NamedTuple):
    """The rows that two evaluations share, by what became of them, and the numbers of rows that only one of them has."""

    rows: Mapping[str, list[Row]]
    only: tuple[int, int]


def path_of(run: str | Path, step: int) -> Path:
    """The file of a step."""
    return Path(run) / FOLDER / f"{step:06d}.jsonl"


def to_text(step: int, records: Sequence[Any]) -> str:
    """The content of a file of dataclasses; a Record has the fields that apply."""
    lines = ({"step": step, **asdict(one)}.items() for one in records)
    left = {*OF_STEP, *OF_EVALUATION}
    kept = (
        {name: one for name, one in line if one is not None or name not in left} for line in lines
    )
    return "".join(f"{json.dumps(line, ensure_ascii=False)}\n" for line in kept)


def keep(path: Path, step: int, answers: Sequence[Record]) -> None:
    """Writes the answers, in place of those of their splits that the file has, and keeps those of other splits."""
    new = {one.split for one in answers}
    others = [one for one in read(path) if one.split not in new] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic.write_text(path, to_text(step, [*others, *answers]))


def read(path: Path) -> list[Record]:
    """The answers of a file. Raises DataError, which names the line that is none."""
    names, answers = [one.name for one in fields(Record) if one.name not in OF_STEP], []
    for number, line in enumerate(atomic.lines(path), 1):
        try:
            found = json.loads(line)
            answers.append(Record(uid=None, **{name: found[name] for name in names}))
        except (ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path}:{number} is no answer of an evaluation: give a file that tlt eval wrote"
            ) from error
    return answers


def find(name: str) -> Path:
    """The file that a name means: a file, the last evaluation of a run (RUN), or that of a step (RUN:STEP).

    Raises DataError, with the steps that were evaluated.
    """
    if Path(name).is_file():
        return Path(name)
    run, step = (name, "") if Path(name).is_dir() else name.rpartition(":")[::2]
    kept = {int(path.stem): path for path in sorted(Path(run, FOLDER).glob("[0-9]*.jsonl"))}
    wanted = int(step) if step.isdecimal() else max(kept, default=-1) if not step else -1
    if not run or wanted not in kept:
        known = f"has evaluations of steps {', '.join(map(str, kept))}" if kept else "has none"
        raise DataError(
            f"{name}: no file, and no evaluation of a run ({run or name} {known}): give FILE, RUN or RUN:STEP; tlt eval --run "
            "RUN --step STEP makes one"
        )
    return kept[wanted]


def by_row(answers: Sequence[Record]) -> dict[Row, list[Record]]:
    """The answers to each row, by sample. Raises DataError for an id that several prompts have."""
    rows: dict[Row, list[Record]] = defaultdict(list)
    for one in sorted(answers, key=lambda one: one.sample):
        rows[one.split, one.id].append(one)
    for row, found in rows.items():
        if len({one.prompt for one in found}) > 1:
            raise DataError(
                f"several prompts have the id {' '.join(row)}, as older versions gave it to rows of files with the same name: "
                "evaluate again, with tlt eval --run RUN --step STEP"
            )
    return dict(rows)


def is_right(answers: Sequence[Record]) -> bool:
    """Whether at least half of the answers to a row are correct."""
    return 2 * sum(one.is_correct for one in answers) >= len(answers)


def compared(
    first: Mapping[Row, Sequence[Record]], second: Mapping[Row, Sequence[Record]]
) -> Comparison:
    """Rows that only the second has right (won), only the first (lost), both (right), or none (wrong).

    Raises DataError for evaluations that share no row, or that have different rows under one id.
    """
    shared = [row for row in first if row in second]
    if not shared:
        raise DataError("the two evaluations share no row: compare evaluations of the same data")
    for row in shared:
        one, other = first[row][0].reference, second[row][0].reference
        if one != other:
            raise DataError(
                f"row {' '.join(row)} has the reference answer {one!r} in one evaluation, and {other!r} in the other: compare "
                "evaluations of the same data"
            )
    rows: dict[str, list[Row]] = {kind: [] for kind in KINDS}
    for row in shared:
        before, after = is_right(first[row]), is_right(second[row])
        kind = RIGHT if before else WON
        rows[kind if after else LOST if before else WRONG].append(row)
    return Comparison(rows, (len(first) - len(shared), len(second) - len(shared)))


def sign_test(won: int, lost: int) -> float:
    """Probability that of won + lost fair coins at least as many are alike: whether the difference may be chance."""
    total, most = won + lost, max(won, lost)
    tail = sum(math.comb(total, heads) for heads in range(most, total + 1))
    return min(1.0, 2 * tail / 2**total)
