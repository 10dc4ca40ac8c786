"""Asks DP-SGD's authors' code what it computes.

tensorflow/privacy at 03035d5d4a271ac795dab80f5bc1cef82fc3d462: four steps of a
client by `DPGradientDescentGaussianOptimizer` of dp_optimizer.py, with the
clipping and noise of gaussian_query.py; for clipping norms that clip all rows
of the first step, some and none. Normal numbers are given in place of drawn.
Every row is a microbatch and in every batch, so that the mean, which theirs is
over the rows of the batch and ours over those expected, is the same. The code
computes in float32. In the repository's root, with TensorFlow 2.21:

python -m tests.oracles.make_dpsgd --checkout=DIR --out=tests/oracles/dpsgd.npz
"""
from __future__ import annotations

import pathlib
import sys
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = '03035d5d4a271ac795dab80f5bc1cef82fc3d462'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
ROWS, STEPS = 9, 4
RATE, NOISE = 0.4, 0.6
NORMS = (0.3, 2.3, 6.0)
NAMES = ('w0', 'b0', 'w1', 'b1')


def import_theirs(checkout: pathlib.Path) -> tuple[Any, Any]:
  """TensorFlow, and their optimizers without the rest of their package."""
  import tensorflow as tf
  authors.pretend('dp_accounting')
  for name in ('tensorflow_privacy', 'tensorflow_privacy.privacy',
               'tensorflow_privacy.privacy.dp_query',
               'tensorflow_privacy.privacy.optimizers'):
    package = sys.modules[name] = types.ModuleType(name)
    package.__path__ = [str(checkout.joinpath(*name.split('.')))]
  return tf, authors.load(checkout,
                          'tensorflow_privacy.privacy.optimizers.dp_optimizer')


def steps(tf: Any, theirs: Any, given: dict[str, np.ndarray], norm: float
          ) -> dict[str, np.ndarray]:
  """Weights after every step, and the norms of the rows' gradients."""
  net = {name: tf.Variable(given[name], dtype=tf.float32) for name in NAMES}
  inputs = tf.constant(given['inputs'][:, 0], tf.float32)
  optimizer = theirs.DPGradientDescentGaussianOptimizer(
      norm, NOISE, ROWS, learning_rate=RATE)
  found: list[dict[str, np.ndarray]] = []
  for _ in range(STEPS):
    with tf.GradientTape(persistent=True) as tape:
      def losses() -> Any:
        hidden = tf.tanh(inputs @ net['w0'] + net['b0'])
        return tf.nn.sparse_softmax_cross_entropy_with_logits(
            labels=given['labels'], logits=hidden @ net['w1'] + net['b1'])
      made = optimizer.compute_gradients(
          losses, list(net.values()), gradient_tape=tape)
      lengths = [tf.linalg.global_norm(tape.gradient(
          tf.gather(losses(), i), list(net.values()))) for i in range(ROWS)]
    optimizer.apply_gradients(made)
    found.append({name: value.numpy() for name, value in net.items()})
    found[-1]['lengths'] = np.array(lengths)
  return {name: np.stack([x[name] for x in found]) for name in found[0]}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'tensorflow/privacy', COMMIT)
  tf, theirs = import_theirs(checkout)
  rng = np.random.default_rng(72)
  labels = rng.integers(0, CLASSES, ROWS)
  rows = {'inputs': rng.normal(size=(ROWS, 1, WIDTH)), 'labels': labels}
  weights = authors.draw_weights(rng, WIDTH, HIDDEN, CLASSES)
  draws: list[np.ndarray] = []

  def normal(shape: Any) -> np.ndarray:
    draws.append(rng.normal(size=shape).astype(np.float32))
    return draws[-1]

  tf.random_normal_initializer = lambda stddev: (
      lambda shape: stddev * normal(shape))
  found = [steps(tf, theirs, {**rows, **weights}, norm) for norm in NORMS]
  drawn = {f'normal_{name}': np.reshape(
      draws[i::len(NAMES)], (len(NORMS), STEPS, *weights[name].shape))
           for i, name in enumerate(NAMES)}
  authors.save(
      out, COMMIT, rate=RATE, noise=NOISE, norms=NORMS, steps=STEPS, **rows,
      **weights, **drawn, lengths=np.stack([x['lengths'] for x in found]),
      **{f'after_{name}': np.stack([x[name] for x in found])
         for name in NAMES})


if __name__ == '__main__':
  main()
