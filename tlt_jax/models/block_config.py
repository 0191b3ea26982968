"""Sizes of a block drafter, and the shape, axes, initializer and layouts of each of its weights.

A block drafter proposes tokens for several positions in one forward pass. Two kinds. "dflash" (DFlash, arXiv 2602.06036)
predicts the token at each masked position. "dspark" (DSpark, arXiv 2607.05147) predicts the token after each position,
the anchor's included, and has two more heads: a Markov head, which adds a bias of low rank by the token before, and a
confidence head. Embedding and LM head are the policy's. Layers are those of Qwen3 whatever the policy is, as in published
drafters: it is the only form that serving engines load.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from tlt_jax.models import architecture
from tlt_jax.models.architecture import (
    JoinedLayer,
    Layer,
    ModelConfig,
    Rope,
    join,
    padded_vocab,
    repeat_kv,
    rollout_kv_heads,
)
from tlt_jax.models.params import Weight

KINDS = ("dflash", "dspark")
NEW_LAYERS, NEW_BLOCK = 2, 8  # of a drafter that is made here
CAPTURES = 5  # most hidden states that a new one reads


@dataclass(frozen=True)
class BlockConfig:
    """Sizes and features of a block drafter: hashable, a static argument of every program.

    It is as wide as the policy, which has `policy_layers`. `captures`: the policy's hidden states that it reads; 0 is the
    embedding. `block_size`: B, the queries of a forward pass: the anchor token, and B - 1 times the token `mask_token_id`.
    `causal`: a position of a block does not see the later ones (JetSpec). `markov_rank` 0: no Markov head. The confidence
    head reads the hidden state, and the Markov embedding if there is one. `draft_vocab_size` equals `vocab_size` when it
    can propose every token. Raises ValueError, naming the values, when fields contradict each other.
    """

    kind: str  # dflash | dspark
    hidden_size: int
    mlp_dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    captures: tuple[int, ...]
    policy_layers: int
    block_size: int
    mask_token_id: int
    max_positions: int
    rope: Rope = Rope()
    rms_eps: float = 1e-6
    causal: bool = False
    markov_rank: int = 0  # dspark only
    confidence: bool = False  # dspark only
    init_std: float = 0.02

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"drafter kind {self.kind!r} is unknown: use {' or '.join(KINDS)}")
        if self.kind == "dflash" and (self.markov_rank or self.confidence):
            raise ValueError(
                f"markov_rank {self.markov_rank}, confidence {self.confidence}: not for a drafter of kind dflash"
            )
        rising = all(a < b for a, b in zip(self.captures, self.captures[1:], strict=False))
        if not (self.captures and rising and self.captures[0] >= 0):
            raise ValueError(
                f"captures {self.captures}: {self.kind} reads hidden states of rising depth, from 0 on"
            )
        if self.depth < 1:
            least = self.block_size + 1 - self.depth
            raise ValueError(
                f"block_size {self.block_size}: a {self.kind} drafter needs at least {least}"
            )
        if not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(
                f"mask_token_id {self.mask_token_id} is not within 0..{self.vocab_size - 1}, the policy's"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is not within 1..{self.vocab_size}, the policy's"
            )
        self.block  # noqa: B018  (ModelConfig refuses impossible heads)

    @property
    def whole(self) -> bool:
        """Whether it can propose every token of the policy."""
        return self.draft_vocab_size == self.vocab_size

    @property
    def feature_width(self) -> int:
        """F, the width of the policy's features."""
        return len(self.captures) * self.hidden_size

    @property
    def skipped(self) -> int:
        """Positions at the front of a block that predict nothing: the anchor of dflash, whose token is known."""
        return int(self.kind == "dflash")

    @property
    def depth(self) -> int:
        """P, the tokens that a forward pass proposes."""
        return self.block_size - self.skipped

    @cached_property
    def block(self) -> ModelConfig:
        """Its layers as a policy, for the code that both networks share."""
        return ModelConfig(
            family="qwen3",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            max_positions=self.max_positions,
            rope=self.rope,
            rms_eps=self.rms_eps,
            qk_norm=True,
            init_std=self.init_std,
        )


def for_policy(policy: ModelConfig, kind: str, **changes: Any) -> BlockConfig:
    """A block drafter for this policy, with layers of its sizes.

    The mask is the last token of the vocabulary. `changes` replace fields of the config.
    """
    spark = kind == "dspark"
    base = BlockConfig(
        kind=kind,
        hidden_size=policy.hidden_size,
        mlp_dim=policy.mlp_dim,
        num_layers=NEW_LAYERS,
        num_heads=policy.num_heads,
        num_kv_heads=policy.num_kv_heads,
        head_dim=policy.head_dim,
        vocab_size=policy.vocab_size,
        draft_vocab_size=policy.vocab_size,
        captures=default_captures(policy.num_layers),
        policy_layers=policy.num_layers,
        block_size=NEW_BLOCK,
        mask_token_id=policy.vocab_size - 1,
        max_positions=policy.max_positions,
        rope=policy.rope,
        rms_eps=policy.rms_eps,
        markov_rank=default_rank(policy.hidden_size) if spark else 0,
        confidence=spark,
        init_std=policy.init_std,
    )
    return replace(base, **changes)


