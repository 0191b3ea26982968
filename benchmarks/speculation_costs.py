"""What does a round that drafts cost, over a plain round?

python benchmarks/speculation_costs.py --policy DIR --drafter DIR [--drafter ngram] [--live 1,2,4] [--section.knob VALUE ...]

All rows are live. `round_over_plain` is also the accept length at which a strategy breaks even; `forward_over_plain` is the
policy's forward and commit alone, over as many nodes; `outside_forward_share` is what is left, as a share of the round;
`level_over_plain` is drafting timed alone, the drafter's extension too, by level of the tree.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Mapping, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from result_table import ResultTable
from speculation_setup import Arm, add_drafters, arguments, label, listed, read

from tlt_jax.config.schema import Speculation
from tlt_jax.rollout.executables.programs import Decode, DraftOnly, Start, StateShape
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.decode import Known
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling
from tlt_jax.spec_decode.strategy import Strategy

COLUMNS = (
    "live", "drafter", "strategy", "round_over_plain", "forward_over_plain", "outside_forward_share", "level_over_plain",
)  # fmt: skip
FILLED = 64  # committed tokens of every row
OFF = "off"

Name = tuple[str, str]  # a strategy, and which part of its round


class Rounds:
    """Programs of the rounds of each strategy and of their parts, on a state whose rows are all live."""

    def __init__(self, arm: Arm, texts: Sequence[str], live: int):
        self.rounds, self.weights = arm.config.rollout.chunk, arm.weights[0]
        shapes = arm.engine.programs.shapes[0]
        self.target = shapes.target
        shape = StateShape(0, live, arm.longest_cache())
        state = Start(shape)(arm.engine.programs)
        far = jnp.full(live, 1 << 30, jnp.int32)
        lengths = jnp.full(live, FILLED, jnp.int32)
        self.state = state.replace(lengths=lengths, limits=far, live=far > 0)
        self.host_context = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes.drafter.host_context(live)
        )
        self.programs: dict[Name, object] = {}
        for text in (OFF, *texts):
            strategy = strategies.parse(text)
            chunk = Decode(shape, self.rounds, strategy, DecodingParams(Sampling(1.0)))
            self.programs[text, "round"] = arm.engine.programs.get(chunk)
            self.programs[text, "forward"] = forwards(self.target, strategy, self.rounds)
            if text != OFF:
                draft = DraftOnly(shape, self.rounds, strategy, 1.0)
                self.programs[text, "draft"] = arm.engine.programs.get(draft)

    def seconds(self, name: Name) -> float:
        """Seconds of a round of this program, or of its part."""
        given, last = jax.tree.map(jnp.copy, self.state), [np.array([1, self.rounds], np.int32)]
        if name[1] == "draft":
            features = self.target.features(given.cache)
            given = Known(given.keys, given.lengths, given.history, features, given.drafter)
            last = []
        context = () if name[0] == OFF else self.host_context
        jax.block_until_ready(given)
        start = time.perf_counter()
        jax.block_until_ready(self.programs[name](given, self.weights, context, *last))
        return (time.perf_counter() - start) / self.rounds

    def spent(self, seconds: float) -> Mapping[Name, list[float]]:
        """Seconds of every program, in turns for so long, 5 at least; the first turn is not for use."""
        spent: dict[Name, list[float]] = {name: [] for name in self.programs}
        begin = time.perf_counter()
        while len(spent[OFF, "round"]) < 5 or time.perf_counter() - begin < seconds:
            for name in self.programs:
                spent[name].append(self.seconds(name))
        return spent


def forwards(target, strategy: Strategy, rounds: int):
    """A jitted loop of the target's forward over a chain of as many nodes, and of the commit."""
    nodes = strategy.nodes

    def loop(state, weights, *_):
        seen = jnp.broadcast_to(
            jnp.tril(jnp.ones((nodes, nodes), bool)), (state.roots.shape[0], nodes, nodes)
        )

        def step(_, carry):
            cache, tokens, lengths = carry
            positions = lengths[:, None] + jnp.arange(nodes)
            logits, scratch = target.forward(
                weights.target, tokens, positions, seen, cache, lengths
            )
            path = jnp.broadcast_to(jnp.arange(strategy.path), (tokens.shape[0], strategy.path))
            return (
                target.keep(cache, scratch, path, lengths),
                jnp.argmax(logits, -1).astype(jnp.int32),
                lengths + 1,
            )

        tokens = jnp.broadcast_to(state.roots[:, None], (state.roots.shape[0], nodes))
        return jax.lax.fori_loop(0, rounds, step, (state.cache, tokens, state.lengths))

    return jax.jit(loop, donate_argnums=0)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the table as it fills."""
    parser = arguments(__doc__)
    add_drafters(parser)
    parser.add_argument("--strategies", default="2_1_3,3_1_4,5_1_6,4_2_8,6_4_16")
    parser.add_argument("--live", default="1,2,4,8,16,32")
    parser.add_argument("--seconds", type=float, default=60.0, help="of timing, for each drafter")
    args, config, _ = read(parser, argv)
    texts, table = listed(args.strategies), ResultTable(COLUMNS, args.csv)
    for live in map(int, listed(args.live)):
        for drafter in args.drafter:
            arm = Arm(config, Speculation(drafter, "fixed", texts), live)
            spent = Rounds(arm, texts, live).spent(args.seconds)
            plain = spent[OFF, "round"]
            print(f"a plain round takes {1e3 * statistics.median(plain):.2f} ms", file=sys.stderr)
            ratio = {
                name: statistics.median(np.divide(one, plain)[1:]) for name, one in spent.items()
            }
            for text in texts:
                whole, forward = ratio[text, "round"], ratio[text, "forward"]
                level = ratio[text, "draft"] / strategies.parse(text).depth
                outside = (whole - forward) / whole
                table.row(live, label(drafter), text, whole, forward, outside, level)
    return 0


if __name__ == "__main__":
    sys.exit(main())
