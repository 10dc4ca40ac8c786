r"""(IID, DIR): labels dealt at random, unlabeled images Dirichlet.

The middle setting of FedDure; see `cifar_dirdir.py`.

python experiments/cifar_iiddir.py \
    --flagfile=experiments/flagfiles/feddure/cifar_iiddir.fixmatch.flags \
    --data_dir=DIR
"""
import common
from fedjax_ssl import data

if __name__ == '__main__':
  common.main(
      common.two_pools(data.iid_random, data.dirichlet_capped),
      dataset='cifar10', model='resnet9', method='fixmatch',
      optimizer='adam', learning_rate=5e-4, num_clients=100, cohort_size=5,
      labels_per_class=500, labeled_batch=10, unlabeled_batch=0,
      num_rounds=200, validation_fraction=0.02)
