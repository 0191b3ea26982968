"""A target without a network whose logits depend on every earlier token and its position, and drafters that guess it."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax import mesh as meshes
from tlt_jax.spec_decode import noise
from tlt_jax.spec_decode.chunk import Rules, Weights
from tlt_jax.spec_decode.dealing import Dealer, LocalBoard
from tlt_jax.spec_decode.programs import Registry
from tlt_jax.spec_decode.records import Group, Job
from tlt_jax.spec_decode.rollout import RolloutResult, bucketed, rollout
from tlt_jax.spec_decode.tree import NO_DRAFTER, PLAIN, Drafter, DraftTree, Strategy, Target

DECAY = 0.7
TAIL = 4


@struct.dataclass
class TokenCache:
    """The committed tokens themselves."""

    tokens: jax.Array


def table(vocab: int, seed: int = 0, scale: float = 2.0, dtype=np.float64) -> np.ndarray:
    """[V, V]: what each earlier token adds to the logits, before it decays with distance."""
    return (scale * np.random.default_rng(seed).normal(size=(vocab, vocab))).astype(dtype)


def table_logits(weights: np.ndarray, prefix: list[int]) -> np.ndarray:
    """Logits of the token after a prefix."""
    ages = np.arange(len(prefix))[::-1]
    return (DECAY**ages) @ weights[np.asarray(prefix)]


def table_target(group: Mesh, vocab: int, dtype=jnp.float64) -> Target:
    """The table as a Target on one data group."""

    def forward(params, tokens, positions, ancestors, cache, lengths):
        slots = jnp.arange(cache.tokens.shape[1])
        ages = positions[:, :, None] - slots
        old = jnp.where(slots < lengths[:, None, None], jnp.power(DECAY, ages.astype(params.dtype)), 0)
        ages = positions[:, :, None] - positions[:, None, :]
        new = jnp.where(ancestors, jnp.power(DECAY, ages.astype(params.dtype)), 0)
        logits = jnp.einsum("bns,bsv->bnv", old, params[cache.tokens]) + jnp.einsum("bnm,bmv->bnv", new, params[tokens])
        return logits, jnp.zeros((*tokens.shape, 0), params.dtype), tokens

    def keep(cache, scratch, path, lengths):
        rows = jnp.arange(path.shape[0])[:, None]
        slots = lengths[:, None] + jnp.arange(path.shape[1])
        return TokenCache(cache.tokens.at[rows, slots].set(jnp.take_along_axis(scratch, path, axis=1)))

    def insert(cache, prefilled, source):
        width = prefilled.shape[1]
        new = jnp.where((source >= 0)[:, None], prefilled[jnp.maximum(source, 0)], cache.tokens[:, :width])
        return TokenCache(cache.tokens.at[:, :width].set(new))

    def resize(cache, rows, slots):
        taken = cache.tokens[jnp.maximum(rows, 0)][:, : slots + TAIL]
        return TokenCache(jnp.pad(taken, ((0, 0), (0, slots + TAIL - taken.shape[1]))))

    whole = NamedSharding(group, PartitionSpec())
    return Target(
        forward=forward,
        keep=keep,
        prefill=lambda params, tokens, lengths: tokens,
        insert=insert,
        resize=resize,
        empty=lambda batch, slots: TokenCache(jax.ShapeDtypeStruct((batch, slots + TAIL), jnp.int32, sharding=whole)),
        params=jax.ShapeDtypeStruct((vocab, vocab), dtype, sharding=whole),
    )


TREE = Strategy(depth=2, topk=2, nodes=5)


def tree_drafter(guess) -> Drafter:
    """A drafter of TREE's shape: two children of the root, two of the first child; guess(tokens, lengths, keys) -> ids."""

    def draft(params, state, roots, lengths, keys, strategy):
        if strategy == PLAIN:
            return NO_DRAFTER.draft(params, state, roots, lengths, keys, strategy)
        children = guess(roots, lengths, keys)
        grandchildren = guess(children[:, 0], lengths + 1, keys)
        tokens = jnp.concatenate([roots[:, None], children, grandchildren], axis=1).astype(jnp.int32)
        parents = jnp.broadcast_to(jnp.array([0, 0, 0, 1, 1], jnp.int32), tokens.shape)
        depths = jnp.broadcast_to(jnp.array([0, 1, 1, 2, 2], jnp.int32), tokens.shape)
        return DraftTree(tokens, parents, depths)

    return Drafter(draft, NO_DRAFTER.extend)


def good_drafter(weights: np.ndarray) -> Drafter:
    """Guesses from the newest token alone, and looks at the noise."""

    def guess(tokens, lengths, keys):
        scores = (
            jnp.asarray(weights)[tokens]
            + noise.gumbel(keys, lengths[:, None] + 1, weights.shape[1], weights.dtype)[:, 0]
        )
        return jax.lax.top_k(scores, 2)[1]

    return tree_drafter(guess)


def bad_drafter(vocab: int) -> Drafter:
    """Guesses what has nothing to do with the target."""
    return tree_drafter(lambda tokens, lengths, keys: jnp.stack([lengths % vocab, (lengths + 1) % vocab], axis=1))


def registry(groups: int, vocab: int, drafter: Drafter = NO_DRAFTER) -> Registry:
    """Executables of the table target on this many data groups of one device."""
    mesh = meshes.make_mesh(groups, 1)
    parts = [meshes.data_group(mesh, index) for index in range(groups)]
    return Registry([table_target(part, vocab) for part in parts], parts, drafter, lambda compiled: None)


def play(
    programs: Registry, weights: np.ndarray, prompts: list[list[int]], samples: int, rules: Rules, *, max_new_tokens=24,
    capacity=8, batches=(8,), slots=(64,), rounds=4, in_flight=2, strategy=PLAIN, decide=None, seed=0,
) -> RolloutResult:  # fmt: skip
    """A rollout of the table target."""
    count = len(programs.targets)
    tokens = tuple(np.asarray(prompt, np.int32) for prompt in prompts)
    keys = noise.sequence_keys(seed, 0, 0, np.arange(len(prompts) * samples))
    job = Job(tokens, samples, (max_new_tokens,) * len(tokens), keys, rules, rounds, in_flight, capacity, TREE.path)
    dealer = Dealer(LocalBoard(), "test", len(prompts), samples)
    placed = [jax.device_put(weights, NamedSharding(part, PartitionSpec())) for part in programs.meshes]
    decide = decide or bucketed(batches, slots, strategy)
    groups = [Group(i, programs, Weights(placed[i], ()), job, dealer, decide) for i in range(count)]
    return rollout(groups)
