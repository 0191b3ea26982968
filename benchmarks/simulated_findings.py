"""What is a measure worth, on machines that are not here? Simulated, not measured: the rows of docs/simulate_findings.md.

python benchmarks/simulated_findings.py [--sections predictions,measures,training,prefetch] [--steps 6] [--jobs 7b,32b]
    [--scale 1] [--csv FILE]

predictions: the jobs of arXiv 2511.16665 by number of data groups, every way of drafting. measures: tree attention at 70 % of a
copy, drafting at half its seconds, learning in the update; each alone and together. training: drafter_training.share and
idle_training.floor. prefetch: coupled prefetch, whose texts of the step before are drafts, for answers of 200, 1,000 and 16,000
tokens.

A row is the mean of the second half of the first --steps steps of a run of 100 whose programs are in the compile cache, but of
training: of all of its steps, compiling included. --scale 0.25: a quarter of a job's answers on a quarter of its data groups,
so that each has as many.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks import simulated_costs  # noqa: E402
from benchmarks.common import results  # noqa: E402
from tlt_jax.config import Config  # noqa: E402
from tlt_jax.config.schema import (  # noqa: E402
    Data,
    DrafterTraining,
    IdleTraining,
    Mesh,
    Model,
    Rollout,
    Speculation,
    Train,
)
from tlt_jax.simulate import __main__ as command, acceptance, lengths, report, run, what_if  # noqa: E402
from tlt_jax.simulate.cost_table import CostTable  # noqa: E402
from tlt_jax.simulate.lengths import Drawn, Lengths  # noqa: E402
from tlt_jax.simulate.run import ARMS, SimulatedRun, World  # noqa: E402
from tlt_jax.spec_decode.strategy import PLAIN, Strategy  # noqa: E402

RUN = 100  # steps of the run whose first ones are simulated
TREES = ["3_1_4", "4_2_8", "6_4_16", "8_4_48"]
POLICY_32B = simulated_costs.POLICY | {
    "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 40, "num_key_value_heads": 8,
    "intermediate_size": 27648,
}  # fmt: skip
SECTIONS = ("predictions", "measures", "training", "prefetch")
MEASURES = ("tree_attention=0.7", "drafting=0.5")
SHARES = ("auto", 0.0, 0.05, 0.2, 1.0)
FLOORS = (8,)
# Coupled prefetch: differences a token between two policies that choose with the same noise (SmolLM2 after a step of GRPO;
# bfloat16 in batches of other shapes), and nodes of a chain.
DIFFERENCES, CHAIN = (0.0013, 0.004), 64
COLUMNS = (
    "section", "job", "groups", "devices", "answers", "arm", "case", "steps", "step_s", "rollout_s", "update_s", "drafter_s",
    "bubble", "accept_length", "times_plain",
)  # fmt: skip


@dataclass(frozen=True)
class Job:
    """A job: its configuration, presets of lengths and acceptance, and numbers of data groups, the paper's size first."""

    config: Config
    costs: str
    lengths: str
    accepted: str
    groups: Sequence[int]


def configured(policy: Mapping, devices: int, prompts: int, limit: int) -> Config:
    """A job's configuration, whose drafter was trained before the run."""
    buckets = [2048, 4096, 8192, 17408, limit + 1024]
    return Config(
        mesh=Mesh(data=1, model=devices),
        model=Model(init={**policy, "vocab_size": simulated_costs.VOCAB}, compute_dtype="bfloat16"),
        data=Data(max_prompt_tokens=1024),
        rollout=Rollout(
            prompts=prompts, samples=8, max_new_tokens=limit, slots=64, chunk=64,
            cache_buckets=[one for one in buckets if one <= limit + 1024],
        ),
        speculation=Speculation(strategies=TREES),
        drafter_training=DrafterTraining(start=run.FROZEN),
        train=Train(rows=16, row_tokens=16384),
    )  # fmt: skip


# The released script of the 32B job: 256 prompts x 8 answers on 64 H100; the paper's benchmarks have four of them a data group.
# The 7B job with the same answers, on groups of one H200, for which rounds were measured.
JOBS = {
    "7b": Job(
        configured(simulated_costs.POLICY, 1, 256, 32768), command.BASE, "paper_7b", "paper", (64, 32, 16, 8)
    ),
    "32b": Job(configured(POLICY_32B, 4, 256, 32768), "h100", "paper_32b", "paper", (16, 8, 4, 32)),
}  # fmt: skip


