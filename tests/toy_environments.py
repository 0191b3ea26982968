"""Environments for tests of runs; imported by worker processes."""

from __future__ import annotations

import os
import time
import zlib


class Echo:
    """Says a part of what it heard, up to three times; its reward is a hash of the turn. Some fail, crash or hang."""

    def reset(self, seed: int, prompt: str = "") -> str:
        self.seed, self.turns = seed, 0
        return ""

    def step(self, text: str) -> tuple[str, float, bool, dict[str, float]]:
        self.turns += 1
        kind, number = os.environ.get("TOY_ENVIRONMENT", ""), zlib.crc32(text.encode())
        if kind and number % 5 == 0:
            if kind == "raise":
                raise RuntimeError("this world is broken")
            if kind == "crash":
                os._exit(3)
            time.sleep(60)
        return text[:2] + "1:", number % 100 / 100, self.turns > number % 4, {"heard": len(text)}


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b
