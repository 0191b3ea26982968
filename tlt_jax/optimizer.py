"""AdamW with a schedule and gradient clipping: its state, sharding and step."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int32

from tlt_jax.config import Config
from tlt_jax.distributed.mesh import put

PyTree = Any
# For Adam.short: final learning rate as a share of the peak, warm-up as a share of the steps, weight decay.
FLOOR, WARMUP, WEIGHT_DECAY = 0.1, 0.05, 0.0
MAX_NONFINITE = 3  # updates in a row that are not finite (each is skipped) end a run


@dataclass(frozen=True)
class Adam:
    """Hyperparameters of a run of `total_steps` steps: RL steps, or updates of supervised training.

    The learning rate decays to `floor` times its peak. `grad_clip`: limit on the global norm of
    the gradient; 0: off.
    """

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
        """The optimizer of the RL run, as in the section optim."""
        optim = config.optim
        return cls(
            optim.learning_rate, total_steps, optim.schedule, optim.warmup_steps, 0.0,
            optim.beta1, optim.beta2, optim.weight_decay, optim.grad_clip,
        )  # fmt: skip

    @classmethod
    def short(cls, config: Config, learning_rate: float, steps: int) -> Adam:
        """The optimizer of supervised training: linear warm-up, then cosine decay to FLOOR."""
        optim, warmup = config.optim, max(1, round(WARMUP * steps))
        return cls(
            learning_rate, steps, "cosine", warmup, FLOOR, optim.beta1, optim.beta2, WEIGHT_DECAY, optim.grad_clip
        )  # fmt: skip

    def rate(self) -> optax.Schedule:
        """Learning rate of step 0, 1, ...

        Linear warm-up to the peak, then constant, or linear or cosine decay. It is above 0 at the
        first step, and decay reaches the floor after the last one.
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

    def transformation(self, rate: ArrayLike | None = None) -> optax.GradientTransformation:
        """Clipping by global norm, then AdamW with weight decay of matrices only.

        `rate`: the learning rate; None: the schedule's at the number of updates applied so far. The optimizer state has
        the same form.
        """
        schedule = self.rate() if rate is None else lambda _: rate
        clip = optax.clip_by_global_norm(self.grad_clip) if self.grad_clip else optax.identity()
        adamw = optax.adamw(
            schedule, self.beta1, self.beta2, weight_decay=self.weight_decay, mask=matrices
        )
        return optax.chain(clip, adamw)


@struct.dataclass
class TrainState:
    """Weights and optimizer state.

    `step` counts updates, `skipped` the non-finite ones, which are not applied, `skips` the latest
    consecutive skipped ones.
    """

    params: PyTree
    opt_state: optax.OptState
    step: Int32[Array, ""]
    skips: Int32[Array, ""]
    skipped: Int32[Array, ""]


def advance(
    learner: TrainState,
    grads: PyTree,
    is_finite: Bool[Array, ""],
    adam: Adam,
    has_targets: Bool[Array, ""] | bool = True,
    step: Int32[Array, ""] | None = None,
    rate: Float[Array, ""] | None = None,
) -> tuple[TrainState, ArrayLike]:
    """The state after one AdamW step, and its learning rate.

    `step`: of the schedule; None: the number of updates applied so far. `rate`: in place of the schedule's. When `is_finite`
    is False, weights and moments do not change, and the update counts as skipped. Without targets nothing changes: moments
    and decay would move weights without a gradient.
    """
    if rate is None:
        rate = adam.rate()(learner.step - learner.skipped if step is None else step)
    changes, opt_state = adam.transformation(None if step is None else rate).update(
        grads, learner.opt_state, learner.params
    )
    params = optax.apply_updates(learner.params, changes)

    params, opt_state = jax.tree.map(
        partial(jnp.where, is_finite & has_targets),
        (params, opt_state),
        (learner.params, learner.opt_state),
    )

    counts = {
        "step": learner.step + has_targets,
        "skips": jnp.where(has_targets, jnp.where(is_finite, 0, learner.skips + 1), learner.skips),
        "skipped": learner.skipped + (~is_finite & has_targets),
    }
    return learner.replace(params=params, opt_state=opt_state, **counts), rate


def matrices(params: PyTree) -> PyTree:
    """True at matrices, False at norms, biases and factors; by name, since those of stacked layers have two axes too."""

    def is_matrix(path: tuple[jax.tree_util.GetAttrKey, ...], leaf: Array) -> bool:
        return not any(word in path[-1].name for word in ("norm", "bias", "scale"))

    return jax.tree_util.tree_map_with_path(is_matrix, params)


def widen(params: PyTree) -> PyTree:
    """The leaves in at least float32."""
    return jax.tree.map(
        lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), params
    )


def init(adam: Adam, params: PyTree) -> optax.OptState:
    """The initial optimizer state; moments in at least float32."""
    return adam.transformation().init(widen(params))


def create(adam: Adam, params: PyTree, mesh: Mesh) -> TrainState:
    """The state before the first update. It owns `params`: the first update donates them."""
    target = abstract(adam, params, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, target.opt_state)
    opt_state = jax.jit(partial(init, adam), out_shardings=shardings)(params)
    zeros = [put(np.int32(0), target.step.sharding) for _ in range(3)]
    return TrainState(params, opt_state, *zeros)


def abstract(adam: Adam, params: PyTree, mesh: Mesh) -> TrainState:
    """ShapeDtypeStructs with shardings of the state of (abstract) params.

    Moments have the shardings of their weights.
    """
    shapes = jax.eval_shape(partial(init, adam), params)
    everywhere = NamedSharding(mesh, PartitionSpec())

    shardings = optax.tree_utils.tree_map_params(
        adam.transformation(),
        lambda _, weight: weight.sharding,
        shapes,
        params,
        transform_non_params=lambda _: everywhere,
    )

    opt_state = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        shardings,
    )

    count = jax.ShapeDtypeStruct((), jnp.int32, sharding=everywhere)
    return TrainState(params, opt_state, count, count, count)
