"""Prompts as a function of (seed, step), and every mistake of a data file reported at once."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path, PurePosixPath

import numpy as np
import pytest

from tlt_jax.config import Config, extension, load as configuration, parse
from tlt_jax.data import dataset as datasets, files, prompt_format, tasks
from tlt_jax.data.dataset import DataError

CONFIGS = Path(__file__).parents[2] / "configs"
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}[a]{% endif %}{{ mark }}"
)


def make_config(
    train: Path | str = "", prompts: int = 4, sft_steps: int = 0, seed: int = 0, **knobs
) -> Config:
    config = Config()
    return replace(
        config,
        data=replace(
            config.data,
            train=str(train),
            **{"eval_size": 3, "duplicates": "keep", **knobs},
        ),
        rollout=replace(config.rollout, prompts=prompts),
        sft=replace(config.sft, steps=sft_steps),
        train=replace(config.train, seed=seed),
    )


def make_tokenizer(template: str = ""):
    tokenizer = tasks.Fold(modulus=36).tokenizer()
    tokenizer.chat_template = template or None
    return tokenizer


def write(path: Path, rows: list[dict]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def number_rows(count: int) -> list[dict]:
    return [{"prompt": f"p{i}", "answer": i, "solution": f"s{i}"} for i in range(count)]


def ids(prompts) -> list[str]:
    return [prompt.id for prompt in prompts]


def failure(config: Config, tokenizer=None) -> str:
    with pytest.raises(DataError) as error:
        datasets.load(config, tokenizer or make_tokenizer())
    return str(error.value)


def test_the_generated_task_gives_the_same_step_to_every_process():
    first, second = (datasets.load(make_config(prompts=5), make_tokenizer()) for _ in range(2))
    for step in (7, 0, 7):
        for a, b in zip(first.prompts(step), second.prompts(step), strict=True):
            assert (a.text, a.row) == (b.text, b.row)
            np.testing.assert_array_equal(a.tokens, b.tokens)
    assert ids(first.prompts(2)) == [f"train-{i}" for i in range(10, 15)]
    assert ids(first.part()) == ["eval-0", "eval-1", "eval-2"]
    assert first.rows is None


def test_solutions_of_the_task_end_in_eos_and_are_not_the_prompts_of_training():
    dataset = datasets.load(make_config(), tokenizer := make_tokenizer())
    pairs = dataset.solutions(0, 50)
    for prompt, solution in pairs:
        answer = sum(int(c) for c in tokenizer.decode(prompt)[:-1]) % 10
        assert tokenizer.decode(solution[-2:]) == f"{answer}{tokenizer.eos_token}"
    for one, other in zip(dataset.solutions(2, 10), pairs[20:30], strict=True):
        assert [*map(list, one)] == [*map(list, other)], "of the rows of this step"
    texts = {tokenizer.decode(prompt) for prompt, _ in pairs}
    assert len(texts & {p.text for step in range(12) for p in dataset.prompts(step)}) < 10


def test_each_epoch_has_every_row_once_in_a_new_order_across_step_borders(tmp_path):
    source = write(tmp_path / "a.jsonl", number_rows(13))
    dataset = datasets.load(make_config(source, prompts=4), make_tokenizer())
    stream = [i for step in range(5) for i in ids(dataset.prompts(step))]
    assert dataset.rows == 10
    first, second = stream[:10], stream[10:]
    assert len(set(first)) == len(set(second)) == 10
    assert first != second
    again = datasets.load(make_config(source, prompts=4), make_tokenizer())
    assert ids(again.prompts(2)) == stream[8:12]
    other = datasets.load(make_config(source, prompts=4, seed=1), make_tokenizer())
    assert ids(other.prompts(0)) != stream[:4]


def test_rows_keep_their_order_without_shuffling(tmp_path):
    source = write(tmp_path / "a.jsonl", number_rows(5))
    dataset = datasets.load(
        make_config(source, prompts=3, eval=str(source), shuffle=False), make_tokenizer()
    )
    assert ids(dataset.prompts(1)) == ["a.jsonl:4", "a.jsonl:5", "a.jsonl:1"]


def split_of(source: Path, **knobs) -> tuple[set[str], set[str]]:
    """The prompts of training and of evaluation, in the source's column."""
    loaded = datasets.load(make_config(source, **knobs), make_tokenizer(TEMPLATE))
    column = knobs.get("prompt_column", "prompt")
    parts = [[prompt.row[column] for prompt in part] for part in (loaded.train, loaded.eval)]
    assert all(len(set(part)) == len(part) for part in parts)
    return set(parts[0]), set(parts[1])


@pytest.mark.parametrize(
    "knobs",
    [
        {"seed": 1},
        {"seed": 12, "shuffle": False},
        {"prompts": 7},
        {"chat_template": True, "system": "s", "prompt_suffix": "?"},
        {"answer_column": "solution", "id_column": "answer"},
        {"duplicates": "drop"},
        {"sft_steps": 1},
    ],
)
def test_held_out_rows_depend_on_no_other_knob(knobs, tmp_path):
    source = write(tmp_path / "a.jsonl", number_rows(200))
    train, held_out = split_of(source, eval_size=20)
    assert (len(train), len(held_out), train & held_out) == (180, 20, set())
    assert split_of(source, **{"eval_size": 20} | knobs) == (train, held_out)


