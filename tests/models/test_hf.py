"""Hugging Face directories: what is read, what is written, and what is refused by name."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import ModelError
from tlt_jax.models import hf, hf_config


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(2, 2)


def write(folder, tensors, case="qwen3", **changes):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model_cases.raw_config(case) | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def read_all(folder):
    return {
        name: array
        for path in folder.glob("*.safetensors")
        for name, array in load_file(path).items()
    }


@pytest.mark.parametrize(
    ("case", "shard_bytes"),
    [("qwen2", hf.SHARD_BYTES), ("qwen3_bias", 20_000), ("llama_bias", hf.SHARD_BYTES)],
)
def test_a_round_trip_keeps_every_bit(case, shard_bytes, mesh, tmp_path):
    source = model_cases.write(case, tmp_path / "source")
    config = hf_config.read_config(source)
    params = hf.load(source, config, mesh, "float32")
    hf.save(params, config, tmp_path / "copy", mesh, None, "float32", shard_bytes)
    ours, theirs = read_all(tmp_path / "copy"), model_cases.arrays(case)
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert (tmp_path / "copy" / hf.INDEX).exists() == (shard_bytes < 1 << 20)
    assert hf_config.read_config(tmp_path / "copy") == config
    again = hf.load(tmp_path / "copy", config, meshes.make_mesh(1, 4), "float32")
    jax.tree.map(np.testing.assert_array_equal, again, params)


def test_bfloat16_and_an_earlier_export_are_handled(mesh, tmp_path):
    config = hf_config.read_config(model_cases.write("llama", tmp_path / "source"))
    params = hf.load(tmp_path / "source", config, mesh, "float32")
    hf.save(params, config, tmp_path / "copy", mesh, None, "float32", 20_000)
    hf.save(params, config, tmp_path / "copy", mesh, None, "bfloat16")
    assert [path.name for path in tmp_path.joinpath("copy").glob("*.safetensors*")] == [
        "model.safetensors"
    ]
    assert json.loads((tmp_path / "copy" / "config.json").read_text())["torch_dtype"] == "bfloat16"
    saved = read_all(tmp_path / "copy")
    for name, array in model_cases.arrays("llama").items():
        np.testing.assert_array_equal(saved[name], array.astype(jnp.bfloat16))
    again = hf.load(tmp_path / "copy", config, mesh, "bfloat16")
    jax.tree.map(
        lambda one, other: np.testing.assert_array_equal(one, other.astype(jnp.bfloat16)),
        again,
        params,
    )


def test_only_the_bytes_of_shards_are_read(mesh, tmp_path, monkeypatch):
    source = model_cases.write("qwen3", tmp_path / "source")
    sizes = []

    class Recorded:
        def __init__(self, inner):
            self.inner = inner

        def __getitem__(self, index):
            part = self.inner[index]
            sizes.append((part.size, int(np.prod(self.inner.get_shape()))))
            return part

        def __getattr__(self, name):
            return getattr(self.inner, name)

    def recorded(path, stack, slices=hf.slices):
        return {name: Recorded(one) for name, one in slices(path, stack).items()}

    monkeypatch.setattr(hf, "slices", recorded)
    hf.load(source, hf_config.read_config(source), mesh, "float32")
    quarter = [part / whole for part, whole in sizes if whole > 2 * 37 * 8]
    assert quarter
    assert max(quarter) < 0.5  # 37 rows in shards of 32 and 5; all others are exact quarters


def test_tensors_that_do_not_fit_are_named(mesh, tmp_path):
    tensors = model_cases.arrays("qwen3")
    moved = tensors.pop("model.layers.1.self_attn.q_norm.weight")
    tensors["model.layers.1.self_attn.norm_q.weight"] = moved
    tensors["model.layers.0.mlp.up_proj.weight"] = tensors["model.layers.0.mlp.up_proj.weight"][
        :40
    ].copy()
    folder = write(tmp_path / "bad", tensors)
    with pytest.raises(ModelError) as error:
        hf.load(folder, hf_config.read_config(folder), mesh, "float32")
    assert "missing model.layers.1.self_attn.q_norm.weight" in str(error.value)
    assert "unknown model.layers.1.self_attn.norm_q.weight" in str(error.value)
    assert "mlp.up_proj.weight has shape (40, 32), config.json says (48, 32)" in str(error.value)


def test_a_tied_model_may_carry_its_head_and_an_untied_one_must(mesh, tmp_path):
    tensors = model_cases.arrays("qwen3")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    folder = write(tmp_path / "both", tensors)
    assert hf.load(folder, hf_config.read_config(folder), mesh, "float32").head is None
    folder = write(tmp_path / "untied", model_cases.arrays("qwen3"), tie_word_embeddings=False)
    with pytest.raises(ModelError, match="missing lm_head.weight"):
        hf.load(folder, hf_config.read_config(folder), mesh, "float32")


def test_damaged_directories_are_refused_by_name(mesh, tmp_path):
    folder = model_cases.write("qwen2", tmp_path / "model")
    config = hf_config.read_config(folder)
    (folder / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelError, match="model.safetensors is not a safetensors file"):
        hf.load(folder, config, mesh, "float32")
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        hf.load(folder, config, mesh, "float32")
    (folder / hf.INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    with pytest.raises(ModelError, match="names model-1.safetensors"):
        hf.load(folder, config, mesh, "float32")
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json is not JSON"):
        hf_config.read_config(folder)
    with pytest.raises(ModelError, match="no config.json"):
        hf_config.read_config(tmp_path)


def test_a_path_is_a_directory_or_a_hub_id(tmp_path, monkeypatch):
    assert hf.resolve(tmp_path) == tmp_path
    with pytest.raises(ModelError, match="neither a directory nor a hub id"):
        hf.resolve(tmp_path / "missing")
    requested = []
    monkeypatch.setattr(
        "huggingface_hub.snapshot_download",
        lambda name, **_: requested.append(name) or str(tmp_path),
    )
    assert hf.resolve("owner/name-1.5B") == tmp_path
    assert requested == ["owner/name-1.5B"]

    def offline(*_, **__):
        raise OSError("cannot reach the hub")

    monkeypatch.setattr("huggingface_hub.snapshot_download", offline)
    with pytest.raises(ModelError, match="its download failed: cannot reach"):
        hf.resolve("owner/name")


def test_both_dialects_say_the_same():
    base = model_cases.SIZES | {"model_type": "llama"}
    scaling = {"rope_type": "llama3", **model_cases.LLAMA3}
    old = base | {"rope_theta": 5e5, "rope_scaling": scaling, "torch_dtype": "bfloat16"}
    new = base | {"rope_parameters": {"rope_theta": 5e5, **scaling}, "dtype": "bfloat16"}
    older = base | {
        "rope_theta": 5e5,
        "rope_scaling": {**scaling, "type": scaling["rope_type"], "rope_type": None},
    }
    assert (
        hf_config.from_hf_config(old)
        == hf_config.from_hf_config(new)
        == hf_config.from_hf_config(older)
    )
    assert hf_config.from_hf_config(old).rope.kind == "llama3"


@pytest.mark.parametrize("case", model_cases.CASES)
def test_a_written_config_reads_back_equal(case):
    config = hf_config.from_hf_config(model_cases.raw_config(case))
    assert hf_config.from_hf_config(hf_config.to_hf_config(config, jnp.dtype("float32"))) == config


def test_yarn_attention_factors():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}

    def factor(**more):
        return hf_config.from_hf_config(
            model_cases.raw_config("llama") | {"rope_scaling": yarn | more}
        ).rope.attention_factor

    assert factor() == pytest.approx(0.1 * np.log(4) + 1)
    assert factor(attention_factor=0.5) == 0.5
    assert factor(mscale=1.0, mscale_all_dim=0.5) == pytest.approx(
        (0.1 * np.log(4) + 1) / (0.05 * np.log(4) + 1)
    )
    assert factor(factor=1.0) == 1.0


def test_eos_is_every_id_that_any_file_names():
    raw = model_cases.raw_config("qwen2") | {"eos_token_id": 7}
    assert hf_config.from_hf_config(raw, {"eos_token_id": [9, 7]}, (4, None)).eos_ids == (4, 7, 9)
    assert hf_config.from_hf_config(raw | {"eos_token_id": None}).eos_ids == ()


def test_defaults_are_those_of_transformers():
    sizes = {name: model_cases.SIZES[name] for name in hf_config.REQUIRED}
    qwen3 = hf_config.from_hf_config(sizes | {"model_type": "qwen3"})
    assert (qwen3.head_dim, qwen3.num_kv_heads, qwen3.rope.theta, qwen3.rms_eps) == (
        128,
        4,
        10000.0,
        1e-6,
    )
    assert not qwen3.tied
    llama = hf_config.from_hf_config(sizes | {"model_type": "llama"})
    assert (llama.head_dim, llama.max_positions, llama.qkv_bias, llama.o_bias) == (
        8,
        2048,
        False,
        False,
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3'.*qwen2, qwen3, qwen2_moe"),
        ({"model_type": None}, "model_type None"),
        ({"num_experts": 8}, "num_experts 8: mixture of experts"),
        (
            {"model_type": "qwen3_moe", "num_experts": 4, "num_experts_per_tok": 5},
            "a token cannot choose 5 of 4 experts",
        ),
        ({"model_type": "mixtral", "n_routed_experts": 4}, "n_routed_experts 4: mixture"),
        ({"model_type": "olmoe", "clip_qkv": 8.0}, "clip_qkv is not supported"),
        ({"model_type": "qwen3_moe", "moe_intermediate_size": 0}, "moe_intermediate_size 0: use"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types chunked_attention"),
        ({"sliding_window": 0}, "sliding_window 0: use a whole number of at least 1"),
        (
            {"use_sliding_window": True, "layer_types": ["full_attention"]},
            "layer_types has 1 entries for 2 layers",
        ),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"quantization_config": {"bits": 4}}, "quantization_config"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor 0.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "rope type 'longrope'"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "llama3 lacks low_freq_factor, high_freq_factor",
        ),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "per layer type"),
        ({"hidden_size": None, "vocab_size": None}, "lacks vocab_size, hidden_size"),
        ({"num_key_value_heads": 3}, "4 attention heads.*3 KV heads"),
        ({"head_dim": 7}, "head_dim 7"),
        ({"num_hidden_layers": 0}, "num_hidden_layers 0: use a whole number of at least 1"),
        ({"num_attention_heads": 0}, "num_attention_heads 0: use a whole number"),
        ({"hidden_size": -32}, "hidden_size -32: use"),
        ({"hidden_size": "wide"}, "hidden_size 'wide': use"),
        ({"intermediate_size": 2.5}, "intermediate_size 2.5: use"),
        ({"max_position_embeddings": True}, "max_position_embeddings True: use"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps 'small': use a number above 0"),
        ({"initializer_range": -0.1}, "initializer_range -0.1: use a number above 0"),
        ({"eos_token_id": [1, 99]}, "eos_token_id 99 is not in the vocabulary of"),
        ({"eos_token_id": -1}, "eos_token_id -1 is not in the vocabulary"),
        ({"rope_scaling": {"factor": 2.0}}, "rope_scaling with factor has no rope_type"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(change, message):
    with pytest.raises(ModelError, match=message):
        hf_config.from_hf_config(model_cases.raw_config("qwen2") | change)


def test_a_window_is_the_types_own_unless_null_or_another_is_given():
    def windows(case, **changes):
        raw = model_cases.raw_config(case) | {"max_position_embeddings": 8192} | changes
        return hf_config.from_hf_config({k: v for k, v in raw.items() if v != "absent"}).windows

    assert windows("mistral") == windows("mistral", sliding_window=8192) == ()
    assert windows("mistral", sliding_window="absent") == (4096, 4096)
    assert windows("gemma3", sliding_window=512) == (512,) * 5 + (0, 512)
    assert windows("gemma3", sliding_window=512, sliding_window_pattern=3) == (512, 512, 0) * 2 + (
        512,
    )
    assert windows("qwen2", sliding_window=64) == ()
    assert windows("qwen2", sliding_window=64, use_sliding_window=True, max_window_layers=1) == (
        0,
        64,
    )
    types = ["sliding_attention", "full_attention"]
    assert windows("qwen2", sliding_window=64, use_sliding_window=True, layer_types=types) == (
        64,
        0,
    )


@pytest.mark.parametrize("case", model_cases.CASES)
def test_a_written_configuration_is_that_which_was_read(case):
    config = hf_config.from_hf_config(model_cases.raw_config(case))
    assert hf_config.from_hf_config(hf_config.to_hf_config(config, "float32")) == config


@pytest.mark.parametrize("prefix", hf.TEXT)
def test_the_text_part_of_a_model_that_reads_images_is_read_and_the_rest_kept(
    prefix, mesh, tmp_path
):
    """Names with either prefix; config.json may leave out what all such models have."""
    alone = model_cases.write("gemma3", tmp_path / "alone")
    raw = {**model_cases.raw_config("gemma3")}
    whole = {
        "model_type": "gemma3",
        "eos_token_id": raw.pop("eos_token_id"),
        "text_config": raw,
        "image_token_index": 7,
    }
    text = {
        name.replace("model.", prefix, 1): array
        for name, array in model_cases.arrays("gemma3").items()
    }
    images = {
        "vision_tower.patch.weight": np.arange(6, dtype=np.float16).reshape(2, 3),
        "multi_modal_projector.norm.weight": np.ones(4, "float32"),
    }
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(whole))
    (source / "preprocessor_config.json").write_text("{}")
    save_file(text | images, source / "model.safetensors")

    config = hf_config.read_config(source)
    assert config == hf_config.read_config(alone)
    params = hf.load(source, config, mesh, "float32")
    for one, other in zip(
        jax.tree.leaves(params),
        jax.tree.leaves(hf.load(alone, config, mesh, "float32")),
        strict=True,
    ):
        np.testing.assert_array_equal(one, other)
    out = tmp_path / "out"
    doubled = jax.tree.map(lambda leaf: 2 * leaf, params)
    hf.save(doubled, config, out, mesh, None, "float32", shard_bytes=9000, source=source)
    assert json.loads((out / "config.json").read_text()) == whole | {"torch_dtype": "float32"}
    assert (out / "preprocessor_config.json").is_file()
    written = {}
    for path in sorted(out.glob("*.safetensors")):
        written |= load_file(path)
    assert written.keys() == text.keys() | images.keys() and len(sorted(out.glob("model-*"))) > 2
    for name, array in images.items():
        assert written[name].dtype == array.dtype and written[name].tobytes() == array.tobytes()
    for name, array in text.items():
        np.testing.assert_array_equal(written[name], 2 * array)
    assert hf_config.read_config(out) == config and hf.load(out, config, mesh, "float32")


def test_sizes_in_model_init_must_be_those_of_the_model(tmp_path):
    raw = model_cases.raw_config("qwen2")
    (tmp_path / "config.json").write_text(json.dumps(raw))
    names = set(raw) & set(hf_config.INIT_FIELDS)
    assert len(names) > 8
    config = hf_config.read_config(tmp_path, (), {name: raw[name] for name in names})
    assert config == hf_config.read_config(tmp_path)
    for name in ("num_hidden_layers", "intermediate_size", "vocab_size"):
        with pytest.raises(
            ModelError,
            match=f"model.init.{name} is {raw[name] + 2}, and .* says {raw[name]}: correct",
        ):
            hf_config.read_config(tmp_path, (), {name: raw[name] + 2})


def test_a_new_model_takes_vocabulary_and_eos_of_the_tokenizer():
    sizes = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "intermediate_size": 48,
    }
    config = hf_config.new_config(sizes, 20, (1, 0))
    assert (config.family, config.vocab_size, config.eos_ids, config.tied) == (
        "qwen2",
        20,
        (0, 1),
        True,
    )
    assert hf_config.new_config(sizes | {"vocab_size": 64}, 20, ()).vocab_size == 64
    with pytest.raises(ModelError, match="vocab_size 10 is below the tokenizer's 20"):
        hf_config.new_config(sizes | {"vocab_size": 10}, 20, ())
    with pytest.raises(ModelError, match="model.init has unknown fields hiden_size: use"):
        hf_config.new_config(sizes | {"hiden_size": 1}, 20, ())


def test_tokenizer_files_travel_with_the_weights(mesh, tmp_path):
    config = hf_config.read_config(model_cases.write("qwen2", tmp_path / "source"), (5,))
    params = hf.load(tmp_path / "source", config, mesh, "float32")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    hf.save(params, config, tmp_path / "copied", mesh, tmp_path / "source", "float32")
    assert (tmp_path / "copied" / "tokenizer.json").read_text() == "{}"
    assert json.loads((tmp_path / "copied" / "generation_config.json").read_text()) == {
        "eos_token_id": [3, 5]
    }

    class Tokenizer:
        def save_pretrained(self, directory):
            (directory / "mine.json").write_text("[]")

    hf.save(params, config, tmp_path / "requested", mesh, Tokenizer(), "float32")
    assert (tmp_path / "requested" / "mine.json").exists()
