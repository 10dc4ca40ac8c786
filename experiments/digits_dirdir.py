r"""Quickstart: real handwritten digits, labels and images skewed over clients.

20 clients, 10 labels a class in all, Dirichlet(0.5) over labeled and over
unlabeled rows: FixMatch between the labels-only and the all-labels bound.

python experiments/digits_dirdir.py
"""
import common
from fedjax_ssl import data


def deal(rng, labels, pool):
  """Owners of labeled and of unlabeled rows."""
  labeled = common.choose_labeled(rng, labels, pool)
  flags = common.FLAGS
  return (
      common.deal_labeled(
          rng, labels, labeled, data.dirichlet_capped, alpha=flags.alpha,
          min_size=common.labeled_min_size(labeled)),
      data.dirichlet_capped(
          rng, labels, flags.num_clients, alpha=flags.alpha,
          where=pool & ~labeled))


if __name__ == '__main__':
  common.main(
      deal, dataset='digits', model='cnn', method='fixmatch', bounds=True,
      num_clients=20, cohort_size=10, labels_per_class=10, num_rounds=60)
