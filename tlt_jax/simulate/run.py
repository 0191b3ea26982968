"""A run of many RL steps in virtual time: the product's decisions on a cost table, for every way of drafting."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

from tlt_jax.config import Config, parse
from tlt_jax.config.schema import ADAPTIVE, NGRAM, NONE
from tlt_jax.data import packing
from tlt_jax.drafter.investment import Investment
from tlt_jax.errors import ConfigError
from tlt_jax.models import from_config, hf
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.simulate import engine
from tlt_jax.simulate.acceptance import Acceptances
from tlt_jax.simulate.cost_table import CPU, CostTable
from tlt_jax.simulate.learning import DrafterWorld, SimulatedDrafter
from tlt_jax.simulate.lengths import Lengths
from tlt_jax.simulate.report import Step
from tlt_jax.simulate.simulator import SimulatedPrograms, VirtualClock
from tlt_jax.spec_decode.strategy import LEARNED, PLAIN, Strategy
from tlt_jax.train import adaptive
from tlt_jax.train.adaptive import DrafterLearning, Learned
from tlt_jax.train.run_state import RunState

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


# Arms: ways of drafting, with their speculation.drafter.
ARMS = {"plain": NONE, "ngram": NGRAM, "frozen": FROZEN, "adaptive": ADAPTIVE}


def configured(config: Config, drafter: str, groups: int) -> Config:
    """The configuration with this drafter, on this many data groups."""
    speculation = replace(config.speculation, drafter=drafter)
    if drafter != ADAPTIVE:  # its strategies name no drafter
        trees = [one.rpartition(":")[2] for one in config.speculation.strategies]
        speculation = replace(speculation, strategies=list(dict.fromkeys(trees)))
    start = FROZEN if config.drafter_training.start else ""
    return replace(
        config,
        speculation=speculation,
        mesh=replace(config.mesh, data=groups),
        drafter_training=replace(config.drafter_training, start=start),
    )


def model_of(config: Config) -> ModelConfig | None:
    """The policy's sizes, of model.init or of a local directory; None when its files are not here."""
    if "vocab_size" in config.model.init:
        return hf.new_config(config.model.init, config.model.init["vocab_size"], ())
    try:
        is_here = Path(parse.expand(config.model.path, "model.path") or "-").is_dir()
    except ConfigError:  # names a variable that is not set
        return None
    return from_config.model_config(config, None) if is_here else None


def drafter_of(config: Config, model: ModelConfig | None) -> DrafterConfig:
    """The drafter of `drafter_training` for this policy, or for one that stands for it."""
    model = model or hf.new_config(STAND_IN, 512, ())
    return from_config.new_drafter_config(config, model)


