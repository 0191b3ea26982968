"""A table of seconds of programs: read from CSV, interpolated with an uncertainty.

Rounds are predicted by the tuner's cost model (tuner.cost_model): a linear model in named terms, fitted on the table's
rounds, times the residual of the nearest rows. Where attention was measured apart, the model is one of the rest of a round.
Other programs are linear in their tokens. No JAX.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import NamedTuple

import numpy as np

from tlt_jax.errors import DataError
from tlt_jax.spec_decode.strategy import LEARNED, NGRAM, PLAIN, Strategy, name, parse
from tlt_jax.tuner import cost_model, make
from tlt_jax.tuner.interface import Cell

COLUMNS = (
    "program", "rows", "slots", "held", "strategy", "drafter", "tokens", "seconds", "source", "note",
)  # fmt: skip
# The programs, with the columns that each needs besides `seconds` and `source`.
PROGRAMS: Mapping[str, tuple[str, ...]] = {
    "round": ("rows", "slots", "strategy"),
    "attention": ("rows", "held", "strategy"),
    "update": ("tokens",),
    "drafter_update": ("tokens",),
    "micro_step": ("tokens",),
    "publish": (),
    "reward": (),
    "save": (),
    "other": (),
    "begin": (),
    "host": (),
    "compile": ("strategy",),
}
MEASURED, ESTIMATE, LITERATURE = SOURCES = ("measured", "estimate", "literature")
# Samples that a row counts as in the fit: a measured one is a median of many rounds.
SAMPLES = {MEASURED: 9, ESTIMATE: 1, LITERATURE: 1}
UNITS = """\
## seconds: of one call; of one decoding round for `round`; of compiling one chunk of this strategy for `compile`
## rows: sequences of the batch. slots: cache slots of a row. held: tokens that a row holds on average, where attention reads
## no more than these; empty where it reads all slots. tokens: of a call on one data group. strategy: off, depth_topk_nodes
## attention: what reading the cache takes of a round, in all layers, where it was measured apart
## begin: from the start of a rollout to its first program. host: from a decision to the start of its program on an idle device
## source: measured, estimate or literature
"""
CPU = "cpu"  # the fact `device` of a table of CPU devices
# The fact of rounds that capture features for a learned drafter.
FEATURES, CAPTURED = "features", "captured"
FIXED = 0.05  # prior share of a call's seconds that does not grow with its tokens
APART = 0.25  # standard error of log seconds of a call that is unlike the only row of its program
DRAFTERS = ("ngram", "eagle", "eagle3", "dflash", "dflash2", "dspark")
# Priors of attention: of a node, in seconds of a token; of what does not grow with the tokens, in those of the mean tokens.
NODE, LAUNCH = 0.1, 0.2


class CostRow(NamedTuple):
    """A row of the table; numbers that its program does not have are 0. `held`: 0 when all slots are read."""

    program: str
    seconds: float
    source: str
    rows: int = 0
    slots: int = 0
    held: float = 0.0
    strategy: Strategy = PLAIN
    drafter: str = ""
    tokens: float = 0.0
    note: str = ""

    @property
    def read(self) -> float:
        """Tokens of a row that attention reads in a round."""
        return self.held or self.slots


class Attention(NamedTuple):
    """Seconds of a row in all layers, for each token that it holds (`token`) and, on top, for each of its nodes (`node`)."""

    token: float
    node: float

    def slope(self, batch: int, nodes: int) -> float:
        """Seconds of a round for each token that each of its `batch` rows holds."""
        return batch * (self.token + self.node * nodes)


@dataclass(frozen=True, eq=False)
class CostTable:
    """The rows of a table, and `facts` of its head (such as device and policy). `node`: prior cost of a node, in rounds.

    `networks`: of policy and drafter.
    """

    rows: tuple[CostRow, ...]
    facts: Mapping[str, str] = field(default_factory=dict)
    node: float = 1 / 200
    networks: cost_model.Networks = cost_model.DENSE

    def of(self, program: str) -> list[CostRow]:
        """The rows of a program."""
        return [row for row in self.rows if row.program == program]

    @cached_property
    def reads_held(self) -> bool:
        """Whether attention reads only the tokens that a row holds."""
        return any(row.held for row in self.of("round"))

    @cached_property
    def attention(self) -> Attention | None:
        """What attention takes of a round; None where it was not measured apart.

        What does not grow with the tokens (launches) belongs to the rest of the round.
        """
        rows = self.of("attention")
        if not rows:
            return None
        cases = [(row.rows * row.held, row.strategy.nodes, row.seconds) for row in rows]
        read_C, nodes_C, seconds_C = np.array(cases, float).T
        terms_CF = np.stack([np.ones_like(read_C), read_C, read_C * nodes_C], axis=1)
        units = np.array([LAUNCH * read_C.mean(), 1.0, NODE])
        noise_C = np.full(len(rows), cost_model.WARM_NOISE)
        _, token, node = cost_model.fit(terms_CF, seconds_C, noise_C, units)
        return Attention(float(token), float(node))

    @cached_property
    def cells(self) -> dict[str, dict]:
        """The rounds as cells of the tuner's cost model; the slots of a cell are the tokens that are read.

        Where attention was measured apart, the cells have the seconds of the rest of a round, which reads none.
        """
        found: dict[str, dict] = {}
        for row in self.of("round"):
            read, seconds = round(row.read), row.seconds
            if self.attention:
                seconds -= read * self.attention.slope(row.rows, row.strategy.nodes)
                read = 0
            key = f"{row.rows}/{read}/{name(normal(row.strategy, row.drafter))}"
            cell = found.setdefault(key, {"warm": [], "cold": [], "age": 0})
            cell["warm"] += [seconds] * SAMPLES[row.source]
        return found

    @cached_property
    def weights(self) -> np.ndarray:
        """Weights [F] of the terms of a round, in seconds; see cost_model.fit_weights."""
        return cost_model.fit_weights(self.cells, self.node, self.networks)

    @cache  # noqa: B019 (a command has one table)
    def shape(self, batch: int, strategy: Strategy) -> tuple[float, float, float]:
        """Seconds of a round that reads no cache, seconds for each token that a row holds, standard error of log seconds.

        The residual is that of the row of this batch and strategy, else of the nearest rows; see cost_model.residual.
        """
        arm, at = normal(strategy), 0
        if not self.attention:
            rounds = self.of("round")
            alike = [one for one in rounds if (one.rows, normal(one.strategy, one.drafter)) == (batch, arm)]  # fmt: skip
            read = sorted(round(one.read) for one in alike or rounds)
            at = read[len(read) // 2]
        cell = Cell(batch, at, arm)
        logs, errors = cost_model.predict(self.cells, [cell], self.weights, self.networks)
        seconds, error = math.exp(float(logs[0])), float(errors[0])
        if self.attention:
            return seconds, self.attention.slope(batch, strategy.nodes), error
        empty, filled = (
            float(np.array(cost_model.described(batch, read, arm, self.networks)[cost_model.TERMS]) @ self.weights)
            for read in (0, at)
        )  # fmt: skip
        scale = seconds / filled
        return scale * empty, scale * ((filled - empty) / at), error

    def round_seconds(self, batch: int, slots: int, strategy: Strategy, held: float) -> float:
        """Seconds of a round of `batch` rows that hold `held` tokens on average, in a cache of `slots` slots."""
        fixed, each, _ = self.shape(batch, strategy)
        return fixed + each * (held if self.reads_held else slots)

    @cache  # noqa: B019 (a command has one table)
    def seconds(self, program: str, tokens: float = 0.0) -> float:
        """Seconds of a call with this many tokens; 0 for a program without rows."""
        rows = self.of(program)
        if not rows:
            return 0.0
        if "tokens" not in PROGRAMS[program]:
            return float(np.median([row.seconds for row in rows]))
        tokens_C, seconds_C = np.array([(row.tokens, row.seconds) for row in rows]).T
        fixed, each = self.line(program)
        ratios = seconds_C / (fixed + each * tokens_C)
        nearest = ratios[np.argmin(np.abs(np.log(tokens_C / max(tokens, 1.0))))]
        return float(nearest * (fixed + each * tokens)) if tokens else 0.0

    def error(self, program: str) -> float:
        """Standard error of the log seconds of a program's calls: of its residuals around a line in its tokens.

        Infinite for a program without rows.
        """
        rows = self.of(program)
        if len(rows) < 2:
            return APART if rows else math.inf
        tokens_C, seconds_C = np.array([(row.tokens, row.seconds) for row in rows]).T
        fixed, each = self.line(program) if tokens_C.any() else (np.median(seconds_C), 0.0)
        return float(np.std(np.log(seconds_C / (fixed + each * tokens_C))))

    def line(self, program: str) -> tuple[float, float]:
        """Seconds of a call without tokens, and of each token."""
        tokens_C, seconds_C = np.array([(row.tokens, row.seconds) for row in self.of(program)]).T
        terms_CF = np.stack([np.ones_like(tokens_C), tokens_C], axis=1)
        noise_C = np.full(len(tokens_C), cost_model.WARM_NOISE)
        units = np.array([FIXED * tokens_C.mean(), 1.0])
        fixed, each = cost_model.fit(terms_CF, seconds_C, noise_C, units)
        return float(fixed), float(each)

    def sources(self, program: str) -> str:
        """The sources of a program's rows, as text; "" without rows."""
        return ", ".join(dict.fromkeys(row.source for row in self.of(program)))


