"""`python -m tlt_jax.generate --model DIR --prompt TEXT`: answers, their log-probs, and tokens per second; or a chat."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from tlt_jax import cli
from tlt_jax.config import Config, knobs as fields
from tlt_jax.config.schema import NONE
from tlt_jax.data import prompt_format
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.errors import ConfigError
from tlt_jax.inference import chat
from tlt_jax.inference.chat import Model
from tlt_jax.spec_decode import strategy as strategies

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
AUTO = "auto"  # value of --strategy
CHAT_CHUNK = "4"  # rounds after which a chat shows what was accepted


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit code 0 when every answer is printed."""
    arguments = parser().parse_args(argv)
    try:
        pairs = pairs_of(arguments)
        config = chat.configuration_of(arguments.model, pairs)
    except ConfigError as error:
        cli.stop(error)

    with cli.prepared(config):
        config, makers = chat.as_meant(arguments.model, pairs, arguments.raw)
        if arguments.chat and not prompts_of(arguments):
            return talk(config, makers)

        given = read_prompts(arguments, config)
        rollout = replace(config.rollout, prompts=len(given))
        if makers or any(one.text is not None for one in given):
            print(prompt_format.describe(config) + makers, file=sys.stderr)
        output = Model(replace(config, rollout=rollout)).answer(given, rollout)

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
    print(closing([output], config.speculation.drafter))
    return 0


def parser() -> cli.Parser:
    """The command line; defaults and help texts are those of the knobs."""
    out = cli.Parser(prog="python -m tlt_jax.generate", description=__doc__, allow_abbrev=False)
    out.add_argument("--model", required=True, help="Hugging Face model directory or hub id")

    prompt = out.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", help="text of the prompt")
    prompt.add_argument("--prompt-ids", help='token ids of the prompt, "1,2,3": needs no tokenizer')
    prompt.add_argument(
        "--prompts",
        help='JSONL file, each line {"prompt": TEXT}, {"prompt": [MESSAGES]} or {"prompt_ids": [...]}',
    )
    out.add_argument(
        "--chat", action="store_true",
        help="ask with the model's chat template; without a prompt: a chat, whose turns are the lines of the input",
    )  # fmt: skip
    out.add_argument("--system", metavar="TEXT", help="system message, with the chat template")
    out.add_argument(
        "--raw", action="store_true",
        help=f"ignore {prompt_format.NAME}, which says how the run that made the model formats prompts and samples answers, "
        f"and the sampling in {prompt_format.MAKERS} of other models",
    )  # fmt: skip
    out.add_argument(
        "--strategy", metavar="D_K_N", default=AUTO,
        help="draft tree of every round, as depth_topk_nodes, for example 3_1_4 | auto: the tuner chooses, and drafts only "
        "where that is expected to pay | none: draft nothing (default: auto)",
    )  # fmt: skip

    knobs = fields.knobs(Config)
    for option, name in KNOBS.items():
        default = chat.DEFAULTS.get(name, knobs[name].default)
        of_run = "that of the model's run, else " if name in prompt_format.KNOBS else ""
        if name.removeprefix("rollout.") in prompt_format.SAMPLING:
            of_run += f"of {prompt_format.MAKERS}, else "
        meaning = f"{knobs[name].help.split(';')[0]} (default: {of_run}{default})"
        out.add_argument(f"--{option}", metavar=option[0].upper(), help=meaning)

    out.add_argument("--json", action="store_true", help="print one JSON object")
    return out


def prompts_of(arguments: argparse.Namespace) -> bool:
    """Whether the command line gives a prompt."""
    return any(
        one is not None for one in (arguments.prompt, arguments.prompt_ids, arguments.prompts)
    )


def pairs_of(arguments: argparse.Namespace) -> list[tuple[str, str]]:
    """Knobs and values of the options that are given. Raises ConfigError for options that exclude each other."""
    given = {
        name: value
        for option, name in KNOBS.items()
        if (value := getattr(arguments, option.replace("-", "_"))) is not None
    }
    if arguments.system is not None:
        given["data.system"] = arguments.system
    if arguments.chat:
        given["data.chat_template"] = "true"
    given |= strategy_knobs(arguments.strategy, given.get("speculation.drafter", NONE))

    if prompts_of(arguments):
        return list(given.items())
    if not arguments.chat:
        raise ConfigError("one of the arguments --prompt --prompt-ids --prompts --chat is required")
    if arguments.json or given.setdefault("rollout.samples", "1") != "1":
        raise ConfigError(
            "--chat without a prompt has one answer a turn: no --json, no --num-samples"
        )
    return list(given.items()) + [("rollout.chunk", CHAT_CHUNK)]


def strategy_knobs(strategy: str, drafter: str) -> dict[str, str]:
    """The knobs of --strategy. Raises ConfigError for text that is no strategy, and for one that nothing drafts with."""
    if strategy == AUTO:
        return {}
    if strategy == NONE:
        return {"speculation.drafter": NONE}
    try:
        strategies.parse(strategy)
    except ValueError as error:
        raise ConfigError(f"--{error}; {AUTO} and {NONE} are the other values") from error
    if drafter == NONE:
        raise ConfigError(f"--strategy {strategy} drafts: give --drafter ngram or --drafter DIR")
    return {"speculation.strategies": f"[{strategy}]", "speculation.tuner": "fixed"}


def read_prompts(arguments: argparse.Namespace, config: Config) -> list[Prompt]:
    """The prompts of the command line. Raises ConfigError or DataError."""
    from tlt_jax.models import hf

    if arguments.prompt_ids is not None:
        return [prompt_format.of_ids(arguments.prompt_ids.split(","), "--prompt-ids")]
    tokenizer = prompt_format.find_tokenizer(hf.resolve(config.model.path))
    if arguments.prompt is not None:
        return [prompt_format.encode(arguments.prompt, config, tokenizer, "--prompt")]
    return prompt_format.read_prompts(arguments.prompts, config, tokenizer)


def talk(config: Config, makers: str) -> int:
    """A chat in the terminal, which begins with a line that ends with `makers`; exit code 0."""
    print(prompt_format.describe(config) + makers, file=sys.stderr)
    model = Model(replace(config, rollout=replace(config.rollout, prompts=1)))
    # Raises DataError now when conversations cannot be encoded.
    prompt_format.encode([{"role": "user", "content": "-"}], config, model.tokenizer, "--chat")
    if answers := chat.converse(model):
        print(closing(answers, config.speculation.drafter), file=sys.stderr)
    return 0


def closing(outputs: Sequence[Mapping[str, Any]], drafter: str) -> str:
    """Tokens and speed of all these answers, and what drafting did, or why nothing was drafted."""

    def total(name: str) -> float:
        return sum(output[name] for output in outputs)

    tokens, drafted = total("tokens"), total("speculated_tokens")
    text = f"{tokens} tokens, {tokens / total('seconds'):.1f} tokens/s "
    text += f"(compilation took {total('compile_seconds'):.1f} s more)"
    if drafter == NONE:
        return text
    if not drafted:
        return f"{text}\nnothing was drafted: {outputs[-1]['not_drafted']}"
    length = drafted / total("speculated_rounds")
    return f"{text}\naccept length {length:.2f}, in rounds that made {drafted / tokens:.0%} of the tokens"


if __name__ == "__main__":
    sys.exit(main())