def test_held_out_rows_depend_on_no_other_row(tmp_path):
    """They keep their order, and stay when rows are moved or removed, and among more held-out rows."""
    rows = number_rows(200)
    source = write(tmp_path / "a.jsonl", rows)
    train, held_out = split_of(source, eval_size=20)
    loaded = datasets.load(make_config(source, eval_size=20), make_tokenizer())
    for part in (loaded.train, loaded.eval):
        lines = [int(name.partition(":")[2]) for name in ids(part)]
        assert lines == sorted(lines)
    assert held_out != {f"p{n}" for n in range(20)} and held_out < split_of(source, eval_size=30)[1]
    moved = write(tmp_path / "b.jsonl", rows[::-1])
    assert split_of(moved, eval_size=20) == (train, held_out)
    fewer = write(
        tmp_path / "c.jsonl",
        [row for row in rows if row["prompt"] not in train or row["answer"] % 2],
    )
    assert split_of(fewer, eval_size=20)[1] == held_out
    other = [split_of(source, eval_size=20, split_seed=seed)[1] for seed in (1, 2)]
    assert all(len(one & held_out) < 10 for one in other) and other[0] != other[1]


@pytest.mark.parametrize("duplicates", ["keep", "drop"])
def test_no_prompt_is_on_both_sides(duplicates, tmp_path):
    rows = [{"prompt": f"p{n % 10}", "answer": n % 10} for n in range(50)]
    source = write(tmp_path / "a.jsonl", rows)
    for size in range(1, 8):
        loaded = datasets.load(
            make_config(source, eval_size=size, duplicates=duplicates), make_tokenizer()
        )
        texts = [{prompt.text for prompt in part} for part in (loaded.train, loaded.eval)]
        assert len(loaded.eval) == size and not texts[0] & texts[1]
        assert texts[0] | texts[1] == {f"p{n}" for n in range(10)}
        kept = len(loaded.train) + len(loaded.eval)
        assert kept == 10 if duplicates == "drop" else 46 <= kept <= 50
        assert kept + loaded.dropped == 50
    one = write(tmp_path / "b.jsonl", [{"prompt": "p", "answer": 1}] * 5)
    assert "data.eval_size 2 leaves no other prompt: lower it" in failure(
        make_config(one, eval_size=2, duplicates="keep")
    )


def in_game(config: Config, terms: tuple[str, ...] = ("environment",)) -> Config:
    return replace(
        config,
        environment=replace(config.environment, path="games:Game"),
        reward=replace(config.reward, terms=dict.fromkeys(terms, 1.0)),
    )


@pytest.mark.parametrize("template", ["", TEMPLATE])
def test_rows_of_an_environment_need_neither_prompt_nor_answer(template, tmp_path):
    """And are no duplicates without a prompt: the environment says something else to each."""
    rows = [{"level": 3, "prompt": prompt} for prompt in ("", [], None, " ", "p", "p", "q")]
    source = write(tmp_path / "a.jsonl", [*rows, {"level": 3}, {"level": 3, "answer": 5}])
    config = make_config(source, eval_size=3, duplicates="drop", chat_template=bool(template))
    loaded = datasets.load(in_game(config), make_tokenizer(template))
    found = [*loaded.train, *loaded.eval]
    assert {prompt.row["level"] for prompt in found} == {3} and loaded.dropped == 1
    assert sorted(prompt.row["prompt"] for prompt in found) == [*[""] * 6, "p", "q"]
    assert sorted(prompt.row["answer"] for prompt in found) == [*[""] * 7, "5"]
    assert ids(datasets.load(in_game(config), make_tokenizer(template)).eval) == ids(loaded.eval)

    asked = make_config(write(tmp_path / "b.jsonl", [{"level": 3}] * 9))
    assert datasets.load(in_game(asked, ("environment", "format")), make_tokenizer()).rows == 6
    told = failure(in_game(asked, ("environment", "exact")))
    assert "no column 'answer': set data.answer_column to one of 'level'" in told
    assert "no column 'prompt'" not in told
    assert "no column 'prompt'" in failure(asked) and "no column 'answer'" in failure(asked)
    warm = in_game(replace(asked, sft=replace(asked.sft, steps=1)))
    assert "no column 'prompt'" in failure(warm)


def test_rows_of_a_task_held_out_depend_on_no_training_seed():
    def held_out(**knobs):
        return [p.text for p in datasets.load(make_config(**knobs), make_tokenizer()).eval]

    assert held_out() == held_out(seed=1) == held_out(seed=1, sft_steps=1, prompts=9)
    assert held_out() != held_out(split_seed=1) == held_out(seed=7, split_seed=1)


def test_columns_are_mapped_and_the_source_columns_kept(tmp_path):
    rows = [{"q": f"p{i}", "a": 0.5 + i, "key": i, "level": "hard"} for i in range(9)]
    source = write(tmp_path / "a.jsonl", rows)
    knobs = {"prompt_column": "q", "answer_column": "a", "id_column": "key"}
    knobs |= {"shuffle": False, "eval": str(source)}
    row = datasets.load(make_config(source, **knobs), make_tokenizer()).prompts(0)[2].row
    mapped = {"id": "2", "tlt_id": "2", "prompt": "p2", "answer": "2.5"}
    assert row == {"q": "p2", "a": 2.5, "key": 2, "level": "hard"} | mapped


