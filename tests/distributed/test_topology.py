"""Descriptions of absent devices: their names, errors for wrong ones, and the memory that a run can use."""

from __future__ import annotations

import jax
import pytest

from tlt_jax.distributed import topology
from tlt_jax.errors import ConfigError


@pytest.fixture
def plugin(monkeypatch):
    """Versions of JAX's packages, with the GPU plugin installed."""
    versions = {"jax-cuda13-plugin": "1.2.3", "jaxlib": "1.2.3"}

    def version(name):
        if versions[name] is None:
            raise topology.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(topology, "version", version)
    return versions


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h300:8", "known are h100, h200"),
        ("h200", "such as h200:8"),
        ("h200:", "'' GPUs: give 1 to 8"),
        ("h200:0", "'0' GPUs"),
        ("h200:1x2", "'1x2' GPUs"),
        ("h200:12", "'12' GPUs: give 1 to 8, or a multiple"),
        ("nowhere.txtpb:8", "nowhere.txtpb: cannot be read"),
    ],
)
def test_the_error_for_an_unknown_topology_names_the_known_ones(name, message):
    with pytest.raises(ConfigError, match=message):
        topology.describe(name)


@pytest.mark.parametrize(
    ("plugin_version", "message"),
    [
        (None, r'not installed: pip install -e "\.\[gpu-aot\]"'),
        ("1.2.4", r'is 1\.2\.4 and jaxlib 1\.2\.3: pip install -e "\.\[gpu-aot\]"'),
    ],
)
def test_a_plugin_that_is_missing_or_of_another_version_is_named(plugin, plugin_version, message):
    plugin["jax-cuda13-plugin"] = plugin_version
    with pytest.raises(ConfigError, match=message):
        topology.describe("h200:8")


def test_a_compiler_without_its_tools_is_reported_before_programs_are_lowered(monkeypatch):
    def refuse(self):
        raise jax.errors.JaxRuntimeError("UNAVAILABLE: No ptxas. You can choose: many lines")

    topology.check_compiler("h200:1", jax.devices()[0])
    monkeypatch.setattr(jax.stages.Lowered, "compile", refuse)
    with pytest.raises(ConfigError, match=r"h200:1: UNAVAILABLE: No ptxas: pip install"):
        topology.check_compiler("h200:1", jax.devices()[0])


@pytest.mark.parametrize("missing", topology.NEEDED)
def test_a_description_without_a_field_that_graphs_need_is_rejected(tmp_path, missing):
    text = topology.DESCRIPTION.format(**vars(topology.GPUS["h100"]))
    path = tmp_path / "gpu.txtpb"
    path.write_text(text)
    assert topology.description(path) == text
    path.write_text(text.replace(f"  {missing}:", "  other:"))
    with pytest.raises(ConfigError, match=f"{missing} is missing"):
        topology.description(path)


def test_a_run_can_use_the_share_of_xlas_allocator(monkeypatch):
    for name in topology.FRACTIONS:
        monkeypatch.delenv(name, raising=False)
    assert topology.usable(1000) == 750
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.5")
    assert topology.usable(1000) == 500
    monkeypatch.setenv("XLA_CLIENT_MEM_FRACTION", "most")
    with pytest.raises(ConfigError, match="XLA_CLIENT_MEM_FRACTION is 'most'"):
        topology.usable(1000)
