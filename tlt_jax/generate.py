"""`python -m tlt_jax.generate --model DIR --prompt TEXT`: answers, their log-probs, and tokens per second."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from tlt_jax import cli
from tlt_jax.config import Config, knobs as fields, parse as parsing, validate
from tlt_jax.config.schema import NONE, Rollout
from tlt_jax.data import dataset, files
from tlt_jax.errors import ConfigError, DataError

KNOBS = {  # option -> the knob that gives its default, help text and limits
    "max-new-tokens": "rollout.max_new_tokens",
    "temperature": "rollout.temperature",
    "top-k": "rollout.top_k",
    "top-p": "rollout.top_p",
    "seed": "train.seed",
    "num-samples": "rollout.samples",
    "dtype": "model.compute_dtype",
    "drafter": "speculation.drafter",
}
# They differ from training: one answer, and no drafter, since compiling one does not pay off for few prompts.
DEFAULTS = {"rollout.samples": "1", "speculation.drafter": NONE}


@dataclass(frozen=True)
class Question:
    """A prompt: its token ids, and its text (None when given as ids)."""

    tokens: Sequence[int]
    text: str | None


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        cli.stop(ConfigError(message))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit code 0 when every answer is printed."""
    arguments = parser().parse_args(argv)
    try:
        config = configure(arguments)
    except ConfigError as error:
        cli.stop(error)

    with cli.prepared(config):
        from tlt_jax.models import hf

        questions = read_prompts(arguments, find_tokenizer(hf.resolve(config.model.path)))
        rollout = replace(config.rollout, prompts=len(questions))
        output = Model(replace(config, rollout=rollout)).answer(questions, rollout)

    if arguments.json:
        print(json.dumps(output))
        return 0

    for answer in output["completions"]:
        print(
            f"--- prompt {answer['prompt_index']} sample {answer['sample']}: {len(answer['token_ids'])} tokens, "
            f"{answer['finish_reason']}"
        )
        if answer["text"] is not None:
            print(answer["text"])
        print("token ids:", " ".join(map(str, answer["token_ids"])))
        print("log-probs:", " ".join(f"{logprob:.3f}" for logprob in answer["logprobs"]))
    print(
        f"{output['tokens']} tokens, {output['tokens_per_second']:.1f} tokens/s "
        f"(compilation took {output['compile_seconds']:.1f} s more)"
    )

    if arguments.drafter != NONE:
        share = output["speculated_tokens"] / output["tokens"]
        print(
            f"accept length {output['accept_length']:.2f}, in rounds that made {share:.0%} of the tokens"
        )
    return 0


def parser() -> Parser:
    """The command line; defaults and help texts are those of the knobs."""
    out = Parser(prog="python -m tlt_jax.generate", description=__doc__, allow_abbrev=False)
    out.add_argument("--model", required=True, help="Hugging Face model directory or hub id")

    prompt = out.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", help="text of the prompt, tokenized as it is")
    prompt.add_argument("--prompt-ids", help='token ids of the prompt, "1,2,3": needs no tokenizer')
    prompt.add_argument(
        "--prompts", help='JSONL file, each line {"prompt": TEXT} or {"prompt_ids": [...]}'
    )

    knobs = fields.knobs(Config)
    for option, name in KNOBS.items():
        default = DEFAULTS.get(name, knobs[name].default)
        meaning = f"{knobs[name].help.split(';')[0]} (default: {default})"
        out.add_argument(
            f"--{option}", default=str(default), metavar=option[0].upper(), help=meaning
        )

    out.add_argument("--json", action="store_true", help="print one JSON object")
    return out


def configure(arguments: argparse.Namespace) -> Config:
    """The configuration of the options. Raises ConfigError for a value that its knob does not allow."""
    pairs = [(name, getattr(arguments, option.replace("-", "_"))) for option, name in KNOBS.items()]
    return configuration_of(arguments.model, pairs)


def configuration_of(directory: str, pairs: Sequence[tuple[str, str]]) -> Config:
    """The configuration of a model for inference, with these knobs. Raises ConfigError."""
    given = [*DEFAULTS.items(), ("model.path", directory), *pairs]
    config = parsing.build(Config, {}, given)
    validate.validate_without_training(config)
    return replace(config, model=replace(config.model, param_dtype=config.model.compute_dtype))


