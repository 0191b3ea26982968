"""Rewards for the tests of the loop; imported by the scoring processes, so it imports no JAX."""

from __future__ import annotations

import os
import time
import zlib


def digest(prompt: str, completion: str, row: dict) -> float:
    """A number in [0, 1) that depends on every character: answers to one prompt rarely tie."""
    time.sleep(float(os.environ.get("TOY_REWARD_SECONDS", 0)))
    return zlib.crc32(completion.encode()) % 1000 / 1000


def trouble(prompt: str, completion: str, row: dict) -> float:
    """Raises or hangs, as the row's answer says."""
    if row["answer"] == "hang":
        time.sleep(60)
    raise RuntimeError("a reward that never works")


def lost(prompt: str, completion: str, row: dict) -> float:
    """Raises whatever the answer is."""
    raise KeyError("lost")


def digits(prompt: str, completion: str, row: dict) -> float:
    """1 for an answer of digits alone."""
    return float(completion.isdigit())


def often(prompt: str, completion: str, row: dict) -> float:
    """0 or 1, and for half of the prompts the same for all answers; each takes another time."""
    time.sleep(
        float(os.environ.get("TOY_REWARD_SECONDS", 0)) * (zlib.crc32(completion.encode()) % 7)
    )
    is_alike = zlib.crc32(prompt.encode()) % 2
    return float(is_alike or zlib.crc32(completion.encode()) % 2)


if os.environ.get("JAX_PROCESS_ID") == "1" and os.environ.get("TOY_REWARD_RAISES"):
    raise ImportError("only process 0 has this reward")
