"""One optimizer step of the policy over the whole mesh, for GRPO or supervised learning.

Shapes: R packed rows of an accumulation step, T tokens of a row. The host loops over accumulation steps: one program
serves any number of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Bool, Float, Int

from tlt_jax import optimizer
from tlt_jax.config import Config
from tlt_jax.config.schema import AUTO, LOSS, NONE, Algorithm
from tlt_jax.config.validate import importance
from tlt_jax.data import packing
from tlt_jax.data.packing import PackedRows
from tlt_jax.distributed.mesh import is_cpu, put, sharding
from tlt_jax.models import architecture, lora, moe, targets, transformer
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.models.lora import Adapters
from tlt_jax.models.low_rank import Lora
from tlt_jax.models.moe import Routers
from tlt_jax.models.remat import Remat
from tlt_jax.optimizer import Adam, TrainState
from tlt_jax.train import losses

# Most accumulation steps in flight on accelerators.
IN_FLIGHT = 8
EMPTY = "empty_updates"  # metric: 1 when a batch had no targets or no gradient
ROUTERS = "routers"  # total of what routers did


PolicyState = TrainState  # with params of what is trained
Trained = Params | Adapters  # all weights, or adapters of a frozen base


@dataclass(frozen=True)
class Recipe:
    """The static arguments of the programs of a policy update.

    `algorithm`: what the loss minimizes, with importance resolved, and kl_coef 0 unless the KL is in the loss; with
    `is_supervised` the loss is the negative log-likelihood of the answers.
    """

    model: ModelConfig
    mesh: Mesh
    adam: Adam
    algorithm: Algorithm = Algorithm(importance=NONE)
    temperature: float = 1.0  # of log-probs
    is_supervised: bool = False
    param_dtype: str = "float32"
    compute_dtype: str = "float32"
    remat: Remat = ()
    logits_chunk: int = 1024
    attention_block: int = 128
    longest: int | None = None  # tokens of the longest example; None: the row length
    lora: Lora | None = None  # None: all weights are trained

    @classmethod
    def of(cls, config: Config, model: ModelConfig, mesh: Mesh, total_steps: int) -> Recipe:
        """The recipe of a run of `total_steps` RL steps.

        Log-probs are at the temperature of the rollout. With model.remat auto, `memory.fitted` chooses the levels, without
        which programs with a backward pass cannot be made.
        """
        sizes, algorithm = config.model, config.algorithm
        logits_chunk, attention_block = targets.blocks(model.vocab_size, mesh)
        return cls(
            model,
            mesh,
            Adam.of(config, total_steps),
            replace(
                algorithm,
                importance=importance(algorithm, sizes.compute_dtype),
                kl_coef=algorithm.kl_coef if algorithm.kl_in == LOSS else 0.0,
            ),
            config.rollout.temperature,
            param_dtype=sizes.param_dtype,
            compute_dtype=sizes.compute_dtype,
            remat=(sizes.remat,) * model.num_layers,
            logits_chunk=logits_chunk,
            attention_block=attention_block,
            longest=packing.longest(config),
            lora=lora.chosen(sizes.lora, model),
        )


@struct.dataclass
class Sums:
    """Accumulated over steps: gradients in at least float32, losses, and values for metrics.

    `totals` are sums over targets, `maxima` are maxima over them.
    """

    grads: Trained
    loss: Float[Array, ""]
    totals: dict[str, Array]
    maxima: dict[str, Array]


def create(params: Trained, recipe: Recipe) -> PolicyState:
    """The state before the first update. It owns `params`: the first update donates them."""
    return optimizer.create(recipe.adam, params, recipe.mesh)


@cache
def abstract_state(recipe: Recipe) -> PolicyState:
    """ShapeDtypeStructs with shardings of the state, to restore a checkpoint or to compile."""
    if recipe.lora:
        params = lora.abstract(recipe.lora, recipe.model, recipe.mesh, recipe.param_dtype)
    else:
        params = architecture.abstract(recipe.model, recipe.mesh, "train", recipe.param_dtype)
    return optimizer.abstract(recipe.adam, params, recipe.mesh)


def abstract_base(recipe: Recipe) -> Params | None:
    """ShapeDtypeStructs with shardings of the frozen base of adapters, in the compute dtype; None without adapters."""
    if not recipe.lora:
        return None
    return architecture.abstract(recipe.model, recipe.mesh, "train", recipe.compute_dtype)


def abstract_policy(recipe: Recipe) -> Params:
    """ShapeDtypeStructs with shardings of the policy's weights, as the programs below take them."""
    return lora.whole(abstract_state(recipe).params, abstract_base(recipe))


