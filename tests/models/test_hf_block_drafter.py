"""Directories of block drafters: names and keys, round trips, what other programs write, and refusals by name."""

from __future__ import annotations

import json
from pathlib import Path

import block_cases as cases
import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tlt_jax.distributed import mesh as meshes
from tlt_jax.errors import ModelError
from tlt_jax.models import drafter as drafters, hf_drafter

GOLDENS = json.loads((Path(__file__).parents[1] / "goldens" / "block_drafters.json").read_text())


@pytest.fixture(scope="module")
def mesh():
    return meshes.make_mesh(2, 2)


@pytest.fixture
def written(mesh, tmp_path):
    """A function that writes a case's directory, with changes of config.json and tensors (None: removed)."""

    def write(case="dflash", tensors=None, **changes):
        params = cases.params(case, "float32", mesh)
        hf_drafter.save(params, cases.config(case), tmp_path, "float32")
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


def load(folder, mesh, dtype="float32"):
    return hf_drafter.load(folder, cases.policy(), mesh, dtype)


@pytest.mark.parametrize("case", cases.CASES)
def test_names_shapes_types_and_keys_are_the_golden_ones(case, mesh, tmp_path):
    hf_drafter.save(cases.params(case, "float32", mesh), cases.config(case), tmp_path, "bfloat16")
    stored = load_file(tmp_path / "model.safetensors")
    found = {
        name: f"{array.dtype}{list(array.shape)}".replace(" ", "") for name, array in stored.items()
    }
    assert found == GOLDENS[case]["tensors"]
    assert json.loads((tmp_path / "config.json").read_text()) == GOLDENS[case]["config"]


