"""Drafter directories: what is written, read back bit for bit, and refused by name."""

from __future__ import annotations

import json
import math
from pathlib import Path

import drafter_cases as cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import ModelError
from tlt_jax.models import drafter as drafters, hf_drafter

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "drafters.json").read_text())


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(2, 2)


@pytest.fixture
def written(mesh, tmp_path):
    """A function that writes a case's directory, with changes of config.json and tensors (None: removed)."""

    def write(case="eagle3", tensors=None, **changes):
        save(case, mesh, tmp_path)
        raw = json.loads((tmp_path / "config.json").read_text()) | changes
        raw = {key: value for key, value in raw.items() if value != "absent"}
        (tmp_path / "config.json").write_text(json.dumps(raw))
        stored = load_file(tmp_path / "model.safetensors") | (tensors or {})
        save_file(
            {key: value for key, value in stored.items() if value is not None},
            tmp_path / "model.safetensors",
        )
        return tmp_path

    return write


def save(case, mesh, folder, dtype="float32"):
    """Writes a case's directory in this dtype; returns its tensors."""
    hf_drafter.save(cases.params(case, "float32", mesh), cases.config(case), folder, dtype)
    return load_file(folder / "model.safetensors")


def load(folder, mesh, dtype="float32", policy=None, **options):
    return hf_drafter.load(folder, policy or cases.policy(), mesh, dtype, **options)


@pytest.mark.parametrize("case", cases.CASES)
def test_names_shapes_types_and_keys_are_the_golden_ones(case, mesh, tmp_path):
    stored = save(case, mesh, tmp_path, "bfloat16")
    found = {
        name: f"{array.dtype}{list(array.shape)}".replace(" ", "") for name, array in stored.items()
    }
    assert found == GOLDENS[case]["tensors"]
    assert json.loads((tmp_path / "config.json").read_text()) == GOLDENS[case]["config"]


def test_the_acceptance_of_a_drafter_is_written_as_far_as_it_was_measured(mesh, tmp_path):
    params, config = cases.params("eagle3", "float32", mesh), cases.config("eagle3")
    for measured, known in (([0.75, 0.5], (0.75, 0.5)), ([0.75, math.nan, 0.5], (0.75,)), ([], ())):
        hf_drafter.save(params, config, tmp_path, "float32", measured)
        assert hf_drafter.read_acceptance(tmp_path) == known
        assert load(tmp_path, mesh)[0] == config
    for text in ('{"acceptance": [1.5]}', '{"acceptance": "0.5"}', '{"acceptance": [true]}', "{}"):
        (tmp_path / "acceptance.json").write_text(text)
        with pytest.raises(ModelError, match="acceptance.json: write"):
            hf_drafter.read_acceptance(tmp_path)


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float32") for case in cases.CASES), ("dspark", "bfloat16")]
)
def test_a_round_trip_keeps_every_bit(case, dtype, mesh, tmp_path):
    params, config, other = cases.params(case, dtype, mesh), cases.config(case), meshes.make_mesh(1, 4)  # fmt: skip
    hf_drafter.save(params, config, tmp_path / "one", dtype, [0.5])
    (tmp_path / "one" / "model-00001-of-00002.safetensors").write_bytes(b"an older export")
    hf_drafter.save(params, config, tmp_path / "one", dtype)
    again, read = load(tmp_path / "one", other, dtype)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, read, params)
    wanted = drafters.abstract(config, other, "train", dtype)
    assert jax.tree.map(lambda leaf: leaf.sharding, read) == jax.tree.map(
        lambda leaf: leaf.sharding, wanted
    )
    hf_drafter.save(read, again, tmp_path / "two", dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    files = sorted(path.name for path in (tmp_path / "one").iterdir())
    assert files == ["config.json", "model.safetensors"]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"kind": "eagle"}, "only SGLang"),
        (
            {"kind": "eagle", "family": "llama", "qkv_bias": False, "fc_bias": True},
            "without the bias",
        ),
        ({"kind": "eagle", "family": "llama", "qkv_bias": False}, None),
        ({"kind": "eagle3"}, None),
        (cases.CASES["dflash"], None),
        (cases.CASES["dflash2"], None),
        (cases.CASES["dspark_whole"], None),
        (cases.CASES["dspark"], "whole vocabulary"),
        (cases.CASES["dspark_bare"], "Markov head only"),
    ],
)
def test_what_other_programs_do_not_load_is_reported(changes, word):
    found = hf_drafter.caveat(drafters.for_policy(cases.policy(), **changes), "llama")
    assert found is None if word is None else word in found


