"""The shelf: drafters that finished runs leave in the user's cache, for later runs on the same policy.

An entry is a drafter's directory as serving engines read it, with FACTS: what it is for and what it learned from. A run has one
entry, which it replaces. Any number of processes may read, add and remove entries at the same time: each exists whole or not at
all. A policy is known by what it was made from: the digests of its start policy and of those that this one was trained from.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from itertools import accumulate
from operator import mul
from pathlib import Path
from typing import Any, NamedTuple

from tlt_jax import atomic
from tlt_jax.data import adapter_files
from tlt_jax.errors import ModelError
from tlt_jax.models import hf, hf_drafter
from tlt_jax.models.hf_config import read_json

FACTS = "shelf.json"  # of an entry
LINEAGE = "lineage.json"  # of a run and of a policy that it exports: {"bases": [...]}
MOST_BYTES = 16 << 30  # of all entries; beyond it those go that were not used for longest
ABANDONED_S = 86400.0  # age at which an unfinished directory counts as abandoned by its writer
SAMPLED = 3  # rows of every tensor that the digest of a policy's weights reads

log = logging.getLogger(__name__)


class Shelved(NamedTuple):
    """An entry. `bases`: digests of the policy that its run started from, and of those that this one was trained from.

    `tokenizer`: digest of the vocabulary; `weights`: of the drafter's file; `tokens`: answer tokens that it learned from;
    `steps`: optimizer steps; `data`: what the run trained on; `started_from`: the start drafter, "" for a new one; `run` and
    `policy`: as the user named them; `at`: seconds of time.time; `acceptance`: by depth, each given the depths before, () if
    unknown.
    """

    directory: Path
    bases: tuple[str, ...]
    tokenizer: str
    weights: str
    kind: str
    draft_vocab: int
    captures: tuple[int, ...]
    tokens: int
    steps: int
    data: str
    started_from: str
    run: str
    policy: str
    at: float
    acceptance: tuple[float, ...] = ()

    @property
    def per_round(self) -> float:
        """Expected tokens of a round that drafts one path as deep as acceptance was measured."""
        return 1.0 + sum(accumulate(self.acceptance, mul))

    def is_related(self, bases: Sequence[str]) -> bool:
        """Whether it is for the first of a policy's bases, for one trained from it, or for one that it was trained from."""
        return bases[0] in self.bases or self.bases[0] in bases

    def describe(self) -> str:
        """In a few words: what it learned from, and its acceptance."""
        held = ", ".join(f"{depth:.2f}" for depth in self.acceptance) or "unknown"
        return f"{self.kind}, {self.tokens:,} tokens of {self.data}; acceptance by depth {held}"


def folder_of(folder: str) -> Path | None:
    """The folder of drafter_training.shelf; "": the default one, "off": None."""
    if folder == "off":
        return None
    return Path(folder).expanduser() if folder else Path.home() / ".cache" / "tlt_jax" / "drafters"


def entries(folder: Path) -> Iterator[Shelved]:
    """All entries that can be read, the newest first; others are left out with one line of the log."""
    found = []
    for path in folder.glob(f"*/{FACTS}"):
        if path.parent.suffix == atomic.PARTIAL:
            continue
        try:
            found.append(read(path.parent))
        except FileNotFoundError:  # another process has just removed it
            continue
        except (OSError, ModelError, ValueError, TypeError, KeyError) as error:
            log.warning("%s cannot be read, and is not used: %s", path, error)
    return iter(sorted(found, key=lambda one: one.at, reverse=True))


def read(directory: Path) -> Shelved:
    """An entry. Raises OSError, or ModelError, ValueError, TypeError or KeyError for a damaged one."""
    facts = json.loads((directory / FACTS).read_text(encoding="utf-8"))
    known = {name: facts[name] for name in Shelved._fields[1:-1]}
    known |= {"bases": tuple(map(str, facts["bases"])), "captures": tuple(facts["captures"])}
    if not known["bases"]:
        raise ValueError("it names no base")
    one = Shelved(directory, **known, acceptance=hf_drafter.read_acceptance(directory))
    one.describe()  # the types fit
    return one


