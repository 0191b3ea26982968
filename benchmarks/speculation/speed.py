"""How fast is decoding with a drafter, relative to plain decoding, with a number of live sequences?

python -m benchmarks.speculation.speed --policy DIR --drafter DIR [--drafter ngram] [--live 1,2,4] [--csv FILE]
    [--section.knob VALUE ...]
python -m benchmarks.speculation.speed --policy DIR --drafter DIR --tail    64 answers with a long tail

The first drafter races with every tuner and every strategy alone, the others with the first tuner, or without tuners with
every strategy alone; a turn decodes --waves times as many answers as are live, 8 at least. The measured answers were those to
long problems: --rollout.max_new_tokens 192 --data.task_args "{min_length: 12, max_length: 18, tail: 0.0}".
With --tail a turn is a rollout of 64 answers that starts full and ends with the few long ones; drafters race with tuners alone.
The measured answers: --rollout.max_new_tokens 470 --data.task_args "{min_length: 6, max_length: 30, tail: 2.0}".
python -m benchmarks.speculation.speed --policy DIR --drafter adaptive --rounds    what a round costs, with full rows
With --rounds no answer is decoded: rounds of each strategy (ngram:3_1_4, learned:3_1_4, ...) and plain ones take turns on rows
that are half full, and figures are medians over the turns; processor seconds are those of all threads. Without a directory the
learned drafter has random weights, which cost the same.
One sequence and many trees: --live 1 --tuners '' --alone 3_1_4,7_1_8,...

A turn in which anything was compiled, or in which a hypervisor gave more than 2 % of the processors to others, is abandoned and
repeated with other noise. A figure is the median over the turns of an arm over plain decoding in the same turn, with the
lower end of a 95 % interval of the mean. "all live" is the first part of a turn, prefills, admissions and the host's gaps
included, until no answer waits for a row and one ended; "whole" goes on to the last token.
"""

from __future__ import annotations

import argparse
import itertools
import math
import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from benchmarks.common import results
from benchmarks.common.engines import FullRows
from benchmarks.common.processes import ROOT
from benchmarks.common.results import ResultTable, listed
from benchmarks.common.timing import clocked, interleaved, lower_end
from tlt_jax.config import Config, load as configuration, schema
from tlt_jax.config.schema import NONE, Speculation
from tlt_jax.data import dataset as datasets, prompt_format
from tlt_jax.data.dataset import Prompt
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import Interrupted
from tlt_jax.keys import GENERATE_STREAM
from tlt_jax.models import drafter as drafters, from_config, hf_config
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.recorder import Emitted, Poll, Retired, RolloutResult
from tlt_jax.spec_decode.decode_state import RUNNING
from tlt_jax.spec_decode.interface import Sampling
from tlt_jax.spec_decode.strategy import PLAIN, parse

CONFIG = ROOT / "benchmarks" / "speculation.yaml"
TAIL, TAIL_BUCKETS = 64, (1, 2, 4, 8, 16, 32, 64)
TURNS = 15  # fewer give no interval
STOLEN = 0.02  # share of the processors that others may have during a turn
COLUMNS = (
    "arm", "all_live_tokens_per_s", "all_live_over_plain", "all_live_lower_95", "whole_tokens_per_s", "whole_over_plain",
    "whole_lower_95", "accept_length",
)  # fmt: skip
ROUND_COLUMNS = (
    "live",
    "strategy",
    "wall_ms",
    "processor_ms",
    "wall_over_plain",
    "processor_over_plain",
)
ROUNDS, SLOTS = 8, 512  # of a chunk, and of the rows, with --rounds
Turn = dict[str, tuple[RolloutResult, float]]  # by arm, with tokens per second while all are live


