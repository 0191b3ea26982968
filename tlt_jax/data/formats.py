"""Rows of JSONL, JSON, CSV and Parquet files, and the values in their columns, nested ones included.

Knows no meaning of columns, no tokenizer and no JAX.
"""

from __future__ import annotations

import codecs
import csv
import io
import json
import re
from collections.abc import Iterable, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from tlt_jax.data.problems import Problems

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
KINDS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
ABSENT = object()  # the value of a column that a row does not have
LONE = re.compile("[\ud800-\udfff]")  # half of a surrogate pair: json.loads joins whole ones


def cell(row: Mapping[str, Any], column: str) -> Any:
    """The value of a column, or ABSENT.

    A dotted name that is no column is a path into nested objects: reward_model.ground_truth.
    """
    if column in row:
        return row[column]
    head, *path = column.split(".")
    value = row.get(head, ABSENT)
    for name in path:
        value = value.get(name, ABSENT) if isinstance(value, Mapping) else ABSENT
    return value


def columns(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """The names that `cell` takes, of all rows, in their order; those of nested objects are dotted."""
    found: dict[str, None] = {}
    for row in rows:
        for name, value in row.items():
            if isinstance(value, Mapping) and value:
                found |= dict.fromkeys(f"{name}.{inner}" for inner in columns([value]))
            else:
                found[name] = None
    return list(found)


def text_of(value: Any) -> str:
    """A value as text; a float without exponent: 1e+22 is 10000000000000000000000."""
    return format(Decimal(str(value)), "f") if isinstance(value, float) else str(value)


def lone_surrogate(text: str) -> str:
    """The first lone surrogate of a text, which no tokenizer and no file takes, and its place; empty without one."""
    found = LONE.search(text)
    return f"\\u{ord(found[0]):x} at character {found.start() + 1}" if found else ""


def read(path: Path, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    """(line or row number from 1, row) of one file.

    Records lines that are not valid rows as problems.
    """
    if path.suffix not in SUFFIXES:
        problems.add(str(path), None, f"unknown kind of file {path.suffix!r}", f"use {KINDS}")
        return []
    if path.suffix == ".parquet":
        return _read_parquet(path, problems)
    data = path.read_bytes()
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        problems.add(str(path), None, "not UTF-8 but UTF-16", "save the file as UTF-8")
        return []
    data = data.removeprefix(codecs.BOM_UTF8)
    if path.suffix == ".csv":
        return _read_csv(path, data, problems)
    if path.suffix == ".json" and data.lstrip()[:1] == b"[":
        return _read_json(path, data, problems)
    return _read_jsonl(path, data, problems)


def _read_jsonl(path: Path, data: bytes, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    rows, fix = [], "write one JSON object per line"
    for number, raw in enumerate(data.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            row = json.loads(raw.decode("utf-8"))
        except UnicodeDecodeError as error:
            byte = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
            problems.add(str(path), number, "not UTF-8", "save the file as UTF-8", byte)
        except json.JSONDecodeError as error:
            detail = f"{error.msg} at column {error.colno}"
            problems.add(str(path), number, "bad JSON", fix, detail)
        except (RecursionError, ValueError) as error:
            problems.add(str(path), number, "bad JSON", fix, _why(error))
        else:
            rows.append((number, row))

    if not data.strip():
        problems.add(str(path), None, "the file is empty", fix)
    return _objects(path, rows, problems)


def _read_json(path: Path, data: bytes, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    """The rows of a JSON list, numbered from 1."""
    try:
        rows = json.loads(data.decode("utf-8"))
    except UnicodeDecodeError as error:
        problems.add(str(path), None, "not UTF-8", "save the file as UTF-8", str(error))
    except (RecursionError, ValueError) as error:
        problems.add(str(path), None, "bad JSON", "write a list of JSON objects", _why(error))
    else:
        if not rows:
            problems.add(str(path), None, "the file is empty", "write at least one row")
        return _objects(path, list(enumerate(rows, 1)), problems)
    return []


def _why(error: Exception) -> str:
    """Why JSON is not read: its form, its depth, or a number of too many digits."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _objects(
    path: Path, rows: Iterable[tuple[int, Any]], problems: Problems
) -> list[tuple[int, dict[str, Any]]]:
    """The rows that are JSON objects; records the others as problems."""
    kept = []
    for number, row in rows:
        if isinstance(row, dict):
            kept.append((number, row))
        else:
            kind = type(row).__name__
            fix = "write {column: value, ...}"
            problems.add(str(path), number, "not a JSON object", fix, kind)
    return kept


def _read_csv(path: Path, data: bytes, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    """The rows below a header, numbered by their last line; every value is text, as it is written."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError as error:
        problems.add(str(path), None, "not UTF-8", "save the file as UTF-8", str(error))
        return []
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    rows, lines = [], csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(lines, [])
        if len(set(header)) < len(header):
            names = ", ".join(sorted({repr(one) for one in header if header.count(one) > 1}))
            problems.add(str(path), 1, "a column is named twice", "rename one", names)
        cells: list[str] = []
        for cells in filter(None, lines):
            if len(cells) == len(header):
                rows.append((lines.line_num, dict(zip(header, cells, strict=True))))
            else:
                detail = f"{len(cells)} values, and the header has {len(header)} columns"
                fix = "quote values that hold commas or line ends"
                problems.add(str(path), lines.line_num, "not as long as the header", fix, detail)
    except csv.Error as error:
        fix = "quote values that hold quotes, and double these"
        problems.add(str(path), lines.line_num, "bad CSV", fix, str(error))
    else:
        if not cells:
            problems.add(str(path), None, "the file is empty", "write a header, and one row a line")
    return rows


def _read_parquet(path: Path, problems: Problems) -> list[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        rows = pyarrow.parquet.ParquetFile(path).read().to_pylist()
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
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
