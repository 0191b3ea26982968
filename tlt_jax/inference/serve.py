"""`python -m tlt_jax.inference.serve --model DIR`: a policy over HTTP, with routes of vLLM and OpenAI."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from tlt_jax import cli
from tlt_jax.config import Config, knobs as fields
from tlt_jax.data import prompt_format
from tlt_jax.distributed.process import Preemption
from tlt_jax.errors import ConfigError
from tlt_jax.inference import chat

KNOBS = {  # option -> the knob that gives its default and help text
    "max-new-tokens": "rollout.max_new_tokens",
    "max-prompt-tokens": "data.max_prompt_tokens",
    "slots": "rollout.slots",
    "temperature": "rollout.temperature",
    "top-k": "rollout.top_k",
    "top-p": "rollout.top_p",
    "seed": "train.seed",
    "dtype": "model.compute_dtype",
    "drafter": "speculation.drafter",
}
SLOTS, SESSIONS = "16", "1000000"  # sequences at once; rollouts for which compiling may pay


def main(argv: Sequence[str] | None = None) -> int:
    """The command; exit code 0 once it was interrupted."""
    arguments = parser().parse_args(argv)
    given = {
        name: value
        for option, name in KNOBS.items()
        if (value := getattr(arguments, option.replace("-", "_"))) is not None
    }
    pairs = list(({"rollout.slots": SLOTS, "train.steps": SESSIONS} | given).items())
    try:
        config = chat.configuration_of(arguments.model, pairs)
    except ConfigError as error:
        cli.stop(error)
    with cli.prepared(config), Preemption() as preempted:
        from tlt_jax.serving.server import Server

        config, makers = chat.as_meant(arguments.model, pairs, arguments.raw)
        from tlt_jax.inference.live import Live

        model = chat.Model(config)
        live = Live(model, arguments.name or arguments.model)
        place = arguments.host, arguments.port, arguments.token
        kwargs = config.data.chat_template_kwargs
        with Server(live, model.tokenizer, *place, template_kwargs=kwargs) as server:
            print(f"{prompt_format.describe_sampling(config)}{makers}", file=sys.stderr)
            print(f"{live.model} at {server.url}: up to {live.longest} tokens", flush=True)
            try:
                live.run(preempted)
            except KeyboardInterrupt:
                pass
    return 0


def parser() -> cli.Parser:
    """The command line; defaults and help texts are those of the knobs."""
    out = cli.Parser(
        prog="python -m tlt_jax.inference.serve", description=__doc__, allow_abbrev=False
    )
    out.add_argument("--model", required=True, help="Hugging Face model directory or hub id")
    out.add_argument("--name", help="name of the model for clients (default: that of --model)")
    out.add_argument(
        "--host", default="127.0.0.1", help="address; another than of this host needs a token"
    )
    out.add_argument("--port", type=int, default=8000, help="port (default: 8000; 0: a free one)")
    out.add_argument(
        "--token", help="bearer token of clients (default: the environment variable TLT_JAX_TOKEN)"
    )
    out.add_argument(
        "--raw", action="store_true", help="ignore how the run that made the model formats prompts and samples answers"
    )  # fmt: skip
    knobs = fields.knobs(Config)
    for option, name in KNOBS.items():
        default = SLOTS if option == "slots" else chat.DEFAULTS.get(name, knobs[name].default)
        meaning = f"{knobs[name].help.split(';')[0]} (default: {default})"
        out.add_argument(f"--{option}", metavar=option[0].upper(), help=meaning)
    return out


if __name__ == "__main__":
    sys.exit(main())
