"""Answers of a policy to prompts, and training of the drafter on them; it does not know how the policy is updated."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from tlt_jax.config import Config, load, parse, validate
from tlt_jax.config.schema import ADAPTIVE, AUTO, NONE, Rollout
from tlt_jax.data import dataset as datasets, packing, prompt_format
from tlt_jax.data.packing import Example, PackedRows
from tlt_jax.data.prompt_format import Given, Prompt
from tlt_jax.distributed import job as jobs, mesh as meshes
from tlt_jax.distributed.job import Job
from tlt_jax.drafter import recipe as drafter_recipe, step_training
from tlt_jax.drafter.update import on_mesh
from tlt_jax.errors import ConfigError, Interrupted, RewardError
from tlt_jax.keys import GENERATE_STREAM
from tlt_jax.models import from_config, hf_config
from tlt_jax.models.architecture import ModelConfig, Params
from tlt_jax.rewards import terms
from tlt_jax.rollout import learned_drafter
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.recorder import Completion, Poll, RolloutResult
from tlt_jax.rollout.selection import Selection
from tlt_jax.spec_decode.interface import Sampling
from tlt_jax.spec_decode.strategy import LEARNED
from tlt_jax.train import adaptive
from tlt_jax.tuner.acceptance import GUESS

OPTIONS = ("samples", "temperature", "top_k", "top_p", "max_new_tokens")  # of `generate`
MOST_CALLS = 2**32 - 1  # keys take the number of a call as uint32


@dataclass(frozen=True, eq=False)
class Answer:
    """An answer to prompt number `prompt`, its `sample`-th from 0.

    prompt_tokens: int32[P]. tokens: int32[T], with the EOS or what completed a stop text. logprobs: float[T], of the
    tokens at the sampling temperature, before top-k and top-p. finish: "stop", "length" (cut at max_new_tokens) or
    "nonfinite" (the policy's logits were). text: without special tokens; None without a tokenizer.
    """

    prompt: int
    sample: int
    prompt_tokens: np.ndarray
    tokens: np.ndarray
    logprobs: np.ndarray
    finish: str
    text: str | None


@dataclass(frozen=True, eq=False)
class Answers(Sequence[Answer]):
    """The answers of one call, by prompt and sample, and its totals over all processes.

    num_tokens: decoded, also of answers that were not kept. accept_length: mean tokens that a round with drafts added to an
    answer; 0.0 when none drafted. speculated_tokens: the tokens of these rounds, of `num_tokens`. seconds: of decoding;
    compile_seconds: waited for compilations in addition.
    """

    answers: tuple[Answer, ...]
    num_tokens: int
    speculated_tokens: int
    accept_length: float
    seconds: float
    compile_seconds: float

    def __getitem__(self, index):
        return self.answers[index]

    def __len__(self) -> int:
        return len(self.answers)


class Scoring:
    """Scores by a caller's function; what it does wrong interrupts the rollout, and is raised in all processes."""

    def __init__(self, score: Callable[[Completion], Any]):
        self.score = score
        self.new: dict[int, float] = {}
        self.wrong: list[Exception] = []

    def finished(self, one: Completion) -> None:
        """Scores an answer."""
        if self.wrong:
            return
        source = f"score, of an answer to prompt {one.prompt},"
        try:  # the function is the caller's: no process may wait for one that has ended
            value = self.score(one)
        except Exception as error:
            self.wrong.append(error)
            return
        try:
            self.new[one.uid] = terms.number(source, value)
        except ValueError as error:
            self.wrong.append(RewardError(str(error)))

    def scores(self) -> dict[int, float]:
        """The scores since the last call, by uid."""
        found, self.new = self.new, {}
        return found

    def check(self, job: Job) -> None:
        """Raises what went wrong in one process in all of them."""
        reasons = [str(error) or type(error).__name__ for error in self.wrong]
        said = job.meeting().heard("".join(reasons))
        if self.wrong:
            raise self.wrong[0]
        if said:
            process, reason = min(said.items())
            raise RewardError(f"score failed in process {process}: {reason}")


class Rollouts:
    """A policy that answers prompts by adaptive speculative decoding, with a drafter that learns from the answers.

    `params`: the weights that answers come from, in the "train" layout on `mesh`; `model`: their ModelConfig. `tokenizer`:
    None without one. It reads the sections model, mesh, rollout, speculation, drafter_training and idle_training, and
    train.seed, rows and row_tokens; train.steps is the number of calls of `generate` for which compiling may pay.

    With several processes, each calls every method alike, and each gets all answers. A context manager. Every method
    raises UserError, with one line, for what a caller can correct.
    """

    def __init__(
        self, config: Config, model: ModelConfig, params: Params, tokenizer: Any, job: Job
    ):
        self.config, self.model, self.tokenizer = config, model, tokenizer
        self.mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
        drafter, start = from_config.load_drafter(config, model, self.mesh)
        stops = datasets.stop_rules(config, tokenizer)
        self.engine = engine = Engine(config, model, self.mesh, stops, drafter, job=job)
        self.tuner, self.estimated = engine.tuner.init(), {}
        self.calls, self.depths = 0, []
        self.is_open, self.is_answering, self.has_changed = True, False, False
        self.fixed_drafter, self.recipe, self.drafter = start, None, None
        if config.speculation.drafter == ADAPTIVE:
            self.recipe = drafter_recipe.idle_recipe(config, model, drafter, self.mesh)
            if start is not None or engine.tuner.has_fixed_policy:
                self.drafter = adaptive.create(config, self.recipe, start)
            engine.use_learned(self.drafter is not None)
        if start is not None:
            known = {LEARNED: from_config.drafter_acceptance(config) or GUESS}
            self.tuner = engine.tuner.update_prior(self.tuner, known)
        self.publish(params)

    @classmethod
    def opened(
        cls, config: Config, given: tuple[ModelConfig, Params] | None = None, job: Job | None = None
    ) -> Self:
        """With the policy of model.path, or a given one, in the processes of a job. Raises UserError.

        It has no run folder that could keep a choice: with drafter_training.start auto a drafter begins anew.

        Without a job: in those that jax.distributed has joined, or that are joined now as the training command joins them.
        """
        validate.validate_shapes(config)
        if config.drafter_training.start == AUTO:
            config = replace(config, drafter_training=replace(config.drafter_training, start=NONE))
        job, tokenizer = job or jobs.of_caller(config), None
        if config.model.tokenizer:
            tokenizer = prompt_format.tokenizer_of(config)
        if given is None:
            tokenizer = tokenizer or prompt_format.find_tokenizer(
                from_config.model_directory(config)
            )
            eos = None if tokenizer is None else tokenizer.eos_token_id
            directory = from_config.policy_directory(config)
            model = hf_config.read_config(directory, () if eos is None else (eos,))
        else:
            model, params = given
            if not isinstance(model, ModelConfig):
                raise ConfigError(
                    f"the model is a {type(model).__name__}: give (ModelConfig, Params)"
                )
        validate.validate_mesh(config, model, jax.device_count())
        if given is None:
            mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
            params = from_config.load_policy(config, model, mesh)
        return cls(config, model, params, tokenizer, job)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    def close(self) -> None:
        """Drops weights and programs; nothing else can be called afterwards. Idempotent, and without the other processes."""
        if self.is_open:
            self.check_usable(())
            self.is_open = False
            self.engine.close()
            self.params = self.weights = self.drafter = self.fixed_drafter = None

    def generate(
        self,
        prompts: Sequence[Given],
        call: int | None = None,
        *,
        keep: int | None = None,
        score: Callable[[Answer], float] | None = None,
        **sampling: Any,
    ) -> Answers:
        """The answers to texts, which are formatted as `data` says, by default not at all, chat messages or token ids.

        `sampling`: samples, temperature, top_k, top_p, max_new_tokens; they default to the knobs of `rollout`. Apart from
        rounding, tokens are a function of weights, prompts, sampling, train.seed and `call`, which is by default the
        number of earlier calls; drafts, batch sizes and processes change none.

        Dynamic sampling (DAPO, arXiv 2503.14476): with `keep` and `score` only the answers to the first `keep` prompts
        whose answers get different scores; when there are fewer, also those to the first others. Decoding ends once they
        are known, with few further prompts begun. `score` is called with each answer that ends, while others decode: in
        the process that decoded it, and in the thread that feeds the devices; it may not call the engine. What it raises
        is raised here, and in the other processes as a RewardError, as is a score that is no number; the engine stays usable.
        """
        tokens = [one.tokens for one in self.prompts(prompts)]
        rollout = self.sampling(sampling)
        if keep is None and score is None:
            return self.roll_out(tokens, rollout, call)[0]
        if keep is None or score is None:
            given, missing = ("score", "keep") if keep is None else ("keep", "score")
            raise ConfigError(f"generate has {given} without {missing}: give both, or none")
        if not callable(score):
            raise ConfigError(f"score is a {type(score).__name__}: give a function")
        keep = whole("keep", keep, 1, len(tokens))
        scoring = Scoring(lambda one: score(self.answer(tokens, one)))
        try:
            answers, _ = self.roll_out(
                tokens, rollout, call, selection=Selection(keep, scoring.scores), on_finish=scoring.finished,
                interrupted=lambda: bool(scoring.wrong),
            )  # fmt: skip
        except Interrupted:
            answers = None
        scoring.check(self.engine.job)
        return answers

    def roll_out(
        self,
        prompts: Sequence[np.ndarray],
        rollout: Rollout,
        call: int | None = None,
        listeners: Sequence[Callable[[Poll], None]] = (),
        **selecting: Any,
    ) -> tuple[Answers, RolloutResult]:
        """The rollout of `generate`, whose arguments are checked, for int32[P] prompts; the others: those of `Engine.run`."""
        self.check_usable(self.weights)
        call = self.calls if call is None else whole("call", call, 0)
        self.calls += 1
        if self.has_changed:
            estimated = self.estimated if self.engine.drafter else {}
            self.tuner = self.engine.tuner.update_prior(self.tuner, estimated)
            self.estimated, self.has_changed = {}, False
        request = self.engine.request(
            prompts,
            rollout.samples,
            Sampling.of(rollout),
            rollout.max_new_tokens,
            stream=GENERATE_STREAM,
            step=call,
            rollouts_left=max(self.config.train.steps - self.calls, 0),
        )
        self.is_answering = True
        try:
            result, self.tuner = self.engine.run(
                request, self.weights, self.tuner, listeners=list(listeners), **selecting
            )
        finally:
            self.is_answering = False
        # Compilations that ran in the background while it decoded are not subtracted.
        waits = [sum(end - begin for begin, end in one) for one in result.compile_waits.values()]
        stats = result.stats
        answers = Answers(
            tuple(self.answer(prompts, one) for one in result.completions),
            int(stats["tokens"]),
            int(stats["speculated_tokens"]),
            float(stats["accept_length"]),
            float(stats["seconds"] - max(waits)),
            float(max(waits)),
        )
        return answers, result

    def learn(self, answers: Sequence[Answer], passes: int = 1) -> dict[str, float]:
        """Trains the adaptive drafter on answers of the current weights: an optimizer step on each batch of packed rows.

        `passes`: how often it learns from all of them. Returns the metrics drafter/* in the last pass,
        measured before each step: drafter/acceptance@1 is the expected share of first drafts that are accepted. The
        engine drafts with the drafter once that is expected to pay, or at once with a tuner of fixed policy.
        """
        self.check_usable((self.params, self.weights))
        if self.recipe is None:
            raise ConfigError(
                f"speculation.drafter {self.config.speculation.drafter!r} is not trained: open the engine with {ADAPTIVE}"
            )
        passes = whole("passes", passes, 1)
        batches = self.batches(answers)
        if self.drafter is None:
            self.drafter = adaptive.create(
                self.config, self.recipe, texts=(one.tokens for one in answers)
            )
        for _ in range(passes):
            self.drafter, metrics, depths = step_training.learn(
                self.recipe, self.drafter, self.params, batches, self.calls
            )
        self.use(depths)
        return metrics

    def save_drafter(self, directory: str | Path) -> None:
        """Writes the adaptive drafter as a directory, for speculation.drafter, drafter_training.start and serving engines."""
        self.check_usable(())
        if self.drafter is None:
            raise ConfigError("there is no drafter to save: it is made by learn(answers)")
        dtype, is_first = self.config.model.param_dtype, self.engine.job.is_first
        adaptive.export(
            Path(directory), dtype, self.recipe, self.drafter, self.depths, is_owner=is_first
        )

    def publish(self, params: Params) -> None:
        """Copies the weights, placed on the mesh, to the layout of the rollout."""
        self.params = from_config.placed(params, self.model, self.mesh)
        drafter = self.drafter.params if self.drafter else self.fixed_drafter
        self.weights = self.engine.publish(self.params, drafter)

    def use(self, depths: Sequence[float]) -> None:
        """Drafts with the drafter that has learned, if that pays; `depths`: its acceptance at depth 1, 2, ..."""
        engine, self.depths, self.has_changed = self.engine, list(depths), True
        self.estimated = {LEARNED: self.depths} if self.depths else {}
        if not engine.drafter and self.depths:
            saved, compile_cost = learned_drafter.payback(engine, self.tuner, self.depths)
            engine.use_learned(engine.job.decided(saved > compile_cost))
        if engine.drafter:
            self.weights = engine.with_drafter(self.weights, self.drafter.params)

    def sampling(self, options: dict[str, Any]) -> Rollout:
        """The knobs of `rollout`, changed by these options of `generate`. Raises ConfigError."""
        for name in options:
            if name not in OPTIONS:
                raise ConfigError(
                    f"generate has no option {name!r}: use {', '.join(OPTIONS)}, or open the engine with other knobs"
                )
        changes = load.pairs({f"rollout.{name}": value for name, value in options.items()})
        return parse.build(Config, {"rollout": asdict(self.config.rollout)}, changes).rollout

    def prompts(self, prompts: Sequence[Given]) -> list[Prompt]:
        """The tokenized prompts. Raises ConfigError or DataError."""
        if isinstance(prompts, str) or not isinstance(prompts, Sequence | np.ndarray):
            raise ConfigError(
                f"prompts are a {type(prompts).__name__}: give a list of texts or of lists of token ids"
            )
        return [
            prompt_format.encode(one, self.config, self.tokenizer, f"prompt {number}")
            for number, one in enumerate(prompts)
        ]

    def answer(self, prompts: Sequence[np.ndarray], one: Completion) -> Answer:
        """The answer of a completion."""
        decode = None if self.tokenizer is None else self.tokenizer.decode
        text = decode and decode(one.tokens.tolist(), skip_special_tokens=True)
        asked = prompts[one.prompt]
        return Answer(one.prompt, one.sample, asked, one.tokens, one.logprobs, one.finish, text)

    def batches(self, answers: Sequence[Answer]) -> list[PackedRows]:
        """The answers with their prompts, packed into rows, by optimizer step."""
        if not len(answers):
            raise ConfigError("there are no answers to learn from: give those of generate")
        examples = [Example(uid, one.prompt_tokens, one.tokens) for uid, one in enumerate(answers)]
        longest, width = max(one.length for one in examples), packing.row_tokens(self.config)
        if longest > width:
            width = -(-longest // packing.ROW_MULTIPLE) * packing.ROW_MULTIPLE
        data = self.config.mesh.data
        rows, _ = packing.pack(examples, width, packing.rows(self.config), data)
        return [
            on_mesh(jax.tree.map(lambda leaf, step=step: leaf[step], rows), self.mesh)
            for step in range(len(rows.tokens))
        ]

    def check_usable(self, weights: Any) -> None:
        """Raises ConfigError for a closed or answering engine, and for weights whose buffers were donated."""
        if self.is_answering:
            raise ConfigError(
                "score calls the engine that waits for it: call the engine once generate has returned its answers"
            )
        if not self.is_open:
            raise ConfigError("this engine is closed: open another one with open_engine")
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(weights)):
            raise ConfigError(
                "the buffers of the engine's weights were donated to another program: call learn before the update, and "
                "update_weights after it"
            )


def whole(name: str, value: Any, least: int, most: int = MOST_CALLS) -> int:
    """A whole number, also of NumPy. Raises ConfigError for another value, and outside of the range."""
    try:
        number = least - 1 if isinstance(value, bool) else operator.index(value)
    except TypeError:
        number = least - 1
    if not least <= number <= most:
        raise ConfigError(f"{name} {value!r}: give a whole number from {least} to {most}")
    return number
