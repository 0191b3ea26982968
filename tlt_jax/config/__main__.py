"""Prints docs/knobs.md."""

from tlt_jax.config.page import page

print(page(), end="")
