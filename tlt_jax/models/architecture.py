"""Sizes of a policy, and the shape, axes, initializer and layouts of each of its weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import Mesh
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from tlt_jax.models import low_rank, params as trees
from tlt_jax.models.low_rank import Lora, LowRank, merged
from tlt_jax.models.params import Tiles, Weight
from tlt_jax.models.rope import Rope

# Vocabularies are padded to a multiple of this, so that the weights of a run divide over every usual `model` axis without more
# padding.
VOCAB_MULTIPLE = 64


@dataclass(frozen=True)
class ModelConfig:
    """Sizes and features of a policy: hashable, a static argument of every program."""

    family: str  # of hf_families.FAMILIES
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_dim: int
    max_positions: int
    rope: Rope = Rope()
    rms_eps: float = 1e-6
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: str = ""  # of queries and keys: "" (none), "head" (each head alone) or "width" (all heads together)
    norms: str = "before"  # of what attention and MLP read ("before"), of what they give ("after"), or "both"
    norm_offset: float = 0.0  # added to the weight of each norm
    activation: str = "silu"  # of the MLP's gate: silu | gelu_tanh
    windows: tuple[
        int, ...
    ] = ()  # of each layer: a token sees so many, itself included; 0: all. (): all layers see all
    window_rope: Rope | None = None  # of layers with a window, if they have another one
    unrotated: tuple[int, ...] = ()  # layers without rotary embedding
    embed_scale: float = 1.0  # of embeddings
    residual_scale: float = 1.0  # of what attention and MLP add
    score_scale: float = 1.0  # of attention scores, beyond head_dim ** -0.5
    logit_scale: float = 1.0
    score_cap: float = 0.0  # of attention scores, see numerics.capped
    logit_cap: float = 0.0
    value_norm: bool = False  # values are normed, without a weight
    # Of layers without a window, where they differ from the others: head_dim, KV heads (0: as the others), and whether their
    # values are their keys before norm and rotation.
    full_head_dim: int = 0
    full_kv_heads: int = 0
    keys_as_values: bool = False
    # So many last layers attend to the keys and values of the last layer before them with the same window, and have none;
    # their MLPs may have another width (0: that of the others).
    shared_layers: int = 0
    shared_mlp_dim: int = 0
    has_kv: bool = True  # of one layer, see `kinds`
    token_inputs: int = (
        0  # numbers that each layer also gets of its token, by an embedding of all layers; 0: none
    )
    out_scale: bool = (
        False  # each layer's output is multiplied by a number of its own, which is not trained
    )
    tied: bool = False
    init_std: float = 0.02
    eos_ids: tuple[int, ...] = ()
    # Mixture of experts, of all layers but `dense_layers`: a token has `experts_per_token` of `num_experts` MLPs of width
    # `expert_dim`, weighted by the router's probabilities, which sum to 1 where they are normed; and where `shared_dim` is not
    # 0 one MLP of that width that all tokens have, times a gate.
    num_experts: int = 0
    experts_per_token: int = 0
    expert_dim: int = 0
    shared_dim: int = 0
    normed_gates: bool = False
    dense_layers: tuple[int, ...] = ()

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"{self.num_heads} attention heads do not share {self.num_kv_heads} KV heads evenly"
            )
        rope = self.rope
        width = self.head_dim if rope.kind == "proportional" else int(self.head_dim * rope.fraction)
        if width % 2:
            raise ValueError(
                f"head_dim {self.head_dim}, of which {width} are rotated, is odd: rotary embedding needs an even number"
            )
        factors = {len(rope.short_factors), len(rope.long_factors)}
        if rope.kind == "longrope" and factors != {width // 2}:
            raise ValueError(
                f"longrope has {sorted(factors)} factors for {width // 2} rotated pairs: give one for each"
            )
        if self.experts_per_token > self.num_experts:
            raise ValueError(
                f"a token cannot choose {self.experts_per_token} of {self.num_experts} experts: correct one of the two"
            )

    @property
    def is_usual(self) -> bool:
        """Whether its layers are those that fused kernels of tree nodes compute: LLaMA's and Qwen's."""
        return (
            self.norms == "before"
            and self.qk_norm != "width"
            and self.activation == "silu"
            and self.norm_offset == 0
            and self.residual_scale == self.score_scale == 1
        )

    @property
    def kinds(self) -> tuple[ModelConfig, ...]:
        """The model as each layer sees it, with that layer's shapes; this one itself where all layers are alike."""
        return kinds(self)

    @property
    def groups(self) -> tuple[ModelConfig, ...]:
        """The different ones of `kinds`, in the order of the first layer of each."""
        return tuple(dict.fromkeys(self.kinds))

    def place(self, layer: int) -> tuple[int, int]:
        """The group of a layer, and how many layers of that group are before it."""
        kind = self.kinds[layer]
        return self.groups.index(kind), self.kinds[:layer].count(kind)

    @property
    def kv_layers(self) -> tuple[int, ...]:
        """For each layer, the layer whose keys and values it attends to."""
        windows = self.windows or (0,) * self.num_layers
        last = {w: i for i, w in enumerate(windows) if i < self.num_layers - self.shared_layers}
        return tuple(
            i if self.kinds[i].has_kv else last[windows[i]] for i in range(self.num_layers)
        )

    @property
    def cached_layers(self) -> tuple[int, ...]:
        """The layers with keys and values of their own."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind.has_kv)

    @property
    def divisors(self) -> tuple[list[int], str]:
        """The sizes of the mesh's `model` axis over which it divides, and the sizes that say so."""
        H, kv_heads = self.num_heads, {kind.num_kv_heads for kind in self.groups}
        widths = {width for kind in self.groups for width in (kind.mlp_dim, kind.expert_dim)} - {0}
        fits = [
            n
            for n in range(1, H + 1)
            if all(F % n == 0 for F in (H, *widths)) and all(0 in (K % n, n % K) for K in kv_heads)
        ]
        F, K = (" or ".join(map(str, sorted(one))) for one in (widths, kv_heads))
        return fits, f"{H} attention heads, {F} MLP width, {K} KV heads"

    @property
    def expert_layers(self) -> tuple[int, ...]:
        """The layers with experts."""
        return tuple(i for i, kind in enumerate(self.kinds) if kind.num_experts)

    @property
    def longest(self) -> int:
        """Tokens of the longest sequence that it may have: with the short factors of longrope, the original length."""
        is_short = self.rope.kind == "longrope" and not self.rope.is_long
        return self.rope.original_max_positions if is_short else self.max_positions

    def for_sequences(self, length: int) -> ModelConfig:
        """The same model for a run whose longest sequence has this many tokens."""
        if self.rope.kind != "longrope":
            return self
        is_long = length > self.rope.original_max_positions
        return replace(self, rope=replace(self.rope, is_long=is_long))

    @property
    def ropes(self) -> tuple[Rope | None, ...]:
        """The rotary embedding of each layer; None: it has none."""
        windows = self.windows or (0,) * self.num_layers
        local = self.window_rope or self.rope
        return tuple(
            None if layer in self.unrotated else local if window else self.rope
            for layer, window in enumerate(windows)
        )


