"""How many tokens does a round of each drafter give, alone and merged with n-grams, on the same recorded answers?

python -m benchmarks.drafter.replay --config FILE --drafter DIR [--drafter DIR ...] [--prompts N] [--trees 7_1_8,7_4_16]
    [--temperatures 1,0] [--csv FILE] [--section.knob VALUE ...]

The policy answers the evaluation's prompts once per temperature, without a drafter. Drafting changes no token, so these
answers decide what each drafter's rounds would accept: at every position of an answer the drafter drafts, with the features
and the noise that it would have there, and nothing is verified by the policy. Rounds follow one another from the first token
on, as in a rollout. Coupling 0: siblings are ordered without the noise. "n-grams" draft alone in the rows of the first
drafter. Brackets are 95 % intervals over the answers, by the jackknife; `over_first` is tokens a round over those of the first
drafter with the same tree, temperature, coupling and n-grams.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common.results import ResultTable, arguments, listed
from benchmarks.common.timing import ratio
from benchmarks.speculation.arm import Arm, label
from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import NONE, Speculation
from tlt_jax.data import dataset as datasets
from tlt_jax.data.dataset import Prompt
from tlt_jax.keys import GENERATE_STREAM, sequence_keys
from tlt_jax.spec_decode import ngram
from tlt_jax.spec_decode.decode_state import Weights
from tlt_jax.spec_decode.decoding_params import Sampling
from tlt_jax.spec_decode.draft_tree import Candidates
from tlt_jax.spec_decode.interface import Context, Drafter
from tlt_jax.spec_decode.noise import draw_ahead, nothing_drawn
from tlt_jax.spec_decode.strategy import Strategy, name, parse
from tlt_jax.spec_decode.tree import ancestors, merge, rerank
from tlt_jax.spec_decode.verify import Visit, path_of

ALONE, MERGED, NGRAMS = "alone", "with n-grams", "n-grams"
COUPLED = 0.75  # of a learned drafter
BATCH = 16  # answers that are replayed at once
COLUMNS = (
    "drafter", "drafts", "temperature", "coupling", "tree", "tokens", "tokens_per_round", "low", "high", "over_first",
    "over_first_low", "over_first_high", *(f"depth_{d + 1}" for d in range(8)),
)  # fmt: skip
Cell = tuple[str, str]  # what drafts, and the tree


class Texts(NamedTuple):
    """Answers with their prompts, at one temperature; `keys`: of their noise."""

    temperature: float
    tokens: list[np.ndarray]
    prompts: list[int]  # tokens of each
    keys: np.ndarray

    @property
    def answers(self) -> list[int]:
        """Tokens of each answer."""
        return [len(text) - prompt for text, prompt in zip(self.tokens, self.prompts, strict=True)]


def texts_of(config: Config, prompts: Sequence[Prompt], temperature: float) -> Texts:
    """Answers of the policy."""
    arm = Arm(config, Speculation(NONE))
    found = arm.decode(prompts, Sampling(temperature)).completions
    given = [prompts[one.prompt].tokens for one in found]
    tokens = [np.concatenate([a, one.tokens]) for a, one in zip(given, found, strict=True)]
    uids = np.array([one.uid for one in found])
    keys = np.asarray(sequence_keys(config.train.seed, GENERATE_STREAM, 0, uids))
    return Texts(temperature, tokens, [len(one) for one in given], keys)


class Rows(NamedTuple):
    """Texts as arrays [B, S], filled up with texts of nothing."""

    history: jax.Array
    features: jax.Array
    starts: jax.Array
    ends: jax.Array
    keys: jax.Array


def rows_of(arm: Arm, texts: Texts, chosen: range, slots: int) -> Rows:
    """These texts, with the features that the policy has at each of their tokens."""
    target, weights = arm.engine.programs.shapes[0].target, arm.weights[0]
    history = np.zeros((BATCH, slots), np.int32)
    starts, ends = np.zeros((2, BATCH), np.int32)
    keys = np.zeros((BATCH, 2), np.uint32)
    for row, index in enumerate(chosen):
        text = texts.tokens[index]
        history[row, : len(text)] = text
        starts[row], ends[row] = texts.prompts[index] - 1, len(text)
        keys[row] = texts.keys[index]
    features = jax.jit(lambda *given: target.prefill(*given).features)
    known = features(weights.target, history, np.maximum(ends - 1, 0))
    return Rows(jnp.asarray(history), known, *map(jnp.asarray, (starts, ends, keys)))


def replay(
    drafter: Drafter, vocab: int, trees: Sequence[Strategy], temperature: float, is_coupled: bool, rounds: int,
    weights: Weights, rows: Rows,
) -> dict[Cell, jax.Array]:  # fmt: skip
    """Drafts [T, B] of each tree that would be accepted at each of the answers' tokens; trees of one depth and topk."""
    shape = max(trees, key=lambda one: one.nodes)
    batch, slots = rows.history.shape
    empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), drafter.empty(batch, slots))
    pool = jnp.full((batch, 1), ngram.SEPARATOR)

    def context(lengths: jax.Array, ahead=None) -> Context:
        known = jnp.arange(slots) <= lengths[:, None]
        return Context(jnp.where(known, rows.history, 0), lengths, rows.features, (), ahead)

    def accepted(tree: Candidates, nodes: int, lengths: jax.Array, live: jax.Array) -> jax.Array:
        roots = jnp.take_along_axis(rows.history, lengths[:, None], axis=1)[:, 0]
        drafted = rerank(tree, roots, nodes)
        places = jnp.minimum(lengths[:, None] + 1 + drafted.depths, slots - 1)
        wanted = jnp.take_along_axis(rows.history, places, axis=1)
        wanted = jnp.where(places < rows.ends[:, None], wanted, -2)  # nothing after the end
        choices = Visit(wanted, jnp.zeros(wanted.shape), jnp.zeros(wanted.shape, bool))
        return path_of(drafted, ancestors(drafted.parents), live, shape.depth, choices).accepted

    def step(carry: tuple, t: jax.Array) -> tuple[tuple, dict]:
        state, ahead = carry
        lengths = jnp.minimum(rows.starts + t, jnp.maximum(rows.ends - 2, 0))
        live = rows.starts + t + 1 < rows.ends
        if is_coupled:
            ahead = draw_ahead(ahead, rows.keys, lengths + 1, live)
        given = context(lengths, ahead)
        state = drafter.extend(weights, state, given, 1)
        learned = drafter.draft(weights, state, given, shape, temperature)
        ngrams = ngram.propose(given.history, lengths, pool, shape)
        ways = {ALONE: learned, MERGED: merge(learned, ngrams, shape.depth), NGRAMS: ngrams}
        found = {
            (way, name(one)): accepted(candidates, one.nodes, lengths, live)
            for way, candidates in ways.items()
            for one in trees
        }
        return (state, ahead), found

    live = rows.ends > 0
    known = drafter.catch_up(weights, empty, context(rows.starts), live, jnp.int32(1))
    first = rows.starts + 1
    noise = nothing_drawn(first, shape.path, vocab, jnp.float32) if is_coupled else None
    return jax.lax.scan(step, (known, noise), jnp.arange(rounds, dtype=jnp.int32))[1]


