"""Asks FedMatch's authors' code what it computes with labels at the server.

wyjeong/FedMatch at 4947aa255d59bd37915e25a719763aaaf5d7e067: as `make_fedmatch`
does, but its server trains sigma on its labels ahead of each round, and its
clients train psi only. Nobody tells the server's model that it trains, so it
leaves out the numbers of psi up to l1_thres, which ours does not. 'untold' is
the server's first training like that; in 'cut' the model is told. In the
repository's root, with TensorFlow 2.21:

python -m tests.oracles.make_fedmatch_server --checkout=DIR \
    --out=tests/oracles/fedmatch_server.npz
"""
from __future__ import annotations

from typing import Any

import numpy as np

from tests.oracles import authors, make_fedmatch
from tests.oracles.make_fedmatch import BATCH, CLIENTS, LABELED, UNLABELED

SCENARIO = 'labels-at-server'


class Loader(make_fedmatch.Loader):
  """The server has the first rows, and the clients have the others."""

  def _rows(self, client: int, where: slice) -> Any:
    begin = LABELED + client * UNLABELED
    del where
    return self._taken(slice(begin, begin + UNLABELED))

  def _taken(self, rows: slice) -> Any:
    x, y = (self.data[k][rows] for k in ('inputs', 'labels'))
    return x, np.eye(make_fedmatch.CLASSES, dtype=np.float32)[y], 'rows'

  def get_s_server(self) -> Any:
    return self._taken(slice(LABELED))


def untold(theirs: Any, given: dict[str, np.ndarray]) -> dict[str, Any]:
  """Sigma after the server's first training, as their code does it."""
  server = make_fedmatch.start(theirs, given, make_fedmatch.arguments(
      '', make_fedmatch.THRESHOLDS['cut'], SCENARIO))
  server.curr_round = 0
  server.train_global_model()
  return {f'untold_sigma{i}': server.sig[i].numpy() for i in range(2)}


def main() -> None:
  checkout, out = authors.arguments(
      __doc__, 'wyjeong/FedMatch', make_fedmatch.COMMIT)
  _, theirs = make_fedmatch.import_theirs(checkout)
  theirs.federated.DataLoader = Loader
  given = Loader.data = make_fedmatch.draw()
  for name in ('inputs', 'labels'):
    given[name] = given[name][:LABELED + CLIENTS * UNLABELED]
  results = untold(theirs, given)
  for run in make_fedmatch.THRESHOLDS:
    results |= make_fedmatch.rounds(theirs, given, run, SCENARIO)
  authors.save(
      out, make_fedmatch.COMMIT, **make_fedmatch.KNOBS, batch=BATCH,
      clients=[(0, UNLABELED)] * CLIENTS, server=LABELED, **given,
      **{f'{run}_l1_thres': x for run, x in make_fedmatch.THRESHOLDS.items()},
      **results)


if __name__ == '__main__':
  main()
