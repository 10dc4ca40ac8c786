r"""Streaming non-IID: clients meet their images in 10 tasks, the mix drifts.

Table 1 of FedMatch (first version, https://arxiv.org/abs/2006.12097): 10
clients, all of them in every round, 5 labels a class and client, or with
--labels_at=server 50 a class there; 10 rounds a task.

python experiments/fmnist_streaming.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/fedmatch/fmnist_streaming.fedmatch_dense.flags
"""
import common
from fedjax_ssl import data

NUM_TASKS = 10


def deal(rng, labels, pool):
  """Even shares at random, then each client's images cut in drifting tasks."""
  schemes = common.two_pools(data.iid_count, data.iid_random)
  labeled, unlabeled = schemes(rng, labels, pool)
  return labeled, unlabeled, data.deal_tasks(
      rng, labels, unlabeled, num_tasks=NUM_TASKS)


if __name__ == '__main__':
  common.main(
      deal, dataset='fashion_mnist', split='63000/3500/3500', model='alexnet',
      method='fedmatch(keep_local=True)', weak='flip_shift',
      strong="ra_mc(weak='flip_shift')", learning_rate=1e-4, momentum=0.9,
      num_clients=10, cohort_size=10, labels_per_class=50, labeled_batch=10,
      unlabeled_batch=50, num_rounds=100, rounds_per_task=10)