EXPERTS = "num_experts", "experts_per_token", "expert_dim", "shared_dim"


@cache
def kinds(config: ModelConfig) -> tuple[ModelConfig, ...]:
    """See ModelConfig.kinds."""
    if config.num_experts:
        dense = replace(config, **dict.fromkeys(EXPERTS, 0), normed_gates=False, dense_layers=())
        sparse = replace(config, mlp_dim=config.shared_dim, dense_layers=())
        layers = range(config.num_layers)
        return tuple(dense if layer in config.dense_layers else sparse for layer in layers)
    if not any((config.full_head_dim, config.full_kv_heads, config.shared_layers)):
        return (config,) * config.num_layers
    alike = {"full_head_dim": 0, "full_kv_heads": 0, "shared_layers": 0, "shared_mlp_dim": 0}
    windowed = replace(config, **alike, keys_as_values=False)
    wide = config.full_head_dim or config.head_dim
    full = replace(
        config, **alike, head_dim=wide, num_kv_heads=config.full_kv_heads or config.num_kv_heads,
        score_scale=config.score_scale * math.sqrt(wide / config.head_dim),
    )  # fmt: skip
    found = [windowed if window else full for window in config.windows or (0,) * config.num_layers]
    first = config.num_layers - config.shared_layers
    width = config.shared_mlp_dim or config.mlp_dim
    shared = [replace(kind, has_kv=False, mlp_dim=width) for kind in found[first:]]
    return (*found[:first], *shared)