@pytest.mark.parametrize("column", ["", "key", "id"])
def test_a_row_keeps_the_id_of_the_data(column, tmp_path):
    """A reward finds its own id in it; ours, by which files of the run name the row, is row["tlt_id"]."""
    rows = [{"id": f"my-{n}", "key": n, "prompt": f"p{n}", "answer": n} for n in range(4)]
    source = write(tmp_path / "a.jsonl", rows)
    loaded = datasets.load(make_config(source, id_column=column, eval_size=1), make_tokenizer())
    for prompt in (*loaded.train, *loaded.eval):
        row, n = prompt.row, prompt.row["key"]
        assert row["id"] == f"my-{n}" and prompt.id == row["tlt_id"]
        assert prompt.id == {"": f"a.jsonl:{n + 1}", "key": f"{n}"}.get(column, row["id"])


def test_long_prompts_are_dropped_and_counted_and_more_than_half_are_an_error(tmp_path):
    rows = [{"prompt": "x" * n, "answer": "1"} for n in range(1, 11)]
    source = write(tmp_path / "a.jsonl", rows)
    config = make_config(source, eval=str(source), max_prompt_tokens=7)
    dataset = datasets.load(config, make_tokenizer())
    used = {"rows": 10, "train_rows": 7, "eval_rows": 7}
    assert dataset.counts == used | {"too_long": 3, "eval_too_long": 3}
    assert all(len(p.tokens) <= 7 for p in dataset.train)
    assert "7 of 10 rows (dropped: 3 longer than data.max_prompt_tokens)" in dataset.describe()
    for limit, found in ((4, "6 of 10"), (0, "10 of 10")):
        message = failure(make_config(source, eval=str(source), max_prompt_tokens=limit))
        assert f"{found} prompts are longer than data.max_prompt_tokens {limit}" in message


def test_the_chat_template_gets_system_suffix_and_its_own_arguments(tmp_path):
    chat, tool = (
        [{"role": role, "content": content} for role, content in zip(roles, "abc", strict=True)]
        for roles in (("user", "x", "user"), ("user", "assistant", "tool"))
    )
    rows = [{"prompt": prompt, "answer": "1"} for prompt in ("hi", chat, tool)]
    source = write(tmp_path / "a.jsonl", rows)
    knobs = {"chat_template": True, "chat_template_kwargs": {"mark": "!"}}
    knobs |= {"system": "sys", "prompt_suffix": "?"}
    tokenizer = make_tokenizer(TEMPLATE)
    config = make_config(source, prompts=3, shuffle=False, eval=str(source), **knobs)
    texts = [p.text for p in datasets.load(config, tokenizer).prompts(0)]
    assert texts == [
        "[system]sys[user]hi?[a]!",
        "[system]sys[user]a[x]b[user]c?[a]!",
        "[system]sys[user]a?[assistant]b[tool]c[a]!",
    ]
    assert "no chat template" in failure(config)
    strict = make_tokenizer("{{ raise_exception('roles must alternate') }}")
    assert "the chat template rejects row a.jsonl:1: roles must alternate" in failure(
        config, strict
    )
    no_system = "{{ raise_exception('System role not supported') if messages[0].role == 'system' }}"
    assert "System role not supported: leave data.system empty" in failure(
        config, make_tokenizer(no_system)
    )
    assert "set data.chat_template true" in failure(make_config(source), tokenizer)


def test_a_prompt_that_ends_with_an_answer_is_named_with_its_row(tmp_path):
    turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    rows = [{"prompt": turns[: 1 + n % 2], "answer": "1"} for n in range(4)]
    rows.append({"prompt": [{"role": "system", "content": "a"}], "answer": "1"})
    source = write(tmp_path / "a.jsonl", rows)
    tokenizer = make_tokenizer(TEMPLATE)
    message = failure(make_config(source, chat_template=True, prompt_suffix="?"), tokenizer)
    assert "the data has 2 problems" in message
    assert f"{source}:2: the prompt ends with an assistant's message: remove it" in message
    assert "[also in 4]" in message
    assert f"{source}:5: the prompt has no message of the user for data.prompt_suffix" in message
    write(source, [rows[0], rows[4]])
    loaded = datasets.load(make_config(source, chat_template=True, eval_size=0), tokenizer)
    assert [prompt.text for prompt in loaded.train] == ["[user]a[a]", "[system]a[a]"]


