"""The check of the fused kernels before a rollout: a mistake in any of them is found, and turns that kernel off alone."""

from __future__ import annotations

import json
import logging
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from kernels import triton_runs

from tlt_jax.distributed.job import Job
from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import fused as kernels
from tlt_jax.kernels.fused import COSTS, Fused
from tlt_jax.models import drafter as drafters
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.low_rank import Lora
from tlt_jax.rollout import kernel_check
from tlt_jax.rollout.kernel_check import Shapes

SMALL = {
    "num_layers": 4,
    "max_positions": 64,
    "family": "qwen2",
    "vocab_size": 300,
    "hidden_size": 64,
    "mlp_dim": 96,
}
POLICY = ModelConfig(num_heads=3, num_kv_heads=1, head_dim=32, qkv_bias=True, **SMALL)
NORMED = ModelConfig(num_heads=4, num_kv_heads=2, head_dim=16, qk_norm="head", **SMALL)
SPARSE = replace(POLICY, num_experts=4, experts_per_token=2, expert_dim=16)
# In float32: XLA's CPU back end has not all products of bfloat16.
RUNS = [
    Shapes(SPARSE, drafters.for_policy(SPARSE, "eagle3"), 3, "float32"),
    Shapes(NORMED, drafters.for_policy(NORMED, "dspark"), 8, "float32", Lora(4, 8.0, ("q_proj", "up_proj"))),
]  # fmt: skip
# A kernel, its file, a part of its code, and a mistake in its place.
MISTAKES = [
    (kernels.ATTENTION, "tree_attention", "total = total * kept + tl.sum(weights, axis=1)", "total += tl.sum(weights, axis=1)"),
    (kernels.CACHE_ROWS, "cache_rows", "slot[None, :], tile, mask", "slot[None, :], -tile, mask"),
    (kernels.FILTER, "token_filter", "weight.to(tl.float64) * P)", "weight.to(tl.float64) * P * P)"),
    (kernels.HEADS, "projections", "y1 * cos - y2 * sin", "y1 * cos + y2 * sin"),
    (kernels.ADDED, "projections", "total += tl.load(x + place", "total -= tl.load(x + place"),
    (kernels.GATED, "projections", "y1 * tl.sigmoid(y1) * y2", "y1 * tl.sigmoid(y2) * y2"),
    (kernels.PART_HEADS, "product_parts", "z1 * cos - z2 * sin", "z1 * cos + z2 * sin"),
    (kernels.PART_ADDED, "product_parts", "wide * scale * weight", "wide * weight"),
    (kernels.EXPERTS, "expert_tiles", "total.to(result.dtype.element_ty), mask=within", "-total, mask=within"),
    (kernels.FEW_EXPERTS, "expert_tiles", "gate * tl.sigmoid(gate) * up", "gate * tl.sigmoid(up) * up"),
]  # fmt: skip


def problems(runs: list[Shapes]) -> list[dict[str, str]]:
    """Those that the check finds in Triton's interpreter."""
    calls = [((shapes,), {}) for shapes in runs]
    return triton_runs.interpreted("tlt_jax.rollout.kernel_check:problems", calls)


def test_kernels_without_a_mistake_pass():
    assert problems(RUNS) == [{}] * len(RUNS)


def test_a_mistake_in_each_kernel_is_found(monkeypatch, tmp_path):
    """In a copy of the package that has them all: each kernel is compared alone."""
    package = Path(kernel_check.__file__).parents[1]
    shutil.copytree(package, tmp_path / "tlt_jax", symlinks=True)
    for _, name, right, wrong in MISTAKES:
        path = tmp_path / "tlt_jax" / "kernels" / f"{name}.py"
        assert path.read_text().count(right) == 1, right
        path.write_text(path.read_text().replace(right, wrong))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (found,) = problems(RUNS[:1])
    assert found.keys() == COSTS.keys() == {name for name, *_ in MISTAKES}
    assert "it misplaces tokens of probability" in str(found.pop(kernels.FILTER))
    assert all("of the largest number, rounding by 0.003" in str(why) for why in found.values())


@pytest.fixture
def gpu(monkeypatch) -> Fused:
    """All kernels on the CPU that is here, which the check takes for a GPU."""
    monkeypatch.setattr(kernel_check, "is_gpu", lambda mesh: True)
    monkeypatch.setattr(logging.getLogger("tlt_jax"), "propagate", True)
    return Fused(make_mesh(1, 1), 90, frozenset(COSTS))


def test_a_kernel_that_is_wrong_or_does_not_run_is_off_and_a_line_says_so(gpu, monkeypatch, caplog):
    def part(names: dict[str, float | Exception]):
        def errors(shapes, fused, wanted):
            for name in wanted:
                if isinstance(names.get(name), Exception):
                    raise names[name]
            return {name: names.get(name, 0.0) for name in wanted}

        return errors

    broken = RuntimeError("ptxas: no\nlong text")
    found = {kernels.GATED: 0.5, kernels.HEADS: float("nan"), kernels.ATTENTION: broken}
    monkeypatch.setattr(kernel_check, "errors", part(found))
    checked = kernel_check.checked(gpu, RUNS[0], Job())
    assert gpu.on - checked.on == found.keys() and checked.mesh is gpu.mesh
    lines = [one.getMessage() for one in caplog.records if one.levelno == logging.WARNING]
    assert [line.split(" is off: ")[0] for line in lines] == [
        "the kernel projections.gated", "the kernel projections.heads", "the kernel tree_attention",
    ]  # fmt: skip
    assert "it does not run: RuntimeError: ptxas: no;" in lines[-1]


def test_what_is_off_in_one_process_is_off_in_all(gpu, monkeypatch, caplog):
    monkeypatch.setattr(
        kernel_check, "errors", lambda shapes, fused, names: dict.fromkeys(names, 0.0)
    )
    said = []

    def heard(text: str) -> dict[int, str]:
        said.append(text)
        return {3: json.dumps({kernels.FILTER: "it cannot run there"})}

    job = SimpleNamespace(count=4, is_first=True, meeting=lambda: SimpleNamespace(heard=heard))
    assert gpu.on - kernel_check.checked(gpu, RUNS[0], job).on == {kernels.FILTER}
    assert "token_filter is off: in process 3: it cannot run there;" in caplog.text
    none = Fused(gpu.mesh)  # this process has no Triton: it tells the others
    assert kernel_check.checked(none, RUNS[0], job).on == frozenset()
    assert said[0] == "" and json.loads(said[1]).keys() == COSTS.keys()


def test_devices_that_are_absent_run_no_check(gpu, monkeypatch):
    monkeypatch.setattr(jax, "local_devices", lambda: [])
    monkeypatch.setattr(kernel_check, "errors", None)
    assert kernel_check.checked(gpu, RUNS[0], Job()) == gpu