@struct.dataclass
class Layer:
    """Weights of one transformer layer, or of several stacked on a leading axis L; absent ones are None.

    Matrices are [out, in], as in HF files. Norms of what attention and MLP read, or of what they give (`attended_norm`,
    `mlp_out_norm`). `input_gate`, `input_out` and `input_norm`: of what a layer gets of its token. `out_scale`: see
    ModelConfig. Of a layer with N experts, `gate`, `up` and `down` are the MLP that all tokens have, if there is one.
    """

    attention_norm: Float[Array, "*L D"] | None
    q: Float[Array, "*L HE D"] | LowRank
    k: Float[Array, "*L KE D"] | LowRank | None
    v: Float[Array, "*L KE D"] | LowRank | None
    o: Float[Array, "*L D HE"] | LowRank
    q_bias: Float[Array, "*L HE"] | None
    k_bias: Float[Array, "*L KE"] | None
    v_bias: Float[Array, "*L KE"] | None
    o_bias: Float[Array, "*L D"] | None
    q_norm: Float[Array, "*L _"] | None
    k_norm: Float[Array, "*L _"] | None
    attended_norm: Float[Array, "*L D"] | None
    mlp_norm: Float[Array, "*L D"] | None
    gate: Float[Array, "*L F D"] | LowRank | None
    up: Float[Array, "*L F D"] | LowRank | None
    down: Float[Array, "*L D F"] | LowRank | None
    gate_bias: Float[Array, "*L F"] | None
    up_bias: Float[Array, "*L F"] | None
    down_bias: Float[Array, "*L D"] | None
    mlp_out_norm: Float[Array, "*L D"] | None
    input_gate: Float[Array, "*L P D"] | None = None
    input_out: Float[Array, "*L D P"] | None = None
    input_norm: Float[Array, "*L D"] | None = None
    out_scale: Float[Array, "*L 1"] | None = None
    router: Float[Array, "*L N D"] | None = None
    expert_gate: Float[Array, "*L N X D"] | None = None
    expert_up: Float[Array, "*L N X D"] | None = None
    expert_down: Float[Array, "*L N D X"] | None = None
    shared_gate: Float[Array, "*L 1 D"] | None = None


@struct.dataclass
class JoinedLayer:
    """Weights of one layer in the "rollout" layout: one matrix for q, k and v, and one for gate and up.

    `qkv` has J = H / K + 2 heads for each of the K KV heads: its queries, its key, its value; fewer where a layer has no
    values or no keys.
    """

    attention_norm: Float[Array, " D"] | None
    qkv: Float[Array, "K J E D"] | LowRank | Tiles
    o: Float[Array, "D HE"] | LowRank | Tiles
    qkv_bias: Float[Array, "K J E"] | None
    o_bias: Float[Array, " D"] | None
    q_norm: Float[Array, " _"] | None
    k_norm: Float[Array, " _"] | None
    attended_norm: Float[Array, " D"] | None
    mlp_norm: Float[Array, " D"] | None
    gate_up: Float[Array, "2 F D"] | LowRank | Tiles | None
    down: Float[Array, "D F"] | LowRank | Tiles | None
    gate_up_bias: Float[Array, "2 F"] | None
    down_bias: Float[Array, " D"] | None
    mlp_out_norm: Float[Array, " D"] | None
    input_gate: Float[Array, "P D"] | None = None
    input_out: Float[Array, "D P"] | None = None
    input_norm: Float[Array, " D"] | None = None
    out_scale: Float[Array, " 1"] | None = None
    router: Float[Array, "N D"] | None = None
    expert_gate_up: Float[Array, "N 2 X D"] | None = None
    expert_down: Float[Array, "N D X"] | None = None
    shared_gate: Float[Array, "1 D"] | None = None