def test_parquet_folder_glob_and_hub_give_the_rows_of_the_jsonl_file(tmp_path, monkeypatch):
    import huggingface_hub
    import pyarrow
    import pyarrow.parquet

    rows, asked = number_rows(6), []
    folder = tmp_path / "set"
    (folder / "main").mkdir(parents=True)
    pyarrow.parquet.write_table(
        pyarrow.Table.from_pylist(rows[:4]), folder / "main" / "train-0.parquet"
    )
    write(folder / "main" / "train-1.jsonl", rows[4:])
    (folder / "README.md").write_text("not data")

    def fake_snapshot(repo_id, repo_type, revision, allow_patterns):
        asked.append((repo_id, repo_type, revision, allow_patterns))
        return str(folder)

    def fake_list(repo_id, repo_type, revision):
        return [str(path.relative_to(folder)) for path in folder.rglob("*")]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake_snapshot)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", fake_list)
    monkeypatch.setenv("MY_SET", str(folder))
    hub = "hf://datasets/someone/set/main/train-*"
    local = (folder, "$MY_SET", "${MY_SET}/main/*", f"{folder}/main/train-*", f"{folder}:train")
    for source in (*local, "someone/set", "someone/set@v2:main/train", hub):
        config = make_config(source, prompts=6, shuffle=False, eval=str(folder))
        found = [p.text for p in datasets.load(config, make_tokenizer()).prompts(0)]
        assert found == [row["prompt"] for row in rows]
    both, pattern = ["main/train-0.parquet", "main/train-1.jsonl"], ["main/train-*"]
    wanted = ((None, both), ("v2", both), (None, pattern))
    assert asked == [("someone/set", "dataset", *one) for one in wanted]


@pytest.fixture
def hub(tmp_path, monkeypatch) -> Path:
    """A folder laid out like openai/gsm8k on the hub; each question is the name of its file."""
    import huggingface_hub
    import pyarrow
    import pyarrow.parquet

    for subset in ("main", "socratic"):
        (tmp_path / subset).mkdir()
        for split, count in (("train", 5), ("test", 3)):
            rows = [
                {"question": f"{subset} {split} {n}", "answer": f"#### {n}"} for n in range(count)
            ]
            at = tmp_path / subset / f"{split}-00000-of-00001.parquet"
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), at)

    def download(repo_id, repo_type, revision, allow_patterns=None, local_files_only=False):
        assert (repo_id, repo_type) == ("openai/gsm8k", "dataset")
        assert allow_patterns or local_files_only, "not all of it"
        return str(tmp_path)

    def names(repo_id, repo_type, revision):
        return [
            "README.md",
            *(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*.parquet")),
        ]

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", names)
    return tmp_path


def test_the_shipped_gsm8k_trains_on_the_train_split_and_evaluates_on_the_other(hub):
    shipped = configuration.read(CONFIGS / "gsm8k_qwen2.5_0.5b.yaml")
    data = replace(shipped.data, chat_template=False, prompt_suffix="")
    rollout = replace(shipped.rollout, prompts=5)
    loaded = datasets.load(replace(shipped, data=data, rollout=rollout), make_tokenizer())
    assert {prompt.row["question"] for prompt in loaded.prompts(0)} == {
        f"main train {n}" for n in range(5)
    }
    assert [prompt.row["question"] for prompt in loaded.part()] == [
        f"main test {n}" for n in range(3)
    ]


@pytest.mark.parametrize("is_online", [True, False])
def test_a_source_with_several_splits_must_name_one(hub, monkeypatch, is_online):
    import huggingface_hub

    def offline(*_, **__):
        raise ConnectionError("no network")

    if not is_online:
        monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    knobs = {"prompt_column": "question", "eval_size": 0, "shuffle": False}
    every = "4 splits, and none is selected (main/test, main/train, socratic/test, socratic/train)"
    for source, listed in (
        ("openai/gsm8k", every),
        (str(hub), every),
        ("openai/gsm8k:train", "2 splits, and none is selected (main/train, socratic/train)"),
        ("openai/gsm8k:main", "write one of them, as openai/gsm8k:main/train"),
        ("openai/gsm8k:other", "no .jsonl, .json, .csv or .parquet file there"),
    ):
        assert listed in failure(make_config(source, **knobs))
    for source in ("openai/gsm8k:main/test", f"{hub}:main/test", f"{hub / 'main'}:test"):
        loaded = datasets.load(make_config(source, **knobs), make_tokenizer())
        assert [prompt.text for prompt in loaded.train] == [f"main test {n}" for n in range(3)]


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("main/train-00000-of-00002.parquet", "main/train"),
        ("data/test-00000-of-00001-1a2b3c.parquet", "test"),
        ("main/train/0000.parquet", "main/train"),
        ("train.jsonl", "train"),
        ("train-1.jsonl", "train"),
        ("data/Validation.jsonl", "Validation"),
        ("questions.jsonl", ""),
        ("deep/er/dev.jsonl", "deep/er/dev"),
    ],
)
def test_the_split_of_a_file_is_in_its_name(name, part):
    assert files.part_of(PurePosixPath(name)) == part