@dataclass
class Bench:
    """Simulates cases, and adds their rows to the table."""

    table: results.ResultTable
    steps: int
    scale: float

    def job(self, name: str) -> Job:
        """The job, at this scale."""
        job = JOBS[name]
        rollout = job.config.rollout
        prompts = max(int(self.scale * rollout.prompts), 1)
        groups = list(dict.fromkeys(max(int(self.scale * one), 1) for one in job.groups))
        config = replace(job.config, rollout=replace(rollout, prompts=prompts))
        return replace(job, config=config, groups=groups)

    def figures(
        self, config: Config, name: str, world: World, steps: int = 0, whole: bool = False
    ) -> dict[str, float]:
        """Means of the second half of the steps, or with `whole` of all."""
        one = SimulatedRun(config, ARMS[name], world)
        found = [one.step() for _ in range(steps or self.steps)]
        return report.summary(found if whole else report.late(found))

    def row(
        self,
        names: Sequence[str],
        config: Config,
        world: World,
        found: Mapping[str, float],
        plain: float,
    ) -> None:
        """Adds a row; `names`: section, job, arm and case. `plain`: seconds of a step of plain decoding."""
        section, job, arm, case, *steps = names
        devices, rollout = world.groups * config.mesh.model, config.rollout
        self.table.row(
            section, job, world.groups, devices, rollout.prompts * rollout.samples, arm, case, *(steps or [self.steps]),
            found["step"], found["rollout"], found["update"], found["drafter"], found["bubble"], found["accept_length"],
            plain / found["step"],
        )  # fmt: skip


def world_of(
    job: Job, groups: int, changes: Sequence[str] = (), answers: Lengths | None = None
) -> World:
    """The job on this many data groups, with the changes of --what-if."""
    table = what_if.table(command.costs_of(job.costs, job.config), what_if.parsed(changes))
    limit = job.config.rollout.max_new_tokens
    drawn = answers or lengths.of(job.lengths, limit)
    return World(table, drawn, acceptance.of(job.accepted), RUN, groups, compiles=False)


def predictions(bench: Bench, names: Sequence[str]) -> None:
    """Every way of drafting, by number of data groups."""
    for name in names:
        job = bench.job(name)
        for groups in job.groups:
            world, plain = world_of(job, groups), 0.0
            for arm in ARMS:
                found = bench.figures(job.config, arm, world)
                plain = plain or found["step"]
                bench.row(("predictions", name, arm, ""), job.config, world, found, plain)


def measures(bench: Bench, names: Sequence[str]) -> None:
    """Each measure alone and together, at the paper's size; of the job whose attention was measured."""
    for name in [one for one in names if JOBS[one].costs == command.BASE]:
        job, plain = bench.job(name), 0.0
        groups = job.groups[0]
        for case in ("", *MEASURES, " ".join(MEASURES)):
            world = world_of(job, groups, case.split())
            plain = plain or bench.figures(job.config, "plain", world)["step"]
            for arm in ("frozen", "idle", "update", "adaptive"):
                found = bench.figures(job.config, arm, world)
                bench.row(("measures", name, arm, case), job.config, world, found, plain)


def training(bench: Bench, names: Sequence[str]) -> None:
    """Shares of the update's rows and floors of idle training, from a new drafter and from one trained before; whole runs."""
    trained = configured(simulated_costs.POLICY, 1, 16, 8192)
    small = replace(JOBS["7b"], config=trained, lengths="")
    untrained = replace(trained, drafter_training=DrafterTraining())
    new = replace(small, config=untrained, accepted="new")
    steps = 3 * bench.steps
    for title, job in (("7b, 8k, trained before", small), ("7b, 8k, new drafter", new)):
        for groups in (1, 4):
            world = replace(world_of(job, groups), steps=steps, compiles=True)
            plain = bench.figures(job.config, "plain", world, steps, True)["step"]
            cases = [({"share": share}, {}) for share in SHARES]
            cases += [({"share": "auto"}, {"floor": floor}) for floor in FLOORS]
            for share, floor in cases:
                config = replace(
                    job.config,
                    drafter_training=replace(job.config.drafter_training, **share),
                    idle_training=IdleTraining(**floor),
                )
                arm = "idle" if share["share"] == 0 else "adaptive"
                found = bench.figures(config, arm, world, steps, True)
                case = " ".join(f"{key}={value}" for key, value in (share | floor).items())
                bench.row(("training", title, arm, case, steps), config, world, found, plain)


