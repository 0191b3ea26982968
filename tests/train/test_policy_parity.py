"""The policy's loss and gradients against an independent torch implementation, one unpacked answer at a time."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import jax
import numpy as np
import pytest
from objectives import algorithm
from test_policy_update import FULL, recipe_of

from tlt_jax.data import packing
from tlt_jax.data.packing import Example
from tlt_jax.models import architecture, hf
from tlt_jax.train import batch as batches, policy_update
from tlt_jax.train.advantages import answer_weights

MODEL = architecture.ModelConfig(
    family="qwen2", vocab_size=37, hidden_size=16, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4, mlp_dim=24,
    max_positions=64, qkv_bias=True, tied=True, init_std=0.4,
)  # fmt: skip
CASES = {
    "on policy": (algorithm(), "token_mean", 1.0),
    "every term": (FULL, "sequence_mean", 0.7),
    "dr_grpo": (algorithm(kl_coef=0.1), "dr_grpo", 0.0),
}


def torch_loss(model, objective, temperature, examples, weights, advantages, given):
    """The loss as TRL and verl write it, summed answer by answer."""
    import torch

    total = torch.zeros((), dtype=torch.float64)
    for i, example in enumerate(examples):
        ids = torch.tensor(np.concatenate([example.prompt, example.answer]), dtype=torch.long)
        logits = model(ids[None]).logits[0, len(example.prompt) - 1 : -1] / (temperature or 1.0)
        distribution = torch.distributions.Categorical(logits=logits)
        logp = distribution.log_prob(ids[len(example.prompt) :])
        old, reference, recorded = (
            (torch.tensor(part[i]) for part in given) if given else (logp.detach(),) * 3
        )
        ratio = torch.exp(logp - old)
        surrogate = torch.min(
            ratio * advantages[i],
            torch.clamp(ratio, 1 - objective.clip_low, 1 + objective.clip_high) * advantages[i],
        )
        if objective.importance == "token":
            surrogate = surrogate * torch.clamp(
                torch.exp(old - recorded), max=objective.importance_cap
            )
        kl = torch.exp(reference - logp) - (reference - logp) - 1
        loss = -surrogate + objective.kl_coef * kl - objective.entropy_coef * distribution.entropy()
        total = total + weights[i] * loss.sum()
    return total


@pytest.mark.parity
@pytest.mark.parametrize("case", list(CASES))
def test_loss_and_gradients_are_those_of_torch(case, tmp_path, x64):
    from make_goldens import all_float64, reference
    from safetensors.numpy import load_file

    objective, aggregation, temperature = CASES[case]
    random = np.random.default_rng(0)
    recipe = replace(recipe_of(objective, 2, 2, temperature=temperature), model=MODEL)

    def draw(most: int) -> np.ndarray:
        return random.integers(0, 37, random.integers(1, most))

    examples = [Example(uid, draw(6), draw(12)) for uid in range(14)]
    lengths = np.array([len(example.answer) for example in examples])
    weights = answer_weights(lengths, aggregation, 16)
    advantages = random.normal(size=len(examples))
    given = None
    if case != "on policy":
        given = [[-3.6 + random.normal(0, 0.7, n) for n in lengths] for _ in range(3)]

    packed = packing.pack(examples, row_tokens=24, rows=16, groups=2)
    batch = batches.make_batch(packed, recipe, weights, advantages, given[2] if given else None)
    (rows,) = batch
    if given:
        rows = rows._replace(
            old_logprobs=packed[1].place(given[0])[0],
            reference_logprobs=packed[1].place(given[1])[0],
        )
    params = architecture.init(MODEL, recipe.mesh, jax.random.key(0), "float64")
    loss = partial(policy_update.loss, rows=rows, recipe=recipe)
    (total, _), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(params)

    hf.save(params, MODEL, tmp_path / "weights", recipe.mesh, None, "float64")
    hf.save(gradient, MODEL, tmp_path / "gradient", recipe.mesh, None, "float64")
    model = reference(tmp_path / "weights")
    with all_float64():
        expected = torch_loss(model, objective, temperature, examples, weights, advantages, given)
        expected.backward()
    assert float(total) == pytest.approx(expected.item(), rel=1e-10)
    found = load_file(tmp_path / "gradient" / "model.safetensors")
    for name, weight in model.named_parameters():
        np.testing.assert_allclose(
            found[name], weight.grad.numpy(), rtol=1e-8, atol=1e-12, err_msg=name
        )
