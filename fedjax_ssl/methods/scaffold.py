r"""SCAFFOLD on the labeled rows: control variates against clients' drift.

Karimireddy et al., SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning, ICML 2020, https://arxiv.org/abs/1910.06378, option II.

There :math:`c_i^+ = c_i - c + (x - y_i) / (K \eta)`. With plain gradient
descent that is the mean of the gradients of a client's steps. It is computed
as this mean here, so that it is right with momentum or a falling rate too.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import aggregation
from fedjax_ssl.core import (
  checks,
  client_weights,
  knobs,
  local_training,
  tree,
)
from fedjax_ssl.core.local_training import Given
from fedjax_ssl.core.types import (
  Client,
  Federation,
  Method,
  Metrics,
  PyTree,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import assemble, averaging


class Server(NamedTuple):
  """The server's record."""

  model: Variables
  control: PyTree  # c, of the form of the model's parameters.
  num_clients: jax.Array  # float32[], N, the number of clients with labels.


class Counts(NamedTuple):
  """What a client sends beside its model."""

  change: PyTree  # Of its control, divided by its weight.
  even: jax.Array  # float32[], 1 divided by its weight; 0 without labels.


@knobs.checked()
def scaffold(task: Task, *, weighting: str = 'uniform') -> Method:
  """Steps along g - c_i + c, g the gradient of cross entropy.

  The server's c moves by |S| / N times the mean change of the c_i, where S are
  the clients of the round and N is the number of all. So c stays the mean of
  the c_i, however the models are weighed. Clients without labels count neither
  in S nor in N. An attack or an `aggregator` changes only the mean of the
  models. The L2 term of an optimizer is not part of g.

  Args:
    task: the static choices; labels must be at the clients.
    weighting: clients count 'uniform', as in the paper, or by their labeled
      'examples'.

  Returns:
    The method; its server record is `Server`, a client's memory its c_i.

  Raises:
    ValueError: for an unknown weighting, or labels at the server.
  """
  checks.labels_at_clients(task.labels_at,
                           'the controls are gradients of their labels')
  return assemble.assemble(
      task, init=functools.partial(_init, task),
      client_update=functools.partial(_client_update, task, weighting),
      aggregate=_finish, broadcast=lambda server, client_id, group: server[:2],
      work=lambda shard: batching.num_steps(task, shard, 'labeled'))


def _init(task: Task, key: jax.Array, federation: Federation
          ) -> tuple[Server, PyTree]:
  model = assemble.new_model(task, key)
  zeros = tree.zeros_like(model.params)
  # [N], of a stream [T, N].
  has_labels = jnp.asarray(federation.tables.num_labeled) > 0
  count = has_labels.reshape(-1, federation.num_clients).any(0).sum()
  return (Server(model, zeros, jnp.maximum(count, 1).astype(jnp.float32)),
          tree.repeat(zeros, federation.num_clients))


def _controlled(correction: PyTree) -> optax.GradientTransformation:
  """Adds to every gradient; its state is the sum of the plain gradients."""
  def update(gradient, total, params=None):
    del params
    return tree.add(gradient, correction), tree.add(total, gradient)
  return optax.GradientTransformation(tree.zeros_like, update)


def _client_update(task: Task, weighting: str, payload: Any, client: Client,
                   key: jax.Array) -> Update:
  received, control = payload
  own = client.memory
  order_key, step_key = jax.random.split(key)
  optimizer = optax.chain(_controlled(tree.subtract(control, own)),
                          task.optimizer(client.round))
  loss_fn = averaging.keeping_stats(task, averaging.supervised(task))

  def loss(model, memory, batch, key):
    return loss_fn(model, Given(received, memory), batch, key)

  batches = batching.batches(task, client.train, client.shard, order_key,
                             'labeled', client.round)
  learner, metrics = local_training.train(
      local_training.gradient_step(loss, optimizer),
      local_training.start(received, optimizer), batches, step_key)
  weight = client_weights.client_weight(
      client.shard, 'labeled', weighting=weighting)
  mean = tree.scale(learner.opt_state[0],
                    1 / jnp.maximum(batches.num_steps, 1))
  after = tree.where(weight > 0, mean, own)
  # The round's mean is weighted, but all controls are to count the same.
  counts = client_weights.unweighted(
      Counts(tree.subtract(after, own), jnp.float32(1)), weight)
  return Update(tree.subtract(learner.model, received), weight, after, metrics,
                counts=counts)


@aggregation.linear
def _finish(server: Server, mean: Any, cohort: Any, context: Any, key: Any
            ) -> tuple[Server, Metrics]:
  del context, key
  delta, counts = mean
  share = cohort.active.sum() / server.num_clients
  share = share / jnp.where(counts.even > 0, counts.even, 1)
  return server._replace(
      model=assemble.added(server.model, delta),
      control=tree.add(server.control, tree.scale(counts.change, share))), {}
