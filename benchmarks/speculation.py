"""What drafting is worth on a trained policy: accept lengths, calibration, costs, and speed over plain decoding.

python benchmarks/speculation.py --config configs/speculation.yaml --policy DIR --drafter DIR [--drafter ngram] [--parts LIST]

The policy and its drafters are made before; RESULTS.md has the commands. Other arguments override the configuration, as in
every command: the measured answers were those to long problems,

    --data.task_args "{min_length: 12, max_length: 20, tail: 0.0}"

All answers are to the configuration's evaluation prompts, as long as the policy makes them. Arms take turns in one process,
after two untimed ones (--warm-up); a turn in which anything was compiled, or in which a hypervisor gave more than 2 % of the
processors to others, is given up and taken again, with other noise. A cell is the median over the turns of this arm over
plain decoding in the same turn, with the lower end of a 95 % interval of their mean. A turn decodes twice (--waves) as many
answers as are live, 8 at least: "all live" is its first part, prefills, admissions and the host's gaps included, until no
answer waits for a row and one ended; "whole" goes on to the last token.

policy    how long the answers are, and the entropy of the policy's distribution at temperature 1, in nats a token.
costs     seconds of a round over those of a plain round, all rows live (also the accept length that breaks even); of the
          target's forward and commit alone, over as many nodes; what is left, as a share of the round; of drafting alone, the
          drafter's extension too, by level.
coupling  accept length and accepted nodes by depth for every strength of the coupling with the policy's noise, over four
          rollouts (the interval is that of the mean ratio to no coupling in the same rollout); what the scores promise
          over what was accepted, and the expected calibration error (mean of |promised - accepted| over nodes).
sweep     accept length and speed for one live sequence by depth, nodes and topk.
speed     tokens per second with so many live sequences: of the first drafter with every strategy and tuner, of the others with
          the first tuner.
recorded  the tuners on chunks recorded from rollouts of 64 answers in 32 rows: each place of a plain rollout takes a chunk that
          the chosen strategy did in that batch; speed over plain decoding, and over the best strategy of every batch.
pool      what the compiled chunks of the paper's strategies take with a strategy for every batch size, and bucketed by batch as
          in the paper: all temporaries (a captured graph keeps its own), the largest (XLA takes them for a run), and code.
tail      speed of one rollout of 64 answers that starts full and ends with the few long ones.

With --peer PYTHON, the python of a virtual environment with google-tunix, tunix's own sampler takes its turn too, on the same
weights and prompts, in batches of as many as are live.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.config import Config, load as configuration, schema
from tlt_jax.config.schema import Speculation
from tlt_jax.data import dataset as datasets
from tlt_jax.data.dataset import Prompt
from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import Interrupted
from tlt_jax.keys import GENERATE_STREAM
from tlt_jax.models import from_config, hf, transformer
from tlt_jax.rollout.engine import Engine
from tlt_jax.rollout.events import Emitted, Look, Retired
from tlt_jax.rollout.programs import Decode, DraftOnly, Start, StateShape
from tlt_jax.rollout.recorder import RolloutResult
from tlt_jax.spec_decode import strategy as strategies
from tlt_jax.spec_decode.decode import Known
from tlt_jax.spec_decode.decoding_params import DecodingParams, Sampling
from tlt_jax.spec_decode.stopping import RUNNING
from tlt_jax.spec_decode.strategy import PLAIN, Strategy
from tlt_jax.tuner import make
from tlt_jax.tuner.arms import PAPER_ARMS, bucketed, parse_arms, strategies_for
from tlt_jax.tuner.interface import Measurement

STRENGTHS, TEMPERATURES = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.6, 1.0)
SWEEP = [
    f"{d}_{k}_{n}"
    for d in (3, 5, 7, 11, 15)
    for k in (1, 2, 4)
    for n in ((d + 1,) if k == 1 else (8, 16, 32))
    if d < n <= k + (d - 1) * k**2 + 1
]
T_975, TURNS = (
    2.145,
    15,
)  # two-sided 95 % of Student's t with 14 degrees of freedom; for fewer turns it is too small
STOLEN = 0.02  # share of the processors that others may have during a turn
SEEDS, SEED_T_975 = 4, 3.182  # rollouts of every coupling and recording, and Student's t for them
REPLAYS = 10  # of every recorded rollout
COLUMNS = ("arm", "tokens/s, all live", "over plain", "lower 95 %", "tokens/s, whole", "over plain", "lower 95 %",
           "accept length")  # fmt: skip
FILLED = 64  # committed tokens of every row in the costs


class Arm:
    """An engine with its weights on one device."""

    def __init__(
        self, config: Config, settings: Speculation, live: int, buckets: Sequence[int] = ()
    ):
        rollout = replace(config.rollout, slots=live, batch_buckets=list(buckets or [live]))
        self.config = replace(config, speculation=settings, rollout=rollout)
        model, mesh = hf.read_config(config.model.path), meshes.make_mesh(1, 1)
        drafter, params = from_config.load_drafter(self.config, model, mesh)
        tokenizer = datasets.tokenizer(config)
        self.engine = Engine(
            self.config, model, mesh, datasets.stop_rules(config, tokenizer), drafter
        )
        self.weights = self.engine.publish(
            hf.load(config.model.path, model, mesh, config.model.param_dtype), params
        )
        self.remember, self.engine.remember, self.news = self.engine.remember, self.listen, []
        self.tuner, self.is_hopeless, self.most = self.engine.tuner.init(), False, math.inf

    def listen(self, look: Look) -> None:
        """Notes when tokens came, and whether they ended their answer."""
        self.remember(look)
        for event in look.events:
            if isinstance(event, Retired):
                self.news.append([time.perf_counter(), event.tokens, 0])
                self.is_hopeless |= stolen() > self.most
            if isinstance(event, Emitted):
                self.news[-1][2] += event.finish != RUNNING

    def full_speed(self, begin: float, live: int) -> float:
        """Tokens per second of a rollout that began then, for as long as so many were live."""
        left, tokens = sum(ended for _, _, ended in self.news), 0
        for now, count, ended in self.news:
            tokens, left = tokens + count, left - ended
            if left < live:
                return tokens / (now - begin)
        return math.nan

    def decode(
        self,
        prompts: Sequence[Prompt],
        temperature: float = 1.0,
        step: int = 0,
        most: float = math.inf,
    ) -> RolloutResult:
        """One answer to each prompt; raises Interrupted when more than `most` processor seconds are `stolen`."""
        limit, self.news, self.is_hopeless, self.most = (
            self.config.rollout.max_new_tokens,
            [],
            False,
            most,
        )
        tokens = [prompt.tokens for prompt in prompts]
        request = self.engine.request(
            tokens, 1, Sampling(temperature), limit, stream=GENERATE_STREAM, step=step
        )
        result, self.tuner = self.engine.run(
            request, self.weights, self.tuner, interrupted=lambda: self.is_hopeless
        )
        return result


class Peer:
    """tunix's sampler in a process of its own, with the same weights."""

    def __init__(self, python: str, config: Config, live: int):
        self.live, self.limit = live, config.rollout.max_new_tokens
        script = str(Path(__file__).parent / "tunix_sampler.py")
        command = [python, "-W", "ignore", script, config.model.path, str(self.limit)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def decode(
        self, prompts: Sequence[Prompt], temperature: float, step: int, most: float
    ) -> SimpleNamespace:
        """One answer to each prompt, what of a RolloutResult the race reads."""
        stats = {"seconds": 0.0, "tokens": 0, "compiles": 0, "speculated_tokens": 0}
        for first in range(0, len(prompts), self.live):
            texts = [prompt.text for prompt in prompts[first : first + self.live]]
            self.process.stdin.write(
                json.dumps({"prompts": texts, "limit": self.limit, "seed": 100 * step + first})
                + "\n"
            )
            self.process.stdin.flush()
            result = json.loads(self.process.stdout.readline())
            stats |= {name: stats[name] + result[name] for name in ("seconds", "tokens")}
        return SimpleNamespace(stats=stats, measurements=[])

    def close(self) -> None:
        """Ends the process."""
        self.process.stdin.close()
        self.process.wait()


def table(*columns: str) -> None:
    """Prints the head of a Markdown table."""
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")


def row(*cells: object) -> None:
    """Prints a line of a table."""
    print(
        "| "
        + " | ".join(f"{cell:.3g}" if isinstance(cell, float) else str(cell) for cell in cells)
        + " |",
        flush=True,
    )


def label(drafter: str) -> str:
    """A short name: the run of a drafter's directory, or ngram."""
    return Path(drafter).parent.parent.name if drafter != schema.NGRAM else drafter


def by_depth(results: Sequence[RolloutResult]) -> str:
    """Accepted nodes of each depth per round."""
    drafted = [one for result in results for one in result.measurements if one.strategy != PLAIN]
    rounds = sum(one.row_rounds for one in drafted)
    return " ".join(
        f"{hits:.2f}" for hits in sum(one.hits.sum(axis=(1, 2)) for one in drafted) / rounds
    )


def describe_policy(config: Config, prompts: Sequence[Prompt]) -> None:
    """Prints answer lengths and entropy."""
    arm = Arm(config, Speculation(), 32)
    answers = arm.decode(prompts).completions
    model = arm.engine.model_config
    params = hf.load(config.model.path, model, arm.engine.mesh, "float32")
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
        row_tokens = np.zeros((1, width), np.int32)
        row_tokens[0, : len(prompt) + len(one.tokens)] = [*prompt, *one.tokens]
        total += float(
            entropy(row_tokens)[0, len(prompt) - 1 : len(prompt) + len(one.tokens) - 1].sum()
        )
        count += len(one.tokens)
    lengths = [len(one.tokens) for one in answers]
    middle, late = np.percentile(lengths, [50, 75])
    likely = math.exp(float(np.mean(np.concatenate([one.logprobs for one in answers]))))
    cut = sum(one.finish == "length" for one in answers)
    table(
        "answers",
        "median length",
        "75th percentile",
        "longest",
        "cut",
        "entropy, nats",
        "exp of the mean log-prob",
    )
    row(len(answers), int(middle), int(late), max(lengths), cut, total / count, likely)


def costs(config: Config, drafter: str, texts: Sequence[str], live: int, seconds: float) -> None:
    """Prints what rounds of each strategy cost with `live` rows, over a plain round."""
    table(
        "live",
        "drafter",
        "strategy",
        "round / plain",
        "forward / plain",
        "outside the forward",
        "a level / plain",
    )
    rounds = config.rollout.chunk
    programs, arm = {}, Arm(config, Speculation(drafter, "fixed", list(texts)), live)
    shapes = arm.engine.programs.shapes[0]
    target = shapes.target
    slots = arm.engine.cache_buckets([np.zeros(16)], config.rollout.max_new_tokens)[-1]
    shape = StateShape(0, live, slots)
    state = Start(shape)(arm.engine.programs)
    far = jnp.full(live, 1 << 30, jnp.int32)
    state = state.replace(lengths=jnp.full(live, FILLED, jnp.int32), limits=far, live=far > 0)
    host_context = shapes.drafter.host_context(live)
    host_context = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), host_context)
    for text in ("off", *texts):
        strategy = strategies.parse(text)
        chunk = Decode(shape, rounds, strategy, DecodingParams(Sampling(1.0)))
        programs[text, "round"] = arm.engine.programs.get(chunk)
        programs[text, "forward"] = forwards(target, strategy, rounds)
        if text != "off":
            programs[text, "draft"] = arm.engine.programs.get(
                DraftOnly(shape, rounds, strategy, 1.0)
            )
    spent: dict[tuple[str, str], list[float]] = {name: [] for name in programs}
    begin = time.perf_counter()
    while len(spent["off", "round"]) < 5 or time.perf_counter() - begin < seconds:
        for name, program in programs.items():
            given = jax.tree.map(jnp.copy, state)
            last = [np.array([1, rounds], np.int32)]
            if name[1] == "draft":
                given, last = (
                    Known(
                        given.keys,
                        given.lengths,
                        given.history,
                        target.features(given.cache),
                        given.drafter,
                    ),
                    [],
                )
            jax.block_until_ready(given)
            start = time.perf_counter()
            jax.block_until_ready(
                program(given, arm.weights[0], () if name[0] == "off" else host_context, *last)
            )
            spent[name].append((time.perf_counter() - start) / rounds)
    ratio = {
        name: statistics.median(np.divide(one, spent["off", "round"])[1:])
        for name, one in spent.items()
    }
    print(f"a plain round takes {1e3 * statistics.median(spent['off', 'round']):.2f} ms")
    for text in texts:
        whole, forward = ratio[text, "round"], ratio[text, "forward"]
        level = ratio[text, "draft"] / strategies.parse(text).depth
        row(live, label(drafter), text, whole, forward, f"{(whole - forward) / whole:.0%}", level)


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


