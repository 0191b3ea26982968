"""Prints docs/metrics.md."""

from tlt_jax.metrics.names import page

print(page(), end="")