def measure(
    arm: Arm, texts: Texts, trees: Sequence[Strategy], is_coupled: bool
) -> dict[Cell, list[np.ndarray]]:
    """Drafts of each tree accepted at each token of every answer."""
    shapes = arm.engine.programs.shapes[0]
    limits = arm.config.data.max_prompt_tokens + arm.config.rollout.max_new_tokens
    slots, count = shapes.target.padded_slots(limits), len(texts.tokens)
    run = partial(replay, shapes.drafter, shapes.target.vocab)
    run = jax.jit(partial(run, trees, texts.temperature, is_coupled, max(texts.answers)))
    found = {}
    for begin in range(0, count, BATCH):
        chosen = range(begin, min(begin + BATCH, count))
        given = rows_of(arm, texts, chosen, slots)
        for cell, hits in jax.device_get(run(arm.weights[0], given)).items():
            each = [hits[: texts.answers[i], row] for row, i in enumerate(chosen)]
            found.setdefault(cell, []).extend(each)
    return found


def rounds_of(accepted: np.ndarray) -> list[int]:
    """The drafts that the rounds of one answer accept, from its first token on; each round adds a token of the policy."""
    place, found = 0, []
    while place < len(accepted):
        found.append(min(int(accepted[place]), len(accepted) - place - 1))
        place += found[-1] + 1
    return found


def cells(answers: Sequence[np.ndarray], first: Sequence[np.ndarray]) -> Iterator[object]:
    """Figures of a drafter's rounds, and of their number relative to those of the first drafter."""
    rounds, others = ([rounds_of(one) for one in some] for some in (answers, first))
    counts = [len(one) for one in rounds]
    yield sum(map(len, answers))
    for pairs in (
        [(len(one), count) for one, count in zip(answers, counts, strict=True)],
        [(len(one), count) for one, count in zip(others, counts, strict=True)],
    ):
        value, half = ratio(pairs)
        yield from (value, value - half, value + half)
    hits = np.concatenate(rounds)
    yield from (float((hits > depth).mean()) for depth in range(8))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = arguments(__doc__)
    parser.add_argument(
        "--drafter", action="append", required=True, help="a directory; may be given again"
    )
    parser.add_argument("--prompts", type=int, default=16, help="how many")
    parser.add_argument("--trees", default="7_4_8,7_4_16,7_4_48", help="depth at most 8")
    parser.add_argument("--temperatures", default="1,0")
    args, overrides = parser.parse_known_args(argv)
    config = configuration.load(overrides, command="python -m benchmarks.drafter.replay")
    prompts = datasets.load(config, datasets.tokenizer(config)).eval_prompts()[: args.prompts]
    trees, table = [parse(text) for text in listed(args.trees)], ResultTable(COLUMNS, args.csv)
    for temperature in map(float, listed(args.temperatures)):
        texts = texts_of(config, prompts, temperature)
        print(f"temperature {temperature:g}: answers of {texts.answers} tokens", file=sys.stderr)
        first: dict = {}
        for drafter in args.drafter:
            arm = Arm(config, Speculation(drafter, "fixed", listed(args.trees)))
            for coupling in (0.0, COUPLED) if temperature else (0.0,):
                for same in dict.fromkeys((one.depth, one.topk) for one in trees):
                    some = [one for one in trees if (one.depth, one.topk) == same]
                    for (way, tree), found in measure(arm, texts, some, coupling > 0).items():
                        base = first.setdefault((way, tree, coupling), found)
                        if way == NGRAMS and (base is not found or coupling):
                            continue
                        who = way if way == NGRAMS else label(drafter)
                        table.row(who, way, temperature, coupling, tree, *cells(found, base))
    return 0


if __name__ == "__main__":
    sys.exit(main())
