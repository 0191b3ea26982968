"""Environments as users bring them, one for each interface, and misbehaving ones; imported by workers, so without JAX."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any


class Gymnasium:
    """Five values, and a seed; as gymnasium, GEM and most others."""

    def reset(self, *, seed=None, options=None):
        self.left = 2
        return f"seed {seed}", {"start": 1, "text": "no number"}

    def step(self, action):
        self.left -= 1
        return f"{action}, {self.left} left", 0.25, self.left == 0, False, {"left": self.left}


class Truncating(Gymnasium):
    def step(self, action):
        return "", 0, False, True, {}


class Tunix:
    """Four values, and no argument of reset."""

    def reset(self):
        return {}, {"start": 2.0}

    def step(self, action):
        return [{"role": "user", "content": action}], 1, action == "end", {}


class Columns:
    """A reset that takes columns of the row, and returns no info."""

    def reset(self, question, seed=0):
        return [
            {"role": "system", "content": "s"},
            {"role": "user", "content": f"{question} {seed}"},
        ]

    def step(self, action):
        return None, None, True, {}


class Everything(Columns):
    def reset(self, **row):
        return " ".join(sorted(row))


class SkyRL:
    """SkyRL-Gym: the row at construction, messages in and out."""

    def __init__(self, env_config=None, extras=None):
        self.extras, self.is_closed = extras or {}, False

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": self.extras["hint"]}], {"hints": 1}

    def step(self, action):
        done = action == self.extras["answer"]
        said = [] if done else [{"role": "user", "content": "again"}]
        return {"observations": said, "reward": float(done), "done": done, "metadata": {"n": 3}}


class Replacing(SkyRL):
    def init(self, prompt):
        return [{"role": "user", "content": "another prompt"}], {}


@dataclass
class StepResult:
    observation: Any
    reward: float | None = None
    done: bool = False


def openenv(size: int = 1):
    """A synchronous client of OpenEnv, made by a function."""
    return SimpleClient(size)


class SimpleClient:
    def __init__(self, size):
        self.size = size

    def reset(self, **arguments):
        return StepResult(f"size {self.size}")

    def step(self, action):
        return StepResult(action.upper(), 0.5, action == "stop")


class Asynchronous:
    """Coroutines that share an event loop, which also runs between turns."""

    async def reset(self, seed):
        self.loop, self.ticks = asyncio.get_running_loop(), 0
        self.ticking = asyncio.create_task(self.tick())
        return "go"

    async def tick(self):
        while True:
            await asyncio.sleep(0.01)
            self.ticks += 1

    async def step(self, action):
        return f"{self.loop is asyncio.get_running_loop()}", float(self.ticks > 0), True, {}

    async def close(self):
        self.ticking.cancel()


class Counter:
    """TRL's environment_factory: methods are tools."""

    def reset(self, start: int = 0, **row) -> str | None:
        self.value = start
        return f"at {start}" if start else None

    def add(self, amount: int, times: int = 1) -> str:
        """Adds to the counter.

        Args:
            amount: what is added
            times: how often
        """
        self.value += amount * times
        return str(self.value)

    async def read(self) -> dict:
        """Reads the counter."""
        return {"value": self.value}

    def get_reward(self) -> float:
        return self.value / 10

    def _secret(self):
        return 0

    @property
    def broken(self):
        raise RuntimeError("properties are not read")


def double(number: float) -> float:
    """Doubles a number.

    Args:
        number: the number
    """
    return 2 * number


def explode(reason: str) -> str:
    """Raises.

    Args:
        reason: why
    """
    raise KeyError(reason)


def untyped(number):
    """Doubles a number.

    Args:
        number: the number
    """
    return 2 * number


def undocumented(number: int) -> int:
    return number


class Stepless:
    def reset(self):
        return ""


class Untyped:
    def reset(self):
        return ""

    def add(self, amount):
        """Adds to the counter."""


class Startless:
    def step(self, action):
        return "", 0, True, {}


def broken():
    raise OSError("no server at port 1\nmore")


def absent():
    import a_package_that_is_absent  # noqa: F401


class Odd(Gymnasium):
    """Returns what the action names."""

    RESULTS = {
        "three": ("", 0, True),
        "nothing": None,
        "nan": ("", float("nan"), True, {}),
        "word": ("", "1.0", True, {}),
        "done": ("", 0.0, "yes", {}),
        "said": (42, 0.0, True, {}),
        "roleless": ([{"content": "x"}], 0.0, True, {}),
        "dict": {"observation": "", "reward": 0},
    }

    def step(self, action):
        return self.RESULTS[action]


class Trouble:
    """Does what the action says."""

    def __init__(self, folder=""):
        self.folder = folder

    def reset(self, name="", opening="", **row):
        self.name = name
        if opening:
            self.step(opening)
        return "go"

    def step(self, action):
        word, _, number = action.partition(" ")
        if word == "sleep":
            time.sleep(float(number))
        elif word == "hold":  # a regular expression that never ends, and lets no other thread run
            re.match(r"(a+)+$", "a" * 64 + "b")
        elif word == "child":
            subprocess.Popen(["sleep", "1000"])
        elif word == "die":
            os._exit(3)
        elif word == "leave":
            sys.exit()
        elif word == "raise":
            raise ValueError("first\nlost")
        elif word == "long":
            return "x" * 2**21, 0.0, False, {}
        elif word == "set":
            return [{"role": "user", "content": {1}}], 0.0, False, {}
        heavy = {"jax", "flax", "torch"} & {name.partition(".")[0] for name in sys.modules}
        return f"{os.getpid()}", 1.0, action == "end", {"heavy": len(heavy)}

    def close(self):
        if self.folder:
            (Path(self.folder) / str(self.name)).touch()


def namespace():
    return SimpleNamespace(reset=lambda: "a", step=lambda action: ("", 1, True, {}))
