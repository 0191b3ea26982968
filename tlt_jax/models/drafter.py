"""Learned drafters of every kind: their sizes, and the shape, axes, initializer and layouts of each of their weights.

"eagle"   EAGLE-1 and -2 (arXiv 2401.15077): reads the policy's last hidden state, and uses the policy's LM head.
"eagle3"  EAGLE-3 (arXiv 2503.01840): reads hidden states of several depths, and has an LM head, which may cover a part of
          the vocabulary; `fc_norm` and `norm_output` are the changes of EAGLE-3.1 (arXiv 2605.09992),
          `norm_before_residual` is that of the speculators library.
"dflash"  DFlash (arXiv 2602.06036): predicts the tokens at all masked positions of a block in one forward pass.
"dflash2" DFlash 2 (inco.ai/blog/dflash2, August 2026): DFlash with a convolution along the block before and after every
          sublayer, and a path selector: the most likely tokens of a position are ordered anew, each by the token before it.
"dspark"  DSpark (arXiv 2607.05147): predicts the token after each position of a block, the anchor's included, and has two
          more heads: a Markov head, which adds a bias of low rank by the token before, and a confidence head.

The first two run once for each level of a draft (eagle.py); the others, block drafters, once for all (block_drafter.py).
Embeddings are the policy's. Layers of block drafters are those of Qwen3 whatever the policy is, as in published ones: serving
engines load no other form.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, fields, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Int32

from tlt_jax.distributed.mesh import is_cpu
from tlt_jax.kernels.fused import Fused
from tlt_jax.kernels.numerics import contract, masked
from tlt_jax.models import architecture, layers as ops, params as trees
from tlt_jax.models.architecture import (
    NORMED,
    Captures,
    JoinedLayer,
    Layer,
    ModelConfig,
    Params,
    Rope,
    head,
    join,
    layer_weights,
    padded_vocab,
    repeat_kv,
    rollout_kv_heads,
)
from tlt_jax.models.params import Tiles, Weight
from tlt_jax.shapes import shaped


class Kind(NamedTuple):
    """What all drafters of a kind have in common.

    `fields`: those of DrafterConfig that not every kind has; `new`: the values of a new drafter for a policy. `families`: of
    its layers; a new drafter has the policy's if it is one of them, else the first. `first_capture`: the lowest depth that it
    can read. `skipped`: positions at the front of a block that predict nothing, as the anchor of dflash, whose token is known.
    """

    fields: tuple[str, ...]
    new: Callable[[ModelConfig], dict[str, Any]]
    families: tuple[str, ...]
    first_capture: int
    has_head: bool = False  # of its own; else it is the policy's
    can_reduce: bool = True  # whether it may propose a part of the vocabulary
    is_block: bool = False
    skipped: int = 0


NEW_LAYERS, NEW_BLOCK = 2, 8  # of a block drafter that is made here
CAPTURES = 5  # most hidden states that a new block drafter reads


def level_captures(num_layers: int) -> Captures:
    """EAGLE-3's (2, L // 2, L - 3) where these differ; else the second, a middle and the last layer."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    if num_layers < 4:
        return tuple(range(1, num_layers + 1))
    return 2, (2 + num_layers) // 2, num_layers