def normal(strategy: Strategy, drafter: str = "") -> Strategy:
    """The strategy with its drafter by cost: n-grams, or one that runs a network."""
    if strategy == PLAIN:
        return PLAIN
    is_ngram = NGRAM in (strategy.drafter, drafter)
    return Strategy(strategy.depth, strategy.topk, strategy.nodes, NGRAM if is_ngram else LEARNED)


def read(path: Path, drafter: str = "") -> CostTable:
    """The table in a file; of rounds that draft only those of this kind of `drafter` ("": any), and of n-grams.

    Raises DataError, with file and line, for an unknown program or column, a missing number, or a table without rounds.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: no cost table can be read there: {error}") from error
    lines = text.splitlines()
    head = [line for line in lines if line.startswith("#") and not line.startswith("##")]
    found = csv.DictReader([line for line in lines if line and not line.startswith("#")])
    unknown = [one for one in found.fieldnames or () if one not in COLUMNS]
    if unknown or not found.fieldnames:
        what = f"unknown column {unknown[0]!r}" if unknown else "no head"
        raise DataError(f"{path}: {what}: the columns are {', '.join(COLUMNS)}")
    rows = [parse_row(path, number, entry) for number, entry in enumerate(found, 1)]
    kept = [row for row in rows if not drafter or row.drafter in ("", NGRAM, drafter)]
    pairs = [line[1:].split(":", 1) for line in head if ":" in line]
    facts = {name.strip(): value.strip() for name, value in pairs}
    table = CostTable(tuple(kept), facts, make.node_cost(facts.get("device") == CPU))
    if not any(row.strategy == PLAIN for row in table.of("round")):
        raise DataError(f"{path}: no plain round: add a row with program round and strategy off")
    if len({bool(row.held) for row in table.of("round")}) > 1:
        raise DataError(
            f"{path}: some rounds have `held` and others not: give it to all, or to none"
        )
    if table.attention and not table.reads_held:
        raise DataError(f"{path}: attention was measured apart, and rounds have no `held`: give it")
    for row in table.of("round") if table.attention else ():
        taken = row.read * table.attention.slope(row.rows, row.strategy.nodes)
        if taken >= row.seconds:
            raise DataError(
                f"{path}: a round of {row.rows} rows takes {row.seconds:g} s, and its attention {taken:.3g} s: measure again"
            )
    return table


def parse_row(path: Path, number: int, entry: Mapping[str, str | None]) -> CostRow:
    """A row from its texts. Raises DataError."""
    where = f"{path}, row {number}"
    program, source, drafter = (entry.get(one) or "" for one in ("program", "source", "drafter"))
    kinds = {
        "program": (program, PROGRAMS),
        "source": (source, ("", *SOURCES)),
        "drafter": (drafter, ("", *DRAFTERS)),
    }
    for kind, (given, names) in kinds.items():
        if given not in names:
            use = ", ".join(filter(None, names))
            raise DataError(f"{where}: unknown {kind} {given!r}: use one of {use}")
    if None in entry:
        raise DataError(f"{where}: more values than columns: quote a note with commas")
    for column in (*PROGRAMS[program], "seconds", "source"):
        if not entry.get(column):
            raise DataError(f"{where}: {program} without {column}: give it")
    columns = ("rows", "slots", "held", "tokens", "seconds")
    number_of = {one: positive(where, one, entry.get(one)) for one in columns}
    try:
        strategy = parse(entry.get("strategy") or "off")
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error
    return CostRow(
        program, number_of["seconds"], source, int(number_of["rows"]), int(number_of["slots"]),
        number_of["held"], strategy, drafter, number_of["tokens"], entry.get("note") or "",
    )  # fmt: skip


def positive(where: str, column: str, text: str | None) -> float:
    """The number in a column, 0 when it is empty. Raises DataError when it is not a finite number above 0."""
    if not text:
        return 0.0
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number > 0):
        raise DataError(f"{where}: {column} {text!r}: give a finite number above 0")
    return number


def text_of(rows: Sequence[CostRow], facts: Mapping[str, str]) -> str:
    """The table as text, which `read` reads back."""
    lines = [f"# {name}: {value}" for name, value in facts.items()]
    lines += [UNITS.rstrip("\n"), ",".join(COLUMNS)]
    for row in rows:
        values = {
            "rows": row.rows or "", "slots": row.slots or "", "held": f"{row.held:g}" if row.held else "",
            "strategy": name(row.strategy) if "strategy" in PROGRAMS[row.program] else "",
            "tokens": f"{row.tokens:g}" if row.tokens else "", "seconds": f"{row.seconds:.4g}",
            "note": f'"{row.note}"' if "," in row.note else row.note,
        }  # fmt: skip
        lines.append(",".join(str(values.get(one, getattr(row, one))) for one in COLUMNS))
    return "\n".join(lines) + "\n"
