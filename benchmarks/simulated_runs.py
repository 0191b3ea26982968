r"""How close are simulated steps to real ones? The steps of a real run, simulated with costs that another run recorded.

python benchmarks/simulated_runs.py RUN --costs COSTS ... [--case NAME] [--csv benchmarks/results/simulated_runs.csv]
python benchmarks/simulated_runs.py --scalars DIR [--csv FILE]    three runs that are known by their scalars alone

RUN and COSTS are run folders of `python -m tlt_jax.train`, of the same policy, machine and number of processes, for example
of two seeds. Costs are what `python -m tlt_jax.simulate --record COSTS ...` writes. The lengths of the answers and what the
drafters accepted are those of RUN; nothing else of RUN is used, and no constant is fitted to it. Every step of RUN is
simulated; programs compile, or are loaded from the compile cache, as long as in COSTS. Judged are the steps in which RUN
compiled nothing (perf/compiles 0).

With --scalars, DIR holds smollm2.yaml and smollm2_{plain,ngram,adaptive}.txt: every scalar of each step, one column a step
(benchmarks/whole_runs/scalars_text.py). Each run is simulated with the costs of the other two. Steps whose rollouts kept
all rows are judged with programs that compile in the background as there; they say when it is decided to compile for half the
rows. Steps that went on with half the rows are judged with the programs of these two sizes, compiled already.

Rows: a part of the step, its real and simulated seconds (medians of the judged steps), and simulated over real step by step:
median, lowest and highest. `step` is the whole step; `row rounds`, which are no seconds, are the rows of the batch in every
round of the rollout.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.common import results  # noqa: E402
from benchmarks.common.results import ResultTable  # noqa: E402
from benchmarks.whole_runs import runs, scalars_text  # noqa: E402
from tlt_jax.config import Config, load as loading  # noqa: E402
from tlt_jax.config.schema import (  # noqa: E402
    ADAPTIVE,
    NGRAM,
    NONE,
    RESOLVED,  # noqa: E402
)
from tlt_jax.errors import DataError  # noqa: E402
from tlt_jax.rollout.recorder import RolloutResult  # noqa: E402
from tlt_jax.simulate import acceptance, cost_table, fitted, lengths, record  # noqa: E402
from tlt_jax.simulate.acceptance import Acceptances  # noqa: E402
from tlt_jax.simulate.cost_table import CostTable  # noqa: E402
from tlt_jax.simulate.run import ARMS, SimulatedRun, Step, World  # noqa: E402
from tlt_jax.spec_decode.strategy import PLAIN, name as name_of  # noqa: E402

COLUMNS = (
    "case", "costs", "steps", "part", "real", "simulated", "simulated_over_real", "lowest", "highest",
)  # fmt: skip
# The parts of a simulated step, with the scalars of a real one. A rollout waits for what compiles; see `real_parts`.
PARTS = {
    "publish": ("update_weights",), "rollout": ("rollout",), "reward": ("reward",), "drafter": ("drafter",),
    "update": ("update", "old_log_prob"), "save": ("save_checkpoint",), "other": ("metrics", "other"),
}  # fmt: skip
ROWS = "row rounds"  # rows of the batch in every round, live or not
LEAST = 0.01  # share of a step's seconds from which a part has a row
SCALARS = ("plain", "ngram", "adaptive")

Parts = Mapping[str, float]  # of a step, by name: seconds, and ROWS


@dataclass(frozen=True)
class Comparison:
    """The judged steps of a run, real and simulated, by part."""

    case: str
    costs: str
    real: Mapping[int, Parts]
    simulated: Mapping[int, Parts]

    def parts(self) -> list[str]:
        """The step, its parts that take LEAST of it or more, and the row-rounds of the rollout."""
        whole = self.middle(self.real, "step")
        long = [part for part in PARTS if self.middle(self.real, part) > LEAST * whole]
        return ["step", *long, ROWS]

    def middle(self, steps: Mapping[int, Parts], part: str) -> float:
        """The median of a part."""
        return statistics.median(steps[step][part] for step in self.real)

    def ratios(self, part: str) -> list[float]:
        """Simulated over real, step by step."""
        return [self.simulated[step][part] / max(self.real[step][part], 1e-9) for step in self.real]

    def rows(self) -> Iterator[tuple]:
        """The rows of COLUMNS."""
        for part in self.parts():
            found = self.ratios(part)
            yield (
                self.case, self.costs, len(self.real), part, self.middle(self.real, part),
                self.middle(self.simulated, part), statistics.median(found), min(found), max(found),
            )  # fmt: skip


def real_parts(step: Mapping[str, float]) -> Parts:
    """The seconds of a real step by part, without what compiled."""
    found = {
        part: sum(
            step.get(f"timing_s/{name}", 0.0) - step.get(f"perf/compile_s/{name}", 0.0)
            for name in names
        )
        for part, names in PARTS.items()
    }
    return found | {"step": sum(found.values()), ROWS: step["perf/row_rounds"]}


class CountedRun(SimulatedRun):
    """A simulated run that keeps the row-rounds of its last rollout."""

    row_rounds = 0

    def report(self, result: RolloutResult) -> Step:
        self.row_rounds = result.stats["row_rounds"]
        return super().report(result)


def simulated_steps(config: Config, arm: str, world: World, count: int) -> dict[int, Parts]:
    """The first `count` steps of a simulated run by part, by step; a rollout without its waits for compilations."""
    run, found = CountedRun(config, ARMS[arm], world), {}
    for number in range(1, count + 1):
        step = run.step()
        seconds = {part: step.seconds.get(part, 0.0) for part in PARTS}
        seconds["rollout"] -= step.compiling
        found[number] = seconds | {"step": sum(seconds.values()), ROWS: run.row_rounds}
    return found


def arm_of(config: Config) -> str:
    """The simulated arm of a run."""
    names = {NONE: "plain", NGRAM: "ngram", ADAPTIVE: "adaptive"}
    return names.get(config.speculation.drafter, "frozen")


# Run folders


def recorded(folders: Sequence[Path], config: Config) -> CostTable:
    """The costs of runs as --record writes them and --costs reads them."""
    rows, facts = record.of_runs(folders)
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "costs.csv"
        path.write_text(cost_table.text_of(rows, facts), encoding="utf-8")
        return cost_table.read(path, drafter=config.drafter_training.kind)


def accepted(folder: Path, run: runs.Run) -> Acceptances:
    """What the drafters of a run accepted; the preset for one that drafted nothing, whose simulated tuner may try it."""
    has_drafted = any(
        chunk["strategy"] != name_of(PLAIN) for chunks in run.chunks.values() for chunk in chunks
    )
    return fitted.of_run(folder, acceptance.NEW) if has_drafted else acceptance.NEW


def of_folders(folder: Path, costs: Sequence[Path], case: str) -> Comparison:
    """The steps of a run folder, simulated with the costs of others. Raises DataError for a run that cannot be judged."""
    config = loading.read_resolved(folder / RESOLVED)
    if config.rollout.max_prompts:
        raise DataError(
            f"{folder} replaced prompts, and lengths of unused answers are not kept: judge a run with rollout.max_prompts 0"
        )
    real = runs.read_run(folder, 0.0)
    judged = {
        number: real_parts(step) for number, step in real.steps.items() if not step["perf/compiles"]
    }
    if not judged:
        raise DataError(f"{folder}: every step compiled: judge a longer run, or one from a warm compile cache")  # fmt: skip
    count = max(real.steps)
    world = World(
        recorded(costs, config), lengths.recorded(folder), accepted(folder, real), count, config.mesh.data
    )  # fmt: skip
    simulated = simulated_steps(config, arm_of(config), world, count)
    return Comparison(case or folder.name, ", ".join(one.name for one in costs), judged, simulated)


# Runs that are known by their scalars


def of_scalars(folder: Path) -> Iterator[Comparison]:
    """Each of three runs, simulated with the costs of the other two."""
    config = scalars_text.configuration(folder / "smollm2.yaml")
    found = {name: scalars_text.read(folder / f"smollm2_{name}.txt") for name in SCALARS}
    rollout = config.rollout
    batch = rollout.prompts * rollout.samples
    for name, scalars in found.items():
        others = [other for other in SCALARS if other != name]
        table = scalars_text.cost_table(config, [found[other] for other in others])
        count = len(scalars["timing_s/step"])
        answers = scalars_text.Summarised(scalars, rollout.max_new_tokens)
        rate = scalars.get("speculation/accept_rate@1")
        ngram = acceptance.NEW.ngram if rate is None else (float(statistics.median(rate)),)
        accepts = replace(acceptance.NEW, ngram=ngram)
        cold = World(table, answers, accepts, max(count, config.train.steps), 1)
        judged = scalars_text.quiet(scalars)
        halved = scalars["perf/row_rounds"] < 0.95 * batch * scalars["perf/rounds"]
        warm = replace(cold, compiles=False)
        for given, world, steps, what in (
            (config, cold, judged & ~halved, "all rows"),
            (compiled(config), warm, judged & halved, "half the rows once they fit"),
        ):
            real = {
                step + 1: real_parts(scalars_text.step(scalars, step))
                for step in steps.nonzero()[0].tolist()
            }
            simulated = simulated_steps(given, name, world, count)
            if real:
                yield Comparison(f"H200, SmolLM2 {name}, {what}", f"of {' and '.join(others)}", real, simulated)  # fmt: skip


def compiled(config: Config) -> Config:
    """The configuration with the sizes that the runs had compiled: all rows and half of them, with the most slots."""
    rollout = config.rollout
    batch = rollout.prompts * rollout.samples
    slots = config.data.max_prompt_tokens + rollout.max_new_tokens
    sizes = {"batch_buckets": [batch // 2, batch], "cache_buckets": [slots]}
    return replace(config, rollout=replace(rollout, **sizes))


def main(words: Sequence[str] | None = None) -> int:
    """The command; exit code 0."""
    parser = results.arguments(__doc__)
    add = parser.add_argument
    add("run", nargs="?", type=Path, metavar="RUN", help="the run that is judged")
    add("--costs", type=Path, nargs="+", metavar="COSTS", help="the runs whose costs are recorded")
    add("--case", default="", help="its name in the rows; default: the folder's")
    add("--scalars", type=Path, metavar="DIR", help="judges the three runs of a folder of text files instead")  # fmt: skip
    add("--steps", action="store_true", help="also prints every judged step")
    given = parser.parse_args(words)
    if bool(given.run) == bool(given.scalars) or bool(given.run) != bool(given.costs):
        parser.error("give RUN --costs COSTS, or --scalars DIR")
    found = of_scalars(given.scalars) if given.scalars else [of_folders(given.run, given.costs, given.case)]  # fmt: skip
    show(found, given)
    return 0


def show(found: Sequence[Comparison] | Iterator[Comparison], given: argparse.Namespace) -> None:
    """Prints the rows, and appends them to the CSV file."""
    table = ResultTable(COLUMNS, given.csv)
    for one in found:
        for row in one.rows():
            table.row(*row)
        for step, parts in one.real.items() if given.steps else ():
            each = (f"{part} {parts[part]:.3g} {one.simulated[step][part]:.3g}" for part in one.parts())  # fmt: skip
            print(f"step {step}: {', '.join(each)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
