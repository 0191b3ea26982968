"""The table of published drafters, and runs that start from one of it; no hub: its download is replaced."""

from __future__ import annotations

import re

import pytest

from tlt_jax import cli
from tlt_jax.config import Config
from tlt_jax.config.schema import DrafterTraining, Model
from tlt_jax.drafter import __main__ as command
from tlt_jax.errors import ModelError
from tlt_jax.models import drafter as drafters, from_config, published

# What is published in other layouts, and is listed all the same.
NOT_READ = {"speculators", "pytorch_model.bin"}


def starting(base: str, kind: str = "eagle3", start: str = "hub") -> Config:
    training = DrafterTraining(kind=kind, start=start)
    return Config(model=Model(path=base), drafter_training=training)


def test_the_table_is_sound():
    rows = published.table()
    names = [one.drafter for one in rows]
    assert len(set(names)) == len(names) > 20
    for one in rows:
        assert all(re.fullmatch(r"[\w.-]+/[\w.-]+", name) for name in (one.base, one.drafter)), one
        assert one.kind in drafters.KINDS and one.source, one
        assert from_config.is_read(one) == (one.layout not in NOT_READ), one
    assert {one.kind for one in rows} == set(drafters.KINDS)


@pytest.mark.parametrize(
    ("base", "kind", "drafter"),
    [
        ("Qwen/Qwen3-8B", "eagle3", "AngelSlim/Qwen3-8B_eagle3"),
        ("qwen/qwen3-8b", "dspark", "deepseek-ai/dspark_qwen3_8b_block7"),
        ("Qwen/Qwen3-8B", "dflash", "z-lab/Qwen3-8B-DFlash-b16"),
        ("Qwen/Qwen3-8B", "eagle", "AngelSlim/Qwen3-8B_eagle3"),  # none of this kind is known
        ("Qwen/Qwen2.5-7B", "eagle3", "mit-han-lab/Qwen2.5-7B-Eagle-RL"),
    ],
)
def test_hub_takes_the_drafter_of_the_base_and_says_so(
    base, kind, drafter, monkeypatch, tmp_path, capsys
):
    asked = []

    def download(name, **_):
        asked.append(name)
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = starting(base, kind)
    assert from_config.start_directory(config) == tmp_path and asked == [drafter]
    from_config.say_start(config)
    assert drafter in (said := capsys.readouterr().out) and "licence" in said


@pytest.mark.parametrize("base", ["Qwen/Qwen3-0.6B", "Qwen/Qwen2-7B-Instruct", "models/qwen", ""])
def test_a_base_without_a_drafter_that_is_read_is_refused_with_those_that_have_one(base):
    with pytest.raises(ModelError, match="no published drafter.*Qwen/Qwen3-8B"):
        from_config.start_directory(starting(base))


def test_a_directory_is_taken_as_it_is_and_another_hub_id_is_downloaded(monkeypatch, tmp_path):
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **_: f"/hub/{name}")
    at = from_config.start_directory
    assert at(starting("a/b", start=str(tmp_path))) == tmp_path
    assert str(at(starting("a/b", start="owner/drafter"))) == "/hub/owner/drafter"
    monkeypatch.chdir(tmp_path)
    (tmp_path / "owner" / "drafter").mkdir(parents=True)
    assert str(at(starting("a/b", start="owner/drafter"))) == "owner/drafter"


def test_the_command_lists_drafters_by_base(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["drafters", "qwen3-8b"])
    assert command.main() == cli.DONE
    said = capsys.readouterr().out
    assert "z-lab/Qwen3-8B-DFlash-b16" in said and "Llama" not in said
    assert re.search(r"speculator.dflash .*speculators is not read", said)
    monkeypatch.setattr("sys.argv", ["drafters", "nobody"])
    assert command.main() == 2
