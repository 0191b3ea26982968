"""Plans: the arithmetic against hand-worked numbers, the preflight, the collectives of a rollout, the TPU topologies."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest

from tlt_jax import config, plan
from tlt_jax.collectives import collectives
from tlt_jax.engine import Engine
from tlt_jax.mesh import make_mesh, sharding
from tlt_jax.settings import ConfigError
from tlt_jax.spec_decode.chunk import Rules
from tlt_jax.spec_decode.programs import Key
from tlt_jax.train.policy_step import Recipe

TINY = [
    "--config", "configs/quickstart.yaml", "--mesh.fake_devices", "0", "--rollout.compile_cache", "off",
    "--model.init.hidden_size", "32", "--model.init.intermediate_size", "64", "--model.init.vocab_size", "128",
    "--rollout.prompts", "4", "--rollout.samples", "2",
]  # fmt: skip


@pytest.fixture
def planned():
    """A tiny configuration on a (2, 2) mesh: its recipe and engine."""
    settings = config.parse([*TINY, "--mesh.model", "2"])
    model, mesh = plan.sizes(settings), make_mesh(2, 2)
    return settings, Recipe.of(settings, model, mesh, 1), Engine(settings, model, mesh)


def test_bytes_of_one_device_are_those_of_its_shards():
    mesh = make_mesh(2, 4)
    leaf = jax.ShapeDtypeStruct((8, 16), jnp.bfloat16, sharding=sharding(mesh, ("embed", "mlp"), "train"))
    assert plan.device_bytes({"a": leaf, "b": leaf}) == 2 * (8 // 2) * (16 // 4) * 2


def test_the_optimizer_is_twice_the_weights_and_the_cache_is_worked_by_hand(planned):
    settings, recipe, engine = planned
    kinds = plan.budget(settings, recipe, engine)
    assert kinds["optimizer"] == pytest.approx(2 * kinds["weights"], rel=0.01)
    layers, heads_each, width = 2, 1, 8
    slots = plan.cache_slots(settings) + 8
    assert kinds["cache"] == 2 * layers * engine.capacity * heads_each * slots * width * 4
    assert engine.capacity == 4 * 2 // 2


def test_a_run_that_cannot_fit_is_refused_with_the_knob(planned, monkeypatch):
    settings, recipe, engine = planned
    plan.preflight(settings, recipe, engine)
    monkeypatch.setattr(plan, "device_memory", lambda device: 1000)
    with pytest.raises(ConfigError, match="does not fit.*a device has.*change "):
        plan.preflight(settings, recipe, engine)


def test_the_largest_kind_names_the_knob():
    assert "rollout.slots" in plan.advice({"weights": 1, "cache": 2})
    assert "train.logits_chunk" in plan.advice({"weights": 1, "logits chunk": 2})


def test_a_rollout_chunk_only_reduces_over_model(planned):
    _, _, engine = planned
    chunk = engine.registry.lower(Key("chunk", 0, 4, 128, (4,), rules=Rules(eos_ids=(1,)))).compile()
    assert {name.split(" over ")[0] for name in collectives(chunk.as_text(), engine.groups[0])} == {"all-reduce"}


def test_the_command_compiles_every_program_and_says_that_it_fits(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["plan", *TINY])
    assert plan.main() == 0
    printed = capsys.readouterr().out
    for name in ("prefill", "rollout chunk", "rollout reshard", "policy update"):
        assert f"{name}: compiled in" in printed
    assert printed.count("\n  fits") == 4 and "DOES NOT FIT" not in printed
    assert "all-gather over data" in printed


def test_a_program_that_does_not_fit_is_said_so_with_the_knob(planned, capsys):
    settings, recipe, engine = planned
    kinds = plan.budget(settings, recipe, engine)
    program = next(plan.lower(settings, recipe, engine))
    assert not plan.report(replace(program), kinds, limit=10)
    assert "DOES NOT FIT: the largest are the" in capsys.readouterr().out


@pytest.mark.tpu
@pytest.mark.parametrize(
    ("name", "overrides", "topology"),
    [
        ("gsm8k_qwen2.5_0.5b", ("--mesh.data", "8", "--train.rows", "8"), "v5e:2x4"),
        ("math_qwen2.5_7b_pod", (), "v5p:4x4x4"),
    ],
)
def test_the_shipped_configurations_compile_and_fit_on_a_tpu(name, overrides, topology):
    if importlib.util.find_spec("libtpu") is None:
        print("not run: libtpu is not installed (pip install -e '.[tpu,test]')")
        return
    command = [sys.executable, "-m", "tlt_jax.plan", "--config", f"configs/{name}.yaml", "--topology", topology, *overrides]
    inherited = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    done = subprocess.run(command, env=inherited, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    assert done.stdout.count("\n  fits") == 4
    cache, temporaries = re.search(r"rollout chunk:.*?cache ([\d.]+) \+ temporaries ([\d.]+)", done.stdout, re.S).groups()
    assert float(temporaries) < 0.25 * float(cache)  # the cache is not copied
