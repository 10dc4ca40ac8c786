"""Asks MixMatch's authors' code what it computes.

google-research/mixmatch at 1011a1d51eaa9ca6f5dba02096a848d1fe3fc38e: six steps
of `MixMatch.model` of mixmatch.py, whole, with its guessed labels, its blends
by `MixMode` of libml/layers.py, both losses, the ramp and Adam. A small network
stands in place of theirs, and the ratios and partners of the blends are given,
the same in every step, in place of drawn. The code is of TensorFlow 1 and is
taken class by class. In the repository's root, with TensorFlow 2.21:

python -m tests.oracles.make_mixmatch --checkout=DIR \
    --out=tests/oracles/mixmatch.npz
"""
from __future__ import annotations

import functools
import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors, make_uda, torchssl

COMMIT = '1011a1d51eaa9ca6f5dba02096a848d1fe3fc38e'
STEPS, RATE, BATCH, VIEWS, WEIGHT = 6, 0.02, 4, 2, 20.0
SHAPE = (1, 2, 3)  # Of an image with as many numbers as there are features.


def steps(tf: Any, checkout: pathlib.Path, given: dict[str, np.ndarray],
          draws: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Weights after the steps, their losses, and the labels first guessed."""
  ratio = tf.placeholder(tf.float32, [None, 1, 1, 1])
  partners = tf.placeholder(tf.int32, [None])
  tf.distributions = types.SimpleNamespace(
      Beta=lambda a, b: types.SimpleNamespace(sample=lambda shape: ratio))
  tf.random_shuffle = lambda x: partners
  layers = authors.taken(
      checkout / 'libml' / 'layers.py',
      ['interleave_offsets', 'interleave', 'MixMode'], tf=tf)
  utils = authors.taken(checkout / 'libml' / 'utils.py',
                        ['model_vars', 'getter_ema'], tf=tf)
  theirs = authors.taken(
      checkout / 'mixmatch.py', ['MixMatch'], tf=tf, functools=functools,
      models=types.SimpleNamespace(MultiModel=object), layers=layers,
      MixMode=layers.MixMode, utils=utils, EasyDict=types.SimpleNamespace)
  guesses = []

  class Small(theirs.MixMatch):  # type: ignore[name-defined, misc]
    nclass = torchssl.CLASSES
    dataset = types.SimpleNamespace(height=SHAPE[0], width=SHAPE[1],
                                    colors=SHAPE[2])
    step = tf.placeholder(tf.float32, [])

    def classifier(self, x: Any, **kwargs: Any) -> Any:
      del kwargs
      with tf.variable_scope('classify', reuse=tf.AUTO_REUSE):
        return make_uda.perceptron(
            tf, given, tf.reshape(x, [-1, torchssl.WIDTH]))

    def guess_label(self, *args: Any, **kwargs: Any) -> Any:
      guesses.append(super().guess_label(*args, **kwargs))
      return guesses[-1]

  model = Small()
  op = model.model(BATCH, RATE, 0.0, 0.999, 0.75, WEIGHT, warmup_kimg=1,
                   nu=VIEWS)
  losses = {name: next(
      x for x in tf.get_default_graph().get_operations()
      if x.type == 'ScalarSummary' and name in x.name).inputs[1]
            for name in ('losses/xe', 'losses/l2u')}
  n = int(given['num_labeled'])
  inputs = given['inputs']
  terms, guessed = [], []
  with tf.Session() as session:
    session.run(tf.global_variables_initializer())
    for i, (known, other) in enumerate(zip(
        torchssl.slices(n, BATCH, STEPS),
        torchssl.slices(len(inputs) - n, BATCH, STEPS), strict=True)):
      row = session.run([losses, guesses[0].p_target, op.train_op], {
          op.x: inputs[known, 0].reshape(-1, *SHAPE),
          op.y: inputs[n + other].reshape(-1, VIEWS, *SHAPE),
          op.label: given['labels'][known],
          # Ours counts a step when it is done, so that the last has the weight.
          model.step: 1024 * (i + 1) / STEPS,
          ratio: draws['ratio'].reshape(-1, 1, 1, 1),
          partners: draws['partners']})
      terms.append(row[0])
      guessed.append(row[1])
    return {**{f'after_{v.op.name.split("/")[-1]}': session.run(v)
               for v in tf.trainable_variables()},
            **{name.replace('/', '_'): np.array([row[name] for row in terms])
               for name in terms[0]}, 'guessed': np.array(guessed)}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'google-research/mixmatch', COMMIT)
  tf = make_uda.first_tensorflow()
  given = torchssl.problem(31)
  rng = np.random.default_rng(32)
  rows = BATCH * (1 + VIEWS)
  draws = {'ratio': rng.beta(0.75, 0.75, rows),
           'partners': rng.permutation(rows)}
  authors.save(out, COMMIT, rate=RATE, batch=BATCH, steps=STEPS, weight=WEIGHT,
               **given, **draws, **steps(tf, checkout, given, draws))


if __name__ == '__main__':
  main()
