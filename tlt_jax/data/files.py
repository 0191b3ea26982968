"""Rows of JSONL and Parquet files; all their problems are reported at once.

It knows no column's meaning, tokenizer or JAX.
"""

from __future__ import annotations

import codecs
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from tlt_jax.config.parse import HUB_ID
from tlt_jax.errors import DataError

SUFFIXES = (".jsonl", ".parquet")
SHOWN_PER_KIND, SHOWN = 3, 20
HUB_URL = "hf://datasets/"


class Problems:
    """Collected problems of the data; `stop_if_any` raises them as one error."""

    def __init__(self):
        self.groups: dict[tuple[str, str], list[str]] = defaultdict(list)

    def add(self, place: str, line: int | None, what: str, fix: str, detail: str = "") -> None:
        """Records one problem; those of one place and kind are listed together."""
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
    """The files of a local path, folder, glob, or data set of the Hugging Face hub.

    The latter as owner/name or hf://datasets/owner/name/PATTERN. None found is a problem.
    """
    path = Path(source)
    if path.is_file():
        return [path]
    if path.is_dir():
        return _in_folder(path, "**/*", source, knob, problems)
    if source.startswith(HUB_URL) or (HUB_ID.fullmatch(source) and path.suffix not in SUFFIXES):
        return _from_hub(source, knob, problems)
    if any(c in source for c in "*?["):
        return _in_folder(
            Path(path.anchor or "."), str(path.relative_to(path.anchor)), source, knob, problems
        )
    problems.add(source, None, "no such file or folder", f"correct {knob}")
    return []


def read(path: Path, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    """(line or row number from 1, row) of one file.

    Lines that are not valid rows are recorded as problems.
    """
    if path.suffix == ".parquet":
        return _read_parquet(path, problems)
    if path.suffix == ".jsonl":
        return _read_jsonl(path, problems)
    problems.add(
        str(path), None, f"unknown kind of file {path.suffix!r}", f"use {' or '.join(SUFFIXES)}"
    )
    return []


def _in_folder(
    folder: Path, pattern: str, source: str, knob: str, problems: Problems
) -> list[Path]:
    files = sorted(p for p in folder.glob(pattern) if p.suffix in SUFFIXES and p.is_file())
    if not files:
        problems.add(source, None, f"no {' or '.join(SUFFIXES)} file there", f"correct {knob}")
    return files


def _from_hub(source: str, knob: str, problems: Problems) -> list[Path]:
    import huggingface_hub
    from huggingface_hub import errors

    owner, name, *rest = source.removeprefix(HUB_URL).split("/")
    pattern = "/".join(rest) or "**/*"
    wanted = [pattern] if rest else [f"*{suffix}" for suffix in SUFFIXES]
    try:
        folder = huggingface_hub.snapshot_download(
            f"{owner}/{name}", repo_type="dataset", allow_patterns=wanted
        )
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
            "no local path, and the hub does not give it",
            f"correct {knob} or go online",
            reason,
        )
        return []

    return _in_folder(Path(folder), pattern, source, knob, problems)


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
