"""Output of a run: trackers, console progress, completions, the list of metric names. Imports no JAX."""

from tlt_jax.metrics.evaluations import Record
from tlt_jax.metrics.names import NAMES, MetricError
from tlt_jax.metrics.timeline import ChunkRecord, GroupSeconds, group_seconds, idle_share
from tlt_jax.metrics.weights_and_biases import check_trackers
from tlt_jax.metrics.writer import NoWriter, Writer

__all__ = [
    "NAMES", "ChunkRecord", "GroupSeconds", "MetricError", "NoWriter", "Record", "Writer", "check_trackers",
    "group_seconds", "idle_share",
]  # fmt: skip
