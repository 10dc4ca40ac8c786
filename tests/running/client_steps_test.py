"""Steps that a device does for all its clients, those that wait included."""
import numpy as np
import pytest

from fedjax_ssl import data
from fedjax_ssl import task as task_lib
from fedjax_ssl.running import client_steps

STEPS = (7, 1, 3, 0, 3, 2, 5)


def _task(**changes):
  return task_lib.make_task(task_lib.TaskSpec(
      2, (2,), model='linear', weak='none', strong='none', labeled_batch=10,
      unlabeled_batch=10, **changes))


def _deal(steps=STEPS):
  """Clients with rows for so many steps, the last of which is not full."""
  owner = np.repeat(np.arange(len(steps)), [max(10 * n - 3, 0) for n in steps])
  nobody = np.full_like(owner, -1)
  return data.Partition(owner, nobody, np.zeros(owner.size, bool))


@pytest.mark.parametrize('way, size, wanted', [
    ('map', 1, 21),
    # The longest first: (7, 5), (3, 3), (2, 1) and an empty one.
    ('vmap', 2, 2 * (7 + 3 + 2 + 0)), ('vmap', 7, 7 * 7),
    # 7 and 2 in the one, 5, 3 and 3 in the other, which gets 1 before 2.
    ('lanes', 2, 2 * 11), ('lanes', 5, 5 * 7)])
def test_everyone_is_drawn(way, size, wanted):
  found = client_steps.drawn(_task(), [_deal()], len(STEPS), len(STEPS))
  assert found(way, size) == wanted


@pytest.mark.parametrize('changes', [{'local_steps': 4}, {'local_epochs': 2}])
def test_clients_that_are_alike_wait_for_nobody(changes):
  found = client_steps.drawn(_task(**changes), [_deal((2,) * 9)], 9, 6)
  alike = client_steps.equal(6)
  for way, size in (('map', 1), ('vmap', 2), ('lanes', 3), ('vmap', 6),
                    ('vmap', 4)):
    assert found(way, size) == 4 * alike(way, size)


def test_lanes_wait_less_than_chunks_and_longer_than_nobody():
  """Of 100 clients by Dirichlet 0.1, who are drawn from two partitions."""
  labels = np.repeat(np.arange(10, dtype=np.int32), 500)
  deals = []
  for seed in range(2):
    owner = data.dirichlet_capped(
        np.random.default_rng(seed), labels, 100, alpha=.1, min_size=0)
    deals.append(data.Partition(owner, np.full_like(owner, -1),
                                np.zeros(labels.size, bool)))
  found = client_steps.drawn(_task(), deals, 100, 20)
  alone, whole = found('map', 1), found('vmap', 20)
  for size in (2, 5, 10):
    assert alone < found('lanes', size) < found('vmap', size) < whole
  assert found('lanes', 5) < .9 * found('vmap', 5)


def test_every_partition_counts_the_same():
  deals = [_deal((2,) * 9), _deal((5,) * 9)]
  assert client_steps.drawn(_task(), deals, 9, 6)('map', 1) == 6 * (2 + 5) / 2