def share_trained(recipe: Recipe) -> str:
    """How many weights are trained, of how many: `8,192 of 1,048,576 weights train (0.78%)`."""
    trained, policy = (
        sum(leaf.size for leaf in jax.tree.leaves(tree))
        for tree in (abstract_state(recipe).params, abstract_policy(recipe))
    )
    return f"{trained:,} of {policy:,} weights train ({trained / policy:.2%})"


def state_shardings(recipe: Recipe) -> PolicyState:
    """The sharding of every array of the state."""
    return jax.tree.map(lambda leaf: leaf.sharding, abstract_state(recipe))


def states(
    params: Params, rows: PackedRows, recipe: Recipe
) -> tuple[Float[Array, "R T D"], Routers | None]:
    """The last hidden states of one accumulation step, and what the routers did."""
    x, _, routers = transformer.routed_hidden(
        params,
        recipe.model,
        rows.tokens,
        rows.positions,
        rows.segments,
        compute_dtype=recipe.compute_dtype,
        remat=recipe.remat,
        block=recipe.attention_block,
        longest=recipe.longest,
        mesh=recipe.mesh,
        replayed=moe.by_layer(rows.experts, recipe.model),
    )
    return x, routers


def loss(
    params: Params, rows: PackedRows, recipe: Recipe
) -> tuple[Float[Array, ""], tuple[dict, dict]]:
    """The loss of one accumulation step, sum(weights * token loss); for metrics, sums and maxima over its targets.

    Where it needs whole answers, the log-probs of all targets are computed first, then the policy-gradient loss and its
    gradient in them, which the pass with the logits' gradient takes. With experts the totals have ROUTERS, and the
    load-balancing loss is added, weighted by the share of the targets' weights that the step has.
    """
    x, routers = states(params, rows, recipe)
    value, (totals, maxima) = answer_loss(params, x, rows, recipe)
    if routers is None:
        return value, (totals, maxima)
    if balance := recipe.algorithm.router_balance:
        value += balance * jnp.sum(rows.weights) * moe.balance_loss(routers)
    return value, (totals | {ROUTERS: jax.lax.stop_gradient(routers)}, maxima)


def answer_loss(
    params: Params, x: Float[Array, "R T D"], rows: PackedRows, recipe: Recipe
) -> tuple[Float[Array, ""], tuple[dict, dict]]:
    """`loss` from the last hidden states, without what is of the routers."""
    if recipe.is_supervised or not losses.needs_answers(recipe.algorithm):
        return head_loss(params, x, rows, None, recipe)
    logprobs = head_logprobs(*jax.lax.stop_gradient((params, x)), rows, rows.mask, recipe)
    whole = losses.slope(recipe.algorithm, with_logprobs(rows, logprobs, recipe.algorithm))
    rest, (sums, maxima) = head_loss(params, x, rows, whole.grads, recipe)
    totals, peaks = whole.metrics
    return whole.loss + rest, (totals | sums, peaks | maxima)


def head_loss(
    params: Params,
    x: Float[Array, "R T D"],
    rows: PackedRows,
    grads: Float[Array, "R T"] | None,
    recipe: Recipe,
) -> tuple[Float[Array, ""], tuple[dict, dict]]:
    """`group_loss` of all targets, from the last hidden states."""
    return targets.target_loss(
        params,
        recipe.model,
        recipe.mesh,
        x,
        (rows, grads),
        rows.mask,
        partial(group_loss, recipe=recipe),
        chunk=recipe.logits_chunk,
    )


