"""Test set-up: 8 fake CPU devices before JAX starts, strict ranks, and the seconds of each test file.

Programs run once or twice here: compiling them without LLVM's optimizations halves the time of the suite, and with one thread
and, where jaxlib still has it, the plainer code generator, it halves again. Set XLA_FLAGS to compile as usual. Set
TLT_JAX_TEST_PROGRAMS to a folder that keeps the programs of engines and runs: the next run of the tests loads them.
"""

from __future__ import annotations

import gc
import os
import shutil
import tempfile
from collections import defaultdict
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
QUICK += " --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else ""
os.environ["XLA_FLAGS"] = " ".join(
    [flag for flag in os.environ.get("XLA_FLAGS", QUICK).split() if "device_count" not in flag]
    + ["--xla_force_host_platform_device_count=8"]
)
PROGRAMS = "TLT_JAX_TEST_PROGRAMS"  # a folder of executables that all processes of a run of the tests share
IS_FIRST = PROGRAMS not in os.environ
if IS_FIRST:
    os.environ[PROGRAMS] = tempfile.mkdtemp(prefix="tlt_jax_programs_")
HOME = ""
if "PYTEST_XDIST_WORKER" not in os.environ:  # neither the user's caches nor drafters on the shelf
    HOME = os.environ["HOME"] = tempfile.mkdtemp(prefix="tlt_jax_home_")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# Tracing allocates much that stays: collecting it again and again takes a tenth of the suite's time.
gc.set_threshold(100_000, 20, 50)

import jax  # noqa: E402
import pytest  # noqa: E402
from jax.experimental.compilation_cache import compilation_cache  # noqa: E402

MOST_MAPS = 25_000  # beyond it JAX segfaults some time later, in a compilation
FILE_SECONDS: dict[str, float] = defaultdict(float)


@pytest.fixture(scope="session", autouse=True)
def eight_devices():
    """Every test runs where 8 devices are."""
    assert jax.device_count() == 8, f"tests need 8 fake CPU devices, found {jax.devices()}"


@pytest.fixture(scope="module", autouse=True)
def room_for_programs():
    """Programs that no later test uses are dropped, before their mappings reach what Linux gives a process (65530)."""
    yield
    maps = Path("/proc/self/maps")
    if maps.exists() and maps.read_bytes().count(b"\n") > MOST_MAPS:
        jax.clear_caches()
        gc.collect()


@pytest.fixture(scope="module", autouse=True)
def no_compile_cache():
    """JAX's compile cache, which engines and runs turn on, is off after each file."""
    yield
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()


@pytest.fixture
def key() -> jax.Array:
    """A fixed random key."""
    return jax.random.key(0)


@pytest.fixture
def x64():
    """64-bit numbers for one test; restored afterwards."""
    with jax.enable_x64(True):
        yield


# Files that take longest, the first of which often wait for processes: they come first, so that no worker ends with one alone.
LONGEST = (
    "test_failures.py", "test_train.py", "test_processes.py", "test_library.py", "test_step_training.py",
    "test_plan.py", "test_adaptive_runs.py", "test_engine.py", "test_speculation.py", "test_train_drafter.py",
    "test_unusual_policies.py", "test_deterministic_runs.py", "test_lora_runs.py", "test_idle_training.py",
    "test_block_loss.py", "test_dynamic_sampling.py", "test_group.py", "test_remat.py", "test_policy_update.py",
    "test_example_notebook.py", "test_dialogue.py", "test_expert_runs.py", "test_environment_runs.py",
    "test_supports.py", "test_teacher.py", "test_own_loop.py", "test_benchmarks.py", "test_adaptive_engine.py",
    "test_distribution.py", "test_generate.py", "test_weights_and_biases.py", "test_extending.py", "test_readme.py",
)  # fmt: skip


def pytest_collection_modifyitems(items):
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(item.path.name, len(LONGEST)))


def pytest_runtest_logreport(report):
    FILE_SECONDS[report.nodeid.split("::")[0]] += report.duration


def pytest_unconfigure():
    if IS_FIRST:
        shutil.rmtree(os.environ.pop(PROGRAMS), ignore_errors=True)
    if HOME:
        shutil.rmtree(HOME, ignore_errors=True)


def pytest_terminal_summary(terminalreporter):
    terminalreporter.section("seconds per test file")
    for name, seconds in sorted(FILE_SECONDS.items(), key=lambda item: -item[1]):
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")
    terminalreporter.write_line(f"{sum(FILE_SECONDS.values()):8.1f}  total")
