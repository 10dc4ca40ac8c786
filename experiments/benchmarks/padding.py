r"""Share of masked examples when clients are unequal.

50,000 rows of 10 classes dealt to 100 clients by Dirichlet 0.1, cohorts of 10
under vmap in chunks of 5. Masked share: padding rows over processed rows.
A chunk lasts as long as its longest client, and the last batch of an epoch is
as wide as the others. Nothing is trained: the steps are counted.

python experiments/benchmarks/padding.py
"""
from __future__ import annotations

from typing import NamedTuple

from absl import flags
import harness
import numpy as np

import fedjax_ssl as fssl
from fedjax_ssl.core import layout
from fedjax_ssl.data import batching

FLAGS = flags.FLAGS

flags.DEFINE_float('alpha', 0.1, 'Of the Dirichlet partition.',
                   lower_bound=1e-3)
flags.DEFINE_integer('num_clients', 100, 'Clients.', lower_bound=1)
flags.DEFINE_integer('cohort_size', 10, 'Clients of a round.', lower_bound=1)
flags.DEFINE_integer('chunk_size', 5, 'Clients of one vmap.', lower_bound=1)
flags.DEFINE_integer('num_cohorts', 1000, 'Sampled cohorts.', lower_bound=1)


class Work(NamedTuple):
  """What every client does in a round.

  steps: int64[N].
  used: float64[N], real rows.
  width: rows of one step.
  """

  steps: np.ndarray
  used: np.ndarray
  width: int


def count(task: fssl.Task, clients: fssl.Shard, streams: str = 'both') -> Work:
  """Steps and rows of every client, as `batching.batches` deals them."""
  steps = np.asarray(batching.num_steps(task, clients, streams), np.int64)
  used, width = np.zeros(steps.size), 0
  if streams != 'unlabeled':
    batch = np.int64(task.labeled_batch)
    used += _visits(np.asarray(clients.num_labeled), batch, steps)
    width += int(batch)
  if streams != 'labeled':
    n = np.asarray(clients.num_unlabeled, np.int64)
    size = task.unlabeled_batch or max(task.unlabeled_capacity, 1)
    epoch = np.maximum(steps // max(task.local_epochs, 1), 1)
    split = np.clip(-(-n // epoch), 1, size)
    used += _visits(n, size if task.unlabeled_batch else split, steps)
    width += size
  return Work(steps, used, width)


def _visits(n: np.ndarray, batch: np.ndarray | int, steps: np.ndarray
            ) -> np.ndarray:
  """Real rows in `steps` batches of a stream that starts over at its end."""
  per_epoch = np.maximum(-(-n // batch), 1)
  return (steps // per_epoch * n
          + np.minimum(steps % per_epoch * batch, n)).astype(float)


def masked_share(task: fssl.Task, work: Work, cohorts: np.ndarray, *,
                 ordered: bool = True) -> float:
  """Mean masked share of cohorts int[R, S], the longest clients first or not.

  A cohort without any rows is left out.
  """
  plan = layout.plan(task, cohorts.shape[1])
  shares = []
  for ids in cohorts:
    if ordered:
      ids = ids[np.lexsort((ids, -work.steps[ids]))]
    rows = (work.steps[ids] * work.width).astype(np.float32)
    processed = float(plan.processed(rows))
    if processed:
      shares.append(1 - work.used[ids].sum() / processed)
  return float(np.mean(shares))


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


def main() -> None:
  """Counts, and reports shares in percent."""
  rng = np.random.default_rng(1)
  if FLAGS.cohort_size > FLAGS.num_clients:
    raise ValueError(f'--cohort_size={FLAGS.cohort_size} is more than '
                     f'--num_clients={FLAGS.num_clients}.')
  cohorts = np.stack([
      rng.choice(FLAGS.num_clients, FLAGS.cohort_size, replace=False)
      for _ in range(FLAGS.num_cohorts)])
  labels = np.repeat(np.arange(10, dtype=np.int32), 5000)
  train = fssl.Examples(np.zeros((labels.size, 1, 1, 1), np.uint8), labels)
  table: list[list] = [['masked %', 'sorted', 'unsorted', 'one by one',
                        'max/mean steps']]
  measured = {}
  for scheme in ('dirichlet_capped', 'dirichlet_clients'):
    for name, sizes, fraction, streams in _settings():
      federation = harness.federate(
          train, *_deal(scheme, labels, fraction),
          num_clients=FLAGS.num_clients)
      clients = federation.clients
      capacity = batching.unlabeled_capacity(
          clients.num_labeled, clients.num_unlabeled,
          labeled_batch=sizes['labeled_batch'])
      spec = fssl.TaskSpec(
          10, (1, 1, 1), model='linear', weak='none', strong='none',
          client_map='vmap', chunk_size=FLAGS.chunk_size,
          cohort_size=FLAGS.cohort_size, unlabeled_capacity=capacity, **sizes)
      task = fssl.make_task(spec)
      work = count(task, clients, streams)
      alone = fssl.make_task(fssl.TaskSpec(
          **{**vars(spec), 'client_map': 'map'}))
      shares = {
          'sorted': masked_share(task, work, cohorts),
          'unsorted': masked_share(task, work, cohorts, ordered=False),
          'one by one': masked_share(alone, work, cohorts)}
      steps = work.steps.max() / work.steps.mean()
      measured[f'{scheme}, {name}'] = {**shares, 'max/mean steps': steps}
      table.append([f'{scheme}, {name}',
                    *[f'{100 * s:.1f}' for s in shares.values()],
                    f'{steps:.1f}'])
  harness.report('padding', table, measured)


if __name__ == '__main__':
  harness.run(main)
