"""Drawing few clients of many: the first places of a shuffle never made."""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.core import sampling

KEY = jax.random.key(4)


@jax.jit
def _many(keys):
  return jax.vmap(lambda key: sampling._draw(key, 5, 101, 3))(keys)


def test_few_of_many_is_the_shuffle_that_the_draws_make():
  total, size = 50, 12
  got = jax.jit(sampling._few_of_many, static_argnums=(1, 2))(KEY, total, size)
  places = jax.random.randint(KEY, (size,), jnp.arange(size), total)
  ids = list(range(total))
  for i, place in enumerate(np.asarray(places)):
    ids[i], ids[place] = ids[place], ids[i]
  assert got.tolist() == ids[:size]
  assert len({*got.tolist()}) == size


def test_every_order_of_few_of_many_is_equally_likely():
  drawn = np.asarray(_many(jax.random.split(KEY, 60_000)))
  assert drawn.min() == 5 and drawn.max() == 100
  assert all(len({*row}) == 3 for row in drawn[:500].tolist())
  for place in range(3):  # 95 degrees of freedom; 1 in 10,000 is above 155.
    counts = np.bincount(drawn[:, place] - 5, minlength=96)
    assert ((counts - 625) ** 2 / 625).sum() < 155
  assert (drawn[:, 0] < drawn[:, 2]).mean() == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize('size', [1, 3, 4, 96])
def test_a_cohort_is_of_different_clients(size):
  ids = np.asarray(sampling._draw(KEY, 5, 101, size))
  assert len({*ids.tolist()}) == size and ids.min() >= 5 and ids.max() <= 100
