"""Rows of JSONL and Parquet files; all problems are reported at once.

Knows no meaning of columns, no tokenizer and no JAX.
"""

from __future__ import annotations

import codecs
import json
import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

from tlt_jax.config.parse import HUB_ID
from tlt_jax.errors import DataError

SUFFIXES = (".jsonl", ".parquet")
SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval", "evaluation")
# train-00000-of-00002, train-0
SHARD = re.compile(
    rf"(.+?)-[0-9]{{5}}-of-[0-9]{{5}}(?:-[0-9a-f]+)?|({'|'.join(SPLITS)})[-_.][0-9]+"
)
HUB_SET = re.compile(rf"{HUB_ID.pattern}(?:@[\w./-]+)?(?::[\w./-]+)?")  # owner/name@revision:part
SHOWN_PER_KIND, SHOWN = 3, 20
HUB_URL = "hf://datasets/"


class Problems:
    """Collects problems of the data; `stop_if_any` raises them as one error."""

    def __init__(self):
        self.groups: dict[tuple[str, str], list[str]] = defaultdict(list)

    def add(self, place: str, line: int | None, what: str, fix: str, detail: str = "") -> None:
        """Records one problem; problems of one place and kind are listed together."""
        where = place if line is None else f"{place}:{line}"
        self.groups[place, what].append(f"{where}: {what}{f' ({detail})' if detail else ''}: {fix}")

    def stop_if_any(self) -> None:
        """Raises DataError with at most 20 of the problems and their total, if any."""
        if not self.groups:
            return

        total = sum(len(lines) for lines in self.groups.values())
        shown: list[str] = []
        for (_, what), lines in self.groups.items():
            room = min(
                SHOWN_PER_KIND if len(self.groups) > 1 else SHOWN, SHOWN - len(shown), len(lines)
            )
            shown += lines[:room]
            if 0 < room < len(lines):
                shown[-1] += f" [and {len(lines) - room} more: {what}]"

        head = f"the data has {total} problem{'s' if total > 1 else ''}"
        raise DataError(
            "\n  ".join([head + (f", {len(shown)} shown" if len(shown) < total else ""), *shown])
        )


def locate(source: str, knob: str, problems: Problems) -> list[Path]:
    """The files of a local path, folder, glob, or data set of the Hugging Face hub; from folders and data sets, one part.

    A data set is owner/name, owner/name@REVISION, or hf://datasets/owner/name/PATTERN. Its parts are splits, possibly of
    subsets ("main/train", "test"), given by the names of its files: owner/name:main/train and folder:train select one.
    Records a problem when no part matches, or several without a selection.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _in_folder(path, "", source, knob, problems)
    place, colon, part = source.rpartition(":")
    if colon and Path(place).is_dir():
        return _in_folder(Path(place), part, source, knob, problems)
    if source.startswith(HUB_URL):
        owner, name, *rest = source.removeprefix(HUB_URL).split("/")
        return _from_hub(f"{owner}/{name}", "/".join(rest), "", source, knob, problems)
    if HUB_SET.fullmatch(source) and path.suffix not in SUFFIXES:
        name, _, part = source.partition(":")
        return _from_hub(name, "", part, source, knob, problems)
    if any(c in source for c in "*?["):
        found = _data_files(Path(path.anchor or "."), str(path.relative_to(path.anchor)))
        return found or _none(source, knob, problems)
    problems.add(source, None, "no such file or folder", f"correct {knob}")
    return []


def read(path: Path, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    """(line or row number from 1, row) of one file.

    Records lines that are not valid rows as problems.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path, problems)
    if path.suffix == ".jsonl":
        return _read_jsonl(path, problems)
    problems.add(
        str(path), None, f"unknown kind of file {path.suffix!r}", f"use {' or '.join(SUFFIXES)}"
    )
    return []


def part_of(name: PurePosixPath) -> str:
    """The subset and split in the name of a data file: "main/train", "train", or "" when it names no split.

    Follows the hub: main/train-00000-of-00002.parquet, data/train.jsonl, main/train/0000.parquet.
    """
    shard = SHARD.fullmatch(name.stem)
    split, folder = (shard[1] or shard[2]) if shard else name.stem, name.parent
    if not shard and split.lower() not in SPLITS:
        split, folder = folder.name, folder.parent
        if split.lower() not in SPLITS:
            return ""
    subset = "" if str(folder) in (".", "data") else f"{folder}/"
    return subset + split


