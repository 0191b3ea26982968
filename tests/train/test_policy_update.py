"""Laws of the policy update: its numbers, their independence of sharding and packing, and its memory."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec
from objectives import algorithm

from tlt_jax.config import Config
from tlt_jax.config.schema import Optim, Train
from tlt_jax.data import packing
from tlt_jax.data.packing import Example, PackedRows
from tlt_jax.data.prompt_format import Prompt
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.models import architecture, targets as scoring, transformer
from tlt_jax.optimizer import Adam
from tlt_jax.rollout.recorder import Completion
from tlt_jax.train import batch as batches, policy_update
from tlt_jax.train.advantages import answer_weights
from tlt_jax.train.policy_update import PolicyState, Recipe

MODEL = architecture.ModelConfig(
    family="qwen2", vocab_size=11, hidden_size=16, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24,
    max_positions=32, qkv_bias=True, tied=True, init_std=0.4,
)  # fmt: skip
ROW = 16
ADAM = Adam(learning_rate=1e-2, total_steps=10, weight_decay=0.1)
LOGPROBS = "old_logprobs", "reference_logprobs", "rollout_logprobs"
PLAIN = algorithm(entropy_coef=0.01)
FULL = algorithm(
    clip_low=0.1,
    clip_high=0.3,
    kl_coef=0.2,
    entropy_coef=0.05,
    importance="token",
    importance_cap=1.5,
)


def recipe_of(objective=PLAIN, data=1, model=1, **changes) -> Recipe:
    fixed = {
        "param_dtype": "float64",
        "compute_dtype": "float64",
        "temperature": 0.7,
        "logits_chunk": 8,
        "attention_block": 8,
    }
    return Recipe(MODEL, make_mesh(data, model), ADAM, objective, **(fixed | changes))


def examples_of(count: int = 18) -> list[Example]:
    random = np.random.default_rng(0)
    return [
        Example(
            uid,
            random.integers(0, 11, random.integers(1, 5)),
            random.integers(0, 11, random.integers(1, 9)),
        )
        for uid in range(count)
    ]


def batch_of(
    recipe: Recipe, rows: int = 4, recorded: bool = True, examples: int = 18
) -> list[PackedRows]:
    """A batch of random examples, their advantages and recorded log-probs."""
    given = examples_of(examples)
    random = np.random.default_rng(1)
    packed = packing.pack(given, ROW, rows, recipe.mesh.shape["data"])
    weights = answer_weights(packed[1].lengths, "sequence_mean", 8)
    advantages = random.normal(size=len(given))
    sampled = [-3 * random.random(len(example.answer)) for example in given]
    return batches.make_batch(packed, recipe, weights, advantages, sampled if recorded else None)


def update(
    recipe: Recipe, state: PolicyState, batch: list[PackedRows], step: int = 0
) -> tuple[PolicyState, dict]:
    return policy_update.update(policy_update.programs(recipe), state, batch, step)


def logprobs_of(
    recipe: Recipe, params: architecture.Params, batch: list[PackedRows]
) -> list[jax.Array]:
    return policy_update.token_logprobs(policy_update.programs(recipe), params, batch)


def params_of(recipe: Recipe, seed: int = 0) -> architecture.Params:
    """Random weights, the same on every mesh; made on the host, without compiling."""
    random = np.random.default_rng(seed)
    target = architecture.abstract(recipe.model, recipe.mesh, "train", recipe.param_dtype)
    drawn = jax.tree.map(
        lambda leaf: (0.4 * random.normal(size=leaf.shape)).astype(leaf.dtype), target
    )
    return jax.device_put(drawn, jax.tree.map(lambda leaf: leaf.sharding, target))


def state_of(recipe: Recipe) -> PolicyState:
    return policy_update.create(params_of(recipe), recipe)


def whole_scores(
    recipe: Recipe, rows: PackedRows, params: architecture.Params
) -> tuple[np.ndarray, np.ndarray]:
    """Log-probs and entropies of one accumulation step, from all its logits at once."""

    def forward(params: architecture.Params) -> jax.Array:
        x, _ = transformer.hidden(
            params, MODEL, rows.tokens, rows.positions, rows.segments, compute_dtype="float64"
        )
        return transformer.logits(params, MODEL, x)[..., : MODEL.vocab_size]

    temperature = recipe.temperature
    return plain_scores(np.asarray(jax.jit(forward)(params)), np.asarray(rows.targets), temperature)


def assert_same(one, other, **tolerance):
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        if tolerance:
            np.testing.assert_allclose(a, b, **tolerance)
        else:
            np.testing.assert_array_equal(a, b)


# Log-probs and entropy


def plain_scores(
    logits: np.ndarray, targets: np.ndarray, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    scaled = logits / temperature
    logp = scaled - np.log(np.exp(scaled).sum(axis=-1, keepdims=True))
    return np.take_along_axis(logp, targets[..., None], axis=-1)[..., 0], -(
        np.exp(logp) * logp
    ).sum(axis=-1)


@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_scores_are_log_softmax_and_entropy_of_the_scaled_logits(temperature, x64):
    random = np.random.default_rng(0)
    logits, targets = 3 * random.normal(size=(2, 5, 7)), random.integers(0, 7, (2, 5))
    padded = np.concatenate([logits, np.full((2, 5, 3), np.finfo(np.float64).min)], axis=-1)
    found = scoring.score(jnp.asarray(padded), jnp.asarray(targets), temperature, True)
    assert_same(found, plain_scores(logits, targets, temperature or 1.0), rtol=1e-12)
    for learns in (True, False):

        def total(logits, learns=learns):
            return scoring.score(logits, jnp.asarray(targets), temperature, learns)[1].sum()

        gradient = jax.grad(total)(jnp.asarray(padded))
        assert jnp.isfinite(gradient).all() and bool(gradient.any()) == learns


@pytest.mark.parametrize("changes", [{}, {"loss": "gspo", "importance": "sequence"}])
def test_update_never_holds_the_logits_of_all_tokens(changes):
    model, objective = replace(MODEL, vocab_size=32768), replace(FULL, **changes)
    recipe = Recipe(model, make_mesh(2, 1), ADAM, objective, logits_chunk=64, attention_block=64)
    rows = batches.abstract_rows(recipe.mesh, rows=4, row_tokens=2048, given=LOGPROBS)
    programs, state = policy_update.programs(recipe), policy_update.abstract_state(recipe)
    sums = policy_update.abstract_sums(recipe, rows)
    memory = programs.accumulate.lower(sums, state.params, rows).compile().memory_analysis()
    all_logits = 2 * 2048 * 32768 * 4  # rows of one device x tokens x vocabulary x bytes
    assert memory.temp_size_in_bytes < all_logits / 4
    assert memory.alias_size_in_bytes > 0.99 * size(sums) / 2  # on one of two devices, donated
    memory = programs.apply.lower(state, sums, state.step).compile().memory_analysis()
    assert memory.alias_size_in_bytes > 0.99 * size(state) / 2


def size(tree) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# Sharding, accumulation, packing


def test_sharded_updates_are_the_unsharded_one_and_compile_once(x64):
    results = []
    for shape in ((1, 1), (4, 2)):
        recipe = recipe_of(PLAIN, *shape)
        state = state_of(recipe)
        placed = jax.tree.map(lambda leaf: leaf.sharding, state)
        for examples in (3, 18):
            batch = batch_of(recipe, examples=examples)
            assert len(batch) == (1 if examples == 3 else 3)
            state, metrics = update(recipe, state, batch)
        compiled = sum(program._cache_size() for program in policy_update.programs(recipe))
        assert compiled == 3, "empty, accumulate, apply"
        assert jax.tree.map(lambda leaf: leaf.sharding, state) == placed
        results.append((state, metrics))
    assert_same(*results, rtol=1e-9, atol=1e-12)


def test_state_is_the_one_announced_for_checkpoints(x64):
    recipe = recipe_of(PLAIN, 2, 2, param_dtype="bfloat16", compute_dtype="bfloat16")
    state, expected = state_of(recipe), policy_update.abstract_state(recipe)
    assert jax.tree.structure(state) == jax.tree.structure(expected)
    for leaf, announced in zip(jax.tree.leaves(state), jax.tree.leaves(expected), strict=True):
        assert (leaf.shape, leaf.dtype, leaf.sharding) == (
            announced.shape,
            announced.dtype,
            announced.sharding,
        )
    moments = {leaf.dtype for leaf in jax.tree.leaves(state.opt_state) if leaf.ndim}
    assert moments == {jnp.dtype("float32")}  # at least float32, whatever the dtype of the weights


def test_accumulated_gradients_are_those_of_one_big_batch_whatever_the_packing(x64):
    recipe = recipe_of(PLAIN)
    batches = [batch_of(recipe, rows=rows) for rows in (16, 4, 1)]
    assert [len(batch) for batch in batches] == [1, 3, 10]
    big, *small = [update(recipe, state_of(recipe), batch) for batch in batches]
    for one in small:
        assert_same(big, one, rtol=1e-9, atol=1e-12)


def test_logprobs_of_a_packed_example_are_those_of_the_example_alone(x64):
    recipe, examples = recipe_of(PLAIN), examples_of()
    params = params_of(recipe)
    together = logprobs_of(recipe, params, batch_of(recipe))
    (alone,) = logprobs_of(recipe, params, batch_of(recipe, rows=1, examples=1))
    step, row, first = packing.pack(examples, ROW, 4)[1].places[0]
    found = together[step][row, first : first + len(examples[0].answer)]
    np.testing.assert_allclose(
        found, alone[0, len(examples[0].prompt) - 1 :][: len(found)], rtol=1e-12
    )
    whole = whole_scores(recipe, batch_of(recipe, rows=1, examples=1)[0], params)[0]
    np.testing.assert_allclose(alone[alone != 0], whole[np.asarray(alone) != 0], rtol=1e-12)


def test_examples_that_are_longer_than_the_recipe_knows_are_refused(x64):
    longest = max(example.length for example in examples_of())
    known, unknown = recipe_of(longest=longest), recipe_of()
    results = [update(recipe, state_of(recipe), batch_of(recipe)) for recipe in (known, unknown)]
    assert_same(*results, rtol=1e-9, atol=1e-12)
    with pytest.raises(ValueError, match=f"{longest} tokens, the recipe's longest {longest - 1}"):
        batch_of(recipe_of(longest=longest - 1))
    rows, spans = packing.pack(examples_of(), ROW, 4)
    more = rows._replace(segments=rows.segments + 32 * (rows.segments > 0)), spans
    with pytest.raises(ValueError, match="examples, attention takes 32: pack them by packing.pack"):
        batches.make_batch(more, recipe_of(), np.ones(18), np.ones(18))


# Inputs of the update


def test_recorded_logprobs_change_no_bit_of_the_policy_without_importance_weights(shallow, x64):
    """With them the loss is that of the plain loop above."""
    recipe = recipe_of(PLAIN)
    batch = batch_of(recipe)
    one, first = update(recipe, state_of(recipe), batch)
    moved = [rows._replace(rollout_logprobs=rows.rollout_logprobs - 0.5) for rows in batch]
    two, second = update(recipe, state_of(recipe), moved)
    assert float(first["rollout_logprob_diff_mean"]) != float(second["rollout_logprob_diff_mean"])
    assert_same(one, two)


def test_the_first_of_several_minibatches_learns_as_a_single_one_does(shallow, x64):
    recipe = recipe_of(PLAIN)
    batch = batch_of(recipe)
    single, _ = update(recipe, state_of(recipe), batch)
    state = state_of(recipe)
    old = logprobs_of(recipe, state.params, batch)
    several = [rows._replace(old_logprobs=part) for rows, part in zip(batch, old, strict=True)]
    state, metrics = update(recipe, state, several)
    assert_same(single, state, rtol=1e-9, atol=1e-12)
    assert float(metrics["ratio_max"]) == pytest.approx(1.0, rel=1e-12)
    _, later = update(recipe, state, several)
    assert float(later["ratio_max"]) > 1.01
    for name in ("rollout_logprob_diff_mean", "rollout_logprob_diff_max"):
        assert float(later[name]) == float(metrics[name]) > 0, "the step's own drift is none of it"


def test_objectives_without_what_they_read_are_refused(x64):
    for objective, message in (
        (algorithm(kl_coef=0.1), "reference_logprobs"),
        (algorithm(importance="token"), "rollout_logprobs"),
    ):
        recipe = recipe_of(objective)
        with pytest.raises(ValueError, match=message):
            update(recipe, state_of(recipe), batch_of(recipe, recorded=False))


# The step


def test_update_that_is_not_finite_changes_nothing_and_is_counted(shallow, x64):
    recipe = recipe_of(PLAIN)
    batch, before = batch_of(recipe), state_of(recipe)
    broken = [*batch[:-1], batch[-1]._replace(advantages=batch[-1].advantages.at[0].set(jnp.nan))]
    state = state_of(recipe)
    for skips in (1, 2):
        state, metrics = update(recipe, state, broken)
        assert (int(state.step), int(state.skips), int(metrics["nonfinite"])) == (
            skips,
            skips,
            skips,
        )
        assert_same((state.params, state.opt_state), (before.params, before.opt_state))
    state, metrics = update(recipe, state, batch)
    expected, _ = update(recipe, state_of(recipe), batch)
    assert_same((state.params, state.opt_state), (expected.params, expected.opt_state))
    assert (int(state.step), int(state.skips), int(state.skipped)) == (3, 0, 2)


def test_update_without_targets_changes_nothing_and_is_counted_apart(shallow, x64):
    recipe = recipe_of(PLAIN)
    batch = batch_of(recipe)
    without = [rows._replace(weights=jnp.zeros_like(rows.weights)) for rows in batch]
    state, _ = update(recipe, state_of(recipe), batch)  # moments and decay would move the weights
    before = jax.device_get(state)
    state, metrics = update(recipe, state, without)
    assert_same(state, before)
    expected = dict.fromkeys(metrics, 0.0) | {"lr": 1e-2, "empty_updates": 1}
    assert {name: float(value) for name, value in metrics.items()} == expected
    none = [rows._replace(is_answer=jnp.zeros_like(rows.is_answer)) for rows in without]
    assert not any(part.any() for part in logprobs_of(recipe, state.params, none))


def test_all_optimizer_steps_of_an_rl_step_have_its_learning_rate(shallow, x64):
    adam = Adam(1e-2, 6, "linear", warmup_steps=2)
    recipe = replace(recipe_of(PLAIN), adam=adam)
    batch, rates = batch_of(recipe), [0.005, 0.01, 0.01, 0.0075]  # RL steps 0 to 3, by hand
    broken = [rows._replace(advantages=rows.advantages * jnp.nan) for rows in batch]
    empty = [rows._replace(weights=jnp.zeros_like(rows.weights)) for rows in batch]
    state = state_of(recipe)
    for step, parts in enumerate(([batch] * 3, [broken, empty], [broken, batch], [batch])):
        for given in parts:
            before, still = jax.device_get(state), replace(recipe, adam=Adam(rates[step], 6))
            state, metrics = update(recipe, state, given, step)
            assert float(metrics["lr"]) == pytest.approx(rates[step])
            expected, _ = update(
                still, jax.device_put(before, policy_update.state_shardings(still)), given
            )
            for ours, theirs in zip(*map(jax.tree.leaves, (state, expected)), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=3e-9)  # the rate is float32


@pytest.mark.parametrize("what", ["equal rewards", "all masked", "a KL of 0"])
def test_update_without_a_gradient_changes_nothing_as_one_without_targets(what, shallow, x64):
    """Momentum and decay would move the weights. Its metrics are those of its tokens."""
    objective = {
        "equal rewards": algorithm(),
        "all masked": algorithm(importance="sequence", importance_mask=1.1),
        "a KL of 0": algorithm(kl_coef=0.1),
    }[what]
    recipe = recipe_of(objective)
    batch = batch_of(recipe)
    state, _ = update(recipe_of(algorithm()), state_of(recipe), batch)
    assert (int(state.step), int(state.skipped)) == (1, 0)
    scores = logprobs_of(recipe, state.params, batch)
    still = [
        rows._replace(reference_logprobs=logp) for rows, logp in zip(batch, scores, strict=True)
    ]
    if what == "all masked":
        still = [rows._replace(rollout_logprobs=rows.rollout_logprobs + 3.0) for rows in still]
    else:
        still = [rows._replace(advantages=0 * rows.advantages) for rows in still]
    before = jax.device_get(state)
    state, metrics = update(recipe, state, still)
    assert_same(state, before)
    assert (float(metrics["grad_norm"]), float(metrics["empty_updates"])) == (0, 1)
    assert float(metrics["ratio_mean"]) == pytest.approx(1)
    assert float(metrics["tokens"]) == sum(int(rows.is_answer.sum()) for rows in batch)
    if what != "a KL of 0":  # an entropy term has a gradient
        recipe = recipe_of(replace(objective, entropy_coef=0.01))
        state, metrics = update(recipe, state, still)
        assert (int(state.step), float(metrics["empty_updates"])) == (2, 0)


def test_an_answer_whose_logits_were_not_finite_reaches_neither_the_policy_nor_the_drafter(x64):
    """A token has a NaN embedding: the answers in which it ended are left out, and others in their row learn as ever."""
    model, poison = replace(MODEL, tied=False), 7
    recipe = replace(recipe_of(), model=model)
    config = Config(train=Train(row_tokens=32, rows=1))
    random, broken = np.random.default_rng(0), (1, 4)
    prompts = [Prompt(np.array([1, 2]), {})]
    answers = [
        Completion(uid, 0, uid, random.integers(0, 7, 3 + uid), np.full(3 + uid, -1.0), "stop")
        for uid in range(6)
    ]
    for uid in broken:
        answers[uid].tokens[1:] = poison
        answers[uid] = replace(answers[uid], finish="nonfinite", logprobs=np.full(3 + uid, np.nan))
    advantages = random.normal(size=6)

    def packed(uids: list[int]) -> list[PackedRows]:
        chosen = [answers[uid] for uid in uids]
        rows = batches.pack_rows(config, [batches.example(prompts, one) for one in chosen])
        kept, logprobs = batches.is_kept(config, chosen), [one.logprobs for one in chosen]
        weights = answer_weights(rows[1].lengths, "sequence_mean", 8, kept)
        return batches.make_batch(
            rows, recipe, weights, advantages[uids], logprobs, batches.is_finite(chosen)
        )

    batch = packed([*range(6)])
    sound = [uid for uid in range(6) if uid not in broken]
    assert sum(int(rows.is_answer.sum()) for rows in batch) == sum(3 + uid for uid in sound)

    def learned(batch: list[PackedRows], value: float) -> architecture.Params:
        """The weights after an update with the embedding `value`, without it."""
        params = params_of(recipe)
        params = params.replace(embed=params.embed.at[poison].set(value))
        state, _ = update(recipe, policy_update.create(params, recipe), batch)
        assert int(state.skipped) == 0
        return state.params.replace(embed=state.params.embed.at[poison].set(0))

    alone = packed(sound)
    assert_same(learned(batch, np.nan), learned(batch, 0.0))
    assert_same(learned(batch, np.nan), learned(alone, 0.0), rtol=1e-9, atol=1e-12)


def test_what_others_wrote_in_an_answer_has_no_loss_but_is_context(x64):
    """As an update of an answer in which these tokens are part of the prompt, for each turn of the policy in it."""
    recipe, config = recipe_of(), Config(train=Train(row_tokens=32, rows=1))
    prompt, turns, reply = [1, 2, 3], ([4, 5], [6, 7, 8]), [9, 10]
    tokens = np.array([*turns[0], *reply, *turns[1]])
    replied = Completion(
        0, 0, 0, tokens, np.where(np.isin(tokens, reply), 0.0, -1.0), "stop", replies=((2, 4),)
    )
    np.testing.assert_array_equal(replied.own, [1, 1, 0, 0, 1, 1, 1])

    def batch_of(examples, logprobs):
        rows = batches.pack_rows(config, examples)
        weights = np.full(len(examples), 0.2)
        return batches.make_batch(rows, recipe, weights, np.ones(len(examples)), logprobs)

    whole = batches.example([Prompt(np.array(prompt), {})], replied)
    found = batch_of([whole], [replied.logprobs])
    rows = batches.pack_rows(config, [whole])[1]
    assert (rows.lengths.tolist(), rows.counts.tolist()) == ([7], [5])
    apart = [
        Example(0, np.array(prompt), np.array(turns[0])),
        Example(1, np.array([*prompt, *turns[0], *reply]), np.array(turns[1])),
    ]
    expected = batch_of(apart, [np.full(2, -1.0), np.full(3, -1.0)])
    assert sum(int(one.is_answer.sum()) for one in found) == 5
    ones, others = (update(recipe, state_of(recipe), one) for one in (found, expected))
    assert_same(ones[0].params, others[0].params, rtol=1e-9, atol=1e-12)
    assert float(ones[1]["loss"]) == pytest.approx(float(others[1]["loss"]), rel=1e-12)


def test_supervised_update_minimizes_the_negative_log_likelihood_of_the_answers(shallow, x64):
    recipe = recipe_of(algorithm(), is_supervised=True)
    state, batch = state_of(recipe), batch_of(recipe)
    logprobs = logprobs_of(recipe_of(PLAIN), state.params, batch)
    expected = -sum(
        float(jnp.sum(rows.weights * part)) for rows, part in zip(batch, logprobs, strict=True)
    )
    losses = []
    for _ in range(5):
        state, metrics = update(recipe, state, batch)
        losses.append(float(metrics["loss"]))
    assert losses[0] == pytest.approx(expected, rel=1e-10)
    assert losses == sorted(losses, reverse=True)
    assert set(metrics) == {"loss", "grad_norm", "lr", "nonfinite"}


def test_decay_pulls_matrices_only(x64):
    params = params_of(recipe_of())
    transformation = Adam(learning_rate=0.1, total_steps=4, weight_decay=0.5).transformation()
    still = jax.tree.map(np.zeros_like, params)
    changes, _ = jax.jit(transformation.update)(still, transformation.init(params), params)
    named = jax.tree_util.tree_leaves_with_path((params, changes))
    for (path, weight), (_, change) in zip(
        named[: len(named) // 2], named[len(named) // 2 :], strict=True
    ):
        is_matrix = not any(word in jax.tree_util.keystr(path) for word in ("norm", "bias"))
        np.testing.assert_allclose(change, -0.1 * 0.5 * is_matrix * weight, rtol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "floor", "rates"),
    [
        ("constant", 0.0, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", 0.0, [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]),
        ("cosine", 0.2, [0.5, 1.0, 1.0, 0.8828427, 0.6, 0.3171573]),
    ],
)
def test_learning_rates_are_those_worked_by_hand(schedule, floor, rates):
    rate = Adam(1.0, 6, schedule, warmup_steps=2, floor=floor).rate()
    np.testing.assert_allclose([float(rate(step)) for step in range(6)], rates, rtol=1e-6)


def test_recipe_holds_the_numbers_of_the_configuration():
    optim = Optim(2e-4, schedule="cosine", warmup_steps=3, weight_decay=0.2, beta2=0.9)
    recipe = Recipe.of(Config(optim=optim), MODEL, make_mesh(1, 1), total_steps=7)
    assert recipe.adam == Adam(2e-4, 7, "cosine", 3, 0.0, 0.9, 0.9, 0.2, 1.0)
    assert recipe.algorithm == algorithm() and recipe.temperature == 1.0


def test_on_a_cpu_every_program_of_an_update_is_awaited_before_the_next(monkeypatch):
    """Dozens of programs in flight over several fake devices deadlock: they occupy all threads."""
    mesh, happened = make_mesh(2, 1), []
    place = NamedSharding(mesh, PartitionSpec())

    def program(name, *, several=True):
        def call(*_):
            happened.append(name)
            one = jax.device_put(jnp.zeros(()), place)
            return (one, one) if several else one

        return call

    stubs = policy_update.UpdatePrograms(
        program("empty"), program("accumulate"), program("apply"), program("score", several=False)
    )
    monkeypatch.setattr(jax, "block_until_ready", lambda _: happened.append("awaited"))
    policy_update.update(stubs, SimpleNamespace(params=None, step=jnp.zeros(())), [None] * 3, 0)
    policy_update.token_logprobs(stubs, None, [None] * 2)
    names = ["empty", *["accumulate"] * 3, "apply", *["score"] * 2]
    assert happened == [one for name in names for one in (name, "awaited")]