def put(folder: Path, name: str, drafter: Path, facts: Mapping[str, Any]) -> None:
    """Adds the drafter of a directory under this name, in the place of an earlier one, and removes the oldest entries.

    `facts`: the fields of Shelved but directory, weights, at and acceptance. Files are linked where the file system can. A
    folder that cannot be written is left alone, with one line.
    """

    def write(at: Path) -> None:
        weights = checksum(drafter / hf_drafter.WEIGHTS)
        known = dict(facts) | {"weights": weights, "at": time.time()}
        at.mkdir(parents=True)
        for path in drafter.iterdir():
            if path.is_file() and path.name != atomic.MADE_FROM:
                try:
                    os.link(path, at / path.name)
                except OSError:
                    shutil.copyfile(path, at / path.name)
        (at / FACTS).write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
        remove(folder / name)

    try:
        atomic.write_directory(folder / name, write)
        prune(folder, time.time())
    except OSError as error:
        reason = error.strerror or error
        log.warning(
            "%s is not kept for later runs: %s cannot be written (%s): set drafter_training.shelf to a folder of yours, or off",
            drafter, folder, reason,
        )  # fmt: skip


def name_of(run: Path) -> str:
    """The name of the entry of a run: that of its folder, and a digest of its path."""
    path = run.absolute()
    return f"{path.name}-{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"


def checksum(path: Path) -> str:
    """SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def touch(one: Shelved) -> None:
    """Notes that an entry was used now: those not used for longest are removed first."""
    with contextlib.suppress(OSError):
        os.utime(one.directory / FACTS)


def prune(folder: Path, now: float) -> None:
    """Removes the entries that were not used for longest until MOST_BYTES are left, and what killed writers left."""
    found = []
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # another process may have removed it
            marker = path / FACTS
            if path.suffix == atomic.PARTIAL:
                if now - path.stat().st_mtime > ABANDONED_S:
                    shutil.rmtree(path, ignore_errors=True)
            elif marker.is_file():
                size = sum(one.stat().st_size for one in path.iterdir())
                found.append((marker.stat().st_mtime, size, path))
    left = MOST_BYTES
    for _, size, path in sorted(found, reverse=True):
        left -= size
        if left < 0:
            remove(path)


def remove(directory: Path) -> None:
    """Removes an entry; a reader sees it whole or not at all."""
    going = atomic.unique(directory, atomic.PARTIAL)
    with contextlib.suppress(OSError):
        directory.rename(going)
        shutil.rmtree(going, ignore_errors=True)


def weights_digest(directory: Path) -> str:
    """A digest of a policy's weights: names, shapes and dtypes of all tensors, and some rows of each.

    Reads a small part of the files, and does not depend on how tensors are spread over them. Of a directory of adapters: of
    the adapters and their base. Raises ModelError.
    """
    found = hashlib.sha256()
    with ExitStack() as stack:
        if adapter_files.is_adapter(directory):
            found.update(weights_digest(hf.resolve(adapter_files.base_of(directory))).encode())
            stored = hf.slices(directory / adapter_files.WEIGHTS, stack)
        else:
            stored = hf.open_tensors(directory, stack)
        for name, tensor in sorted(stored.items()):
            shape = tensor.get_shape()
            found.update(f"{name} {shape} {tensor.get_dtype()}".encode())
            size = shape[0] if shape else 0
            places = {size * part // SAMPLED for part in range(SAMPLED)} if len(shape) > 1 else {0}
            for place in sorted(places):
                row = slice(place, place + 1) if len(shape) > 1 else slice(None)
                found.update(tensor[row].tobytes() if size else b"")
    return found.hexdigest()


def lineage(directory: Path) -> tuple[str, ...]:
    """The bases that a run or an exported policy records; () without a record, or with a damaged one, which the log says."""
    try:
        raw = read_json(directory / LINEAGE)
    except ModelError as error:
        log.warning("%s", error)
        return ()
    bases = [] if raw is None else raw.get("bases")
    if not isinstance(bases, list) or not all(isinstance(one, str) for one in bases):
        log.warning("%s lists no bases, and is not used", directory / LINEAGE)
        return ()
    return tuple(bases)


def vocabulary_digest(tokenizer: Any) -> str:
    """A digest of the tokens and their ids; "" without a tokenizer (None)."""
    if tokenizer is None:
        return ""
    known = sorted(tokenizer.get_vocab().items(), key=lambda one: (one[1], one[0]))
    return hashlib.sha256(json.dumps(known).encode()).hexdigest()
