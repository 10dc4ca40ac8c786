"""FedLabel's dealing: all rows first, then labels inside each client."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fedjax_ssl import config
from fedjax_ssl.running import dealing

LABELS = np.arange(3000) % 10


def deal(seed=0, **options: Any):
  pool = np.arange(LABELS.size) >= 300  # The others are held out.
  labeled, unlabeled = dealing.one_pool(
      np.random.default_rng(seed), LABELS, pool, config.Config(
          num_clients=12, **options))
  assert (labeled[~pool] == -1).all() and (unlabeled[~pool] == -1).all()
  assert not ((labeled >= 0) & (unlabeled >= 0)).any()
  return labeled, unlabeled


def sizes(owner):
  return np.bincount(owner[owner >= 0], minlength=12)


@pytest.mark.parametrize('dirichlet', ['clients', 'shares', 'capped'])
@pytest.mark.parametrize('fraction', [0.05, 0.2, 1.0])
def test_every_client_has_its_share_of_labels(dirichlet, fraction):
  labeled, unlabeled = map(sizes, deal(
      labeled_fraction=fraction, dirichlet=dirichlet, alpha=1.0))
  total = labeled + unlabeled
  np.testing.assert_allclose(labeled, fraction * total, atol=0.5)
  if dirichlet == 'clients':
    assert len(set(total)) == 1  # Equal parts.
  else:
    assert len(set(total)) > 1


def test_a_small_alpha_gives_few_classes_a_client():
  def classes(alpha):
    labeled, unlabeled = deal(labeled_fraction=0.2, alpha=alpha)
    owner = np.maximum(labeled, unlabeled)
    return np.mean([np.unique(LABELS[owner == k]).size for k in range(12)])
  assert classes(0.1) < 5 < 9 < classes(100.0)


def test_labels_of_a_class_or_at_the_server_are_refused():
  with pytest.raises(config.FieldError, match='labels_at=server'):
    deal(labeled_fraction=0.2, labels_at='server')
  with pytest.raises(config.FieldError, match='labels_per_class=10: '):
    deal(labeled_fraction=0.2, labels_per_class=10)


def test_more_clients_than_rows_are_named_whatever_the_deal():
  """What a partition says of another flag is not blamed on alpha."""
  rng, pool = np.random.default_rng(0), np.ones(20, bool)
  options = config.Config(num_clients=30, labels_per_class=1)
  with pytest.raises(config.FieldError, match='^num_clients=30: more than'):
    dealing.two_pools('dirichlet_clients', 'iid_count')(
        rng, LABELS[:20], pool, options)
