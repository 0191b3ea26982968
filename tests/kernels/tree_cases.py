"""Inputs of tree attention, and attention written out in NumPy."""

from __future__ import annotations

from typing import NamedTuple

import ml_dtypes
import numpy as np


class Case(NamedTuple):
    """Sizes of a call, dtype and committed slots; by the letters of tlt_jax/kernels/tree_attention."""

    K: int
    G: int
    N: int
    E: int
    M: int
    S: int
    dtype: str
    lengths: tuple[int, ...]


class Arguments(NamedTuple):
    """The arrays that `attend` takes."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    ancestors: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    lengths: np.ndarray


def arguments(case: Case, seed: int = 0) -> Arguments:
    """Random arrays; slots past a row's length are large, and a node sees itself or node 0, and others by chance."""
    random, B = np.random.default_rng(seed), len(case.lengths)
    K, G, N, E, M, S, dtype, lengths = case

    def normal(*shape: int) -> np.ndarray:
        return random.normal(size=shape).astype(ml_dtypes.bfloat16 if dtype != "float32" else dtype)

    ancestors = random.random((B, N, M)) < 0.4
    ancestors[:, np.arange(N), np.arange(N) % M] = True
    keys, values = normal(B, K, E, S), normal(B, K, S, E)
    for row, length in enumerate(lengths):
        keys[row, :, :, length:] = 99
        values[row, :, length:] = 99
    return Arguments(
        normal(B, K, G, N, E), normal(B, K, E, M), normal(B, K, M, E), ancestors, keys, values,
        np.asarray(lengths, np.int32),
    )  # fmt: skip


def attend(case: Arguments) -> np.ndarray:
    """Attention in float64, a row at a time."""
    q, k, v, ancestors, keys, values, lengths = case
    result = np.empty(q.shape)
    for b, length in enumerate(lengths):
        slots = np.concatenate([keys[b, :, :, :length], k[b]], axis=-1).astype(np.float64)
        mixed = np.concatenate([values[b, :, :length], v[b]], axis=1).astype(np.float64)
        scores = np.einsum("kgne,kes->kgns", q[b].astype(np.float64), slots) / np.sqrt(q.shape[-1])
        seen = np.concatenate([np.ones((q.shape[3], length), bool), ancestors[b]], axis=-1)
        weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0)
        result[b] = np.einsum("kgns,kse->kgne", weights, mixed) / weights.sum(-1)[..., None]
    return result
