"""The checkpoints of a run; only this folder uses orbax."""

from tlt_jax.checkpoint.store import FOLDER, Restored, Store

__all__ = ["FOLDER", "Restored", "Store"]