class Model:
    """A policy that answers prompts; it reuses its compiled programs across calls.

    It reads model.path, the sampling of `rollout`, `speculation` and train.seed; without rollout.slots it decodes
    rollout.prompts x rollout.samples sequences at once. Raises UserError.
    """

    def __init__(self, config: Config):
        from tlt_jax.distributed import mesh as meshes
        from tlt_jax.models import from_config, hf
        from tlt_jax.rollout.engine import Engine

        self.config = config
        directory = hf.resolve(config.model.path)
        self.tokenizer = find_tokenizer(directory)
        eos = None if self.tokenizer is None else self.tokenizer.eos_token_id
        model = hf.read_config(directory, () if eos is None else (eos,))
        from_config.warn_of_tokenizer(config, self.tokenizer)
        mesh = meshes.make_mesh(1, 1)
        drafter, drafter_params = from_config.load_drafter(config, model, mesh)
        self.engine = Engine(config, model, mesh, drafter=drafter)
        params = hf.load(directory, model, mesh, config.model.param_dtype)
        self.weights = self.engine.publish(params, drafter_params)

    def generate(
        self, prompts: Sequence[str | Sequence[int]], call: int = 0, **options: Any
    ) -> list[dict[str, Any]]:
        """The answers to texts or token ids, by prompt and sample, in the format of `--json`.

        `options` are knobs of `rollout`: samples, temperature, top_k, top_p, max_new_tokens. The same prompts, seed and
        `call` give the same answers; another `call` samples new ones. Raises UserError.
        """
        knobs = {"samples": 1} | options
        pairs = [(f"rollout.{name}", str(value)) for name, value in knobs.items()]
        rollout = parsing.build(Config, {"rollout": asdict(self.config.rollout)}, pairs).rollout
        questions = [
            encode(prompt, self.tokenizer, f"prompt {number}")
            if isinstance(prompt, str)
            else Question(read_ids(prompt, f"prompt {number}"), None)
            for number, prompt in enumerate(prompts)
        ]
        return self.answer(questions, rollout, call)["completions"]

    def answer(
        self, questions: Sequence[Question], rollout: Rollout, call: int = 0
    ) -> dict[str, Any]:
        """The object that `--json` prints."""
        from tlt_jax.keys import GENERATE_STREAM
        from tlt_jax.spec_decode.decoding_params import Sampling

        request = self.engine.request(
            [np.asarray(question.tokens, np.int32) for question in questions],
            rollout.samples,
            Sampling.of(rollout),
            rollout.max_new_tokens,
            stream=GENERATE_STREAM,
            step=call,
        )
        result, _ = self.engine.run(request, self.weights)

        # Compilations that ran in the background while it decoded are not subtracted.
        waited = sum(end - begin for begin, end in result.compile_waits[0])
        seconds = result.stats["seconds"] - waited
        return {
            "completions": [
                {
                    "prompt_index": answer.prompt,
                    "sample": answer.sample,
                    "prompt": questions[answer.prompt].text,
                    "token_ids": answer.tokens.tolist(),
                    "logprobs": [float(logprob) for logprob in answer.logprobs],
                    "text": None
                    if self.tokenizer is None
                    else self.tokenizer.decode(answer.tokens.tolist(), skip_special_tokens=True),
                    "finish_reason": answer.finish,
                }
                for answer in result.completions
            ],
            "tokens": result.stats["tokens"],
            "tokens_per_second": result.stats["tokens"] / seconds,
            "seconds": seconds,
            "compile_seconds": waited,
            "accept_length": result.stats["accept_length"],
            "speculated_tokens": result.stats["speculated_tokens"],
        }


def find_tokenizer(directory: Path) -> Any:
    """The tokenizer of a model directory; None without one. Raises DataError when it cannot be loaded."""
    if not dataset.has_tokenizer(directory):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory)
    except (OSError, ValueError) as error:
        raise DataError(
            f"the tokenizer of {directory} does not load: {str(error).strip().splitlines()[0]}"
        ) from error


def read_prompts(arguments: argparse.Namespace, tokenizer: Any) -> list[Question]:
    """The prompts of the command line. Raises ConfigError or DataError."""
    if arguments.prompt is not None:
        return [encode(arguments.prompt, tokenizer, "--prompt")]
    if arguments.prompt_ids is not None:
        return [Question(read_ids(arguments.prompt_ids.split(","), "--prompt-ids"), None)]

    path, problems = Path(arguments.prompts), files.Problems()
    if not path.is_file():
        raise ConfigError(f"--prompts {arguments.prompts}: no such file")
    rows = files.read(path, problems)
    problems.stop_if_any()

    questions = []
    for line, row in rows:
        place = f"{path}:{line}"
        if isinstance(row.get("prompt"), str):
            questions.append(encode(row["prompt"], tokenizer, place))
        elif isinstance(row.get("prompt_ids"), list):
            questions.append(Question(read_ids(row["prompt_ids"], place), None))
        else:
            raise DataError(
                f'{place}: no prompt: write {{"prompt": "text"}} or {{"prompt_ids": [1, 2, 3]}}'
            )
    return questions


def encode(text: str, tokenizer: Any, place: str) -> Question:
    """A tokenized prompt. Raises DataError without tokenizer or tokens."""
    if tokenizer is None:
        raise DataError(f"{place}: the model directory has no tokenizer: give token ids instead")
    tokens = tokenizer.encode(text)
    if not tokens:
        raise DataError(f"{place}: the prompt is empty: give at least one token")
    return Question(tokens, text)


def read_ids(words: Sequence[Any], place: str) -> list[int]:
    """Token ids from text or JSON values. Raises DataError."""
    ids = [int(word) for word in words if str(word).strip().isdecimal()]
    if len(ids) < len(words) or not ids:
        raise DataError(
            f'{place}: {",".join(map(str, words))!r} are no token ids: write numbers from 0, such as "1,2,3"'
        )
    return ids


if __name__ == "__main__":
    sys.exit(main())