# Coupled prefetch


@dataclass(frozen=True)
class Prefetched:
    """Answers whose beginning was decoded in the step before, in its idle time; the same tokens come after verification.

    An answer agrees with its text up to the first difference, which comes after 1 / `differences` tokens in the mean. Texts of
    the share `texts` of the answers exist, of at most `longest` tokens. `price`: of a token of a text, in tokens that are
    decoded as usual.
    """

    base: Lengths
    differences: float
    texts: float
    longest: float
    price: float

    def draw(self, step: int, prompts: int, samples: int, seed: int) -> Drawn:
        drawn, random = (
            self.base.draw(step, prompts, samples, seed),
            np.random.default_rng([seed, step, 1]),
        )
        shape = drawn.answers.shape
        agree = (
            random.exponential(1 / self.differences, shape)
            if self.differences
            else np.full(shape, np.inf)
        )
        agree = np.minimum(np.minimum(agree, self.longest), drawn.answers)
        agree *= random.random(shape) < self.texts
        left = drawn.answers - agree * (1 - self.price)
        return Drawn(drawn.prompts, np.maximum(left, 1).astype(np.int64))

    def describe(self) -> str:
        return f"{self.base.describe()}, prefetched, {self.differences:g} differences a token"


def price(table: CostTable, held: float, accept_length: float) -> float:
    """Of a token that a chain of CHAIN verifies, in tokens decoded as usual; one row of `held` tokens."""
    chain = table.round_seconds(1, 0, Strategy(CHAIN - 1, 1, CHAIN, "ngram"), held)
    return chain / CHAIN / (table.round_seconds(1, 0, PLAIN, held) / max(accept_length, 1.0))


def prefetch(bench: Bench, names: Sequence[str]) -> None:
    """Answers of at most 200, 1,000 and 16,000 tokens, by texts that the idle time of an arm's rollout pays for, and by all."""
    for limit in (200, 1000, 16000):
        job = replace(
            JOBS["7b"], config=configured(simulated_costs.POLICY, 1, 64, limit), lengths=""
        )
        world = world_of(job, 8)
        plain = 0.0
        for arm in ("plain", "update", "adaptive"):
            base = bench.figures(job.config, arm, world)
            plain = plain or base["step"]
            title = f"7b, answers up to {limit}"
            bench.row(("prefetch", title, arm, "none"), job.config, world, base, plain)
            if arm == "adaptive":  # its idle groups train the drafter
                continue
            idle = base["bubble"]
            found_texts = {
                "in idle time": (min(idle / (1 - idle), 1.0), idle * limit),
                "all": (1.0, np.inf),
            }
            for differences in DIFFERENCES:
                for texts, (share, longest) in found_texts.items():
                    drawn = Prefetched(
                        world.lengths, differences, share, longest, price(world.table, limit / 2, base["accept_length"])
                    )  # fmt: skip
                    found = bench.figures(job.config, arm, replace(world, lengths=drawn))
                    whole = base["update"] - found["update"]  # the update learns from whole answers
                    found |= {"update": base["update"], "step": found["step"] + whole}
                    case = f"texts {texts}, {differences:g} differences a token"
                    bench.row(("prefetch", title, arm, case), job.config, world, found, plain)


def main() -> None:
    parser = results.arguments(__doc__)
    parser.add_argument("--sections", default=",".join(SECTIONS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--jobs", default=",".join(JOBS))
    parser.add_argument("--scale", type=float, default=1.0)
    given = parser.parse_args()
    bench = Bench(results.ResultTable(COLUMNS, given.csv), given.steps, given.scale)
    for section in results.listed(given.sections):
        globals()[section](bench, results.listed(given.jobs))


if __name__ == "__main__":
    main()
