"""The teacher of on-policy distillation: its log-probs of the policy's own tokens (algorithm.teacher).

Shapes: R packed rows of T tokens, K tokens that the teacher finds most likely.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from tlt_jax.config import Config, parse
from tlt_jax.config.schema import SELF
from tlt_jax.data import packing, prompt_format
from tlt_jax.data.dataset import Dataset
from tlt_jax.data.packing import PackedRows, Spans
from tlt_jax.data.prompt_format import Encoder, Prompt
from tlt_jax.distributed.mesh import is_cpu, put, sharding
from tlt_jax.errors import DataError, ModelError
from tlt_jax.models import hf, hf_config, shelf, targets
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.rollout.recorder import Completion
from tlt_jax.train import batch as batches, policy_update
from tlt_jax.train.batch import Batch
from tlt_jax.train.policy_update import Recipe, UpdatePrograms

HOST = "pinned_host"  # memory of a device's host


@dataclass(frozen=True)
class Teacher:
    """Gives rows the teacher's log-probs. `recipe`: of its model, in the compute dtype.

    `params`: None for the policy itself. On accelerators they lie in the memory of the hosts, and are copied to the devices
    for each step, when these hold neither caches nor gradients.
    """

    config: Config
    recipe: Recipe
    encoder: Encoder
    params: Params | None

    def scored(
        self,
        batch: Batch,
        policy: Params,
        prompts: Sequence[Prompt],
        answers: Sequence[Completion],
    ) -> Batch:
        """The batch with the log-probs of the teacher; `policy`: the weights of a policy that teaches itself."""
        knobs, params = self.config.algorithm.teacher, policy
        if self.params is not None:
            params = jax.device_put(self.params, resident(self.recipe))
        if knobs.hint:
            parts = batches.split(self.config, answers)
            given = zip(batch.minibatches, batch.spans, parts, strict=True)
            found = [
                self.hinted(rows, spans, params, prompts, [answers[i] for i in part])
                for rows, spans, part in given
            ]
        elif knobs.top_k:
            likely = likeliest(self.recipe, knobs.top_k)
            found = [
                [self.with_likeliest(rows, likely, params) for rows in one]
                for one in batch.minibatches
            ]
        else:
            programs = policy_update.programs(self.recipe)
            found = [
                [
                    rows._replace(teacher_logprobs=one)
                    for rows, one in zip(
                        minibatch, self.logprobs(programs, params, minibatch), strict=True
                    )
                ]
                for minibatch in batch.minibatches
            ]
        return batch._replace(minibatches=found)

    def bare(self, rows: PackedRows) -> PackedRows:
        """The rows as the teacher reads them; experts are those of the policy."""
        rows = batches.bare(rows)
        return rows if self.params is None else rows._replace(experts=None)

    def logprobs(
        self, programs: UpdatePrograms, params: Params, minibatch: Sequence[PackedRows]
    ) -> list[Array]:
        """The log-probs of the rows' targets."""
        return policy_update.token_logprobs(programs, params, [self.bare(one) for one in minibatch])

    def with_likeliest(
        self, rows: PackedRows, likely: jax.stages.Wrapped, params: Params
    ) -> PackedRows:
        """The rows with ids and log-probs of the tokens that the teacher finds most likely."""
        ids, logprobs = policy_update.block_on_cpu(likely(params, self.bare(rows)))
        return rows._replace(teacher_ids=ids, teacher_logprobs=logprobs)

    def hinted(
        self,
        minibatch: list[PackedRows],
        spans: Spans,
        params: Params,
        prompts: Sequence[Prompt],
        answers: Sequence[Completion],
    ) -> list[PackedRows]:
        """A minibatch with log-probs after prompts that end with the hint. A collective of all processes."""
        config, mesh = self.config, self.recipe.mesh
        known = [prompts[one.prompt] for one in answers]
        rows = [hinted_row(one.row, config.algorithm.teacher.hint) for one in known]
        longer = self.encoder.prompts(rows)
        examples = [
            batches.example(longer, replace(one, prompt=index)) for index, one in enumerate(answers)
        ]
        longest = max(example.length for example in examples)
        width = packing.row_tokens(config)
        while width < longest:  # few widths, since each is compiled
            width *= 2
        packed = packing.pack(examples, width, packing.rows(config), config.mesh.data)
        recipe = replace(self.recipe, longest=None)
        theirs = batches.make_batch(packed, recipe, *np.ones((2, len(examples))))
        programs, everywhere = policy_update.programs(recipe), batches.replicated(mesh)
        found = self.logprobs(programs, params, theirs)
        found = np.stack(jax.device_get([everywhere(one) for one in found])).astype(np.float64)
        values = [
            found[step, row, first : first + length]
            for (step, row, first), length in zip(packed[1].places, packed[1].lengths, strict=True)
        ]
        placed = put(list(spans.place(values)), policy_update.rows_sharding(mesh))
        return [
            rows._replace(teacher_logprobs=part)
            for rows, part in zip(minibatch, placed, strict=True)
        ]


def hinted_row(row: dict[str, Any], hint: str) -> dict[str, Any]:
    """The row whose prompt ends with its column `hint`."""
    prompt, text = row["prompt"], f"\n{row[hint]}"
    if isinstance(prompt, str):
        return {**row, "prompt": prompt + text}
    *before, last = prompt
    return {**row, "prompt": [*before, last | {"content": last["content"] + text}]}


