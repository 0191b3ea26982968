"""The products of small policies' layers at few tokens, each with the tiles to time: cases of the tuning sweep.

`None` among the candidates is what XLA makes of the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.device import setup
from benchmarks.device.setup import Device
from benchmarks.device.tune import MOST, TIMES, Case
from tlt_jax.distributed import mesh as meshes
from tlt_jax.kernels import projection_sizes, triton_support
from tlt_jax.kernels.projection_sizes import ARRIVALS, Product, Sizes
from tlt_jax.models import layers as ops

# Width of the residual stream, of the MLP and of a layer's heads of Qwen2.5-0.5B and SmolLM2-135M.
POLICIES = {"0.5b": (896, 4864, 2, 7, 64), "smollm2": (576, 1536, 3, 3, 64)}
TRIED = (1, 8, 32)  # tokens
DTYPE, EPS = jnp.bfloat16, 1e-6
LITTLE = 1e-30  # of a result is added to the next call's tokens


class Made(NamedTuple):
    """A product at one shape, as XLA computes it (`of_xla`) and as a kernel does with given `sizes` (`of_kernel`)."""

    name: str
    product: Product
    arrays: tuple
    of_xla: Callable[..., jax.Array]
    of_kernel: Callable[..., jax.Array]


def cases(device: Device) -> list[Case]:
    """The four products of a layer, for each policy and number of tokens."""
    capability = triton_support.capability(device.mesh)
    return [
        case(made, meshes.device_kind(device.mesh))
        for policy in POLICIES
        for tokens in TRIED
        for made in layer_products(policy, tokens, capability)
    ]


def case(made: Made, kind: str) -> Case:
    """The product as a case: timed in a loop in which each call reads tokens that depend on the result of the call before."""
    name, one, arrays, of_xla, of_kernel = made
    x, *rest = arrays

    def run(sizes: Sizes | None) -> Callable[..., jax.Array]:
        return of_xla if sizes is None else partial(of_kernel, sizes=sizes)

    expected = np.asarray(jax.jit(of_xla)(*arrays), np.float32)

    def error(sizes: Sizes | None) -> float:
        found = np.asarray(jax.jit(run(sizes))(*arrays), np.float32)
        return float(np.abs(found - expected).max() / np.abs(expected).max())

    def seconds(sizes: Sizes | None) -> float:
        def step(x: jax.Array, *rest: jax.Array) -> jax.Array:
            y = run(sizes)(x, *rest)
            return y if y.shape == x.shape else x + LITTLE * y[:, : x.shape[1]]

        return setup.seconds_each(step, x, *rest, times=TIMES)

    tokens = projection_sizes.rounded(one.tokens)
    key = kind, one.kind, one.out, one.width, tokens, one.itemsize
    chosen = [projection_sizes.rule(one), None, *projection_sizes.candidates(one)]
    return Case(
        name, tuple(dict.fromkeys(chosen)), error, MOST, seconds, one.out * one.width * one.itemsize,
        lambda sizes: f"{key!r}: {sizes!r}",
    )  # fmt: skip


def layer_products(policy: str, tokens: int, capability: int) -> Iterator[Made]:
    """The products of a layer: heads, the output projection, gates, the MLP's last."""
    from tlt_jax.kernels import projections_triton

    D, F, K, G, E = POLICIES[policy]
    T, HE = tokens, K * G * E
    keys = iter(jax.random.split(jax.random.key(0), 16))

    def array(*shape: int, scale: float = 1.0) -> jax.Array:
        return scale * jax.random.normal(next(keys), shape, DTYPE)

    def product(kind: str, out: int, width: int, can_split: bool = False) -> Product:
        return Product(kind, out, width, T, DTYPE.dtype.itemsize, can_split=can_split)

    def joined(parts: tuple[jax.Array, ...]) -> jax.Array:
        return jnp.concatenate([part.reshape(T, -1) for part in parts], axis=1)

    def heads_in_xla(x, norm, matrix, cos, sin):
        y = ops.project(ops.rms_norm(x.T, norm, EPS, 0), matrix, None, 0)
        q, k, v = (jax.lax.collapse(part, 0, 2) for part in jnp.split(y, (G, G + 1), axis=1))
        q, k = (ops.rotate(one, cos.T, sin.T, 1) for one in (q, k))
        return joined(ops.by_node(q, k, v, T))

    def heads(x, norm, matrix, cos, sin, *, sizes):
        angles, shape = (cos, sin), (K, G, E)
        return joined(
            projections_triton.heads(
                (x,), (norm,), (matrix,), None, None, angles, shape, T, EPS, capability, sizes
            )
        )

    def added_in_xla(x, y, matrix, arrivals):
        return x + ops.project(y.T, matrix, None, 0).T

    def added(x, y, matrix, arrivals, *, sizes):
        return projections_triton.added(x, y, matrix, None, arrivals, capability, sizes)

    def gated_in_xla(x, norm, matrix):
        gate, up = ops.project(ops.rms_norm(x.T, norm, EPS, 0), matrix, None, 0)
        return (jax.nn.silu(gate) * up).T

    def gated(x, norm, matrix, *, sizes):
        return projections_triton.gated(x, norm, (matrix,), None, EPS, capability, sizes)[0]

    x, norm, arrivals = array(T, D), array(D), jnp.zeros(ARRIVALS, jnp.int32)
    turned = array(T, E // 2), array(T, E // 2)
    made = [
        (product("heads", K * (G + 2) * E, D), (x, norm, array(K, G + 2, E, D, scale=D**-0.5), *turned), heads_in_xla, heads),
        (product("added", D, HE), (x, array(T, HE), array(D, HE, scale=HE**-0.5), arrivals), added_in_xla, added),
        (product("gated", 2 * F, D), (x, norm, array(2, F, D, scale=D**-0.5)), gated_in_xla, gated),
        (product("added", D, F, True), (x, array(T, F), array(D, F, scale=F**-0.5), arrivals), added_in_xla, added),
    ]  # fmt: skip
    for one, *rest in made:
        yield Made(f"{policy}, {one.kind} {one.out} x {one.width}, {T} tokens", one, *rest)
