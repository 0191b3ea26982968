"""The command `python -m tlt_jax.simulate`: what a run of many RL steps would take with and without drafting."""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console
from rich.progress import track

from tlt_jax import atomic, cli
from tlt_jax.config import Config, load as loading, validate
from tlt_jax.distributed.process import processors
from tlt_jax.errors import ConfigError, UserError
from tlt_jax.metrics import timeline
from tlt_jax.models import from_config
from tlt_jax.simulate import acceptance, cost_table, estimate, lengths, record, report, run
from tlt_jax.simulate.cost_table import CostTable
from tlt_jax.simulate.run import ARMS, World
from tlt_jax.tuner.cost_model import DENSE, Networks

SHIPPED = Path(__file__).parent / "costs"
BASE = "h200_qwen2.5_7b"  # the measured table that estimates are scaled by
STEPS = 20  # when the configuration counts epochs
# gc.set_threshold: a simulation makes many small objects, and few circles of them.
COLLECTED = 100_000, 20, 50


def arguments_of(words: Sequence[str] | None = None) -> tuple[argparse.Namespace, list[str]]:
    """The command's own arguments, and those of the configuration."""
    parser = argparse.ArgumentParser(
        prog="python -m tlt_jax.simulate",
        description=f"{cli.COMMANDS['simulate'].about} Further arguments are knobs: --section.knob VALUE.",
        allow_abbrev=False,
    )
    tables = ", ".join(sorted(path.stem for path in SHIPPED.glob("*.csv")))
    options = {
        "config": ("FILE", "YAML file, or the name of a shipped configuration"),
        "costs": ("TABLE", f"seconds of programs: a CSV file, a shipped table ({tables}), or a device to estimate for "
                  f"({', '.join(estimate.DEVICES)})"),
        "lengths": ("FILE", "answers: a run's folder, MEDIAN,SIGMA of a log-normal, or a preset "
                    f"({', '.join(lengths.PRESETS)}); default: log-normal, 2 %% beyond rollout.max_new_tokens"),
        "acceptance": ("FILE", "what drafters accept: a run's folder, acceptance.json of a drafter, a curve, or a preset "
                       f"({', '.join(acceptance.PRESETS)}); default: new"),
        "groups": ("N,N", "data groups, one number or several; default: mesh.data"),
        "arms": ("A,B", f"of {', '.join(ARMS)} (default: all)"),
        "json": ("FILE", "writes every step"),
        "timeline": ("FILE", "writes the last rollout of the last arm as a trace for ui.perfetto.dev"),
        "plot": ("FILE", "writes a picture of several --groups: seconds of a step and gain over plain"),
    }  # fmt: skip
    usual, add = {"costs": BASE, "arms": ",".join(ARMS)}, parser.add_argument
    for name, (metavar, text) in options.items():
        add(f"--{name}", metavar=metavar, default=usual.get(name, ""), help=text)
    add("--steps", metavar="N", type=int, default=0, help=f"RL steps; default: train.steps, or {STEPS}")  # fmt: skip
    add("--explain", action="store_true", help="where the seconds go, and what would change most")
    add("--warm", action="store_true", help="every program is in the compile cache: nothing compiles")  # fmt: skip
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
    read = {"record": given.record, "costs": given.costs}
    others = [f"--{name}" for name, value in vars(given).items() if value != (usual | read)[name]]
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
    """Runs the arms on each number of data groups, and prints what they take."""
    config, names = loading.parse(knobs), given.arms.split(",")
    validate.validate_one_turn(config)
    if unknown := [name for name in names if name not in ARMS]:
        raise ConfigError(f"--arms {given.arms}: {unknown[0]!r} is none of {', '.join(ARMS)}")
    numbers = groups_of(given.groups, config)
    if given.plot and len(numbers) < 2:
        raise ConfigError(f"--plot {given.plot} is of several numbers of data groups: add --groups 1,2,4")  # fmt: skip
    if given.plot:
        report.drawing(given.plot)
    world = world_of(given, config, numbers[0])
    print(heading(config, world, given, numbers), flush=True)
    jobs = list(product(numbers, names))
    taken = every([(config, name, replace(world, groups=groups)) for groups, name in jobs])
    steps = dict(zip(jobs, taken, strict=True))
    found = {groups: {name: steps[groups, name] for name in names} for groups in numbers}
    several = len(numbers) > 1
    print(report.by_groups(found) if several else report.table(found[numbers[0]]))
    for groups, results in found.items() if given.explain else ():
        title = f"groups {groups}: " if several else ""
        print(f"\n{title}{report.explained(results, world.table)}")
    if given.json:
        facts = {"costs": given.costs, "steps": world.steps}
        atomic.write_text(Path(given.json), report.as_json(found, facts))
    if given.timeline:
        path, spans = Path(given.timeline), steps[jobs[-1]][-1].spans
        path.parent.mkdir(parents=True, exist_ok=True)
        atomic.write_text(path, json.dumps(timeline.trace(spans)))
    if given.plot:
        report.draw(Path(given.plot), found)
    return 0


