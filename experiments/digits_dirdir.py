r"""Quickstart: real handwritten digits, labels and images skewed over clients.

20 clients, 10 labels a class in all, Dirichlet(0.5) over labeled and over
unlabeled rows: FixMatch between the labels-only and the all-labels bound.

python experiments/digits_dirdir.py
"""
import common
from fedjax_ssl import data

if __name__ == '__main__':
  # Every run takes the same 5 steps a client and round, labels or not, so that
  # the bounds differ in what they learn from and not in how long. The rate is
  # the best one of labels only, and falls, so that the end is no draw.
  common.main(
      common.two_pools(data.dirichlet_capped, data.dirichlet_capped),
      dataset='digits', model='cnn', method='fixmatch(threshold=0.8)',
      strong='ra_mc(cutout=2)', bounds=True, num_clients=20, cohort_size=10,
      labels_per_class=10, local_steps=5, learning_rate=0.05, momentum=0.9,
      lr_schedule='fixmatch_cosine', num_rounds=150, eval_every=10,
      checkpoint_every=50, seeds=['0', '1', '2'])