def chunk_of(config: Config) -> int:
    """Most rounds of a simulated chunk."""
    return max(config.rollout.chunk, config.rollout.max_new_tokens // CHUNKS)


class SimulatedRun:
    """The RL steps of one arm in virtual time, in the order of train.trainer.Trainer.step."""

    def __init__(self, config: Config, arm: str, world: World):
        drafter = ARMS[arm]
        self.config = config = configured(config, drafter, world.groups)
        self.world = world
        self.clock, self.answers = VirtualClock(), {}
        self.drafter = SimulatedDrafter()  # the one that the rollout drafts with
        model = model_of(config) or hf.new_config(STAND_IN, 512, ())
        learned = drafter_of(config, model) if drafter in (ADAPTIVE, FROZEN) else None
        is_cpu = world.table.facts.get("device") == CPU
        self.engine = engine.SimulatedEngine(config, learned, world.groups, is_cpu, self.programs)
        begins = bool(config.drafter_training.start) or drafter == FROZEN
        start = SimulatedDrafter(int(begins), world.acceptances.pretrained if begins else 0.0)
        self.learning = self.knowledge = None
        if drafter == ADAPTIVE:
            self.knowledge = DrafterWorld(config, self.engine, model, world.acceptances)
            parts = self.knowledge.parts(start)
            self.learning = DrafterLearning(config, self.engine, world.steps, parts)
        tuner = self.engine.tuner.init()
        if self.knowledge and begins:  # a drafter's directory records its acceptance
            known = {LEARNED: self.knowledge.levels(start)}
            tuner = self.engine.tuner.update_prior(tuner, known)
        self.state = RunState(
            0, SimpleNamespace(params=None), start if begins else None, tuner, Investment()
        )
        if self.learning:
            self.learning.resume(self.state)
        self.seconds: dict[str, float] = {}

    def programs(self, drafters: list[str]) -> SimulatedPrograms:
        """The programs of the engine, which draft as well as the current drafter can."""
        return SimulatedPrograms(
            self.world.table,
            lambda one: self.world.acceptances.trees(self.named(one), self.drafter.learned),
            lambda key: self.answers[int(key[1])],
            self.clock,
            drafters,
            not self.world.compiles,
            self.named,
        )

    def named(self, strategy: Strategy) -> Strategy:
        """The strategy with the name of its drafter, as tables and acceptances have it; a run's only drafter has none."""
        is_ngram = self.config.speculation.drafter == NGRAM and strategy.depth > 0
        return replace(strategy, drafter=NGRAM) if is_ngram else strategy

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A context whose virtual seconds count for this part of the step."""
        began = self.clock.now()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + self.clock.now() - began

    def spend(self, name: str, tokens: float = 0.0) -> None:
        """A part of the step that takes the table's seconds."""
        with self.phase(name):
            self.clock.sleep(self.world.table.seconds(name, tokens))

    def step(self) -> Step:
        """One RL step."""
        self.seconds = {}
        self.publish()
        result, tuner = self.roll_out()
        self.spend("reward")
        learned = self.merge(result, tuner)
        learned = self.learn(learned, result)
        self.save()
        self.spend("other")
        tuner = self.update_tuner(learned, tuner)
        self.state = self.next_state(learned, tuner, result)
        return self.report(result)

    def publish(self) -> None:
        """The rollout's copy of policy and drafter."""
        if self.learning:
            self.learning.before_publish()
        self.drafter = self.state.drafter or self.drafter
        self.spend("publish")

    def roll_out(self) -> tuple[RolloutResult, dict]:
        """The rollout of the step, in which idle groups train the drafter."""
        rollout, step = self.config.rollout, self.state.step
        drawn = self.world.lengths.draw(
            step, rollout.prompts, rollout.samples, self.config.train.seed
        )
        self.answers = dict(enumerate(drawn.answers.ravel().tolist()))
        most = max(self.config.data.max_prompt_tokens, 2)
        request = engine.request(
            [min(max(int(tokens), 2), most) for tokens in drawn.prompts],
            rollout.samples,
            rollout.max_new_tokens,
            seed=step,
            capacity=self.engine.capacity,
            rounds=chunk_of(self.config),
            rollouts_left=self.world.steps - step - 1,
        )
        self.prompts = request.prompts
        weights = dict.fromkeys(range(self.world.groups), SimpleNamespace(target=None, drafter=()))
        with self.phase("rollout"):
            self.clock.sleep(self.world.table.seconds("begin"))
            background = {}
            if self.learning:
                self.knowledge.rollout_seconds = self.learning.idle.seconds
                background = self.learning.begin_rollout(request, weights, self.state)
            self.waited = len(self.engine.programs.waited)
            return self.engine.run(request, weights, self.state.tuner, **background)

    def merge(self, result: RolloutResult, tuner: dict) -> Learned:
        """As Trainer.merge_drafter."""
        if not self.learning:
            return Learned(self.state.drafter, self.state.investment)
        with self.phase("drafter"):
            return self.learning.merge(self.state, tuner, result)

    def learn(self, learned: Learned, result: RolloutResult) -> Learned:
        """The updates of drafter and policy; padding takes as long as tokens."""
        limit, samples = self.config.rollout.max_new_tokens, self.config.rollout.samples
        examples = [
            len(self.prompts[uid // samples]) + min(tokens, limit)
            for uid, tokens in self.answers.items()
        ]
        count, groups = packing.steps(self.config, examples), self.world.groups
        if self.learning:
            rows = [result.stats["tokens"] / count] * count
            with self.phase("drafter"):
                learned = self.learning.learn(
                    learned, self.state.policy, rows, result.completions, self.state.step
                )
        self.spend("update", count * packing.step_tokens(self.config) / groups)
        return learned

    def save(self) -> None:
        """A checkpoint, when one is due."""
        every = self.config.checkpoint.every
        if every and (self.state.step + 1) % every == 0:
            self.spend("save")

    def update_tuner(self, learned: Learned, tuner: dict) -> dict:
        """As Trainer.update_tuner."""
        if self.learning:
            return self.learning.update_tuner(tuner, learned.depths)[0]
        return self.engine.tuner.update_prior(tuner)

    def next_state(self, learned: Learned, tuner: dict, result: RolloutResult) -> RunState:
        """The state after the step: the policy has moved, and the drafter has forgotten a share of what it learned."""
        compiling = self.compiling(result)
        seconds = sum(self.seconds.values()) - compiling - self.seconds.get("drafter", 0.0)
        forget = self.world.acceptances.learned.forget
        drafter = learned.drafter and learned.drafter.forgot(forget)
        if self.config.speculation.drafter == FROZEN:
            drafter = self.state.drafter.forgot(forget)
        return RunState(
            self.state.step + 1, self.state.policy, drafter, tuner, learned.investment.after_step(seconds)
        )  # fmt: skip

    def compiling(self, result: RolloutResult) -> float:
        """Seconds in which the rollout waited for compilations."""
        return sum(end - start for start, end in result.compile_waits.get(0, ()))

    def report(self, result: RolloutResult) -> Step:
        """The step that has just been done."""
        groups = adaptive.decoding_seconds(result, self.world.groups, "train")
        idle, whole = sum(one.idle for one in groups), len(groups) * result.stats["seconds"]
        rounds, error = {}, 0.0
        for one in result.measurements:
            error += one.seconds * self.world.table.shape(one.batch, self.named(one.strategy))[2]
            kind = (
                "off" if one.strategy == PLAIN else one.strategy.drafter or self.engine.drafter_kind
            )
            rounds[kind] = rounds.get(kind, 0.0) + one.seconds
        learned = self.drafter.learned
        return Step(
            dict(self.seconds), result.stats["tokens"], idle / whole if whole else 0.0, self.compiling(result),
            result.stats["accept_length"], learned, rounds, error / max(sum(rounds.values()), 1e-9), result.spans,
        )  # fmt: skip


def simulate(config: Config, name: str, world: World) -> list[Step]:
    """The steps of an arm of ARMS. Only the last step keeps its spans."""
    run, steps = SimulatedRun(config, name, world), []
    for _ in range(world.steps):
        if steps:
            steps[-1].spans = []
        steps.append(run.step())
    return steps
