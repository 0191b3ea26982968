"""Array shapes in signatures, checked while JAX traces, at no cost afterwards; knows no model."""

from __future__ import annotations

from beartype import beartype
from jaxtyping import jaxtyped

shaped = jaxtyped(typechecker=beartype)