def test_duplicates_and_evaluation_prompts_are_not_trained_on(tmp_path):
    rows = [{"prompt": f"p{n % 20}", "answer": n} for n in range(30)]
    source = write(tmp_path / "a.jsonl", rows)
    held_out = write(tmp_path / "b.jsonl", rows[5:9])
    drop = {"duplicates": "drop", "shuffle": False}
    loaded = datasets.load(make_config(source, eval=str(held_out), **drop), make_tokenizer())
    assert [prompt.text for prompt in loaded.train] == [f"p{n}" for n in [*range(5), *range(9, 20)]]
    assert loaded.dropped == 14 and loaded.describe() == (
        "data: 16 of 30 rows (dropped: 10 duplicates, 4 also in the evaluation), 4 of evaluation"
    )
    kept = datasets.load(make_config(source, eval=str(held_out), shuffle=False), make_tokenizer())
    assert kept.rows == 30 and kept.dropped == 0
    split = datasets.load(make_config(source, **drop), make_tokenizer())
    texts = [prompt.text for prompt in (*split.train, *split.part())]
    assert len(split.train) == 17 and sorted(texts) == sorted({f"p{n}" for n in range(20)})
    assert "every training prompt is an evaluation prompt too" in failure(
        make_config(source, eval=str(source), **drop)
    )


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda path: path.stem)
def test_no_shipped_configuration_reads_a_whole_data_set_of_the_hub(path):
    data = configuration.read(path).data
    for source in (data.train, data.eval):
        assert not parse.HUB_ID.fullmatch(source), f"{source}: which split and subset?"
    assert not data.train or data.eval not in ("", data.train), "rows to evaluate on of their own"


def test_a_hub_that_does_not_answer_is_a_data_error(monkeypatch):
    import huggingface_hub
    from huggingface_hub.errors import LocalEntryNotFoundError

    def offline(*_, **__):
        raise LocalEntryNotFoundError("no network")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    monkeypatch.setattr(huggingface_hub, "list_repo_files", offline)
    assert "someone/set: neither a local path nor available on the hub (no network)" in failure(
        make_config("someone/set")
    )


@pytest.mark.parametrize(
    ("source", "names"),
    [
        ("bench/*/test.jsonl", ["a/test", "b/test"]),
        ("bench/*/*.jsonl", ["a/test", "b/more", "b/test"]),
        ("bench/b/*.jsonl", ["more", "test"]),
        ("bench/a/test.jsonl", ["test"]),
        ("bench/a/*.jsonl", ["test"]),
        ("bench/a*/test.jsonl", ["a/test"]),
        ("bench:b/test", ["test"]),
        ("plain", ["a/rows", "b/rows"]),
        ("hf://datasets/someone/set/*/test.jsonl", ["a/test", "b/test"]),
    ],
)
def test_rows_of_files_with_the_same_name_have_different_ids(source, names, tmp_path, monkeypatch):
    """A row's default id is the file's path in the source, and the line."""
    import huggingface_hub

    for name in ("bench/a/test", "bench/b/test", "bench/b/more", "plain/a/rows", "plain/b/rows"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        write(tmp_path / f"{name}.jsonl", [{"prompt": name, "answer": 1}])
    bench = str(tmp_path / "bench")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: bench)
    for place in {source, source if source.startswith("hf:") else f"{tmp_path}/{source}"}:
        monkeypatch.chdir(tmp_path)
        loaded = datasets.load(make_config(place, eval_size=0), make_tokenizer())
        assert ids(loaded.train) == [f"{name}.jsonl:1" for name in names]
        for prompt, name in zip(loaded.train, names, strict=True):
            assert prompt.text.endswith(name)


def test_an_unset_variable_is_named(monkeypatch):
    monkeypatch.delenv("NOT_THERE", raising=False)
    message = failure(make_config("$NOT_THERE/train.jsonl"))
    assert "data.train '$NOT_THERE/train.jsonl'" in message
    assert "NOT_THERE is not set: export NOT_THERE=" in message


def test_all_mistakes_of_all_files_are_reported_at_once(tmp_path):
    bad = tmp_path / "bad.jsonl"
    lines = [
        b'{"prompt": "fine", "answer": "1", "id": 1}',
        b'{"prompt": "cut", "answer',
        b'{"prompt": "\xe9", "answer": "1", "id": 2}',
        b'{"prompt": "  ", "answer": "1", "id": 3}',
        b'{"prompt": "p", "answer": null, "id": 4}',
        b'{"prompt": "p", "answer": "1", "id": 1}',
        b'["prompt"]',
        b'{"question": "p", "answer": "1", "id": 7}',
        b'{"prompt": 5, "answer": [1], "id": 8}',
        b"",
    ]
    bad.write_bytes(b"\n".join(lines))
    wide = tmp_path / "wide.jsonl"
    wide.write_bytes('{"prompt": "p"}'.encode("utf-16"))
    (tmp_path / "broken.parquet").write_bytes(b"no parquet")
    message = failure(make_config(tmp_path, eval=str(tmp_path / "gone.jsonl"), id_column="id"))
    for part in (
        "the data has 12 problems",
        "bad.jsonl:2: bad JSON (Unterminated string",
        "bad.jsonl:3: not UTF-8 (byte 0xe9 at column 13): save the file as UTF-8",
        "bad.jsonl:4: empty prompt: fill in column 'prompt' or drop the row",
        "bad.jsonl:5: no answer: fill in column 'answer'",
        f"bad.jsonl:6: duplicate id ('1', first at {bad}:1): make data.id_column unique",
        "bad.jsonl:7: not an object (list)",
        "bad.jsonl:8: no column 'prompt': set data.prompt_column to one of 'answer', 'id', 'question'",
        "bad.jsonl:9: column 'prompt' holds a int: use text",
        "bad.jsonl:9: column 'answer' holds a list",
        "wide.jsonl: not UTF-8 but UTF-16",
        "broken.parquet: not a readable Parquet file",
        "gone.jsonl: no such file or folder: correct data.eval",
    ):
        assert part in message
    assert len(message.splitlines()) == 13


