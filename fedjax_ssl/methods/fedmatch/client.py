"""A FedMatch client's round: what arrives, what it learns, what it sends."""
from __future__ import annotations

import functools
from typing import NamedTuple

import jax
from jax import lax
import jax.numpy as jnp

from fedjax_ssl import sparse
from fedjax_ssl.core import client_weights, local_training, tree
from fedjax_ssl.core.types import Client, PyTree, Task, Update, Variables
from fedjax_ssl.data import batching
from fedjax_ssl.methods.fedmatch import helpers, local_step
from fedjax_ssl.methods.fedmatch.settings import Settings
from fedjax_ssl.methods.parts import plateau

# The metric by which the server ranks and weighs clients.
SCORE = 'client_val_accuracy'

Parts = tuple[PyTree, PyTree]  # sigma and psi.


class Payload(NamedTuple):
  """What a client receives."""

  sigma: PyTree
  psi: PyTree
  stats: PyTree  # Normalization statistics, of networks that have some.
  agents: helpers.Helpers | None
  factor: jax.Array | None  # On the learning rate, if the server sets it.


class Message(NamedTuple):
  """What the server holds of a client after its update, minus the payload."""

  sigma: PyTree  # None where it is not sent.
  psi: PyTree
  stats: PyTree


class Memory(NamedTuple):
  """What stays on a client; None where it is not needed."""

  rate: plateau.Plateau | None
  copy: Parts | None  # As last sent, which the server holds too.
  model: Variables | None  # theta as last sent.


def received(s: Settings, payload: Payload, client: Client, due: jax.Array
            ) -> tuple[Parts, helpers.Helpers | None, jax.Array]:
  """Returns what a client holds after the server has sent, and what that costs.

  Costs are counted as in the authors' code: the numbers of sigma and psi that
  `sending` sends, and the helpers in rounds that have some. With
  sending='differences' the first round costs two dense models instead, or one
  if psi is the whole model, or always 0. Of a helper's psi only numbers that
  are not 0 count. With sending='differences' they must also differ from what
  the client itself sent last. If the client holds only what was sent
  (exact_down=False), a number of a helper that has become 0 must be sent too,
  and counts. A sigma that is always 0 does not count.

  Args:
    s: settings.
    payload: what the server sends.
    client: its memory has what it sent last; before that, the initial values.
    due: bool[], whether this round has helpers.

  Returns:
    sigma and psi as the client holds them, its helpers, and float32[], how
    many numbers were sent.
  """
  new = (payload.sigma, payload.psi)
  whole = sparse.size(payload.psi if s.undivided else new)
  agents = payload.agents
  if s.sending == 'values':
    psi = sparse.cut(payload.psi, s.psi_threshold)
    held = (payload.sigma, psi)
    count = whole - sparse.size(psi) + sparse.num_nonzero(psi)
    def one(psi):
      return psi, sparse.num_nonzero(psi)
  else:
    copy, threshold = client.memory.copy, s.delta_threshold
    held, count = sparse.receive(copy, new, threshold=threshold)
    own = sparse.cut(copy[1], s.psi_threshold)
    if s.exact_down:
      count = sparse.receive((copy[0], own), (
          new[0], sparse.cut(new[1], s.psi_threshold)), threshold=threshold)[1]
    held = tree.where(client.round == 0, new, held)
    count = jnp.where(client.round == 0, whole if s.sends_psi else
                      sparse.size(payload.sigma), count)
    def one(psi):
      arrived, number = sparse.receive(copy[1], psi, threshold=threshold)
      if s.exact_down:
        number = sparse.num_nonzero(jax.tree.map(
            lambda x, own: jnp.where(jnp.abs(x - own) <= threshold, 0, x),
            sparse.cut(psi, s.psi_threshold), own))
      return arrived, number
  count += sparse.size(payload.stats)
  if agents is not None:
    arrived, each = jax.vmap(one)(agents.psi)
    count += jnp.where(due, jnp.sum(agents.present * each), 0)
    if not s.exact_down:
      agents = agents._replace(psi=arrived)
  return (new if s.exact_down else held, agents,
          jnp.asarray(count, jnp.float32))


