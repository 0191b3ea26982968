"""Prompts of step k, evaluation prompts and worked solutions as functions of (seed, k)."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import grain
import numpy as np

from tlt_jax.config import Config
from tlt_jax.config.task import DROP, Data
from tlt_jax.data import files, prompt_format, tasks
from tlt_jax.data.files import ID, Problems
from tlt_jax.data.prompt_format import Encoder, Prompt, token_bytes
from tlt_jax.data.stop_rules import StopRules, stop_texts
from tlt_jax.errors import DataError
from tlt_jax.keys import ROLLOUT_STREAM, SFT_STREAM, order_seed

EVAL, TRAIN = "eval", "train"  # parts of the data
MOST_TOO_LONG = 0.5  # a larger share of prompts that are too long is a mistake
DROPPED = {  # counts of rows of data.train that are neither training nor evaluation rows
    "duplicates": "duplicates",
    "also_evaluation": "also in the evaluation",
    "too_long": "longer than data.max_prompt_tokens",
}


@dataclass(frozen=True)
class Dataset:
    """Training and evaluation prompts.

    `rows` is None for a generated task, which is unlimited and has no epochs. `trainable`: (prompt
    tokens, solution tokens) for the supervised warm start.
    """

    config: Config
    encoder: Encoder
    task: tasks.Task | None
    train: Sequence[Prompt]
    eval: Sequence[Prompt]
    counts: dict[str, int] = field(default_factory=dict)
    trainable: Sequence[tuple[np.ndarray, np.ndarray]] = ()

    @property
    def rows(self) -> int | None:
        return None if self.task else len(self.train)

    def prompts(self, step: int) -> list[Prompt]:
        """The rollout.prompts prompts of this step of a run that takes as many in every step."""
        size = self.config.rollout.prompts
        return self.window(step * size, size)

    def window(self, position: int, size: int) -> list[Prompt]:
        """The next `size` prompts from a position of the data on.

        Positions continue across epochs; each epoch has its own shuffle.
        """
        positions = range(position, position + size)
        if self.task:
            return _task_prompts(
                self.config, self.task, self.encoder, self.config.train.seed, positions, TRAIN
            )

        order = self._order(ROLLOUT_STREAM, len(self.train))
        return [self.train[int(order[p])] for p in positions]

    def part(self, name: str = EVAL) -> list[Prompt]:
        """The first eval.prompts prompts of a part of the data, or all; the same at every call.

        `name`: "eval"; "train", of a generated task as many as its evaluation split has; or a source of other rows, as in
        data.eval. Raises DataError.
        """
        data = self.config.data
        if name == EVAL:
            prompts = self.eval
        elif name == TRAIN:
            prompts = self.window(0, data.eval_size) if self.task else self.train
        else:
            rows = files.read(self.config, "--split", name, problems := Problems())
            problems.stop_if_any()
            prompts, _ = _short_enough(self.encoder.prompts(rows), data)
        return list(prompts[: self.config.eval.prompts or None])

    def digest(self) -> str:
        """A digest of the training and evaluation rows; for a generated task, of its first step and its evaluation rows."""
        found = hashlib.sha256()
        for prompt in (*(self.train or self.prompts(0)), *self.eval):
            found.update(np.asarray(prompt.tokens, np.int32).tobytes() + b".")
            found.update(str(prompt.row["answer"]).encode() + b".")
        for _, solution in self.trainable:
            found.update(np.asarray(solution, np.int32).tobytes() + b".")
        return found.hexdigest()[:16]

    def digest_of_solutions(self, steps: int, batch: int) -> str:
        """A digest of the rows and of the worked solutions of so many supervised steps; of a generated task as texts."""
        found = hashlib.sha256(self.digest().encode())
        for step in range(steps if self.task else 0):
            positions = range(step * batch, (step + 1) * batch)
            for row in _task_rows(self.task, self.config.train.seed, positions, "sft"):
                found.update(json.dumps([row["prompt"], row["solution"]], default=str).encode())
        return found.hexdigest()[:16]

    @property
    def dropped(self) -> int:
        """Number of rows of data.train that are neither training nor evaluation rows."""
        return sum(self.counts.get(name, 0) for name in DROPPED)

    def describe(self) -> str:
        """One line about the rows: how many are used, and how many were dropped and why."""
        counts = self.counts
        if self.task:
            return f"data: generated task {self.config.data.task}, {counts['eval_rows']} rows of evaluation"
        found = [f"{counts[name]:,} {why}" for name, why in DROPPED.items() if counts.get(name)]
        line = f"data: {counts['train_rows']:,} of {counts['rows']:,} rows"
        line += f" (dropped: {', '.join(found)})" if found else ""
        line += f", {counts['eval_rows']:,} of evaluation"
        if counts["eval_too_long"]:
            line += f" ({counts['eval_too_long']:,} longer than data.max_prompt_tokens dropped)"
        if counts.get("solutions", 0) > counts["train_rows"]:
            line += f"; {counts['solutions']:,} solutions for the warm start"
        if counts.get("solutions_too_long"):
            line += f"; {counts['solutions_too_long']:,} solutions longer than rollout.max_new_tokens are not trained on"
        return line

    def solutions(self, step: int, batch: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """(prompt tokens, solution tokens with EOS) of a supervised step, independent of `prompts`.

        Raises DataError when the dataset was loaded with sft.steps 0.
        """
        positions = range(step * batch, (step + 1) * batch)
        if self.task:
            rows = _task_rows(self.task, self.config.train.seed, positions, "sft")
            tokens = [prompt.tokens for prompt in self.encoder.prompts(rows)]
            return list(zip(tokens, self.encoder.solutions(rows), strict=True))

        if not self.trainable:
            raise DataError(
                f"sft.steps is {self.config.sft.steps}: the solutions were not read; set it above 0"
            )

        order = self._order(SFT_STREAM, len(self.trainable))
        return [self.trainable[int(order[p])] for p in positions]

    def _order(self, stream: int, rows: int) -> grain.MapDataset:
        order = grain.MapDataset.range(rows).seed(order_seed(self.config.train.seed, stream))
        return (order.shuffle() if self.config.data.shuffle else order).repeat()


def stop_rules(config: Config, tokenizer: Any) -> StopRules | None:
    """The rules for the texts of rollout.stop. Raises DataError for a tokenizer of unknown kind."""
    if not config.rollout.stop:
        return None
    return stop_texts(config.rollout.stop, token_bytes(tokenizer))


def load(config: Config, tokenizer: Any) -> Dataset:
    """The data set of a configuration.

    Raises DataError with all problems of its files.
    """
    encoder = prompt_format.encoder(config, tokenizer)
    return _load_files(config, encoder) if config.data.train else _load_task(config, encoder)


def _load_task(config: Config, encoder: Encoder) -> Dataset:
    data = config.data
    task = tasks.make(data.task, data.task_args)
    if data.eval:
        raise DataError(
            f"data.eval {data.eval!r} needs data.train: a generated task makes its own evaluation split"
        )

    longest = _with_id(task.longest_row())
    limit, tokens = data.max_prompt_tokens, encoder.prompts([longest])[0].tokens
    longest_texts = [("prompt", tokens, "data.max_prompt_tokens", limit)]
    if config.sft.steps:
        limit, tokens = config.rollout.max_new_tokens, encoder.solutions([longest])[0]
        longest_texts.append(("solution (with EOS)", tokens, "rollout.max_new_tokens", limit))
    for what, tokens, knob, limit in longest_texts:
        if len(tokens) > limit:
            raise DataError(
                f"the task's longest {what} has {len(tokens)} tokens and {knob} is {limit}: "
                "raise it or give the task shorter rows with data.task_args"
            )

    held_out = _task_prompts(config, task, encoder, data.split_seed, range(data.eval_size), EVAL)
    for name, count in Counter(prompt.id for prompt in held_out).most_common(1):
        if count > 1:
            raise DataError(
                f"{count} rows of the task {data.task!r} have the id {name!r}: give each row its own"
            )
    return Dataset(config, encoder, task, (), held_out, {"eval_rows": len(held_out)})


def _task_prompts(
    config: Config,
    task: tasks.Task,
    encoder: Encoder,
    seed: int,
    indices: Sequence[int],
    split: str,
) -> list[Prompt]:
    """Prompts of a task. Raises DataError when one exceeds data.max_prompt_tokens although longest_row does not."""
    prompts = encoder.prompts(_task_rows(task, seed, indices, split))
    limit = config.data.max_prompt_tokens
    for prompt in prompts:
        if len(prompt.tokens) > limit:
            raise DataError(
                f"row {prompt.id} of the task {config.data.task!r} has {len(prompt.tokens)} tokens, more than its "
                f"longest_row and data.max_prompt_tokens {limit}: raise it"
            )
    return prompts


def _task_rows(
    task: tasks.Task, seed: int, indices: Sequence[int], split: str
) -> list[dict[str, Any]]:
    return [_with_id(row) for row in task.rows(seed, indices, split)]


def _with_id(row: tasks.Row) -> dict[str, Any]:
    return vars(row) | {ID: str(row.id)}


def _load_files(config: Config, encoder: Encoder) -> Dataset:
    data, problems = config.data, Problems()
    rows = files.read(config, "data.train", data.train, problems)
    eval_rows = files.read(config, "data.eval", data.eval, problems) if data.eval else []
    problems.stop_if_any()

    every, counts = encoder.prompts(rows), {"rows": len(rows)}
    train, known = every, set()
    if data.duplicates == DROP:
        train = _different(every, lambda one: one.text if one.row["prompt"] else (one.id,))
        counts["duplicates"] = len(every) - len(train)
    if data.eval:
        held_out = encoder.prompts(eval_rows)
    else:
        if data.eval_size >= len(train):
            raise DataError(
                f"data.eval_size {data.eval_size} is not below the {len(train)} different rows of data.train: lower it"
            )
        order = _split_order(config, train)
        held_out = [train[i] for i in sorted(order[: data.eval_size])]
        train = [train[i] for i in sorted(order[data.eval_size :])]
    if data.duplicates == DROP or not data.eval:
        known = {prompt.text for prompt in held_out if prompt.row["prompt"]}
        new = [prompt for prompt in train if prompt.text not in known]
        counts["also_evaluation"] = len(train) - len(new)
        if not new and data.eval:
            raise DataError(
                "every training prompt is an evaluation prompt too: use other rows for data.eval, or set data.duplicates keep"
            )
        if not new:
            raise DataError(f"data.eval_size {data.eval_size} leaves no other prompt: lower it")
        train = new

    train, too_long = _short_enough(train, data)
    held_out, eval_too_long = _short_enough(held_out, data)
    counts |= {"too_long": too_long, "train_rows": len(train)}
    counts |= {"eval_rows": len(held_out), "eval_too_long": eval_too_long}

    trainable: list[tuple[np.ndarray, np.ndarray]] = []
    if config.sft.steps:
        pairs = train
        if data.duplicates == DROP:
            new = [
                p for p in every if p.text not in known and len(p.tokens) <= data.max_prompt_tokens
            ]
            pairs = _different(new, lambda prompt: (prompt.text, prompt.row["solution"]))
        solved = encoder.solutions([prompt.row for prompt in pairs])
        limit = config.rollout.max_new_tokens
        trainable = [(p.tokens, s) for p, s in zip(pairs, solved, strict=True) if len(s) <= limit]
        counts |= {"solutions": len(pairs), "solutions_too_long": len(pairs) - len(trainable)}
        if not trainable:
            raise DataError(
                f"every solution is longer than rollout.max_new_tokens {limit} with EOS: raise it"
            )

    return Dataset(config, encoder, None, train, held_out, counts, trainable)


def _different(prompts: list[Prompt], key: Callable[[Prompt], Hashable]) -> list[Prompt]:
    """The first prompt of each key, in their order."""
    first: dict[Hashable, Prompt] = {}
    for prompt in prompts:
        first.setdefault(key(prompt), prompt)
    return list(first.values())


def _split_order(config: Config, prompts: Sequence[Prompt]) -> list[int]:
    """The positions of the prompts, those that are held out first: by a hash of data.split_seed and the prompt, or the id."""
    seed = config.data.split_seed

    def place(position: int) -> bytes:
        prompt = prompts[position].row["prompt"] or prompts[position].id
        if not isinstance(prompt, str):
            prompt = json.dumps([[message["role"], message["content"]] for message in prompt])
        return hashlib.sha256(f"{seed} {prompt}".encode()).digest()

    return sorted(range(len(prompts)), key=place)


def _short_enough(prompts: list[Prompt], data: Data) -> tuple[list[Prompt], int]:
    """The prompts of 1 to data.max_prompt_tokens tokens, and how many were longer.

    Raises DataError for a prompt without tokens that no environment says, and when the share of longer ones exceeds
    MOST_TOO_LONG.
    """
    problems, limit = Problems(), data.max_prompt_tokens
    what, fix = "the prompt has no tokens", "change the prompt or the tokenizer"
    for prompt in prompts:
        if prompt.row["prompt"] and not len(prompt.tokens):
            problems.add(prompt.id, None, what, fix)
    problems.stop_if_any()
    kept = [p for p in prompts if len(p.tokens) <= limit]
    dropped, longest = len(prompts) - len(kept), max((len(p.tokens) for p in prompts), default=0)
    if prompts and (not kept or dropped > MOST_TOO_LONG * len(prompts)):
        raise DataError(
            f"{dropped} of {len(prompts)} prompts are longer than data.max_prompt_tokens {limit}: raise it (the longest has "
            f"{longest} tokens), or leave them out of the data: at most {MOST_TOO_LONG:.0%} are dropped"
        )
    return kept, dropped
