"""How deep do the drafts of n-grams, the learned drafter, and both in one tree hold?

python benchmarks/drafter_depths.py --config FILE --drafter DIR [--prompts N] [--section.knob VALUE ...]

Accept length, and the share of rounds in which a draft holds to each depth, on the evaluation's prompts. Tokens have to be
those of plain decoding.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from drafter_setup import arguments
from result_table import ResultTable

from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import Speculation
from tlt_jax.data import dataset as datasets
from tlt_jax.distributed import mesh as meshes
from tlt_jax.keys import EVAL_STREAM
from tlt_jax.models import from_config, hf_drafter
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode.decoding_params import Sampling

DRAFTERS = {
    "n-grams": "ngram:6_1_7",
    "learned, a chain": "learned:6_1_7",
    "learned": "learned:6_4_16",
    "both": "merged:6_4_16",
}
COLUMNS = (
    "drafter", "strategy", "accept_length", *(f"depth_{d + 1}" for d in range(6)), "answers_other_than_plain",
)  # fmt: skip


class Answering:
    """Policy and drafter of the configuration, which answer the evaluation's prompts by any strategy."""

    def __init__(self, config: Config, directory: str, prompts: int):
        self.config, tokenizer = config, datasets.tokenizer(config)
        self.model = from_config.model_config(config, tokenizer)
        self.mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
        longest = from_config.longest_sequence(config, self.model)
        self.drafter, self.params = hf_drafter.load(
            Path(directory), self.model, self.mesh, config.model.param_dtype, longest
        )
        self.policy = from_config.load_policy(config, self.model, self.mesh)
        found = datasets.load(config, tokenizer).eval_prompts()[:prompts]
        self.texts = [prompt.tokens for prompt in found]

    def decode(self, strategy: str) -> RolloutResult:
        """One answer to each prompt."""
        knobs = Speculation("adaptive", tuner="fixed", strategies=[strategy])
        config = replace(self.config, speculation=knobs)
        engine = Engine(config, self.model, self.mesh, (), self.drafter)
        request = engine.request(
            self.texts, 1, Sampling.of(config.rollout), config.rollout.max_new_tokens, stream=EVAL_STREAM, step=0,
        )  # fmt: skip
        return engine.run(request, engine.publish(self.policy, self.params))[0]


def tokens_of(result: RolloutResult) -> list[list[int]]:
    """The tokens of every answer."""
    return [one.tokens.tolist() for one in result.completions]


def held(result: RolloutResult) -> Sequence[float]:
    """Accept length, and the share of rounds in which a draft held to each depth."""
    drafted = [one for one in result.measurements if one.strategy.path > 1]
    rounds = sum(one.row_rounds for one in drafted)
    hits = sum(one.hits.sum((1, 2)) for one in drafted) / rounds
    return (sum(one.tokens for one in drafted) / rounds, *map(float, hits))


def main() -> None:
    """The command; prints the table as it fills."""
    parser = arguments(__doc__)
    parser.add_argument("--drafter", required=True, help="the drafter's directory")
    parser.add_argument("--prompts", type=int, default=16, help="how many")
    args, overrides = parser.parse_known_args()
    config = configuration.load(overrides, command="benchmarks/drafter_depths.py")
    answering = Answering(config, args.drafter, args.prompts)
    plain = tokens_of(answering.decode("off"))
    table = ResultTable(COLUMNS, args.csv)
    for name, strategy in DRAFTERS.items():
        result = answering.decode(strategy)
        tokens = tokens_of(result)
        differ = sum(one != other for one, other in zip(plain, tokens, strict=True))
        print(f"{name}: {sum(map(len, tokens))} tokens", file=sys.stderr)
        table.row(name, strategy, *held(result), differ)


if __name__ == "__main__":
    main()
