"""The programs of a step that `tlt_jax.plan` compiles: the largest of each kind."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp

from tlt_jax.config import Config, validate
from tlt_jax.config.schema import ADAPTIVE, SELF
from tlt_jax.data import packing, prompt_format
from tlt_jax.drafter import recipe as drafter_recipe, update as drafter_update
from tlt_jax.drafter.idle_training import MOST_TOKENS
from tlt_jax.drafter.update import MicroStep
from tlt_jax.models import from_config, hf_config
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.plan.report import PlannedProgram
from tlt_jax.rollout.dialogue import largest_append
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.executables.programs import (
    Admit,
    Append,
    CatchUp,
    Decode,
    Harvest,
    Prefill,
    Program,
    StateShape,
)
from tlt_jax.rollout.request import block_size, bucket_width
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.interface import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import PLAIN
from tlt_jax.train import (
    adaptive,
    batch as batches,
    environment,
    policy_update,
    teacher as teachers,
)
from tlt_jax.train.memory import RESIDENT, ROLLOUT, cache_slots, caches, device_bytes, pick
from tlt_jax.train.policy_update import Recipe
from tlt_jax.tuner import make


def sizes(config: Config) -> ModelConfig:
    """The model of model.init if it has a vocab_size (no files needed), else that of the model directory."""
    if "vocab_size" in config.model.init:
        return hf_config.new_config(config.model.init, config.model.init["vocab_size"], ())
    return from_config.model_config(config, prompt_format.tokenizer_of(config))


def drafter(config: Config, model: ModelConfig) -> DrafterConfig | None:
    """The run's drafter; a new one, which a line says, in the place of one of the hub: planning downloads nothing."""
    hub_id = config.speculation.drafter == ADAPTIVE and from_config.hub_start(config)
    if not hub_id:
        return from_config.drafter_config(config, model)
    print(f"{hub_id} is not downloaded: planning for a new {config.drafter_training.kind} drafter")
    return from_config.new_drafter_config(config, model)


def lower(
    config: Config, recipe: Recipe, engine: Engine, kinds: dict[str, int]
) -> Iterator[PlannedProgram]:
    """The largest programs of a step: prefill, rollout chunks, reshards, updates."""
    resident, rollout = pick(kinds, *RESIDENT), pick(kinds, *RESIDENT, *ROLLOUT)
    yield from lower_rollout(config, recipe, engine, rollout)
    params = policy_update.abstract_policy(recipe)
    copy = resident | pick(kinds, "rollout copy")
    yield PlannedProgram(
        "rollout reshard", partial(engine.reshard.lower, params), recipe.mesh, copy
    )

    rows = batches.abstract_rows_of(config, recipe)
    programs, sums = policy_update.programs(recipe), policy_update.abstract_sums(recipe, rows)
    names = "log-probs", "log-probs of the reference"
    base = policy_update.abstract_base(recipe)
    for name, scored in zip(names, batches.scored_policies(config, params, base), strict=False):
        scores = partial(programs.score.lower, scored, batches.bare(rows))
        yield PlannedProgram(name, scores, recipe.mesh, resident)
    if (teaching := teachers.recipe_of(config, recipe)) and config.algorithm.teacher.path != SELF:
        weights = policy_update.abstract_policy(teaching)
        given, top_k = batches.bare(rows)._replace(experts=None), config.algorithm.teacher.top_k
        program = policy_update.programs(teaching).score
        if top_k:
            program = teachers.likeliest(teaching, top_k)
        held = resident | {"teacher, else in the host's memory": device_bytes(weights)}
        scores = partial(program.lower, weights, given)
        yield PlannedProgram("log-probs of the teacher", scores, recipe.mesh, held)
    accumulate = partial(programs.accumulate.lower, sums, params, rows)
    holds = resident | pick(kinds, "gradients")
    yield PlannedProgram("policy gradients", accumulate, recipe.mesh, holds)
    state = policy_update.abstract_state(recipe)
    apply = partial(programs.apply.lower, state, sums, state.step)
    yield PlannedProgram("policy update", apply, recipe.mesh, holds)

    if engine.drafter:
        drafting = drafter_recipe.recipe_of(config, recipe.model, engine.drafter, recipe.mesh)
        state = drafter_recipe.abstract_state(drafting)
        reshard = partial(engine.reshard_drafter.lower, state.params)
        yield PlannedProgram(
            "drafter reshard", reshard, recipe.mesh, copy | pick(kinds, "drafter copy")
        )
        is_adaptive = config.speculation.drafter == ADAPTIVE
        if is_adaptive and not config.rollout.deterministic:
            yield from lower_idle_training(config, recipe, engine, kinds)
        if not is_adaptive or config.drafter_training.share:
            batch = drafter_update.abstract_rows(
                recipe.mesh, packing.rows(config), packing.row_tokens(config)
            )
            if drafting.teacher_share:
                batch = batch._replace(
                    teacher_ids=rows.teacher_ids, teacher_logprobs=rows.teacher_logprobs
                )
            update = partial(drafter_update.program(drafting).lower, state, params, batch)
            held = resident | {"drafter optimizer": device_bytes(state.opt_state)}
            yield PlannedProgram("drafter update", update, recipe.mesh, held)


