"""A run of many RL steps in virtual time: the real trainer on a cost table, for every way of drafting."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tlt_jax.config import Config, parse
from tlt_jax.config.schema import ADAPTIVE, NGRAM, NONE
from tlt_jax.data import packing
from tlt_jax.distributed.board import Ending
from tlt_jax.distributed.job import Job
from tlt_jax.drafter.investment import Investment
from tlt_jax.errors import DataError
from tlt_jax.models import from_config, hf_config
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.rollout.engine import IN_FLIGHT, EngineBase
from tlt_jax.rollout.idle import IdleDriver
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.rollout.request import RolloutRequest
from tlt_jax.rollout.scheduler.driver import LocalGroups
from tlt_jax.rollout.selection import Selecting
from tlt_jax.simulate import simulator
from tlt_jax.simulate.acceptance import Acceptances
from tlt_jax.simulate.cost_table import CostTable
from tlt_jax.simulate.learning import SimulatedDrafter, SimulatedLearning
from tlt_jax.simulate.lengths import Lengths
from tlt_jax.simulate.report import Step
from tlt_jax.simulate.simulator import SimulatedPrograms, VirtualClock
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.interface import DecodingParams
from tlt_jax.spec_decode.strategy import DRAFTERS, PLAIN, Strategy
from tlt_jax.train import adaptive
from tlt_jax.train.adaptive import Learned
from tlt_jax.train.run_state import RunState
from tlt_jax.train.step_metrics import Stopwatch
from tlt_jax.train.trainer import Rolled, Trainer

FROZEN = "frozen"  # stands for the directory of a drafter that is not trained
# A chunk decodes at least the longest answer over this many rounds: a chunk of the same rows and strategy costs the same in one
# piece, and ends as before when rows fit a smaller batch.
CHUNKS = 16
# Sizes that stand for a policy whose files are not here: only the kind of drafter matters then.
STAND_IN = {"model_type": "qwen2", "hidden_size": 64, "num_hidden_layers": 8, "num_attention_heads": 4,
            "num_key_value_heads": 2, "intermediate_size": 128, "max_position_embeddings": 1 << 20}  # fmt: skip


@dataclass(frozen=True)
class World:
    """What a simulated run needs besides its configuration. `steps` of the run, `groups` data groups.

    Without `compiles` every program is there from the start.
    """

    table: CostTable
    lengths: Lengths
    acceptances: Acceptances
    steps: int
    groups: int
    compiles: bool = True


PHASES = {"update_weights": "publish", "save_checkpoint": "save"}  # other names of a step's parts
# Arms: ways of drafting, with their speculation.drafter.
ARMS = {"plain": NONE, "ngram": NGRAM, "frozen": FROZEN, "adaptive": ADAPTIVE}


def configured(config: Config, drafter: str, groups: int) -> Config:
    """The configuration with this drafter, on this many data groups."""
    speculation = replace(config.speculation, drafter=drafter)
    if drafter != ADAPTIVE:  # its strategies name no drafter
        trees = [one.rpartition(":")[2] for one in config.speculation.strategies]
        speculation = replace(speculation, strategies=list(dict.fromkeys(trees)))
    start = NONE if config.drafter_training.start in from_config.NEW else FROZEN
    return replace(
        config,
        speculation=speculation,
        mesh=replace(config.mesh, data=groups),
        eval=replace(config.eval, every=0),
        drafter_training=replace(config.drafter_training, start=start),
    )


def model_of(config: Config) -> ModelConfig | None:
    """The policy's sizes, of model.init or of a local directory; None when its files are not here."""
    if "vocab_size" in config.model.init:
        return hf_config.new_config(config.model.init, config.model.init["vocab_size"], ())
    try:
        is_here = Path(parse.expand(config.model.path, "model.path") or "-").is_dir()
    except DataError:  # names a variable that is not set
        return None
    return from_config.model_config(config, None) if is_here else None


