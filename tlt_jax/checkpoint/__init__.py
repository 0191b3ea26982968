"""The checkpoints of a run; only this folder uses orbax."""