def sent_to_server(s: Settings, held: Parts, trained: Parts
              ) -> tuple[Parts, jax.Array]:
  """Returns what the server holds after a client has sent, and what that costs.

  Args:
    s: settings.
    held: sigma and psi that both client and server have.
    trained: sigma and psi after training.

  Returns:
    sigma and psi as the server then has them, and float32[], how many numbers
    were sent; statistics of normalization are not counted here.
  """
  sigma, psi = trained
  count = jnp.float32(0)
  if s.sends_psi:
    psi = sparse.cut(psi, s.psi_threshold)
    if s.sending == 'values':
      psi = sparse.keep_largest(psi, s.density)
      count += sparse.num_nonzero(psi)
    else:
      largest = sparse.keep_largest(tree.subtract(psi, held[1]), s.density)
      psi = jax.tree.map(lambda new, old, move: jnp.where(move != 0, new, old),
                         psi, held[1], largest)
      psi, number = sparse.receive(held[1], psi, threshold=s.delta_threshold)
      count += number
  if s.sends_sigma and s.sending == 'values':
    count += sparse.size(sigma)
  elif s.sends_sigma:
    sigma, number = sparse.receive(held[0], sigma, threshold=s.delta_threshold)
    count += number
  return (sigma, psi), count


def panel(task: Task, s: Settings, sigma: PyTree, stats: PyTree,
          agents: helpers.Helpers | None, due: jax.Array
          ) -> local_step.Panel | None:
  """Makes the function that predicts with the helpers, in rounds with helpers.

  A helper's model is the received sigma plus another client's psi; it is not
  trained.
  """
  if agents is None:
    return None
  def ask(inputs):
    return lax.map(lambda psi: task.apply(local_step.whole(
        sigma, psi, stats), inputs), agents.psi)
  def nobody(inputs):
    return jnp.zeros(
        (s.weights.num_helpers, inputs.shape[0], task.num_classes))
  if s.helper_interval == 1:
    return ask
  return lambda inputs: lax.cond(due, ask, nobody, inputs)


def update(task: Task, s: Settings, payload: Payload, client: Client,
           key: jax.Array) -> Update:
  """Does one client's round; its update weighs 0 if no row of it is used."""
  order_key, step_key = jax.random.split(key)
  memory = client.memory
  due = (client.round + 1) % s.helper_interval == 0
  held, agents, down = received(s, payload, client, due)
  factor = memory.rate.factor if memory.rate is not None else payload.factor
  optimizer = task.optimizer(client.round)
  step = functools.partial(
      local_step.step, task, optimizer=optimizer, weights=s.weights,
      factor=1.0 if factor is None else factor,
      panel=panel(task, s, held[0], payload.stats, agents, due),
      present=None if agents is None else jnp.where(due, agents.present, 0),
      undivided=s.undivided)
  learner, metrics = local_training.train(
      step, local_step.start(*held, payload.stats, optimizer),
      batching.batches(task, client.train, client.shard, order_key, s.streams,
                       client.round), step_key)
  sent, up = sent_to_server(s, held, (learner.sigma, learner.psi))
  up += sparse.size(learner.stats)
  model = local_step.whole(*sent, learner.stats)  # As the server will hold it.
  rate = memory.rate
  if s.judges:
    # The accuracy is for the server, which could measure it. It is done here
    # because clients are spread over the devices.
    metrics[SCORE], loss = plateau.validation_scores(
        task, model, client.validation)
    if rate is not None:
      if s.sending == 'differences':  # It knows those that it does not send.
        _, loss = plateau.validation_scores(task, local_step.whole(
            learner.sigma, sparse.cut(learner.psi, s.psi_threshold),
            learner.stats), client.validation)
      rate = plateau.after_loss(
          rate, loss, patience=s.patience, epochs=task.epochs_a_round)
  size = sparse.size((payload.sigma, payload.stats))
  metrics |= {'cost_up': 100 * up / size, 'cost_down': 100 * down / size}
  after = Memory(rate, sent if s.copies else None,
                 model if s.keep_local else None)
  weight = client_weights.client_weight(
      client.shard, s.streams, weighting='uniform',
      labeled_client_weight=s.labeled_client_weight)
  took_part = weight > 0
  sigma, psi = tree.subtract(sent, (payload.sigma, payload.psi))
  message = Message(sigma if s.sends_sigma else None,
                    psi if s.sends_psi else None,
                    tree.subtract(learner.stats, payload.stats))
  return Update(message, weight, tree.where(took_part, after, memory),
                metrics, up, down)
