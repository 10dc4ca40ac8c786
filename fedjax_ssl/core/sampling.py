"""Who takes part in a round: functions (state, federation, key) -> Cohort."""
from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp

from fedjax_ssl.core.types import Cohort, Federation, State

# With at least this many ids for each slot, only a few ids are shuffled.
_MANY = 32

Sampler = Callable[[State, Federation, jax.Array], Cohort]


def _checked(size: int, population: int, what: str) -> int:
  if not 1 <= size <= population:
    raise ValueError(f'A cohort of {size} was asked for, but there are '
                     f'{population} {what} to draw from.')
  return size


def _draw(key: jax.Array, first: int, last: int, size: int) -> jax.Array:
  """int32[size] distinct ids in [first, last), each order equally likely."""
  total = last - first
  if size * _MANY <= total:
    return first + _few_of_many(key, total, size)
  ids = jax.random.permutation(key, jnp.arange(first, last, dtype=jnp.int32))
  return ids[:size]


def _few_of_many(key: jax.Array, total: int, size: int) -> jax.Array:
  """int32[size], the first places of a Fisher-Yates shuffle of [0, total).

  Step i swaps place i with a place drawn from [i, total). A permutation sorts
  all ids, which makes a round with 100,000 clients a third longer; here only
  the swaps are kept, and all steps are followed at once.
  """
  steps = jnp.arange(size, dtype=jnp.int32)
  places = jax.random.randint(key, (size,), steps, total)
  # Step i moves what lies at place i. That is i itself, or what the last
  # earlier step that drew place i had moved there, and so on.
  moved = jnp.full(size, -1, jnp.int32).at[
      jnp.where(places == steps, size, places)].max(steps, mode='drop')
  moved = jnp.where(moved < 0, steps, moved)
  for _ in range((size - 1).bit_length()):  # Twice as far back each time.
    moved = moved[moved]
  # What step i takes is its place's own id, or what the last earlier step with
  # the same place left there.
  order = jnp.argsort(places, stable=True)
  same = places[order[1:]] == places[order[:-1]]
  before = jnp.full(size, -1, jnp.int32).at[order[1:]].set(
      jnp.where(same, order[:-1], -1))
  return jnp.where(before < 0, places, moved[before])


def _cohort(ids: jax.Array) -> Cohort:
  return Cohort(ids, jnp.ones(ids.shape, bool))


def uniform(size: int) -> Sampler:
  """Draws `size` clients uniformly without replacement, one group.

  Args:
    size: S; N is everyone.

  Returns:
    A sampler; it raises ValueError if the federation has fewer clients.
  """
  return groups(1, size)


def groups(num_groups: int, size: int) -> Sampler:
  """Draws `num_groups` groups of `size` clients, each without replacement.

  A client may be in several groups. With fewer than 32 clients for each slot
  the draws equal those of `aggregation.sample_sub_consensus`, which this layer
  must not import.
  """
  def sample(state: State, federation: Federation, key: jax.Array) -> Cohort:
    del state
    total = federation.num_clients
    _checked(size, total, 'clients')
    keys = jax.random.split(key, num_groups)
    return _cohort(jax.vmap(lambda k: _draw(k, 0, total, size))(keys))
  return sample


def split(num_groups: int, size: int) -> Sampler:
  """Draws `size` clients and deals them to groups at random, evenly.

  Who is in a group with whom does not depend on the order in which clients are
  drawn, nor on who of them is active.

  Args:
    num_groups: G, at most `size`. Their sizes differ by one at most.
    size: clients of all groups together; N is everyone.

  Returns:
    A sampler of G groups of ceil(size / G) slots.

  Raises:
    ValueError: if there are more groups than clients.
  """
  if num_groups > size:
    raise ValueError(f'{num_groups} groups were asked for; a cohort of {size} '
                     f'clients has at most {size}.')
  draw = groups(1, size)

  def sample(state: State, federation: Federation, key: jax.Array) -> Cohort:
    ids, active = (x[0] for x in draw(state, federation, key))
    deal = jax.random.fold_in(key, 1)
    luck = jax.vmap(lambda i: jax.random.uniform(
        jax.random.fold_in(deal, i)))(ids)
    order = jnp.argsort(luck, stable=True)
    empty = (0, -ids.shape[0] % num_groups)
    ids = jnp.pad(ids[order], empty, constant_values=federation.num_clients)
    active = jnp.pad(active[order], empty)
    return Cohort(*(x.reshape(-1, num_groups).T for x in (ids, active)))
  return sample


def everyone() -> Sampler:
  """Takes all clients, in the order of their ids."""
  def sample(state: State, federation: Federation, key: jax.Array) -> Cohort:
    del state, key
    return _cohort(jnp.arange(federation.num_clients, dtype=jnp.int32)[None])
  return sample


def _num_labeled(federation: Federation) -> int:
  if federation.num_labeled_clients < 0:
    raise ValueError('Sampling by role needs num_labeled_clients >= 0, the '
                     'number of clients that hold labels.')
  return federation.num_labeled_clients


def labeled_clients(size: int) -> Sampler:
  """Draws among the clients that hold labels: the first of the federation.

  Args:
    size: S.

  Returns:
    A sampler; it raises ValueError if fewer clients hold labels.
  """
  def sample(state: State, federation: Federation, key: jax.Array) -> Cohort:
    del state
    last = _num_labeled(federation)
    return _cohort(_draw(
        key, 0, last, _checked(size, last, 'labeled clients'))[None])
  return sample


def one_by_one(sampler: Sampler) -> Sampler:
  """Makes each client a group of its own, for a relay from one to the next."""
  def sample(state: State, federation: Federation, key: jax.Array) -> Cohort:
    cohort: Cohort = jax.tree.map(
        lambda x: x.reshape(-1, 1), sampler(state, federation, key))
    return cohort
  return sample


def unlabeled_clients(size: int) -> Sampler:
  """Draws among the clients that hold no labels; see `labeled_clients`."""
  def sample(state: State, federation: Federation, key: jax.Array) -> Cohort:
    del state
    first, last = _num_labeled(federation), federation.num_clients
    _checked(size, last - first, 'unlabeled clients')
    return _cohort(_draw(key, first, last, size)[None])
  return sample
