"""The configuration of a run: `schema` has every knob, `load` reads it from files and command lines. No JAX."""

from tlt_jax.config.schema import Config

__all__ = ["Config"]