def every(jobs: Sequence[tuple]) -> list[list[report.Step]]:
    """run.simulate of each, in the order of the jobs: in processes of their own, as many at once as there are cores."""
    workers = min(len(processors()), len(jobs))
    if workers == 1:
        return [run.simulate(*job) for job in jobs]
    context = get_context("spawn")  # JAX has threads, which a fork would lose
    shown = {"console": Console(stderr=True), "disable": not sys.stderr.isatty(), "transient": True}
    with ProcessPoolExecutor(workers, context, gc.set_threshold, COLLECTED) as pool:
        found = pool.map(run.simulate, *zip(*jobs, strict=True))
        return list(track(found, "simulating", len(jobs), **shown))


def groups_of(text: str, config: Config) -> list[int]:
    """The numbers of data groups of --groups; mesh.data without any. Raises ConfigError."""
    numbers = text.split(",") if text else [str(config.mesh.data)]
    if not all(one.isdecimal() and int(one) for one in numbers):
        raise ConfigError(f"--groups {text}: give numbers from 1, such as 4 or 1,2,4")
    return list(dict.fromkeys(map(int, numbers)))


def world_of(given: argparse.Namespace, config: Config, groups: int) -> World:
    """What the arms need besides the configuration. Raises ConfigError or DataError."""
    if config.rollout.max_prompts:
        raise ConfigError(
            f"rollout.max_prompts {config.rollout.max_prompts}: simulated answers have no rewards, so no prompt is replaced: "
            "use --rollout.max_prompts 0"
        )
    steps = given.steps or config.train.steps or STEPS
    if steps < 1:
        raise ConfigError(f"--steps {steps}: give 1 or more")
    answers = lengths.of(given.lengths, config.rollout.max_new_tokens)
    accepted = acceptance.of(given.acceptance)
    return World(costs_of(given.costs, config), answers, accepted, steps, groups, not given.warm)


def costs_of(text: str, config: Config) -> CostTable:
    """The cost table of --costs. Raises ConfigError for another number of devices a data group than mesh.model."""
    model = run.model_of(config)
    path = next((one for one in (Path(text), SHIPPED / f"{text}.csv") if one.is_file()), None)
    if path:
        table = cost_table.read(path, drafter=config.drafter_training.kind)
        devices = int(table.facts.get("devices", 1))
        if devices != config.mesh.model:
            raise ConfigError(
                f"--costs {text} is of {devices} devices a data group, and mesh.model is {config.mesh.model}: set "
                f"--mesh.model {devices}, or estimate: --costs {table.facts.get('device', 'h200')}"
            )
        networks = Networks(None, model.num_experts, model.experts_per_token) if model else DENSE
        return replace(table, networks=networks)
    if text in estimate.DEVICES and model is None:
        raise ConfigError(
            f"--costs {text} needs the policy's sizes: set model.path to a local directory, or model.init with vocab_size"
        )
    drafter = from_config.new_drafter_config(config, model) if model else None
    base = cost_table.read(SHIPPED / f"{BASE}.csv")
    return estimate.table(text, config.mesh.model, model, drafter, base)


def heading(config: Config, world: World, given: argparse.Namespace, numbers: Sequence[int]) -> str:
    """What is simulated, and what it rests on."""
    rollout, facts = config.rollout, world.table.facts
    rest = f", {facts['factor']}" if "factor" in facts else ""
    return (
        f"simulated, not measured: {world.steps} steps of {rollout.prompts} prompts x {rollout.samples} answers of at most "
        f"{rollout.max_new_tokens} tokens, {', '.join(map(str, numbers))} data groups x {config.mesh.model} devices\n"
        f"costs: {given.costs} ({world.table.sources('round') or 'estimate'}{rest}); lengths: {world.lengths.describe()}\n"
        f"acceptance: {world.acceptances.source or given.acceptance}\n"
        f"decisions: every {run.chunk_of(config)} rounds at most, and when the rows fit a smaller batch\n"
    )


if __name__ == "__main__":
    sys.exit(main())
