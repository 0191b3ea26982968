"""The device mesh ("data", "model"): logical axes to PartitionSpecs, data groups and their views."""

from __future__ import annotations

import re
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

AXES = ("data", "model")

# Logical axis -> mesh axis. "rollout" has one whole copy per data group, tensor-parallel over `model`; "train" shards
# the width of every matrix over `data` too (FSDP).
TENSOR_PARALLEL = dict.fromkeys(("vocab", "heads", "kv_heads", "mlp", "features"), "model")
RULES = {
    "train": {**TENSOR_PARALLEL, "batch": "data", "embed": "data"},
    "rollout": {**TENSOR_PARALLEL, "batch": "data"},
}


def make_mesh(data: int, model: int, devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A ("data", "model") mesh; row r is data group r. Raises ValueError when there are too few devices.

    Devices of a process are adjacent, in the order of processes.
    """
    if devices is None:
        devices = sorted(jax.devices(), key=lambda device: device.process_index)
    if data * model > len(devices):
        raise ValueError(
            f"mesh {data} x {model} needs {data * model} devices, {len(devices)} are available"
        )
    grid = np.asarray(devices[: data * model]).reshape(data, model)
    return Mesh(grid, AXES, axis_types=(AxisType.Auto, AxisType.Auto))


def local_groups(mesh: Mesh) -> list[int]:
    """The data groups of this process, whose programs it builds and runs.

    Raises ValueError when a group lies on several processes, or a process has none.
    """
    owners = [{device.process_index for device in row} for row in mesh.devices]
    for group, processes in enumerate(owners):
        if len(processes) > 1:
            raise ValueError(
                f"mesh.model {mesh.shape['model']}: data group {group} lies on the devices of processes "
                f"{', '.join(map(str, sorted(processes)))}: a group is decoded by one process, set mesh.model to "
                f"{jax.local_device_count()} or a divisor of it"
            )
    if missing := set(range(jax.process_count())).difference(*owners):
        raise ValueError(
            f"mesh.data {mesh.shape['data']} x mesh.model {mesh.shape['model']} leaves process {min(missing)} without "
            f"a data group: use all {jax.device_count()} devices, or start fewer processes"
        )
    return [group for group, processes in enumerate(owners) if processes == {jax.process_index()}]


def put(tree, place: NamedSharding):
    """Places host arrays, which every process has whole, with this sharding."""
    if place.is_fully_addressable:
        return jax.device_put(tree, place)

    def of(array: np.ndarray) -> jax.Array:
        array = np.asarray(array, jax.dtypes.canonicalize_dtype(np.asarray(array).dtype))
        return jax.make_array_from_callback(array.shape, place, array.__getitem__)

    return jax.tree.map(of, tree)


def is_cpu(mesh: Mesh) -> bool:
    """Whether the devices are (parts of) the host's CPU."""
    return mesh.devices.flat[0].platform == "cpu"


def is_tpu(mesh: Mesh) -> bool:
    """Whether the devices are TPUs."""
    return mesh.devices.flat[0].platform == "tpu"


def is_gpu(mesh: Mesh) -> bool:
    """Whether the devices are GPUs."""
    return mesh.devices.flat[0].platform == "gpu"


def cuda_capability(mesh: Mesh) -> tuple[int, int]:
    """CUDA compute capability of the devices, (9, 0) of an H200; (0, 0) when they are not NVIDIA GPUs."""
    device = mesh.devices.flat[0]
    numbers = re.fullmatch(r"(\d+)\.(\d+)", str(getattr(device, "compute_capability", "")))
    return tuple(map(int, numbers.groups())) if numbers else (0, 0)


def device_kind(mesh: Mesh) -> str:
    """The hardware of the devices by name, such as `TPU v5p`."""
    return mesh.devices.flat[0].device_kind


def partition(axes: Sequence[str | None], layout: str) -> PartitionSpec:
    """The PartitionSpec of an array with these logical axes under the "train" or "rollout" layout."""
    names = [RULES[layout].get(axis) if axis else None for axis in axes]
    while names and names[-1] is None:  # as jit writes specs, so that equal shardings compare equal
        names.pop()
    return PartitionSpec(*names)


def sharding(mesh: Mesh, axes: Sequence[str | None], layout: str) -> NamedSharding:
    """The NamedSharding of an array with these logical axes."""
    return NamedSharding(mesh, partition(axes, layout))


def data_group(mesh: Mesh, index: int) -> Mesh:
    """Sub-mesh (1, model) of one data group; the same PartitionSpecs work on it."""
    return Mesh(mesh.devices[[index]], mesh.axis_names, axis_types=mesh.axis_types)


def view(tree, group: Mesh):
    """Zero-copy view of arrays (not sharded over `data`) on one data group's devices.

    Never donate a view or its parent while the other is in use: both own the same buffers.
    """

    return jax.tree.map(lambda one: on_group(one, group, one.shape, one.sharding.spec), tree)


def on_group(
    array: jax.Array, group: Mesh, shape: tuple[int, ...], spec: PartitionSpec
) -> jax.Array:
    """Zero-copy: the shards of an array that lie on a group's devices, as one array there."""
    shards = {shard.device: shard.data for shard in array.addressable_shards}
    target = NamedSharding(group, spec)
    devices = target.addressable_devices_indices_map(shape)
    return jax.make_array_from_single_device_arrays(
        shape, target, [shards[device] for device in devices]
    )


def part(tree, group: Mesh):
    """Zero-copy view of one data group's part [1, ...] of arrays [G, ...] that are sharded over `data` in axis 0 only.

    A part may be donated; afterwards the whole must not be used.
    """

    def of(array: jax.Array) -> jax.Array:
        spec = PartitionSpec(None, *array.sharding.spec[1:])
        return on_group(array, group, (1, *array.shape[1:]), spec)

    return jax.tree.map(of, tree)


def whole(parts: Sequence, mesh: Mesh):
    """Zero-copy: the arrays [G, ...] over the mesh, assembled from the parts [1, ...] of this process's groups."""

    def of(*arrays: jax.Array) -> jax.Array:
        shape = (mesh.shape["data"], *arrays[0].shape[1:])
        spec = PartitionSpec("data", *arrays[0].sharding.spec[1:])
        shards = [shard.data for array in arrays for shard in array.addressable_shards]
        return jax.make_array_from_single_device_arrays(shape, NamedSharding(mesh, spec), shards)

    return jax.tree.map(of, *parts)
