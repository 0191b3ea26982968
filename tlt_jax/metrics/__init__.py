"""Output of a run: TensorBoard, console progress, completions, the list of metric names. No JAX."""

from tlt_jax.metrics.names import NAMES, MetricError
from tlt_jax.metrics.timeline import GroupSeconds, group_seconds, idle_share
from tlt_jax.metrics.writer import ChunkRecord, NoWriter, Record, Writer

__all__ = [
    "NAMES", "ChunkRecord", "GroupSeconds", "MetricError", "NoWriter", "Record", "Writer", "group_seconds", "idle_share",
]  # fmt: skip
