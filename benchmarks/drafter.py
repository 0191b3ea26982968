"""What choices of the adaptive drafter are worth, each by one small measurement; prints one table.

    python benchmarks/drafter.py checkpoints
    python benchmarks/drafter.py packing
    python benchmarks/drafter.py lengths
    python benchmarks/drafter.py ages --config FILE --checkpoints-of RUN --steps 39,20 [--section.knob VALUE ...]
    python benchmarks/drafter.py kinds --config FILE --checkpoints-of RUN [--section.knob VALUE ...]
    python benchmarks/drafter.py depths --config FILE --drafter DIR [--prompts N] [--section.knob VALUE ...]

checkpoints  how long saving the drafter of a 135M policy holds up the run: all that it uses, its frozen copies of the policy's
             embedding and LM head included, waited for; the same in the background; in the background what is trained alone,
             as the product does.
packing      sequences a second that the drafter's update learns from: one in each row, and packed rows.
lengths      who is idle early has short answers: mean length of the answers that tokens are drawn from, over that of all
             answers of a step, when a share of a group's sequences has ended; with and without those of the step before.
ages         held-out acceptance for the policy of the last checkpoint of RUN, after learning from its short answers alone, and
             from these with the long answers of the policies of earlier checkpoints: with the features of then, drawn half as
             often, and with features made again; and with its own long answers, which a run does not have in time.
kinds        the same acceptance of the architectures and objectives, after the same updates on all of its own answers, and
             the seconds of an update.
depths       accept length, and the share of rounds in which a draft holds to each depth, of n-grams, the learned drafter, and
             both in one tree, on the evaluation's prompts. Tokens have to be those of plain decoding.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.checkpoint import Store
from tlt_jax.config import Config, load as configuration
from tlt_jax.config.schema import Speculation
from tlt_jax.data import dataset as datasets, packing
from tlt_jax.data.packing import Example
from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter import (
    batch as drafter_batch,
    corpus,
    recipe as drafter_recipe,
    update as drafter_update,
    windows,
)
from tlt_jax.drafter.recipe import DrafterState, Objective, Recipe
from tlt_jax.keys import EVAL_STREAM
from tlt_jax.models import eagle, from_config, hf_drafter, transformer
from tlt_jax.models.transformer import ModelConfig, Params
from tlt_jax.optimizer import Adam
from tlt_jax.rollout.engine import Engine
from tlt_jax.spec_decode.decoding_params import Sampling
from tlt_jax.train import run_state
from tlt_jax.train.recipe import Recipe as PolicyRecipe

SMOLLM2 = ModelConfig(
    "llama", 49152, 576, 30, 9, 3, 64, 1536, 8192, qkv_bias=False, tied=True, init_std=0.04
)
SMALL = ModelConfig(
    "qwen2", 4096, 256, 12, 4, 2, 64, 768, 1024, qkv_bias=True, tied=True, init_std=0.05
)
REPEATS = 7
LONGEST, MEDIAN, SPREAD = 512, 90, 0.9  # answers: log-normal, cut
UPDATES, EVALUATIONS = 150, 8  # of `ages`


def table(columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Prints a Markdown table."""
    print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for row in rows:
        print("| " + " | ".join(f"{x:.3g}" if isinstance(x, float) else str(x) for x in row) + " |")


def new_drafter(policy: ModelConfig, vocab: int) -> tuple[Recipe, DrafterState]:
    """An untrained EAGLE-3 drafter of the policy, on one device."""
    drafter = eagle.for_policy(policy, "eagle3", draft_vocab_size=vocab)
    mesh, ids = meshes.make_mesh(1, 1), np.arange(vocab, dtype=np.int32)
    recipe = Recipe(policy, drafter, mesh, Adam(3e-4, 100), Objective(unroll=5))
    params = eagle.init(drafter, mesh, jax.random.key(0), "float32", ids)
    return recipe, drafter_recipe.create(params, recipe)


def checkpoints() -> None:
    """The table of `checkpoints`."""
    recipe, state = new_drafter(SMOLLM2, 8192)
    params = transformer.init(SMOLLM2, recipe.mesh, jax.random.key(1), "float32")
    frozen = {name: jnp.copy(getattr(eagle.shared(params), name)) for name in ("embed", "head")}
    whole, trained = {"drafter": state, "frozen": frozen}, {"drafter": state}
    modes = {
        "all, waited for": (whole, True), "all, in the background": (whole, False),
        "what is trained, in the background": (trained, False),
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in modes}
    with tempfile.TemporaryDirectory() as folder:
        for turn in range(REPEATS):
            for name, (items, waits) in modes.items():
                with Store(Path(folder) / name.replace(" ", "_"), keep=1) as store:
                    begin = time.perf_counter()
                    store.save(turn, items)
                    if waits:
                        store.wait()
                    seconds[name].append(time.perf_counter() - begin)
    sizes = {
        name: sum(leaf.nbytes for leaf in jax.tree.leaves(items)) / 2**20
        for name, (items, _) in modes.items()
    }
    table(
        ("saved", "MiB", "the run waits, ms", "least", "most"),
        (
            (name, sizes[name], *(1e3 * of(each[1:]) for of in (statistics.median, min, max)))
            for name, each in seconds.items()
        ),
    )


