r"""(DIR, DIR): labels and unlabeled images both Dirichlet over the clients.

The hardest setting of FedDure (AAAI 2024, https://arxiv.org/abs/2307.05358):
100 clients, 5 a round, 5 labels a class and client on average.

python experiments/cifar_dirdir.py \
    --flagfile=experiments/flagfiles/feddure/cifar_dirdir.fixmatch.flags \
    --data_dir=DIR
"""
import common
from fedjax_ssl import data

if __name__ == '__main__':
  common.main(
      common.two_pools(data.dirichlet_capped, data.dirichlet_capped),
      dataset='cifar10', model='resnet9', method='fixmatch',
      optimizer='adam', learning_rate=5e-4, num_clients=100, cohort_size=5,
      labels_per_class=500, labeled_batch=10, unlabeled_batch=0,
      num_rounds=200, validation_fraction=0.02)
