"""Writes tests/goldens/models.npz: what transformers computes, in float64, for every case of model_cases.

PYTHONPATH=. python tests/make_goldens.py
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import model_cases
import numpy as np
import torch
from transformers import AutoModelForCausalLM


@contextmanager
def all_float64() -> Iterator[None]:
    """Makes transformers compute in float64 where its code names float32 (norms, rotary angles)."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    try:
        yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved


def reference(directory: Path) -> torch.nn.Module:
    """The model of a directory in float64; its forward pass is to be called inside all_float64."""
    model = AutoModelForCausalLM.from_pretrained(
        directory,
        dtype=torch.float64,
        attn_implementation="eager",
        experts_implementation="eager",
    )
    with all_float64():
        model.model.rotary_emb = type(model.model.rotary_emb)(model.config)
    return model.eval()


def logits(case: str) -> np.ndarray:
    """Logits of model_cases.TOKENS."""
    with tempfile.TemporaryDirectory() as folder:
        model = reference(model_cases.write(case, Path(folder)))
        with all_float64(), torch.no_grad():
            return model(torch.tensor(model_cases.TOKENS)).logits.numpy()


if __name__ == "__main__":
    model_cases.GOLDENS.parent.mkdir(exist_ok=True)
    np.savez_compressed(model_cases.GOLDENS, **{case: logits(case) for case in model_cases.CASES})
