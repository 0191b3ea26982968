"""The products of small policies' layers at few tokens, each with the tiles to time: cases of the tuning sweep.

`None` among the candidates is what XLA makes of the same operations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tlt_jax.distributed.mesh import device_kind
from tlt_jax.kernels import projection_sizes, triton_support
from tlt_jax.kernels.projection_sizes import ARRIVALS, TOKENS, Product, Sizes
from tlt_jax.models import layers as ops

# Width of the residual stream, of the MLP and of a layer's heads of Qwen2.5-0.5B and SmolLM2-135M.
POLICIES = {"0.5b": (896, 4864, 2, 7, 64), "smollm2": (576, 1536, 3, 3, 64)}
DTYPE, EPS = jnp.bfloat16, 1e-6


@dataclass(frozen=True, eq=False)
class Case:
    """A product at one shape, as XLA computes it (`of_xla`) and as a kernel does with given sizes (`of_kernel`).

    `read`: bytes of its matrix.
    """

    name: str
    product: Product
    arrays: tuple
    of_xla: Callable[..., jax.Array]
    of_kernel: Callable[..., jax.Array]

    @property
    def candidates(self) -> list[Sizes | None]:
        """Sizes to time; the first is the rule's. None: XLA's product."""
        made = [
            projection_sizes.rule(self.product),
            None,
            *projection_sizes.candidates(self.product),
        ]
        return list(dict.fromkeys(made))

    @property
    def read(self) -> int:
        """Bytes of the matrix."""
        return self.product.out * self.product.width * self.product.itemsize

    def run(self, sizes: Sizes | None) -> Callable[[], jax.Array]:
        """A call of the product with these sizes."""
        given = self.of_xla if sizes is None else partial(self.of_kernel, sizes=sizes)
        return partial(jax.jit(given), *self.arrays)

    def reference(self) -> jax.Array:
        """XLA's result."""
        return self.run(None)()

    def line(self, kind: str, sizes: Sizes | None) -> str:
        """Code of the table's entry for this kind of device."""
        one = self.product
        return f"{(kind, one.kind, one.out, one.width, projection_sizes.rounded(one.tokens), one.itemsize)}: {sizes}"


def cases(mesh: Mesh) -> Iterator[Case]:
    """The four products of a layer, for each policy and number of tokens; none where no Triton kernel runs."""
    capability = triton_support.capability(mesh)
    if capability is not None:
        for policy in POLICIES:
            for tokens in TOKENS:
                yield from layer_cases(policy, tokens, capability)


def table(mesh: Mesh, best: dict[Case, Sizes | None]) -> str:
    """The lines of projection_sizes.TABLE for the fastest sizes."""
    return "\n".join(f"    {case.line(device_kind(mesh), sizes)}," for case, sizes in best.items())


def layer_cases(policy: str, tokens: int, capability: int) -> Iterator[Case]:
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
        yield Case(f"{policy}, {one.kind} {one.out} x {one.width}, {T} tokens", one, *rest)
