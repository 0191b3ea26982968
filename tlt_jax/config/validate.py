"""Checks of a configuration, with or without a model's sizes, before any device work. Imports no JAX."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from tlt_jax.config import extension
from tlt_jax.config.parse import nearest
from tlt_jax.config.schema import (
    ADAPTIVE,
    ALWAYS,
    AUTO,
    GSPO,
    NONE,
    PPO,
    REINFORCE_PP,
    REWARD,
    SAPO,
    SELF,
    TOKEN,
    Algorithm,
    Config,
)
from tlt_jax.config.task import OPENINGS, REASONING_GYM, REWARDS, TEXTARENA
from tlt_jax.errors import ConfigError

MOST_KEPT = 256  # ids of algorithm.support_replay


def eval_metrics(config: Config) -> list[str]:
    """Names of the evaluation metrics of this configuration."""
    powers = [1 << i for i in range(config.eval.samples.bit_length())]
    return [f"eval/mean@{config.eval.samples}", *(f"eval/pass@{k}" for k in powers)]


def answer_limit(config: Config) -> int:
    """Tokens of the longest answer in training and evaluation."""
    return max(
        config.rollout.max_new_tokens, config.eval.max_new_tokens if config.eval.every else 0
    )


def profile_steps(config: Config) -> range:
    """The steps to profile; empty for none. Raises ConfigError."""
    if not config.profile.steps:
        return range(0)
    match = re.fullmatch(r"(\d+)-(\d+)", config.profile.steps)
    if not match or int(match[1]) > int(match[2]):
        raise ConfigError(
            f"profile.steps {config.profile.steps!r} is not a range of steps: write first-last, such as 3-5"
        )
    return range(int(match[1]), int(match[2]) + 1)


def refusing(check: Callable[..., Iterator[str]]) -> Callable[..., None]:
    """The check as a function that raises ConfigError with the first problem that it finds."""

    @wraps(check)
    def raising(*arguments: Any) -> None:
        for problem in check(*arguments):
            raise ConfigError(problem)

    return raising


def validate(config: Config) -> None:
    """Raises ConfigError for knobs that conflict, without knowing devices and model."""
    validate_data_and_steps(config)
    validate_algorithm(config.algorithm, config.rollout.samples, config.model.compute_dtype)
    validate_environment(config)
    validate_shapes(config)
    profile_steps(config)


@refusing
def validate_without_training(config: Config) -> Iterator[str]:
    """Raises ConfigError for knobs that only a training run can have."""
    if config.speculation.drafter == ADAPTIVE:
        yield (
            "speculation.drafter adaptive is trained during an RL run, and this command does not train: use the drafter's "
            "directory, or ngram"
        )


@refusing
def validate_one_turn(config: Config) -> Iterator[str]:
    """Raises ConfigError for environments and tools, of which a command without them knows nothing."""
    for knob, empty in (("path", ""), ("tools", [])):
        if given := getattr(config.environment, knob):
            yield (
                f"environment.{knob} {given!r}: this command lets answers have one turn alone: set environment.{knob} "
                f"{empty!r}, and rewards and data that need none"
            )


@refusing
def validate_rl(config: Config) -> Iterator[str]:
    """Raises ConfigError for knobs that an RL run cannot have."""
    if config.rollout.temperature == 0:
        yield (
            "rollout.temperature 0: all answers to a prompt are the same, so that advantages are 0: use 1.0, or another "
            "value above 0"
        )
    share, drafter = config.drafter_training.share, config.speculation.drafter
    if share not in (AUTO, 0) and drafter != ADAPTIVE:
        yield (
            f"drafter_training.share {share} with speculation.drafter {drafter!r}: this run trains no drafter: use "
            f"{ADAPTIVE}, or a share of 0"
        )
    teacher = config.algorithm.teacher
    if teacher.drafter and share in (AUTO, 0):
        yield (
            f"algorithm.teacher.drafter {teacher.drafter:g} with drafter_training.share {share}: only rows of a policy update "
            "have the teacher's log-probs: set drafter_training.share to a number above 0, for example 0.25"
        )
    if teacher.drafter and (teacher.temperature or config.rollout.temperature) != 1:
        yield (
            f"algorithm.teacher.drafter {teacher.drafter:g} with the teacher's log-probs at temperature "
            f"{teacher.temperature or config.rollout.temperature:g}: a drafter learns those at 1: set "
            "algorithm.teacher.temperature 1"
        )
    validate_rewards(config)


@refusing
def validate_rewards(config: Config) -> Iterator[str]:
    """Raises ConfigError when the answers cannot be scored."""
    if not config.reward.terms:
        yield "reward.terms is empty: name at least one reward, for example {task: 1.0}"
    for name in config.reward.terms:
        if name not in REWARDS and not extension.is_own(name):
            yield (
                f"reward.terms names {name!r}, which is not a reward: use {', '.join(REWARDS)} or module:function "
                f"({nearest(name, REWARDS)})"
            )
    buffer, longest = config.reward.overlong_buffer, config.rollout.max_new_tokens
    if buffer > longest:
        yield (
            f"reward.overlong_buffer {buffer} is longer than the longest answer, rollout.max_new_tokens {longest}: use at most "
            f"{longest}, or 0 for no penalty"
        )
    if "task" in config.reward.terms and config.data.train:
        yield (
            f"reward 'task' scores the generated task, and data.train is {config.data.train!r}: set reward.terms, "
            "for example {gsm8k: 1.0}"
        )


@refusing
def validate_data_and_steps(config: Config) -> Iterator[str]:
    """Raises ConfigError when model, tokenizer or data are missing, or conflict with each other or with steps and prompts."""
    model, data = config.model, config.data
    train, rollout, algorithm = config.train, config.rollout, config.algorithm
    if not (model.path or model.init):
        yield "model.path and model.init are both empty: set one (a directory, or the sizes of a new model)"
    if data.train and not (model.tokenizer or model.path):
        yield f"data.train {data.train!r} needs a tokenizer: set model.tokenizer or model.path"
    if data.eval and not data.train:
        yield f"data.eval {data.eval!r} without data.train: set both, or none to use the generated task"
    if model.lora.rank and not model.lora.targets:
        yield f"model.lora.targets is empty with model.lora.rank {model.lora.rank}: name at least one, or use all-linear"
    if "" in rollout.stop:
        yield "rollout.stop holds an empty text, which would end every answer: remove it"
    if bool(train.steps) == bool(train.epochs):
        state = (
            "are both 0: set one"
            if not train.steps
            else "are both set: set train.steps 0 to train by epochs"
        )
        yield f"train.steps {train.steps} and train.epochs {train.epochs} {state}"
    if rollout.prompts % algorithm.minibatches:
        fits = [n for n in range(1, rollout.prompts + 1) if rollout.prompts % n == 0]
        yield (
            f"rollout.prompts {rollout.prompts} does not divide into algorithm.minibatches "
            f"{algorithm.minibatches}: use one of {fits}"
        )
    if config.eval.every and not config.data.eval and not config.data.eval_size:
        yield (
            f"eval.every {config.eval.every} needs prompts, and data.eval_size is 0 and data.eval empty: set one of them, or "
            "eval.every 0"
        )
    best = config.checkpoint.best_metric
    if best and not config.eval.every:
        yield f"checkpoint.best_metric {best!r} needs evaluations, and eval.every is 0: set eval.every"
    if best and best not in eval_metrics(config):
        yield f"checkpoint.best_metric {best!r} is not measured: use one of {', '.join(eval_metrics(config))}"
    # A prompt whose answers score alike has a gradient then: they are compared with those of the whole step.
    if algorithm.support_replay and not 0 < rollout.top_k <= MOST_KEPT:
        yield (
            f"algorithm.support_replay with rollout.top_k {rollout.top_k}, which bounds the ids that are recorded of a token: "
            f"use 1 to {MOST_KEPT}, for example 64, or algorithm.support_replay false"
        )
    if rollout.max_prompts and algorithm.advantage in (REINFORCE_PP, NONE):
        yield (
            f"rollout.max_prompts {rollout.max_prompts} with algorithm.advantage {algorithm.advantage}, which compares no "
            "answers to one prompt: it would replace prompts that give a gradient: use grpo, rloo or dr_grpo, or "
            "rollout.max_prompts 0"
        )
    if 0 < rollout.max_prompts <= rollout.prompts:
        yield (
            f"rollout.max_prompts {rollout.max_prompts} is not above rollout.prompts {rollout.prompts}: no prompt could be "
            f"replaced: use {2 * rollout.prompts} or more, or 0"
        )
    if rollout.max_prompts and train.epochs:
        yield (
            f"train.epochs {train.epochs} with rollout.max_prompts {rollout.max_prompts}: how many prompts a step takes is not "
            "known before, so neither is the number of steps: set train.steps"
        )


@refusing
def validate_environment(config: Config) -> Iterator[str]:
    """Raises ConfigError for environments and tools that no worker could import, and for knobs without effect."""
    if config.data.task == OPENINGS and not config.data.train:
        needs = f"data.task {OPENINGS}"
        if not config.environment.path:
            yield f"{needs} needs an environment, which says what its rows are: set environment.path"
        if "task" in config.reward.terms:
            yield f"{needs} knows no answers, which the reward 'task' needs: set reward.terms {{environment: 1.0}}"
        if config.sft.steps:
            yield f"{needs} has no solutions for a supervised warm start: set sft.steps 0"
    knobs, longest = config.environment, config.rollout.max_new_tokens
    library, _, name = knobs.path.partition(":")
    is_known = library in (TEXTARENA, REASONING_GYM) and name
    for knob, one in [("path", knobs.path), *(("tools", tool) for tool in knobs.tools)]:
        if one.startswith(f"{extension.LOCAL}:"):
            yield (
                f"environment.{knob} {one!r} is a function or class of a notebook or script, which other processes cannot "
                "import: put it in a module"
            )
        if (
            not extension.is_own(one)
            and (one or knob == "tools")
            and not (knob == "path" and is_known)
        ):
            others = f", {TEXTARENA}:GAME-ID or {REASONING_GYM}:NAME" * (knob == "path")
            yield f"environment.{knob} {one!r} is not known: use module:name{others}"
    is_used = knobs.path or knobs.tools
    if is_used and config.rollout.deterministic:
        yield (
            "rollout.deterministic with an environment: what is decoded together depends on when it replies: set it to false"
        )
    if "environment" in config.reward.terms and not is_used:
        yield "reward.terms names 'environment', and environment.path and environment.tools are empty: set one of them"
    if knobs.args and not knobs.path:
        yield f"environment.args {knobs.args} without environment.path: set it, or remove the arguments"
    if knobs.turn_tokens > longest:
        yield (
            f"environment.turn_tokens {knobs.turn_tokens} is more than an answer has, rollout.max_new_tokens {longest}: use "
            "less, or 0"
        )


def importance(algorithm: Algorithm, compute_dtype: str) -> str:
    """none, token, sequence or geometric: algorithm.importance, of which auto depends on model.compute_dtype."""
    if algorithm.importance != AUTO:
        return algorithm.importance
    return TOKEN if compute_dtype == "bfloat16" else NONE


def kept(config: Config) -> int:
    """Ids that are recorded of the tokens from which each token of training is drawn: 0 without support_replay."""
    return config.rollout.top_k if config.algorithm.support_replay else 0


def replays(algorithm: Algorithm, compute_dtype: str, model: Any) -> bool:
    """Whether the update replays the experts of the rollout: algorithm.router_replay, of which auto depends on the dtype."""
    chosen = algorithm.router_replay
    return bool(model.num_experts) and (
        chosen == ALWAYS or (chosen == AUTO and compute_dtype == "bfloat16")
    )


@refusing
def validate_algorithm(algorithm: Algorithm, samples: int, compute_dtype: str) -> Iterator[str]:
    """Raises ConfigError for knobs that conflict, or that another one leaves without effect.

    `samples`: rollout.samples; `compute_dtype`: model.compute_dtype.
    """
    teacher = algorithm.teacher
    if algorithm.advantage == NONE and not teacher.path:
        yield "algorithm.advantage none without a teacher: nothing would be learned: set algorithm.teacher.path"
    if algorithm.advantage == NONE and algorithm.kl_in == REWARD:
        yield "algorithm.advantage none with algorithm.kl_in reward, which changes advantages: use algorithm.kl_in loss"
    for name, value in (
        ("top_k", teacher.top_k),
        ("temperature", teacher.temperature),
        ("hint", teacher.hint),
        ("drafter", teacher.drafter),
    ):
        if value and not teacher.path:
            yield f"algorithm.teacher.{name} {value!r} without algorithm.teacher.path has no effect: set it, or remove {name}"
    if teacher.path == SELF and not teacher.hint:
        yield (
            "algorithm.teacher.path self without algorithm.teacher.hint: the policy has nothing to learn from itself: name a "
            "column that only the teacher sees"
        )
    if teacher.hint and teacher.top_k:
        yield (
            f"algorithm.teacher.hint {teacher.hint!r} with algorithm.teacher.top_k {teacher.top_k}: log-probs after another "
            "prompt are kept of the policy's tokens alone: set algorithm.teacher.top_k 0"
        )
    if teacher.drafter and not teacher.top_k:
        yield (
            f"algorithm.teacher.drafter {teacher.drafter:g} with algorithm.teacher.top_k 0: the teacher's distribution is not "
            "known: set algorithm.teacher.top_k, for example 8"
        )
    if samples < 2 and algorithm.advantage not in (REINFORCE_PP, NONE):
        yield (
            f"rollout.samples {samples}: {algorithm.advantage} advantages compare the answers to one prompt, use at least 2, "
            f"or algorithm.advantage {REINFORCE_PP}"
        )
    if algorithm.kl_in == REWARD and not algorithm.kl_coef:
        yield (
            "algorithm.kl_in reward with algorithm.kl_coef 0: nothing is subtracted from the reward: set algorithm.kl_coef, "
            "for example 0.001, or algorithm.kl_in loss"
        )
    dual = algorithm.clip_dual
    if dual and algorithm.loss not in (PPO, GSPO):
        why = (
            "is yours" if extension.is_own(algorithm.loss) else "has no loss of this form to bound"
        )
        yield (
            f"algorithm.clip_dual {dual:g} with algorithm.loss {algorithm.loss!r}, which {why}: use {PPO} or {GSPO}, or "
            "algorithm.clip_dual 0"
        )
    if 0 < dual <= 1:
        yield f"algorithm.clip_dual {dual:g} is not above 1: use a larger one, for example 3, or 0 for no dual clip"
    level = importance(algorithm, compute_dtype)
    cap = algorithm.importance_cap
    limits = {"mask": algorithm.importance_mask, "veto": algorithm.importance_veto}
    is_masked = algorithm.importance_mask or algorithm.importance_mask_low
    if algorithm.importance_mask_level != AUTO and not is_masked:
        yield (
            f"algorithm.importance_mask_level {algorithm.importance_mask_level} without a mask has no effect: set "
            "algorithm.importance_mask, or importance_mask_level auto"
        )
    if algorithm.loss != SAPO and (algorithm.sapo_positive, algorithm.sapo_negative) != (1.0, 1.05):
        yield (
            f"algorithm.sapo_positive {algorithm.sapo_positive:g} and sapo_negative {algorithm.sapo_negative:g} with "
            f"algorithm.loss {algorithm.loss!r} have no effect: set algorithm.loss {SAPO}, or remove them"
        )
    if cap < 1:
        yield (
            f"algorithm.importance_cap {cap:g} is below 1: use at least 1, or algorithm.importance none for no importance "
            "weights"
        )
    for name, limit in limits.items():
        if limit and limit <= 1:
            yield (
                f"algorithm.importance_{name} {limit:g} is not above 1, so that nothing would be left: use for example 2, or 0 "
                "for none"
            )
    is_auto = algorithm.importance == AUTO
    why = f" (auto, in model.compute_dtype {compute_dtype})" * is_auto
    given = limits | {
        "mask_low": algorithm.importance_mask_low,
        "cap": cap if is_auto and cap != Algorithm.importance_cap else 0,
    }
    for name, value in given.items():
        if value and level == NONE:
            yield (
                f"algorithm.importance_{name} {value:g} with algorithm.importance none{why} has no effect: set "
                f"algorithm.importance token, sequence or geometric, or remove algorithm.importance_{name}"
            )


@refusing
def validate_shapes(config: Config) -> Iterator[str]:
    """Raises ConfigError when rows or the mesh do not divide, or are too small."""
    mesh, train, rollout = config.mesh, config.train, config.rollout
    if mesh.fake_devices and mesh.data * mesh.model > mesh.fake_devices:
        yield (
            f"mesh {mesh.data} x {mesh.model} needs {mesh.data * mesh.model} devices, mesh.fake_devices is "
            f"{mesh.fake_devices}: set mesh.fake_devices {mesh.data * mesh.model}"
        )
    if train.rows % mesh.data:
        yield f"train.rows {train.rows} does not divide by mesh.data {mesh.data}: use a multiple of {mesh.data}"
    longest = config.data.max_prompt_tokens + rollout.max_new_tokens
    if 0 < train.row_tokens < longest:
        yield (
            f"train.row_tokens {train.row_tokens} is shorter than data.max_prompt_tokens "
            f"{config.data.max_prompt_tokens} + rollout.max_new_tokens {rollout.max_new_tokens}: use at "
            f"least {longest}, or 0"
        )


@refusing
def validate_model(config: Config, model: Any, devices: int) -> Iterator[str]:
    """Raises ConfigError when sequences exceed the positions of a ModelConfig, or the mesh does not fit it or the devices."""
    validate_mesh(config, model, devices)
    prompt, answer = config.data.max_prompt_tokens, answer_limit(config)
    if prompt + answer > model.max_positions:
        yield (
            f"data.max_prompt_tokens {prompt} + the longest answer {answer} = {prompt + answer}, and the model has "
            f"{model.max_positions} positions: lower data.max_prompt_tokens or max_new_tokens of rollout and eval"
        )
    algorithm = config.algorithm
    for name, value in (
        ("router_replay always", algorithm.router_replay == ALWAYS),
        (f"router_balance {algorithm.router_balance:g}", algorithm.router_balance),
    ):
        if value and not model.num_experts:
            yield f"algorithm.{name}: the model has no experts: remove it"


@refusing
def validate_mesh(config: Config, model: Any, devices: int) -> Iterator[str]:
    """Raises ConfigError when the mesh does not fit the model or the devices."""
    data, parts = config.mesh.data, config.mesh.model
    if data * parts > devices:
        yield (
            f"mesh {data} x {parts} needs {data * parts} devices, {devices} are available: lower mesh.data or "
            f"mesh.model, or set mesh.fake_devices {data * parts} to split a CPU"
        )
    fits, sizes = model.divisors
    if config.mesh.model not in fits:
        yield f"mesh.model {config.mesh.model} does not divide the model ({sizes}): use one of {fits}"
    if model.hidden_size % config.mesh.data:
        fits = [n for n in range(1, 2 * config.mesh.data) if model.hidden_size % n == 0]
        yield f"mesh.data {config.mesh.data} does not divide the model's width {model.hidden_size}: use one of {fits}"
