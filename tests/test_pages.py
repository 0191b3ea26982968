"""docs/: what the pages quote is what the code says: messages, knobs, refusals, measured figures."""

from __future__ import annotations

import ast
import csv
import re
import tomllib
from itertools import product
from pathlib import Path

import model_cases
import pytest

import tlt_jax
from tlt_jax.config import Config, load as configuration, parse
from tlt_jax.config.knobs import knobs
from tlt_jax.config.validate import validate_rl
from tlt_jax.errors import ConfigError, ModelError
from tlt_jax.models import hf

ROOT = Path(tlt_jax.__file__).parents[1]
DOCS = ROOT / "docs"
KNOWN = [*knobs(Config)]
SECTIONS = {name.partition(".")[0] for name in KNOWN if "." in name}
MESSAGES = re.findall(
    r"^### `(.+)`$", (DOCS / "troubleshooting.md").read_text(encoding="utf-8"), re.M
)
PAGES = ("algorithms", "coming_from", "models", "performance", "troubleshooting", "versions")


def texts() -> list[list[str]]:
    """Every string of the package, as the constant parts between its variable ones."""
    found = []
    for path in sorted((ROOT / "tlt_jax").rglob("*.py")):
        tree = ast.parse(path.read_text())
        inside = {
            part
            for node in ast.walk(tree)
            if isinstance(node, ast.JoinedStr)
            for part in node.values
        }
        for node in ast.walk(tree):
            if isinstance(node, ast.JoinedStr):
                found.append([one.value for one in node.values if isinstance(one, ast.Constant)])
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                found += [] if node in inside else [[node.value]]
    return found


def says(parts: list[str], message: str) -> bool:
    """Whether a message, with `...` for variable parts, is in a string: its pieces, one after the other."""
    pieces, at, start = [one for one in message.split("...") if one.strip(" :")], 0, 0
    for piece in pieces:
        while at < len(parts) and (place := parts[at].find(piece, start)) < 0:
            at, start = at + 1, 0
        if at == len(parts):
            return False
        start = place + len(piece)
    return bool(pieces)


@pytest.fixture(scope="module")
def strings() -> list[list[str]]:
    return texts()


def test_the_page_of_messages_has_those_that_people_meet():
    assert len(MESSAGES) == len(set(MESSAGES)) >= 20


@pytest.mark.parametrize("message", MESSAGES)
def test_a_quoted_message_is_one_of_the_code(message, strings):
    assert any(says(parts, message) for parts in strings)


def named_knobs(page: str) -> set[str]:
    """The knobs that a page names in code spans; without the names of other libraries."""
    lines = (DOCS / f"{page}.md").read_text(encoding="utf-8").splitlines()
    if page == "coming_from":
        lines = [line.split(" | ")[1] for line in lines if line.count(" | ") == 2]
    spans = re.findall(r"`([^`]+)`", "\n".join(lines))
    words = {word.lstrip("-") for span in spans for word in span.split(" ")}
    files = {"model.safetensors"}
    return {word for word in words if re.fullmatch(rf"({'|'.join(SECTIONS)})\.\w+", word)} - files


@pytest.mark.parametrize("page", PAGES)
def test_every_knob_that_a_page_names_exists(page):
    named = named_knobs(page)
    unknown = set()
    for name in named:
        try:
            parse.owner(Config, name)
        except ConfigError:
            unknown.add(name)
    assert unknown == set()
    assert page == "versions" or len(named) > 3


def algorithms() -> dict[str, list[str]]:
    """The rows of the table of algorithms by name: paper, knobs, when to use it, what it costs."""
    page = (DOCS / "algorithms.md").read_text(encoding="utf-8")
    head, _, *rows = [line for line in page.partition("\n## ")[0].splitlines() if line[:1] == "|"]
    assert head == "| name | paper | knobs | when to use it | what it costs |"
    cells = [row.strip("|").split(" | ") for row in rows]
    return {name.strip(): [one.strip() for one in rest] for name, *rest in cells}


