"""`python -m tlt_jax.doctor`: what of this machine and installation matters to a run, what is wrong, and what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from tlt_jax import cli
from tlt_jax.config.schema import Config
from tlt_jax.distributed import process

PACKAGES = (
    "tlt-jax",
    "jax",
    "jaxlib",
    "jax-triton",
    "triton",
    "flax",
    "optax",
    "orbax-checkpoint",
    "transformers",
    "numpy",
)
VARIABLES = (
    "JAX_",
    "XLA_",
    "CUDA_VISIBLE_DEVICES",
    "TPU_",
    "LD_LIBRARY_PATH",
    "NCCL_",
    "TRITON_",
    "HF_HOME",
    "HF_HUB_",
)
SECRET = ("TOKEN", "KEY", "PASSWORD")  # in the name of a variable whose value is not printed
LEAST_FREE = 10 << 30  # bytes, of some checkpoints and compiled programs
GIB = 1 << 30
# A policy of Qwen2.5-0.5B's shape, and a drafter for it: the kernels that a small policy's round runs.
SIZES = {
    "model_type": "qwen2", "hidden_size": 896, "num_hidden_layers": 24, "num_attention_heads": 14,
    "num_key_value_heads": 2, "intermediate_size": 4864, "max_position_embeddings": 4096,
}  # fmt: skip
# Large matrices, as of a 7B policy, whose products other kernels add up.
LARGE = SIZES | {
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "intermediate_size": 18944,
}
NODES = 8


class Fact(NamedTuple):
    """A line of the report; `problem`: what is wrong and what to do, or nothing."""

    name: str
    value: str
    problem: str = ""


def main() -> int:
    """The command; exit code 0, or 1 when something is wrong."""
    parser = cli.Parser(prog="python -m tlt_jax.doctor", description=cli.COMMANDS["doctor"].about)
    parser.add_argument(
        "--cache", default="", help="rollout.compile_cache of the run (default: its default)"
    )
    given = parser.parse_args()
    process.set_environment(Config())
    found = []
    for fact in facts(given.cache):
        print(f"{fact.name:<16} {fact.value}", flush=True)
        found.append(fact)
    problems = [fact for fact in found if fact.problem]
    print(
        f"\n{len(problems)} problem{'s' * (len(problems) != 1)}"
        if problems
        else "\nnothing is wrong"
    )
    for fact in problems:
        print(f"- {fact.name}: {fact.problem}")
    return 1 if problems else 0


def facts(cache: str) -> Iterator[Fact]:
    """All lines, in their order."""
    yield from versions()
    devices = yield from of_devices()
    yield from of_kernels(devices)
    yield from of_folders(cache)
    for name in sorted(os.environ):
        if name.startswith(VARIABLES):
            hidden = any(word in name for word in SECRET)
            yield Fact("environment", f"{name}={'(set)' if hidden else os.environ[name]}")


def versions() -> Iterator[Fact]:
    """Python, the packages that matter, and the commit of a checkout."""
    yield Fact("python", f"{platform.python_version()}, {platform.platform()}")
    for package in PACKAGES:
        try:
            yield Fact(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Fact(package, "not installed")
    folder = Path(__file__).parents[1]
    if (folder / ".git").exists() and shutil.which("git"):
        given = ["git", "-C", str(folder), "describe", "--always", "--dirty", "--abbrev=12"]
        found = subprocess.run(given, capture_output=True, text=True).stdout.strip()
        yield Fact("commit", found or "unknown")


def of_devices() -> Iterator[Fact]:
    """The devices and their memory; returns them."""
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        yield Fact(
            "devices",
            "none",
            f"JAX has no device ({text}): unset JAX_PLATFORMS, or install its extra, gpu or tpu",
        )
        return []
    for device in devices:
        stats = device.memory_stats() or {}
        limit, used = stats.get("bytes_limit", 0), stats.get("bytes_in_use", 0)
        memory = f", {(limit - used) / GIB:.1f} of {limit / GIB:.1f} GiB free" if limit else ""
        yield Fact(f"device {device.id}", f"{device.device_kind} ({device.platform}){memory}")
    if devices[0].platform == "cpu":
        gpus = [path for path in process.NVIDIA if os.path.exists(path)]
        why = f"this machine has a GPU ({gpus[0]}) that JAX does not use: " if gpus else ""
        if why and os.environ.get("JAX_PLATFORMS", "") == "cpu":
            why += "unset JAX_PLATFORMS"
        elif why:
            why += 'pip install -U "tlt-jax[gpu]", and look at what JAX says of its plugin'
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        yield Fact("host memory", f"{memory / GIB:.1f} GiB, {os.cpu_count()} cores", why)
    return devices


def of_kernels(devices: list[Any]) -> Iterator[Fact]:
    """The check of the fused kernels, each beside XLA's operations."""
    if not devices or devices[0].platform != "gpu":
        yield Fact(
            "kernels", "none is used: fused kernels are for NVIDIA GPUs, XLA's operations run here"
        )
        return
    from tlt_jax.distributed.mesh import make_mesh
    from tlt_jax.kernels import fused as kernels
    from tlt_jax.models import drafter as drafters, hf_config
    from tlt_jax.rollout import kernel_check

    fused = kernels.Fused.of(make_mesh(1, 1, devices))
    if not fused.on:
        why = kernels.without(str(devices[0].compute_capability))
        yield Fact("kernels", "none is used", f"{why}: without them a round takes more launches")
        return
    wrong: dict[str, str] = {}
    for sizes in (SIZES, LARGE):
        policy = hf_config.new_config(sizes, 2048 if sizes is SIZES else 1 << 17, ())
        drafter = drafters.for_policy(policy, "eagle3")
        policy = replace(policy, num_experts=8, experts_per_token=2, expert_dim=policy.mlp_dim)
        shapes = kernel_check.Shapes(policy, drafter, NODES, "bfloat16")
        wrong = kernel_check.problems(shapes, fused=fused) | wrong
    for name in sorted(fused.on):
        value = wrong.get(name, "equals XLA's operations up to rounding")
        yield Fact(
            "kernel", f"{name}: {value}", kernel_check.line(name, value) if name in wrong else ""
        )


def of_folders(cache: str) -> Iterator[Fact]:
    """The cache of compiled programs, and free disk."""
    from tlt_jax.rollout.executables import disk_cache

    if cache == "off":
        yield Fact("compile cache", "off")
    else:
        path = disk_cache.folder_of(cache)
        files = (
            [file.stat().st_size for file in path.rglob("*") if file.is_file()]
            if path.exists()
            else []
        )
        reason = disk_cache.unwritable(path)
        problem = (
            f"{path} cannot be written ({reason}): set rollout.compile_cache to a folder of yours"
            if reason
            else ""
        )
        yield Fact(
            "compile cache", f"{path}, {sum(files) / GIB:.2f} GiB in {len(files)} files", problem
        )
    for name, path in {"disk here": Path.cwd(), "disk of /tmp": Path("/tmp")}.items():
        free = shutil.disk_usage(path).free
        problem = f"{path} has {free / GIB:.1f} GiB free, a run needs {LEAST_FREE / GIB:.0f}: free some, or run elsewhere"
        yield Fact(
            name,
            f"{path}, {free / GIB:.1f} GiB free",
            problem if free < LEAST_FREE and name == "disk here" else "",
        )


if __name__ == "__main__":
    sys.exit(main())
