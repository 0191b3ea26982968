"""Seconds of programs on devices that are not here: bytes over bandwidth, FLOP over peak, kernels times a latency.

The three are added: kernels of a round run one after the other, and those that move bytes do not compute. Bandwidth and
peak are the shares of the published ones that an H200 reached in a copy and in a product. One factor, fitted on a measured
table, scales rounds, and one scales updates. Everything here is an estimate.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import jax
import numpy as np

from tlt_jax.distributed.topology import GPUS, TPUS
from tlt_jax.errors import ConfigError
from tlt_jax.models import architecture, drafter as drafters
from tlt_jax.models.architecture import ModelConfig
from tlt_jax.models.drafter import DrafterConfig
from tlt_jax.simulate.cost_table import ESTIMATE, MEASURED, CostRow, CostTable, normal
from tlt_jax.spec_decode.strategy import Strategy
from tlt_jax.tuner.cost_model import DENSE, Networks

BYTES = 2  # of a bfloat16 number
UNROLL = 5  # draft steps that are trained at every position
# Kernels of a round: of a layer of the policy and of the rest (noise, filter, choice, verification), of a draft level; and the
# seconds of one. The counts are those of 7B programs that `tlt_jax.plan --topology h200:1` compiles.
LAYER_KERNELS, ROUND_KERNELS, LEVEL_KERNELS, KERNEL_S = 19, 40, 30, 1.5e-6
# Shares of the published bandwidth and FLOP/s that an H200 reached on 2026-11-26: a copy on the device 4.3 of 4.8 TB/s, a
# product of 8192 x 8192 matrices 791 of 989 TFLOP/s (benchmarks/results/accelerator.csv has the product).
COPIED, MULTIPLIED = 4.3 / 4.8, 791 / 989
UPDATE_FLOPS = 6  # for a weight and token: forward 2, backward 4
ERROR = 0.15  # standard error of the log seconds of an estimated round, beside that of the factor
LITERATURE_LINK = 50e9  # bytes a second of a device to other hosts: 400 Gb/s, as in the paper's cluster (arXiv 2511.16665)


class Device(NamedTuple):
    """Published rates: bytes a second of memory, dense bfloat16 FLOP a second, bytes a second to devices of its group."""

    bandwidth: float
    flops: float
    link: float


# GPUs: NVIDIA's data sheets (NVLink, or PCIe of a GeForce, in one direction; of a GB200 the half that is one GPU; an H20 as
# resellers list it); TPUs: Google's pages of each version (links in one direction).
DEVICES = {
    "h100": Device(GPUS["h100"].bandwidth, 989e12, 450e9),
    "h200": Device(GPUS["h200"].bandwidth, 989e12, 450e9),
    "h20": Device(4.0e12, 148e12, 450e9),
    "a100": Device(2.0e12, 312e12, 300e9),
    "b200": Device(8.0e12, 2250e12, 900e9),
    "gb200": Device(8.0e12, 2500e12, 900e9),
    "rtx3090": Device(0.936e12, 71e12, 32e9),
    "rtx4090": Device(1.008e12, 165e12, 32e9),
    "rtx5090": Device(1.792e12, 209.5e12, 64e9),
    "v5e": Device(TPUS["TPU v5e"], 197e12, 100e9),
    "v5p": Device(TPUS["TPU v5p"], 459e12, 300e9),
    "v6e": Device(TPUS["TPU v6e"], 918e12, 200e9),
}


@dataclass(frozen=True)
class Sizes:
    """Numbers of a policy and its drafter: weights that a round and a draft level read, layers, numbers of a cached token.

    `windowed`: layers of which a token sees the last `window` tokens alone. `experts`: weights of all experts, beside `read`.
    """

    read: int
    layers: int
    cached: int
    level: int = 0
    width: int = 0
    networks: Networks = DENSE
    windowed: int = 0
    window: int = 0
    experts: int = 0

    @classmethod
    def parsed(cls, text: str) -> Sizes:
        """The sizes in the head of a table, such as `read 100 layers 2`: a dense policy, a pass of the drafter a level."""
        words = text.split()
        return cls(**dict(zip(words[::2], map(int, words[1::2]), strict=True)))

    @classmethod
    def of(cls, model: ModelConfig, drafter: DrafterConfig | None = None) -> Sizes:
        """Of a policy, whose embedding is not read whole, and of its learned drafter (None: none)."""
        whole = architecture.weights(model, 1)
        stacks = whole.layers if isinstance(whole.layers, tuple) else (whole.layers,)
        experts = sum(count((one.expert_gate, one.expert_up, one.expert_down)) for one in stacks)
        read = count(whole) - (0 if model.tied else count(whole.embed)) - count(whole.inputs_embed) - experts  # fmt: skip
        block = drafters.block_pass(drafter)
        networks = Networks(block, model.num_experts, model.experts_per_token)
        level = count(drafters.weights(drafter, 1)) if drafter else 0
        if drafter and drafter.reads_policy_head:
            level += drafter.draft_vocab_size * model.hidden_size
        level //= block[0] if block else 1
        cached = 2 * sum(
            model.kinds[layer].num_kv_heads * model.kinds[layer].head_dim
            for layer in model.cached_layers
        )
        attended = 2 * sum(kind.num_heads * kind.head_dim for kind in model.kinds)
        windows = [window for window in model.windows if window]
        return cls(
            read, model.num_layers, cached, level, attended, networks, len(windows), max(windows, default=0), experts,
        )  # fmt: skip

    def reads(self, tokens: int) -> float:
        """Weights of the policy that so many tokens read, where each token chooses its experts by itself."""
        return self.read + (self.experts * self.networks.touched(tokens) if self.experts else 0)

    def seen(self, held: float) -> float:
        """Of `held` tokens those that a token sees, on average over the layers."""
        less = max(held - self.window, 0) * self.windowed / self.layers
        return held - less


def count(weights: object) -> int:
    """Numbers of a tree of weights."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights) if hasattr(leaf, "shape"))