@pytest.mark.parametrize(
    ("written", "text"),
    [
        ("1e22", "10000000000000000000000"),
        ("1.5e-7", "0.00000015"),
        ("-2.50", "-2.5"),
        ("3.0", "3.0"),
        ("12345678901234567890123", "12345678901234567890123"),
        ('"1e22"', "1e22"),
        ('"nan"', "nan"),
    ],
)
def test_a_reference_is_the_number_that_is_written(written, text, tmp_path):
    source = tmp_path / "a.jsonl"
    source.write_text(f'{{"prompt": "p", "answer": {written}}}')
    (prompt,) = datasets.load(make_config(source, eval_size=0), make_tokenizer()).train
    assert prompt.row["answer"] == text


def test_numbers_of_a_float_column_have_no_exponent(tmp_path):
    import pyarrow.parquet

    def written(name: str, **columns) -> Path:
        pyarrow.parquet.write_table(pyarrow.table(columns), path := tmp_path / name)
        return path

    source = written("a.parquet", prompt=["p", "q", "r"], answer=[1e22, 0.5, 7.0])
    loaded = datasets.load(make_config(source, eval_size=0), make_tokenizer()).train
    assert [prompt.row["answer"] for prompt in loaded] == ["1" + "0" * 22, "0.5", "7.0"]
    source = written("b.parquet", prompt=["p", "q"], answer=[1.0, float("nan")])
    assert f"{source}:2: column 'answer' holds NaN: write it as text" in failure(
        make_config(source)
    )
    raw = pyarrow.array([b"\xff"], pyarrow.binary()).view(pyarrow.string())
    source = written("c.parquet", prompt=raw)
    assert f"{source}: not a readable Parquet file ('utf-8' codec" in failure(make_config(source))


def test_values_that_are_no_text_and_no_number_are_named(tmp_path):
    source = tmp_path / "a.jsonl"
    lines = [
        ('"p"', "NaN", '"a"'),
        ('"p"', "-Infinity", '"b"'),
        ('"p"', "1e999", '"c"'),
        ('"p"', "true", '"d"'),
        (r'"half \ud83d of it"', "1", '"e"'),
        ('"p"', r'"\udc00"', '"f"'),
        ('"p"', "1", r'"\ud800"'),
        (r'[{"role": "user", "content": "a\ud800"}]', "1", '"g"'),
        (r'"whole \ud83d\ude00"', "1", '"h"'),
        ('"p"', "1" * 5000, '"i"'),
    ]
    source.write_text(
        "".join(f'{{"prompt": {p}, "answer": {a}, "id": {i}}}\n' for p, a, i in lines)
    )
    config = make_config(source, id_column="id", chat_template=True)
    message = failure(config, make_tokenizer(TEMPLATE))
    for part in (
        "the data has 9 problems",
        f"{source}:1: column 'answer' holds NaN: write it as text, or drop the row",
        f"{source}:2: column 'answer' holds -Infinity",
        f"{source}:3: column 'answer' holds Infinity",
        f"{source}:4: column 'answer' holds true",
        f"{source}:5: the prompt has a lone surrogate (\\ud83d at character 6): write whole",
        f"{source}:6: the answer has a lone surrogate (\\udc00 at character 1)",
        f"{source}:7: the id has a lone surrogate (\\ud800 at character 1)",
        f"{source}:8: the prompt has a lone surrogate (\\ud800 at character 2)",
        f"{source}:10: bad JSON (Exceeds the limit",
    ):
        assert part in message


def test_a_question_that_cannot_be_asked_names_its_place():
    config, tokenizer = make_config(prompt_suffix="?"), make_tokenizer(TEMPLATE)
    for prompt, part in (
        ("a \ud800", "the prompt has a lone surrogate (\\ud800 at character 3): write whole"),
        ([{"role": "system", "content": "a"}], "the prompt has no message of the user for"),
    ):
        with pytest.raises(DataError) as error:
            prompt_format.encode(prompt, config, tokenizer, "p.jsonl:3")
        assert f"p.jsonl:3: {part}" in str(error.value)


def test_gsm8k_wants_one_number_in_every_reference(tmp_path):
    rows = [
        "#### 1/2",
        "10:30",
        "1e+22",
        "2^10",
        "1 or 3",
        "The long way. #### $1,234",
        "12 bananas",
    ]
    rows = [{"prompt": str(n), "answer": a} for n, a in enumerate([*rows, 7.5, "\\frac{3}{4}"])]
    source = write(tmp_path / "a.jsonl", rows)
    config = make_config(source, eval_size=1)
    for terms in ({"gsm8k": 1.0}, {"gsm8k_flexible": 0.5, "format": 0.1}):
        message = failure(replace(config, reward=replace(config.reward, terms=terms)))
        assert message.splitlines()[0] == "the data has 4 problems"
        for line, text in ((2, "10:30"), (4, "2^10"), (5, "1 or 3"), (7, "12 bananas")):
            place = f"{source}:{line}: the reference answer is not one number ({text!r}): "
            assert f"{place}correct it, or use the reward math" in message
    config = replace(config, reward=replace(config.reward, terms={"math": 1.0}))
    assert datasets.load(config, make_tokenizer()).rows == len(rows) - 1


