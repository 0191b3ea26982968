"""Storage for the features of windows, on the host or in a ring on a group's devices; the replay decides what to store.

A store keeps the given rows of harvested values, drops the given windows, and builds packed rows of the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding
from jaxtyping import Array, Int32

from tlt_jax.drafter.windows import Placed, Window
from tlt_jax.spec_decode.decode_state import Features

MOST_WRITES = 4  # writes of a ring in flight; many of them abort the CPU client


class WindowStore(Protocol):
    """Features and states of windows, in the dtype they came in."""

    def bytes_of(self, window: Window, values: Features) -> int:
        """Bytes of the window over all devices of the group, with values of these dtypes and widths."""

    def put(self, windows: Mapping[int, Window], values: Features, limit: int) -> None:
        """Stores rows r of the values as those of windows[r]; never exceeds `limit` bytes."""

    def drop(self, windows: Iterable[Window]) -> None:
        """Drops windows."""

    def gather(self, placed: Sequence[Placed], rows: int, row_tokens: int) -> Features:
        """[R, T, F] and [R, T, D] on the group's devices; zero where nothing is placed."""


def token_bytes(values: Features) -> int:
    """Bytes of one position."""
    return sum(leaf.shape[-1] * leaf.dtype.itemsize for leaf in jax.tree.leaves(values))


def shardings(values: Features) -> tuple[NamedSharding, ...]:
    """The shardings of the leaves."""
    return tuple(leaf.sharding for leaf in jax.tree.leaves(values))


class HostStore:
    """Windows in host memory, trimmed to their sizes.

    `put` waits until the values are copied; they must be addressable by this process.
    """

    def __init__(self) -> None:
        self.held: dict[Window, Features] = {}
        self.shardings: Features | None = None

    def bytes_of(self, window: Window, values: Features) -> int:
        return window.size * token_bytes(values)

    def put(self, windows: Mapping[int, Window], values: Features, limit: int) -> None:
        if not windows:
            return
        self.shardings = jax.tree.map(lambda leaf: leaf.sharding, values)
        values = jax.tree.map(np.asarray, values)
        for row, window in windows.items():
            self.held[window] = jax.tree.map(
                lambda leaf, row=row, size=window.size: leaf[row, :size].copy(), values
            )

    def drop(self, windows: Iterable[Window]) -> None:
        for window in windows:
            del self.held[window]

    def gather(self, placed: Sequence[Placed], rows: int, row_tokens: int) -> Features:
        sources = [self.held[one.piece.window] for one in placed]

        def assemble(*leaves: np.ndarray) -> np.ndarray:
            array = np.zeros((rows, row_tokens, leaves[0].shape[-1]), leaves[0].dtype)
            for ((_, first, size), row, column, _), leaf in zip(placed, leaves, strict=True):
                array[row, column : column + size] = leaf[first : first + size]
            return array

        return jax.device_put(jax.tree.map(assemble, *sources), self.shardings)


class DeviceStore:
    """Windows in arrays [slots, W, F] and [slots, W, D] on the group's devices, sharded as the harvested values.

    The arrays are allocated when the first values arrive, as large as the limit allows, and are written in place. The
    programs do not depend on which windows they write or read: one is compiled for every number of rows that arrive
    together, and one for every (R, T).
    """

    def __init__(self) -> None:
        self.ring: Features | None = None
        self.slots: dict[Window, int] = {}
        self.free: list[int] = []
        self.writes = 0

    def bytes_of(self, window: Window, values: Features) -> int:
        return values.features.shape[1] * token_bytes(values)

    def put(self, windows: Mapping[int, Window], values: Features, limit: int) -> None:
        if not windows:
            return
        if self.ring is None:
            width = values.features.shape[1]
            self.free = list(range(limit // (width * token_bytes(values))))[::-1]
            self.ring = jax.tree.map(
                lambda leaf: jnp.zeros(
                    (len(self.free), *leaf.shape[1:]), leaf.dtype, device=leaf.sharding
                ),
                values,
            )
        slots = np.full(values.features.shape[0], self.nowhere, np.int32)
        for row, window in windows.items():
            slots[row] = self.slots[window] = self.free.pop()
        self.writes += 1
        if self.writes > MOST_WRITES:
            jax.block_until_ready(self.ring)
            self.writes = 1
        self.ring = writer(shardings(self.ring))(self.ring, values, slots)

    @property
    def nowhere(self) -> int:
        """The slot past the last one: out of bounds."""
        return jax.tree.leaves(self.ring)[0].shape[0]

    def drop(self, windows: Iterable[Window]) -> None:
        self.free += [self.slots.pop(window) for window in windows]

    def gather(self, placed: Sequence[Placed], rows: int, row_tokens: int) -> Features:
        places = np.full((2, rows, row_tokens), self.nowhere, np.int32)
        for (window, first, size), row, column, _ in placed:
            there = np.s_[row, column : column + size]
            places[0][there] = self.slots[window]
            places[1][there] = first + np.arange(size)
        return reader(shardings(self.ring))(self.ring, places)


@cache
def writer(placed: tuple[NamedSharding, ...]) -> Callable[..., Features]:
    """The jitted write(ring, values, slots[R]), which donates the ring; rows with a slot out of bounds are dropped."""

    def write(ring: Features, values: Features, slots: Int32[Array, " R"]) -> Features:
        return jax.tree.map(lambda old, new: old.at[slots].set(new, mode="drop"), ring, values)

    return jax.jit(write, donate_argnums=0, out_shardings=tree(placed))


@cache
def reader(placed: tuple[NamedSharding, ...]) -> Callable[..., Features]:
    """The jitted read(ring, places): ring[places[0], places[1]], zero where that is out of bounds."""

    def read(ring: Features, places: Int32[Array, "2 R T"]) -> Features:
        slots, offsets = places
        return jax.tree.map(
            lambda leaf: leaf.at[slots, offsets].get(mode="fill", fill_value=0), ring
        )

    return jax.jit(read, out_shardings=tree(placed))


def tree(placed: tuple[NamedSharding, ...]) -> Features:
    """The shardings of features and, where there are two, of states."""
    features, *states = placed
    return Features(features, states[0] if states else None)


STORES = {"host": HostStore, "device": DeviceStore}