class Arm:
    """An engine with its weights, and the tuner's state between its rollouts; `live`: rows of its group, 0 as configured."""

    def __init__(
        self, config: Config, settings: Speculation, live: int = 0, buckets: Sequence[int] = ()
    ):
        rollout = replace(config.rollout, slots=live or config.rollout.slots)
        self.config = config = replace(config, speculation=settings, rollout=rollout)
        model = hf_config.read_config(from_config.policy_directory(config))
        mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
        stops = datasets.stop_rules(config, prompt_format.tokenizer_of(config))
        drafter, params = from_config.load_drafter(config, model, mesh)
        if drafter and params is None:
            vocab, dtype = drafter.draft_vocab_size, config.model.param_dtype
            ids = None if drafter.has_full_vocab else np.arange(vocab)
            params = drafters.init(drafter, mesh, jax.random.key(1), dtype, ids)
        sizes = list(buckets or [live]) if live else ()
        self.engine = Engine(config, model, mesh, stops, drafter, batch_buckets=sizes)
        self.weights = self.engine.publish(from_config.load_policy(config, model, mesh), params)
        self.tuner, self.chunks, self.is_hopeless = self.engine.tuner.init(), [], False

    def full_speed(self, begin: float, live: int) -> float:
        """Tokens per second of the last rollout, which started at `begin`, while this many sequences were live."""
        left, tokens = sum(ended for _, _, ended in self.chunks), 0
        for now, count, ended in self.chunks:
            tokens, left = tokens + count, left - ended
            if left < live:
                return tokens / (now - begin)
        return math.nan

    def decode(
        self,
        prompts: Sequence[Prompt],
        sampling: Sampling = Sampling(),  # noqa: B008
        step: int = 0,
        most: float = math.inf,
    ) -> RolloutResult:
        """One answer to each prompt; raises Interrupted when more than `most` processor seconds are `stolen`."""
        self.chunks, self.is_hopeless = [], False

        def listen(poll: Poll) -> None:
            """Notes when a chunk ended, its tokens, and the answers that ended in it."""
            for event in poll.events:
                if isinstance(event, Retired):
                    self.chunks.append([time.perf_counter(), event.tokens, 0])
                    self.is_hopeless |= stolen() > most
                if isinstance(event, Emitted):
                    self.chunks[-1][2] += event.finish != RUNNING

        limit, tokens = self.config.rollout.max_new_tokens, [prompt.tokens for prompt in prompts]
        request = self.engine.request(tokens, 1, sampling, limit, stream=GENERATE_STREAM, step=step)
        result, self.tuner = self.engine.run(
            request, self.weights, self.tuner, interrupted=lambda: self.is_hopeless, listeners=[listen]
        )  # fmt: skip
        return result


def stolen() -> float:
    """Processor seconds that a hypervisor gave to others so far; 0 where no system counts them."""
    path = Path("/proc/stat")
    return int(path.read_text().split()[8]) / os.sysconf("SC_CLK_TCK") if path.exists() else 0.0


def label(drafter: str) -> str:
    """A short name: the run of a drafter's directory, or ngram."""
    return Path(drafter).parent.parent.name if drafter != schema.NGRAM else drafter


@dataclass
class Measured:
    """An arm's rollouts in the turns that count, and their tokens per second while all are live."""

    results: list[RolloutResult] = field(default_factory=list)
    full: list[float] = field(default_factory=list)

    @property
    def whole(self) -> list[float]:
        """Tokens per second of the whole rollouts."""
        return [one.stats["tokens"] / one.stats["seconds"] for one in self.results]

    def accept_length(self) -> float:
        """Tokens of a drafting round of a sequence; 0 where nothing drafted."""
        chunks = [one for result in self.results for one in result.measurements]
        rounds = sum(one.row_rounds for one in chunks if one.strategy != PLAIN)
        return sum(one.stats["speculated_tokens"] for one in self.results) / max(rounds, 1)

    def cells(self, name: str, plain: Measured) -> list:
        """The cells of COLUMNS."""
        found: list = [name]
        for speeds, plain_speeds in ((self.full, plain.full), (self.whole, plain.whole)):
            ratios = np.divide(speeds, plain_speeds).tolist()
            found += [round(statistics.median(speeds), 1), statistics.median(ratios)]
            found.append(lower_end(ratios, TURNS))
        return [*found, self.accept_length()]


def race(
    config: Config, arms: Mapping[str, Speculation], prompts: Sequence[Prompt], live: int, turns: tuple[int, int],
    each: int, buckets: Sequence[int] = (),
) -> Iterator[list]:  # fmt: skip
    """The cells of COLUMNS of every arm; `turns`: untimed and timed ones; `each`: answers of a turn."""
    engines = {name: Arm(config, one, live, buckets) for name, one in arms.items()}
    measured = {name: Measured() for name in arms}
    turn, usual, cores = -turns[0], math.inf, os.cpu_count() or 1
    for step in itertools.count():
        chosen = [prompts[(max(turn, 0) * each + i) % len(prompts)] for i in range(each)]
        clock, before = time.perf_counter(), stolen()
        most = before + STOLEN * cores * usual if turn >= 0 else math.inf
        try:
            done = take_turn(engines, chosen, live, step, most)
        except Interrupted:
            print(f"turn {turn} was abandoned", file=sys.stderr, flush=True)
            continue
        seconds = time.perf_counter() - clock
        usual, theirs = min(usual, seconds), (stolen() - before) / seconds / cores
        compiled = sum(result.stats["compiles"] for result, _ in done.values())
        tell(turn, compiled, theirs, done)
        counts = not compiled and theirs <= STOLEN
        if turn >= 0 and counts:
            for name, (result, speed) in done.items():
                measured[name].results.append(result)
                measured[name].full.append(speed)
        turn += turn < 0 or counts
        if turn == turns[1]:
            break
    for name in arms:
        yield measured[name].cells(name, measured["plain"])


def take_turn(
    engines: Mapping[str, Arm], prompts: Sequence[Prompt], live: int, step: int, most: float
) -> Turn:
    """Every arm's rollout, and its speed while all are live; the order of the arms alternates."""
    done, order = {}, list(engines.items())
    for name, arm in order if step % 2 else order[::-1]:
        begin = time.perf_counter()
        result = arm.decode(prompts, step=step, most=most)
        done[name] = (result, arm.full_speed(begin, live))
    return done


