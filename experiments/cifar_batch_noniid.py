r"""Batch non-IID: labels are even, one class dominates a client's other images.

Table 1 of FedMatch (ICLR 2021, https://arxiv.org/abs/2006.12097): 100 clients,
5 labels a class and client, 5 clients a round; unlabeled rows by `bimb`.

python experiments/cifar_batch_noniid.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedmatch_iclr/cifar_batch_noniid.fedmatch_v3.flags
"""
import common
from fedjax_ssl import data

if __name__ == '__main__':
  common.main(
      common.two_pools(data.iid_count, data.bimb),
      dataset='cifar10', split='54000/3000/3000', model='resnet9_fedmatch',
      method="fedmatch(profile='v3code', threshold=0.85)", weak='none',
      labeled_view='none', strong='ra_heart', learning_rate=1e-3, momentum=0.0,
      num_clients=100, cohort_size=5, labels_per_class=500, labeled_batch=10,
      unlabeled_batch=100, num_rounds=200)
