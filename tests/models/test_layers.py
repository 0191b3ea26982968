"""Laws of the layers' arithmetic."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

from tlt_jax.models import layers


def test_products_over_tokens_have_the_gradients_that_jax_derives(x64):
    random = np.random.default_rng(0)
    x, weight = jnp.asarray(random.normal(size=(2, 5, 3))), jnp.asarray(random.normal(size=(4, 3)))
    slope = random.normal(size=(2, 5, 4))

    def gradient(product):
        return jax.grad(lambda given: jnp.sum(product(*given) * slope))((x, weight))

    derived = gradient(lambda x, weight: jnp.einsum("...i,oi->...o", x, weight))
    for one, other in zip(derived, gradient(layers.linear), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-11, atol=1e-12)
