"""The command `python -m tlt_jax.simulate`: what a run of many RL steps would take with and without drafting."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
from PIL import Image

from tlt_jax import atomic, cli
from tlt_jax.config import Config, load as loading
from tlt_jax.config.schema import RESOLVED
from tlt_jax.distributed import round_counts
from tlt_jax.errors import ConfigError, UserError
from tlt_jax.metrics import timeline
from tlt_jax.simulate import (
    acceptance,
    alternatives,
    cost_table,
    estimate,
    fitted,
    lengths,
    parallel,
    plot,
    record,
    report,
    run,
    sweep,
    what_if,
)
from tlt_jax.simulate.acceptance import Acceptances
from tlt_jax.simulate.alternatives import AHEAD, ALTERNATIVES
from tlt_jax.simulate.cost_table import CostTable
from tlt_jax.simulate.run import ARMS, Step, World

SHIPPED = Path(__file__).parent / "costs"
BASE = "h200_qwen2.5_7b"  # the measured table that estimates are scaled by
STEPS = 20  # when the configuration counts epochs


def arguments_of(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and those of the configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m tlt_jax.simulate",
        description=f"{cli.COMMANDS['simulate'].about} Further arguments are knobs: --section.knob VALUE.",
        allow_abbrev=False,
    )
    tables = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.csv")))
    add = parser.add_argument
    add("--config", metavar="FILE", help="YAML file, or the name of a shipped configuration")
    add("--costs", metavar="TABLE", default=BASE,
        help=f"seconds of programs: a CSV file, a shipped table ({tables}), or a device to estimate for "
        f"({', '.join(estimate.DEVICES)})")  # fmt: skip
    add("--counts", metavar="FILE", default="",
        help="of the rounds that python -m tlt_jax.plan --counts FILE compiled for the device of --costs")  # fmt: skip
    add("--lengths", metavar="FILE", default="",
        help=f"answers: a run's folder, a YAML file, or a preset ({', '.join(lengths.PRESETS)}); default: log-normal, 2 %% "
        "beyond rollout.max_new_tokens")  # fmt: skip
    add("--acceptance", metavar="FILE", default="",
        help="what drafters accept: a run's folder, a JSON file, acceptance.json of a drafter, or a preset "
        f"({', '.join(acceptance.PRESETS)}); default: new")  # fmt: skip
    add("--groups", metavar="N", type=int, default=0, help="data groups; default: mesh.data")
    add(
        "--steps",
        metavar="N",
        type=int,
        default=0,
        help=f"RL steps; default: train.steps, or {STEPS}",
    )
    add("--arms", metavar="A,B", default=",".join(ARMS),
        help=f"of {', '.join(ARMS)} (default: these), and what teams use instead of drafting: "
        f"{', '.join(ALTERNATIVES)}")  # fmt: skip
    add("--ahead", metavar="STEPS", type=float, default=AHEAD,
        help="of async and partial: prompts that begin beyond those of the step, in steps; default: 1")  # fmt: skip
    add("--json", metavar="FILE", help="writes every step")
    add(
        "--timeline",
        metavar="FILE",
        help="writes a picture (PNG) of the last rollout of the last arm",
    )
    add(
        "--sweep",
        metavar="groups=A..B",
        help="runs with A, 2 A, ... B data groups, and the same prompts; or KNOB=A,B,C: with these values of a knob",
    )
    add(
        "--plot",
        metavar="FILE",
        help="writes a picture (PNG) of a --sweep: seconds of a step and gain over plain",
    )
    add("--explain", action="store_true", help="where the seconds go, and what would change most")
    add(
        "--warm",
        action="store_true",
        help="every program is in the compile cache: nothing compiles",
    )
    add("--what-if", metavar="PART=FACTOR", nargs="+", default=[],
        help="other seconds of a part of the costs, such as drafting=0.5 update=0.9: the seconds times a factor, of "
        f"{', '.join(what_if.SCALED)}; tree_attention=0.7: trees read the cache at this share of a copy's bandwidth, unless "
        "faster")  # fmt: skip
    add("--record", metavar="RUN", nargs="+", help="writes the cost table of real runs, of one policy and the same devices, to "
        "--costs, and ends")  # fmt: skip
    return parser.parse_known_args(words)


def main(words: Sequence[str] | None = None) -> int:
    """Exit code 0, or 2 for a UserError."""
    given, knobs = arguments_of(words)
    try:
        if given.record:
            return recorded(given, knobs)
        knobs = [*(("--config", given.config) if given.config else ()), *knobs]
        return simulated(given, knobs)
    except UserError as error:
        cli.stop(error)


def recorded(given: argparse.Namespace, knobs: Sequence[str]) -> int:
    """Writes the cost table of runs. Raises ConfigError for what it does not read: anything but the runs and --costs."""
    usual, path = vars(arguments_of([])[0]), Path(given.costs)
    others = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(given).items()
        if name not in ("record", "costs") and value != usual[name]
    ]
    if others or knobs:
        raise ConfigError(
            f"--record {given.record[0]} reads run folders alone: leave out {[*others, *knobs][0]}, only --costs goes with it"
        )
    if path.suffix != ".csv":
        raise ConfigError(f"--costs {given.costs}: name the file to write, such as costs.csv")
    rows, facts = record.of_runs([Path(one) for one in given.record])
    atomic.write_text(path, cost_table.text_of(rows, facts))
    print(f"{path}: {len(rows)} rows of {', '.join(given.record)}")
    return 0


def simulated(given: argparse.Namespace, knobs: Sequence[str]) -> int:
    """Runs the arms, and prints what they take."""
    names, swept = given.arms.split(","), sweep.parse(given.sweep) if given.sweep else None
    every = (*ARMS, *ALTERNATIVES)
    if unknown := [name for name in names if name not in every]:
        raise ConfigError(f"--arms {given.arms}: {unknown[0]!r} is none of {', '.join(every)}")
    if not (math.isfinite(given.ahead) and given.ahead >= 0):
        raise ConfigError(f"--ahead {given.ahead:g}: give 0 or more steps")
    if given.ahead != AHEAD and not {"async", "partial"} & set(names):
        raise ConfigError(
            f"--ahead {given.ahead:g} is of the arms async and partial: add one of them to --arms"
        )
    if given.plot and not swept:
        raise ConfigError(f"--plot {given.plot} is of a sweep: add --sweep groups=1..64")
    if given.timeline and swept:
        raise ConfigError(
            f"--timeline {given.timeline} draws one run, and --sweep makes many: leave out one of them"
        )
    found, worlds = {}, {}
    for value in swept.values if swept else [""]:
        config = loading.parse([*knobs, *(swept.words(value) if swept else ())])
        world = world_of(given, config, (swept.groups(value) if swept else 0) or given.groups)
        if not found:
            print(heading(config, world, given), flush=True)
        worlds[value], found[value] = world, each(config, names, world, given.ahead)
    print(report.sweep(swept.name, found) if swept else report.table(found[""]))
    for value, results in found.items() if given.explain else ():
        title = f"{swept.name} {value}: " if swept else ""
        print(f"\n{title}{report.explained(results, worlds[value].table)}")
    if given.json:
        facts = {"costs": given.costs, "steps": world.steps}
        facts |= {"sweep": swept.name} if swept else {"groups": world.groups}
        atomic.write_text(Path(given.json), report.as_json(found, facts))
    if given.timeline:
        spans = found[""][names[-1]][-1].spans
        picture(Path(given.timeline), timeline.draw(spans, world.groups))
    if given.plot:
        picture(Path(given.plot), plot.draw(swept.name, found))
    return 0


def world_of(given: argparse.Namespace, config: Config, groups: int) -> World:
    """What the arms need besides the configuration; groups of the arguments, or mesh.data. Raises ConfigError or DataError."""
    if config.rollout.max_prompts:
        raise ConfigError(
            f"rollout.max_prompts {config.rollout.max_prompts}: simulated answers have no rewards, so no prompt is replaced: "
            "use --rollout.max_prompts 0"
        )
    steps, groups = given.steps or config.train.steps or STEPS, groups or config.mesh.data
    if steps < 1 or groups < 1:
        raise ConfigError(f"--steps {steps}, --groups {groups}: give 1 or more")
    costs = costs_of(given.costs, config, given.counts)
    costs = what_if.table(costs, what_if.parsed(given.what_if))
    return World(
        costs, lengths.of(given.lengths, config.rollout.max_new_tokens),
        acceptances_of(given.acceptance), steps, groups, not given.warm,
    )  # fmt: skip


def each(config: Config, names: Sequence[str], world: World, ahead: float) -> dict[str, list[Step]]:
    """The steps of each arm."""
    simulate = partial(
        alternatives.simulate,
        config,
        world=world,
        plain=run.simulate,
        make=run.plain_run,
        ahead=ahead,
    )
    return parallel.every(simulate, names, world.steps)


def acceptances_of(text: str) -> Acceptances:
    """What --acceptance gives; see acceptance.of and fitted.of_run."""
    if text and (Path(text) / RESOLVED).is_file():
        return fitted.of_run(Path(text), acceptance.NEW)
    return acceptance.of(text)


def costs_of(text: str, config: Config, counts: str = "") -> CostTable:
    """The cost table of --costs and --counts.

    Raises ConfigError for another number of devices a data group than mesh.model.
    """
    kind = config.drafter_training.kind
    path = next((one for one in (Path(text), SHIPPED / f"{text}.csv") if one.is_file()), None)
    if path and counts:
        raise ConfigError(
            f"--counts {counts} is for an estimate, and --costs {text} is a table: give a device to --costs"
        )
    if path:
        table = cost_table.read(path, drafter=kind)
        devices = int(table.facts.get("devices", 1))
        if devices != config.mesh.model:
            raise ConfigError(
                f"--costs {text} is of {devices} devices a data group, and mesh.model is {config.mesh.model}: set "
                f"--mesh.model {devices}, or estimate: --costs {table.facts.get('device', 'h200')}"
            )
        return table
    model = run.model_of(config)
    if text in estimate.DEVICES and model is None:
        raise ConfigError(
            f"--costs {text} needs the policy's sizes: set model.path to a local directory, or model.init with vocab_size"
        )
    drafter = run.drafter_of(config, model) if model else None
    base = cost_table.read(SHIPPED / f"{BASE}.csv")
    compiled = round_counts.read(Path(counts)) if counts else ()
    return estimate.table(text, config.mesh.model, model, drafter, base, counts=compiled)


def heading(config: Config, world: World, given: argparse.Namespace) -> str:
    """What is simulated, and what it rests on."""
    rollout, facts = config.rollout, world.table.facts
    rest = f", {facts['factor']}" if "factor" in facts else ""
    changed = f"what if: {' '.join(given.what_if)}\n" if given.what_if else ""
    return (
        f"simulated, not measured: {world.steps} steps of {rollout.prompts} prompts x {rollout.samples} answers of at most "
        f"{rollout.max_new_tokens} tokens, {world.groups} data groups x {config.mesh.model} devices\n"
        f"costs: {given.costs} ({world.table.sources('round') or 'estimate'}{rest}); lengths: {world.lengths.describe()}\n"
        f"acceptance: {world.acceptances.source or given.acceptance}\n"
        f"decisions: every {run.chunk_of(config)} rounds at most, and when the rows fit a smaller batch\n{changed}"
    )


def picture(path: Path, pixels: np.ndarray) -> None:
    """Writes uint8 [height, width, 3] as PNG."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path, "PNG")


if __name__ == "__main__":
    sys.exit(main())