def chunk_of(config: Config) -> int:
    """Most rounds of a simulated chunk."""
    return max(config.rollout.chunk, config.rollout.max_new_tokens // CHUNKS)


class SimulatedEngine(EngineBase):
    """An engine of `groups` data groups whose programs are simulated."""

    def __init__(
        self,
        config: Config,
        model: ModelConfig,
        drafter: DrafterConfig | None,
        groups: int,
        programs: SimulatedPrograms,
    ):
        super().__init__(config, model, drafter, groups, programs.waits, Job())
        self.mesh, self.ngram_memory = None, None
        self.groups, self.local_groups = [None] * groups, range(groups)
        self.programs, self.clock = programs, programs.clock
        self.ending: Ending | None = None  # of the last rollout
        programs.rebind(self.shapes(drafter))

    def shapes(self, drafter: DrafterConfig | None) -> list[SimpleNamespace]:
        """Drafters that need nothing from the host; all but n-grams catch up."""
        ngram = SimpleNamespace(reads_history=False, host_context=lambda _: (), catch_up=None)
        learned = SimpleNamespace(reads_history=False, host_context=lambda _: (), catch_up=True)
        known = {name: ngram if name == NGRAM else learned for name in DRAFTERS}
        captures = drafter is not None
        return [SimpleNamespace(drafter=learned, drafters=known, captures=captures)]

    @property
    def is_over(self) -> bool:
        """Whether no data group has anything left to decode."""
        return self.ending is None or bool(self.ending.how)

    def publish(self, params: Any, drafter: Any = None) -> dict[int, Weights]:
        self.clock.sleep(self.programs.table.seconds("publish"))
        return dict.fromkeys(self.local_groups, Weights(None, ()))

    def drive(
        self,
        rollout: LocalGroups,
        interrupted: None,
        background: IdleDriver | None,
        ending: Ending,
        selecting: Selecting | None,
    ) -> RolloutResult:
        self.ending = ending
        return simulator.simulate(rollout, self.programs, background, selecting, ending)


class SimulatedTrainer(Trainer):
    """A Trainer in virtual time, of one arm: it rolls out on simulated programs, and scores and updates by the table alone.

    `reported`: the last step. The policy has no weights; a drafter has the tokens that it learned from.
    """

    policy = None

    def __init__(self, config: Config, arm: str, world: World):
        drafter = ARMS[arm]
        config = configured(config, drafter, world.groups)
        self.world, self.clock, self.answers = world, VirtualClock(), {}
        self.drafter = SimulatedDrafter()  # the one that the rollout drafts with
        model = model_of(config) or hf_config.new_config(STAND_IN, 512, ())
        is_learned = drafter in (ADAPTIVE, FROZEN)
        learned = from_config.new_drafter_config(config, model) if is_learned else None
        programs = self.simulated_programs(config)
        engine = SimulatedEngine(config, model, learned, world.groups, programs)
        begins = FROZEN in (config.drafter_training.start, drafter)
        start = SimulatedDrafter(int(begins), world.acceptances.pretrained if begins else 0.0)
        tuner, learning = engine.tuner.init(), None
        if drafter == ADAPTIVE:
            learning = SimulatedLearning(config, engine, world.steps, start, world.acceptances)
            tuner = learning.started(tuner)
        policy = SimpleNamespace(params=None)
        self.state = RunState(0, policy, start if begins else None, tuner, Investment())
        if learning:
            learning.resume(self.state)
        self.run = SimpleNamespace(
            config=config, engine=engine, drafter=learning, drafter_params=None, steps=world.steps
        )  # fmt: skip
        self.watch, self.writer = Stopwatch(self.clock.now), SimpleNamespace(say=lambda words: None)
        self.reported: Step | None = None

    def simulated_programs(self, config: Config) -> SimulatedPrograms:
        """The programs of the engine, which draft as well as the current drafter can."""
        is_ngram = config.speculation.drafter == NGRAM

        def named(strategy: Strategy) -> Strategy:  # a run's only drafter has no name
            return replace(strategy, drafter=NGRAM) if is_ngram and strategy.depth else strategy

        return SimulatedPrograms(
            self.world.table,
            lambda one: self.world.acceptances.trees(named(one), self.drafter.learned),
            lambda key: self.answers[int(key[1])],
            self.clock,
            not self.world.compiles,
            named,
        )

    def spend(self, program: str, tokens: float = 0.0) -> None:
        """A part of the step takes the table's seconds."""
        self.clock.sleep(self.world.table.seconds(program, tokens))

    def publish(self) -> dict[int, Weights]:
        self.drafter = self.state.drafter or self.drafter
        return super().publish()

    def save(self, measured: dict[str, float]) -> None:
        """Saving counts for the step whose state is saved: see `report`."""

    def roll_out(self, weights: dict[int, Weights]) -> Rolled:
        """The rollout of the step, in which idle groups train the drafter."""
        run, state = self.run, self.state
        rollout, seed, most = run.config.rollout, run.config.train.seed, run.config.data.max_prompt_tokens  # fmt: skip
        drawn = self.world.lengths.draw(state.step, rollout.prompts, rollout.samples, seed)
        self.answers = dict(enumerate(drawn.answers.ravel().tolist()))
        sizes = np.clip(drawn.prompts, 2, max(most, 2)).astype(int).tolist()
        uids = np.arange(len(self.answers), dtype=np.uint32)
        request = RolloutRequest(
            prompts=tuple(np.zeros(size, np.int32) for size in sizes),
            samples=rollout.samples,
            max_new_tokens=(rollout.max_new_tokens,) * len(sizes),
            keys=np.stack([np.full_like(uids, state.step), uids], axis=1),
            params=DecodingParams(),
            rounds=chunk_of(run.config),
            in_flight=IN_FLIGHT,
            capacity=run.engine.capacity,
            rollouts_left=run.steps - state.step - 1,
        )
        with self.watch.phase("rollout"):
            began, background = self.clock.now(), {}
            self.spend("begin")
            if run.drafter:
                background = run.drafter.begin_rollout(request, weights, state)
            result, tuner = run.engine.run(request, weights, state.tuner, **background)
        return Rolled(list(request.prompts), result, tuner, {}, began)

    def score(self, result: RolloutResult) -> dict:
        with self.watch.phase("reward"):
            self.spend("reward")
        return {}

    def pack(self, rolled: Rolled, scores: dict) -> SimpleNamespace:
        """`rows`: the answer tokens of each accumulation step; padding takes as long as tokens."""
        prompts, result = rolled.prompts, rolled.result
        examples = [len(prompts[one.prompt]) + len(one.tokens) for one in result.completions]
        count = packing.steps(self.run.config, examples)
        return SimpleNamespace(rows=[result.stats["tokens"] / count] * count)

    def update_policy(self, batch: SimpleNamespace) -> tuple[SimpleNamespace, list]:
        with self.watch.phase("update"):
            tokens = len(batch.rows) * packing.step_tokens(self.run.config)
            self.spend("update", tokens / self.world.groups)
        return self.state.policy, []

    def next_state(
        self, policy: SimpleNamespace, learned: Learned, tuner: dict, rolled: Rolled
    ) -> RunState:
        """The state after the step: the policy has moved, and the drafter has forgotten a share of what it learned."""
        state = super().next_state(policy, learned, tuner, rolled)
        forget = self.world.acceptances.learned.forget
        return state.replace(drafter=state.drafter and state.drafter.forgot(forget))

    def report(self, rolled: Rolled, scores: dict, batch: SimpleNamespace, *_: Any) -> None:
        """Keeps the step that has just been done."""
        result, run, table = rolled.result, self.run, self.world.table
        every = run.config.checkpoint.every
        if every and self.state.step % every == 0:
            with self.watch.phase("save_checkpoint"):
                self.spend("save")
        self.spend("other")
        lap = self.watch.lap()
        seconds = {
            PHASES.get(name, name): lap[f"timing_s/{name}"] for name, *_ in self.watch.lapped
        }
        compiling = sum(end - start for start, end in result.compile_waits.get(0, ()))
        useful = sum(seconds.values()) - compiling - seconds.get("drafter", 0.0)
        self.state = self.state.replace(investment=self.state.investment.after_step(useful))

        groups = adaptive.decoding_seconds(result, self.world.groups, "train")
        idle, whole = sum(one.idle for one in groups), len(groups) * result.stats["seconds"]
        rounds, error = {}, 0.0
        for one in result.measurements:
            strategy = run.engine.programs.named(one.strategy)
            error += one.seconds * table.shape(one.batch, strategy)[2]
            kind = "off" if one.strategy == PLAIN else one.strategy.drafter or run.engine.drafter_kind  # fmt: skip
            rounds[kind] = rounds.get(kind, 0.0) + one.seconds
        self.reported = Step(
            seconds, result.stats["tokens"], idle / whole if whole else 0.0, compiling, result.stats["accept_length"],
            self.drafter.learned, rounds, error / max(sum(rounds.values()), 1e-9), result.spans,
        )  # fmt: skip

    def diverged(self, rolled: Rolled, scores: dict) -> None:
        """A simulated policy never diverges."""


def simulate(config: Config, name: str, world: World) -> list[Step]:
    """The steps of an arm of ARMS. Only the last step keeps its spans."""
    trainer, steps = SimulatedTrainer(config, name, world), []
    for _ in range(world.steps):
        if steps:
            steps[-1].spans = []
        trainer.step()
        steps.append(trainer.reported)
    return steps
