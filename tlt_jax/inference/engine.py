"""The engine for your own training loop: rollouts, between updates of the policy or with new weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from tlt_jax.checkpoint.store import Store
from tlt_jax.config import Config, load, parse, validate
from tlt_jax.config.schema import NONE, RESOLVED, Algorithm
from tlt_jax.data import prompt_format
from tlt_jax.data.packing import Example, Spans
from tlt_jax.data.prompt_format import Given
from tlt_jax.distributed import mesh as meshes
from tlt_jax.distributed.job import Job
from tlt_jax.errors import ConfigError
from tlt_jax.inference.rollouts import Answer, Rollouts
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.rollout.recorder import NONFINITE
from tlt_jax.train import batch as batches, losses, memory, policy_update
from tlt_jax.train.advantages import answer_weights
from tlt_jax.train.batch import Minibatch
from tlt_jax.train.policy_update import PolicyState, Recipe, Sums, UpdatePrograms


class Backward(NamedTuple):
    """What forward_backward found; `logprobs`: float[T] of the tokens of each answer, None unless asked for."""

    loss: float
    metrics: dict[str, float]
    logprobs: list[np.ndarray] | None


Ids = Sequence[int] | np.ndarray
Datum = Answer | tuple[Given, Ids]  # an answer, or a prompt with an answer's token ids

CROSS_ENTROPY = "cross_entropy"  # loss of `forward_backward`, beside those of algorithm.loss
FIELDS = ("advantages", "weights", "old_logprobs", "rollout_logprobs", "reference_logprobs")
CALLS = "calls"  # key in a saved state's meta


class RolloutModel(Rollouts):
    """A policy that answers prompts, as Rollouts says, and is updated, for a training loop of one's own.

    The update also reads the sections algorithm and optim. `policy`: the weights with their optimizer state, None until they
    are trained here; `sums`: gradients that no optimizer step has applied.
    """

    def __init__(
        self, config: Config, model: ModelConfig, params: Params, tokenizer: Any, job: Job
    ):
        super().__init__(config, model, params, tokenizer, job)
        self.policy: PolicyState | None = None
        self.sums: Sums | None = None
        self.programs: dict[Recipe, UpdatePrograms] = {}

    def close(self) -> None:
        super().close()
        self.policy = self.sums = None

    def update_weights(self, params: Params) -> None:
        """Answers come from these weights from here on: Params in the "train" layout, as arrays of any mesh or of NumPy.

        The engine may share their buffers: they may be donated once the next weights are given, and not before. Gradients
        are dropped, and the optimizer of optim_step begins anew.
        """
        self.check_usable(())
        self.publish(params)
        self.policy, self.sums, self.has_changed = None, None, True

    def forward(self, data: Sequence[Datum]) -> list[np.ndarray]:
        """Log-probs float[T] of the tokens of each answer under the engine's weights, at rollout.temperature."""
        self.check_usable(self.params)
        answers, (_, programs) = self.answers(data), self.update_programs(None)
        batch, spans = self.batch(answers, weights=np.ones(len(answers)))
        return self.logprobs(programs, batch, spans)

    def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str | Callable | None = None,
        *,
        with_logprobs: bool = False,
        **fields: Sequence[float | Ids] | None,
    ) -> Backward:
        """Adds the gradient of sum(weights * loss of each token of the answers) to that of earlier calls, for optim_step.

        `loss`: cross_entropy, or a value of algorithm.loss, by default its own; it may be a function. `with_logprobs`: also
        return the log-probs, for another forward pass. `fields`, with an entry for each answer, a number or one for each of its
        tokens: `advantages`, for all losses but cross_entropy. `weights`: by default the mean of algorithm.aggregation over the
        answers of this call. `old_logprobs`: the divisors of ratios, by default the log-probs of this pass. `rollout_logprobs`:
        for importance weights, by default those of the answers. `reference_logprobs`: for algorithm.kl_coef. Nothing is
        learned from answers that are not finite.
        """
        self.check_usable(self.params)
        answers, (recipe, programs) = self.answers(data), self.update_programs(loss)
        if recipe.is_supervised:
            fields = {"weights": fields.get("weights")}
        elif all(one.logprobs is not None for one in answers):
            fields = {"rollout_logprobs": [one.logprobs for one in answers]} | fields
        fields = {name: values for name, values in fields.items() if values is not None}
        check_given(recipe, fields)
        batch, spans = self.batch(answers, **fields)
        self.begin()
        logprobs = self.logprobs(programs, batch, spans) if with_logprobs else None
        earlier, self.sums = self.sums, None
        sums = policy_update.accumulated(programs, self.params, batch, earlier and earlier.grads)
        total = sums.loss + earlier.loss if earlier else sums.loss
        self.sums = Sums(sums.grads, total, {}, {})
        return Backward(float(sums.loss), numbers(policy_update.measured(sums)), logprobs)

    def optim_step(self, learning_rate: float | None = None) -> dict[str, float]:
        """One step of AdamW on the gradients of forward_backward; answers come from the new weights. Returns its metrics.

        The buffers of the old weights are donated. `learning_rate`: by default that of the section optim, after as many steps.
        A gradient of 0 changes nothing; one that is not finite is left out, and counted in `nonfinite`.
        """
        self.check_usable(self.params)
        if self.sums is None:
            raise ConfigError("there are no gradients: call forward_backward before optim_step")
        given, place = {"step": np.int32(self.policy.step)}, self.policy.step.sharding
        if learning_rate is not None:
            if not (np.isscalar(learning_rate) and 0 < learning_rate < np.inf):
                raise ConfigError(f"learning_rate {learning_rate!r}: give a number above 0")
            given["rate"] = np.float32(learning_rate)
        policy, sums = self.policy, self.sums
        # The rollout's copy may share buffers with the state, which is donated.
        self.policy = self.sums = self.params = self.weights = None
        apply = policy_update.programs(self.policy_recipe).apply
        policy, metrics = apply(policy, sums, **meshes.put(given, place))
        self.train(policy_update.block_on_cpu(policy))
        return numbers(metrics)

    def save_state(self, path: str | Path) -> None:
        """Writes weights, optimizer state and the number of calls to a directory, in place of an earlier state there."""
        self.check_usable(self.params)
        if self.sums is not None:
            raise ConfigError("a state has no gradients: call optim_step before save_state")
        if (Path(path) / RESOLVED).exists():
            raise ConfigError(f"{path} is a run folder: give another directory")
        self.begin()
        with Store(path, keep=1, job=self.engine.job) as store:
            store.save((store.latest() or 0) + 1, {"policy": self.policy}, {CALLS: self.calls})

    def load_state(self, path: str | Path) -> None:
        """Continues from a state of save_state, or from the newest checkpoint of a run folder; gradients are dropped.

        Raises CheckpointError for a directory without one, and for the state of another model.
        """
        self.check_usable(())
        target = {"policy": policy_update.abstract_state(self.policy_recipe)}
        with Store(path, create=False, job=self.engine.job) as store:
            found = store.restore(None, target)
        self.calls, self.sums = found.meta.get(CALLS, self.calls), None
        self.train(found.items["policy"])

    @cached_property
    def policy_recipe(self) -> Recipe:
        """The recipe of the policy's update with algorithm.loss."""
        config, engine = self.config, self.engine
        if rank := config.model.lora.rank:
            raise ConfigError(f"model.lora.rank {rank}: the engine trains all weights: set it to 0")
        if path := config.algorithm.teacher.path:
            raise ConfigError(
                f"algorithm.teacher.path {path!r}: the engine has no teacher: add its log-probs to the advantages, as "
                "examples/distill_loop.py does"
            )
        recipe = Recipe.of(config, self.model, self.mesh, config.train.steps)
        return memory.fitted(config, recipe, engine.learned, engine.job)

    def update_programs(self, loss: str | Callable | None) -> tuple[Recipe, UpdatePrograms]:
        """The recipe of a loss of forward_backward, and its programs. Raises ConfigError for one that is none."""
        recipe, config, engine = self.policy_recipe, self.config, self.engine
        if loss == CROSS_ENTROPY:
            plain = Algorithm(importance=NONE, router_balance=config.algorithm.router_balance)
            recipe = replace(recipe, algorithm=plain, temperature=1.0, is_supervised=True)
        elif loss is not None:
            named = parse.build(Config, {}, load.pairs({"algorithm.loss": loss})).algorithm.loss
            recipe = replace(recipe, algorithm=replace(recipe.algorithm, loss=named))
        if recipe not in self.programs:
            whole = replace(config.algorithm, loss=recipe.algorithm.loss)
            samples = max(config.rollout.samples, 2)  # advantages are the caller's
            validate.validate_algorithm(whole, samples, config.model.compute_dtype)
            losses.check(recipe.algorithm.loss)
            correct = partial(memory.corrected, config, engine.learned, engine.job)
            self.programs[recipe] = policy_update.corrected_programs(config, recipe, correct)
        return recipe, self.programs[recipe]

    def begin(self) -> None:
        """Makes the optimizer state, of a copy of the weights: optim_step donates them, and the caller may have them."""
        if self.policy is None:
            dtype = self.config.model.param_dtype
            self.params = jax.tree.map(lambda leaf: jnp.array(leaf, dtype), self.params)
            self.policy = policy_update.create(self.params, self.policy_recipe)

    def train(self, policy: PolicyState) -> None:
        """Continues, and answers, from this state."""
        self.policy, self.has_changed = policy, True
        self.publish(policy.params)

    def answers(self, data: Sequence[Datum]) -> list[Answer]:
        """The answers of data that an update can take. Raises ConfigError or DataError."""
        size, longest, found = self.model.vocab_size, self.policy_recipe.longest, []
        for number, one in enumerate(data):
            place = f"answer {number}"
            if isinstance(one, tuple) and len(one) == 2:
                prompt = prompt_format.encode(one[0], self.config, self.tokenizer, place).tokens
                tokens = prompt_format.of_ids(one[1], place).tokens
                one = Answer(number, 0, prompt, tokens, None, "stop", None)
            if not isinstance(one, Answer):
                raise ConfigError(
                    f"{place} is a {type(one).__name__}: give those of generate, or (prompt, token ids)"
                )
            length = len(one.prompt_tokens) + len(one.tokens)
            if (most := max(one.prompt_tokens.max(), one.tokens.max())) >= size:
                raise ConfigError(
                    f"{place}: token {most} is outside the vocabulary of {size}: use ids from 0 to {size - 1}"
                )
            if length > longest:
                raise ConfigError(
                    f"{place} has {length} tokens with its prompt, and an update takes {longest}: open the engine with a "
                    "larger data.max_prompt_tokens or rollout.max_new_tokens"
                )
            found.append(one)
        if not found:
            raise ConfigError("there are no answers to learn from: give those of generate")
        return found

    def batch(
        self,
        answers: Sequence[Answer],
        weights: Any = None,
        advantages: Any = None,
        **logprobs: Any,
    ) -> tuple[Minibatch, Spans]:
        """The answers and these fields of forward_backward in rows of an update, and where they lie. Raises ConfigError."""
        config, is_finite = self.config, batches.is_finite(answers)
        packed = batches.pack_rows(
            config, [Example(i, one.prompt_tokens * ok, one.tokens * ok)
                     for i, (one, ok) in enumerate(zip(answers, is_finite, strict=True))],
        )  # fmt: skip
        if weights is None:
            knobs = config.algorithm.aggregation, config.rollout.max_new_tokens
            kept = batches.is_kept(config, answers)
            weights = answer_weights(packed[1].counts, *knobs, kept)
        if advantages is None:
            advantages = np.zeros(len(answers))
        fields = {"weights": weights, "advantages": advantages} | logprobs
        fields = {name: per_token(name, one, answers) for name, one in fields.items()}
        if min(one.min() for one in fields["weights"]) < 0:
            raise ConfigError("weights are below 0: give those from 0 on, and a sign to advantages")
        recipe = self.policy_recipe
        return batches.make_batch(packed, recipe, is_finite=is_finite, **fields), packed[1]

    def logprobs(
        self, programs: UpdatePrograms, batch: Minibatch, spans: Spans
    ) -> list[np.ndarray]:
        """Log-probs of the tokens of each answer in these rows."""
        bare = [rows._replace(rollout_logprobs=None) for rows in batch]
        bare = batches.scored(programs, self.params, bare, "update_logprobs")
        everywhere = NamedSharding(self.mesh, PartitionSpec())
        found = jax.device_get(jax.device_put([rows.update_logprobs for rows in bare], everywhere))
        places = zip(spans.places, spans.lengths, strict=True)
        return [found[step][row, first : first + length] for (step, row, first), length in places]