@dataclass(frozen=True)
class Estimate:
    """Seconds of programs on `devices` of one kind that decode together, before any factor."""

    sizes: Sizes
    device: Device
    devices: int = 1

    def round_seconds(self, batch: int, strategy: Strategy, held: float) -> float:
        """A round of `batch` rows that hold `held` tokens on average."""
        sizes, device = self.sizes, self.device
        held = sizes.seen(held)
        levels, nodes = strategy.drafted_levels, strategy.topk
        if levels and sizes.networks.one_pass:
            levels, nodes = sizes.networks.one_pass
        rows, drafted = batch * strategy.nodes, batch * levels * nodes
        moved = BYTES * (sizes.reads(rows) + batch * held * sizes.cached + levels * sizes.level)
        flops = 2 * (rows * (sizes.reads(1) + held * sizes.width) + drafted * sizes.level)
        busy = moved / (COPIED * device.bandwidth) + flops / (MULTIPLIED * device.flops)
        kernels = LAYER_KERNELS * sizes.layers + ROUND_KERNELS + LEVEL_KERNELS * levels
        return busy / self.devices + kernels * KERNEL_S + self.exchange(rows, drafted, levels)

    def exchange(self, rows: int, drafted: int, levels: int) -> float:
        """The sums over the devices of a group: two a layer of the policy, and of the drafter a level.

        Of the activations of `rows` nodes in each layer, and of all `drafted` ones in `levels` levels.
        """
        if self.devices == 1:
            return 0.0
        layers = self.sizes.layers
        width = self.sizes.width / (2 * layers)  # query heads x head width: about the model's width
        moved = 2 * (layers * rows + drafted) * width * BYTES * 2 * (1 - 1 / self.devices)
        return moved / self.device.link + 2 * (layers + levels) * 2 * KERNEL_S

    def update_seconds(self, tokens: float, weights: float) -> float:
        """A forward and backward pass through `weights` weights, of a data group's `tokens` tokens."""
        return UPDATE_FLOPS * weights * tokens / (self.device.flops * self.devices)