def _choose(
    names: Iterable[PurePosixPath], part: str, source: str, knob: str, problems: Problems
) -> list[PurePosixPath]:
    """The sorted files of one part; `part`: its name, split or subset. Records a problem for no or several parts."""
    parts: dict[str, list[PurePosixPath]] = defaultdict(list)
    for name in sorted(names):
        found = part_of(name)
        if not part or part == found or part in found.split("/", 1):
            parts[found].append(name)
    if len(parts) == 1:
        return next(iter(parts.values()))
    if not parts:
        problems.add(source, None, f"no {' or '.join(SUFFIXES)} file there", f"correct {knob}")
    else:
        listed = ", ".join(name or "files of no split" for name in parts)
        place = source.removesuffix(f":{part}") if part else source
        first = f"{place}:{max(parts)}"
        what = f"{len(parts)} splits, and none is selected"
        problems.add(source, None, what, f"write one of them, as {first}", listed)
    return []


def _in_folder(folder: Path, part: str, source: str, knob: str, problems: Problems) -> list[Path]:
    names = [PurePosixPath(path.relative_to(folder)) for path in _data_files(folder, "**/*")]
    return [folder / name for name in _choose(names, part, source, knob, problems)]


def _data_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(p for p in folder.glob(pattern) if p.suffix in SUFFIXES and p.is_file())


def _none(source: str, knob: str, problems: Problems) -> list[Path]:
    problems.add(source, None, f"no {' or '.join(SUFFIXES)} file there", f"correct {knob}")
    return []


def _from_hub(
    name: str, pattern: str, part: str, source: str, knob: str, problems: Problems
) -> list[Path]:
    """The files of a data set (owner/name or owner/name@revision) that match a pattern, or of one part.

    Downloads only these.
    """
    import huggingface_hub
    from huggingface_hub import errors

    repo, _, revision = name.partition("@")
    where = {"repo_type": "dataset", "revision": revision or None}
    try:
        if pattern:
            folder = huggingface_hub.snapshot_download(repo, allow_patterns=[pattern], **where)
            return _data_files(Path(folder), pattern) or _none(source, knob, problems)
        try:
            listed = huggingface_hub.list_repo_files(repo, **where)
        except (errors.HfHubHTTPError, errors.HFValidationError):
            raise
        except Exception:
            # No network, an error of any HTTP library that the client uses: search the files of earlier downloads.
            folder = huggingface_hub.snapshot_download(repo, local_files_only=True, **where)
            return _in_folder(Path(folder), part, source, knob, problems)
        names = [PurePosixPath(one) for one in listed if PurePosixPath(one).suffix in SUFFIXES]
        chosen = list(map(str, _choose(names, part, source, knob, problems)))
        if not chosen:
            return []
        folder = huggingface_hub.snapshot_download(repo, allow_patterns=chosen, **where)
    except (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        OSError,
    ) as error:
        reason = str(error).strip().splitlines()[0]
        problems.add(
            source,
            None,
            "neither a local path nor available on the hub",
            f"correct {knob} or go online",
            reason,
        )
        return []
    return [Path(folder) / one for one in chosen]


def _read_jsonl(path: Path, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    rows = []
    data = path.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        problems.add(str(path), None, "not UTF-8 but UTF-16", "save the file as UTF-8")
        return rows

    for number, raw in enumerate(data.removeprefix(codecs.BOM_UTF8).split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            byte = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
            problems.add(str(path), number, "not UTF-8", "save the file as UTF-8", byte)
        except json.JSONDecodeError as error:
            detail = f"{error.msg} at column {error.colno}"
            problems.add(str(path), number, "bad JSON", "write one JSON object per line", detail)
        except RecursionError:
            problems.add(
                str(path), number, "bad JSON", "write one JSON object per line", "nested too deeply"
            )
        else:
            if isinstance(row, dict):
                rows.append((number, row))
            else:
                problems.add(
                    str(path),
                    number,
                    "not a JSON object",
                    "write {column: value, ...}",
                    type(row).__name__,
                )

    if not data.strip():
        problems.add(str(path), None, "the file is empty", "write one JSON object per line")
    return rows


def _read_parquet(path: Path, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.ParquetFile(path).read().to_pylist()
    except (pyarrow.ArrowException, OSError) as error:
        problems.add(
            str(path),
            None,
            "not a readable Parquet file",
            "write it again",
            str(error).splitlines()[0],
        )
        return []
    if not rows:
        problems.add(str(path), None, "the file is empty", "write at least one row")
    return list(enumerate(rows, 1))
