"""The rows of data files: where files are, their formats, the columns that a run reads, and every problem with its line."""

from __future__ import annotations

import codecs
import csv
import io
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from functools import partial
from itertools import takewhile
from pathlib import Path, PurePosixPath
from typing import Any

from tlt_jax.config import Config, extension, parse
from tlt_jax.config.parse import HUB_ID
from tlt_jax.config.task import Data
from tlt_jax.data import answers
from tlt_jax.errors import ConfigError, DataError

SHOWN_PER_KIND, SHOWN, SHOWN_LINES = 3, 20, 3


class Problems:
    """Collects problems of the data; `stop_if_any` raises them as one error.

    The same problem in several lines of a file is one problem.
    """

    def __init__(self):
        # (place, kind) -> text of a problem -> its lines
        self.groups: dict[tuple[str, str], dict[str, list[int | None]]] = defaultdict(dict)

    def add(self, place: str, line: int | None, what: str, fix: str, detail: str = "") -> None:
        """Records one problem; problems of one place and kind are listed together."""
        text = f"{what}{f' ({detail})' if detail else ''}: {fix}"
        self.groups[place, what].setdefault(text, []).append(line)

    def stop_if_any(self) -> None:
        """Raises DataError with at most 20 of the problems and their total, if any."""
        if not self.groups:
            return

        total = sum(len(texts) for texts in self.groups.values())
        most, shown = SHOWN_PER_KIND if len(self.groups) > 1 else SHOWN, []
        for (place, what), texts in self.groups.items():
            found = [_spell(place, text, lines) for text, lines in texts.items()]
            room = min(most, SHOWN - len(shown), len(found))
            shown += found[:room]
            if 0 < room < len(found):
                shown[-1] += f" [and {len(found) - room} more: {what}]"

        head = f"the data has {total} problem{'s' if total > 1 else ''}"
        raise DataError(
            "\n  ".join([head + (f", {len(shown)} shown" if len(shown) < total else ""), *shown])
        )


def _spell(place: str, text: str, lines: Sequence[int | None]) -> str:
    """A problem with its first line, and the next ones of the others."""
    where = place if lines[0] is None else f"{place}:{lines[0]}"
    if len(lines) == 1:
        return f"{where}: {text}"
    named = ", ".join(map(str, lines[1 : SHOWN_LINES + 1]))
    rest = len(lines) - 1 - SHOWN_LINES
    return f"{where}: {text} [also in {named}{f' and {rest:,} more' if rest > 0 else ''}]"


SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
KINDS = f"{', '.join(SUFFIXES[:-1])} or {SUFFIXES[-1]}"
NO_FILE = f"no {KINDS} file there"
ABSENT = object()  # the value of a column that a row does not have
UNREFERENCED = {"environment", "format"}  # rewards that read no reference answer
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


Numbered = list[tuple[int, dict[str, Any]]]  # (line or row number from 1, row)


def read_file(path: Path, problems: Problems) -> Numbered:
    """The rows of one file with their numbers. Records lines that are not valid rows as problems."""
    problem, kind = partial(problems.add, str(path)), path.suffix
    if kind not in SUFFIXES:
        problem(None, f"unknown kind of file {kind!r}", f"use {KINDS}")
        return []
    if kind == ".parquet":
        rows = _read_parquet(path, problem)
    else:
        data = path.read_bytes()
        if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
            problem(None, "not UTF-8 but UTF-16", "save the file as UTF-8")
            return []
        data = data.removeprefix(codecs.BOM_UTF8)
        if kind != ".csv" and not (kind == ".json" and data.lstrip()[:1] == b"["):
            rows = _read_jsonl(data, problem)
        else:
            try:
                text = data.decode("utf-8")
            except UnicodeDecodeError as error:
                problem(None, "not UTF-8", "save the file as UTF-8", str(error))
                return []
            rows = (_read_csv if kind == ".csv" else _read_json)(text, problem)
    if not rows and all(place != str(path) for place, _ in problems.groups):
        problem(None, "the file is empty", "write at least one row")
    return rows


