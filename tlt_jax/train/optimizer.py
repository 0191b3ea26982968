"""AdamW with schedule and clipping, and where its moments live; knows no loss."""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tlt_jax.config import Config
from tlt_jax.models.transformer import Params


@dataclass(frozen=True)
class Adam:
    """Hyper-parameters of one run of `total_steps` updates; the rate falls to `floor` times its peak."""

    learning_rate: float
    total_steps: int
    schedule: str = "constant"
    warmup_steps: int = 0
    floor: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    weight_decay: float = 0.0
    grad_clip: float = 1.0

    @classmethod
    def of(cls, config: Config, total_steps: int) -> Adam:
        """The optimizer of the RL run."""
        optim = config.optim
        return cls(
            optim.learning_rate, total_steps, optim.schedule, optim.warmup_steps, 0.0,
            optim.beta1, optim.beta2, optim.weight_decay, optim.grad_clip,
        )  # fmt: skip

    def rate(self) -> optax.Schedule:
        """Learning rate of update 0, 1, ...: linear warm-up to the peak, then constant, linear or cosine.

        The first update already has a rate above 0, and the floor is met after the last one.
        """
        peak, warmup = self.learning_rate, self.warmup_steps
        left = max(1, self.total_steps - warmup)
        after = {
            "constant": optax.constant_schedule(peak),
            "linear": optax.linear_schedule(peak, self.floor * peak, left),
            "cosine": optax.cosine_decay_schedule(peak, left, alpha=self.floor),
        }[self.schedule]
        if not warmup:
            return after
        rise = optax.linear_schedule(peak / warmup, peak, max(1, warmup - 1))
        return optax.join_schedules([rise, after], [warmup])

    def transformation(self) -> optax.GradientTransformation:
        """Clip by global norm, then AdamW; decay pulls matrices only."""
        clip = optax.clip_by_global_norm(self.grad_clip) if self.grad_clip else optax.identity()
        adamw = optax.adamw(self.rate(), self.beta1, self.beta2, weight_decay=self.weight_decay, mask=matrices)
        return optax.chain(clip, adamw)


def matrices(params: Params) -> Params:
    """True at matrices, False at norms and biases; the layers have one axis more, being stacked."""
    mask = jax.tree.map(lambda leaf: leaf.ndim >= 2, params)
    return mask.replace(layers=jax.tree.map(lambda leaf: leaf.ndim >= 3, params.layers))


def widen(params: Params) -> Params:
    """The same leaves in at least float32."""
    return jax.tree.map(lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), params)


def init(adam: Adam, params: Params) -> optax.OptState:
    """New optimizer state; moments in at least float32."""
    return adam.transformation().init(widen(params))


def abstract(adam: Adam, params: Params, mesh: Mesh) -> optax.OptState:
    """Shape, dtype and sharding of the optimizer state of abstract params: moments live where their weights do."""
    shapes = jax.eval_shape(lambda params: init(adam, params), params)
    everywhere = NamedSharding(mesh, PartitionSpec())
    shardings = optax.tree_utils.tree_map_params(
        adam.transformation(),
        lambda _, weight: weight.sharding,
        shapes,
        params,
        transform_non_params=lambda _: everywhere,
    )
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )
