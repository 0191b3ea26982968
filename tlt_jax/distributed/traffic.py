"""How fast a compiled program can be at most: the bytes that it moves, over the published bandwidth of its devices."""

from __future__ import annotations

import jax

from tlt_jax.distributed.topology import GPUS

# Published bytes a second of a device, by its kind.
TPUS = {
    "TPU v4": 1.2e12, "TPU v5 lite": 0.82e12, "TPU v5e": 0.82e12, "TPU v5": 2.77e12, "TPU v5p": 2.77e12,
    "TPU v6 lite": 1.64e12, "TPU v6e": 1.64e12,
}  # fmt: skip
BANDWIDTHS = TPUS | {gpu.name: float(gpu.bandwidth) for gpu in GPUS.values()}


def moved(compiled: jax.stages.Compiled) -> float:
    """Bytes that one device reads and writes in a pass through the program, by XLA's count; each loop counts as one pass."""
    found = compiled.cost_analysis()
    if found is None:  # of a program for devices that are not here
        from jax._src.lib import _jax  # no public access to the count of an HLO module

        module = compiled.runtime_executable().hlo_modules()[0]
        found = _jax.hlo_module_cost_analysis(jax.devices("cpu")[0].client, module)
    return found["bytes accessed"]


def has_counted_loop(hlo: str) -> bool:
    """Whether a program has a loop of more than one pass whose number XLA knows, so that `moved` is too low."""
    return '"known_trip_count":{"n":"' in hlo.replace('"known_trip_count":{"n":"1"', "")
