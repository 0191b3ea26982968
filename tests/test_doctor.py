"""`tlt doctor`: what it prints of this machine, and that what is wrong is named with what to do."""

from __future__ import annotations

from types import SimpleNamespace

import jax
import pytest

from tlt_jax import doctor
from tlt_jax.kernels import fused as kernels
from tlt_jax.kernels.fused import COSTS, Fused
from tlt_jax.rollout import kernel_check


@pytest.fixture(autouse=True)
def command(monkeypatch, tmp_path):
    monkeypatch.setattr("sys.argv", ["doctor", "--cache", str(tmp_path / "cache")])
    monkeypatch.setattr(doctor.process, "set_environment", lambda config: None)
    monkeypatch.setattr(doctor, "LEAST_FREE", 0)
    monkeypatch.setattr(doctor.process, "NVIDIA", ())


def test_a_sound_machine_is_described_and_nothing_is_wrong(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("JAX_SOMETHING", "1")
    monkeypatch.setenv("HF_HUB_TOKEN", "secret")
    assert doctor.main() == 0
    printed = capsys.readouterr().out
    for text in (
        f"jax              {jax.__version__}", "device 0         cpu (cpu)", "kernels          none is used",
        f"compile cache    {tmp_path / 'cache'}, 0.00 GiB in 0 files", "disk here", "JAX_SOMETHING=1", "HF_HUB_TOKEN=(set)",
    ):  # fmt: skip
        assert text in printed, text
    assert "secret" not in printed and printed.endswith("nothing is wrong\n")


def test_what_is_wrong_is_named_with_what_to_do(monkeypatch, capsys, tmp_path):
    (tmp_path / "cache").write_text("a file")
    monkeypatch.setattr(doctor, "LEAST_FREE", 1 << 60)
    monkeypatch.setattr(doctor.process, "NVIDIA", ("/",))
    assert doctor.main() == 1
    printed = capsys.readouterr().out.partition("3 problems\n")[2].splitlines()
    host, cache, disk = printed
    assert "has a GPU (/) that JAX does not use" in host
    assert "cannot be written (File exists): set rollout.compile_cache" in cache
    assert "GiB free, a run needs" in disk


def test_a_kernel_that_is_wrong_is_a_problem(monkeypatch, capsys):
    monkeypatch.setattr(
        kernel_check, "problems", lambda shapes, fused: {kernels.GATED: "it does not run: X"}
    )
    monkeypatch.setattr(Fused, "of", lambda mesh: Fused(mesh, 90, frozenset(COSTS)))
    devices = [SimpleNamespace(platform="gpu")]
    monkeypatch.setattr("tlt_jax.distributed.mesh.make_mesh", lambda *given: None)
    found = list(doctor.of_kernels(devices))
    assert len(found) == len(COSTS)
    (wrong,) = [one for one in found if one.problem]
    assert (
        wrong.value == "projections.gated: it does not run: X"
        and "is off: it does not run: X" in wrong.problem
    )
