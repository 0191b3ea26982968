"""Products of a mixture of experts: each token has k of N small MLPs. Which form computes them, and those of XLA and Pallas.

The pairs of a token and one of its experts are sorted by expert, once a call, and rows of one expert are multiplied in blocks;
no token is dropped. A gate multiplies what an expert's last product reads, so that its gradient does not need that product.

With a mesh each expert's width F lies on `model`. Activations are on all devices of `model` anyway, so that widths and whole
experts there need the same all-reduce, and widths give each device the same work: of 8 tokens with 8 of 128 experts the busiest
of 8 devices would have 1.5 times the mean. The cost is narrower tiles.

LOOP is for CPUs. Microseconds of a call in float32 on 2 cores (2026-12-01); "all": each token times all experts, in one
product, which is no form, since it saves 10 us at most; "taken": times copies of its experts' matrices.

| N, k, F, D      | tokens |  LOOP |    all |  taken |
|-----------------|--------|-------|--------|--------|
| 8, 2, 64, 64    |      1 |    63 |     51 |     41 |
|                 |      4 |    67 |     59 |     83 |
|                 |     16 |    91 |     83 |    273 |
|                 |     64 |   162 |    212 |    776 |
|                 |   1024 |   961 |   4526 |        |
| 64, 8, 256, 512 |      1 |   431 |  26416 |   9272 |
|                 |      4 |  2417 |  28573 |  54765 |
|                 |     16 |  8452 |  32456 | 206927 |
|                 |     64 | 20717 |  59316 | 793324 |
|                 |   1024 | 90266 | 738608 |        |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, PartitionSpec
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Int32

from tlt_jax.distributed.mesh import is_gpu, is_tpu, partition
from tlt_jax.kernels import expert_tiles
from tlt_jax.kernels.fused import EXPERTS, FEW_EXPERTS, Fused
from tlt_jax.kernels.numerics import MLP, contract, power, widen
from tlt_jax.shapes import shaped

LOOP, TILES, FEW, MEGABLOX = "loop", "tiles", "few", "megablox"
FEWEST, MOST = 16, 128  # rows of a block of a library or a kernel
LANES = 128  # of a TPU
TPU_TILES = 2048, 512  # of a program of MEGABLOX: elements of the reduction, and outputs


@dataclass(frozen=True)
class Form:
    """How the products of sorted rows run: the form, and rows of a block. `interpret`: MEGABLOX on any device."""

    name: str
    block: int
    fused: Fused | None = None
    interpret: bool = False

    def rows(self, pairs: int) -> int:
        """Rows of so many pairs: a block of LOOP may reach beyond the last pair, and MEGABLOX takes whole blocks."""
        if self.name == LOOP:
            return pairs + self.block
        return -(-pairs // self.block) * self.block if self.name == MEGABLOX else pairs


class Groups(NamedTuple):
    """Pairs sorted by expert: the pair of each row, the row of each pair, and the rows of expert e, from begins[e] to ends[e].

    Rows after the pairs' have pair 0, and results there are any number.
    """

    pair: Int32[Array, " R"]
    place: Int32[Array, "T k"]
    begins: Int32[Array, " N"]
    ends: Int32[Array, " N"]


@jax.named_scope("mix")
@shaped
def mix(
    x: Float[Array, "*A D"],
    ids: Int[Array, "*A k"],
    gates: Float[Array, "*A k"],
    matrices: Sequence[Float[Array, ...]],
    down: Float[Array, "N D F"],
    activation: Callable[[Array], Array],
    mesh: Mesh | None = None,
    fused: Fused | None = None,
    layout: str = "train",
) -> Float[Array, "*A D"]:
    """The sum over a token's k experts of gates * down @ (activation(gate @ x) * (up @ x)).

    It is added in at least float32 and rounded once. `ids`: distinct for a token. `matrices`: those of gate and up, each
    [N, F, D], or one of both, [N, 2, F, D]. The first axis of x lies over `data`. `mesh`: where it runs; None: on the default
    device, by XLA. `fused`: the kernels of a data group, which has no gradient; None: all that run on the mesh, but FEW.
    """
    mesh = mesh if fused is None else fused.mesh
    # Kept with the products: a choice that is made again may differ where two experts are nearly equal.
    ids = checkpoint_name(ids.astype(jnp.int32), MLP)
    kernels = Fused.of(mesh) if fused is None and mesh is not None and is_gpu(mesh) else fused

    def local(x: Array, ids: Array, gates: Array, down: Array, *matrices: Array) -> Array:
        tokens, k = x.reshape(-1, x.shape[-1]), ids.shape[-1]
        given = tokens, ids.reshape(-1, k), gates.reshape(-1, k), matrices, down, activation
        is_few = len(matrices) == 1 and activation is jax.nn.silu and fused is not None
        form = rule(mesh, kernels, x.dtype, ids.size, len(down), is_few)
        if form.name == FEW:
            y = expert_tiles.few(*given[:3], matrices[0], down, kernels).sum(1)
        else:
            y = mix_sorted(*given, form)
        return y.reshape(x.shape)

    if mesh is None:
        return local(x, ids, gates, down, *matrices).astype(x.dtype)

    wide = *(None,) * (matrices[0].ndim - 2), "mlp", "embed"
    axes = [(None, "embed", "mlp"), *[wide] * len(matrices)]
    weights, rows = [partition(one, layout) for one in axes], partition(("batch",), layout)

    def shards(x: Array, ids: Array, gates: Array, *given: Array) -> Array:
        whole = (gathered(one, spec, mesh) for one, spec in zip(given, weights, strict=True))
        y = local(x, ids, gates, *whole)
        return (jax.lax.psum(y, "model") if mesh.shape["model"] > 1 else y).astype(x.dtype)

    return jax.shard_map(
        shards, mesh=mesh, in_specs=(rows, rows, rows, *weights), out_specs=rows, check_vma=False
    )(x, ids, gates, down, *matrices)  # fmt: skip


def gathered(shard: Array, spec: PartitionSpec, mesh: Mesh) -> Array:
    """All of an array over `data`, in a shard_map.

    Other devices than TPUs gather shards along a new first axis, which collectives of GPUs take as it lies. Along another one
    XLA would store gradients with that axis first, and copy the sums of all layers twice.
    """
    if "data" not in spec or mesh.shape["data"] == 1:
        return shard
    axis = spec.index("data")
    if is_tpu(mesh):
        return jax.lax.all_gather(shard, "data", axis=axis, tiled=True)
    parts = jnp.moveaxis(jax.lax.all_gather(shard, "data"), 0, axis)
    return parts.reshape(*shard.shape[:axis], -1, *shard.shape[axis + 1 :])


def rule(
    mesh: Mesh | None, fused: Fused | None, dtype: DTypeLike, pairs: int, experts: int, is_few: bool
) -> Form:
    """The form for so many pairs of tokens and experts on a device: the first rule that holds.

    LOOP in other dtypes than bfloat16 and float32; MEGABLOX on TPUs; with the kernels of a GPU FEW, up to
    expert_tiles.MOST_PAIRS pairs and where it can run, with joined matrices, silu and a data group; else TILES; LOOP elsewhere.
    A block has about the rows of an expert. LOOP reads matrices where they lie for one row at a time, and copies them for more.
    """
    mean = pairs / experts
    block = min(MOST, max(FEWEST, power(round(mean))))
    on = frozenset() if fused is None else fused.on
    if dtype in expert_tiles.DTYPES:
        if mesh is not None and is_tpu(mesh):
            return Form(MEGABLOX, block)
        if is_few and FEW_EXPERTS in on and pairs <= expert_tiles.MOST_PAIRS:
            return Form(FEW, block, fused)
        if EXPERTS in on:
            return Form(TILES, block, fused)
    return Form(LOOP, 1 if mean <= 4 else min(MOST, power(round(1.5 * mean))))


def mix_sorted(
    x: Float[Array, "T D"],
    ids: Int32[Array, "T k"],
    gates: Float[Array, "T k"],
    matrices: Sequence[Float[Array, ...]],
    down: Float[Array, "N D F"],
    activation: Callable[[Array], Array],
    form: Form,
) -> Float[Array, "T D"]:
    """`mix` in at least float32, by products of sorted rows."""
    N, k = len(down), ids.shape[1]
    groups = grouped(ids, N, form.rows(ids.size))
    rows = spread(x, groups.pair // k, groups.place)
    weights = spread(gates.reshape(-1, 1), groups.pair, groups.place.reshape(-1, 1))
    found = [
        checkpoint_name(product(rows, one.reshape(N, -1, x.shape[1]), groups, form, x.dtype), MLP)
        for one in matrices
    ]
    gate, up = found if len(found) == 2 else jnp.split(found[0], 2, axis=-1)
    h = gated(gate, up, weights, activation).astype(x.dtype)
    y = product(h, down, groups, form, widen(x.dtype))
    return collect(y, groups.pair // k, groups.place)


def gated(gate: Array, up: Array, weights: Array, activation: Callable[[Array], Array]) -> Array:
    """What an expert's last product reads, in at least float32."""
    wide = widen(gate.dtype)
    return activation(gate.astype(wide)) * up.astype(wide) * weights.astype(wide)