def coupling(
    config: Config,
    drafter: str,
    texts: Sequence[str],
    prompts: Sequence[Prompt],
    sharpness: Sequence[float],
) -> None:
    """Prints accept lengths and calibration by temperature, strength and sharpness; of all but the first tree only the ends."""
    table("drafter", "strategy", "temperature", "coupling", "sharpness", "accept length", "over uncoupled", "95 %",
          "accepted by depth", "promised / accepted", "calibration error")  # fmt: skip
    for strategy in texts:
        for temperature in TEMPERATURES if strategy == texts[0] else (1.0,):
            strengths = STRENGTHS if strategy == texts[0] else (0.0, 0.75)
            plain = []
            for strength in strengths if temperature else (0.0,):
                for sharp in sharpness if strength == 0.75 and strategy == texts[0] else (1.0,):
                    settings = Speculation(
                        drafter, "fixed", [strategy], coupling=strength, sharpness=sharp
                    )
                    arm = Arm(config, settings, 8)
                    results = [arm.decode(prompts, temperature, seed) for seed in range(SEEDS)]
                    lengths = [result.stats["accept_length"] for result in results]
                    plain = plain or lengths
                    ratios = np.divide(lengths, plain)
                    margin = SEED_T_975 * statistics.stdev(ratios) / math.sqrt(SEEDS)
                    nodes, promised, held = sum(result.reliability for result in results)
                    error = float(np.abs(promised - held).sum() / nodes.sum())
                    row(label(drafter), strategy, temperature, strength, sharp, statistics.mean(lengths), float(ratios.mean()),
                        f"+- {margin:.3f}", by_depth(results), float(promised.sum() / held.sum()), error)  # fmt: skip


