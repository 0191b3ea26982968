"""What a run shows: TensorBoard, console progress, completions and the closed list of names; imports no JAX."""

from tlt_jax.metrics.names import NAMES, MetricError
from tlt_jax.metrics.timeline import idle_share
from tlt_jax.metrics.writer import ChunkRecord, Record, Writer

__all__ = ["NAMES", "ChunkRecord", "MetricError", "Record", "Writer", "idle_share"]
