"""Against transformers on torch: the golden files, gradients, and directories that we write."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest

from tlt_jax.distributed import mesh as meshes
from tlt_jax.models import hf, hf_config, transformer

pytestmark = pytest.mark.parity


@pytest.mark.parametrize("case", model_cases.CASES)
def test_goldens_are_what_transformers_computes(case):
    import make_goldens

    golden = np.load(model_cases.GOLDENS)[case]
    np.testing.assert_allclose(make_goldens.logits(case), golden, rtol=0, atol=1e-11)


def gradient_of(reference, tensor: hf.Tensor) -> np.ndarray:
    """That of a tensor of the files; transformers joins those of all experts."""
    name, field = tensor.name, tensor.leaf.rpartition(".")[2]
    if tensor.expert is None:
        return reference.get_parameter(name).grad.numpy()
    prefix = name[: name.index(".experts.")].replace("block_sparse_moe", "mlp")
    if field == "expert_down":
        return reference.get_parameter(f"{prefix}.experts.down_proj").grad[tensor.expert].numpy()
    both = reference.get_parameter(f"{prefix}.experts.gate_up_proj").grad[tensor.expert]
    return np.split(both.numpy(), 2)[field == "expert_up"]


@pytest.mark.parametrize("family", model_cases.FAMILIES)
def test_gradients_of_the_loss_equal_those_of_torch(family, tmp_path, x64):
    import make_goldens
    import torch

    reference = make_goldens.reference(model_cases.write(family, tmp_path / family))
    tokens = torch.tensor(model_cases.TOKENS)
    with make_goldens.all_float64():
        reference(tokens, labels=tokens).loss.backward()

    mesh = meshes.make_mesh(2, 2)
    config = hf_config.read_config(tmp_path / family).for_sequences(model_cases.LENGTH)
    params = hf.load(tmp_path / family, config, mesh, "float64")
    ids = jnp.asarray(model_cases.TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)

    @jax.jit
    @jax.grad
    def gradient(params):
        options = {
            "compute_dtype": "float64",
            "remat": ("full",) * config.num_layers,
            "block": 4,
            "mesh": mesh,
        }
        x, _ = transformer.hidden(params, config, ids, positions, jnp.ones_like(ids), **options)
        logp = jax.nn.log_softmax(transformer.logits(params, config, x)[:, :-1])
        return -jnp.mean(jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1))

    hf.save(gradient(params), config, tmp_path / "gradient", mesh, None, "float64")
    single = meshes.make_mesh(1, 1)
    ours = hf.load(tmp_path / "gradient", config, single, "float64")
    for tensor in hf.tensors(config):
        leaf = hf.host_copy(ours, tensor, single, np.dtype("float64"))
        if tensor.leaf.endswith("scale"):
            assert not leaf.any(), "it is not trained"
            continue
        theirs = gradient_of(reference, tensor)
        np.testing.assert_allclose(leaf, theirs, rtol=1e-9, atol=1e-11, err_msg=tensor.name)


@pytest.mark.parametrize("case", model_cases.CASES)
def test_transformers_loads_what_we_write(case, tmp_path):
    import torch
    from transformers import AutoModelForCausalLM

    mesh = meshes.make_mesh(2, 2)
    source = model_cases.write(case, tmp_path / "source")
    config = hf_config.read_config(source, (5,))
    params = hf.load(source, config, mesh, "float32")
    hf.save(params, config, tmp_path / "copy", mesh, None, "float32", shard_bytes=20_000)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "copy", output_loading_info=True)
    assert model.dtype == torch.float32
    assert model.generation_config.eos_token_id == [3, 5]
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        logits = model(torch.tensor(model_cases.TOKENS)).logits.numpy()
    np.testing.assert_allclose(logits, np.load(model_cases.GOLDENS)[case], rtol=0, atol=1e-4)


@pytest.mark.parametrize("case", ["gemma3", "gemma4"])
def test_gemma_with_images_is_read_and_written_as_transformers_does(case, tmp_path):
    import torch
    from transformers import AutoModelForImageTextToText, Gemma3Config, Gemma4Config

    sizes = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
    }
    text = model_cases.raw_config(case) | {"pad_token_id": 0}
    if case == "gemma3":
        vision = {"model_type": "siglip_vision_model", "image_size": 8, "patch_size": 4} | sizes
        named = {"image_token_index": 36, "boi_token_index": 35, "eoi_token_index": 34}
        config = Gemma3Config(
            text_config=text, vision_config=vision, mm_tokens_per_image=4, **named
        )
    else:
        vision = sizes | {"num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 64}
        named = {"image_token_id": 36, "boi_token_id": 35, "eoi_token_id": 34, "audio_token_id": 33}
        named |= {"video_token_id": 32, "boa_token_id": 31}
        config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None, **named)
    torch.manual_seed(0)
    theirs = AutoModelForImageTextToText.from_config(config).eval()
    theirs.save_pretrained(tmp_path / "source")

    mesh, ids = meshes.make_mesh(1, 1), jnp.asarray(model_cases.TOKENS % 30, jnp.int32)
    ours = hf_config.read_config(tmp_path / "source")
    params = hf.load(tmp_path / "source", ours, mesh, "float32")
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    x, _ = transformer.hidden(
        params, ours, ids, positions, jnp.ones_like(ids), compute_dtype="float32"
    )
    logits = transformer.logits(params, ours, x)[..., : ours.vocab_size]
    with torch.no_grad():
        expected = theirs(torch.tensor(np.asarray(ids)).long()).logits.numpy()
    np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)

    hf.save(params, ours, tmp_path / "out", mesh, None, "float32", source=tmp_path / "source")
    again, info = AutoModelForImageTextToText.from_pretrained(
        tmp_path / "out", output_loading_info=True
    )
    assert not any(info[name] for name in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for (name, one), other in zip(theirs.named_parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other), name