def lower_idle_training(
    config: Config, recipe: Recipe, engine: Engine, kinds: dict[str, int]
) -> Iterator[PlannedProgram]:
    """The programs of idle training: the copies, the largest micro-step of data group 0, and the merge.

    Other groups decode during a micro-step; the group that trains has freed its decoding state, unless it waits for replies.
    """
    training = drafter_recipe.idle_recipe(config, recipe.model, engine.drafter, recipe.mesh)
    spread, merge = drafter_update.merge_programs(training)
    copies = drafter_update.abstract_copies(training)
    held = pick(kinds, *RESIDENT, "drafter in training")
    lowering = partial(spread.lower, drafter_recipe.abstract_state(training))
    yield PlannedProgram("drafter copies", lowering, recipe.mesh, held)
    piece = MicroStep(0, MOST_TOKENS, training)
    names = ROLLOUT if environment.are_used(config) else ("rollout copy", "drafter copy")
    resident = held | pick(kinds, *names)
    lowering = partial(engine.programs.lower, piece)
    yield PlannedProgram("drafter micro-step", lowering, engine.groups[0], resident)
    tokens = jax.ShapeDtypeStruct((recipe.mesh.shape["data"],), jnp.float32)
    lowering = partial(merge.lower, copies, tokens)
    yield PlannedProgram("drafter merge", lowering, recipe.mesh, held)


def lower_rollout(
    config: Config, recipe: Recipe, engine: Engine, holds: dict[str, int]
) -> Iterator[PlannedProgram]:
    """The largest program of each kind in a rollout, and the drafting chunk of each strategy."""
    eos_ids, ids = tuple(recipe.model.eos_ids), validate.kept(config)
    params = DecodingParams(Sampling.of(config.rollout), eos_ids, engine.stops, ids)
    window, slots, goes_on = 0, cache_slots(config), environment.are_used(config)
    sizes = config.data.max_prompt_tokens, config.rollout.prompts, slots
    if goes_on:  # whole conversations are prefilled
        sizes = slots, engine.capacity, slots
    if config.speculation.drafter == ADAPTIVE:
        training = drafter_recipe.idle_recipe(config, recipe.model, engine.drafter, recipe.mesh)
        window = adaptive.replay_config(config, training).width
    for name, program in largest_programs(engine, params, *sizes, window, goes_on).items():
        now = holds
        if isinstance(program, Decode | CatchUp) and program.state.batch != engine.capacity:
            now = holds | caches(config, engine.programs.shapes[0], program.state.batch)
        layers = levels = 0
        if isinstance(program, Decode):
            layers, levels = recipe.model.num_layers, program.strategy.depth
        lowering = partial(engine.programs.lower, program)
        yield PlannedProgram(name, lowering, engine.groups[0], now, layers, levels)


def largest_programs(
    engine: Engine,
    params: DecodingParams,
    prompt_tokens: int,
    prompts: int,
    slots: int,
    window: int = 0,
    goes_on: bool = False,
) -> dict[str, Program]:
    """The largest program of each kind of data group 0, by name: prefill, admission, chunks, catching up.

    With a `window` also the harvest of windows of this width; where answers go on after replies, `goes_on`, also the program
    that appends these. Each strategy has its chunk with the largest batch that the
    tuner may use it for.
    """
    width, rounds = bucket_width(prompt_tokens), engine.config.rollout.chunk
    prefill = Prefill(0, block_size(prompts, width), width)
    state = StateShape(0, engine.capacity, slots)
    found: dict[str, Program] = {
        "prefill": prefill,
        "admission": Admit(state, prefill),
        "rollout chunk": Decode(state, rounds, PLAIN, params),
    }

    drafters = {arm.drafter for arm in engine.arms}
    largest = make.largest_batches(engine.tuner, engine.batches, drafters)
    drafter_of = engine.programs.shapes[0].drafter_of
    if caught_up := [batch for arm, batch in largest.items() if drafter_of(arm).catch_up]:
        batch = max(caught_up)
        found[f"catching up of {batch}"] = CatchUp(StateShape(0, batch, slots))
    for arm in engine.arms:
        if arm in largest:
            shape = StateShape(0, largest[arm], slots)
            title = f"rollout chunk {strategies.name(arm)} of {largest[arm]}"
            found[title] = Decode(shape, rounds, arm, params)
    append = largest_append(engine.capacity, slots)
    if goes_on and append and engine.programs.shapes[0].target.append:
        found["append"] = Append(state, *append)
    if window:
        found["harvest"] = Harvest(state, block_size(engine.capacity, window), window)
    return found