@dataclass(frozen=True, eq=False)
class EstimatedTable(CostTable):
    """A table without measured rounds: those of an Estimate, times `factor`, with the standard error of its log."""

    estimate: Estimate | None = None
    factor: float = 1.0
    spread: float = 0.0

    @property
    def reads_held(self) -> bool:
        return True

    def shape(self, batch: int, strategy: Strategy) -> tuple[float, float, float]:
        """As CostTable.shape; the seconds of a token that a row holds are those near 4,096 tokens."""
        fixed, filled = (
            self.factor * self.estimate.round_seconds(batch, strategy, held)
            for held in (0.0, 4096.0)
        )
        return fixed, (filled - fixed) / 4096, math.hypot(ERROR, self.spread)


def factor(measured: CostTable, estimate: Estimate) -> tuple[float, float]:
    """The median of measured over estimated seconds of the measured rounds, and the standard deviation of its log."""
    found = [
        row.seconds / estimate.round_seconds(row.rows, normal(row.strategy, row.drafter), row.read)
        for row in measured.of("round")
        if row.source == MEASURED
    ]
    return float(np.median(found)), float(np.std(np.log(found)))


def estimated_rows(estimate: Estimate, efficiency: float) -> list[CostRow]:
    """Rows of what is no round: updates at `efficiency` of the peak, micro-steps, publishing."""
    sizes, tokens = estimate.sizes, 16384
    drafter = sizes.level * (sizes.networks.one_pass or (UNROLL,))[0]

    def row(program: str, weights: float, note: str) -> CostRow:
        seconds = estimate.update_seconds(tokens, weights) / efficiency
        return CostRow(program, seconds, ESTIMATE, tokens=tokens, note=note)

    share = f"FLOP at {efficiency:.2f} of the peak"
    rows = [row("update", sizes.reads(1), share)]
    if sizes.level:
        features = sizes.reads(1) // 3  # a forward pass of the policy
        rows.append(
            row("drafter_update", drafter + features, f"{share}; with the policy's forward pass")
        )
        rows.append(row("micro_step", drafter, f"{share}; a data group's, on kept features"))
    # The policy's weights come from the other hosts to each data group.
    published = BYTES * (sizes.read + sizes.experts) / (LITERATURE_LINK * estimate.devices)
    return [*rows, CostRow("publish", published, ESTIMATE, note="bytes over 400 Gb/s a device")]


def table(
    kind: str,
    devices: int,
    model: ModelConfig,
    drafter: DrafterConfig | None,
    measured: CostTable,
) -> EstimatedTable:
    """The estimated table of a policy on `devices` of this kind a data group; its factor is fitted on `measured`.

    Updates reach the share of the peak that the measured ones reached. Raises ConfigError for an unknown kind of device.
    """
    if kind not in DEVICES:
        raise ConfigError(
            f"--costs {kind}: no such file, table or device: devices are {', '.join(DEVICES)}"
        )
    sizes, device = Sizes.parsed(measured.facts["sizes"]), measured.facts["device"]
    there = Estimate(sizes, DEVICES[device], int(measured.facts["devices"]))
    scale, spread = factor(measured, there)
    estimate = Estimate(Sizes.of(model, drafter), DEVICES[kind], devices)
    shares = [
        there.update_seconds(row.tokens, sizes.read) / row.seconds for row in measured.of("update")
    ]
    rest = [
        row._replace(source=ESTIMATE)
        for row in measured.rows
        if row.program in ("compile", "reward", "begin", "host", "other", "save")
    ]
    facts = {"device": kind, "devices": str(devices), "factor": f"{scale:.3f} of {device}'s rounds"}
    return EstimatedTable(
        (*estimated_rows(estimate, float(np.median(shares))), *rest), facts, measured.node, estimate.sizes.networks,
        estimate=estimate, factor=scale, spread=spread,
    )  # fmt: skip