def recorded(
    config: Config,
    drafter: str,
    texts: Sequence[str],
    tuners: Sequence[str],
    prompts: Sequence[Prompt],
) -> None:
    """Prints what every tuner makes of recorded chunks: of long-tailed rollouts by each strategy, drawn again and again."""
    buckets, places = (1, 2, 4, 8, 16, 32), []
    chunks: dict[tuple[int, Strategy], list[Measurement]] = {}
    for text in ("off", *texts):
        arm = Arm(config, Speculation(drafter, "fixed", [text]), 32, buckets)
        for seed in range(-1, SEEDS):
            found = arm.decode(prompts, 1.0, max(seed, 0)).measurements
            if seed >= 0:  # the first one compiled
                places += [found] if text == "off" else []
                for one in found:
                    if one.is_timed:
                        chunks.setdefault((one.batch, one.strategy), []).append(one)
    speeds = {
        key: 1 / statistics.mean(one.seconds / one.tokens for one in found)
        for key, found in chunks.items()
    }  # as drawn
    arms = parse_arms(texts)
    known = {
        one.batch
        for found in places
        for one in found
        if all((one.batch, arm) in chunks for arm in (PLAIN, *arms))
    }
    places = [[one for one in found if one.batch in known] for found in places]
    table("tuner", "over plain", "of the best strategy for every batch")
    is_cpu = meshes.is_cpu(meshes.make_mesh(1, 1))
    for name in (*tuners, *texts):
        settings = (
            Speculation(drafter, name, list(texts))
            if name in tuners
            else Speculation(drafter, "fixed", [name])
        )
        tuner = make.make_tuner(settings, arms if name in tuners else parse_arms([name]), is_cpu)
        state, random, plain, spent, least = tuner.init(), np.random.default_rng(0), 0.0, 0.0, 0.0
        for number, place in (
            pair for _ in range(REPLAYS) for found in places for pair in enumerate(found)
        ):
            state = tuner.renew(state) if number == 0 else state
            state, choice = tuner.choose(state, round(place.live), place.batch, place.slots)
            options = chunks[place.batch, choice.strategy]
            drawn = options[random.integers(len(options))]
            state = tuner.observe(state, drawn._replace(slots=place.slots))
            plain += place.tokens / speeds[place.batch, PLAIN]
            spent += place.tokens * drawn.seconds / drawn.tokens
            least += place.tokens / max(speeds[place.batch, arm] for arm in (PLAIN, *arms))
        row(name, plain / spent, least / spent)


