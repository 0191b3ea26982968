"""Sizes of an EAGLE drafter, and the shape, axes, initializer and layouts of each of its weights.

Two kinds. "eagle" (EAGLE-1 and -2; Li et al. 2024, arXiv 2401.15077) reads the policy's last hidden state and uses the
policy's LM head. "eagle3" (arXiv 2503.01840) reads hidden states of several depths and has its own LM head, which may
cover a part of the vocabulary; `fc_norm` and `norm_output` are the changes of EAGLE-3.1 (arXiv 2605.09992).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from flax import struct
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int32

from tlt_jax.models import architecture
from tlt_jax.models.architecture import (
    NORMED,
    Layer,
    ModelConfig,
    Rope,
    layer_weights,
    padded_vocab,
    repeat_kv,
    rollout_kv_heads,
)
from tlt_jax.models.params import Weight

KINDS = ("eagle", "eagle3")


@dataclass(frozen=True)
class EagleConfig:
    """Sizes and features of a drafter: hashable, a static argument of every program.

    It is as wide as the policy, whose embedding it shares. `captures`: the hidden states of the policy that it reads.
    `draft_vocab_size` equals `vocab_size` when it can propose every token. Raises ValueError, naming the values, when
    fields contradict each other.
    """

    kind: str  # eagle | eagle3
    hidden_size: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    captures: tuple[int, ...]
    max_positions: int
    rope: Rope = Rope()
    rms_eps: float = 1e-6
    qkv_bias: bool = False  # eagle only
    fc_bias: bool = False  # eagle only
    fc_norm: bool = False  # eagle3 only: a separate norm for each of the hidden states
    norm_output: bool = False  # eagle3 only: pass the normed hidden state to the next level
    init_std: float = 0.02

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"drafter kind {self.kind!r} is unknown: use {' or '.join(KINDS)}")
        eagle = self.kind == "eagle"
        foreign = ("fc_norm", "norm_output") if eagle else ("qkv_bias", "fc_bias")
        foreign = [name for name in foreign if getattr(self, name)]
        if foreign:
            raise ValueError(f"{', '.join(foreign)} true: not for a drafter of kind {self.kind}")

        rising = all(
            one < other for one, other in zip(self.captures, self.captures[1:], strict=False)
        )
        if eagle and self.captures != (NORMED,):
            raise ValueError(
                f"captures {self.captures}: eagle reads the last normed hidden state, ({NORMED},)"
            )
        if not eagle and not (self.captures and rising and self.captures[0] >= 1):
            raise ValueError(
                f"captures {self.captures}: eagle3 reads hidden states of rising depth, from 1 on"
            )
        if not 0 < self.draft_vocab_size <= self.vocab_size:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size} is not within 1..{self.vocab_size}, the policy's"
            )
        if eagle and not self.whole:
            raise ValueError(
                f"draft_vocab_size {self.draft_vocab_size}: eagle proposes all {self.vocab_size} tokens"
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

    @cached_property
    def block(self) -> ModelConfig:
        """Its transformer layer as a policy of one layer, for the code that both networks share."""
        return ModelConfig(
            family="qwen2" if self.qkv_bias else "llama",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            num_layers=1,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            mlp_dim=self.mlp_dim,
            max_positions=self.max_positions,
            rope=self.rope,
            rms_eps=self.rms_eps,
            qkv_bias=self.qkv_bias,
            init_std=self.init_std,
        )


def for_policy(policy: ModelConfig, kind: str, **changes: Any) -> EagleConfig:
    """A drafter for this policy: one layer of its shape, EAGLE-3.1 for eagle3.

    `changes` replace fields of the config.
    """
    eagle = kind == "eagle"
    base = EagleConfig(
        kind=kind,
        hidden_size=policy.hidden_size,
        mlp_dim=policy.mlp_dim,
        num_heads=policy.num_heads,
        num_kv_heads=policy.num_kv_heads,
        head_dim=policy.head_dim,
        vocab_size=policy.vocab_size,
        draft_vocab_size=policy.vocab_size,
        captures=(NORMED,) if eagle else default_captures(policy.num_layers),
        max_positions=policy.max_positions,
        rope=policy.rope,
        rms_eps=policy.rms_eps,
        qkv_bias=eagle and policy.family == "qwen2",
        fc_norm=not eagle,
        norm_output=not eagle,
        init_std=policy.init_std,
    )
    return replace(base, **changes)


def default_captures(num_layers: int) -> tuple[int, ...]:
    """EAGLE-3's (2, L // 2, L - 3) where these differ; else the second, a middle and the last layer."""
    if num_layers >= 7:
        return 2, num_layers // 2, num_layers - 3
    return (
        tuple(range(1, num_layers + 1))
        if num_layers < 4
        else (2, (2 + num_layers) // 2, num_layers)
    )


@struct.dataclass
class EagleParams:
    """A drafter, in the "train" or the "rollout" layout (KV heads repeated); None: absent.

    Matrices are [out, in]. I is 2 Z for eagle (token embedding, hidden state) and F for eagle3. For eagle3, the layer's
    q, k and v read 2 Z, and its `attention_norm` is that of the token embedding. `ids`: the token of each of the U
    logits, ascending; None when they are the policy's, padding included. `ids` are not trained:
    `params.replace(ids=None)` has trainable leaves only.
    """

    fuse: Float[Array, "Z I"]
    fuse_bias: Float[Array, " Z"] | None
    feature_norms: Float[Array, "C Z"] | None
    hidden_norm: Float[Array, " Z"] | None
    layer: Layer
    final_norm: Float[Array, " Z"] | None
    head: Float[Array, "U Z"] | None
    ids: Int32[Array, " U"] | None


def weights(config: EagleConfig, model_axis: int, layout: str = "train") -> EagleParams:
    """A Weight for every array of EagleParams in this layout."""
    Z, eagle3 = config.hidden_size, config.kind == "eagle3"
    norm = Weight((Z,), (None,), "ones")
    fits = layout == "rollout" or config.num_kv_heads % model_axis == 0
    kv_heads = (
        config.num_kv_heads if layout == "train" else rollout_kv_heads(config.block, model_axis)
    )
    layer = layer_weights(config.block, kv_heads, "kv_heads" if fits else None)
    if eagle3:
        wide = {name: getattr(layer, name) for name in ("q", "k", "v")}
        layer = layer.replace(
            **{name: replace(old, shape=(old.shape[0], 2 * Z)) for name, old in wide.items()}
        )
    else:
        layer = layer.replace(attention_norm=None)
    U = padded_vocab(config.block, model_axis) if config.whole else config.draft_vocab_size
    vocab_axis = "vocab" if U % model_axis == 0 else None
    num_rows = config.vocab_size if config.whole else None
    lm_head = Weight((U, Z), (vocab_axis, "embed"), num_rows=num_rows)
    return EagleParams(
        fuse=Weight((Z, config.feature_width if eagle3 else 2 * Z), (None, "embed")),
        fuse_bias=Weight((Z,), (None,), "zeros") if config.fc_bias else None,
        feature_norms=Weight((len(config.captures), Z), (None, None), "ones")
        if config.fc_norm
        else None,
        hidden_norm=norm if eagle3 else None,
        layer=layer,
        final_norm=norm if eagle3 else None,
        head=lm_head if eagle3 else None,
        ids=None if config.whole else Weight((U,), (None,), "ids"),
    )


def check_mesh(config: EagleConfig, mesh: Mesh) -> None:
    """Raises ValueError when the drafter does not divide over the mesh."""
    architecture.check_mesh(config.block, mesh)


def to_rollout(params: EagleParams, config: EagleConfig, model_axis: int) -> EagleParams:
    """The same drafter in the "rollout" layout."""
    return params.replace(layer=repeat_kv(params.layer, config.block, model_axis))