def group_loss(
    logits: Float[Array, "G t V"],
    given: tuple[PackedRows, Float[Array, "G t"] | None],
    recipe: Recipe,
) -> tuple[Float[Array, " G"], tuple[dict, dict]]:
    """The loss of some targets [G, t] of each data group, with its sums and maxima, from their logits.

    `given`: their rows, and None; or the gradient of the policy-gradient loss in their log-probs. Then this loss has its
    gradient, but neither its value nor its metrics.
    """
    (rows, grads), algorithm = given, recipe.algorithm
    mask = rows.mask
    logprobs, entropy = targets.score(
        logits, rows.targets, recipe.temperature, algorithm.entropy_coef != 0, rows.support
    )
    logprobs, entropy = jnp.where(mask, logprobs, 0), jnp.where(mask, entropy, 0)

    if recipe.is_supervised:
        return jnp.sum(rows.weights * -logprobs, axis=-1), ({}, {})

    rows = with_logprobs(rows, logprobs, algorithm)
    pg_loss, totals, maxima = jnp.zeros_like(logprobs), {}, {}
    if grads is None:
        pg_loss, totals, maxima = losses.token_losses(algorithm, rows)
    token_loss = pg_loss - algorithm.entropy_coef * entropy
    totals |= {"tokens": mask, "entropy": entropy}

    if rows.reference_logprobs is not None:
        reference = jnp.where(mask, rows.reference_logprobs, 0)
        totals["kl"] = kl = losses.kl_k3(logprobs, reference)
        if algorithm.kl_coef:
            token_loss += algorithm.kl_coef * kl
    if rows.teacher_ids is not None:
        given = rows.teacher_ids, rows.teacher_logprobs
        totals["teacher_kl"] = kl = jnp.where(mask, teacher_kl(logits, *given, recipe), 0)
        token_loss += algorithm.teacher.weight * kl
    elif rows.teacher_logprobs is not None:
        totals["teacher_kl"] = rows.old_logprobs - jnp.where(mask, rows.teacher_logprobs, 0)
    if rows.rollout_logprobs is not None:
        difference = jnp.abs(rows.old_logprobs - rows.rollout_logprobs)
        totals["rollout_logprob_diff_mean"] = maxima["rollout_logprob_diff_max"] = difference

    sums = losses.summed(mask, totals, token_loss.dtype)
    loss = jnp.sum(rows.weights * token_loss, axis=-1)
    if grads is None:
        sums["pg_loss"] = jnp.sum(rows.weights * pg_loss, axis=-1)
    else:
        loss += jnp.sum(grads * (logprobs - jax.lax.stop_gradient(logprobs)), axis=-1)
    return loss, (sums, losses.largest(mask, maxima))


def teacher_kl(
    logits: Float[Array, "G t V"],
    ids: Int[Array, "G t K"],
    teacher: Float[Array, "G t K"],
    recipe: Recipe,
) -> Float[Array, "G t"]:
    """KL(policy, teacher) over the K tokens that the teacher finds most likely, and all others as one; it has a gradient."""
    policy = jnp.take_along_axis(targets.log_softmax(logits, recipe.temperature), ids, axis=-1)
    others, theirs = targets.rest(policy), targets.rest(teacher)
    return jnp.sum(jnp.exp(policy) * (policy - teacher), axis=-1) + jnp.exp(others) * (
        others - theirs
    )


def with_logprobs(
    rows: PackedRows, logprobs: Float[Array, "R T"], algorithm: Algorithm
) -> PackedRows:
    """The rows as a loss reads them, with the log-probs of the update, 0 where it counts nothing.

    Without old log-probs these are the given ones, without a gradient. With a teacher's log-probs of the tokens, its weight
    times the difference to the old ones is added to the advantages: a sample of the reverse KL (Lu et al. 2025, On-Policy
    Distillation; Gu et al. 2023, arXiv 2306.08543).
    """
    mask, old, rollout = rows.mask, rows.old_logprobs, rows.rollout_logprobs
    old = jax.lax.stop_gradient(logprobs) if old is None else jnp.where(mask, old, 0)
    advantages = rows.advantages
    if rows.teacher_logprobs is not None and rows.teacher_ids is None:
        ahead = jnp.where(mask, rows.teacher_logprobs, 0) - old
        advantages = advantages + algorithm.teacher.weight * ahead
    return rows._replace(
        update_logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=None if rollout is None else jnp.where(mask, rollout, 0),
        advantages=advantages,
    )


def empty(params: Params, rows: PackedRows, recipe: Recipe) -> Sums:
    """Zero sums, before the first accumulation step. Raises ValueError when the rows lack log-probs that the loss needs."""
    algorithm = recipe.algorithm
    if algorithm.kl_coef and rows.reference_logprobs is None:
        raise ValueError(f"kl_coef {algorithm.kl_coef} needs rows.reference_logprobs: give them")
    if algorithm.importance != NONE and rows.rollout_logprobs is None:
        needs = f"importance {algorithm.importance} needs rows.rollout_logprobs"
        raise ValueError(f"{needs}: give them")
    value, (totals, maxima) = jax.eval_shape(partial(loss, recipe=recipe), params, rows)
    sums = Sums(optimizer.widen(lora.parted(params)[0]), value, totals, maxima)
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), sums)


