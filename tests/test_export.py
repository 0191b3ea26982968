"""The export command writes the policy of the requested checkpoint."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

from tlt_jax import export
from tlt_jax.checkpoint.store import Store
from tlt_jax.config import load as configuration
from tlt_jax.data import prompt_format
from tlt_jax.distributed import mesh as meshes
from tlt_jax.drafter import recipe as drafter_recipe
from tlt_jax.drafter.recipe import idle_recipe
from tlt_jax.errors import ConfigError
from tlt_jax.models import from_config, hf, hf_config, hf_drafter
from tlt_jax.train import policy_update
from tlt_jax.train.policy_update import Recipe

MODEL = """
model:
  init: {hidden_size: 32, num_hidden_layers: 1, num_attention_heads: 2, intermediate_size: 32}
mesh: {data: 2, fake_devices: 8}
speculation: {drafter: none}
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run folder with the steps 1 and 2; the weights of step n are n."""
    folder = tmp_path_factory.mktemp("run")
    source = folder / "source.yaml"
    source.write_text(f"run: {folder}{MODEL}")
    config = configuration.read(source)
    (folder / "config.yaml").write_text(configuration.to_yaml(config))
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    recipe = Recipe.of(config, model, meshes.make_mesh(2, 1), 1)
    with Store(folder, keep=2) as store:
        for step in (1, 2):
            store.save(
                step,
                {"policy": jax.tree.map(partial(fill, step), policy_update.abstract_state(recipe))},
            )
    return folder


def fill(value, leaf):
    return jax.device_put(np.full(leaf.shape, value, leaf.dtype), leaf.sharding)


def call(monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", ["export", *map(str, arguments)])
    monkeypatch.setattr("tlt_jax.cli.set_environment", lambda config: None)
    return export.main()


def test_the_newest_and_any_kept_checkpoint_are_exported(run, tmp_path, monkeypatch):
    assert call(monkeypatch, "--run", run, "--out", tmp_path / "new", "--mesh.data", "1") == 0
    old = "--out", tmp_path / "old", "--step", "1", "--dtype", "bfloat16"
    assert call(monkeypatch, "--run", run, *old) == 0
    for name, value in (("new", 2), ("old", 1)):
        config = hf_config.read_config(tmp_path / name)
        params = hf.load(tmp_path / name, config, meshes.make_mesh(1, 1), "float32")
        assert (np.asarray(params.layers.gate) == value).all()
        assert (tmp_path / name / "tokenizer.json").is_file()
    assert '"torch_dtype": "bfloat16"' in (tmp_path / "old" / "config.json").read_text()


def test_a_run_of_another_version_is_named(run, tmp_path, monkeypatch, capsys):
    path = run / "config.yaml"
    ours = path.read_text()
    try:
        path.write_text(ours + "pilot: {pace: 3}\n")
        with pytest.raises(SystemExit) as stop:
            call(monkeypatch, "--run", run, "--out", tmp_path / "out")
    finally:
        path.write_text(ours)
    error = capsys.readouterr().err
    assert stop.value.code == 2 and error.startswith("error: ") and error.count("\n") == 1
    assert "the run was made by another version of tlt_jax, with pilot," in error


def test_a_checkpoint_that_does_not_exist_is_named(run):
    config = configuration.read(run / "config.yaml")
    with pytest.raises(ConfigError, match="best.*only \\[1, 2\\]"):
        export.export(config, run, Path("unused"), "best")
    with pytest.raises(ConfigError, match="--step 7.*only \\[1, 2\\]"):
        export.export(config, run, Path("unused"), "7")
    with pytest.raises(ConfigError, match="'soon' is neither"):
        export.export(config, run, Path("unused"), "soon")


def test_help_names_every_option(monkeypatch, capsys):
    with pytest.raises(SystemExit):
        call(monkeypatch, "--help")
    shown = capsys.readouterr().out
    assert all(option in shown for option in ("--run", "--out", "--step", "--dtype", "--mesh.data"))


@pytest.mark.parametrize("kind", ["eagle3", "dspark"])
def test_the_drafter_of_a_checkpoint_is_exported_and_a_run_without_one_is_named(
    run, tmp_path, monkeypatch, capsys, kind
):
    folder = tmp_path / "adaptive"
    source = tmp_path / "source.yaml"
    source.write_text(
        f"run: {folder}{MODEL.replace('none', 'adaptive')}drafter_training: {{kind: {kind}}}\n"
    )
    config = configuration.read(source)
    folder.mkdir()
    (folder / "config.yaml").write_text(configuration.to_yaml(config))
    model = from_config.model_config(config, prompt_format.tokenizer_of(config))
    drafter = from_config.new_drafter_config(config, model)
    recipe = idle_recipe(config, model, drafter, meshes.make_mesh(2, 1))
    with Store(folder, keep=2) as store:
        state = jax.tree.map(partial(fill, 3), drafter_recipe.abstract_state(recipe))
        store.save(1, {"drafter": state})
    where = "--run", folder, "--out", tmp_path / "out"
    assert call(monkeypatch, *where, "--drafter", "--mesh.data", "1") == 0
    assert "the drafter after step 1" in capsys.readouterr().out
    read, params = hf_drafter.load(
        tmp_path / "out", model, meshes.make_mesh(1, 1), "float32", model.max_positions
    )
    assert read == drafter
    padded = [
        name
        for name in ("head", "markov_in", "markov_out")
        if getattr(params, name, None) is not None
    ]
    cut = {name: getattr(params, name)[: model.vocab_size] for name in padded}
    trained = jax.tree.leaves(params.replace(**cut))
    assert padded and all((np.asarray(leaf) == 3).all() for leaf in trained)
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, "--run", run, "--out", tmp_path / "none", "--drafter")
    assert stopped.value.code == 2
    assert "trains no drafter, its speculation.drafter is none" in capsys.readouterr().err
    untrained = "--run", run, "--out", tmp_path / "none", "--speculation.drafter", "adaptive"
    with pytest.raises(SystemExit) as stopped:
        call(monkeypatch, *untrained, "--drafter")
    assert stopped.value.code == 2
    error = capsys.readouterr().err
    assert "--drafter: the run had trained none at step 2" in error and error.count("\n") == 1