@pytest.mark.parametrize(
    ("case", "family", "said"),
    [("eagle3", "gemma2", "vLLM and SGLang cannot"), ("eagle3", "olmo3", "SGLang cannot"), ("eagle3", "qwen2", None),
     ("dflash", "qwen2", "SGLang cannot"), ("eagle3", "gemma4_text", None), ("eagle", "gemma2", "only SGLang")],
)  # fmt: skip
def test_engines_that_draft_for_no_policy_of_a_type_are_reported(case, family, said):
    found = hf_drafter.caveat(cases.config(case), family)
    assert found is None if said is None else said in found


def test_bfloat16_files_and_parameters(mesh, tmp_path):
    save("eagle3", mesh, tmp_path, "bfloat16")
    wanted = drafters.cast(cases.params("eagle3", "float32", mesh), "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, load(tmp_path, mesh, "bfloat16")[1], wanted)
    assert load(tmp_path, mesh)[1].fuse.dtype == jnp.float32


def test_a_draft_vocabulary_is_written_as_offsets_marks_and_rows_of_a_markov_head(mesh, tmp_path):
    stored = save("eagle3", mesh, tmp_path)
    np.testing.assert_array_equal(stored["d2t"] + np.arange(8), cases.IDS)
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), cases.IDS)
    stored = save("dspark", mesh, tmp_path)
    bias = stored["markov_head.markov_w2.weight"]
    np.testing.assert_array_equal(
        bias[cases.IDS], cases.params("dspark", "float32", mesh).markov_out
    )
    assert not np.delete(bias, cases.IDS, axis=0).any()
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), cases.IDS)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_eagle_drafter_without_a_bias_in_fc_is_written_with_one_of_zeros(dtype, mesh, tmp_path):
    bias = save("eagle", mesh, tmp_path, dtype)["fc.bias"]
    assert (bias.shape, bias.dtype.name, bias.any()) == ((16,), dtype, False)
    config, params = load(tmp_path, mesh)
    assert (config.fc_bias, params.fuse_bias) == (False, None)


NO_BIAS, ZEROS, ONES = None, np.zeros(16, np.float32), np.ones(16, np.float32)


@pytest.mark.parametrize(
    ("stored", "declared", "has_bias"),
    [
        (NO_BIAS, {"bias": False, "fc_bias": "absent"}, False),  # older exports
        (ONES, {"bias": True, "fc_bias": "absent"}, True),
        (ZEROS, {"bias": True, "fc_bias": "absent"}, True),
        (NO_BIAS, {"bias": True, "fc_bias": "absent"}, False),
        (ONES, {"bias": "absent", "fc_bias": "absent"}, True),  # of other programs
        (ZEROS, {"bias": "absent", "fc_bias": "absent"}, False),
        (ZEROS, {"bias": False, "fc_bias": True}, True),  # our exports
        (ZEROS, {"bias": False, "fc_bias": False}, False),
        (ONES, {"bias": False, "fc_bias": False}, True),
    ],
)
def test_fc_has_the_bias_that_is_stored_unless_it_is_zero_and_undeclared(
    stored, declared, has_bias, written, mesh
):
    config, params = load(written("eagle", {"fc.bias": stored}, **declared), mesh)
    assert config.fc_bias == has_bias
    if has_bias:
        np.testing.assert_array_equal(params.fuse_bias, stored)
    else:
        assert params.fuse_bias is None


@pytest.mark.parametrize("kept", [("d2t", "t2d"), ("d2t",), ("t2d",), ()])
def test_the_whole_vocabulary_is_read_with_offsets_and_without(kept, written, mesh):
    spelled = {"d2t": np.zeros(37, np.int64), "t2d": np.ones(37, bool)}
    folder = written("eagle3_plain", {name: spelled[name] for name in kept})
    config, params = load(folder, mesh)
    assert (config, params.ids) == (cases.config("eagle3_plain"), None)


