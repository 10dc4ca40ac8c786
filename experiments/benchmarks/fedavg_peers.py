r"""Seconds of a FedAvg round beside PyTorch, FedJAX, Flower and pfl-research.

100 clients of 200 images of 28x28x1, 10 a round, one local epoch at batch 20,
the CNN of FedAvg (1,663,370 parameters). All start from the same weights and
train the same cohorts; pixels are random. Each peer runs in its own environment
(`make_peers.py`) and all take turns, so that they see the same noise.

Flower has two rows. 'Flower' is the fastest way found: an actor of one thread
for each of --num_devices, that keeps network and images. 'Flower, as
documented' makes network, loader and optimizer anew for each message, as its
PyTorch guide does, at the default of two threads for a client. Both have the
same goal, so that the first one decides.

Before that every system trains a round of whole-client batches, in which no
order of rows matters: the weights must agree.

python experiments/benchmarks/fedavg_peers.py --peers_dir=runs/peers
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import functools
import pathlib
import sys
import tempfile
from typing import Any, NamedTuple

from absl import flags
import jax
import numpy as np

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness, peer_envs, peer_process, peer_task
import fedjax_ssl as fssl

FLAGS = flags.FLAGS

flags.DEFINE_string('peers_dir', 'runs/peers', 'Folder of the environments.')
flags.DEFINE_bool('require_peers', False, 'Fail if a peer is missing or '
                  'ends; after the report, if it ends while it is timed.')
flags.DEFINE_integer('num_clients', 100, 'Clients.', lower_bound=1)
flags.DEFINE_integer('rows', 200, 'Images of each client.', lower_bound=1)
flags.DEFINE_integer('cohort_size', 10, 'Clients of a round.', lower_bound=1)
flags.DEFINE_integer('batch', 20, 'Rows of a local step.', lower_bound=1)
flags.DEFINE_integer('side', 28, 'Of the images.', lower_bound=4)
harness.define_seconds('peer_timeout', 300, 'Seconds for one answer of a peer.')

_MEAN, _STD, _RATE = 0.5, 0.25, 0.05
# Of the weights' change, in its Euclidean norm. Sums in other orders change it
# by 1e-5, but a rectifier or a pooling that flips on rounding by 3e-3.
_TOLERANCE = 5e-3
# How much longer or shorter a change may be where only the order differs.
_SPREAD = 1.25


class System(NamedTuple):
  """How a peer is started.

  Attributes:
    environment: a key of `peer_envs.ENVIRONMENTS`.
    script: file name in `peers/`.
    goal: our time over its time, at most.
    arguments: of the script.
  """

  environment: str
  script: str
  goal: float | str = ''
  arguments: tuple[str, ...] = ()


SYSTEMS = {
    'PyTorch, contiguous': System(
        'torch', 'torch_worker.py', 1.05, ('contiguous',)),
    'PyTorch, channels_last': System(
        'torch', 'torch_worker.py', 1.05, ('channels_last',)),
    'pfl-research': System('pfl', 'pfl_worker.py'),
    'FedJAX': System('fedjax', 'fedjax_worker.py', 0.77),
    'Flower': System('flower', 'flower_worker.py', 0.33),
    'Flower, as documented': System(
        'flower', 'flower_worker.py', 0.33, ('documented',)),
}


def find() -> tuple[dict[str, System], dict[str, str]]:
  """Peers that can run, and why the others cannot.

  Raises:
    ValueError: if some cannot, with --require_peers.
  """
  folder, out = pathlib.Path(FLAGS.peers_dir), {}
  for name, system in SYSTEMS.items():
    found = peer_envs.complaint(folder, system.environment)
    if found is not None:
      out[name] = (f'{found}: make_peers.py --peers_dir={FLAGS.peers_dir} '
                   f'--peers={system.environment}')
  _require(out)
  return {n: s for n, s in SYSTEMS.items() if n not in out}, out


def _require(out: Mapping[str, str]) -> None:
  if out and FLAGS.require_peers:
    raise ValueError('--require_peers: ' + '; '.join(
        f'{name}: {why}' for name, why in out.items()))


def make_task(*, batch: int, epochs: int, rounds: int, rows: int, mesh: Any
              ) -> tuple[harness.Simulation, peer_task.Task]:
  """Ours, and the same task for the peers: weights, rows, cohorts."""
  if FLAGS.cohort_size > FLAGS.num_clients:
    raise ValueError(f'--cohort_size={FLAGS.cohort_size} is more than '
                     f'--num_clients={FLAGS.num_clients}.')
  shape = (FLAGS.side, FLAGS.side, 1)
  train = harness.examples(FLAGS.num_clients * rows, shape)
  owner = np.repeat(np.arange(FLAGS.num_clients, dtype=np.int32), rows)
  spec = fssl.TaskSpec(
      10, shape, model='fedavg_cnn', mean=(_MEAN,), std=(_STD,), weak='none',
      strong='none', learning_rate=_RATE, labeled_batch=batch,
      local_epochs=epochs, cohort_size=FLAGS.cohort_size, method='fedavg')
  ours = harness.Simulation(spec, harness.federate(
      train, owner, num_clients=FLAGS.num_clients), mesh)
  return ours, peer_task.Task(
      np.asarray(train.inputs), np.asarray(train.labels, np.int64),
      np.split(np.arange(owner.size), FLAGS.num_clients),
      np.stack([ours.cohort(r) for r in range(rounds)]),
      params_of(ours), _MEAN, _STD, batch, epochs, _RATE, FLAGS.num_devices)


def params_of(ours: harness.Simulation) -> dict[str, Any]:
  """Our weights on the host."""
  return jax.device_get(ours.model.params)


def distance(got: Mapping[str, Any], want: Mapping[str, Any],
             start: Mapping[str, Any]) -> tuple[float, float]:
  """How far the weights are apart, and how much longer the way was.

  Args:
    got: nested weights of a peer.
    want: ours.
    start: those that both started from.

  Returns:
    |got - want| / |want - start|, and |got - start| / |want - start|.
  """
  one, two, zero = (peer_task.flat(dict(x)) for x in (got, want, start))
  def norm(a, b):
    return float(np.sqrt(sum(np.sum((a[k] - b[k])**2, dtype=np.float64)
                             for k in two)))
  if one.keys() != two.keys():
    raise ValueError(f'The weights have other names: {sorted(one)}.')
  return norm(one, two) / norm(two, zero), norm(one, zero) / norm(two, zero)


class Fleet:
  """Peers at work on one task; those that fail are left out with the reason.

  Args:
    systems: by name.
    task: their task.
    folder: for the task, the logs and their weights.
  """

  def __init__(self, systems: Mapping[str, System], task: peer_task.Task,
               folder: pathlib.Path):
    self.peers: dict[str, peer_process.Peer] = {}
    self.failed: dict[str, str] = {}
    self._folder, self._start = folder, task.params
    peer_task.save(folder, task)
    for name, system in systems.items():
      log = folder / (name.replace(', ', '_') + '.log')
      python = peer_envs.interpreter(
          pathlib.Path(FLAGS.peers_dir).absolute(), system.environment)
      try:
        self.peers[name] = peer_process.Peer(
            python, system.script, [str(folder), *system.arguments], log=log,
            timeout=FLAGS.peer_timeout)
      except (peer_process.PeerError, OSError) as error:
        self._fail(name, error)

  def first_round(self, ours: harness.Simulation) -> dict[str, Any]:
    """Trains a round everywhere: `distance` of each peer from ours."""
    ours.advance(1)
    found = {}
    for name, peer in list(self.peers.items()):
      path = self._folder / 'weights.npz'
      try:
        peer.advance(1)
        peer.save(path)
      except peer_process.PeerError as error:
        self._fail(name, error)
        continue
      found[name] = distance(peer_task.read_params(path), params_of(ours),
                             self._start)
    return found

  def turn(self, name: str) -> None:
    """Trains a round of a peer, unless it has failed before."""
    if name in self.peers:
      try:
        self.peers[name].advance(1)
      except peer_process.PeerError as error:
        self._fail(name, error)

  def close(self) -> None:
    """Ends them all."""
    for peer in self.peers.values():
      peer.close()

  def _fail(self, name: str, error: Exception) -> None:
    self.failed[name] = f'failed: {error}'
    if name in self.peers:
      self.peers.pop(name).close()


@contextlib.contextmanager
def _fleet(systems, task) -> Iterator[Fleet]:
  with tempfile.TemporaryDirectory() as folder:
    made = Fleet(systems, task, pathlib.Path(folder))
    try:
      yield made
    finally:
      made.close()


def agreement(systems: Mapping[str, System], mesh: Any
              ) -> tuple[dict[str, float], dict[str, str]]:
  """Relative distance of each peer's weights from ours, and who failed.

  Two local steps on all rows of a client, so that their order is no matter.
  """
  rows = min(FLAGS.rows, 40)
  ours, task = make_task(batch=rows, epochs=2, rounds=1, rows=rows, mesh=mesh)
  with _fleet(systems, task) as fleet:
    found = fleet.first_round(ours)
    for name, (gap, _) in found.items():
      if not gap < _TOLERANCE:
        raise ValueError(f'{name} ends a round at other weights: they differ '
                         f'by {gap:.2g} of the change, more than {_TOLERANCE}.')
    return {name: gap for name, (gap, _) in found.items()}, fleet.failed


def main() -> None:
  """Checks, times and reports."""
  systems, out = find()
  mesh = harness.make_mesh()
  gaps, failed = agreement(systems, mesh)
  out.update(failed)
  _require(out)
  rounds = 1 + 2 * FLAGS.repeats  # One to compare, two in each turn.
  ours, task = make_task(batch=FLAGS.batch, epochs=1, rounds=rounds,
                         rows=FLAGS.rows, mesh=mesh)
  with _fleet({n: s for n, s in systems.items() if n in gaps}, task) as fleet:
    for name, (_, length) in fleet.first_round(ours).items():
      if not 1 / _SPREAD < length < _SPREAD:
        raise ValueError(f'{name} goes {length:.2f} times as far as we do in a '
                         'round: it takes other steps.')
    out.update(fleet.failed)
    _require(out)
    timed = harness.interleave(
        {'ours': lambda: ours.advance(1),
         **{name: functools.partial(fleet.turn, name)
            for name in fleet.peers}})
    out.update(fleet.failed)
    versions = {name: peer.versions for name, peer in fleet.peers.items()}
  report({name: seconds for name, seconds in timed.items() if name not in out},
         {name: gap for name, gap in gaps.items() if name not in out},
         versions, out)
  _require(out)


def report(seconds: Mapping[str, list[float]], gaps: Mapping[str, float],
           versions: Mapping[str, Any], out: Mapping[str, str]
           ) -> dict[str, float]:
  """Prints and saves the table; returns our time over each peer's."""
  middle = harness.medians(seconds)
  ratios = {name: harness.paired(seconds, 'ours', name) for name in middle
            if name != 'ours'}
  table: list[list[Any]] = [
      ['', 's/round', 'ours/theirs', 'goal', 'weights apart']]
  for name, value in middle.items():
    goal = SYSTEMS[name].goal if name in SYSTEMS else ''
    table.append([name, value, ratios.get(name, ''), goal, gaps.get(name, '')])
  table += [[name, '-', '-', SYSTEMS[name].goal, why]
            for name, why in out.items()]
  best = [r for name, r in ratios.items() if name.startswith('PyTorch')]
  harness.report('fedavg_peers', table, {
      'data': 'random pixels', 'seconds': seconds, 'ratios': ratios,
      'weights_apart': gaps, 'peer_versions': versions, 'not_run': out,
      'task': {name: FLAGS[name].value for name in (
          'num_clients', 'rows', 'cohort_size', 'batch', 'side')}},
      max(best) if best else None)
  return ratios


if __name__ == '__main__':
  harness.run(main, {'num_clients': 10, 'rows': 8, 'cohort_size': 2, 'batch': 4,
                     'side': 8})
