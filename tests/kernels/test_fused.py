"""Which meshes run Triton kernels, and what is logged when a GPU runs without them."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import numpy as np
import pytest

from tlt_jax.distributed.mesh import make_mesh
from tlt_jax.kernels import fused

NEWEST = {"jax": "0.12.0.1", "jax-triton": "0.4.1", "triton": "3.7.1+local"}


def gpu(compute_capability: str):
    """A mesh of one GPU, as far as its attributes are read."""
    device = SimpleNamespace(platform="gpu", compute_capability=compute_capability)
    return SimpleNamespace(devices=np.array([[device]]))


@pytest.fixture
def installed(monkeypatch):
    """The installed versions; nothing has been logged yet."""
    versions = dict(NEWEST)

    def version(package: str) -> str:
        if package not in versions:
            raise fused.PackageNotFoundError(package)
        return versions[package]

    monkeypatch.setattr(fused, "version", version)
    fused.say.cache_clear()
    yield versions
    fused.say.cache_clear()


def test_a_cpu_runs_none_and_nothing_is_logged(installed, caplog):
    installed.clear()
    assert fused.capability(make_mesh(1, 1)) is None
    assert not caplog.records


@pytest.mark.parametrize(
    ("compute_capability", "number"), [("8.0", 80), ("9.0", 90), ("10.0", 100)]
)
def test_a_gpu_with_the_packages_runs_them(installed, caplog, compute_capability, number):
    assert fused.capability(gpu(compute_capability)) == number
    assert not caplog.records


@pytest.mark.parametrize(
    ("capability", "changes", "message"),
    [
        (
            "9.0",
            {"jax-triton": None},
            "jax-triton 0.4.1 or newer is not installed: with Python 3.12",
        ),
        ("9.0", {"triton": "3.6.0"}, "triton is 3.6.0, they need 3.7 or newer"),
        ("9.0", {"jax": "0.10.2"}, "jax is 0.10.2, they need 0.11 or newer: with Python 3.12"),
        ("7.5", {}, "compute capability 7.5, they need 8.0"),
        ("gfx942", {}, "compute capability gfx942, they need 8.0"),
    ],
)
def test_a_gpu_that_does_not_run_them_logs_once_why(
    installed, caplog, monkeypatch, capability, changes, message
):
    monkeypatch.setattr(logging.getLogger("tlt_jax"), "propagate", True)
    for package, found in changes.items():
        installed[package] = found
        if found is None:
            del installed[package]
    assert [fused.capability(gpu(capability)) for _ in range(2)] == [None, None]
    assert len(caplog.records) == 1 and message in caplog.text
