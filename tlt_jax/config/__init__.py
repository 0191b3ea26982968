"""The configuration of a run: `schema` has the knobs, `load` reads files and command lines. Imports no JAX."""

from tlt_jax.config.schema import Config

__all__ = ["Config"]
