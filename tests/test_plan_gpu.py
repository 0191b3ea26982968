"""Programs for absent GPUs: kernels and graphs of rollout chunks at real sizes; whether shipped configurations fit."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from tlt_jax.distributed import process

# A 7B policy of two layers; only its chunks, which compile in half a minute on two cores (the whole command: one or two).
SIZES = [
    "--config", "configs/math_qwen2.5_7b_pod.yaml", "--mesh.data", "1", "--model.init.num_hidden_layers", "2",
    "--rollout.max_new_tokens", "3072", "--rollout.slots", "32",
    "--speculation.strategies", "['4_2_8']",
]  # fmt: skip
CHUNKS = """
import sys
from tlt_jax.plan import __main__ as command, programs
from tlt_jax.rollout.executables.programs import Decode

largest = programs.largest_programs
programs.largest_programs = lambda *args: {
    name: one for name, one in largest(*args).items() if isinstance(one, Decode)
}
programs.lower = programs.lower_rollout
sys.exit(command.main())
"""
PLAIN, TREE = "rollout chunk", "rollout chunk 4_2_8 of 32"
# Most kernels of a layer, over all versions of JAX in use, without Triton; of a tree one finds nodes whose values are not
# finite, which must not reach others. Only ever lower these.
MOST = {PLAIN: 19.5, TREE: 28.5}
# With Triton: ten, and of two layers half of the first norm and of the first counters of attention. Only ever lower it.
MOST_BY_PARTS = 11.0
# Policies of two layers whose matrices our kernels take; most kernels of a layer of a plain round with 32 rows: projections of
# heads, attention, three products, commit; with two layers the rotary angles count as half a kernel. Only ever lower it.
SMALL = {
    "gsm8k_qwen2.5_0.5b": ("--model.init.num_hidden_layers", "2"),
    "gsm8k_smollm2_135m": (
        "--model.compute_dtype", "bfloat16", "--model.init",
        "{model_type: llama, hidden_size: 576, num_hidden_layers: 2, num_attention_heads: 9, num_key_value_heads: 3,"
        " intermediate_size: 1536, max_position_embeddings: 8192, vocab_size: 49152, rope_theta: 100000.0,"
        " rms_norm_eps: 1.0e-5, tie_word_embeddings: true, eos_token_id: 2}",
    ),
}  # fmt: skip
MOST_OF_SMALL = 6.5
# Most kernels of noise, filter and choice; of the head and selection, and the layer, of a level of a learned drafter.
MOST_IN_END, MOST_IN_LEVEL = 6, 27
# Of noise, filter and choice with top-k and top-p; a tree's nodes share noise, which is drawn first. Only ever lower these.
MOST_FILTERED = {PLAIN: 6, TREE: 7}


def planned(*command: str) -> dict[str, str]:
    """The report of `plan` on each program, by name; with the XLA flags that `plan` sets."""
    inherited = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    done = subprocess.run(
        [sys.executable, *command], env=inherited, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr[-2000:]
    printed, _, table = done.stdout.partition("\nprogram ")
    parts = re.split(r"^(\S.*): compiled in .*\n", printed, flags=re.M)
    reports = dict(zip(parts[1::2], parts[2::2], strict=True))
    for name in reports:
        row = re.search(rf"^{re.escape(name)}  .* (\d+)%  (?:> )?([\d.]+)( a round)?$", table, re.M)
        assert row and float(row[2]) > 0 and bool(row[3]) == name.startswith("rollout chunk"), table
    assert "libtpu" not in done.stderr and "Traceback" not in done.stderr, done.stderr
    assert reports and all(text.endswith("\n  fits\n") for text in reports.values()), done.stdout
    return reports


def number(pattern: str, text: str) -> float:
    """The number at the only match of the pattern in the text."""
    (found,) = re.findall(pattern, text)
    return float(found)


def assert_no_cache_is_copied(text: str) -> None:
    assert number(r"at most ([\d.]+) MiB", text) < 0.5 * number(r"keys are ([\d.]+)", text), text


@pytest.mark.gpu
def test_jax_starts_without_a_word_where_its_plugin_for_gpus_finds_none():
    code = (
        "from tlt_jax.config import Config\n"
        "from tlt_jax.distributed import process\n"
        "process.set_environment(Config())\n"
        "import jax\n"
        "print(jax.default_backend())"
    )
    env = {name: value for name, value in os.environ.items() if name != "JAX_PLATFORMS"}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)
    has_gpu = any(map(os.path.exists, process.NVIDIA))
    assert (done.stdout, done.stderr) == ("gpu\n" if has_gpu else "cpu\n", "")


@pytest.mark.gpu
def test_on_one_gpu_a_chunk_is_one_graph_that_holds_its_loop_and_copies_no_cache():
    one = "--mesh.model", "1", "--topology", "h200:1", "--speculation.drafter", "ngram"
    reports = planned("-c", CHUNKS, *SIZES, *one)
    has_triton = importlib.util.find_spec("jax_triton") is not None
    assert set(reports) == set(MOST)
    for name, text in reports.items():
        assert "the chunk is one CUDA graph, with the loop in it" in text, text
        assert "collectives  none" in text, text
        most = MOST_BY_PARTS if has_triton else MOST[name]
        assert number(r"([\d.]+) a layer", text) <= most, text
        assert 0 < number(r"(\d+) for noise, filter and choice", text) <= MOST_IN_END, text
        assert_no_cache_is_copied(text)


@pytest.mark.gpu
@pytest.mark.parametrize("name", SMALL)
def test_a_layer_of_a_small_policy_is_a_kernel_a_product(name):
    pytest.importorskip("jax_triton", reason="Triton, jax-triton: Python 3.12 and the gpu extra")
    one = "--mesh.model", "1", "--topology", "h200:1", "--speculation.drafter", "none"
    sizes = "--config", f"configs/{name}.yaml", "--rollout.slots", "32", *SMALL[name]
    text = planned("-c", CHUNKS, *sizes, *one)[PLAIN]
    assert "the chunk is one CUDA graph, with the loop in it" in text, text
    assert number(r"([\d.]+) a layer", text) <= MOST_OF_SMALL, text
    assert_no_cache_is_copied(text)


@pytest.mark.slow
@pytest.mark.gpu
def test_a_level_of_a_learned_drafter_has_few_kernels():
    drafter = "--speculation.drafter", "runs/nowhere", "--drafter_training.kind", "eagle3"
    reports = planned("-c", CHUNKS, *SIZES, "--mesh.model", "1", "--topology", "h200:1", *drafter)
    assert "the chunk is one CUDA graph, with the loop in it" in reports[TREE], reports[TREE]
    for text in reports.values():
        assert 0 < number(r"(\d+) for noise, filter and choice", text) <= MOST_IN_END, text
    assert 0 < number(r"([\d.]+) a draft level", reports[TREE]) <= MOST_IN_LEVEL, reports[TREE]


@pytest.mark.slow
@pytest.mark.gpu
def test_on_two_gpus_a_round_only_reduces_over_model_and_has_no_loop_that_the_host_drives():
    """With a learned drafter, which also gathers in its data group, as on a TPU."""
    drafter = "--speculation.drafter", "runs/nowhere", "--drafter_training.kind", "eagle3"
    two = "--mesh.model", "2", "--topology", "h200:2"
    reports = planned("-c", CHUNKS, *SIZES, *two, *drafter)
    assert set(reports) == set(MOST)
    for name, text in reports.items():
        assert number(r"and (\d+) loops in it", text) == 0, text
        assert_no_cache_is_copied(text)
        crossed = set(re.findall(r"collectives  (\S+ over .*): \d", text))
        allowed = {"all-reduce"} | ({"all-gather", "reduce-scatter"} if name == TREE else set())
        assert crossed and crossed <= {f"{one} over model" for one in allowed}, text


@pytest.mark.gpu
def test_filters_are_three_kernels_of_the_end_of_a_round():
    pytest.importorskip("jax_triton", reason="Triton, jax-triton: Python 3.12 and the gpu extra")
    one = "--mesh.model", "1", "--topology", "h200:1", "--speculation.drafter", "ngram"
    filters = "--rollout.top_k", "20", "--rollout.top_p", "0.95"
    for name, text in planned("-c", CHUNKS, *SIZES, *one, *filters).items():
        assert "the chunk is one CUDA graph, with the loop in it" in text, text
        found = number(r"(\d+) for noise, filter and choice", text)
        assert 3 < found <= MOST_FILTERED[name], text


@pytest.mark.gpu
def test_a_filter_adds_no_loop_that_the_host_drives():
    filtered = "--rollout.top_p", "0.9", "--speculation.drafter", "none"
    reports = planned("-c", CHUNKS, *SIZES, *filtered, "--mesh.model", "2", "--topology", "h200:2")
    assert number(r"and (\d+) loops in it", reports[PLAIN]) == 0, reports[PLAIN]


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "overrides", "topology"),
    [
        ("gsm8k_qwen2.5_0.5b", (), "h200:1"),
        ("gsm8k_qwen2.5_0.5b", (), "h100:1"),
        ("gsm8k_qwen3_1.7b_parity", (), "h200:1"),
        ("math_qwen2.5_7b_pod", ("--mesh.data", "2", "--mesh.model", "4"), "h200:8"),
        ("math_qwen2.5_7b_h100x8", (), "h100:8"),
        ("math_qwen3_8b_h100x8", (), "h100:8"),
    ],
)
def test_the_shipped_configurations_compile_and_fit_on_gpus(name, overrides, topology):
    config = "--config", f"configs/{name}.yaml", "--topology", topology
    reports = planned("-m", "tlt_jax.plan", *config, *overrides)
    chunks = [text for program, text in reports.items() if program.startswith("rollout chunk")]
    assert chunks and {"prefill", "admission", "policy gradients", "policy update"} <= set(reports)
    for text in chunks:
        assert "over data" not in text, text
        assert_no_cache_is_copied(text)
        is_one_graph = "the chunk is one CUDA graph" in text
        assert is_one_graph or number(r"and (\d+) loops in it", text) == 0, text
