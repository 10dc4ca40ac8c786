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


@pytest.mark.parametrize('first, partly', [(2, 5), (1, 2), (0, 4), (3, 7)])
def test_a_mix_of_all_three_kinds(first, partly):
  """Counts of each kind, and no row lost or twice."""
  _, pool, labeled, unlabeled = deal(
      num_labeled_clients=first, num_partly_labeled_clients=partly,
      labeled_fraction=0.2)
  np.testing.assert_array_equal((labeled >= 0) ^ (unlabeled >= 0), pool)
  for client in range(10):
    known, other = (int((x == client).sum()) for x in (labeled, unlabeled))
    share = 1 if client < first else 0.2 if client < first + partly else 0
    assert known == round(share * (known + other))
    assert other > 0 or client < first
  # Who has which rows does not depend on who knows how many.
  np.testing.assert_array_equal(
      np.maximum(labeled, unlabeled),
      np.maximum(*deal(num_labeled_clients=1)[2:]))


def test_a_mix_of_one_kind_is_the_setting_without_it():
  alone = deal(num_labeled_clients=-1, labeled_fraction=0.2)
  mixed = deal(num_labeled_clients=0, num_partly_labeled_clients=10,
               labeled_fraction=0.2)
  for mine, theirs in zip(mixed, alone, strict=True):
    np.testing.assert_array_equal(mine, theirs)


def test_those_who_hold_labels_lead_the_federation():
  """As it is said to methods that draw clients by their kind."""
  assert dealing.num_holders(config.Config(
      num_labeled_clients=2, num_partly_labeled_clients=5)) == 7
  assert dealing.num_holders(config.Config(num_labeled_clients=-1)) == -1


def test_other_settings_have_no_partly_labeled_clients():
  options = config.Config(num_clients=10, num_labeled_clients=2,
                          num_partly_labeled_clients=3, labels_per_class=4)
  for deal_rows in (dealing.two_pools('iid_random', 'iid_random'),
                    dealing.agents('iid_random'), dealing.one_pool):
    with pytest.raises(ValueError, match='take labeled_clients'):
      deal_rows(np.random.default_rng(0), np.arange(300) % 10,
                np.ones(300, bool), options)


@pytest.mark.parametrize('args, message', [
    ({'num_labeled_clients': 2, 'num_partly_labeled_clients': 3},
     'labeled_fraction'),
    ({'num_labeled_clients': 2, 'num_partly_labeled_clients': 3,
      'labeled_fraction': 0.0}, 'labeled_fraction=0'),
    ({'num_labeled_clients': 2, 'num_partly_labeled_clients': 9,
      'labeled_fraction': 0.5}, 'at most 8'),
    ({'num_labeled_clients': 2, 'num_partly_labeled_clients': 3,
      'labeled_fraction': 0.5, 'labels_per_class': 4}, 'labels_per_class=4'),
    ({'num_labeled_clients': -1, 'num_partly_labeled_clients': 3,
      'labeled_fraction': 0.5}, 'num_partly_labeled_clients=3'),
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
