"""How long are the answers of the policy that the benchmarks of speculation measure, and how sure is it of its tokens?

python benchmarks/speculation_policy.py --policy DIR [--section.knob VALUE ...]

One answer to each prompt at temperature 1; the entropy is that of the policy's distribution, in nats a token.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from result_table import ResultTable
from speculation_setup import Arm, arguments, read

from tlt_jax.config.schema import NONE, Speculation
from tlt_jax.data.dataset import Prompt
from tlt_jax.models import hf, transformer
from tlt_jax.rollout.recorder import Completion

COLUMNS = ("answers", "median_tokens", "p75_tokens", "longest_tokens", "cut", "entropy_nats", "exp_mean_logprob")  # fmt: skip


def mean_entropy(arm: Arm, prompts: Sequence[Prompt], answers: Sequence[Completion]) -> float:
    """Nats a token of the answers, under the policy at temperature 1."""
    model = arm.engine.model_config
    params = hf.load(arm.config.model.path, model, arm.engine.mesh, "float32")
    width = max(len(prompts[one.prompt].tokens) + len(one.tokens) for one in answers)

    @jax.jit
    def entropy(tokens: jax.Array) -> jax.Array:
        ones = jnp.ones_like(tokens)
        x, _ = transformer.hidden(
            params, model, tokens, jnp.cumsum(ones, 1) - 1, ones, compute_dtype="float32"
        )
        logp = jax.nn.log_softmax(transformer.logits(params, model, x))
        return -jnp.sum(jnp.exp(logp) * jnp.where(logp > -1e9, logp, 0), axis=-1)

    total, count = 0.0, 0
    for one in answers:
        prompt = prompts[one.prompt].tokens
        end = len(prompt) + len(one.tokens)
        row_tokens = np.zeros((1, width), np.int32)
        row_tokens[0, :end] = [*prompt, *one.tokens]
        total += float(entropy(row_tokens)[0, len(prompt) - 1 : end - 1].sum())
        count += len(one.tokens)
    return total / count


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table."""
    args, config, prompts = read(arguments(__doc__), argv)
    table = ResultTable(COLUMNS, args.csv)
    arm = Arm(config, Speculation(NONE), 32)
    answers = arm.decode(prompts).completions
    lengths = [len(one.tokens) for one in answers]
    middle, late = np.percentile(lengths, [50, 75])
    likely = math.exp(float(np.mean(np.concatenate([one.logprobs for one in answers]))))
    cut = sum(one.finish == "length" for one in answers)
    entropy = mean_entropy(arm, prompts, answers)
    table.row(len(answers), int(middle), int(late), max(lengths), cut, entropy, likely)
    return 0


if __name__ == "__main__":
    sys.exit(main())
