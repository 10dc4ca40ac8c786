"""The setting of labeled beside unlabeled clients: who is dealt what."""
from __future__ import annotations

import numpy as np
import pytest

from fedjax_ssl import config, data
from fedjax_ssl.running import dealing


def deal(**options):
  """(labels, pool, owners of labeled rows, owners of the others)."""
  labels = np.arange(3000) % 10
  pool = np.arange(3000) % 7 > 0
  return labels, pool, *dealing.whole_clients(
      np.random.default_rng(4), labels, pool,
      config.Config(num_clients=10, alpha=0.5, **options))


@pytest.mark.parametrize('count', [1, 2, 4, 6, 10])
def test_the_first_clients_know_all_and_the_others_nothing(count):
  _, pool, labeled, unlabeled = deal(num_labeled_clients=count)
  assert set(labeled[labeled >= 0]) == {*range(count)}
  assert set(unlabeled[unlabeled >= 0]) == {*range(count, 10)}
  np.testing.assert_array_equal((labeled >= 0) ^ (unlabeled >= 0), pool)


def test_who_has_which_rows_does_not_depend_on_who_has_labels():
  first, second = (np.maximum(*deal(num_labeled_clients=n)[2:])
                   for n in (1, 6))
  np.testing.assert_array_equal(first, second)


def test_all_clients_may_know_a_share_of_their_rows():
  _, pool, labeled, unlabeled = deal(labeled_fraction=0.2)
  np.testing.assert_array_equal((labeled >= 0) ^ (unlabeled >= 0), pool)
  for client in range(10):
    known, other = (int((x == client).sum()) for x in (labeled, unlabeled))
    assert known == round(0.2 * (known + other)) > 0


@pytest.mark.parametrize('args, message', [
    ({'num_labeled_clients': -1}, 'labeled_fraction'),
    ({'num_labeled_clients': 0}, 'num_labeled_clients=0'),
    ({'num_labeled_clients': 2, 'labels_per_class': 4}, 'labels_per_class=4'),
    ({'num_labeled_clients': 2, 'labeled_fraction': 0.5},
     'labeled_fraction=0.5'),
    ({'num_labeled_clients': -1, 'labeled_fraction': 0.5,
      'labels_per_class': 4}, 'labels_per_class=4'),
    ({'num_labeled_clients': 1, 'labels_at': 'server'}, 'labels_at')])
def test_what_is_missing_is_named(args, message):
  with pytest.raises(ValueError, match=message):
    deal(**args)


def test_the_labeled_clients_are_a_fact_of_the_federation():
  labels, pool, labeled, unlabeled = deal(num_labeled_clients=2)
  images = np.zeros((labels.size, 2, 2, 1), np.uint8)
  examples = data.federation.Examples(images, labels.astype(np.int32))
  made = data.federate(
      examples, None, examples, data.Partition(labeled, unlabeled, ~pool),
      num_clients=10, num_labeled_clients=2)
  np.testing.assert_array_equal(made.clients.num_labeled > 0,
                                np.arange(10) < 2)