def pool(config: Config, drafter: str) -> None:
    """Prints the size of the pool of programs."""
    buckets = (1, 2, 4, 8, 16, 32)
    arm = Arm(config, Speculation(drafter, "fixed", list(PAPER_ARMS)), 32, buckets)
    slots, arms = (
        arm.engine.cache_buckets([np.zeros(16)], config.rollout.max_new_tokens)[-1],
        parse_arms(PAPER_ARMS),
    )
    rules, rounds = DecodingParams(Sampling(1.0)), config.rollout.chunk
    for batch in buckets:
        for one in (PLAIN, *arms):
            arm.engine.programs.get(Decode(StateShape(0, batch, slots), rounds, one, rules))
    usual = bucketed(arms)
    table("pool", "programs", "seconds", "temporaries, MiB", "largest, MiB", "code, MiB")
    every = arm.engine.programs.compiles
    few = [
        one
        for one in every
        if one.program.strategy in (PLAIN, *strategies_for(usual, one.program.state.batch))
    ]
    for name, compiled in (("every strategy for every batch", every), ("bucketed", few)):
        temporary = [one.temporary / 2**20 for one in compiled]
        row(name, len(compiled), round(sum(one.seconds for one in compiled)), sum(temporary), max(temporary),
            sum(one.code for one in compiled) / 2**20)  # fmt: skip