def accumulate(
    sums: Sums, params: Params, rows: PackedRows, recipe: Recipe
) -> tuple[Sums, Float[Array, ""]]:
    """The sums after another accumulation step, and the loss of that step.

    The backward pass adds the gradient of each layer to its place in the donated sums, so no second tree of gradients
    exists. Of a policy with adapters only these are differentiated.
    """
    trained, base = lora.parted(params)

    def trained_loss(trained: Trained) -> tuple[Float[Array, ""], tuple[dict, dict]]:
        return loss(lora.whole(trained, base), rows, recipe)

    value, backward, (totals, maxima) = jax.vjp(trained_loss, trained, has_aux=True)
    grads = jax.tree.map(jax.new_ref, sums.grads)
    backward.with_refs(grads)(jnp.ones_like(value))
    grads = jax.tree.map(jax.freeze, grads)
    return Sums(
        jax.lax.with_sharding_constraint(grads, state_shardings(recipe).params),
        sums.loss + value,
        jax.tree.map(jnp.add, sums.totals, totals),
        jax.tree.map(jnp.maximum, sums.maxima, maxima),
    ), value


def apply(
    state: PolicyState,
    sums: Sums,
    step: Int[Array, ""],
    recipe: Recipe,
    rate: Float[Array, ""] | None = None,
) -> tuple[PolicyState, dict[str, Array]]:
    """The state after one optimizer step on the gradients of a whole batch, and its metrics; `step`: of the schedule.

    `rate`: the learning rate, None for that of the schedule.

    A non-finite update leaves weights and moments unchanged; a batch without targets, or whose gradient is 0, the whole
    state. Metrics are means or maxima over targets, 0 without any, and the divisors of the means: numbers of tokens, and of
    answers.
    """
    norm, tokens = optax.tree.norm(sums.grads), sums.totals.get("tokens")
    is_finite = jnp.isfinite(sums.loss) & jnp.isfinite(norm)
    # A gradient of 0 moves no weight either, as moments and decay would.
    learns = (norm > 0) | ~is_finite
    if tokens is not None:
        learns &= tokens > 0
    state, rate = optimizer.advance(state, sums.grads, is_finite, recipe.adam, learns, step, rate)
    found = {"loss": sums.loss, "grad_norm": norm, "lr": rate, "nonfinite": state.skipped}
    if tokens is not None:
        found[EMPTY] = (~learns).astype(jnp.int32)
    return state, found | measured(sums)


def measured(sums: Sums) -> dict[str, Array]:
    """The metrics of sums: means and maxima over targets, and what routers did."""
    totals = dict(sums.totals)
    routers = totals.pop(ROUTERS, None)
    found = losses.means(totals) | sums.maxima
    return found if routers is None else found | moe.scalars(routers)


def score(params: Params, rows: PackedRows, recipe: Recipe) -> Float[Array, "R T"]:
    """Log-probability of each target, also of those that the loss leaves out; 0 elsewhere."""
    x, _ = states(params, rows, recipe)
    scores = head_logprobs(params, x, rows, rows.is_answer, recipe)
    return scores.astype(rows.weights.dtype)


def head_logprobs(
    params: Params,
    x: Float[Array, "R T D"],
    rows: PackedRows,
    is_target: Bool[Array, "R T"],
    recipe: Recipe,
) -> Float[Array, "R T"]:
    """Log-probability of the rows' targets where `is_target`, 0 elsewhere, from the last hidden states."""

    def rule(logits: Array, given: tuple[Array, Array | None]) -> Array:
        return targets.score(logits, given[0], recipe.temperature, False, given[1])[0]

    head, given = (params, recipe.model, recipe.mesh), (rows.targets, rows.support)
    return targets.target_values(*head, x, given, is_target, rule, chunk=recipe.logits_chunk)


class UpdatePrograms(NamedTuple):
    """The jitted functions of a recipe; all but `apply` run one accumulation step.

    empty(params, rows); accumulate(sums, params, rows) donates the sums; apply(state, sums, step, rate=None)
    donates the state; score(params, rows).
    """

    empty: jax.stages.Wrapped
    accumulate: jax.stages.Wrapped
    apply: jax.stages.Wrapped
    score: jax.stages.Wrapped


@cache
def programs(recipe: Recipe) -> UpdatePrograms:
    """The programs of the policy update over the whole mesh.

    To compile them ahead of time, lower them with abstract_state, whose `step` is as that of `apply`, abstract_rows and
    abstract_sums.
    Sums and state come out with the shardings they went in with, so each program compiles once.
    """
    everywhere, state = NamedSharding(recipe.mesh, PartitionSpec()), state_shardings(recipe)
    sums = Sums(state.params, everywhere, everywhere, everywhere)
    return UpdatePrograms(
        jax.jit(partial(empty, recipe=recipe), out_shardings=sums),
        jax.jit(
            partial(accumulate, recipe=recipe),
            donate_argnames="sums",
            out_shardings=(sums, everywhere),
        ),
        jax.jit(
            partial(apply, recipe=recipe),
            donate_argnames="state",
            out_shardings=(state, everywhere),
        ),
        jax.jit(partial(score, recipe=recipe), out_shardings=rows_sharding(recipe.mesh)),
    )