def test_a_mistake_in_a_column_is_told_once_and_different_mistakes_20_times(tmp_path):
    rows = [{"question": "p", "answer": "1"} | ({"level": 1} if n % 2 else {}) for n in range(500)]
    source = write(tmp_path / "a.jsonl", rows)
    head, line = failure(make_config(source)).splitlines()
    assert head == "the data has 1 problem"
    assert line.strip() == (
        f"{source}:1: no column 'prompt': set data.prompt_column to one of 'question', 'answer', 'level' "
        "[also in 2, 3, 4 and 496 more]"
    )
    twice = [{"prompt": "p", "answer": "1", "id": n // 2} for n in range(1000)]
    message = failure(make_config(write(tmp_path / "b.jsonl", twice), id_column="id"))
    assert "the data has 500 problems, 20 shown" in message
    assert "[and 480 more: duplicate id]" in message
    assert len(message.splitlines()) == 21


# Rows as verl writes them: examples/data_preprocess/gsm8k.py.
VERL = [
    {
        "data_source": "openai/gsm8k",
        "prompt": [{"role": "user", "content": f"{n} + 1?"}],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(n + 1)},
        "extra_info": {"split": "train", "index": n},
    }
    for n in range(4)
]


def test_a_parquet_file_of_verl_loads_as_it_is(tmp_path):
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(VERL), source := tmp_path / "a.parquet")
    knobs = {
        "answer_column": "reward_model.ground_truth",
        "id_column": "extra_info.index",
        "chat_template": True,
        "chat_template_kwargs": {"mark": ""},
        "shuffle": False,
        "eval": str(source),
    }
    loaded = datasets.load(make_config(source, **knobs), make_tokenizer(TEMPLATE)).prompts(0)
    assert [prompt.text for prompt in loaded] == [f"[user]{n} + 1?[a]" for n in range(4)]
    assert [prompt.row["answer"] for prompt in loaded] == ["1", "2", "3", "4"]
    assert ids(loaded) == ["0", "1", "2", "3"]
    assert loaded[1].row["reward_model"] == VERL[1]["reward_model"]
    message = failure(make_config(source, **knobs | {"answer_column": "answer"}), make_tokenizer())
    assert "no chat template" in message
    message = failure(
        make_config(source, **knobs | {"answer_column": "answer"}), make_tokenizer(TEMPLATE)
    )
    assert "set data.answer_column to one of 'data_source', 'prompt', 'ability', " in message
    assert "'reward_model.ground_truth', 'extra_info." in message
    message = failure(
        make_config(source, **knobs | {"answer_column": "reward_model"}), make_tokenizer(TEMPLATE)
    )
    assert "holds a dict: set data.answer_column to reward_model." in message


@pytest.mark.parametrize("kind", ["list.json", "lines.json", "table.csv"])
def test_lists_and_tables_give_the_rows_of_the_jsonl_file(kind, tmp_path):
    """Values of a table stay the text that is written there."""
    rows = [
        {"prompt": 'say "a, b"\nand c', "answer": "007", "note": ""},
        {"prompt": "größer", "answer": "1e3", "note": "x"},
    ]
    source = tmp_path / kind
    if kind == "list.json":
        source.write_text(json.dumps(rows, indent=2))
    elif kind == "lines.json":
        write(source, rows)
    else:
        with source.open("w", newline="", encoding="utf-8-sig") as file:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)
    (tmp_path / "dataset_infos.json").write_text("{}")
    for place in (source, tmp_path):
        config = make_config(place, prompts=2, shuffle=False, eval=str(source))
        found = datasets.load(config, make_tokenizer()).prompts(0)
        assert [{name: prompt.row[name] for name in rows[0]} for prompt in found] == rows


def test_mistakes_of_lists_and_tables_name_the_place(tmp_path):
    for name, text in {
        "cut.json": '[{"prompt": "p"',
        "mixed.json": '[{"prompt": "p", "answer": "1"}, 3]',
        "none.json": "[]",
        "long.csv": "prompt,answer\np,1\np,1,234\n",
        "open.csv": 'prompt,answer\n"p,1\n',
        "twice.csv": "prompt,answer,prompt\np,1,q\n",
        "empty.csv": "prompt,answer\n",
    }.items():
        (tmp_path / name).write_text(text)
    message = failure(make_config(tmp_path))
    for part in (
        "cut.json: bad JSON (Expecting ',' delimiter: line 1 column 16 (char 15)): write a list",
        "mixed.json:2: not an object (int)",
        "none.json: the file is empty",
        "long.csv:3: not as long as the header (3 values, and the header has 2 columns): quote",
        "open.csv:2: bad CSV (unexpected end of data): quote",
        "twice.csv:1: a column is named twice ('prompt'): rename one",
        "empty.csv: the file is empty",
    ):
        assert part in message, message