def race(
    config: Config,
    arms: dict[str, Speculation | str],
    prompts: Sequence[Prompt],
    live: int,
    turns: tuple[int, int],
    each: int,
    buckets: Sequence[int] = (),
) -> Iterable[list]:
    """Of every arm the cells of COLUMNS; `turns` that are not timed, and that are. The settings of a peer are its python."""
    engines: dict[str, Arm | Peer] = {
        name: Peer(settings, config, live)
        if isinstance(settings, str)
        else Arm(config, settings, live, buckets)
        for name, settings in arms.items()
    }
    full: dict[str, list[float]] = {name: [] for name in arms}
    whole: dict[str, list[float]] = {name: [] for name in arms}
    results: dict[str, list[RolloutResult]] = {name: [] for name in arms}
    turn, order, usual, cores = -turns[0], list(engines.items()), math.inf, os.cpu_count() or 1
    for step in itertools.count():
        chosen = [prompts[(max(turn, 0) * each + i) % len(prompts)] for i in range(each)]
        done, clock, before = {}, time.perf_counter(), stolen()
        most = before + STOLEN * cores * usual if turn >= 0 else math.inf
        try:
            for name, arm in order if step % 2 else order[::-1]:
                begin = time.perf_counter()
                result = arm.decode(chosen, 1.0, step, most)
                done[name] = (
                    result,
                    arm.full_speed(begin, live) if isinstance(arm, Arm) else math.nan,
                )
        except Interrupted:
            print(f"turn {turn} was given up", file=sys.stderr, flush=True)
            continue
        seconds = time.perf_counter() - clock
        usual, theirs = min(usual, seconds), (stolen() - before) / seconds / cores
        compiled = sum(result.stats["compiles"] for result, _ in done.values())
        is_sound = not compiled and theirs <= STOLEN
        taken = ", ".join(
            f"{name} {result.stats['seconds']:.2f} s ({speed:.1f})"
            for name, (result, speed) in done.items()
        )
        print(f"turn {turn}, {compiled} programs compiled, {theirs:.1%} stolen; whole (tokens/s while all are live): {taken}",
              file=sys.stderr, flush=True)  # fmt: skip
        if turn >= 0 and is_sound:
            for name, (result, speed) in done.items():
                full[name].append(speed)
                whole[name].append(result.stats["tokens"] / result.stats["seconds"])
                results[name].append(result)
        turn += turn < 0 or is_sound
        if turn == turns[1]:
            break
    for arm in engines.values():
        if isinstance(arm, Peer):
            arm.close()
    for name in arms:
        drafted = sum(one.stats["speculated_tokens"] for one in results[name])
        rounds = sum(
            m.row_rounds for one in results[name] for m in one.measurements if m.strategy != PLAIN
        )
        cells = [name]
        for speeds in (full, whole):
            ratios = np.divide(speeds[name], speeds["plain"]).tolist()
            cells += [
                round(statistics.median(speeds[name]), 1),
                statistics.median(ratios),
                lower(ratios),
            ]
        yield [*cells, drafted / max(rounds, 1)]


def stolen() -> float:
    """Processor seconds that a hypervisor gave to others so far; 0 where no system counts them."""
    path = Path("/proc/stat")
    return int(path.read_text().split()[8]) / os.sysconf("SC_CLK_TCK") if path.exists() else 0.0


def lower(ratios: Sequence[float]) -> float:
    """The lower end of a 95 % interval of the mean; nan below 15 turns."""
    spread = float(np.std(ratios, ddof=1)) if len(ratios) >= TURNS else math.nan
    return statistics.mean(ratios) - T_975 * spread / math.sqrt(len(ratios))