def block_captures(num_layers: int) -> Captures:
    """Up to 5 depths spread evenly from 2 to L - 2, as published (2, 10, 18, 26, 34 of 36); from 1 to L below 7 layers."""
    first, last = (2, num_layers - 2) if num_layers >= 7 else (1, num_layers)
    count = min(CAPTURES, last - first + 1)
    if count == 1:
        return (last,)
    return tuple(first + i * (last - first) // (count - 1) for i in range(count))


def default_rank(width: int) -> int:
    """The largest power of two up to an eighth of the width, within 16 and 256, the published one for widths of 2560 to 5120.

    A draft reads the Markov head once a level, and the LM head, which has the policy's width, once.
    """
    return min(1 << max(width // 8, 16).bit_length() - 1, 256)


def new_eagle3(policy: ModelConfig) -> dict[str, Any]:
    """EAGLE-3.1."""
    return {"captures": level_captures(policy.num_layers), "fc_norm": True, "norm_output": True}


def new_block(policy: ModelConfig) -> dict[str, Any]:
    """The mask is the last token of the vocabulary."""
    return {
        "captures": block_captures(policy.num_layers), "block_size": NEW_BLOCK, "mask_token_id": policy.vocab_size - 1
    }  # fmt: skip


def new_dspark(policy: ModelConfig) -> dict[str, Any]:
    return new_block(policy) | {"markov_rank": default_rank(policy.hidden_size), "confidence": True}


def new_dflash2(policy: ModelConfig) -> dict[str, Any]:
    """The published sizes, where they fit the policy."""
    width = policy.hidden_size
    return new_block(policy) | {
        "markov_rank": default_rank(width), "selector_top_k": min(16, policy.vocab_size), "conv_kernel_size": 2,
        "conv_group_size": math.gcd(width, 16),
    }  # fmt: skip


SELECTOR = ("markov_rank", "selector_top_k", "conv_kernel_size", "conv_group_size")
BLOCK, QWEN3 = ("block_size", "mask_token_id", "causal"), ("qwen3",)
KINDS = {
    "eagle": Kind(
        ("fc_bias",),
        lambda policy: {"captures": (NORMED,)},
        ("llama", "qwen2"),
        NORMED,
        can_reduce=False,
    ),
    "eagle3": Kind(
        ("fc_norm", "norm_output", "norm_before_residual"), new_eagle3, ("llama",), 1, has_head=True
    ),
    "dflash": Kind(BLOCK, new_block, QWEN3, 0, is_block=True, skipped=1),
    "dflash2": Kind((*BLOCK, *SELECTOR), new_dflash2, QWEN3, 0, is_block=True, skipped=1),
    "dspark": Kind((*BLOCK, "markov_rank", "confidence"), new_dspark, QWEN3, 0, is_block=True),
}


@dataclass(frozen=True)
class DrafterConfig:
    """Sizes and features of a drafter: hashable, a static argument of every program.

    `layers`: its layers as a policy of their number, as wide as the policy, with the policy's vocabulary. `captures`: the
    policy's hidden states that it reads (0: the embedding), of `policy_layers` layers. `draft_vocab_size`: tokens that it can
    propose, `layers.vocab_size` for all. Other fields are for some kinds only. `block_size`: B, the queries of a forward
    pass: the anchor token, and B - 1 times the token `mask_token_id`. `causal`: a position of a block does not see the later
    ones (JetSpec). `markov_rank` 0: no Markov head. The confidence head reads the hidden state, and the Markov embedding if
    there is one. Of dflash2: the selector, a Markov head whose embedding is gated by the hidden state, orders the
    `selector_top_k` most likely tokens; convolutions have `conv_kernel_size` taps, whose changes by the input are shared by
    `conv_group_size` features. Raises ValueError, naming the values, when fields contradict each other.
    """

    kind: str  # of KINDS
    layers: ModelConfig
    policy_layers: int
    captures: Captures
    draft_vocab_size: int
    fc_bias: bool = False
    fc_norm: bool = False  # a separate norm for each of the hidden states
    norm_output: bool = False  # pass the normed hidden state to the next level
    norm_before_residual: bool = False  # the residual stream begins with the normed input
    block_size: int = 0
    mask_token_id: int = 0
    causal: bool = False
    markov_rank: int = 0
    confidence: bool = False
    selector_top_k: int = 0
    conv_kernel_size: int = 0
    conv_group_size: int = 0

    def __post_init__(self):
        kind, size = kind_of(self.kind), self.layers.vocab_size
        others = {name for other in KINDS.values() for name in other.fields} - {*kind.fields}
        foreign = {name: getattr(self, name) for name in sorted(others) if getattr(self, name)}
        if self.layers.qkv_bias and "qwen2" not in kind.families:
            foreign["qkv_bias"] = True
        named, read = ", ".join(f"{name} {value}" for name, value in foreign.items()), self.captures
        rising = all(a < b for a, b in zip(read, read[1:], strict=False))
        reads_normed, first = kind.first_capture == NORMED, kind.first_capture
        wanted = SELECTOR if "selector_top_k" in kind.fields else ()
        lacking = ", ".join(
            f"{name} {getattr(self, name)}" for name in wanted if getattr(self, name) < 1
        )
        group, width = self.conv_group_size, self.layers.hidden_size
        rules = (
            (foreign, f"{named}: not for a drafter of kind {self.kind}"),
            (reads_normed and read != (NORMED,),
             f"captures {read}: {self.kind} reads the last normed hidden state, ({NORMED},)"),
            (not reads_normed and not (read and rising and read[0] >= first),
             f"captures {read}: {self.kind} reads hidden states of rising depth, from {first} on"),
            (not 0 < self.draft_vocab_size <= size,
             f"draft_vocab_size {self.draft_vocab_size} is not within 1..{size}, the policy's"),
            (not (kind.can_reduce or self.has_full_vocab),
             f"draft_vocab_size {self.draft_vocab_size}: {self.kind} proposes all {size} tokens"),
            (kind.is_block and self.block_size <= kind.skipped,
             f"block_size {self.block_size}: a {self.kind} drafter needs at least {kind.skipped + 1}"),
            (kind.is_block and not 0 <= self.mask_token_id < size,
             f"mask_token_id {self.mask_token_id} is not within 0..{size - 1}, the policy's"),
            (lacking, f"{lacking}: a {self.kind} drafter needs at least 1"),
            (group and width % group, f"conv_group_size {group} does not divide hidden_size {width}"),
        )  # fmt: skip
        for holds, message in rules:
            if holds:
                raise ValueError(message)

    @property
    def has_full_vocab(self) -> bool:
        """Whether it can propose every token of the policy."""
        return self.draft_vocab_size == self.layers.vocab_size

    @property
    def feature_width(self) -> int:
        """F, the width of the policy's features."""
        return len(self.captures) * self.layers.hidden_size

    @property
    def is_block(self) -> bool:
        """Whether one forward pass drafts all levels."""
        return KINDS[self.kind].is_block

    @property
    def skipped(self) -> int:
        """Positions at the front of a block that predict nothing."""
        return KINDS[self.kind].skipped

    @property
    def depth(self) -> int | None:
        """P, the tokens that a forward pass of a block drafter proposes; None: a pass for each level, any number of them."""
        return self.block_size - self.skipped if self.is_block else None

    @property
    def state_width(self) -> int:
        """Width of the hidden state that the next pass reads; 0: it reads none."""
        return 0 if self.is_block else self.layers.hidden_size

    @property
    def reads_policy_head(self) -> bool:
        """Whether a draft multiplies by the policy's LM head, or by a copy of its rows, instead of a head of the drafter."""
        return not KINDS[self.kind].has_head

    @property
    def copies_head(self) -> bool:
        """Whether the rollout keeps the rows of the policy's head that the drafter proposes."""
        return self.reads_policy_head and not self.has_full_vocab


def kind_of(name: str) -> Kind:
    """The kind of this name. Raises ValueError when there is none."""
    if name not in KINDS:
        raise ValueError(f"drafter kind {name!r} is unknown: use {', '.join(KINDS)}")
    return KINDS[name]


def block_pass(config: DrafterConfig | None) -> tuple[int, int] | None:
    """Layers and positions of the one pass of a draft; None: a pass for each level, or no drafter."""
    return (config.layers.num_layers, config.block_size) if config and config.is_block else None


def for_policy(policy: ModelConfig, kind: str, **changes: Any) -> DrafterConfig:
    """A new drafter of this kind for this policy, with layers of its sizes.

    `changes` replace fields of the config or of its layers. Raises ValueError, naming the values, when they contradict each
    other or do not fit the policy.
    """
    row, size = kind_of(kind), policy.vocab_size
    family = policy.family if policy.family in row.families else row.families[0]
    kept = "rope", "rms_eps", "init_std"
    given = {one.name: one.default for one in fields(ModelConfig) if one.default is not MISSING}
    given = {name: value for name, value in given.items() if name not in kept}
    given |= {"family": family, "num_layers": NEW_LAYERS if row.is_block else 1}
    given |= {"qkv_bias": family == "qwen2", "qk_norm": "head" if family == "qwen3" else ""}
    inner = {one.name for one in fields(ModelConfig)} & {*changes}
    if (
        policy.rope.kind == "longrope" or policy.rope.fraction != 1
    ):  # which no drafter's layers have
        given |= {"rope": Rope(policy.rope.theta)}
    layers = replace(policy, **given | {name: changes.pop(name) for name in inner})
    own = {"draft_vocab_size": size} | row.new(policy) | changes
    config = DrafterConfig(kind, layers, policy.num_layers, **own)
    check_policy(config, policy)
    return config


def check_policy(config: DrafterConfig, policy: ModelConfig) -> None:
    """Raises ValueError, naming both numbers, when the drafter with this config was made for another policy."""
    for name in ("hidden_size", "vocab_size"):
        ours, theirs = getattr(config.layers, name), getattr(policy, name)
        if ours != theirs:
            raise ValueError(
                f"the drafter's {name} {ours} is not the policy's {theirs}: it was made for another policy"
            )
    if max(config.captures) > policy.num_layers:
        raise ValueError(
            f"the drafter reads hidden states after layers {config.captures}, the policy has {policy.num_layers} layers"
        )


@struct.dataclass
class Convolution:
    """Of one sublayer of a layer, or of all layers stacked on a leading axis L: k taps before it [0], and after it [1].

    `change` maps what the sublayer reads, normed, to n = 2 k Z / conv_group_size changes of the taps.
    """

    taps: Float[Array, "*L 2 k Z"]
    change: Float[Array, "*L n Z"]


@struct.dataclass
class DrafterParams:
    """A drafter, in the "train" or the "rollout" layout; None: absent.

    Matrices are [out, in]. I is 2 Z for eagle (token embedding, hidden state) and F for others. `hidden_norm` is that of what
    `fuse` gives; for eagle3 also of a parent's hidden state. `layers` of eagle and eagle3: one Layer, which is not stacked,
    with KV heads repeated in the rollout; the layer of eagle3 has q, k and v that read 2 Z, and its `attention_norm` is that
    of the token embedding. `layers` of block drafters: as those of Params.

    `head`: of eagle3, and in the rollout of block drafters with a draft vocabulary the rows of the policy's head at `ids`.
    `markov_in` has a row for every token of the policy, `markov_out` one for each of the U logits; `markov_gate`, of dflash2,
    maps a hidden state to what the embedding is multiplied by. `context_kv`, in the
    rollout of block drafters only: the layers' key and value matrices, for one product over all layers. `ids`: the token of
    each logit, ascending; None when they are the policy's, padding included. `ids` are not trained: `params.replace(ids=None)`
    has trainable leaves only.
    """

    fuse: Float[Array, "Z I"] | Tiles
    fuse_bias: Float[Array, " Z"] | None
    feature_norms: Float[Array, "C Z"] | None
    hidden_norm: Float[Array, " Z"] | None
    layers: Layer | tuple[JoinedLayer, ...]
    attention_conv: Convolution | tuple[Convolution, ...] | None
    mlp_conv: Convolution | tuple[Convolution, ...] | None
    final_norm: Float[Array, " Z"] | None
    markov_gate: Float[Array, "r Z"] | None
    markov_in: Float[Array, "V r"] | None
    markov_out: Float[Array, "U r"] | None
    confidence: Float[Array, " C"] | None
    confidence_bias: Float[Array, ""] | None
    context_kv: Float[Array, "L 2 K E Z"] | None
    head: Float[Array, "U Z"] | Tiles | None
    ids: Int32[Array, " U"] | None


@struct.dataclass
class Shared:
    """The policy's embedding and LM head, which a drafter uses without a copy."""

    embed: Float[Array, "V D"]
    head: Float[Array, "V D"] | Tiles


def shared(params: Params) -> Shared:
    """The part of a drafter that is the policy's, from Params of either layout."""
    return Shared(embed=params.embed, head=head(params))


def weights(
    config: DrafterConfig, model_axis: int, layout: str = "train", is_bound: bool = False
) -> DrafterParams:
    """A Weight for every array of the drafter's parameters in this layout; `is_bound`: as `bind` returns them."""
    layers, rank, is_whole = config.layers, config.markov_rank, config.has_full_vocab
    Z, padded, rollout = layers.hidden_size, padded_vocab(layers, model_axis), layout == "rollout"
    U = padded if is_whole else config.draft_vocab_size
    axes, num_rows = ("vocab" if U % model_axis == 0 else None, "embed"), layers.vocab_size
    kv = (layers.num_layers, 2, rollout_kv_heads(layers, model_axis), layers.head_dim, Z)
    has_head = not config.reads_policy_head or (is_bound and config.copies_head)
    is_eagle, drafted = config.kind == "eagle", num_rows if is_whole else None
    conv = convolutions_of(config, layout)

    def one(exists: Any, shape: tuple[int, ...], *rest: Any) -> Weight | None:
        return Weight(shape, *rest) if exists else None

    return DrafterParams(
        fuse=Weight((Z, 2 * Z if is_eagle else config.feature_width), (None, "embed")),
        fuse_bias=one(config.fc_bias, (Z,), (None,), "zeros"),
        feature_norms=one(config.fc_norm, (len(config.captures), Z), (None, None), "ones"),
        hidden_norm=one(not is_eagle, (Z,), (None,), "ones"),
        layers=layers_of(config, model_axis, layout),
        attention_conv=conv,
        mlp_conv=conv,
        final_norm=one(not is_eagle, (Z,), (None,), "ones"),
        markov_gate=one(config.selector_top_k, (rank, Z), (None, "embed"), "kaiming"),
        markov_in=one(rank, (padded, rank), ("vocab", "embed"), "normal", num_rows),
        # Zero, so that a new drafter begins as one without these heads.
        markov_out=one(rank, (U, rank), axes, "zeros", drafted),
        confidence=one(config.confidence, (Z + rank,), (None,), "zeros"),
        confidence_bias=one(config.confidence, (), (), "zeros"),
        context_kv=one(config.is_block and rollout, kv, (None, None, "kv_heads", None, "embed")),
        head=one(has_head, (U, Z), axes, "normal", drafted),
        ids=one(not is_whole, (U,), (None,), "ids"),
    )


def layers_of(config: DrafterConfig, model_axis: int, layout: str) -> Any:
    """A Weight for every array of the layers, as DrafterParams has them."""
    layers = config.layers
    if config.is_block:
        return architecture.weights(layers, model_axis, layout).layers
    fits = layout == "rollout" or layers.num_kv_heads % model_axis == 0
    kv_heads = layers.num_kv_heads if layout == "train" else rollout_kv_heads(layers, model_axis)
    layer = layer_weights(layers, kv_heads, "kv_heads" if fits else None)
    if config.kind == "eagle":
        return layer.replace(attention_norm=None)
    olds = {name: getattr(layer, name) for name in ("q", "k", "v")}
    wide = 2 * layers.hidden_size
    return layer.replace(
        **{name: replace(old, shape=(old.shape[0], wide)) for name, old in olds.items()}
    )


def convolutions_of(config: DrafterConfig, layout: str) -> Any:
    """A Weight for every array of the convolutions around one sublayer, as DrafterParams has them; new ones change nothing."""
    taps, L, Z = config.conv_kernel_size, config.layers.num_layers, config.layers.hidden_size
    if not taps:
        return None
    lead, axes = ((L,), (None,)) if layout == "train" else ((), ())
    conv = Convolution(
        taps=Weight((*lead, 2, taps, Z), (*axes, None, None, None), "identity"),
        change=Weight((*lead, 2 * taps * Z // config.conv_group_size, Z), (*axes, None, "embed"), "zeros"),
    )  # fmt: skip
    return conv if layout == "train" else (conv,) * L


def vocab_axis(config: DrafterConfig, mesh: Mesh) -> str | None:
    """The logical axis of the draft vocabulary; None when it does not divide over the mesh."""
    divides = config.has_full_vocab or config.draft_vocab_size % mesh.shape["model"] == 0
    return "vocab" if divides else None


def placed(
    config: DrafterConfig,
    mesh: Mesh,
    layout: str,
    is_bound: bool = False,
    dtype: DTypeLike = "float32",
) -> DrafterParams:
    """`weights` for this mesh. Raises ValueError when the drafter does not divide over it."""
    architecture.check_mesh(config.layers, mesh)
    if config.markov_rank % mesh.shape["data"]:
        raise ValueError(
            f"mesh.data {mesh.shape['data']} does not divide the drafter's Markov rank {config.markov_rank}"
        )
    found = weights(config, mesh.shape["model"], layout, is_bound)
    return tiled(found, config, mesh, dtype) if layout == "rollout" else found


def tiled(
    params: DrafterParams, config: DrafterConfig, mesh: Mesh, dtype: DTypeLike
) -> DrafterParams:
    """Parameters, or their Weights, of EAGLE in the "rollout" layout with Tiles as architecture.tiled makes them."""
    if config.is_block:
        return params
    names = "q", "k", "v", "o", "gate", "up", "down"
    params = params.replace(layers=trees.tiled(params.layers, names, mesh, dtype))
    return trees.tiled(params, ("fuse", "head"), mesh, dtype)


def shardings(
    config: DrafterConfig, mesh: Mesh, layout: str, dtype: DTypeLike = "float32"
) -> DrafterParams:
    """The NamedSharding of every array of the drafter's parameters. Raises ValueError as `placed` does."""
    return trees.shardings(placed(config, mesh, layout, dtype=dtype), mesh, layout)


def abstract(
    config: DrafterConfig, mesh: Mesh, layout: str, dtype: DTypeLike, is_bound: bool = False
) -> DrafterParams:
    """Shape, dtype and sharding of every array of the drafter's parameters; `is_bound`: as `bind` returns them.

    Raises ValueError as `placed` does.
    """
    return trees.abstract(placed(config, mesh, layout, is_bound, dtype), mesh, layout, dtype)


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
    return trees.init(placed(config, mesh, "train"), mesh, key, dtype, config.layers.init_std, ids)


def to_rollout(
    params: DrafterParams, config: DrafterConfig, mesh: Mesh, dtype: DTypeLike
) -> DrafterParams:
    """The same drafter in the "rollout" layout and this dtype; traced inside one jit over the whole mesh."""
    model_axis, sizes = mesh.shape["model"], config.layers

    def unstack(index: int) -> Layer:
        layer = jax.tree.map(lambda leaf: leaf[index], params.layers)
        return repeat_kv(layer, sizes, model_axis)

    def heads(matrix: Array) -> Array:
        return matrix.reshape(-1, sizes.head_dim, matrix.shape[-1])

    def apart(conv: Convolution | None) -> tuple[Convolution, ...] | None:
        indices = range(sizes.num_layers)
        return conv and tuple(jax.tree.map(lambda leaf: leaf[i], conv) for i in indices)  # noqa: B023

    if config.is_block:
        layers = [unstack(index) for index in range(sizes.num_layers)]
        context_kv = jnp.stack([jnp.stack([heads(one.k), heads(one.v)]) for one in layers])
        joined = tuple(join(layer, sizes, rollout_kv_heads(sizes, model_axis)) for layer in layers)
        rollout = params.replace(
            layers=joined,
            attention_conv=apart(params.attention_conv),
            mlp_conv=apart(params.mlp_conv),
            context_kv=context_kv,
        )
    else:
        rollout = params.replace(layers=repeat_kv(params.layers, sizes, model_axis))
    return jax.lax.with_sharding_constraint(
        tiled(cast(rollout, dtype), config, mesh, dtype), shardings(config, mesh, "rollout", dtype)
    )


def cast(params: DrafterParams, dtype: DTypeLike) -> DrafterParams:
    """The same drafter in this dtype; ids keep theirs."""
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params.replace(ids=None)).replace(
        ids=params.ids
    )


def bind(
    params: DrafterParams, config: DrafterConfig, target: Params, group: Mesh
) -> DrafterParams:
    """The drafter of a data group, in the "rollout" layout, as its programs read it next to this policy."""
    if not config.copies_head:
        return params
    weight = weights(config, group.shape["model"], "rollout", is_bound=True).head
    rows = rows_at(head(target), params.ids, trees.shardings(weight, group, "rollout"))
    return params.replace(head=rows)


@partial(jax.jit, static_argnames="sharding")
def rows_at(matrix: Array | Tiles, ids: Array, sharding: NamedSharding) -> Array:
    """The rows of the matrix at these ids."""
    return jax.lax.with_sharding_constraint(trees.whole(matrix)[ids], sharding)


def gathered(features: Float[Array, "B W F"], fused: Fused | None) -> Float[Array, "B W F"]:
    """Features on every device of a data group: split in any other way they travel more."""
    if fused is None:
        return features
    return jax.lax.with_sharding_constraint(features, NamedSharding(fused.mesh, PartitionSpec()))


@jax.named_scope("drafter/head")
@shaped
def logits(
    params: DrafterParams,
    config: DrafterConfig,
    shared: Shared,
    hidden: Float[Array, "*batch Z"],
    fused: Fused | None = None,
) -> Float[Array, "*batch U"]:
    """Logits over the draft vocabulary without the Markov bias, in at least float32; those of padding are the lowest number.

    `fused`: of the data group in a rollout, else None.
    """
    if fused is not None and is_cpu(fused.mesh):
        # As rows: as columns, which XLA:CPU prefers, 2 to 8 hidden states take the product 14 times as long.
        hidden = jax.lax.optimization_barrier(hidden)
    if config.kind == "eagle3" and not config.norm_output:
        hidden = ops.rms_norm(hidden, params.final_norm.astype(hidden.dtype), config.layers.rms_eps)
    matrix = params.head
    if matrix is None:
        matrix = shared.head if params.ids is None else shared.head[params.ids]
    matrix = trees.for_columns(matrix, math.prod(hidden.shape[:-1]))
    if isinstance(matrix, Tiles):
        scores = ops.project(hidden, matrix, None, -1)
    else:
        scores = contract("...d,vd->...v", hidden, matrix.astype(hidden.dtype))
    if params.ids is not None:
        return scores
    return masked(scores, jnp.arange(scores.shape[-1]) < config.layers.vocab_size)


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
    if config.has_full_vocab:
        if ids is not None:
            raise ValueError("a drafter that proposes every token takes no draft vocabulary")
        return None

    found, size = np.asarray([] if ids is None else ids), config.layers.vocab_size
    if found.shape != (config.draft_vocab_size,):
        raise ValueError(
            f"the draft vocabulary has {found.size} tokens, draft_vocab_size says {config.draft_vocab_size}"
        )
    if found[0] < 0 or found[-1] >= size or (np.diff(found) <= 0).any():
        raise ValueError(f"the draft vocabulary's ids do not ascend within 0..{size - 1}")
    return found.astype(np.int32)
