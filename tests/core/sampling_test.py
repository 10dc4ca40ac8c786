"""Drawing few clients of many: the first places of a shuffle never made."""
from __future__ import annotations

from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl.core import sampling
from fedjax_ssl.core.types import Cohort, State
from tests import toy

KEY = jax.random.key(4)
NOTHING = State((), (), jnp.int32(0))


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


@pytest.mark.parametrize('groups, size', [(1, 6), (2, 5), (4, 6)])
def test_a_split_has_each_client_once_in_groups_alike(groups, size):
  federation, _ = toy.federation()
  sample = jax.jit(lambda key: sampling.split(groups, size)(
      NOTHING, federation, key))
  seen = set()
  for i in range(8):
    ids, active = (np.asarray(x) for x in sample(toy.key(i)))
    assert ids.shape == (groups, -(-size // groups))
    assert len({*ids[active].tolist()}) == size == active.sum()
    assert (ids[~active] == toy.NUM_CLIENTS).all()
    sizes = active.sum(1)
    assert sizes.max() - sizes.min() <= 1
    seen.add(tuple(map(frozenset, ids.tolist())))
  assert len(seen) > 4 or groups == 1 and size == toy.NUM_CLIENTS


def test_who_is_in_a_group_is_not_by_place_or_activity():
  federation, _ = toy.federation()

  def groups(ids, active):
    def told(number, size):
      assert (number, size) == (1, 5)
      return lambda *unused: Cohort(jnp.array([ids]), jnp.array([active]))
    with mock.patch.object(sampling, 'groups', told):
      found = sampling.split(2, 5)(NOTHING, federation, toy.key(1))
    return [{i for i, a in zip(*row, strict=True) if a}
            for row in zip(*(x.tolist() for x in found), strict=True)]

  everyone = groups([0, 1, 2, 3, 5], [True] * 5)
  assert groups([5, 3, 0, 2, 1], [True] * 5) == everyone
  without = groups([5, 3, 0, 2, 1], [True, False, True, True, True])
  assert without == [group - {3} for group in everyone]


def test_more_groups_than_clients_are_refused():
  with pytest.raises(ValueError, match='5 groups .* 4 clients'):
    sampling.split(5, 4)