def resident(recipe: Recipe) -> Any:
    """The shardings of the teacher's weights on the devices."""
    return jax.tree.map(lambda leaf: leaf.sharding, policy_update.abstract_policy(recipe))


def recipe_of(config: Config, recipe: Recipe) -> Recipe | None:
    """The recipe of the teacher's log-probs, from that of the policy; None without a teacher. Reads its config.json."""
    knobs = config.algorithm.teacher
    if not knobs.path:
        return None
    temperature = knobs.temperature or recipe.temperature
    found = replace(recipe, temperature=temperature)
    if knobs.path == SELF:
        return found
    model = hf_config.read_config(hf.resolve(parse.expand(knobs.path, "algorithm.teacher.path")))
    logits_chunk, block = targets.blocks(model.vocab_size, recipe.mesh)
    return replace(
        found, model=model, lora=None, param_dtype=recipe.compute_dtype, logits_chunk=logits_chunk,
        attention_block=block, remat=(),
    )  # fmt: skip


def check(config: Config, dataset: Dataset, policy: ModelConfig) -> None:
    """Raises ModelError for a teacher with another vocabulary, and DataError for rows that lack its hint.

    Also where prompt, hint and answer may be longer than the teacher's positions.
    """
    knobs, ours = config.algorithm.teacher, dataset.encoder.tokenizer
    rows = dataset.train if dataset.task is None else dataset.prompts(0)
    if lacking := [one for one in rows if knobs.hint and one.row.get(knobs.hint) is None]:
        raise DataError(
            f"row {lacking[0].id} has no column {knobs.hint!r}, which algorithm.teacher.hint names: its columns are "
            f"{', '.join(lacking[0].row)}"
        )
    if not knobs.path:
        return
    model, directory = policy, None
    if knobs.path != SELF:
        directory = hf.resolve(parse.expand(knobs.path, "algorithm.teacher.path"))
        model = hf_config.read_config(directory)
    longest, which = config.data.max_prompt_tokens, "data.max_prompt_tokens"
    if knobs.hint:
        hinted = dataset.encoder.prompts([hinted_row(one.row, knobs.hint) for one in rows])
        longest, which = max(
            ((len(one.tokens), f"prompt and {knobs.hint} of row {one.id}") for one in hinted),
            default=(0, ""),
        )
    answer = config.rollout.max_new_tokens
    if longest + answer > model.max_positions:
        raise DataError(
            f"{which} {longest} + rollout.max_new_tokens {answer} = {longest + answer}, and the teacher has "
            f"{model.max_positions} positions: lower one of them, or use another teacher"
        )
    if directory is None:
        return
    theirs, size = prompt_format.find_tokenizer(directory), model.vocab_size
    if theirs is not None and shelf.vocabulary_digest(theirs) != shelf.vocabulary_digest(ours):
        known, other = ours.get_vocab(), theirs.get_vocab()
        token = min(set(known.items()) ^ set(other.items()), key=lambda one: (one[1], one[0]))
        raise ModelError(
            f"algorithm.teacher.path {directory} has another vocabulary than the policy (token {token[1]} is not the same in "
            "both): its log-probs would be of other tokens: use a teacher with the policy's tokenizer"
        )
    if size < len(ours):
        raise ModelError(
            f"algorithm.teacher.path {directory} has a vocabulary of {size} tokens, the policy's tokenizer {len(ours)}: use a "
            "teacher with the policy's tokenizer"
        )


def load(config: Config, recipe: Recipe, encoder: Encoder) -> Teacher | None:
    """The teacher of a run whose policy has this recipe; None without one."""
    found = recipe_of(config, recipe)
    if found is None or config.algorithm.teacher.path == SELF:
        return found and Teacher(config, found, encoder, None)
    directory = hf.resolve(parse.expand(config.algorithm.teacher.path, "algorithm.teacher.path"))
    params = hf.load(directory, found.model, found.mesh, found.compute_dtype)
    if not is_cpu(found.mesh):
        away = jax.tree.map(lambda leaf: leaf.with_memory_kind(HOST), resident(found))
        params = jax.device_put(params, away)
    return Teacher(config, found, encoder, params)


@cache
def likeliest(recipe: Recipe, top_k: int) -> jax.stages.Wrapped:
    """The jitted ids and log-probs [R, T, K] of the tokens that the teacher finds most likely at each target."""
    axes = sharding(recipe.mesh, ("batch", None, None), "train")
    return jax.jit(partial(likeliest_of, recipe=recipe, top_k=top_k), out_shardings=(axes, axes))


def likeliest_of(
    params: Params, rows: PackedRows, recipe: Recipe, top_k: int
) -> tuple[Int[Array, "R T K"], Float[Array, "R T K"]]:
    """`likeliest`."""
    x, _ = policy_update.states(params, rows, recipe)

    def rule(logits: Array, _: Any) -> tuple[Array, Array]:
        logp = targets.log_softmax(logits, recipe.temperature)
        values, ids = jax.lax.top_k(logp, min(top_k, recipe.model.vocab_size))
        return ids.astype(jnp.int32), values

    return targets.target_values(
        params, recipe.model, recipe.mesh, x, (), rows.is_answer, rule, chunk=recipe.logits_chunk
    )