def main(argv: Sequence[str] | None = None) -> int:
    """The command; prints the tables as they fill."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--config", required=True)
    parser.add_argument("--policy", required=True)
    parser.add_argument(
        "--drafter", action="append", required=True, help="directory or ngram; may be given again"
    )
    parser.add_argument("--strategies", default="2_1_3,3_1_4,5_1_6,4_2_8,6_4_16")
    parser.add_argument(
        "--alone",
        help="strategies that race without a tuner too; all of them unless given, '' for none",
    )
    parser.add_argument(
        "--trees", default="6_4_16,8_2_16,11_2_16,15_1_16", help="of the part `coupling`"
    )
    parser.add_argument(
        "--sharpness", default="1.0", help="also other sharpnesses, at coupling 0.75"
    )
    parser.add_argument("--live", default="1,2,4,8,16,32")
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--turns", type=int, default=15)
    parser.add_argument("--warm-up", type=int, default=2, help="turns that are not timed")
    parser.add_argument(
        "--waves", type=int, default=2, help="answers of a turn of `speed` for each that is live"
    )
    parser.add_argument("--parts", default="policy,costs,coupling,sweep,speed,recorded,pool,tail")
    parser.add_argument("--tuners", default="goodput,threshold,beg_mab", help="'' for none")
    parser.add_argument(
        "--peer", default="", help="python of a virtual environment with google-tunix"
    )
    args, overrides = parser.parse_known_args(argv)
    given = [
        "--config",
        args.config,
        "--model.path",
        args.policy,
        "--mesh.data",
        "1",
        "--mesh.fake_devices",
        "0",
    ]
    config = configuration.parse([*given, "--data.eval_size", str(args.prompts), *overrides])
    prompts = datasets.load(config, datasets.tokenizer(config)).eval_prompts()
    texts, parts, turns = (
        args.strategies.split(","),
        args.parts.split(","),
        (args.warm_up, args.turns),
    )
    tuners = [one for one in args.tuners.split(",") if one]
    print(
        f"Python {platform.python_version()}, jax {jax.__version__}, {jax.devices()[0].device_kind}, {os.cpu_count()} cores"
    )
    if "policy" in parts:
        describe_policy(config, prompts)
    if "costs" in parts:
        for live in map(int, args.live.split(",")):
            for drafter in args.drafter:
                costs(config, drafter, texts, live, 60.0)
    if "coupling" in parts:
        for drafter in args.drafter:
            if drafter != schema.NGRAM:
                coupling(
                    config,
                    drafter,
                    args.trees.split(","),
                    prompts,
                    [float(one) for one in args.sharpness.split(",")],
                )
    arms = {"plain": Speculation()}
    if "sweep" in parts:
        table(*COLUMNS)
        swept = arms | {text: Speculation(args.drafter[0], "fixed", [text]) for text in SWEEP}
        for cells in race(config, swept, prompts, 1, turns, 8):
            row(*cells)
    for drafter in args.drafter:
        name = label(drafter)
        for one in tuners[: None if drafter == args.drafter[0] else 1]:
            arms[f"{name} {one}"] = Speculation(drafter, one, texts)
        if drafter == args.drafter[0]:
            alone = [
                text for text in (texts if args.alone is None else args.alone.split(",")) if text
            ]
            arms |= {f"{name} {text}": Speculation(drafter, "fixed", [text]) for text in alone}
            for text in alone[-1:] if drafter != schema.NGRAM else ():
                arms[f"{name} {text}, uncoupled"] = Speculation(
                    drafter, "fixed", [text], coupling=0.0
                )
    if args.peer:
        arms["tunix"] = args.peer
    if "speed" in parts:
        table("live", *COLUMNS)
        for live in map(int, args.live.split(",")):
            for cells in race(config, arms, prompts, live, turns, max(args.waves * live, 8)):
                row(live, *cells)
    if "recorded" in parts:
        recorded(config, args.drafter[0], texts, tuners, prompts)
    if "pool" in parts:
        pool(config, args.drafter[0])
    if "tail" in parts:
        table("sequences", *COLUMNS)
        kept = {
            name: one
            for name, one in arms.items()
            if isinstance(one, str) or one.tuner != "fixed" or name == "plain"
        }
        buckets = (1, 2, 4, 8, 16, 32, 64)
        for cells in race(config, kept, prompts, 64, turns, 64, buckets):
            row(64, *cells)
    return 0


if __name__ == "__main__":
    sys.exit(main())