def _read_jsonl(data: bytes, problem: Callable[..., None]) -> Numbered:
    rows = []
    for number, raw in enumerate(data.split(b"\n"), 1):
        if not raw.strip():
            continue
        try:
            rows.append((number, json.loads(raw.decode("utf-8"))))
        except UnicodeDecodeError as error:
            byte = f"byte 0x{raw[error.start]:02x} at column {error.start + 1}"
            problem(number, "not UTF-8", "save the file as UTF-8", byte)
        except (RecursionError, ValueError) as error:
            is_form = isinstance(error, json.JSONDecodeError)
            detail = f"{error.msg} at column {error.colno}" if is_form else _why(error)
            problem(number, "bad JSON", "write one JSON object per line", detail)
    return _objects(rows, problem)


def _read_json(text: str, problem: Callable[..., None]) -> Numbered:
    """The rows of a JSON list, numbered from 1."""
    try:
        return _objects(enumerate(json.loads(text), 1), problem)
    except (RecursionError, ValueError) as error:
        problem(None, "bad JSON", "write a list of JSON objects", _why(error))
    return []


def _why(error: Exception) -> str:
    """Why JSON is not read: its form, its depth, or a number of too many digits."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def _objects(rows: Iterable[tuple[int, Any]], problem: Callable[..., None]) -> Numbered:
    """The rows that are objects; records the others as problems."""
    kept = []
    for number, row in rows:
        if isinstance(row, dict):
            kept.append((number, row))
        else:
            fix = "write {column: value, ...}"
            problem(number, "not an object", fix, type(row).__name__)
    return kept


def _read_csv(text: str, problem: Callable[..., None]) -> Numbered:
    """The rows below a header, numbered by their last line; every value is text, as it is written."""
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    rows, lines = [], csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = next(lines, [])
        if len(set(header)) < len(header):
            names = ", ".join(sorted({repr(one) for one in header if header.count(one) > 1}))
            problem(1, "a column is named twice", "rename one", names)
        for cells in filter(None, lines):
            if len(cells) == len(header):
                rows.append((lines.line_num, dict(zip(header, cells, strict=True))))
            else:
                detail = f"{len(cells)} values, and the header has {len(header)} columns"
                fix = "quote values that hold commas or line ends"
                problem(lines.line_num, "not as long as the header", fix, detail)
    except csv.Error as error:
        fix = "quote values that hold quotes, and double these"
        problem(lines.line_num, "bad CSV", fix, str(error))
    return rows


def _read_parquet(path: Path, problem: Callable[..., None]) -> Numbered:
    import pyarrow
    import pyarrow.parquet

    try:
        return list(enumerate(pyarrow.parquet.ParquetFile(path).read().to_pylist(), 1))
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0]
        problem(None, "not a readable Parquet file", "write it again", reason)
    return []


# Files of these names describe a data set; `datasets` writes them next to the rows.
DESCRIPTIONS = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
SPLITS = ("train", "training", "test", "validation", "valid", "val", "dev", "eval", "evaluation")
# train-00000-of-00002, train-0
SHARD = re.compile(
    rf"(.+?)-[0-9]{{5}}-of-[0-9]{{5}}(?:-[0-9a-f]+)?|({'|'.join(SPLITS)})[-_.][0-9]+"
)
HUB_SET = re.compile(rf"{HUB_ID.pattern}(?:@[\w./-]+)?(?::[\w./-]+)?")  # owner/name@revision:part
HUB_URL = "hf://datasets/"
WILD = frozenset("*?[")  # of a glob


class Missing(Exception):
    """What is wrong with a source, how to mend it (KNOB: the knob that names it), and a detail."""

    def __init__(self, what: str, fix: str = "correct KNOB", detail: str = ""):
        super().__init__(what, fix, detail)


def locate(source: str, knob: str, problems: Problems) -> dict[Path, str]:
    """The files of a source, as `find` gives them. Records a problem when there are none."""
    try:
        return find(source)
    except Missing as error:
        what, fix, detail = error.args
        problems.add(source, None, what, fix.replace("KNOB", knob), detail)
    return {}


def find(source: str) -> dict[Path, str]:
    """The files of a local path, folder, glob, or data set of the Hugging Face hub; from folders and data sets, one part.

    Each with its name in the source: its path below the folder that the files share, of a glob below the last folder before
    a wildcard (bench/*/test.jsonl has a/test.jsonl). No two have the same.

    A data set is owner/name, owner/name@REVISION, or hf://datasets/owner/name/PATTERN. Its parts are splits, possibly of
    subsets ("main/train", "test"), given by the names of its files: owner/name:main/train and folder:train select one.
    Raises Missing when no part matches, or several without a selection.
    """
    path = Path(source)
    if path.is_file():
        return _named([path], path.parent)
    if path.is_dir():
        return _in_folder(path, "", source)
    place, colon, part = source.rpartition(":")
    if colon and Path(place).is_dir():
        return _in_folder(Path(place), part, source)
    if source.startswith(HUB_URL):
        owner, name, *rest = source.removeprefix(HUB_URL).split("/")
        return _from_hub(f"{owner}/{name}", "/".join(rest), "", source)
    if HUB_SET.fullmatch(source) and path.suffix not in SUFFIXES:
        name, _, part = source.partition(":")
        return _from_hub(name, "", part, source)
    if WILD & set(source):
        return _matching(Path(path.anchor or "."), str(path.relative_to(path.anchor)))
    raise Missing("no such file or folder")


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


def _choose(names: Iterable[PurePosixPath], part: str, source: str) -> list[PurePosixPath]:
    """The sorted files of one part; `part`: its name, split or subset. Raises Missing for no or several parts."""
    parts: dict[str, list[PurePosixPath]] = defaultdict(list)
    for name in sorted(names):
        found = part_of(name)
        if not part or part == found or part in found.split("/", 1):
            parts[found].append(name)
    if len(parts) == 1:
        return next(iter(parts.values()))
    if not parts:
        raise Missing(NO_FILE)
    place = source.removesuffix(f":{part}") if part else source
    raise Missing(
        f"{len(parts)} splits, and none is selected",
        f"write one of them, as {place}:{max(parts)}",
        ", ".join(name or "files of no split" for name in parts),
    )


def _in_folder(folder: Path, part: str, source: str) -> dict[Path, str]:
    names = [PurePosixPath(path.relative_to(folder)) for path in _data_files(folder, "**/*")]
    return _sharing([folder / name for name in _choose(names, part, source)])


def _sharing(files: Sequence[Path]) -> dict[Path, str]:
    """The files, with their paths below the folder that they share."""
    return _named(files, Path(os.path.commonpath([path.parent for path in files])))


def _matching(folder: Path, pattern: str) -> dict[Path, str]:
    """The data files that match a pattern, with their paths below its last folder before a wildcard."""
    fixed = takewhile(lambda part: not WILD & set(part), PurePosixPath(pattern).parts[:-1])
    if found := _data_files(folder, pattern):
        return _named(found, folder.joinpath(*fixed))
    raise Missing(NO_FILE)


def _named(files: Sequence[Path], base: Path) -> dict[Path, str]:
    return {path: path.relative_to(base).as_posix() for path in files}


def _data_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(p for p in folder.glob(pattern) if is_data(p) and p.is_file())


def is_data(name: PurePosixPath) -> bool:
    """Whether a file of this name has rows."""
    return name.suffix in SUFFIXES and name.name not in DESCRIPTIONS


def _from_hub(name: str, pattern: str, part: str, source: str) -> dict[Path, str]:
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
            return _matching(Path(folder), pattern)
        try:
            listed = huggingface_hub.list_repo_files(repo, **where)
        except (errors.HfHubHTTPError, errors.HFValidationError):
            raise
        except Exception:
            # No network, an error of any HTTP library that the client uses: search the files of earlier downloads.
            folder = huggingface_hub.snapshot_download(repo, local_files_only=True, **where)
            return _in_folder(Path(folder), part, source)
        names = [name for name in map(PurePosixPath, listed) if is_data(name)]
        chosen = list(map(str, _choose(names, part, source)))
        folder = huggingface_hub.snapshot_download(repo, allow_patterns=chosen, **where)
    except (
        errors.HfHubHTTPError,
        errors.HFValidationError,
        errors.LocalEntryNotFoundError,
        OSError,
    ) as error:
        what, reason = "neither a local path nor available on the hub", str(error).strip()
        raise Missing(what, "correct KNOB or go online", reason.splitlines()[0]) from error
    return _sharing([Path(folder) / one for one in chosen])


ID = "tlt_id"  # column that rows get: the id by which the files of a run name them
USER, ASSISTANT = "user", "assistant"  # roles of chat messages
MESSAGE = ("role", "content")  # texts of a chat message
HALF, WHOLE = "a lone surrogate", "write whole characters"
NUMBERS = {"gsm8k", "gsm8k_flexible"}  # rewards that compare numbers
TAIL = 40  # last characters of a reference that a problem shows


def read(config: Config, knob: str, source: str, problems: Problems) -> list[dict[str, Any]]:
    """The rows of a source with the mapped columns "prompt" and "answer", and their ids as ID, and as "id" if they have none.

    Both are "" where a row may lack them, see `optional_roles`.
    And "solution", when the run has a supervised warm start and the source is data.train.
    """
    data = config.data
    mapping = {"prompt": data.prompt_column, "answer": data.answer_column}
    if data.id_column:
        mapping["id"] = data.id_column
    if config.sft.steps and knob == "data.train":
        mapping["solution"] = config.sft.solution_column

    optional = optional_roles(config)
    rows, first_seen = [], {}
    for name, path, found in _sources(parse.expand(source, knob), knob, problems):
        for role, column in mapping.items():
            given = [
                one for one in found if role not in optional or not is_empty(cell(one[1], column))
            ]
            _check_column(given, role, column, data, path, problems)
        if NUMBERS & set(config.reward.terms):
            _check_numbers(found, data.answer_column, path, problems)
        for line, raw in found:
            mapped = {role: cell(raw, column) for role, column in mapping.items()}
            mapped |= {role: "" for role in optional if is_empty(mapped[role])}
            is_named = mapped.get("id") not in (None, ABSENT)
            mapped = {"id": f"{name}:{line}"} | mapped
            mapped |= {role: text_of(mapped[role]) for role in mapped if role != "prompt"}
            row_id = mapped.pop("id")
            first = first_seen.setdefault(row_id, (path, line))
            if first != (path, line) and is_named:
                detail = f"{row_id!r}, first at {first[0]}:{first[1]}"
                fix = "make data.id_column unique or leave it empty"
                problems.add(path, line, "duplicate id", fix, detail)
            rows.append({"id": row_id} | raw | mapped | {ID: row_id})

    return rows


def optional_roles(config: Config) -> set[str]:
    """What rows of an environment may lack: an answer that no reward reads, and a prompt, but for a warm start."""
    terms = config.reward.terms.keys()
    optional = {"answer"} if "environment" in terms and terms <= UNREFERENCED else set()
    return optional | ({"prompt"} if config.environment.path and not config.sft.steps else set())


def is_empty(value: Any) -> bool:
    """Whether the value of a column says nothing."""
    return (
        value is ABSENT
        or value is None
        or (isinstance(value, str) and not value.strip())
        or value == []
    )


def _sources(
    source: str, knob: str, problems: Problems
) -> Iterator[tuple[str, str, list[tuple[int, dict[str, Any]]]]]:
    """(name, place, numbered rows) of each file of a source, or of its module:function.

    A folder with the module's name takes precedence.
    """
    if not extension.is_own(source) or Path(source.partition(":")[0]).is_dir():
        for path, name in locate(source, knob, problems).items():
            yield name, str(path), read_file(path, problems)
        return

    found = extension.call(knob, source)
    if not isinstance(found, Iterable):
        raise ConfigError(
            f"{knob} {source!r} gave a {type(found).__name__}: return or yield {{column: value, ...}} for each row"
        )
    rows = list(enumerate(found, 1))
    if not rows:
        problems.add(source, None, "the function yields no rows", "yield one mapping per row")
    yield source, source, _objects(rows, partial(problems.add, source))


def _check_column(
    found: list[tuple[int, dict]],
    role: str,
    column: str,
    data: Data,
    path: str,
    problems: Problems,
) -> None:
    """Records the problems of one column of the rows of a file."""
    knob = "sft.solution_column" if role == "solution" else f"data.{role}_column"
    fix = ""
    for line, raw in found:
        value = cell(raw, column)
        if value is ABSENT:
            if not fix:
                others = [one for one in columns(row for _, row in found) if one != column]
                known = ", ".join(map(repr, others)) or "none: the rows are empty"
                fix = f"set {knob} to one of {known}"
            problems.add(path, line, f"no column {column!r}", fix)
        elif is_empty(value):
            what = "empty prompt" if role == "prompt" else f"no {role}"
            problems.add(path, line, what, f"fill in column {column!r} or drop the row")
        elif role == "prompt" and isinstance(value, list):
            if not all(is_message(message) for message in value):
                what = "the prompt is not a list of chat messages"
                problems.add(path, line, what, "use {'role': text, 'content': text} objects")
            elif not data.chat_template:
                what = "the prompt is a list of chat messages"
                problems.add(path, line, what, "set data.chat_template true")
            elif wrong := misfit(value, data.prompt_suffix):
                problems.add(path, line, *wrong)
        elif not isinstance(value, str if role == "prompt" else (str, int, float)):
            what = f"column {column!r} holds a {type(value).__name__}"
            inner = [f"{column}.{name}" for name in value] if isinstance(value, dict) else []
            use = f"set {knob} to {' or '.join(inner)}" if inner else "use text"
            problems.add(path, line, what, use)
        elif isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value)):
            what = f"column {column!r} holds {json.dumps(value)}"
            problems.add(path, line, what, "write it as text, or drop the row")
        elif lone := lone_surrogate(value if isinstance(value, str) else ""):
            problems.add(path, line, f"the {role} has {HALF}", WHOLE, lone)