# A recipe, and the bytes of temporaries on a device of its compiled accumulation step, to the recipe to use instead.
Correct = Callable[[Recipe, int], Recipe]


class Accumulation:
    """`accumulate` of `recipe`, which the first call corrects until it stays as it is.

    Where a corrected recipe differs, it compiles again; else it costs nothing, since the call needs the compiled program.
    """

    __name__ = "accumulate"  # in what is logged

    def __init__(self, recipe: Recipe, correct: Correct):
        self.recipe, self.correct, self.is_checked = recipe, correct, False

    @property
    def program(self) -> jax.stages.Wrapped:
        """The jitted function of the recipe."""
        return programs(self.recipe).accumulate

    def lower(self, *arguments: Any) -> jax.stages.Lowered:
        """That of the program."""
        return self.program.lower(*arguments)

    def __call__(self, *arguments: Any) -> Any:
        while not self.is_checked:
            compiled = self.lower(*arguments).compile()  # the call finds it in JAX's memory
            needed = compiled.memory_analysis().temp_size_in_bytes
            corrected = self.correct(self.recipe, needed)
            self.recipe, self.is_checked = corrected, corrected == self.recipe
        return self.program(*arguments)


def corrected_programs(config: Config, recipe: Recipe, correct: Correct) -> UpdatePrograms:
    """The programs of a run; with model.remat auto, the first accumulation step corrects what layers keep."""
    plain = programs(recipe)
    if config.model.remat != AUTO:
        return plain
    return plain._replace(accumulate=Accumulation(recipe, correct))


def abstract_sums(recipe: Recipe, rows: PackedRows) -> Sums:
    """ShapeDtypeStructs with shardings of the sums over such rows, for compilation."""
    return programs(recipe).empty.eval_shape(abstract_policy(recipe), rows)


def update(
    programs: UpdatePrograms,
    state: PolicyState,
    batch: Sequence[PackedRows],
    step: int,
    base: Params | None = None,
) -> tuple[PolicyState, dict[str, Array]]:
    """The state after one optimizer step on a batch, by accumulation step, and its metrics. It owns `state`.

    `step`: of the schedule, from 0 on: the RL step, for all of its optimizer steps. `base`: of the adapters that the state
    holds; None when it holds all weights.
    """
    sums = accumulated(programs, lora.whole(state.params, base), batch)
    return block_on_cpu(programs.apply(state, sums, put(np.int32(step), state.step.sharding)))


def accumulated(
    programs: UpdatePrograms,
    params: Params,
    batch: Sequence[PackedRows],
    grads: Trained | None = None,
) -> Sums:
    """The sums over a batch, by accumulation step; its gradients are added to `grads`, which it owns."""
    if grads is None:
        sums = block_on_cpu(programs.empty(params, batch[0]))
    else:
        shapes = programs.empty.eval_shape(params, batch[0]).replace(grads=None)
        zeros = jax.tree.map(
            lambda leaf: put(np.zeros(leaf.shape, leaf.dtype), leaf.sharding), shapes
        )
        sums = zeros.replace(grads=grads)
    values = []
    for rows in batch:
        sums, value = programs.accumulate(sums, params, rows)
        values = throttle([*values, value])
    return sums


def token_logprobs(
    programs: UpdatePrograms, params: Params, batch: Sequence[PackedRows]
) -> list[Float[Array, "R T"]]:
    """Log-probability of each target, 0 elsewhere, by accumulation step."""
    scores = []
    for rows in batch:
        scores = throttle([*scores, programs.score(params, rows)])
    return scores


def throttle(results: list[Array]) -> list[Array]:
    """Waits until at most IN_FLIGHT of the results are in flight, on a CPU until none is; returns them."""
    if len(results) > IN_FLIGHT:
        jax.block_until_ready(results[-IN_FLIGHT - 1])
    block_on_cpu(results[-1])
    return results


def block_on_cpu(results: Any) -> Any:
    """Returns the results; on a CPU waits until they are computed.

    Some dozens of programs in flight over several fake devices deadlock: collectives that wait for
    each other occupy every thread of the CPU.
    """
    if is_cpu(jax.tree.leaves(results)[0].sharding.mesh):
        jax.block_until_ready(results)
    return results


def rows_sharding(mesh: Mesh) -> NamedSharding:
    """Packed rows are sharded over the mesh axis "data"."""
    return sharding(mesh, ("batch", None), "train")
