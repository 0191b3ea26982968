"""Knows the sections of accelerator.py: each yields rows as it measures them."""

from __future__ import annotations

import itertools
import os
import shlex
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.common import processes
from benchmarks.common.processes import TIMEOUT
from benchmarks.common.results import ResultTable
from benchmarks.device import setup, tune
from benchmarks.device.setup import SAMPLED, SHAPES, Device, Row, TimeIsOver
from benchmarks.whole_runs import runs
from tlt_jax.config import Config
from tlt_jax.config.schema import Rollout, Train
from tlt_jax.config.task import Data
from tlt_jax.data import packing
from tlt_jax.data.packing import Example
from tlt_jax.distributed import mesh as meshes, process
from tlt_jax.kernels import tree_attention
from tlt_jax.kernels.fused import Fused
from tlt_jax.models import architecture
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.rollout import bindings
from tlt_jax.spec_decode import sampling
from tlt_jax.spec_decode.interface import Sampling
from tlt_jax.spec_decode.strategy import parse
from tlt_jax.train import batch as batches, memory, policy_update
from tlt_jax.train.policy_update import Recipe

COLUMNS = ("section", "case", "ms", "rate", "unit", "share", "of", "aim")
SAMPLINGS = {"greedy": Sampling(0.0), "temperature 1": SAMPLED, "top-p 0.95": Sampling(top_p=0.95)}
FILTERS = {
    "top-p 0.95": Sampling(top_p=0.95),
    "top-k 20 and top-p 0.95": Sampling(top_k=20, top_p=0.95),
}
SPREADS = 1.0, 5.0  # standard deviations of logits: top-p keeps most tokens, or few
ATTENTION = tuple((batch, nodes) for batch in (1, 8, 32) for nodes in (1, 8, 48)) + ((128, 1),)
TINY_ATTENTION = (1, 1), (4, 8)
JOB, JOB_NEEDS = Path(__file__).with_name("smollm2.yaml"), ("MODEL_DIR", "GSM8K_DIR")
JOB_DRAFTERS = "none", "ngram", "adaptive"
JOB_TINY = shlex.split(
    "--rollout.prompts 2 --rollout.samples 2 --rollout.max_new_tokens 8 --train.steps 2 --train.rows 1"
    " --train.row_tokens 512"
)
GOAL = 2.6  # times plain decoding, of one sequence


def copies(device: Device) -> Iterator[Row]:
    """Rates of a copy, of reading and of a product, as shares of the published ones."""
    (copied, rate), (product, flop) = setup.copy_rate(device), setup.product_rate(device)
    bandwidth, peak = device.published or (rate, flop)
    of = "published" if device.published else "the copy, nothing is published"
    size, amount = device.shape.square, f"{device.shape.copied >> 20} MiB"
    yield f"copy of {amount}", 1e3 * copied, rate / 1e12, "TB/s", rate / bandwidth, of, ""
    spent, read = setup.read_rate(device)
    yield f"reading {amount}", 1e3 * spent, read / 1e12, "TB/s", read / bandwidth, of, ""
    case = f"product of {size} x {size}"
    yield case, 1e3 * product, flop / 1e12, "TFLOP/s", flop / peak, of, ""


def decode(device: Device) -> Iterator[Row]:
    """Plain decoding: its time as a share of the time that reading weights and cache once takes."""
    (engine, weights), (_, rate) = setup.engine_of(device, drafts=False), setup.copy_rate(device)
    model, aims = engine.model_config, {1: "0.80", 128: "0.70"}
    target = weights.target
    read = sum(leaf.nbytes for leaf in jax.tree.leaves(target)) - target.embed.nbytes
    kv = 2 * model.num_layers * model.num_kv_heads * model.head_dim  # numbers of a cache slot
    filled = device.shape.slots // 2
    for batch in device.shape.batches:
        device.check()
        spent = setup.round_seconds(engine, weights, device, batch)
        bound = (read + kv * target.embed.itemsize * batch * filled) / rate
        case, aim = f"B {batch}, {filled} of {device.shape.slots} slots", aims.get(batch, "")
        yield case, 1e3 * spent, batch / spent, "tokens/s", bound / spent, "bytes", aim


def small(device: Device) -> Iterator[Row]:
    """Plain decoding and trees of SmolLM2-135M's shape, whose rounds are bound by the number of kernels."""
    if device.shape is not SHAPES["tiny"]:
        device = replace(device, shape=SHAPES["smollm2"])
    yield from decode(device)
    yield from trees(device)