def check_given(recipe: Recipe, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for unknown fields, and when the loss of the recipe lacks one."""
    algorithm = recipe.algorithm
    if unknown := [name for name in given if name not in FIELDS]:
        raise ConfigError(f"there is no {unknown[0]!r}: give some of {', '.join(FIELDS)}")
    needs = {
        "advantages": "" if recipe.is_supervised else f"loss {algorithm.loss}",
        "rollout_logprobs": (algorithm.importance != NONE) * f"importance {algorithm.importance}",
        "reference_logprobs": (algorithm.kl_coef > 0) * f"kl_coef {algorithm.kl_coef:g}",
    }
    if missing := [name for name, what in needs.items() if what and name not in given]:
        raise ConfigError(f"{needs[missing[0]]} needs {missing[0]}: give an entry for each answer")


def per_token(name: str, values: Sequence[Any], answers: Sequence[Answer]) -> list[np.ndarray]:
    """float64[T] of each answer, of a number or one for each token; 0 where it is not finite. Raises ConfigError."""
    if not isinstance(values, Sequence | np.ndarray) or len(values) != len(answers):
        raise ConfigError(
            f"{name} are not one entry for each of the {len(answers)} answers: give so many"
        )
    found = []
    for number, (value, one) in enumerate(zip(values, answers, strict=True)):
        array = np.asarray(0 if one.finish == NONFINITE else value, np.float64)
        if array.shape not in ((), one.tokens.shape):
            raise ConfigError(
                f"{name} of answer {number} have shape {array.shape}, and it has {len(one.tokens)} tokens: give a number, or "
                "one for each token"
            )
        if not np.isfinite(array).all():
            raise ConfigError(f"{name} of answer {number} are not finite: leave it out")
        found.append(np.broadcast_to(array, one.tokens.shape))
    return found


def numbers(metrics: Mapping[str, jax.Array]) -> dict[str, float]:
    """The metrics on the host."""
    return {name: float(value) for name, value in jax.device_get(dict(metrics)).items()}
