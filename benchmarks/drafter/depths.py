"""To which depth are the drafts of n-grams, of the learned drafter, and of both in one tree accepted?

python -m benchmarks.drafter.depths --config FILE --drafter DIR [--prompts N] [--csv FILE] [--section.knob VALUE ...]

Accept length, and the share of rounds in which a draft is accepted to each depth, on the evaluation's prompts. Tokens have to
be those of plain decoding; answers end at end tokens alone.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.common.results import ResultTable, arguments
from benchmarks.speculation.arm import Arm
from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import ADAPTIVE, Speculation
from tlt_jax.data import dataset as datasets
from tlt_jax.data.dataset import Prompt
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


def decode(config: Config, strategy: str, prompts: Sequence[Prompt]) -> RolloutResult:
    """One answer to each prompt, always with this strategy."""
    arm = Arm(config, Speculation(ADAPTIVE, tuner="fixed", strategies=[strategy]))
    return arm.decode(prompts, Sampling.of(config.rollout))


def tokens_of(result: RolloutResult) -> list[list[int]]:
    """The tokens of every answer."""
    return [one.tokens.tolist() for one in result.completions]


def accepted(result: RolloutResult) -> Sequence[float]:
    """Accept length, and the share of rounds in which a draft was accepted to each depth."""
    drafted = [one for one in result.measurements if one.strategy.path > 1]
    rounds = sum(one.row_rounds for one in drafted)
    hits = sum(one.hits.sum((1, 2)) for one in drafted) / rounds
    return (sum(one.tokens for one in drafted) / rounds, *map(float, hits))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = arguments(__doc__)
    parser.add_argument("--drafter", required=True, help="the drafter's directory")
    parser.add_argument("--prompts", type=int, default=16, help="how many")
    args, overrides = parser.parse_known_args(argv)
    overrides += ["--drafter_training.start", args.drafter, "--rollout.stop", "[]"]
    config = configuration.load(overrides, command="python -m benchmarks.drafter.depths")
    prompts = datasets.load(config, datasets.tokenizer(config)).eval_prompts()[: args.prompts]
    plain = tokens_of(decode(config, "off", prompts))
    table = ResultTable(COLUMNS, args.csv)
    for name, strategy in DRAFTERS.items():
        result = decode(config, strategy, prompts)
        tokens = tokens_of(result)
        differ = sum(one != other for one, other in zip(plain, tokens, strict=True))
        print(f"{name}: {sum(map(len, tokens))} tokens", file=sys.stderr)
        table.row(name, strategy, *accepted(result), differ)
    return 0


if __name__ == "__main__":
    sys.exit(main())