def tell(turn: int, compiled: int, theirs: float, done: Turn) -> None:
    """Reports a turn on stderr."""
    taken = ", ".join(
        f"{name} {result.stats['seconds']:.2f} s ({speed:.1f})"
        for name, (result, speed) in done.items()
    )
    print(f"turn {turn}, {compiled} programs compiled, {theirs:.1%} stolen; whole (tokens/s while all are live): {taken}",
          file=sys.stderr, flush=True)  # fmt: skip


def rounds(
    config: Config, drafter: str, strategies: Sequence[str], prompts: Sequence[Prompt], live: int, turns: tuple[int, int]
) -> Iterator[list]:  # fmt: skip
    """The cells of ROUND_COLUMNS of every strategy, plain rounds first; `turns`: untimed and timed ones."""
    history = np.concatenate([prompt.tokens for prompt in prompts])
    arms = {"plain": (Speculation(NONE), PLAIN)}
    arms |= {
        text: (Speculation(drafter, "fixed", list(strategies)), parse(text)) for text in strategies
    }
    engines: dict[str, Arm] = {}
    calls = {}
    for name, (settings, strategy) in arms.items():
        arm = engines.setdefault(settings.drafter, Arm(config, settings, live))
        rows = FullRows(arm.engine, arm.weights[0], live, SLOTS, ROUNDS, strategy, history=history)
        calls[name] = partial(clocked, rows)
    found = interleaved(calls, turns[1], turns[0])
    for name, pairs in found.items():
        over = np.median(np.divide(pairs, found["plain"]), axis=0)
        yield [live, name, *(np.median(pairs, axis=0) / ROUNDS * 1000).tolist(), *over.tolist()]


def arms_of(args: argparse.Namespace) -> dict[str, Speculation]:
    """What races, by name."""
    texts, tuners, first = listed(args.strategies), listed(args.tuners), args.drafter[0]
    alone = listed(args.alone) if args.alone is not None else [] if args.tail else texts
    arms = {"plain": Speculation(NONE)}
    for drafter in args.drafter:
        for tuner in tuners if drafter == first else tuners[:1]:
            arms[f"{label(drafter)} {tuner}"] = Speculation(drafter, tuner, texts)
    for drafter in args.drafter if not tuners else [first]:
        for text in alone:
            arms[f"{label(drafter)} {text}"] = Speculation(drafter, "fixed", [text])
    return arms


def read(
    parser: argparse.ArgumentParser, argv: Sequence[str] | None
) -> tuple[argparse.Namespace, Config, list[Prompt]]:
    """The benchmark's own arguments, the configuration that the others change, and the prompts; prints the versions."""
    args, overrides = parser.parse_known_args(argv)
    given = ["--config", args.config, "--model.path", args.policy, "--mesh.data", "1"]
    given += ["--mesh.fake_devices", "0", "--data.eval_size", str(args.prompts)]
    config = configuration.parse([*given, *overrides])
    print(f"{results.versions()}, {jax.devices()[0].device_kind}")
    return args, config, datasets.load(config, prompt_format.tokenizer_of(config)).part()


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = results.arguments(__doc__)
    parser.add_argument("--config", default=str(CONFIG))
    parser.add_argument("--policy", required=True, help="model directory")
    parser.add_argument("--prompts", type=int, default=64, help="of the evaluation split")
    parser.add_argument("--strategies", default="2_1_3,3_1_4,5_1_6,4_2_8,6_4_16")
    parser.add_argument("--tuners", default="goodput,threshold,beg_mab", help="'' for none")
    drafters = {"action": "append", "required": True}
    parser.add_argument("--drafter", help="directory or ngram; may be given again", **drafters)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--warm-up", type=int, default=2, help="turns that are not timed")
    parser.add_argument(
        "--alone", help="strategies that race without a tuner too; default all, '' for none"
    )
    parser.add_argument("--live", default="1,2,4,8,16,32")
    parser.add_argument("--waves", type=int, default=2, help="answers of a turn per live sequence")
    parser.add_argument("--tail", action="store_true", help=f"{TAIL} answers, all at once")
    parser.add_argument("--rounds", action="store_true", help="what a round costs, with full rows")
    args, config, prompts = read(parser, argv)
    if args.rounds:
        table, turns = ResultTable(ROUND_COLUMNS, args.csv), (args.warm_up, args.turns)
        for live in map(int, listed(args.live)):
            for cells in rounds(
                config, args.drafter[0], listed(args.strategies), prompts, live, turns
            ):
                table.row(*cells)
        return 0
    table = ResultTable(("sequences" if args.tail else "live", *COLUMNS), args.csv)
    for live in [TAIL] if args.tail else map(int, listed(args.live)):
        each = TAIL if args.tail else max(args.waves * live, 8)
        buckets, turns = TAIL_BUCKETS if args.tail else (), (args.warm_up, args.turns)
        for cells in race(config, arms_of(args), prompts, live, turns, each, buckets):
            table.row(live, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