def answers(count: int, seed: int) -> list[Example]:
    """Prompts of 32 random tokens with answers of heavy-tailed length."""
    random = np.random.default_rng(seed)
    lengths = np.clip(np.exp(random.normal(np.log(MEDIAN), SPREAD, count)), 4, LONGEST - 32)
    return [
        Example(uid, *(random.integers(0, SMALL.vocab_size, size).astype(np.int32) for size in (32, int(length))))
        for uid, length in enumerate(lengths)
    ]  # fmt: skip


def packing_gain() -> None:
    """The table of `packing`."""
    recipe, state = new_drafter(SMALL, 4096 // 2)
    policy = transformer.init(SMALL, recipe.mesh, jax.random.key(1), "float32")
    update, examples = drafter_update.program(recipe), answers(64, 0)
    alone = [packing.pack([example], LONGEST, 1) for example in examples]
    packed = packing.pack(examples, LONGEST, 1)
    rows = {
        "a sequence in each row": [batch_of(one, 0, recipe) for one in alone],
        "packed": [batch_of(packed, row, recipe) for row in range(len(packed.tokens))],
    }
    seconds: dict[str, list[float]] = {name: [] for name in rows}
    state, _ = update(state, policy, rows["packed"][0])
    for _ in range(3):
        for name, batches in rows.items():
            begin = time.perf_counter()
            for batch in batches:
                state, metrics = update(state, policy, batch)
            jax.block_until_ready(metrics["loss"])
            seconds[name].append(time.perf_counter() - begin)
    fill = {"a sequence in each row": float(np.mean([one.fill for one in alone]))}
    fill["packed"] = packed.fill
    table(
        ("rows", "rows of 512", "filled", "sequences/s", "gain"),
        (
            (name, len(rows[name]), f"{fill[name]:.0%}", len(examples) / statistics.median(each),
             statistics.median(a / b for a, b in zip(seconds["a sequence in each row"], each, strict=True)))
            for name, each in seconds.items()
        ),
    )  # fmt: skip


def batch_of(packed: packing.Packed, step: int, recipe: Recipe) -> drafter_batch.Batch:
    """The rows of one accumulation step as a drafter's batch."""
    arrays = {name: getattr(packed, name)[step] for name in ("tokens", "positions", "segments")}
    mask = packed.spread(np.ones(len(packed.spans)))[step] > 0
    return drafter_batch.make_batch(arrays | {"loss_mask": mask}, recipe.mesh)


def lengths() -> None:
    """The table of `lengths`: mean over many steps of 64 sequences that begin together."""
    rows, count = [], 64
    for share in (0.25, 0.5, 0.75, 0.9):
        found: dict[str, list[float]] = {"this step alone": [], "with the step before": []}
        for seed in range(200):
            steps = [[len(one.answer) for one in answers(count, 2 * seed + k)] for k in (0, 1)]
            ended = sorted(steps[1])[: int(share * count)]
            held = [
                windows.Window(step, uid, 0, 32, 32 + size, np.zeros(32 + size - 1, np.int32))
                for step, sizes in enumerate((steps[0], ended))
                for uid, size in enumerate(sizes)
            ]
            drawn = windows.weights(held, 1, ended, steps[0])
            now = np.array([one.step == 1 for one in held], float)
            size, answer = (
                np.array([getattr(one, name) for one in held], float) for name in ("learned", "answer")
            )  # fmt: skip
            whole = np.array(steps[1], float)
            expected = (whole**2).sum() / whole.sum()  # of the answer that a token is of
            for name, weights in (("this step alone", now), ("with the step before", drawn)):
                tokens = weights * size
                found[name].append(float(tokens @ answer / tokens.sum() / expected))
        rows.append((f"{share:.0%}", *(statistics.mean(each) for each in found.values())))
    table(("sequences that have ended", "this step alone", "with the step before"), rows)


class Answers:
    """Policies of checkpoints of a run, and answers of theirs; the last policy's are also held out."""

    def __init__(self, config: Config, run: Path, steps: Sequence[int]):
        tokenizer = datasets.tokenizer(config)
        dataset = datasets.load(config, tokenizer)
        self.model, self.mesh = from_config.model_config(config, tokenizer), meshes.make_mesh(1, 1)
        alone = replace(config.mesh, data=1)
        self.config = replace(config, mesh=alone, train=replace(config.train, rows=4))
        with Store(run, create=False) as store:
            self.last = store.latest()
            recipe = PolicyRecipe.of(self.config, self.model, self.mesh, 1)
            like = {"policy": run_state.abstract(self.last, recipe).policy}
            self.policies: dict[int, Params] = {
                step: store.restore(step, like).items["policy"].params
                for step in (*steps, self.last)
            }
        encoder, self.texts = datasets.Encoder(config, tokenizer), {}
        with tempfile.TemporaryDirectory() as folder:
            for step, params in self.policies.items():
                own = replace(self.config, run=f"{folder}/{step}")
                paths = corpus.answer(
                    own, self.model, self.mesh, params, dataset, tokenizer, lambda: False
                )
                found = [
                    one
                    for path in paths
                    for one in corpus.read(str(path), encoder, self.model.vocab_size)
                ]
                self.texts[step] = corpus.fit(found, packing.row_tokens(config))
        all_of_it = self.texts[self.last]
        self.held_out, self.texts[self.last] = all_of_it[::5], [
            one for i, one in enumerate(all_of_it) if i % 5
        ]  # fmt: skip

    def recipe(self, kind: str = "eagle3", objective: Objective | None = None, **flags) -> Recipe:
        """How a new drafter learns: of this kind, with these changes of its sizes."""
        drafter = eagle.for_policy(self.model, kind, **flags)
        recipe = Recipe.of(self.config, self.model, drafter, self.mesh)
        return replace(recipe, adam=Adam(1e-3, UPDATES), objective=objective or recipe.objective)

    def learned(
        self, recipe: Recipe, sources: Sequence[tuple[list[Example], int, float]]
    ) -> list[float]:
        """Acceptance at depths 1 and 3 on held-out answers, and on their long half; milliseconds of an update.

        A source: texts, the checkpoint whose policy's features are read, how often a token is drawn.
        """
        policy, mesh = self.policies[self.last], self.mesh
        params = eagle.init(recipe.drafter, mesh, jax.random.key(5), recipe.param_dtype)
        state = drafter_recipe.create(params, recipe)
        observe = jax.jit(lambda policy, batch: drafter_update.observe(policy, batch, recipe))
        update, random = drafter_update.program(recipe), np.random.default_rng(0)
        tokens = [weight * sum(len(one.answer) for one in texts) for texts, _, weight in sources]
        packed, spent = [corpus.PackedCorpus(texts, self.config) for texts, _, _ in sources], []
        for step in range(UPDATES):
            source = random.choice(len(sources), p=np.array(tokens) / sum(tokens))
            batch = drafter_batch.make_batch(packed[source].batch(step), mesh)
            batch = jax.block_until_ready(observe(self.policies[sources[source][1]], batch))
            begin = time.perf_counter()
            state, metrics = update(state, policy, batch)
            jax.block_until_ready(metrics["loss"])
            spent.append(time.perf_counter() - begin)

        found = []
        middle = statistics.median(len(one.answer) for one in self.held_out)
        for texts in (self.held_out, [one for one in self.held_out if len(one.answer) > middle]):
            found += self.measured(recipe, state, observe, texts)
        return [*found, 1e3 * statistics.median(spent)]

    def measured(
        self, recipe: Recipe, state: DrafterState, observe: Callable, texts: list[Example]
    ) -> list[float]:
        """Acceptance at depths 1 and 3 on these texts; the loss looks at least so far."""
        objective = replace(recipe.objective, unroll=max(3, recipe.objective.unroll))
        recipe, policy = replace(recipe, objective=objective), self.policies[self.last]
        measure = jax.jit(
            lambda params, batch: drafter_update.loss(params, eagle.shared(policy), batch, recipe)[
                1
            ]
        )
        rows = corpus.PackedCorpus(texts, self.config)
        batches = [rows.batch(step) for step in range(EVALUATIONS)]
        batches = [drafter_batch.make_batch(batch, self.mesh) for batch in batches]
        seen = [measure(state.params, observe(policy, batch)) for batch in batches]
        weights = [float(one["tokens"]) for one in seen]
        return [
            float(np.average([float(one[f"acceptance@{depth}"]) for one in seen], weights=weights))
            for depth in (1, 3)
        ]


COLUMNS = ("acceptance@1", "@3", "on long answers @1", "@3", "update, ms")


def ages(config: Config, run: Path, steps: Sequence[int]) -> None:
    """The table of `ages`."""
    answers = Answers(config, run, steps)
    last, now, recipe = answers.last, answers.texts[answers.last], answers.recipe()
    middle = statistics.median(len(one.answer) for one in now)

    def part(step: int, is_long: bool) -> list[Example]:
        return [one for one in answers.texts[step] if (len(one.answer) > middle) == is_long]

    short, own = (part(last, False), last, 1.0), part(last, True)
    rows = [
        (last, "short answers alone", *answers.learned(recipe, [short])),
        (last, "and its own long ones", *answers.learned(recipe, [short, (own, last, 1.0)])),
    ]
    for step in steps:
        old = part(step, True)[: len(own)]
        for name, source, weight in (
            ("and older long ones, features of then", step, 1.0),
            ("the same, half as often", step, 0.5),
            ("the same, features made again", last, 1.0),
        ):
            found = answers.learned(recipe, [short, (old, source, weight)])
            rows.append((step, name, *found))
    table(("policy after step", "learned from", *COLUMNS), rows)


def kinds(config: Config, run: Path) -> None:
    """The table of `kinds`."""
    answers = Answers(config, run, [])
    source = [(answers.texts[answers.last], answers.last, 1.0)]
    plainer = {"fc_norm": False, "norm_output": False}
    cases = {
        "eagle": answers.recipe("eagle"),
        "eagle, HASS": answers.recipe("eagle", Objective(3, 1.0, top_loss=1.0, detach=True)),
        "eagle3, 3.1": answers.recipe("eagle3"),
        "eagle3, 3.0": answers.recipe("eagle3", **plainer),
        "eagle3, 3.1, unroll 2": answers.recipe("eagle3", Objective(2)),
        "eagle3, 3.1, acceptance loss": answers.recipe("eagle3", Objective(5, loss="acceptance")),
    }
    table(
        ("drafter", *COLUMNS),
        ((name, *answers.learned(recipe, source)) for name, recipe in cases.items()),
    )


def depths(config: Config, directory: str, prompts: int) -> None:
    """The table of `depths`."""
    tokenizer = datasets.tokenizer(config)
    dataset, model = (
        datasets.load(config, tokenizer),
        from_config.model_config(config, tokenizer),
    )
    mesh = meshes.make_mesh(config.mesh.data, config.mesh.model)
    longest = from_config.longest_sequence(config, model)
    drafter, params = hf_drafter.load(
        Path(directory), model, mesh, config.model.param_dtype, longest
    )
    policy = from_config.load_policy(config, model, mesh)
    texts = [prompt.tokens for prompt in dataset.eval_prompts()[:prompts]]
    found: dict[str, Sequence[float]] = {}
    plain: list[list[int]] = []
    for name, strategy in (
        ("plain", "off"), ("n-grams", "ngram:6_1_7"), ("learned, a chain", "learned:6_1_7"),
        ("learned", "learned:6_4_16"), ("both", "merged:6_4_16"),
    ):  # fmt: skip
        knobs = Speculation("adaptive", tuner="fixed", strategies=[strategy])
        engine = Engine(replace(config, speculation=knobs), model, mesh, (), drafter)
        request = engine.request(
            texts, 1, Sampling.of(config.rollout), config.rollout.max_new_tokens, stream=EVAL_STREAM, step=0,
        )  # fmt: skip
        result, _ = engine.run(request, engine.publish(policy, params))
        tokens = [one.tokens.tolist() for one in result.completions]
        plain = plain or tokens
        differ = sum(one != other for one, other in zip(plain, tokens, strict=True))
        drafted = [one for one in result.measurements if one.strategy.path > 1]
        rounds = sum(one.row_rounds for one in drafted)
        if rounds:
            hits = sum(one.hits.sum((1, 2)) for one in drafted) / rounds
            length = sum(one.tokens for one in drafted) / rounds
            found[name] = (strategy, length, *map(float, hits), differ)
        print(
            f"{name}: {sum(map(len, tokens))} tokens, {differ} answers other than plain",
            file=sys.stderr,
        )
    columns = ("drafter", "strategy", "accept length", *(f"depth {d + 1}" for d in range(6)))
    table((*columns, "answers other than plain"), ((name, *row) for name, row in found.items()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument(
        "what", choices=("checkpoints", "packing", "lengths", "ages", "kinds", "depths")
    )
    parser.add_argument("--checkpoints-of", type=Path, help="ages, kinds: the run folder")
    parser.add_argument("--steps", default="", help="ages: earlier checkpoints, as 39,20")
    parser.add_argument("--drafter", default="", help="depths: the drafter's directory")
    parser.add_argument("--prompts", type=int, default=16, help="depths: how many")
    args, overrides = parser.parse_known_args()
    alone: dict[str, Callable[[], None]] = {
        "checkpoints": checkpoints, "packing": packing_gain, "lengths": lengths,
    }  # fmt: skip
    if args.what in alone:
        return alone[args.what]()
    config = configuration.load(overrides, command="benchmarks/drafter.py")
    if args.what == "ages":
        ages(config, args.checkpoints_of, [int(step) for step in args.steps.split(",")])
    elif args.what == "kinds":
        kinds(config, args.checkpoints_of)
    else:
        depths(config, args.drafter, args.prompts)


if __name__ == "__main__":
    main()