def test_what_other_programs_write_is_read(written, mesh):
    folder = written(
        "eagle3",
        tensors={"t2d": None, "embed_tokens.weight": np.zeros((37, 16), np.float32)},
        bos_token_id=1,
        torch_dtype="bfloat16",
        transformers_version="4.57.0",
        target_hidden_size=16,
        norm_before_residual=False,
        eagle_aux_hidden_state_layer_ids=None,
    )
    assert load(folder, mesh)[0] == cases.config("eagle3")
    folder = written("eagle3_plain", fc_norm="absent", norm_output="absent")
    assert load(folder, mesh)[0] == cases.config("eagle3_plain")
    folder = written(
        "eagle", tensors={"lm_head.weight": np.zeros((37, 16), np.float32)}, bias="absent"
    )
    assert load(folder, mesh)[0] == cases.config("eagle")


OF_LAYER = {
    "model_type", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim", "vocab_size",
    "rms_norm_eps", "rope_theta", "rope_scaling", "rope_parameters", "max_position_embeddings", "hidden_act",
    "num_hidden_layers", "attention_bias", "mlp_bias", "tie_word_embeddings",
}  # fmt: skip


@pytest.mark.parametrize("architecture", ["Eagle3Speculator", "Eagle3DraftModel"])
@pytest.mark.parametrize("case", ["eagle3", "eagle3_normed"])
def test_drafters_of_the_speculators_library_are_read(mesh, tmp_path, case, architecture):
    """Its sizes are in a section, its layer has another name, and norm_before_residual is true where it is not written."""
    params = cases.params(case, "float32", mesh)
    stored, config = save(case, mesh, tmp_path), cases.config(case)
    raw = json.loads((tmp_path / "config.json").read_text())
    layer = {name: raw.pop(name) for name in OF_LAYER & raw.keys()}
    raw.pop("eagle_config")
    flag = {} if config.norm_before_residual else {"norm_before_residual": False}
    raw |= flag | {
        "architectures": [architecture], "speculators_model_type": "eagle3", "speculators_version": "0.9.0",
        "transformer_layer_config": layer | {"architectures": ["LlamaForCausalLM"]}, "norm_before_fc": False,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"name_or_path": "owner/policy"}},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(raw))
    renamed = {name.replace("midlayer.", "layers.0."): array for name, array in stored.items()}
    more = {
        "embed_tokens.weight": np.zeros((37, 16), np.float32),
        "verifier_norm.weight": np.ones(16, np.float32),
    }
    save_file(renamed | more, tmp_path / "model.safetensors")
    found, weights = load(tmp_path, mesh)
    assert found == config
    for one, other in zip(*map(jax.tree.leaves, (weights, params)), strict=True):
        np.testing.assert_array_equal(one, other)
    (tmp_path / "config.json").write_text(json.dumps(raw | {"norm_before_fc": True}))
    with pytest.raises(ModelError, match="norm_before_fc: unknown here"):
        load(tmp_path, mesh)


@pytest.mark.parametrize(
    ("case", "names"),
    [
        ("eagle_bias", ["LlamaForCausalLMEagle"]),
        ("eagle_bias", ["LlamaForCausalLMEagle", "LlamaForCausalLM"]),
        ("eagle", ["Qwen2ForCausalLMEagle"]),
        ("eagle", ["Qwen2ForCausalLMEagle", "Qwen2ForCausalLM"]),
        ("eagle3", ["LlamaForCausalLMEagle3", "LlamaForCausalLM"]),
        ("eagle3", ["Eagle3LlamaForCausalLM"]),
    ],
)
def test_other_names_of_an_architecture_are_read(case, names, written, mesh):
    assert load(written(case, architectures=names), mesh)[0] == cases.config(case)


@pytest.mark.parametrize(
    ("outputs", "counts", "captures"),
    [
        (None, None, (2, 3, 4)),
        ([1, 2, 3], None, (2, 3, 4)),
        ([1, 2, 3], [2, 3, 4], (2, 3, 4)),
        (None, [2, 4, 6], (2, 4, 6)),
        ([2, 4, 6], None, (2, 4, 6)),
        (None, [1, 3, 5], (2, 4, 6)),
        ([1, 3, 5], [1, 3, 5], (2, 4, 6)),
        ([0, 1, 2], [1, 2, 3], (1, 2, 3)),
        ([2, 3, 4], [3, 4, 5], (3, 4, 5)),
    ],
)
def test_layer_ids_are_read_in_both_conventions(outputs, counts, captures):
    raw = {
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": outputs},
        "eagle_aux_hidden_state_layer_ids": counts,
    }
    assert hf_drafter.read_captures(raw, cases.policy()) == captures