def misfit(prompt: str | Sequence[Mapping[str, str]], suffix: str) -> tuple[str, str, str] | None:
    """What is wrong with a prompt, a text or chat messages; how to mend it; and a detail. None when nothing is.

    `suffix`: data.prompt_suffix, which needs a message of the user.
    """
    texts = [prompt] if isinstance(prompt, str) else [m[key] for m in prompt for key in MESSAGE]
    if lone := next(filter(None, map(lone_surrogate, texts)), ""):
        return f"the prompt has {HALF}", WHOLE, lone
    if isinstance(prompt, str):
        return None
    if prompt[-1]["role"] == ASSISTANT:
        return "the prompt ends with an assistant's message", "remove it, the policy writes it", ""
    if suffix and not any(message["role"] == USER for message in prompt):
        what = "the prompt has no message of the user for data.prompt_suffix"
        return what, "add one, or leave data.prompt_suffix empty", ""
    return None


def _check_numbers(
    found: list[tuple[int, dict]], column: str, path: str, problems: Problems
) -> None:
    """Records the references that are no number, which the rewards of NUMBERS compare with; no other problem of the column."""
    for line, raw in found:
        value = cell(raw, column)
        is_odd = isinstance(value, bool) or (isinstance(value, float) and not math.isfinite(value))
        if is_odd or not isinstance(value, str | int | float) or not str(value).strip():
            continue
        if answers.reference(text := text_of(value)) is None:
            fix = "correct it, or use the reward math (reward.terms), which compares formulas"
            what = "the reference answer is not one number"
            problems.add(path, line, what, fix, repr(text[-TAIL:]))


def is_message(value: Any) -> bool:
    """Whether it is a chat message: {"role": text, "content": text}."""
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in MESSAGE)
