"""Helper agents of FedMatch: other clients' models, chosen by the server.

A helper is another client's psi; the client that receives it adds the sigma
that it holds. The server chooses helpers by reliability: the clients that did
best on its validation set in the last round (first version of the paper). Or it
chooses them by similarity: the clients whose predictions for a fixed noise
image are nearest to the receiver's (third version and code). Jeong et al.,
https://arxiv.org/abs/2006.12097.
"""
from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Array, PyTree, Task, Variables


class Helpers(NamedTuple):
  """The helpers that one client receives: H places; some may be empty."""

  psi: PyTree  # [H, ...]
  ids: jax.Array  # int32[H], the helpers' clients; -1 where empty.

  @property
  def present(self) -> jax.Array:
    """Returns float32[H], 1 where there is a helper."""
    return (self.ids >= 0).astype(jnp.float32)


class Ranking(NamedTuple):
  """The most reliable clients of the last round, best first.

  One more than a client receives, as no client is its own helper.
  """

  psi: PyTree  # [H + 1, ...]
  ids: jax.Array  # int32[H + 1], -1 where empty.


class Bank(NamedTuple):
  """Every client's last psi, and its model's prediction for the noise image."""

  psi: PyTree  # [N, ...]
  answers: jax.Array  # float32[N, C], probabilities.
  seen: jax.Array  # bool[N], whether the client has sent any.


def no_ranking(psi: PyTree, num_helpers: int) -> Ranking:
  """Makes an empty ranking for H helpers of the form of `psi`."""
  return Ranking(tree.zeros_like(tree.repeat(psi, num_helpers + 1)),
                 jnp.full(num_helpers + 1, -1, jnp.int32))


def rank(ranking: Ranking, psi: PyTree, ids: jax.Array, scores: jax.Array,
         active: jax.Array) -> Ranking:
  """Ranks the clients of a round; keeps the old ranking if nobody took part.

  Args:
    ranking: of the round before.
    psi: [S, ...], as the server holds them.
    ids: int32[S] clients.
    scores: float32[S]; of equals the first counts as better.
    active: bool[S], who took part.

  Returns:
    Ranking; places beyond the number that took part are empty.
  """
  places = ranking.ids.shape[0]
  order = jnp.argsort(jnp.where(active, -scores, jnp.inf), stable=True)
  slots = order[jnp.minimum(jnp.arange(places), ids.shape[0] - 1)]
  filled = active[slots] & (jnp.arange(places) < ids.shape[0])
  new = Ranking(tree.take(psi, slots), jnp.where(filled, ids[slots], -1))
  return tree.where(active.any(), new, ranking)


def most_reliable(ranking: Ranking, client_id: Array | int) -> Helpers:
  """Takes the H best clients other than the receiver."""
  num_helpers = ranking.ids.shape[0] - 1
  usable = (ranking.ids >= 0) & (ranking.ids != client_id)
  slots = jnp.argsort(~usable, stable=True)[:num_helpers]
  return Helpers(tree.take(ranking.psi, slots),
                 jnp.where(usable[slots], ranking.ids[slots], -1))


def no_bank(psi: PyTree, num_clients: int, num_classes: int) -> Bank:
  """Makes a bank in which no client has sent anything."""
  return Bank(tree.zeros_like(tree.repeat(psi, num_clients)),
              jnp.zeros((num_clients, num_classes)),
              jnp.zeros(num_clients, bool))


def report(bank: Bank, psi: PyTree, answers: jax.Array, ids: jax.Array,
           active: jax.Array) -> Bank:
  """Stores what the clients that took part have sent, [S, ...] each."""
  rows = jnp.where(active, ids, bank.seen.shape[0])
  return Bank(tree.put(bank.psi, rows, psi),
              tree.put(bank.answers, rows, answers),
              bank.seen.at[rows].set(True, mode='drop'))


def most_similar(bank: Bank, client_id: Array, num_helpers: int) -> Helpers:
  """Finds the H clients whose predictions are nearest to the client's own.

  They are compared on the noise image, for the models that clients sent last. A
  client that has sent none yet gets no helpers.
  """
  num_clients = bank.seen.shape[0]
  own = jnp.take(bank.answers, client_id, axis=0, mode='clip')
  gaps = jnp.sum(jnp.square(bank.answers - own), -1)
  usable = bank.seen & (jnp.arange(num_clients) != client_id)
  usable &= jnp.take(bank.seen, client_id, mode='clip')
  order = jnp.argsort(jnp.where(usable, gaps, jnp.inf), stable=True)
  place = jnp.arange(num_helpers)
  rows = order[jnp.minimum(place, num_clients - 1)]
  filled = usable[rows] & (place < num_clients)
  return Helpers(tree.take(bank.psi, rows),
                 jnp.where(filled, rows, -1).astype(jnp.int32))


def noise_image(like: Array) -> jax.Array:
  """Draws the image on which models are compared, the same in each round.

  Args:
    like: uint8[D, H, W, C], images of the wanted shape and type; or whole
      numbers or floats [D, ...].

  Returns:
    [1, H, W, C], from a normal distribution with mean and deviation 125,
    truncated to [0, 255]. Of floats, such as word vectors, the distribution has
    the mean and the deviation of the first 256 rows.
  """
  if jnp.issubdtype(like.dtype, jnp.floating):
    some = jnp.asarray(like[:256], jnp.float32)
    draw = jax.random.normal(jax.random.key(0), (1, *like.shape[1:]))
    return (some.mean() + some.std() * draw).astype(like.dtype)
  draw = jax.random.truncated_normal(
      jax.random.key(0), -1.0, (255 - 125) / 125, (1, *like.shape[1:]))
  return jnp.round(125 * draw + 125).astype(like.dtype)


def answer(task: Task, model: Variables, image: jax.Array) -> jax.Array:
  """Computes the model's probabilities float32[C] on one image [1, ...]."""
  return jax.nn.softmax(task.apply(model, image)[0])