def trees(device: Device) -> Iterator[Row]:
    """Rounds of trees relative to plain ones, of one sequence and of several."""
    engine, weights = setup.engine_of(device, drafts=True)
    for batch in device.shape.batches[:3:2]:
        device.check()
        plain = setup.round_seconds(engine, weights, device, batch)
        yield f"plain, B {batch}", 1e3 * plain, batch / plain, "tokens/s", 1.0, "plain", ""
        for text in device.shape.trees:
            device.check()
            strategy, case = parse(text), f"{text}, B {batch}"
            spent = setup.round_seconds(engine, weights, device, batch, strategy)
            aim = "1.75" if text == "8_4_48" and batch == 1 else ""
            yield case, 1e3 * spent, batch / spent, "rounds/s", spent / plain, "plain", aim
            needed = GOAL * spent / plain
            named = f"{case}, {GOAL} times plain"
            yield named, 1e3 * spent, needed, "tokens/round", needed / strategy.path, "path", ""


def noise(device: Device) -> Iterator[Row]:
    """Share of sampling in a plain round of many rows."""
    engine, weights = setup.engine_of(device, drafts=False)
    batch, greedy = device.shape.batches[-2], 0.0
    for case, rule in SAMPLINGS.items():
        device.check()
        spent = setup.round_seconds(engine, weights, device, batch, sampling=rule)
        greedy = greedy or spent
        share = 1 - greedy / spent
        named, rate = f"{case}, B {batch}", batch / spent
        yield named, 1e3 * spent, rate, "tokens/s", share, "beyond greedy", ""
    yield from filters(device)


def filters(device: Device) -> Iterator[Row]:
    """Top-k and top-p alone: by XLA, and as the engine computes them on this device; the bound reads the logits once."""
    batch, vocab, (_, rate) = (
        device.shape.batches[-2],
        device.model().vocab_size,
        setup.copy_rate(device),
    )
    ways = {
        "XLA": partial(sampling.filter, unrolls=True),
        "engine": partial(bindings.filtered, fused=Fused.of(device.mesh)),
    }
    normal = jax.random.normal(jax.random.key(0), (batch, vocab))
    for spread in SPREADS:
        logits = spread * normal
        for (case, rule), (way, function) in itertools.product(FILTERS.items(), ways.items()):
            device.check()
            spent = setup.seconds_each(partial(least_kept, function, rule), logits, times=16)
            named, share = (
                f"{way}, {case}, deviation {spread}, B {batch}",
                logits.nbytes / rate / spent,
            )
            yield named, 1e3 * spent, batch / spent, "rows/s", share, "copy", ""


def least_kept(
    function: Callable[[jax.Array, Sampling], jax.Array], rule: Sampling, logits: jax.Array
) -> jax.Array:
    """The logits, the first of a row replaced by a tiny part of the least that the filter keeps of it."""
    kept = function(logits, rule)
    least = jnp.min(kept, axis=1, where=kept > -jnp.inf, initial=jnp.inf)
    return logits.at[:, 0].set(1e-30 * least)


def attention(device: Device) -> Iterator[Row]:
    """Attention of tree nodes alone: by XLA, and as the engine computes it on this device."""
    model, slots, (_, rate) = device.model(), device.shape.slots, setup.copy_rate(device)
    heads, width = model.num_kv_heads, model.head_dim
    for batch, nodes in ATTENTION if len(device.shape.batches) > 2 else TINY_ATTENTION:
        device.check()
        given = setup.attention_operands(device, batch, nodes, width)
        read = batch * heads * width * slots * given[0].dtype.itemsize  # keys and values, half full
        for way, fused in (("XLA", None), ("engine", Fused.of(device.mesh))):
            spent = attention_seconds(given, fused)
            aim = "0.70" if way == "engine" and batch >= 8 else ""
            case, share = f"{way}, B {batch} N {nodes}", read / rate / spent
            yield case, 1e3 * spent, read / spent / 1e12, "TB/s", share, "copy", aim


def attention_seconds(given: tuple[jax.Array, ...], fused: Fused | None) -> float:
    """Seconds of one of several attentions, each of the queries that the one before returned."""
    return setup.seconds_each(
        lambda q, *rest: tree_attention.attend(q, *rest, False, fused)[0], *given, times=16
    )


def update(device: Device) -> Iterator[Row]:
    """An accumulation step of the policy update, as a share of the FLOP/s that the device reaches."""
    layers = min(device.update_layers, device.shape.init["num_hidden_layers"])
    peak = device.published[1] if device.published else setup.product_rate(device)[1]
    of = "published FLOP/s" if device.published else "FLOP/s of a product"
    for rows, tokens in device.shape.updates:
        device.check()
        spent, flop = update_seconds(device, device.model(layers), rows, tokens)
        case, rate = f"{rows} x {tokens}, {layers} layers", rows * tokens / spent
        aim = {4096: "0.40", 16384: "0.38"}.get(tokens, "")
        yield case, 1e3 * spent, rate, "tokens/s", flop / spent / peak, of, aim


