"""Directories of adapters in the format of peft: what we write is read back, used as merged, and refused by name."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tlt_jax import generate
from tlt_jax.config import Config
from tlt_jax.config.schema import LORA_TARGETS
from tlt_jax.data import prompt_format
from tlt_jax.data.adapter_files import CONFIG, WEIGHTS
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.errors import ModelError
from tlt_jax.models import from_config, hf, hf_adapter, hf_config, lora
from tlt_jax.models.lora import Adapters
from tlt_jax.models.low_rank import Lora

LORA = Lora(3, 6.0, ("q_proj", "v_proj", "down_proj"))
CASE = "llama_bias"


def adapters_of(chosen: Lora, model, mesh, dtype: str = "float32", seed: int = 0) -> Adapters:
    """Random adapters of which both factors are random; the same on every mesh."""
    random = np.random.default_rng(seed)

    def draw(leaf):
        drawn = random.normal(size=leaf.shape) / np.sqrt(leaf.shape[-1])
        return jax.device_put(drawn.astype(dtype), leaf.sharding)

    return jax.tree.map(draw, lora.abstract(chosen, model, mesh, dtype))


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """The directory of a base, and that of its adapters, written from a mesh of 2 x 2 devices."""
    folder = tmp_path_factory.mktemp("adapters")
    base, mesh = model_cases.write(CASE, folder / "base"), make_mesh(2, 2)
    model = hf_config.read_config(base)
    adapters = adapters_of(LORA, model, mesh)
    hf_adapter.save(adapters, LORA, model, folder / "adapter", mesh, str(base), None, "float32")
    return base, folder / "adapter"


def copied(directory: Path, place: Path, **changes) -> Path:
    """A copy of the directory with other settings."""
    place.mkdir()
    settings = json.loads((directory / CONFIG).read_text()) | changes
    (place / CONFIG).write_text(json.dumps(settings))
    (place / WEIGHTS).write_bytes((directory / WEIGHTS).read_bytes())
    return place


def test_what_is_written_is_read_back_on_another_mesh_bit_by_bit(saved):
    base, directory = saved
    model, mesh = hf_config.read_config(base), make_mesh(1, 1)
    assert hf_adapter.read_lora(directory) == LORA
    found = hf_adapter.load(directory, LORA, model, mesh, "float32")
    jax.tree.map(np.testing.assert_array_equal, found, adapters_of(LORA, model, mesh))
    names = load_file(directory / WEIGHTS)
    prefix = "base_model.model.model.layers.1.mlp.down_proj"
    assert names[f"{prefix}.lora_A.weight"].shape == (3, 48)
    assert names[f"{prefix}.lora_B.weight"].shape == (32, 3)
    assert len(names) == 2 * 3 * 2


def test_adapters_of_a_shared_expert_have_its_name_and_are_read_back(tmp_path):
    base, mesh = model_cases.write("qwen2_moe", tmp_path / "base"), make_mesh(1, 1)
    model, directory = hf_config.read_config(base), tmp_path / "adapter"
    adapters = adapters_of(LORA, model, mesh)
    hf_adapter.save(adapters, LORA, model, directory, mesh, str(base), None, "float32")
    matrix = "model.layers.1.mlp.shared_expert.down_proj"
    assert f"base_model.model.{matrix}.lora_A.weight" in load_file(directory / WEIGHTS)
    settings = json.loads((directory / CONFIG).read_text())
    assert settings["target_modules"] == ["q_proj", "v_proj"]
    assert f"{matrix}.weight" in settings["target_parameters"]
    assert hf_adapter.read_lora(directory) == LORA
    found = hf_adapter.load(directory, LORA, model, mesh, "float32")
    jax.tree.map(np.testing.assert_array_equal, found, adapters)
    others = {"target_parameters": ["model.layers.0.mlp.experts.gate_up_proj"]}
    with pytest.raises(ModelError, match="target_parameters .*gate_up_proj.* is not supported"):
        hf_adapter.read_lora(copied(directory, tmp_path / "other", **others))


def test_a_path_of_adapters_is_their_base_with_them_merged(saved):
    base, directory = saved
    config = Config(model=replace(Config().model, path=str(directory)))
    model, mesh = from_config.model_config(config, None), make_mesh(2, 2)
    found = from_config.load_policy(config, model, mesh)
    tensors = model_cases.arrays(CASE)
    for name, tensor in tensors.items():
        if (layer := re.fullmatch(r"model\.layers\.1\.(.*)\.weight", name)) is None:
            continue
        leaf = {value: key for key, value in hf.IN_LAYER.items()}[f"{layer[1]}.weight"]
        factors, prefix = load_file(directory / WEIGHTS), f"base_model.model.{name[:-7]}"
        if f"{prefix}.lora_A.weight" in factors:
            a, b = (factors[f"{prefix}.lora_{x}.weight"].astype(np.float64) for x in "AB")
            tensor = tensor + 2 * b @ a
        ours = np.asarray(getattr(found.layers, leaf))[1]
        np.testing.assert_allclose(ours, tensor, rtol=0, atol=1e-6, err_msg=name)
    assert {path.name for path in map(Path, [CONFIG, "config.json"])} <= {
        name for name, *_ in from_config.fingerprint(config)
    }


def test_the_scale_of_rslora_is_alpha_over_the_root_of_the_rank(saved, tmp_path):
    found = hf_adapter.read_lora(copied(saved[1], tmp_path / "rs", use_rslora=True))
    assert found.scale == pytest.approx(6.0 / 3**0.5)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"peft_type": "IA3"}, "peft_type 'IA3' is not supported, only 'LORA'"),
        ({"use_dora": True}, "use_dora True is not supported: merge the adapter with peft's"),
        ({"bias": "all"}, "bias 'all' is not supported"),
        ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\] is not supported"),
        ({"rank_pattern": {"q_proj": 4}}, "rank_pattern {'q_proj': 4} is not supported"),
        ({"alpha_pattern": {"q_proj": 4}}, "alpha_pattern"),
        ({"layers_to_transform": [0]}, "layers_to_transform"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"use_new_thing": 3}, "use_new_thing 3 is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights 'pissa' changed the base's weights"),
        ({"r": 0}, "r 0: use a number above 0"),
    ],
)
def test_settings_that_are_not_computed_are_refused_by_name(saved, tmp_path, changes, said):
    with pytest.raises(ModelError, match=said):
        hf_adapter.read_lora(copied(saved[1], tmp_path / "other", **changes))


def test_settings_that_change_nothing_are_read(saved, tmp_path):
    changes = {"lora_dropout": 0.1, "target_modules": ".*_proj", "revision": None, "task_type": None,
               "use_qalora": False, "qalora_group_size": 16, "megatron_core": "megatron.core",
               "arrow_config": None, "init_lora_weights": "gaussian"}  # fmt: skip
    assert hf_adapter.read_lora(copied(saved[1], tmp_path / "same", **changes)) == LORA


def test_tensors_that_do_not_fit_are_named(saved, tmp_path):
    base, directory = saved
    model, mesh = hf_config.read_config(base), make_mesh(1, 1)
    tensors = load_file(directory / WEIGHTS)
    prefix = "base_model.model.model.layers.0.self_attn"

    def refused(changed: dict, said: str) -> None:
        save_file(changed, other / WEIGHTS)
        with pytest.raises(ModelError, match=said):
            hf_adapter.load(other, hf_adapter.read_lora(other), model, mesh, "float32")

    other = copied(directory, tmp_path / "other")
    lacking = {
        name: one for name, one in tensors.items() if name != f"{prefix}.q_proj.lora_B.weight"
    }
    refused(lacking, f"adapter_config.json and base: missing {prefix}.q_proj.lora_B.weight")
    wide = tensors | {f"{prefix}.v_proj.lora_A.weight": np.zeros((3, 33), np.float32)}
    refused(wide, r"v_proj.lora_A.weight has shape \(3, 33\), .* says \(3, 32\)")
    head = tensors | {"base_model.model.lm_head.lora_A.weight": np.zeros((3, 32), np.float32)}
    refused(head, "unknown base_model.model.lm_head.lora_A.weight")
    experts = {f"{prefix}.c_attn.lora_A.weight": np.zeros((3, 32), np.float32)}
    refused(experts, f"has adapters of c_attn: supported are {', '.join(LORA_TARGETS)}")


def test_a_base_that_is_not_there_is_named(saved, tmp_path):
    for base, said in (
        (None, "names no base: set base_model_name_or_path"),
        ("/nowhere/x", "correct it there"),
    ):
        directory = copied(saved[1], tmp_path / f"of_{base is None}", base_model_name_or_path=base)
        config = Config(model=replace(Config().model, path=str(directory)))
        with pytest.raises(ModelError, match=said):
            from_config.model_config(config, None)


def test_adapters_continue_only_with_their_own_rank_alpha_and_targets(saved):
    hf_adapter.check(LORA, saved[1])
    for changes in ({"rank": 4}, {"alpha": 3.0}, {"targets": ("q_proj", "v_proj")}):
        with pytest.raises(ModelError, match="use its values, or rank 0") as caught:
            hf_adapter.check(replace(LORA, **changes), saved[1])
        assert "{rank: 3, alpha: 6, targets: [q_proj, v_proj, down_proj]}" in str(caught.value)
        assert "\n" not in str(caught.value)


def test_generate_answers_with_adapters_as_with_the_merged_model(saved, tmp_path, capsys):
    """Where the adapters have no tokenizer, that of the base is used, and the file of their run is read."""
    base, directory = saved
    config = Config(model=replace(Config().model, path=str(directory)))
    model, mesh = from_config.model_config(config, None), make_mesh(1, 1)
    merged = from_config.load_policy(config, model, mesh)
    hf.save(merged, model, tmp_path / "merged", mesh, None, jnp.float32)
    words = ["--prompt-ids", "1,2,3", "--max-new-tokens", "8", "--temperature", "0", "--json"]
    found = []
    for path in (directory, tmp_path / "merged", base):
        assert generate.main(["--model", str(path), *words]) == 0
        (answer,) = json.loads(capsys.readouterr().out)["completions"]
        found.append((answer["token_ids"], answer["logprobs"]))
    assert found[0] == found[1] and found[0] != found[2]


def test_the_tokenizer_of_adapters_is_their_own_or_their_bases(saved, tmp_path):
    from tlt_jax.data import tasks

    base = tmp_path / "base"
    tasks.make("fold", {}).tokenizer().save_pretrained(base)
    directory = copied(saved[1], tmp_path / "adapter", base_model_name_or_path=str(base))
    config = Config(model=replace(Config().model, path=str(directory)))
    whole = len(prompt_format.tokenizer_of(config))
    own = tasks.make("fold", {}).tokenizer()
    own.add_tokens(["<more>"])
    own.save_pretrained(directory)
    assert len(prompt_format.tokenizer_of(config)) == whole + 1


JOINED = Lora(2, 3.0, ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"))


def test_adapters_of_a_type_whose_files_join_matrices_are_joined_and_read_back(tmp_path):
    base, mesh = model_cases.write("phi3", tmp_path / "base"), make_mesh(2, 2)
    model = hf_config.read_config(base)
    adapters = adapters_of(JOINED, model, mesh)
    hf_adapter.save(adapters, JOINED, model, tmp_path / "ours", mesh, str(base), None, "float32")
    assert hf_adapter.read_lora(tmp_path / "ours") == JOINED
    found = hf_adapter.load(tmp_path / "ours", JOINED, model, make_mesh(1, 4), "float32")
    jax.tree.map(np.testing.assert_array_equal, found, adapters)
    stored = load_file(tmp_path / "ours" / WEIGHTS)
    name = "base_model.model.model.layers.1.self_attn.qkv_proj.lora_{}.weight"
    assert stored[name.format("A")].shape == (6, 32) and stored[name.format("B")].shape == (64, 6)
    stored[name.format("B")][0, 5] = 1
    save_file(stored, tmp_path / "ours" / WEIGHTS)
    with pytest.raises(ModelError, match="qkv_proj.lora_B.weight changes several of the matrices"):
        hf_adapter.load(tmp_path / "ours", JOINED, model, mesh, "float32")
    for changes in ({"rank_pattern": {"qkv_proj": 6}}, {"use_rslora": True}):
        folder = copied(tmp_path / "ours", tmp_path / f"other{len(str(changes))}", **changes)
        with pytest.raises(ModelError, match="rank_pattern .* is not supported: merge"):
            hf_adapter.read_lora(folder)
    with pytest.raises(ModelError, match="phi3 join q_proj, k_proj, v_proj in self_attn.qkv_proj"):
        lora.weights(Lora(2, 4.0, ("q_proj",)), model, 1)
