"""Asks UDA's authors' code what it computes.

google-research/uda at 960684e363251772a5938451d4d2bc0f1da9e24b: the bars of
training signal annealing, and eight steps of `get_model_fn` of image/main.py,
whole, with a small network in place of theirs; once with its flags for CIFAR-10
and once with a bar and no threshold. Their code is of TensorFlow 1 and is
taken function by function. In the repository's root, with TensorFlow 2.21:

python -m tests.oracles.make_uda --checkout=DIR --out=tests/oracles/uda.npz
"""
from __future__ import annotations

import functools
import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors, torchssl

COMMIT = '960684e363251772a5938451d4d2bc0f1da9e24b'
STEPS, RATE = 8, 0.1
LABELED_BATCH, UNLABELED_BATCH = torchssl.LABELED_BATCH, 8
FLAGS = {
    'official': {'tsa': '', 'uda_confidence_thresh': 0.8,
                 'uda_softmax_temp': 0.4},
    'annealed': {'tsa': 'exp_schedule', 'uda_confidence_thresh': -1,
                 'uda_softmax_temp': -1},
}


def first_tensorflow() -> Any:
  """TensorFlow, as far as possible as it was then."""
  import tensorflow
  tf = tensorflow.compat.v1
  tf.disable_v2_behavior()
  tf.contrib = types.SimpleNamespace(tpu=types.SimpleNamespace(
      TPUEstimatorSpec=types.SimpleNamespace))
  return tf


def perceptron(tf: Any, given: dict[str, np.ndarray], inputs: Any) -> Any:
  """The network of `authors.perceptron`."""
  def variable(name: str) -> Any:
    return tf.get_variable(name, dtype=tf.float32, initializer=given[
        name].astype(np.float32))
  hidden = tf.tanh(inputs @ variable('w0') + variable('b0'))
  return hidden @ variable('w1') + variable('b1')


def bars(tf: Any, theirs: Any) -> dict[str, np.ndarray]:
  """The bars of 9 points in time, of 4 classes."""
  with tf.Graph().as_default(), tf.Session() as session:
    return {f'bars_{name}': np.array(session.run([
        theirs.get_tsa_threshold(f'{name}_schedule', t, 8, 0.25, 1)
        for t in range(9)])) for name in ('linear', 'exp', 'log')}


def steps(tf: Any, main: pathlib.Path, given: dict[str, np.ndarray],
          flags: dict[str, Any]) -> dict[str, np.ndarray]:
  """Weights after the steps, and their losses."""
  flag = types.SimpleNamespace(
      unsup_ratio=2, num_classes=torchssl.CLASSES, ent_min_coeff=0,
      unsup_coeff=1, weight_decay_rate=0.0, verbose=False,
      moving_average_decay=0.0, warmup_steps=0, train_steps=STEPS,
      learning_rate=RATE, use_tpu=False, iterations=10**6, **flags)
  theirs = authors.taken(
      main, ['get_tsa_threshold', '_kl_divergence_with_logits',
             'anneal_sup_loss', 'get_ent', 'get_model_fn'],
      tf=tf, np=np, FLAGS=flag, functools=functools,
      build_model=lambda inputs, **knobs: perceptron(tf, given, inputs),
      utils=authors.taken(main.with_name('utils.py'), ['decay_weights'],
                          tf=tf))
  n = int(given['num_labeled'])
  with tf.Graph().as_default(), tf.Session() as session:
    # Ours counts a step when it is done, so that the last one is at the end.
    count = tf.train.create_global_step()
    fed = {name: tf.placeholder(tf.float32, [None, torchssl.WIDTH])
           for name in ('image', 'ori_image', 'aug_image')}
    fed['label'] = tf.placeholder(tf.int32, [None])
    spec = theirs.get_model_fn(types.SimpleNamespace())(
        fed, None, tf.estimator_mode.TRAIN, {})
    session.run(tf.global_variables_initializer())
    session.run(count.assign(1))
    variables = {v.op.name.split('/')[-1]: v for v in tf.trainable_variables()}
    terms = []
    inputs = given['inputs']
    for known, other in zip(
        torchssl.slices(n, LABELED_BATCH, STEPS),
        torchssl.slices(len(inputs) - n, UNLABELED_BATCH, STEPS), strict=True):
      values = {'image': inputs[known, 0], 'label': given['labels'][known],
                'ori_image': inputs[n + other, 0],
                'aug_image': inputs[n + other, 1]}
      metrics = spec.training_hooks[0].tensors
      terms.append(session.run(
          [{name: metrics[name] for name in (
              'sup/sup_loss', 'unsup/loss', 'training/lr')}, spec.train_op],
          {fed[name]: value for name, value in values.items()})[0])
    return {**{f'after_{name}': v for name, v in session.run(
        variables).items()},
            **{name.replace('/', '_'): np.array([row[name] for row in terms])
               for name in terms[0]}}


def main() -> None:
  checkout, out = authors.arguments(__doc__, 'google-research/uda', COMMIT)
  tf = first_tensorflow()
  # What a training hook is given is read here; the hook itself is not run.
  tf.train = types.SimpleNamespace(**{
      name: getattr(tf.train, name) for name in (
          'MomentumOptimizer', 'get_global_step', 'create_global_step')},
      LoggingTensorHook=types.SimpleNamespace)
  tf.estimator_mode = types.SimpleNamespace(TRAIN='train', EVAL='eval')
  tf.estimator = types.SimpleNamespace(ModeKeys=tf.estimator_mode)
  path = checkout / 'image' / 'main.py'
  given = torchssl.problem(21)
  results: dict[str, np.ndarray] = {}
  for name, flags in FLAGS.items():
    results |= {f'{name}_{key}': value
                for key, value in steps(tf, path, given, flags).items()}
  authors.save(
      out, COMMIT, rate=RATE, labeled_batch=LABELED_BATCH,
      unlabeled_batch=UNLABELED_BATCH, steps=STEPS, **given, **results,
      **bars(tf, authors.taken(path, ['get_tsa_threshold'], tf=tf)))


if __name__ == '__main__':
  main()
