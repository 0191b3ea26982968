"""Environments that answer the turns of a policy, in worker processes, and the tools that a policy calls. No JAX.

What users may bring says `protocol`; `pool` runs thousands of them beside the caller.
"""

from tlt_jax.environments.pool import Environments
from tlt_jax.environments.protocol import Call, Reply

__all__ = ["Call", "Environments", "Reply"]