NESTED = {
    "block_size": 4,
    "mask_token_id": 36,
    "target_layer_ids": [1, 2, 3, 4],
    "conv_kernel_size": 2,
    "conv_group_size": 4,
}
SELECTOR = {"selector_rank": 6, "selector_top_k": 5}


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("eagle3", {"architectures": ["LlamaForCausalLM"]}, "\\['LlamaForCausalLM'\\] are not a supported drafter.*use Llama"),
        ("eagle", {"architectures": ["Qwen2ForCausalLMEagle", "LlamaForCausalLM"]}, "are not a supported drafter"),
        ("eagle", {"architectures": ["LlamaForCausalLM", "LlamaForCausalLMEagle"]}, "are not a supported drafter"),
        ("eagle", {"architectures": None}, "\\[None\\] are not a supported drafter"),
        ("eagle3", {"num_hidden_layers": 2}, "num_hidden_layers 2: only drafters of one layer"),
        ("eagle3", {"hidden_size": 32}, "hidden_size 32 is not the policy's 16"),
        ("eagle3", {"target_hidden_size": 32}, "target_hidden_size 32 is not hidden_size 16"),
        ("eagle", {"vocab_size": 40}, "vocab_size 40 is not the policy's 37"),
        ("eagle3", {"draft_vocab_size": None}, "draft_vocab_size is missing"),
        ("eagle3", {"draft_vocab_size": 9}, "lm_head.weight has shape \\(8, 16\\), config.json says \\(9, 16\\)"),
        ("eagle3", {"tie_word_embeddings": True}, "tie_word_embeddings true"),
        ("eagle3", {"attention_bias": True, "mlp_bias": True}, "attention_bias, mlp_bias true"),
        ("eagle3", {"bias": True}, "bias true"),
        ("eagle3", {"fc_bias": True}, "fc_bias True: not for a drafter of kind eagle3"),
        ("eagle3", {"norm_before_fc": True, "magic": 3}, "names magic, norm_before_fc: unknown here"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": [2, 4, 5]}, "\\[2, 4, 5\\], but \\[1, 2, 3\\] in eagle_config"),
        ("eagle3", {"eagle_aux_hidden_state_layer_ids": "2"}, "'2' is not a list of layer ids"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state false"),
        ("eagle3", {"eagle_config": {"gamma": 1}}, "eagle_config names gamma"),
        ("eagle3", {"fc_norm": False}, "unknown fc_norm.0.weight, fc_norm.1.weight, fc_norm.2.weight"),
        ("eagle3_plain", {"fc_norm": True}, "missing fc_norm.0.weight"),
        ("eagle", {"norm_output": True}, "norm_output True: not for a drafter of kind eagle"),
        ("eagle", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("dflash", {"architectures": ["DFlashDraftModel", "Qwen3ForCausalLM"]}, "not a supported drafter.*DFlashDraftModel"),
        ("dflash", {"model_type": "gemma4"}, "model_type 'gemma4': only block drafters with layers of qwen3"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "a drafter's window needs sliding_window"),
        ("dflash", {"dflash_config": {"mask_token_id": 36, "target_layer_ids": [1], "use_swa": True}},
         "dflash_config names use_swa: unknown here"),
        ("dflash", {"attention_bias": True}, "attention_bias true"),
        ("dflash", {"block_size": None}, "config.json lacks block_size"),
        ("dflash", {"dflash_config": None}, "config.json lacks mask_token_id"),
        ("dflash", {"mask_token_id": 35}, "mask_token_id 35, but 36 in dflash_config"),
        ("dflash", {"dflash_config": {"mask_token_id": 36, "target_layer_ids": "1"}}, "'1' is not a list of layer ids"),
        ("dflash", {"num_target_layers": 36}, "num_target_layers 36 is not the policy's 7"),
        ("dflash", {"draft_vocab_size": 8}, "draft_vocab_size 8: a block drafter with an LM head of its own"),
        ("dflash", {"markov_rank": 4}, "markov_rank 4: not for a drafter of kind dflash"),
        ("dflash", {"num_hidden_layers": 3}, "missing layers.2.input_layernorm.weight"),
        ("dflash2", {"dflash_config": NESTED}, "config.json lacks selector_rank, in dflash_config"),
        ("dflash2", {"markov_rank": 6}, "names markov_rank: unknown here"),
        ("dflash2", {"dflash_config": NESTED | SELECTOR | {"selector_top_k": 0}}, "selector_top_k 0: a dflash2 drafter"),
        ("dflash2", {"dflash_config": NESTED | SELECTOR | {"output_multiplier": 0.5}}, "names output_multiplier: unknown here"),
        ("dflash2", {"dflash_config": NESTED | SELECTOR | {"selector_rank": 7}}, "hidden_projection.weight has shape"),
        ("dflash2", {"dflash_config": NESTED | SELECTOR | {"causal": True}}, "is_causal False, but causal True"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type 'gated' is not supported, only 'vanilla'"),
        ("dspark", {"confidence_head_with_markov": False}, "confidence_head_with_markov False with markov_rank 6"),
        ("dspark", {"tlt_draft_vocab_size": 9}, "the draft vocabulary has 8 tokens, draft_vocab_size says 9"),
        ("dspark", {"tlt_draft_vocab_size": "absent"}, "t2d marks 8 tokens, and config.json has no tlt_draft_vocab_size"),
        ("dflash", {"fc_norm": True, "mlp_bias": True}, "names fc_norm, mlp_bias: unknown here"),
        ("dflash", {"eagle_aux_hidden_state_layer_ids": [1, 2, 3, 4]}, "but target_layer_ids \\[1, 2, 3, 4\\]"),
    ],
)  # fmt: skip
def test_a_config_that_does_not_fit_is_refused_by_name(case, changes, message, written, mesh):
    with pytest.raises(ModelError, match=message):
        load(written(case, **changes), mesh)


@pytest.mark.parametrize(
    ("case", "tensors", "message"),
    [
        ("eagle3", {"midlayer.hidden_norm.weight": None}, "missing midlayer.hidden_norm.weight"),
        (
            "eagle",
            {"layers.1.mlp.up_proj.weight": np.zeros((24, 16), np.float32)},
            "unknown layers.1.mlp.up_proj",
        ),
        (
            "eagle",
            {"layers.0.input_layernorm.weight": np.ones(16, np.float32)},
            "unknown layers.0.input_layernorm",
        ),
        (
            "eagle",
            {"fc.weight": np.zeros((16, 48), np.float32)},
            "fc.weight has shape \\(16, 48\\).*\\(16, 32\\)",
        ),
        ("eagle", {"fc.bias": np.zeros(8, np.float32)}, "fc.bias has shape \\(8,\\)"),
        ("eagle3", {"fc.bias": np.zeros(16, np.float32)}, "unknown fc.bias"),
        ("eagle3", {"d2t": None}, "missing d2t"),
        (
            "eagle3",
            {"d2t": cases.IDS},
            "d2t: .*do not ascend within 0..36; it holds token id minus index",
        ),
        ("eagle3", {"d2t": np.zeros(8, np.int64)}, "t2d marks other tokens"),
        ("eagle3_plain", {"d2t": np.arange(37)}, "d2t: "),
        ("eagle3_plain", {"d2t": np.zeros(36, np.int64)}, "d2t has shape \\(36,\\)"),
        ("eagle3_plain", {"t2d": np.arange(37) > 0}, "t2d marks other tokens"),
        ("dflash", {"hidden_norm.weight": None}, "missing hidden_norm.weight"),
        ("dflash", {"fc.bias": np.zeros(16, np.float32)}, "unknown fc.bias"),
        ("dflash", {"fc.weight": np.zeros((16, 48), np.float32)}, "fc.weight has shape \\(16, 48\\)"),
        ("dflash", {"d2t": np.arange(8)}, "unknown d2t"),
        ("dspark", {"markov_head.markov_w2.weight": None}, "missing markov_head.markov_w2.weight"),
        ("dspark", {"markov_head.gate_proj.weight": np.zeros((6, 22), np.float32)}, "unknown markov_head.gate_proj"),
        ("dflash2", {"candidate_selector.predecessor_codebook": None}, "missing candidate_selector.predecessor_codebook"),
        ("dflash2", {"layers.1.mlp_conv.base_kernel": np.zeros((2, 3, 16), np.float32)}, "base_kernel has shape"),
        ("dspark", {"t2d": None}, "the draft vocabulary has 0 tokens"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(case, tensors, message, written, mesh):
    with pytest.raises(ModelError, match=message):
        load(written(case, tensors), mesh)


def test_positions_and_directories_are_checked(written, mesh, tmp_path):
    folder = written("eagle", max_position_embeddings=20)
    assert load(folder, mesh, positions=20)[0].layers.max_positions == 20
    with pytest.raises(ModelError, match="max_position_embeddings 20 is below the 21 positions"):
        load(folder, mesh, positions=21)
    with pytest.raises(ModelError, match="has 9 layers|after layers"):
        load(written("eagle3"), mesh, policy=cases.policy(num_hidden_layers=3))
    with pytest.raises(ModelError, match="no config.json: give the directory of a drafter"):
        load(tmp_path / "nothing", mesh)
    (folder / "model.safetensors").unlink()
    assert hf_drafter.read_config(folder, cases.policy()) == cases.config("eagle3")
    with pytest.raises(ModelError, match="neither model.safetensors nor"):
        load(folder, mesh)


def test_block_drafters_that_other_programs_write_are_read(written, mesh):
    shape = {"mask_token_id": 36, "target_layer_ids": [1, 2, 3, 4]}
    frozen = {
        name: np.zeros((37, 16), np.float32) for name in ("embed_tokens.weight", "lm_head.weight")
    }
    folder = written(  # z-lab, and vLLM before 0.20
        "dflash", architectures=["Qwen3DFlashDraftModel"], auto_map={"AutoModel": "dflash.DFlashDraftModel"},
        layer_types=["full_attention"] * 2, sliding_window=None, use_sliding_window=False, max_window_layers=2,
        attention_dropout=0.0, torch_dtype="absent", dtype="bfloat16", dflash_config=shape | {"use_swa": False},
        eagle_aux_hidden_state_layer_ids=[2, 3, 4, 5],
    )  # fmt: skip
    assert load(folder, mesh)[0] == cases.config("dflash")
    folder = written(  # DeepSpec: nothing nested, frozen copies of the policy's embedding and head
        "dspark_bare", frozen, dflash_config="absent", tie_word_embeddings=False, markov_head_type="absent",
        confidence_head_with_markov="absent", layer_types=["full_attention"] * 2,
    )  # fmt: skip
    assert load(folder, mesh)[0] == cases.config("dspark_bare")
    assert load(written("dspark_whole", dflash_config="absent"), mesh)[0].captures == (0, 3, 7)


def test_windows_are_read_and_causal_unless_is_causal_says_otherwise(written, mesh):
    """As published for DFlash and DFlash 2; a window as long as the sequences is none."""
    window = {
        "layer_types": ["sliding_attention"] * 2,
        "sliding_window": 20,
        "use_sliding_window": True,
    }
    for is_causal, size, windows in ((False, 20, (20, 20)), (None, 20, (20, 20)), (None, 64, ())):
        folder = written("dflash2", is_causal=is_causal, **window | {"sliding_window": size})
        config, params = load(folder, mesh, positions=64)
        assert config == cases.config("dflash2", causal=is_causal is None, windows=windows)
        jax.tree.map(
            np.testing.assert_array_equal, params, cases.params("dflash2", "float32", mesh)
        )
    with pytest.raises(ModelError, match="sliding_window 4 is not longer than a block$"):
        load(written("dflash2", **window | {"sliding_window": 4}), mesh)
    with pytest.raises(ModelError, match="a drafter's window needs sliding_window$"):
        load(written("dflash2", **window | {"use_sliding_window": False}), mesh)
    window |= {"layer_types": ["sliding_attention", "full_attention"]}
    assert load(written("dflash2", **window), mesh)[0].layers.windows == (20, 0)
    with pytest.raises(ModelError, match="with and without sliding_attention, and no is_causal"):
        load(written("dflash2", is_causal="absent", **window), mesh)


def test_a_mask_embedding_of_its_own_is_refused(written, mesh):
    folder = written("dflash")
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelError, match="mask_embedding.pt: only a mask that is a token"):
        load(folder, mesh)
