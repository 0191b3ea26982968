"""The configuration of a run: `schema` and `task` have the knobs, `load` reads files and command lines. Imports no JAX."""

from tlt_jax.config.schema import Config

__all__ = ["Config"]
