"""Asks AdaMatch's authors' code what it computes.

google-research/adamatch at 7a0b40cf2f23630836e13f4e80f7ed92629647d3: eight
steps of the class AdaMatch of semi_supervised/adamatch.py, on a small network
with batch norm. The shares by which it blends logits are drawn once, not in
each step. In the repository's root, with objax 1.8 and jax 0.4.30:

python -m tests.oracles.make_adamatch_code --checkout=DIR \
    --out=tests/oracles/adamatch_code.npz
"""
from __future__ import annotations

from collections.abc import Callable
import importlib
import pathlib
import types
from typing import Any

import numpy as np

from tests.oracles import authors

COMMIT = '7a0b40cf2f23630836e13f4e80f7ed92629647d3'
WIDTH, HIDDEN, CLASSES = 6, 5, 4
LABELED, UNLABELED = 8, 24  # Rows.
LABELED_BATCH, UNLABELED_BATCH, STEPS = 4, 8, 8
RATE, WEIGHT, THRESHOLD = 0.1, 1.0, 0.9
MOMENTUM, DECAY = 0.9, 0.0  # Theirs, and no weight decay.


def draw(rng: np.random.Generator) -> dict[str, np.ndarray]:
  """Draws rows, [D, 2, d], weak and strong views; the labeled ones first."""
  labels = rng.integers(0, CLASSES, LABELED + UNLABELED)
  centers = rng.normal(size=(CLASSES, WIDTH)) * 1.5
  clean = centers[labels] + rng.normal(size=(len(labels), WIDTH)) * 0.6
  views = clean[:, None] + rng.normal(size=(len(labels), 2, WIDTH)) * [
      [0.1], [0.7]]
  return {'inputs': views, 'labels': labels}


def network(objax: Any, weights: dict[str, np.ndarray]) -> Any:
  """Makes `authors.normalized`, which reads images of one pixel."""
  class Net(objax.Module):

    def __init__(self, colors: int, nclass: int, **knobs: Any) -> None:
      del colors, nclass, knobs
      self.first = objax.nn.Linear(WIDTH, HIDDEN)
      self.norm = objax.nn.BatchNorm0D(HIDDEN, momentum=0.9, eps=1e-5)
      self.last = objax.nn.Linear(HIDDEN, CLASSES)
      for name, place in places(self).items():
        place.assign(objax_array(weights[name], place.value.shape))

    def __call__(self, x: Any, training: bool) -> Any:
      wide = self.norm(self.first(x[:, :, 0, 0]), training=training)
      return self.last(objax.functional.tanh(wide))

  def objax_array(value: np.ndarray, shape: tuple[int, ...]) -> Any:
    import jax.numpy as jnp
    return jnp.asarray(value.reshape(shape))

  return Net


def places(net: Any) -> dict[str, Any]:
  """The variables of `network` by the names of `authors.draw_normalized`."""
  return {'w0': net.first.w, 'b0': net.first.b, 'scale': net.norm.gamma,
          'bias': net.norm.beta, 'mean': net.norm.running_mean,
          'variance': net.norm.running_var, 'w1': net.last.w, 'b1': net.last.b}


def theirs(checkout: pathlib.Path, objax: Any) -> type:
  """Returns their class; its steps run one by one, on one device."""
  import jax
  import jax.numpy as jnp

  class Base(objax.Module):

    def __init__(self, nclass: int, params: dict[str, Any]) -> None:
      self.nclass, self.params = nclass, objax.util.EasyDict(params)

  schedules = authors.taken(
      checkout / 'shared' / 'train.py', ('ScheduleCos', 'ScheduleCosPhases'),
      jax=jax, jn=jnp, List=list, Tuple=tuple)
  objax.functional.parallel.pmean = lambda x: x
  return authors.taken(
      checkout / 'semi_supervised' / 'adamatch.py', ('AdaMatch',),
      TrainableSSLModule=Base, Callable=Callable, JaxArray=Any, objax=objax,
      jn=jnp, FLAGS=types.SimpleNamespace(arch='none', train_mimg=1),
      ScheduleCos=schedules.ScheduleCos,
      ScheduleCosPhases=schedules.ScheduleCosPhases,
      MyParallel=lambda function, **knobs: function,
      stop_gradient=objax.functional.stop_gradient).AdaMatch


def main() -> None:
  checkout, out = authors.arguments(
      __doc__, 'google-research/adamatch', COMMIT)
  import jax
  jax.config.update('jax_enable_x64', True)
  import jax.numpy as jnp
  objax: Any = importlib.import_module('objax')
  rng = np.random.default_rng(21)
  rows, weights = draw(rng), authors.draw_normalized(
      rng, WIDTH, HIDDEN, CLASSES, 1.5)
  shares = rng.uniform(size=(LABELED_BATCH, 2, CLASSES))  # Weak, strong.
  objax.random.uniform = lambda shape: jnp.asarray(shares).reshape(shape)
  module = theirs(checkout, objax)(
      CLASSES, network(objax, weights), lr=RATE, lr_decay=1.0, wd=DECAY,
      wu=WEIGHT, confidence=THRESHOLD, use_cr=True)
  views = jnp.asarray(rows['inputs'])[..., None, None]
  labels = jax.nn.one_hot(jnp.asarray(rows['labels']), CLASSES)
  said: list[dict[str, Any]] = []
  for step in range(STEPS):
    known = (step * LABELED_BATCH) % LABELED
    unknown = LABELED + (step * UNLABELED_BATCH) % UNLABELED
    sx = views[known:known + LABELED_BATCH]
    terms, _ = module.train_op(
        (step + 1) / STEPS * (1 << 20), sx, labels[known:known + LABELED_BATCH],
        views[unknown:unknown + UNLABELED_BATCH])
    said.append(terms)
  authors.save(
      out, COMMIT, threshold=THRESHOLD, weight=WEIGHT, rate=RATE,
      momentum=MOMENTUM, decay=DECAY, num_labeled=LABELED, steps=STEPS,
      labeled_batch=LABELED_BATCH, unlabeled_batch=UNLABELED_BATCH,
      shares=shares, **rows, **weights,
      target=np.asarray(module.stats.p_labeled.avg.value),
      seen=np.asarray(module.stats.p_unlabeled.buffer.value)[-STEPS - 1:],
      **{name.rpartition('/')[2]: np.array([float(x[name]) for x in said])
         for name in said[0]},
      **{f'after_{name}': np.asarray(place.value).reshape(weights[name].shape)
         for name, place in places(module.model).items()})


if __name__ == '__main__':
  main()
