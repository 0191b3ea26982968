"""Compiling a configuration's programs ahead of time, and what they need: `python -m tlt_jax.plan`."""
