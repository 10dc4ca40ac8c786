"""Rounds of clients whose memories are read."""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import methods
from fedjax_ssl.core import optimizers, tree
from tests import toy
from tests.methods.updates import same


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
  after, _ = jax.jit(method.round)(
      before, federation, jnp.int32(0), toy.key(1))
  assert method.predict is not None
  p = np.asarray(jax.nn.softmax(method.predict(
      before.server, federation.train.inputs)))
  for client, n in enumerate(toy.UNLABELED):
    now, then = (tree.take(state.memory.kept, client)
                 for state in (after, before))
    yield now, then, p[np.asarray(federation.clients.unlabeled)[client, :n]]