JOINED = ("qkv", "qkv_bias", "gate_up", "gate_up_bias", "expert_gate_up")


@struct.dataclass
class Params:
    """A policy. `layers`: one stacked Layer ("train") or a tuple of L JoinedLayers ("rollout"). V may be padded.

    Where layers have different shapes, "train" has a tuple of stacked Layers, one for each of ModelConfig.groups. `head` is
    None when the model ties it to the embedding, and is not tiled. The others are of what layers get of a token: its
    embedding, and the projection of the first hidden state with its norm.
    """

    embed: Float[Array, "V D"]
    layers: Layer | tuple[Layer, ...] | tuple[JoinedLayer, ...]
    final_norm: Float[Array, " D"]
    head: Float[Array, "V D"] | Tiles | None
    inputs_embed: Float[Array, "V LP"] | None = None
    inputs_project: Float[Array, "LP D"] | None = None
    inputs_norm: Float[Array, " P"] | None = None


def padded_vocab(config: ModelConfig, model_axis: int) -> int:
    """Rows of the embedding: the vocabulary, padded to a multiple of 64 and of `model_axis`."""
    multiple = math.lcm(VOCAB_MULTIPLE, model_axis)
    return -(-config.vocab_size // multiple) * multiple


def check_mesh(config: ModelConfig, mesh: Mesh) -> None:
    """Raises ValueError, naming the sizes that work, when the policy does not divide over the mesh."""
    data, model = mesh.shape["data"], mesh.shape["model"]
    fits, sizes = config.divisors
    if model not in fits:
        raise ValueError(f"mesh.model {model} does not divide {sizes}: use one of {fits}")
    if config.hidden_size % data:
        fits = [n for n in range(1, 2 * data) if config.hidden_size % n == 0]
        raise ValueError(
            f"mesh.data {data} does not divide hidden_size {config.hidden_size}: use one of {fits}"
        )


def layer_weights(config: ModelConfig, kv_heads: int, kv_axis: str | None) -> Layer:
    """A Weight for every array of one layer."""
    D, F, E = config.hidden_size, config.mlp_dim, config.head_dim
    HE, KE = config.num_heads * E, kv_heads * E

    def bias(wanted: bool, size: int, axis: str | None) -> Weight | None:
        return Weight((size,), (axis,), "zeros") if wanted else None

    def norm(wanted: bool, size: int = D, axis: str | None = None) -> Weight | None:
        return (
            Weight((size,), (axis,), "zeros" if config.norm_offset else "ones") if wanted else None
        )

    q_size, k_size = {"": (0, 0), "head": (E, E), "width": (HE, KE)}[config.qk_norm]
    is_wide, before = config.qk_norm == "width", config.norms != "after"
    after, has_k, P = config.norms != "before", config.has_kv, config.token_inputs
    has_v = has_k and not config.keys_as_values
    kv = Weight((KE, D), (kv_axis, "embed"))
    N, X = config.num_experts, config.expert_dim
    wide = Weight((F, D), ("mlp", "embed")) if F else None
    expert_wide = Weight((N, X, D), (None, "mlp", "embed")) if N else None
    return Layer(
        attention_norm=norm(before),
        q=Weight((HE, D), ("heads", "embed")),
        k=kv if has_k else None,
        v=kv if has_v else None,
        o=Weight((D, HE), ("embed", "heads")),
        q_bias=bias(config.qkv_bias, HE, "heads"),
        k_bias=bias(config.qkv_bias and has_k, KE, kv_axis),
        v_bias=bias(config.qkv_bias and has_v, KE, kv_axis),
        o_bias=bias(config.o_bias, D, None),
        q_norm=norm(q_size > 0, q_size, "heads" if is_wide else None),
        k_norm=norm(k_size > 0 and has_k, k_size, kv_axis if is_wide else None),
        attended_norm=norm(after),
        mlp_norm=norm(before),
        gate=wide,
        up=wide,
        down=Weight((D, F), ("embed", "mlp")) if F else None,
        gate_bias=bias(config.mlp_bias, F, "mlp"),
        up_bias=bias(config.mlp_bias, F, "mlp"),
        down_bias=bias(config.mlp_bias, D, None),
        mlp_out_norm=norm(after),
        input_gate=Weight((P, D), (None, "embed")) if P else None,
        input_out=Weight((D, P), ("embed", None)) if P else None,
        input_norm=norm(P > 0),
        out_scale=Weight((1,), (None,), "ones") if config.out_scale else None,
        router=Weight((N, D), (None, "embed")) if N else None,
        expert_gate=expert_wide,
        expert_up=expert_wide,
        expert_down=Weight((N, D, X), (None, "embed", "mlp")) if N else None,
        shared_gate=Weight((1, D), (None, "embed")) if N and F else None,
    )


def with_factors(matrix: Weight, rank: int, scale: float, stack: int = 0) -> LowRank:
    """The Weights of a matrix with an adapter, whose factors lie on its axes; `stack`: leading axes of layers."""
    (*outs, inner), (*out_axes, in_axis) = matrix.shape, matrix.axes
    a = Weight((*outs[:stack], rank, inner), (*out_axes[:stack], None, in_axis), "kaiming")
    return LowRank(matrix, a, Weight((*outs, rank), (*out_axes, None), "zeros"), scale)


def rollout_kv_heads(config: ModelConfig, model_axis: int) -> int:
    """KV heads of the rollout's weights and cache: repeated when there are fewer than the `model` axis has devices."""
    return max(config.num_kv_heads, model_axis)


def joined(layer: Any, **matrices: Any) -> JoinedLayer:
    """A JoinedLayer of these joined matrices and the other weights of the Layer."""
    alike = {f.name: getattr(layer, f.name) for f in fields(JoinedLayer) if f.name not in JOINED}
    return JoinedLayer(**alike, **matrices)


def joined_weights(config: ModelConfig, model_axis: int, lora: Lora | None = None) -> JoinedLayer:
    """A Weight for every array of one layer in the "rollout" layout, and for the factors of adapters that are kept apart."""
    D, F, E = config.hidden_size, config.mlp_dim, config.head_dim
    K, N, X = rollout_kv_heads(config, model_axis), config.num_experts, config.expert_dim
    apart = layer_weights(config, K, "kv_heads")
    qkv_parts = [name for name in ("q", "k", "v") if getattr(apart, name) is not None]
    heads = config.num_heads // K + len(qkv_parts) - 1
    qkv = Weight((K, heads, E, D), ("kv_heads", None, None, "embed"))
    gate_up = Weight((2, F, D), (None, "mlp", "embed"))
    expert_gate_up = Weight((N, 2, X, D), (None, None, "mlp", "embed"))

    def bias(wanted: bool, matrix: Weight) -> Weight | None:
        return Weight(matrix.shape[:-1], matrix.axes[:-1], "zeros") if wanted else None

    layer = joined(
        apart,
        qkv=qkv,
        qkv_bias=bias(config.qkv_bias, qkv),
        gate_up=gate_up if F else None,
        gate_up_bias=bias(config.mlp_bias, gate_up),
        expert_gate_up=expert_gate_up if N else None,
    )
    parts = {"qkv": qkv_parts, "o": ("o",), "gate_up": ("gate", "up"), "down": ("down",)}
    changed = {}
    for name, members in parts.items():
        if lora and (count := len(set(members) & set(lora.fields))):
            if (matrix := getattr(layer, name)) is not None:
                changed[name] = with_factors(matrix, count * lora.rank, 1.0)
    return layer.replace(**changed)


def weights(
    config: ModelConfig, model_axis: int, layout: str = "train", lora: Lora | None = None
) -> Params:
    """A Weight for every array of Params; "train" stacks the layers, "rollout" has a tuple of joined layers.

    `lora`: adapters whose factors the "rollout" layout keeps apart.
    """
    V, D = padded_vocab(config, model_axis), config.hidden_size
    if layout == "train":

        def stacked(kind: ModelConfig) -> Layer:
            kv_axis = "kv_heads" if kind.num_kv_heads % model_axis == 0 else None
            count = config.kinds.count(kind)

            def stack(weight: Weight) -> Weight:
                return replace(weight, shape=(count, *weight.shape), axes=(None, *weight.axes))

            return jax.tree.map(stack, layer_weights(kind, kind.num_kv_heads, kv_axis))

        layers = tuple(map(stacked, config.groups))
        layers = layers if len(layers) > 1 else layers[0]
    else:
        layers = tuple(joined_weights(kind, model_axis, lora) for kind in config.kinds)
    vocab = Weight((V, D), ("vocab", "embed"), num_rows=config.vocab_size)
    P, inputs = config.token_inputs, {}
    if P:
        width = config.num_layers * P
        inputs = {
            "inputs_embed": replace(vocab, shape=(V, width)),
            "inputs_project": Weight((width, D), (None, "embed")),
            "inputs_norm": Weight((P,), (None,), "zeros" if config.norm_offset else "ones"),
        }
    return Params(
        embed=vocab,
        layers=layers,
        final_norm=Weight((D,), (None,), "zeros" if config.norm_offset else "ones"),
        head=None if config.tied else vocab,
        **inputs,
    )


def layer_at(layers: Layer | tuple[Layer, ...], config: ModelConfig, index: int) -> Layer:
    """One layer of the "train" layout."""
    group, place = config.place(index)
    stack = layers if isinstance(layers, Layer) else layers[group]
    return jax.tree.map(lambda leaf: leaf[place], stack)


def tiled(params: Params, mesh: Mesh, dtype: DTypeLike) -> Params:
    """Params, or their Weights, in the "rollout" layout, with the large matrices as Tiles where the mesh is of a CPU."""
    layers = tuple(
        trees.tiled(layer, ("qkv", "o", "gate_up", "down"), mesh, dtype) for layer in params.layers
    )
    found = trees.tiled(params.replace(layers=layers, head=head(params)), ("head",), mesh, dtype)
    return found if isinstance(found.head, Tiles) else found.replace(head=params.head)


def placed(
    config: ModelConfig, mesh: Mesh, layout: str, dtype: DTypeLike, lora: Lora | None = None
) -> Params:
    """`weights` for this mesh. Raises ValueError when the policy does not divide over it."""
    check_mesh(config, mesh)
    found = weights(config, mesh.shape["model"], layout, lora)
    return tiled(found, mesh, dtype) if layout == "rollout" else found


def shardings(
    config: ModelConfig,
    mesh: Mesh,
    layout: str,
    lora: Lora | None = None,
    dtype: DTypeLike = "float32",
) -> Params:
    """The NamedSharding of every array of Params in this dtype; `lora`: as for `weights`."""
    return trees.shardings(placed(config, mesh, layout, dtype, lora), mesh, layout)


def abstract(
    config: ModelConfig, mesh: Mesh, layout: str, dtype: DTypeLike, lora: Lora | None = None
) -> Params:
    """Shape, dtype and sharding of every array of Params; `lora`: as for `weights`."""
    return trees.abstract(placed(config, mesh, layout, dtype, lora), mesh, layout, dtype)


def init(config: ModelConfig, mesh: Mesh, key: jax.Array, dtype: DTypeLike) -> Params:
    """New random Params in the "train" layout, the same on every mesh; vocabulary padding is 0."""
    check_mesh(config, mesh)
    return trees.init(weights(config, mesh.shape["model"]), mesh, key, dtype, config.init_std)


def repeat_kv(layer: Layer, config: ModelConfig, model_axis: int) -> Layer:
    """The layer with its KV heads repeated to `rollout_kv_heads`."""
    repeats = rollout_kv_heads(config, model_axis) // config.num_kv_heads

    def repeat(array: jax.Array | LowRank | None) -> jax.Array | LowRank | None:
        if array is None or repeats == 1:
            return array
        if low_rank.is_low_rank(array):
            return array.replace(weight=repeat(array.weight), b=repeat(array.b))
        heads = array.reshape(config.num_kv_heads, config.head_dim, *array.shape[1:])
        return jnp.repeat(heads, repeats, axis=0).reshape(-1, *array.shape[1:])

    names = ("k", "v", "k_bias", "v_bias", *(("k_norm",) if config.qk_norm == "width" else ()))
    return layer.replace(**{name: repeat(getattr(layer, name)) for name in names})


def join(layer: Layer, config: ModelConfig, K: int) -> JoinedLayer:
    """The layer with its matrices joined; its KV heads are already the rollout's K."""
    E = config.head_dim

    def qkv(parts: Sequence[jax.Array]) -> jax.Array:
        return jnp.concatenate([part.reshape(K, -1, E, *part.shape[1:]) for part in parts], axis=1)

    def present(*parts: Any) -> list[Any]:
        return [part for part in parts if part is not None] or [None]

    return joined(
        layer,
        qkv=low_rank.joined(present(layer.q, layer.k, layer.v), qkv),
        qkv_bias=low_rank.joined(present(layer.q_bias, layer.k_bias, layer.v_bias), qkv),
        gate_up=low_rank.joined((layer.gate, layer.up), jnp.stack),
        gate_up_bias=low_rank.joined((layer.gate_bias, layer.up_bias), jnp.stack),
        expert_gate_up=low_rank.joined(
            (layer.expert_gate, layer.expert_up), partial(jnp.stack, axis=1)
        ),
    )


def to_rollout(
    params: Params, config: ModelConfig, mesh: Mesh, dtype: DTypeLike, lora: Lora | None = None
) -> Params:
    """The same policy in the "rollout" layout and this dtype; traced inside one jit over the whole mesh.

    `lora`: the adapters of the policy whose factors stay apart. Others are merged in at least float32, before the weights
    are converted.
    """

    def unstack(index: int) -> JoinedLayer:
        layer, kind = layer_at(params.layers, config, index), config.kinds[index]
        layer = low_rank.with_scaled_factors(layer) if lora else merged(layer)
        axis = mesh.shape["model"]
        return join(repeat_kv(layer, kind, axis), kind, rollout_kv_heads(kind, axis))

    rollout = params.replace(layers=tuple(unstack(index) for index in range(config.num_layers)))
    rollout = tiled(jax.tree.map(lambda leaf: leaf.astype(dtype), rollout), mesh, dtype)
    return jax.lax.with_sharding_constraint(
        rollout, shardings(config, mesh, "rollout", lora, dtype)
    )


NORMED = -1  # the capture of the last hidden state after the final norm
Captures = tuple[int, ...]  # features: NORMED, or c for the hidden state after c layers


def head(params: Params) -> Float[Array, "V D"] | Tiles:
    """The output embedding."""
    return params.embed if params.head is None else params.head