def default_rank(width: int) -> int:
    """The largest power of two up to an eighth of the width, within 16 and 256, the published one for widths of 2560 to 5120.

    A draft reads the Markov head once a level, and the LM head, which has the policy's width, once.
    """
    return min(1 << max(width // 8, 16).bit_length() - 1, 256)


def default_captures(num_layers: int) -> tuple[int, ...]:
    """Up to 5 depths spread evenly from 2 to L - 2, as published (2, 10, 18, 26, 34 of 36); from 1 to L below 7 layers."""
    first, last = (2, num_layers - 2) if num_layers >= 7 else (1, num_layers)
    count = min(CAPTURES, last - first + 1)
    if count == 1:
        return (last,)
    return tuple(first + i * (last - first) // (count - 1) for i in range(count))


@struct.dataclass
class BlockParams:
    """A block drafter, in the "train" layout or the "rollout" layout (KV heads repeated, matrices joined); None: absent.

    Matrices are [out, in]. `context_kv`, in the rollout layout only: the layers' key and value matrices, for one product
    over all layers. `head`, in a rollout's drafter with a draft vocabulary only: the rows of the policy's head at `ids`.
    `markov_in` has a row for every token of the policy, `markov_out` one for each of the U logits. `ids`: the token of each
    logit, ascending; None when they are the policy's, padding included. `ids` are not trained: `params.replace(ids=None)`
    has trainable leaves only.
    """

    fuse: Float[Array, "Z F"]
    context_norm: Float[Array, " Z"]
    layers: Layer | tuple[JoinedLayer, ...]
    final_norm: Float[Array, " Z"]
    markov_in: Float[Array, "V r"] | None
    markov_out: Float[Array, "U r"] | None
    confidence: Float[Array, " C"] | None
    confidence_bias: Float[Array, ""] | None
    context_kv: Float[Array, "L 2 K E Z"] | None
    head: Float[Array, "U Z"] | None
    ids: Int32[Array, " U"] | None


def weights(config: BlockConfig, model_axis: int, layout: str = "train") -> BlockParams:
    """A Weight for every array of BlockParams in this layout, without `head`."""
    Z, rank, rollout = config.hidden_size, config.markov_rank, layout == "rollout"
    policy = architecture.weights(config.block, model_axis, layout)
    padded = padded_vocab(config.block, model_axis)
    U = padded if config.whole else config.draft_vocab_size
    vocab_axis = "vocab" if U % model_axis == 0 else None
    K = rollout_kv_heads(config.block, model_axis)
    norm = Weight((Z,), (None,), "ones")
    markov_in = Weight((padded, rank), ("vocab", "embed"), num_rows=config.vocab_size)
    num_rows = config.vocab_size if config.whole else None
    # Zero, so that a new drafter begins as one without these heads.
    markov_out = Weight((U, rank), (vocab_axis, "embed"), "zeros", num_rows=num_rows)
    context_kv = Weight(
        (config.num_layers, 2, K, config.head_dim, Z), (None, None, "kv_heads", None, "embed")
    )
    return BlockParams(
        fuse=Weight((Z, config.feature_width), (None, "embed")),
        context_norm=norm,
        layers=policy.layers,
        final_norm=norm,
        markov_in=markov_in if rank else None,
        markov_out=markov_out if rank else None,
        confidence=Weight((Z + rank,), (None,), "zeros") if config.confidence else None,
        confidence_bias=Weight((), (), "zeros") if config.confidence else None,
        context_kv=context_kv if rollout else None,
        head=None,
        ids=None if config.whole else Weight((U,), (None,), "ids"),
    )


def head_weight(config: BlockConfig, model_axis: int) -> Weight | None:
    """The Weight of `head`; None without a draft vocabulary."""
    U = config.draft_vocab_size
    axis = "vocab" if U % model_axis == 0 else None
    return None if config.whole else Weight((U, config.hidden_size), (axis, "embed"))


def check_mesh(config: BlockConfig, mesh: Mesh) -> None:
    """Raises ValueError when the drafter does not divide over the mesh."""
    architecture.check_mesh(config.block, mesh)
    if config.markov_rank % mesh.shape["data"]:
        raise ValueError(
            f"mesh.data {mesh.shape['data']} does not divide the drafter's Markov rank {config.markov_rank}"
        )


def to_rollout(params: BlockParams, config: BlockConfig, model_axis: int) -> BlockParams:
    """The same drafter in the "rollout" layout, without `head`."""

    def unstack(index: int) -> Layer:
        layer = jax.tree.map(lambda leaf: leaf[index], params.layers)
        return repeat_kv(layer, config.block, model_axis)

    def heads(matrix: Array) -> Array:
        return matrix.reshape(-1, config.head_dim, matrix.shape[-1])

    layers = [unstack(index) for index in range(config.num_layers)]
    context_kv = jnp.stack([jnp.stack([heads(one.k), heads(one.v)]) for one in layers])
    return params.replace(
        layers=tuple(join(layer, config.block) for layer in layers), context_kv=context_kv
    )