def grouped(ids: Int32[Array, "T k"], experts: int, rows: int) -> Groups:
    """The pairs sorted by expert, those of an expert in their order."""
    flat, e = ids.reshape(-1), jnp.arange(experts, dtype=jnp.int32)[:, None]
    pair = jnp.argsort(flat, stable=True).astype(jnp.int32)
    numbers = jnp.arange(len(flat), dtype=jnp.int32)
    place = jnp.zeros_like(numbers).at[pair].set(numbers, unique_indices=True)
    bounds = (jnp.sum(one, axis=1, dtype=jnp.int32) for one in (flat < e, flat <= e))
    return Groups(jnp.pad(pair, (0, rows - len(flat))), place.reshape(ids.shape), *bounds)


def blocks(groups: Groups, block: int, pairs: int) -> tuple[Array, Array, Array, Array]:
    """The expert, first row and end of the expert's rows of each block, for as many as there may be, and how many are used.

    The others are empty. Blocks are in the order of their rows: what one writes past its end, later ones write over.
    """
    count = pairs // block + min(len(groups.begins), pairs)
    each = -(-(groups.ends - groups.begins) // block)
    last = jnp.cumsum(each, dtype=jnp.int32)
    i = jnp.arange(count, dtype=jnp.int32)
    expert = jnp.sum(last <= i[:, None], axis=1, dtype=jnp.int32)
    expert = jnp.minimum(expert, len(last) - 1)
    first = groups.begins[expert] + (i - last[expert] + each[expert]) * block
    return expert, first, groups.ends[expert], last[-1]


@jax.custom_vjp
def spread(
    x: Float[Array, "S W"], source: Int32[Array, " R"], places: Int32[Array, "S j"]
) -> Float[Array, "R W"]:
    """Rows x[source]; `places`: the rows that count of each source. Gradients are added in at least float32."""
    return x[source]


@jax.custom_vjp
def collect(
    rows: Float[Array, "R W"], source: Int32[Array, " R"], places: Int32[Array, "S j"]
) -> Float[Array, "S W"]:
    """The sums of the rows in `places`, in at least float32: the transpose of `spread`."""
    return rows[places].astype(widen(rows.dtype)).sum(1)


def spread_forward(x: Array, source: Array, places: Array) -> tuple[Array, tuple]:
    return spread(x, source, places), (source, places)


def spread_backward(saved: tuple, slope: Array) -> tuple:
    return collect(slope, *saved).astype(slope.dtype), None, None


def collect_forward(rows: Array, source: Array, places: Array) -> tuple[Array, tuple]:
    return collect(rows, source, places), (source, places)


def collect_backward(saved: tuple, slope: Array) -> tuple:
    return spread(slope, *saved), None, None


spread.defvjp(spread_forward, spread_backward)
collect.defvjp(collect_forward, collect_backward)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def product(
    rows: Float[Array, "R In"],
    matrix: Float[Array, "N Out In"],
    groups: Groups,
    form: Form,
    dtype: DTypeLike,
) -> Float[Array, "R Out"]:
    """Each row times the matrix of its expert."""
    return multiplied(rows, matrix, groups, form, dtype, False)


def forward(
    rows: Array, matrix: Array, groups: Groups, form: Form, dtype: DTypeLike
) -> tuple[Array, tuple]:
    return product(rows, matrix, groups, form, dtype), (rows, matrix, groups)


def backward(form: Form, dtype: DTypeLike, saved: tuple, slope: Array) -> tuple:
    rows, matrix, groups = saved
    slope = slope.astype(rows.dtype)
    of_rows = multiplied(slope, matrix, groups, form, rows.dtype, True)
    return of_rows, slopes(slope, rows, groups, form).astype(matrix.dtype), None


product.defvjp(forward, backward)


def multiplied(
    rows: Float[Array, "R _"],
    matrix: Float[Array, "N Out In"],
    groups: Groups,
    form: Form,
    dtype: DTypeLike,
    is_transposed: bool,
) -> Float[Array, "R _"]:
    """Each row times the matrix of its expert, or that transposed."""
    out = matrix.shape[2 if is_transposed else 1]
    if form.name == MEGABLOX:
        # Pallas takes time to import.
        from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm

        if is_turned(matrix):
            matrix, is_transposed = jnp.swapaxes(matrix, 1, 2), not is_transposed
        tiles = tpu_tiles(form, rows.shape[1], out)
        given = rows, matrix, groups.ends - groups.begins, dtype, tiles
        return gmm(*given, transpose_rhs=not is_transposed, interpret=form.interpret)
    expert, first, end, used = blocks(groups, form.block, groups.place.size)
    if form.name == TILES:
        table = expert, first, end
        return expert_tiles.products(
            rows, matrix, table, form.block, dtype, is_transposed, form.fused
        )

    def step(i: Array, y: Array) -> Array:
        own = jax.lax.dynamic_slice_in_dim(rows, first[i], form.block)
        its = picked(matrix, expert[i])
        one = contract("ri,io->ro", own, its if is_transposed else its.T)
        return jax.lax.dynamic_update_slice_in_dim(y, one, first[i], 0)

    y = jnp.zeros((len(rows), out), widen(rows.dtype))
    return jax.lax.fori_loop(0, used, step, y).astype(dtype)


def picked(matrix: Float[Array, "N Out In"], expert: Int32[Array, ""]) -> Float[Array, "Out In"]:
    """The matrix of an expert.

    A CPU picks one of 16-bit floats in a branch, or XLA of JAX 0.10 would widen all of them first: with 8 of 64 experts
    of 256 x 512 a call takes 7 ms in place of 28. With JAX 0.12 it costs up to 1.6 times as much.
    """

    def by_branch(matrix: Array, expert: Array) -> Array:
        none = jnp.zeros(matrix.shape[1:], matrix.dtype)
        return jax.lax.cond(expert >= 0, lambda: matrix[expert], lambda: none)

    if matrix.dtype.itemsize > 2:
        return matrix[expert]
    return jax.lax.platform_dependent(matrix, expert, cpu=by_branch, default=lambda a, e: a[e])


def slopes(
    slope: Float[Array, "R Out"], rows: Float[Array, "R In"], groups: Groups, form: Form
) -> Float[Array, "N Out In"]:
    """The gradient of the matrices; 0 of an expert without rows."""
    if form.name == TILES:
        return expert_tiles.slopes(slope, rows, groups.begins, groups.ends, form.fused)
    if form.name == MEGABLOX:
        from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

        turns = is_turned(rows)
        if turns:
            slope, rows = rows, slope
        tiles = tpu_tiles(form, slope.shape[1], rows.shape[1])
        given = slope.T, rows, groups.ends - groups.begins, rows.dtype, tiles
        found = tgmm(*given, interpret=form.interpret)
        return jnp.swapaxes(found, 1, 2) if turns else found

    def one(bounds: tuple[Array, Array]) -> Array:
        begin, end = bounds

        def step(i: Array, total: Array) -> Array:
            first = begin + i * form.block
            own, other = (
                jax.lax.dynamic_slice_in_dim(one, first, form.block) for one in (slope, rows)
            )
            is_own = first + jnp.arange(form.block)[:, None] < end
            return total + contract("ro,ri->oi", jnp.where(is_own, own, 0), other)

        zeros = jnp.zeros((slope.shape[1], rows.shape[1]), widen(rows.dtype))
        used = -(-(end - begin) // form.block)
        return jax.lax.fori_loop(0, used, step, zeros)

    return jax.lax.map(one, (groups.begins, groups.ends))


def is_turned(array: Array) -> bool:
    """Whether XLA stores a TPU's array with its last two axes turned, as the last fills no lanes; else it would copy it."""
    return array.shape[-1] % LANES > 0


def tpu_tiles(form: Form, reduced: int, out: int) -> tuple[int, int, int]:
    """Rows, elements of the reduction (of a slope: of its first width), and outputs, of a program of MEGABLOX."""
    return form.block, min(reduced, TPU_TILES[0]), min(out, TPU_TILES[1])