def test_empty_sources_are_refused(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty.jsonl").write_text("\n\n")
    (tmp_path / "notes.txt").write_text("x")
    assert "no .jsonl, .json, .csv or .parquet file there" in failure(
        make_config(tmp_path / "folder")
    )
    assert "the file is empty" in failure(make_config(tmp_path / "empty.jsonl"))
    assert "unknown kind of file '.txt'" in failure(make_config(tmp_path / "notes.txt"))
    source = write(tmp_path / "few.jsonl", number_rows(3))
    assert "data.eval_size 3 is not below the 3 different rows" in failure(make_config(source))


def test_solutions_of_a_file_are_read_checked_and_repeated(tmp_path):
    source = write(tmp_path / "a.jsonl", number_rows(5))
    tokenizer = make_tokenizer()
    config = make_config(source, sft_steps=1, eval=str(source))
    pairs = datasets.load(config, tokenizer).solutions(0, 10)
    texts = [(tokenizer.decode(prompt), tokenizer.decode(solution)) for prompt, solution in pairs]
    expected = {(f"p{i}", f"s{i}{tokenizer.eos_token}") for i in range(5)}
    assert set(texts[:5]) == set(texts[5:]) == expected
    with pytest.raises(DataError, match="sft.steps is 0"):
        datasets.load(replace(config, sft=replace(config.sft, steps=0)), tokenizer).solutions(0, 1)
    no_solution = write(tmp_path / "b.jsonl", [{"prompt": "p", "answer": "1"}] * 5)
    assert "set sft.solution_column to one of" in failure(make_config(no_solution, sft_steps=1))
    short = replace(config, rollout=replace(config.rollout, max_new_tokens=2))
    assert "every solution is longer than rollout.max_new_tokens 2" in failure(short)


def test_a_warm_start_learns_all_solutions_of_a_prompt(tmp_path):
    """RL has each prompt once; a pair of prompt and solution is learned once, and none of a held-out prompt."""
    pairs = ("a 1", "a 2", "b 1", "a 1", "c 1", "c 3", "b 1", "d 99999999")
    rows = [{"prompt": p, "answer": "1", "solution": s} for p, s in map(str.split, pairs)]
    source = write(tmp_path / "a.jsonl", rows)
    held_out = write(tmp_path / "b.jsonl", rows[4:5])
    knobs = {"eval": str(held_out), "sft_steps": 1, "duplicates": "drop", "shuffle": False}
    config, tokenizer = make_config(source, **knobs), make_tokenizer()
    config = replace(config, rollout=replace(config.rollout, max_new_tokens=5))
    loaded = datasets.load(config, tokenizer)
    assert [prompt.text for prompt in loaded.train] == ["a", "b", "d"]
    learned = [" ".join(map(tokenizer.decode, pair)) for pair in loaded.trainable]
    assert learned == [f"{one}{tokenizer.eos_token}" for one in ("a 1", "a 2", "b 1")]
    assert loaded.describe() == (
        "data: 3 of 8 rows (dropped: 4 duplicates, 1 also in the evaluation), 1 of evaluation; "
        "4 solutions for the warm start; 1 solutions longer than rollout.max_new_tokens are not trained on"
    )


@pytest.mark.parametrize("template", ["", TEMPLATE])
def test_a_task_that_does_not_fit_names_both_numbers(template):
    tokenizer = make_tokenizer(template)
    config = make_config(chat_template=bool(template), max_prompt_tokens=12)
    tokens = 13 + len("[user][a]") * bool(template)
    assert f"prompt has {tokens} tokens and data.max_prompt_tokens is 12" in failure(
        config, tokenizer
    )
    short = replace(make_config(sft_steps=1), rollout=replace(Config().rollout, max_new_tokens=50))
    assert "solution (with EOS) has 77 tokens and rollout.max_new_tokens is 50" in failure(short)


def test_a_template_that_rejects_the_rows_of_a_task_is_a_data_error():
    strict = make_tokenizer("{{ raise_exception('no') }}")
    assert "the chat template rejects row longest: no" in failure(
        make_config(chat_template=True), strict
    )


def test_rows_of_a_task_with_one_id_are_refused():
    class Nameless(tasks.Fold):
        def rows(self, *given):
            return [replace(row, id="row") for row in super().rows(*given)]

    config = make_config()
    own = replace(config.data, task=extension.named("data.task", Nameless))
    message = failure(replace(config, data=own))
    assert (
        "3 rows of the task '<local>:Nameless' have the id 'row': give each row its own" in message
    )


def test_the_tokenizer_is_the_tasks_own_or_that_of_a_directory(tmp_path):
    config = make_config()
    assert prompt_format.tokenizer_of(config).eos_token == tasks.EOS
    make_tokenizer(TEMPLATE).save_pretrained(tmp_path)
    loaded = prompt_format.tokenizer_of(
        replace(config, model=replace(config.model, path=str(tmp_path)))
    )
    assert len(loaded) == len(make_tokenizer()) and loaded.chat_template == TEMPLATE
    with pytest.raises(DataError, match="set model.path or model.tokenizer"):
        prompt_format.tokenizer_of(make_config("a.jsonl"))
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="model.tokenizer .* has no loadable tokenizer"):
        prompt_format.tokenizer_of(
            replace(config, model=replace(config.model, tokenizer=str(tmp_path / "none")))
        )
    for missing in (str(tmp_path / "missing"), "./missing", "missing"):
        with pytest.raises(DataError, match="model.path .* is neither a directory nor a hub id"):
            prompt_format.tokenizer_of(replace(config, model=replace(config.model, path=missing)))
