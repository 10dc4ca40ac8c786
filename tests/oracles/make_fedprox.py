"""Asks FedProx's authors' code what it computes.

litian96/FedProx at d2a4501f319f1594b732d88315c5ca1a72855f50: three rounds of
`Server` of flearn/trainers/fedprox.py, whole, with its `Client`, its optimizer
and its mean; two of three clients a round, which the code draws itself, over
three epochs of their rows in order, and none that stops early (drop_percent of
0). Their model of mnist/mclr.py has a small network in place of its own. Their
code is of TensorFlow 1 and is run on what is left of that. In the repository's
root, with TensorFlow 2.21:

python -m tests.oracles.make_fedprox --checkout=DIR \
    --out=tests/oracles/fedprox.npz
"""
from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import numpy as np

from tests.oracles import authors, make_uda

COMMIT = 'd2a4501f319f1594b732d88315c5ca1a72855f50'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
ROWS, BATCH, EPOCHS, ROUNDS = (10, 4, 7), 4, 3, 3
COHORT = 2
RATE, MU = 0.3, 0.8
NAMES = ('w0', 'b0', 'w1', 'b1')


def import_theirs(tf: Any, checkout: pathlib.Path) -> tuple[Any, Any]:
  """Their modules of rounds and of models; rows are not shuffled."""
  authors.pretend('tqdm')
  progress: Any = sys.modules['tqdm']
  progress.tqdm = types.SimpleNamespace(write=lambda text: None)
  progress.trange = lambda size, **knobs: range(size)
  sys.modules['tensorflow'] = tf
  rounds, models = (authors.load(checkout, f'flearn.{name}')
                    for name in ('trainers.fedprox', 'models.mnist.mclr'))
  models.batch_data = lambda data, size: [
      (data['x'][i:i + size], data['y'][i:i + size])
      for i in range(0, len(data['y']), size)]
  return rounds, models


def network(tf: Any, models: Any, weights: dict[str, np.ndarray]) -> Any:
  """Their class of models, with a small network in float64."""
  class Model(models.Model):  # type: ignore[misc, name-defined]

    def create_model(self, optimizer: Any) -> Any:
      inputs = tf.placeholder(tf.float64, [None, WIDTH])
      labels = tf.placeholder(tf.int64, [None])
      w0, b0, w1, b1 = (tf.get_variable(name, initializer=weights[name])
                        for name in NAMES)
      logits = tf.tanh(inputs @ w0 + b0) @ w1 + b1
      loss = tf.reduce_mean(tf.nn.sparse_softmax_cross_entropy_with_logits(
          labels=labels, logits=logits))
      found = optimizer.compute_gradients(loss)
      right = tf.count_nonzero(tf.equal(labels, tf.argmax(logits, 1)))
      return (inputs, labels, optimizer.apply_gradients(found),
              [gradient for gradient, _ in found], right, loss)

  return Model


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'litian96/FedProx', COMMIT)
  tf = make_uda.first_tensorflow()
  rounds, models = import_theirs(tf, checkout)
  rng = np.random.default_rng(33)
  labels = rng.integers(0, CLASSES, sum(ROWS))
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  inputs = centers[labels] + rng.normal(size=(labels.size, WIDTH))
  weights = authors.draw_weights(rng, WIDTH, HIDDEN, CLASSES)
  parts = np.split(np.arange(labels.size), np.cumsum(ROWS)[:-1])
  data = {i: {'x': inputs[part], 'y': labels[part]}
          for i, part in enumerate(parts)}
  after: list[list[np.ndarray]] = []
  cohorts: list[list[int]] = []

  class Server(rounds.Server):  # type: ignore[misc, name-defined]
    """Keeps who was drawn, and the means."""

    def select_clients(self, *args: Any, **knobs: Any) -> Any:
      indices, chosen = super().select_clients(*args, **knobs)
      cohorts.append(indices.tolist())
      return indices, chosen

    def aggregate(self, solutions: Any) -> Any:
      after.append(super().aggregate(solutions))
      return after[-1]

  Server(
      {'learning_rate': RATE, 'mu': MU, 'model_params': (CLASSES,), 'seed': 0,
       'num_rounds': ROUNDS, 'eval_every': 1, 'clients_per_round': COHORT,
       'drop_percent': 0.0, 'num_epochs': EPOCHS, 'batch_size': BATCH,
       'dataset': ''}, network(tf, models, weights),
      (list(data), [], data, data)).train()
  authors.save(
      out, COMMIT, rate=RATE, mu=MU, batch=BATCH, epochs=EPOCHS, rows=ROWS,
      cohorts=cohorts, inputs=inputs[:, None], labels=labels, **weights,
      **{f'after_{name}': np.stack([x[i] for x in after])
         for i, name in enumerate(NAMES)})


if __name__ == '__main__':
  main()
