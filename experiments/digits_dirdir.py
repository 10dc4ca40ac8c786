r"""Quickstart: real handwritten digits, labels and images skewed over clients.

20 clients, 10 labels a class in all, Dirichlet(0.5) over labeled and over
unlabeled rows: FixMatch between the labels-only and the all-labels bound.

python experiments/digits_dirdir.py
"""
import common
from fedjax_ssl import data

if __name__ == '__main__':
  common.main(
      common.two_pools(data.dirichlet_capped, data.dirichlet_capped),
      dataset='digits', model='cnn', method='fixmatch', bounds=True,
      num_clients=20, cohort_size=10, labels_per_class=10, num_rounds=60)
