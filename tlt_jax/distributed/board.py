"""The board: small values that the processes of a job share; knows no rollout."""

from __future__ import annotations

import threading
from typing import Any, Protocol

from jax.errors import JaxRuntimeError


class Board(Protocol):
    """Counters and texts under keys like `rollout/3/claimed`, the same for all processes of a job.

    Every call is atomic, and costs one message to the job's coordination service: 0.1 to 2 ms.
    """

    def increment(self, key: str, by: int = 1) -> int:
        """Adds to a counter that starts at 0; returns the new value."""

    def counters(self, prefix: str) -> dict[str, int]:
        """The counters below a prefix that ends in `/`, by key."""

    def first(self, key: str, text: str) -> str:
        """Writes the text unless the key has one; returns the key's text, which never changes afterwards."""

    def write(self, key: str, text: str) -> None:
        """Writes the text, replacing an earlier one."""

    def texts(self, prefix: str) -> dict[str, str]:
        """The texts below a prefix that ends in `/`, by key."""

    def delete(self, prefix: str) -> None:
        """Deletes all keys below a prefix that ends in `/`."""


class LocalBoard:
    """The board of a single process; thread-safe."""

    def __init__(self) -> None:
        self.values: dict[str, str] = {}
        self.lock = threading.RLock()

    def increment(self, key: str, by: int = 1) -> int:
        with self.lock:
            value = int(self.values.get(key, 0)) + by
            self.values[key] = str(value)
        return value

    def counters(self, prefix: str) -> dict[str, int]:
        return {key: int(value) for key, value in self.texts(prefix).items()}

    def first(self, key: str, text: str) -> str:
        with self.lock:
            return self.values.setdefault(key, text)

    def write(self, key: str, text: str) -> None:
        with self.lock:
            self.values[key] = text

    def texts(self, prefix: str) -> dict[str, str]:
        with self.lock:
            return {key: text for key, text in self.values.items() if key.startswith(prefix)}

    def delete(self, prefix: str) -> None:
        with self.lock:
            for key in self.texts(prefix):
                del self.values[key]


class ServiceBoard:
    """The board on the coordination service of `jax.distributed`; `client` is its client.

    `root`: a prefix that ends in `/`, under which this board is alone; its users do not see it.
    """

    def __init__(self, client: Any, root: str = ""):
        self.client, self.root = client, root

    def increment(self, key: str, by: int = 1) -> int:
        return self.client.key_value_increment(self.root + key, by)

    def counters(self, prefix: str) -> dict[str, int]:
        return {key: int(value) for key, value in self.texts(prefix).items()}

    def first(self, key: str, text: str) -> str:
        try:
            self.client.key_value_set(self.root + key, text)
        except JaxRuntimeError as error:
            if "ALREADY_EXISTS" not in str(error):
                raise
            return self.client.key_value_try_get(self.root + key)
        return text

    def write(self, key: str, text: str) -> None:
        self.client.key_value_set(self.root + key, text, allow_overwrite=True)

    def texts(self, prefix: str) -> dict[str, str]:
        found = self.client.key_value_dir_get(self.root + prefix)
        return {key.removeprefix(self.root): text for key, text in found}

    def delete(self, prefix: str) -> None:
        self.client.key_value_delete(self.root + prefix)