@pytest.mark.parametrize("name", algorithms())
def test_an_algorithm_of_the_table_is_a_configuration(name):
    paper, setting, *words = algorithms()[name]
    assert len(words) == 2 and all(words)
    assert re.search(
        r"\[\d{4}\.\d{5}\]\(https://arxiv\.org/abs/\d{4}\.\d{5}\)|\[.+ \d{4}\]\(https://.+\)", paper
    )
    spans = re.findall(r"`([^`]+)`", setting)
    assert spans or setting == "the defaults"
    pairs = [tuple(span.split(" ", 1)) for span in spans]
    validate_rl(configuration.build({"model": {"init": {"model_type": "qwen2"}}}, pairs))


def test_the_page_of_other_libraries_has_a_table_of_each():
    page = (DOCS / "coming_from.md").read_text(encoding="utf-8")
    tables = re.split(r"^## ", page, flags=re.M)[1:]
    assert [table.partition("\n")[0] for table in tables] == ["verl", "TRL", "tunix"]
    for table in tables:
        knobs_of = set(re.findall(rf"`((?:{'|'.join(SECTIONS)})\.\w+)", table))
        assert {"rollout.samples", "rollout.prompts", "algorithm.kl_coef"} <= knobs_of


# A config.json of each row of the page's table, as the change of one that loads.
REFUSED = [
    {"model_type": "qwen3_moe"}, {"num_experts": 8}, {"model_type": "gemma3_text"}, {"model_type": "mistral"},
    {"model_type": "qwen2_5_vl"}, {"use_sliding_window": True},
    {"layer_types": ["full_attention", "sliding_attention"]}, {"quantization_config": {"bits": 4}},
    {"rope_scaling": {"rope_type": "longrope"}}, {"partial_rotary_factor": 0.5}, {"hidden_act": "gelu"},
]  # fmt: skip


def test_the_page_of_models_has_the_message_of_every_refusal():
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    quoted = re.findall(r"^\| .+ \| `(.+)` \|$", page, re.M)
    found = []
    for change in REFUSED:
        with pytest.raises(ModelError) as error:
            hf.from_hf_config(model_cases.raw_config("qwen2") | change)
        found.append(str(error.value))
    with pytest.raises(ModelError) as error:
        hf.shard_files(Path("DIR"))
    assert quoted == [*found, str(error.value)]


def test_the_page_of_models_names_the_families():
    page = (DOCS / "models.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"^\| `model_type` .*?\n\n", page, re.M | re.S)
    assert set(re.findall(r"^\| `(\w+)` \| ", table, re.M)) - {"model_type"} == set(
        model_cases.FAMILIES
    )


def test_the_page_of_performance_has_the_measured_rows():
    page = (DOCS / "performance.md").read_text(encoding="utf-8")
    with (ROOT / "benchmarks/results/speculation_speed.csv").open(newline="") as file:
        rows = [row for row in csv.DictReader(file) if "AMD EPYC" in row["machine"]]
    shown = re.findall(r"^\| (\d+) \| ([\d.]+) ≥([\d.]+) \| ([\d.]+) ≥([\d.]+) \|$", page, re.M)
    assert [int(row[0]) for row in shown] == [1, 2, 4, 8, 16, 32]
    for live, *figures in shown:
        measured = {row["arm"]: row for row in rows if row["live"] == live}
        columns = product(("eagle3 goodput", "ngram goodput"), ("over_plain", "lower_95"))
        assert figures == [measured[arm][f"all_live_{column}"] for arm, column in columns]


def test_the_page_of_versions_has_the_bounds_of_the_project():
    page = (DOCS / "versions.md").read_text(encoding="utf-8")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    (jax,) = [one for one in project["dependencies"] if one.startswith("jax>")]
    lower, excluded = re.fullmatch(r"jax>=([\d.]+),!=([\d.]+)", jax).groups()
    assert f"{lower} and newer, not {excluded}" in page
    assert project["requires-python"] == ">=3.11" and "| 3.11 and newer |" in page
    triton, binding = (
        re.match(rf"{name}>=([\d.]+)", one)[1]
        for name in ("triton", "jax-triton")
        for one in extras["gpu"]
        if one.startswith(name)
    )
    assert f"`triton` {triton} and newer" in page
    assert f"`jax-triton` {binding}" in page


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md")))
def test_the_readme_leads_to_every_page(page):
    assert f"](docs/{page})" in (ROOT / "README.md").read_text(encoding="utf-8")
