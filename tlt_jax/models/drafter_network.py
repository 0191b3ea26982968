"""The networks of learned drafters as one: configurations, weights and layouts of every kind.

What a kind computes is in eagle.py and block_drafter.py.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int32

from tlt_jax.models import block_config, eagle_config, params as trees
from tlt_jax.models.architecture import ModelConfig, Params, check_policy, head
from tlt_jax.models.block_config import BlockConfig, BlockParams
from tlt_jax.models.eagle_config import EagleConfig, EagleParams

DrafterConfig = EagleConfig | BlockConfig
DrafterParams = EagleParams | BlockParams

MODULES = {EagleConfig: eagle_config, BlockConfig: block_config}


@struct.dataclass
class Shared:
    """The policy's embedding and LM head, which a drafter uses without a copy."""

    embed: Float[Array, "V D"]
    head: Float[Array, "V D"]


def shared(params: Params) -> Shared:
    """The part of a drafter that is the policy's, from Params of either layout."""
    return Shared(embed=params.embed, head=head(params))


def for_policy(policy: ModelConfig, kind: str, **changes: Any) -> DrafterConfig:
    """A new drafter of this kind for this policy. `changes` replace fields of the config."""
    module = block_config if kind in block_config.KINDS else eagle_config
    config = module.for_policy(policy, kind, **changes)
    check_policy(config, policy)
    return config


def depth(config: DrafterConfig | None) -> int | None:
    """Most levels that one round can draft; None: any number, or no drafter."""
    return config.depth if isinstance(config, BlockConfig) else None


def block_pass(config: DrafterConfig | None) -> tuple[int, int] | None:
    """Layers and positions of the one pass of a draft; None: a pass for each level, or no drafter."""
    return (config.num_layers, config.block_size) if isinstance(config, BlockConfig) else None


def weights(config: DrafterConfig, model_axis: int, layout: str = "train") -> DrafterParams:
    """A Weight for every array of the drafter's parameters in this layout."""
    return MODULES[type(config)].weights(config, model_axis, layout)


def vocab_axis(config: DrafterConfig, mesh: Mesh) -> str | None:
    """The logical axis of the draft vocabulary; None when it does not divide over the mesh."""
    divides = config.whole or config.draft_vocab_size % mesh.shape["model"] == 0
    return "vocab" if divides else None


def placed(config: DrafterConfig, mesh: Mesh, layout: str) -> DrafterParams:
    """`weights` for this mesh. Raises ValueError when the drafter does not divide over it."""
    MODULES[type(config)].check_mesh(config, mesh)
    return weights(config, mesh.shape["model"], layout)


def shardings(config: DrafterConfig, mesh: Mesh, layout: str) -> DrafterParams:
    """The NamedSharding of every array of the drafter's parameters. Raises ValueError as `placed` does."""
    return trees.shardings(placed(config, mesh, layout), mesh, layout)


def abstract(config: DrafterConfig, mesh: Mesh, layout: str, dtype: DTypeLike) -> DrafterParams:
    """Shape, dtype and sharding of every array of the drafter's parameters. Raises ValueError as `placed` does."""
    return trees.abstract(placed(config, mesh, layout), mesh, layout, dtype)


def init(
    config: DrafterConfig,
    mesh: Mesh,
    key: jax.Array,
    dtype: DTypeLike,
    ids: ArrayLike | None = None,
) -> DrafterParams:
    """New random parameters in the "train" layout, the same on every mesh.

    `ids`: the draft vocabulary; None: the whole one.
    """
    ids = check_ids(config, ids)
    return trees.init(placed(config, mesh, "train"), mesh, key, dtype, config.init_std, ids)


def to_rollout(
    params: DrafterParams, config: DrafterConfig, mesh: Mesh, dtype: DTypeLike
) -> DrafterParams:
    """The same drafter in the "rollout" layout and this dtype; traced inside one jit over the whole mesh."""
    rollout = MODULES[type(config)].to_rollout(params, config, mesh.shape["model"])
    return jax.lax.with_sharding_constraint(
        cast(rollout, dtype), shardings(config, mesh, "rollout")
    )


def cast(params: DrafterParams, dtype: DTypeLike) -> DrafterParams:
    """The same drafter in this dtype; ids keep theirs."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params.replace(ids=None)).replace(
        ids=params.ids
    )


def copies_head(config: DrafterConfig) -> bool:
    """Whether the rollout keeps the rows of the policy's head that the drafter proposes."""
    return isinstance(config, BlockConfig) and not config.whole


def reads_policy_head(config: DrafterConfig) -> bool:
    """Whether each level multiplies by the policy's LM head, or by a copy of its rows, instead of a head of the drafter."""
    return isinstance(config, BlockConfig) or config.kind == "eagle"


def abstract_bound(config: DrafterConfig, group: Mesh, dtype: DTypeLike) -> DrafterParams:
    """Shape, dtype and sharding of every array of the result of `bind`."""
    params = abstract(config, group, "rollout", dtype)
    if not copies_head(config):
        return params
    weight = block_config.head_weight(config, group.shape["model"])
    return params.replace(head=trees.abstract(weight, group, "rollout", dtype))


def bind(
    params: DrafterParams, config: DrafterConfig, target: Params, group: Mesh
) -> DrafterParams:
    """The drafter of a data group, in the "rollout" layout, as its programs read it next to this policy."""
    if not copies_head(config):
        return params
    weight = block_config.head_weight(config, group.shape["model"])
    sharding = trees.shardings(weight, group, "rollout")
    rows = rows_at(head(target), params.ids, sharding)
    return params.replace(head=rows)


@partial(jax.jit, static_argnames="sharding")
def rows_at(matrix: Array, ids: Array, sharding: jax.NamedSharding) -> Array:
    """The rows of the matrix at these ids."""
    return jax.lax.with_sharding_constraint(matrix[ids], sharding)


def frequent_ids(
    texts: Iterable[np.ndarray], size: int, vocab_size: int
) -> Int32[np.ndarray, " U"]:
    """The `size` most frequent token ids of the texts int32[n] (of equals the lower), ascending: a draft vocabulary."""
    counts = np.zeros(vocab_size, np.int64)
    for text in texts:
        counts += np.bincount(text, minlength=vocab_size)
    return np.sort(np.argsort(-counts, kind="stable")[:size]).astype(np.int32)


def check_ids(config: DrafterConfig, ids: ArrayLike | None) -> Int32[np.ndarray, " U"] | None:
    """The token ids of the draft vocabulary; None when that is the whole one.

    Raises ValueError unless they are ascending tokens of the policy, `draft_vocab_size` of them.
    """
    if config.whole:
        if ids is not None:
            raise ValueError("a drafter that proposes every token takes no draft vocabulary")
        return None

    found = np.asarray([] if ids is None else ids)
    if found.shape != (config.draft_vocab_size,):
        raise ValueError(
            f"the draft vocabulary has {found.size} tokens, draft_vocab_size says {config.draft_vocab_size}"
        )
    if found[0] < 0 or found[-1] >= config.vocab_size or (np.diff(found) <= 0).any():
        raise ValueError(
            f"the draft vocabulary's ids do not ascend within 0..{config.vocab_size - 1}"
        )
    return found.astype(np.int32)