@pytest.mark.parametrize(
    ("case", "dtype"), [*((case, "float32") for case in cases.CASES), ("dspark", "bfloat16")]
)
def test_a_round_trip_keeps_every_bit(case, dtype, mesh, tmp_path):
    params, config = cases.params(case, dtype, mesh), cases.config(case)
    hf_drafter.save(params, config, tmp_path / "one", dtype, [0.5])
    assert hf_drafter.read_acceptance(tmp_path / "one") == (0.5,)
    other = meshes.make_mesh(1, 4)
    again, read = load(tmp_path / "one", other, dtype)
    assert again == config
    jax.tree.map(np.testing.assert_array_equal, read, params)
    wanted = drafters.abstract(config, other, "train", dtype)
    jax.tree.map(
        lambda one, other: one.sharding == other.sharding or pytest.fail(str(one)), read, wanted
    )
    hf_drafter.save(read, again, tmp_path / "two", dtype)
    for name in ("config.json", "model.safetensors"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()
    (tmp_path / "one" / "model.safetensors").unlink()
    assert hf_drafter.read_config(tmp_path / "one", cases.policy()) == config
    with pytest.raises(ModelError, match="is below the 65 positions"):
        hf_drafter.read_config(tmp_path / "one", cases.policy(), positions=65)


def test_a_markov_head_is_written_for_every_token(mesh, tmp_path):
    params = cases.params("dspark", "float32", mesh)
    hf_drafter.save(params, cases.config("dspark"), tmp_path, "float32")
    stored = load_file(tmp_path / "model.safetensors")
    bias = stored["markov_head.markov_w2.weight"]
    np.testing.assert_array_equal(bias[cases.IDS], params.markov_out)
    assert not np.delete(bias, cases.IDS, axis=0).any()
    np.testing.assert_array_equal(np.flatnonzero(stored["t2d"]), cases.IDS)


def test_what_other_programs_write_is_read(written, mesh):
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


@pytest.mark.parametrize(
    ("case", "changes", "message"),
    [
        ("dflash", {"architectures": ["DFlashDraftModel", "Qwen3ForCausalLM"]}, "not a supported drafter.*DFlashDraftModel"),
        ("dflash", {"model_type": "gemma4"}, "model_type 'gemma4': only block drafters with layers of qwen3"),
        ("dflash", {"use_sliding_window": True}, "use_sliding_window true"),
        ("dflash", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types sliding_attention"),
        ("dflash", {"dflash_config": {"mask_token_id": 36, "target_layer_ids": [1], "use_swa": True}},
         "dflash_config names use_swa: unknown here"),
        ("dflash", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported, only 'silu'"),
        ("dflash", {"attention_bias": True}, "attention_bias true"),
        ("dflash", {"rope_scaling": {"rope_type": "longrope", "factor": 2.0}}, "rope type 'longrope' is not supported"),
        ("dflash", {"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ("dflash", {"quantization_config": {"bits": 4}}, "quantization_config"),
        ("dflash", {"block_size": None}, "config.json lacks block_size"),
        ("dflash", {"dflash_config": None}, "config.json lacks mask_token_id"),
        ("dflash", {"mask_token_id": 35}, "mask_token_id 35, but 36 in dflash_config"),
        ("dflash", {"dflash_config": {"mask_token_id": 36, "target_layer_ids": "1"}}, "'1' is not a list of layer ids"),
        ("dflash", {"dflash_config": {"mask_token_id": 36, "target_layer_ids": [1, 7]}}, "\\(2, 8\\), the policy has 7 layers"),
        ("dflash", {"dflash_config": {"mask_token_id": 37, "target_layer_ids": [1]}}, "mask_token_id 37 is not within 0..36"),
        ("dflash", {"num_target_layers": 36}, "num_target_layers 36 is not the policy's 7"),
        ("dflash", {"hidden_size": 32}, "hidden_size 32 is not the policy's 16"),
        ("dflash", {"target_hidden_size": 32}, "target_hidden_size 32 is not hidden_size 16"),
        ("dflash", {"draft_vocab_size": 8}, "draft_vocab_size 8: a block drafter with an LM head of its own"),
        ("dflash", {"markov_rank": 4}, "markov_rank 4: not for a drafter of kind dflash"),
        ("dflash", {"num_hidden_layers": 3}, "missing layers.2.input_layernorm.weight"),
        ("dspark", {"markov_head_type": "gated"}, "markov_head_type 'gated' is not supported, only 'vanilla'"),
        ("dspark", {"confidence_head_with_markov": False}, "confidence_head_with_markov False with markov_rank 6"),
        ("dspark", {"tlt_draft_vocab_size": 9}, "the draft vocabulary has 8 tokens, draft_vocab_size says 9"),
        ("dspark", {"tlt_draft_vocab_size": "absent"}, "t2d marks 8 tokens, and config.json has no tlt_draft_vocab_size"),
        ("dspark", {"magic": 3}, "names magic: unknown here"),
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
        ("dflash", {"hidden_norm.weight": None}, "missing hidden_norm.weight"),
        ("dflash", {"fc.bias": np.zeros(16, np.float32)}, "unknown fc.bias"),
        ("dflash", {"fc.weight": np.zeros((16, 48), np.float32)}, "fc.weight has shape \\(16, 48\\)"),
        ("dflash", {"d2t": np.arange(8)}, "unknown d2t"),
        ("dspark", {"markov_head.markov_w2.weight": None}, "missing markov_head.markov_w2.weight"),
        ("dspark", {"markov_head.gate_proj.weight": np.zeros((6, 22), np.float32)}, "unknown markov_head.gate_proj"),
        ("dspark", {"t2d": None}, "the draft vocabulary has 0 tokens"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(case, tensors, message, written, mesh):
    with pytest.raises(ModelError, match=message):
        load(written(case, tensors), mesh)


def test_a_mask_embedding_of_its_own_is_refused(written, mesh):
    folder = written()
    (folder / "mask_embedding.pt").write_bytes(b"")
    with pytest.raises(ModelError, match="mask_embedding.pt: only a mask that is a token"):
        load(folder, mesh)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("dflash", None),
        ("dspark_whole", None),
        ("dspark", "other programs draft from the whole vocabulary with this drafter, not from its draft vocabulary"),
        ("dspark_bare", "vLLM loads DSpark drafters with a Markov head only"),
    ],
)  # fmt: skip
def test_what_other_programs_do_not_load_is_reported(case, message):
    assert hf_drafter.caveat(cases.config(case)) == message
