"""Laws of arithmetic over pytrees."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.core import tree


@pytest.mark.parametrize('size', [0.0, 1e-30, 1e18, 8e37, 1e38, 3e38, np.inf])
def test_a_norm_is_right_however_large(size):
  one = {'w': jnp.array([size, 0.0]), 'b': jnp.zeros(3)}
  several = jax.tree.map(lambda x: jnp.stack([x, x]), one)
  for got in (tree.global_norm(one), jax.jit(tree.global_norm)(one),
              jax.jit(jax.vmap(tree.global_norm))(several)):
    np.testing.assert_allclose(got, size, rtol=1e-6)
