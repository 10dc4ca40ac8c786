r"""Fully labeled beside fully unlabeled clients, or all partially labeled.

The setting of FedIRM (https://arxiv.org/abs/2106.08600) and RSCFed
(https://arxiv.org/abs/2203.13993): a capped Dirichlet partition, of which the
first --num_labeled_clients clients know all their labels and the others none.
With --num_labeled_clients=-1 every client knows --labeled_fraction of its own.

python experiments/labeled_clients.py --data_dir=DIR \
    --flagfile=experiments/flagfiles/rscfed/labeled_clients.rscfed_fmnist.flags
"""
import common
from fedjax_ssl import data

FLAGS = common.FLAGS


def deal(rng, labels, pool):
  """Owners of labeled and of unlabeled rows, int32[D] each."""
  if FLAGS.labels_at == 'server':
    raise ValueError('--labels_at=server, but here clients hold the labels; '
                     'give --labels_at=clients.')
  holders = FLAGS.num_labeled_clients
  if not holders:
    raise ValueError('--num_labeled_clients=0 leaves nobody with labels; give '
                     'at least 1, or -1 and --labeled_fraction.')
  for name in ('labels_per_class', 'labeled_fraction'):
    if FLAGS[name].value is not None and (
        holders > 0 or name == 'labels_per_class'):
      raise ValueError(
          f'--{name}={FLAGS[name].value}, but here --num_labeled_clients='
          f'{holders} says which rows are labeled; leave it out.')
  owner = data.dirichlet_capped(
      rng, labels, FLAGS.num_clients, alpha=FLAGS.alpha, where=pool)
  if holders > 0:
    return data.label_clients(owner, holders)
  if FLAGS.labeled_fraction is None:
    raise ValueError('Give --num_labeled_clients, or -1 and the share '
                     '--labeled_fraction of labels that all clients hold.')
  return data.partition.label_within(
      rng, labels, owner, fraction=FLAGS.labeled_fraction)


if __name__ == '__main__':
  common.main(
      deal, dataset='fashion_mnist', model='cnn', method='rscfed',
      optimizer='sgd', learning_rate=0.03, momentum=0.9, weight_decay=5e-4,
      num_clients=10, num_labeled_clients=1, cohort_size=5, labeled_batch=64,
      unlabeled_batch=64, num_rounds=1000, validation_fraction=0.02)