def update_seconds(
    device: Device, model: ModelConfig, rows: int, tokens: int
) -> tuple[float, float]:
    """Seconds of an accumulation step with one example a row, and its FLOP."""
    prompt = tokens // 4
    config = Config(
        model=replace(Config().model, compute_dtype=device.dtype),
        train=Train(steps=100, rows=rows, row_tokens=tokens),
        data=Data(max_prompt_tokens=prompt),
        rollout=Rollout(max_new_tokens=tokens - prompt),
    )
    recipe = Recipe.of(config, model, device.mesh, 100)
    recipe = memory.within(config, recipe, None, memory.device_memory(device.mesh))
    random = np.random.default_rng(0).integers(0, model.vocab_size, (rows, tokens))
    made = [Example(uid, row[:prompt], row[prompt:]) for uid, row in enumerate(random)]
    packed = packing.pack(made, tokens, rows)
    recorded = [np.full(length, -1.0) for length in packed[1].lengths]
    given = np.ones(rows), np.ones(rows), recorded
    (batch,) = batches.make_batch(packed, recipe, *given)
    params = architecture.init(model, device.mesh, jax.random.key(0), recipe.param_dtype)
    programs = policy_update.programs(recipe)
    sums = programs.empty(params, batch)

    def call() -> jax.Array:
        nonlocal sums
        sums, value = programs.accumulate(sums, params, batch)
        return value

    layers = sum(leaf.size for leaf in jax.tree.leaves(params.layers))
    # Two products over half of the pairs.
    causal = model.num_layers * model.num_heads * model.head_dim * tokens
    # The product with the vocabulary at answer tokens alone.
    products = tokens * (layers + causal) + (tokens - prompt) * params.embed.size
    return setup.seconds(call), 6 * rows * products


def graphs(device: Device) -> Iterator[Row]:
    """A plain round of one sequence with the XLA flags of this process."""
    if device.mesh.devices.flat[0].platform != "gpu":
        return
    engine, weights = setup.engine_of(device, drafts=False)
    spent = setup.round_seconds(engine, weights, device, 1)
    yield "plain, B 1", 1e3 * spent, 1 / spent, "tokens/s", 1.0, "", ""


def job(device: Device) -> Iterator[Row]:
    """A few RL steps of the main job on the model in MODEL_DIR and GSM8K_DIR's problems: with a drafter relative to without."""
    if missing := [name for name in JOB_NEEDS if not os.environ.get(name)]:
        print(f"\njob: not run, {' and '.join(missing)} not given")
        return
    plain = 0.0
    with TemporaryDirectory() as folder:
        for drafter in JOB_DRAFTERS:
            device.check()
            run = Path(folder, drafter)
            given = ["--run", str(run), "--speculation.drafter", drafter]
            given += [
                "--model.path",
                os.environ["MODEL_DIR"],
                "--model.compute_dtype",
                device.dtype,
            ]
            if device.shape is SHAPES["tiny"]:
                given += JOB_TINY
            command = processes.module("tlt_jax.train", "--config", str(JOB), *given)
            done = processes.run(command, max(device.until - time.time(), 1.0))
            if done.returncode == TIMEOUT:
                raise TimeIsOver
            if done.returncode:
                raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stderr[-2000:]}")
            first, *later = runs.read_steps(run).values()
            spent = first["timing_s/step"]
            cold, unit = f"{drafter}, first step", "s of it compiling"
            yield cold, 1e3 * spent, first["perf/compile_s"], unit, 1.0, "", ""
            spent, tokens = (
                statistics.median(step[name] for step in later)
                for name in ("timing_s/step", "perf/tokens_per_second")
            )
            plain = plain or spent
            case = f"{drafter}, later steps"
            yield case, 1e3 * spent, tokens, "tokens/s", plain / spent, "plain", ""


SECTIONS = {
    "copies": copies, "decode": decode, "small": small, "trees": trees, "attention": attention, "update": update,
    "noise": noise, "graphs": graphs, "job": job,
    "tune": tune.tune,
}  # fmt: skip


def run(child: str, shape: str, until: float, update_layers: int, csv: Path | None) -> int:
    """Prints the rows of one section; exit code TIMEOUT when time is over before its end."""
    process.set_environment(Config())
    section, _, case = child.partition(": ")
    device = Device(SHAPES[shape], meshes.make_mesh(1, 1), until, update_layers)
    table = ResultTable(COLUMNS, csv)
    try:
        for row in SECTIONS[section](device):
            named = f"{row[0]}, {case}" if case else row[0]
            table.row(section, named, *row[1:])
    except TimeIsOver:
        return TIMEOUT
    return 0
