"""Rounds of clients whose memories are set, or read."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.core import optimizers, tree
from fedjax_ssl.core.types import State
from tests import toy
from tests.methods.baselines_test import same


def after(text: str, place: str = 'clients', **kept: Any
          ) -> tuple[State, dict[str, Any]]:
  """The state after two local steps, and the metrics.

  Args:
    text: a method of `parts.averaging`.
    place: of the labels.
    **kept: what every client has kept, by name; the rest is as at the start.
  """
  federation, _ = toy.federation(place)
  method = methods.make(text, toy.task(local_steps=2, labels_at=place))
  state = method.init(toy.key(0), federation)
  if kept:
    own = state.memory.kept
    own = own._replace(**{name: jnp.broadcast_to(
        jnp.asarray(value, jnp.float32), getattr(own, name).shape)
                          for name, value in kept.items()})
    state = state._replace(memory=state.memory._replace(kept=own))
  new, metrics = jax.jit(method.round)(
      state, federation, jnp.int32(0), toy.key(1))
  return new, toy.means(metrics)


def of_one_batch(text: str) -> Iterator[tuple[Any, Any, np.ndarray]]:
  """What clients keep after one batch of all their rows, and before.

  Without learning or augmentation, so that every model is the first.

  Yields:
    For each client: its memory after, its memory before, and what the model
    says of its unlabeled rows, [U, C].
  """
  federation, _ = toy.federation()
  task = toy.task(weak=same, cohort_size=toy.NUM_CLIENTS, local_steps=1,
                  unlabeled_batch=max(toy.UNLABELED),
                  labeled_batch=max(toy.LABELED),
                  optimizer=optimizers.make('sgd', learning_rate=1e-20))
  method = methods.make(text, task)
  before = method.init(toy.key(0), federation)
  after_, _ = jax.jit(method.round)(
      before, federation, jnp.int32(0), toy.key(1))
  assert method.predict is not None
  p = np.asarray(jax.nn.softmax(method.predict(
      before.server, federation.train.inputs)))
  for client, n in enumerate(toy.UNLABELED):
    now, then = (tree.take(state.memory.kept, client)
                 for state in (after_, before))
    yield now, then, p[np.asarray(federation.clients.unlabeled)[client, :n]]
