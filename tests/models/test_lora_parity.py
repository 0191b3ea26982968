"""Adapters against peft on torch: logits of directories in both directions, gradients, and the start."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import model_cases
import numpy as np
import pytest
from test_hf_adapter import adapters_of

from tlt_jax.config import Config
from tlt_jax.config.schema import LORA_TARGETS
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.models import from_config, hf, hf_adapter, hf_config, lora, transformer
from tlt_jax.models.low_rank import Lora

pytestmark = pytest.mark.parity

LORA = Lora(4, 6.0, LORA_TARGETS)


def forward(params, config, mesh=None) -> jax.Array:
    """Logits of model_cases.TOKENS."""
    ids = jnp.asarray(model_cases.TOKENS, jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(ids.shape[1]), ids.shape)
    options = {"compute_dtype": "float64", "block": 4, "mesh": mesh}
    x, _ = transformer.hidden(params, config, ids, positions, jnp.ones_like(ids), **options)
    return transformer.logits(params, config, x)[..., : config.vocab_size]


@pytest.mark.parametrize("family", model_cases.FAMILIES)
def test_peft_loads_what_we_write_with_our_logits_and_gradients(family, tmp_path, x64):
    import make_goldens
    import torch
    from peft import PeftModel

    base = model_cases.write(family, tmp_path / "base")
    model, mesh = hf_config.read_config(base), make_mesh(2, 2)
    params = hf.load(base, model, mesh, "float64")
    adapters = adapters_of(LORA, model, mesh, "float64")
    hf_adapter.save(adapters, LORA, model, tmp_path / "ours", mesh, str(base), None, "float64")
    reference = PeftModel.from_pretrained(
        make_goldens.reference(base), tmp_path / "ours", is_trainable=True
    ).double()
    tokens = torch.tensor(model_cases.TOKENS)
    with make_goldens.all_float64():
        found = reference(tokens, labels=tokens)
        found.loss.backward()

    ours = jax.jit(lambda adapters: forward(lora.applied(params, adapters), model, mesh))(adapters)
    theirs = found.logits.detach().numpy()
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-10)
    plain = jax.jit(lambda params: forward(params, model, mesh))(params)
    assert np.abs(np.asarray(plain) - theirs).max() > 0.1, "the adapters matter"

    @jax.jit
    @jax.grad
    def gradient(adapters):
        logp = jax.nn.log_softmax(forward(lora.applied(params, adapters), model, mesh)[:, :-1])
        ids = jnp.asarray(model_cases.TOKENS, jnp.int32)
        return -jnp.mean(jnp.take_along_axis(logp, ids[:, 1:, None], axis=-1))

    grads = gradient(adapters)
    for tensor in hf_adapter.tensors(LORA, model):
        name = tensor.name.replace(".weight", ".default.weight")
        theirs, at = reference.get_parameter(name).grad.numpy(), 0
        for place, leaf in enumerate(tensor.leaves):
            ours = np.asarray(hf.leaf_at(grads, leaf))[tensor.layer]
            left = place * tensor.columns
            part = theirs[at : at + len(ours), left : left + ours.shape[1]]
            np.testing.assert_allclose(ours, part, rtol=1e-9, atol=1e-11, err_msg=tensor.name)
            at += len(ours)


Q_O_UP = ["q_proj", "o_proj", "up_proj"]


@pytest.mark.parametrize(
    ("family", "targets", "read", "use_rslora"),
    [
        ("qwen3", Q_O_UP, Q_O_UP, False),
        ("qwen3", Q_O_UP, Q_O_UP, True),
        ("phi3", ["qkv_proj", "o_proj"], ["q_proj", "k_proj", "v_proj", "o_proj"], True),
    ],
)
def test_what_peft_writes_starts_a_run_with_its_logits(
    family, targets, read, use_rslora, tmp_path, x64
):
    """All that peft 0.21 writes into adapter_config.json by default is read."""
    import make_goldens
    import torch
    from peft import LoraConfig, get_peft_model

    base = model_cases.write(family, tmp_path / "base")
    chosen = {"r": 3, "lora_alpha": 5, "target_modules": targets}
    settings = LoraConfig(task_type="CAUSAL_LM", use_rslora=use_rslora, lora_dropout=0.1, **chosen)
    theirs = get_peft_model(make_goldens.reference(base), settings)
    torch.manual_seed(0)
    for name, weight in theirs.named_parameters():
        if "lora_A" in name:
            bound = weight.shape[1] ** -0.5
            assert 0.9 * bound < weight.abs().max() <= bound, "as lora.init draws it"
        if "lora_B" in name:
            assert not weight.any()
            torch.nn.init.normal_(weight)
    theirs.save_pretrained(tmp_path / "theirs")
    with make_goldens.all_float64(), torch.no_grad():
        expected = theirs.eval().double()(torch.tensor(model_cases.TOKENS)).logits.numpy()

    directory = tmp_path / "theirs"
    config = Config(model=replace(Config().model, path=str(directory), param_dtype="float64"))
    model, mesh = from_config.model_config(config, None), make_mesh(2, 2)
    found = hf_adapter.read_lora(directory)
    assert found.targets == tuple(read) and found.rank == 3
    merged = from_config.load_policy(config, model, mesh)
    np.testing.assert_allclose(forward(merged, model, mesh), expected, rtol=0, atol=1e-6)
    started = from_config.start_adapters(config, found, model, mesh)
    applied = lora.applied(from_config.load_base(config, model, mesh, "float64"), started)
    np.testing.assert_allclose(forward(applied, model, mesh), expected, rtol=0, atol=1e-6)
