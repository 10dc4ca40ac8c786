"""Rounds of methods with labels at the server in which nothing is random."""
from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import methods
from tests import toy

RATE = 0.3


def same(key, inputs):
  """No view."""
  del key
  return inputs


def sgd(round_):
  """No momentum, at `RATE`."""
  del round_
  return optax.sgd(RATE)


def task(model='linear', **changes):
  """Full batches of the rows themselves, and everyone."""
  return toy.task(model, **{
      'labels_at': 'server', 'weak': same, 'labeled_batch': 32,
      'unlabeled_batch': 12, 'cohort_size': toy.NUM_CLIENTS,
      'optimizer': sgd, **changes})


# Tests that come one after another ask for the same ones.
@functools.lru_cache(16)
def _program(text, task):
  """A method and its compiled round."""
  made = methods.make(text, task)
  return made, jax.jit(made.round)


def rounds(key, text, count, task):
  """The first state, the last one, and the last metrics."""
  federation, _ = toy.federation(task.labels_at)
  made, run = _program(text, task)
  first = state = made.init(key, federation)
  for i in range(count):
    state, metrics = run(state, federation, jnp.int32(i),
                         jax.random.fold_in(key, i))
  return first, state, metrics
