"""The files of a data source: a path, folder, glob, or data set of the hub, and of it one split.

Knows no meaning of columns, no tokenizer and no JAX.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterable, Sequence
from itertools import takewhile
from pathlib import Path, PurePosixPath

from tlt_jax.config.parse import HUB_ID
from tlt_jax.data.formats import KINDS, SUFFIXES, read as read
from tlt_jax.data.problems import Problems

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


def locate(source: str, knob: str, problems: Problems) -> dict[Path, str]:
    """The files of a local path, folder, glob, or data set of the Hugging Face hub; from folders and data sets, one part.

    Each with its name in the source: its path below the folder that the files share, of a glob below the last folder before
    a wildcard (bench/*/test.jsonl has a/test.jsonl). No two have the same.

    A data set is owner/name, owner/name@REVISION, or hf://datasets/owner/name/PATTERN. Its parts are splits, possibly of
    subsets ("main/train", "test"), given by the names of its files: owner/name:main/train and folder:train select one.
    Records a problem when no part matches, or several without a selection.
    """
    path = Path(source)
    if path.is_file():
        return _named([path], path.parent)
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
    if WILD & set(source):
        found = _matching(Path(path.anchor or "."), str(path.relative_to(path.anchor)))
        return found or _none(source, knob, problems)
    problems.add(source, None, "no such file or folder", f"correct {knob}")
    return {}


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
        problems.add(source, None, f"no {KINDS} file there", f"correct {knob}")
    else:
        listed = ", ".join(name or "files of no split" for name in parts)
        place = source.removesuffix(f":{part}") if part else source
        first = f"{place}:{max(parts)}"
        what = f"{len(parts)} splits, and none is selected"
        problems.add(source, None, what, f"write one of them, as {first}", listed)
    return []


def _in_folder(
    folder: Path, part: str, source: str, knob: str, problems: Problems
) -> dict[Path, str]:
    names = [PurePosixPath(path.relative_to(folder)) for path in _data_files(folder, "**/*")]
    return _sharing([folder / name for name in _choose(names, part, source, knob, problems)])


def _sharing(files: Sequence[Path]) -> dict[Path, str]:
    """The files, with their paths below the folder that they share."""
    parents = [path.parent for path in files]
    return _named(files, Path(os.path.commonpath(parents))) if files else {}


def _matching(folder: Path, pattern: str) -> dict[Path, str]:
    """The data files that match a pattern, with their paths below its last folder before a wildcard."""
    fixed = takewhile(lambda part: not WILD & set(part), PurePosixPath(pattern).parts[:-1])
    return _named(_data_files(folder, pattern), folder.joinpath(*fixed))


def _named(files: Sequence[Path], base: Path) -> dict[Path, str]:
    return {path: path.relative_to(base).as_posix() for path in files}


def _data_files(folder: Path, pattern: str) -> list[Path]:
    return sorted(p for p in folder.glob(pattern) if is_data(p) and p.is_file())


def is_data(name: PurePosixPath) -> bool:
    """Whether a file of this name has rows."""
    return name.suffix in SUFFIXES and name.name not in DESCRIPTIONS


def _none(source: str, knob: str, problems: Problems) -> dict[Path, str]:
    problems.add(source, None, f"no {KINDS} file there", f"correct {knob}")
    return {}


def _from_hub(
    name: str, pattern: str, part: str, source: str, knob: str, problems: Problems
) -> dict[Path, str]:
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
            return _matching(Path(folder), pattern) or _none(source, knob, problems)
        try:
            listed = huggingface_hub.list_repo_files(repo, **where)
        except (errors.HfHubHTTPError, errors.HFValidationError):
            raise
        except Exception:
            # No network, an error of any HTTP library that the client uses: search the files of earlier downloads.
            folder = huggingface_hub.snapshot_download(repo, local_files_only=True, **where)
            return _in_folder(Path(folder), part, source, knob, problems)
        names = [name for name in map(PurePosixPath, listed) if is_data(name)]
        chosen = list(map(str, _choose(names, part, source, knob, problems)))
        if not chosen:
            return {}
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
        return {}
    return _sharing([Path(folder) / one for one in chosen])
