r"""Share of masked examples when clients are unequal.

50,000 rows of 10 classes dealt to 100 clients by Dirichlet 0.1, cohorts of 10
under vmap in chunks. Masked share: padding rows over processed rows. A chunk
lasts as long as its longest client, and the last batch of an epoch is as wide
as the others. Nothing is trained: batches are dealt and counted.

'as lanes' is the share of as many lanes as a chunk has, by --client_map=lanes,
and 'bound' the least that any schedule of them could waste: a client's steps
follow one another, so that the longest one keeps the other lanes idle even
then.

python experiments/benchmarks/padding.py
"""
from __future__ import annotations

import pathlib
import sys

from absl import flags
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness
from experiments.benchmarks.counting import bound as bound
from experiments.benchmarks.counting import count as count
from experiments.benchmarks.counting import masked_share as masked_share
from experiments.benchmarks.counting import Work as Work
import fedjax_ssl as fssl
from fedjax_ssl.data import batching

FLAGS = flags.FLAGS

flags.DEFINE_float('alpha', 0.1, 'Of the Dirichlet partition.',
                   lower_bound=1e-3)
flags.DEFINE_integer('num_clients', 100, 'Clients.', lower_bound=1)
flags.DEFINE_integer('cohort_size', 10, 'Clients of a round.', lower_bound=1)
flags.DEFINE_list('chunk_sizes', ['2', '5', '16', '0'],
                  'Clients of one vmap; 0 is the whole cohort.')
flags.DEFINE_integer('num_cohorts', 1000, 'Sampled cohorts.', lower_bound=1)

QUICK = {'chunk_sizes': ['2'], 'num_cohorts': 10}


def _settings() -> list[tuple[str, dict[str, int], float, str]]:
  """(name, batch sizes, labeled fraction, streams) of each line."""
  return [
      ('all rows labeled, batch 10', {'labeled_batch': 10}, 1.0, 'labeled'),
      ('all rows labeled, batch 32', {'labeled_batch': 32}, 1.0, 'labeled'),
      ('10 % labeled, batches 10 and 50',
       {'labeled_batch': 10, 'unlabeled_batch': 50}, 0.1, 'both'),
      ('10 % labeled, rows split over steps',
       {'labeled_batch': 10, 'unlabeled_batch': 0}, 0.1, 'both'),
  ]


def _deal(scheme: str, labels: np.ndarray, fraction: float
          ) -> tuple[np.ndarray, np.ndarray]:
  """Owners of labeled and of unlabeled rows."""
  rng = np.random.default_rng(0)
  pool = np.ones(labels.size, bool)
  labeled = pool if fraction == 1 else fssl.data.choose_labeled(
      rng, labels, fraction=fraction, where=pool)
  knobs = {'min_size': 0} if scheme == 'dirichlet_capped' else {}
  owners = []
  for where in (labeled, ~labeled):
    owners.append(np.full(labels.size, -1, np.int32) if not where.any() else
                  getattr(fssl.data, scheme)(
                      rng, labels, FLAGS.num_clients, alpha=FLAGS.alpha,
                      where=where, **knobs))
  return owners[0], owners[1]


def _task(changes: dict, clients: fssl.Shard, chunk_size: int,
          client_map: str = 'vmap') -> fssl.Task:
  capacity = batching.unlabeled_capacity(
      float(clients.num_labeled.mean()), float(clients.num_unlabeled.mean()),
      labeled_batch=changes['labeled_batch'])
  return fssl.make_task(fssl.TaskSpec(
      10, (1, 1, 1), model='linear', weak='none', strong='none',
      client_map=client_map, chunk_size=chunk_size,
      cohort_size=FLAGS.cohort_size, unlabeled_capacity=capacity, **changes))


def _shares(changes: dict[str, int], federation: fssl.Federation,
            streams: str, cohorts: np.ndarray) -> dict[str, float]:
  """Every line of one column."""
  clients = federation.clients
  alone = _task(changes, clients, 0, 'map')
  work = count(alone, federation, streams)
  shares = {'one by one': masked_share(alone, work, cohorts)}
  for size in harness.numbers('chunk_sizes', least=0):
    task = _task(changes, clients, size)
    name = f'chunk {size or "all"}'
    lanes = size or FLAGS.cohort_size
    shares[name] = masked_share(task, work, cohorts)
    shares[f'{name}, unsorted'] = masked_share(
        task, work, cohorts, ordered=False)
    shares[f'{name}, as lanes'] = masked_share(
        _task(changes, clients, lanes, 'lanes'), work, cohorts)
    shares[f'{name}, bound'] = bound(work, cohorts, lanes)
  return shares


def main() -> None:
  """Counts, and reports shares in percent."""
  if FLAGS.cohort_size > FLAGS.num_clients:
    raise ValueError(f'--cohort_size={FLAGS.cohort_size} is more than '
                     f'--num_clients={FLAGS.num_clients}.')
  rng = np.random.default_rng(1)
  cohorts = np.stack([
      rng.choice(FLAGS.num_clients, FLAGS.cohort_size, replace=False)
      for _ in range(FLAGS.num_cohorts)])
  labels = np.repeat(np.arange(10, dtype=np.int32), 5000)
  train = fssl.Examples(np.zeros((labels.size, 1, 1, 1), np.uint8), labels)
  measured = {}
  for scheme in ('dirichlet_capped', 'dirichlet_clients'):
    for name, changes, fraction, streams in _settings():
      federation = harness.federate(
          train, *_deal(scheme, labels, fraction),
          num_clients=FLAGS.num_clients)
      measured[f'{scheme}, {name}'] = _shares(
          changes, federation, streams, cohorts)
  columns = list(measured)
  rows = measured[columns[0]]
  print('\n'.join(f'({i + 1}) {name}' for i, name in enumerate(columns)))
  harness.report(
      f'padding_{FLAGS.cohort_size}',
      [['masked %', *[f'({i + 1})' for i in range(len(columns))]],
       *[[row, *[f'{100 * measured[c][row]:.1f}' for c in columns]]
         for row in rows]],
      measured)


if __name__ == '__main__':
  harness.run(main, QUICK)
