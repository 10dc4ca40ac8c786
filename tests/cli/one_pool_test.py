"""FedLabel's dealing: all rows first, then labels inside each client."""
from __future__ import annotations

from typing import Any

from absl.testing import flagsaver
import numpy as np
import pytest

from fedjax_ssl.cli import dealing, flags, train

FLAGS: Any = train.FLAGS
LABELS = np.arange(3000) % 10


@pytest.fixture(autouse=True)
def flag_values():
  saved = flagsaver.save_flag_values()
  if not FLAGS.is_parsed():
    FLAGS.mark_as_parsed()
  FLAGS.num_clients = 12
  FLAGS.labels_per_class = None
  yield
  flagsaver.restore_flag_values(saved)


def deal(seed=0):
  pool = np.arange(LABELS.size) >= 300  # The others are held out.
  labeled, unlabeled = dealing.one_pool(
      np.random.default_rng(seed), LABELS, pool, flags.options())
  assert (labeled[~pool] == -1).all() and (unlabeled[~pool] == -1).all()
  assert not ((labeled >= 0) & (unlabeled >= 0)).any()
  return labeled, unlabeled


def sizes(owner):
  return np.bincount(owner[owner >= 0], minlength=12)


@pytest.mark.parametrize('dirichlet', ['clients', 'shares', 'capped'])
@pytest.mark.parametrize('fraction', [0.05, 0.2, 1.0])
def test_every_client_has_its_share_of_labels(dirichlet, fraction):
  FLAGS.labeled_fraction, FLAGS.dirichlet = fraction, dirichlet
  FLAGS.alpha = 1.0
  labeled, unlabeled = map(sizes, deal())
  total = labeled + unlabeled
  np.testing.assert_allclose(labeled, fraction * total, atol=0.5)
  if dirichlet == 'clients':
    assert len(set(total)) == 1  # Equal parts.
  else:
    assert len(set(total)) > 1


def test_a_small_alpha_gives_few_classes_a_client():
  FLAGS.labeled_fraction = 0.2
  def classes(alpha):
    FLAGS.alpha = alpha
    labeled, unlabeled = deal()
    owner = np.maximum(labeled, unlabeled)
    return np.mean([np.unique(LABELS[owner == k]).size for k in range(12)])
  assert classes(0.1) < 5 < 9 < classes(100.0)


def test_labels_of_a_class_or_at_the_server_are_refused():
  FLAGS.labeled_fraction = 0.2
  FLAGS.labels_at = 'server'
  with pytest.raises(ValueError, match='labels_at'):
    deal()
  FLAGS.labels_at = 'clients'
  FLAGS.labels_per_class = 10
  with pytest.raises(ValueError, match='labeled_fraction'):
    deal()
