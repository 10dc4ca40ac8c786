r"""Batch IID: every client has as many images of each class.

Table 2 of FedMatch (first version, https://arxiv.org/abs/2006.12097): 100
clients, 5 labels a class and client, 5 or 10 clients a round.

python experiments/cifar_batch_iid.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedmatch/cifar_batch_iid.fedmatch_dense.flags
"""
import common
from fedjax_ssl import data

if __name__ == '__main__':
  common.main(
      common.two_pools(data.iid_count, data.iid_count),
      dataset='cifar10', split='54000/3000/3000', model='alexnet',
      method='fedmatch', weak='flip_shift', strong="ra_mc(weak='flip_shift')",
      learning_rate=1e-4, momentum=0.9, num_clients=100, cohort_size=5,
      labels_per_class=500, labeled_batch=10, unlabeled_batch=50,
      num_rounds=200)
