"""Privacy of labeled rows: the plan, its budget, and gradients with noise.

A client samples its labeled rows, clips the gradient of each and adds noise;
see `fedjax_ssl.privacy`. Epsilon is a guarantee for each labeled row of each
client. Neighbouring data sets differ in one row, which one of them has and
which counts as absent in the other: its gradient is zero there, while the
numbers of rows, on which rates and divisors depend, are public. To exchange a
row, or its label, is two such changes and costs more than epsilon.

The guarantee covers the networks of every round, and every client's update. It
does not cover what else a simulation shows or reads, which must stay secret or
come from other data: its seed, from which the noise can be drawn again; metrics
and facts of the labeled rows, such as `labeled_accuracy` and which classes
which client holds; mean and standard deviation of the pixels, and the
vocabulary of texts. Further runs and searches for knobs on the same rows spend
their own epsilon, and bounds, which train without noise, keep nothing private.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import privacy
from fedjax_ssl.core import checks, knobs, tree
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Examples,
  Federation,
  PyTree,
  Shard,
  Task,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import network


def bounds(needs: knobs.Needs | None = None, *, or_else: str = ''
           ) -> dict[str, knobs.Bound | knobs.Word]:
  """Returns what the knobs of a `Plan` may be, for `knobs.checked`.

  Args:
    needs: another knob without which they do nothing.
    or_else: what to write for no privacy, after a refused epsilon.
  """
  # A clip_norm of inf is how `private_agents` marks a network without noise.
  return {
      'accountant': knobs.Word(tuple(privacy.ACCOUNTANTS), needs),
      'epsilon': knobs.Bound(above=True, needs=needs,
                             advice=f'a budget is above 0{or_else}'),
      'delta': knobs.Bound(0, 1, above=True, below=True, needs=needs),
      'clip_norm': knobs.Bound(above=True, needs=needs),
      'noise_multiplier': knobs.Bound(above=True, needs=needs, advice='without '
                                      'noise no budget holds any step'),
      'microbatch': knobs.Bound(0, 2**31 - 1, whole=True, needs=needs),
      'private_steps': knobs.Bound(0, 2**31 - 1, whole=True, needs=needs)}


class Terms(NamedTuple):
  """What a client is told of the budget; steps are per client."""

  allowed: jax.Array  # int32[], private rounds that stay within the budget.
  steps: jax.Array  # int32[], private steps of a client in a private round.
  noise: jax.Array  # float32[], noise multiplier sigma.

  def steps_in(self, round_: Array) -> jax.Array:
    """Returns the private steps of a client in a round from 0 on, int32[]."""
    return jnp.where(round_ < self.allowed, self.steps, 0)


class Budget(NamedTuple):
  """The privacy budget; every round spends some of it until it is used up."""

  terms: Terms
  epsilons: jax.Array  # float32[T + 1], after 0 to T private rounds.

  def spent(self, rounds: Array) -> jax.Array:
    """Returns the epsilon spent after so many rounds, float32[].

    A round counts even if all of its updates were refused: labels were read.
    """
    return self.epsilons[jnp.minimum(rounds, self.terms.allowed)]


class Plan(NamedTuple):
  """The knobs of privacy; `dpsgd.dpsgd` explains them."""

  asked: str  # What asks for privacy: a knob with its value, or a method.
  epsilon: float
  delta: float
  clip_norm: float
  noise_multiplier: float | None
  microbatch: int
  accountant: str
  steps: int

  @property
  def name(self) -> str:
    """Returns what asks for privacy, without a value, for messages."""
    return self.asked.partition('=')[0]

  def check(self, task: Task) -> None:
    """Raises ValueError, naming the option, for what cannot be private."""
    task.horizon(self.asked)
    if task.labels_at == 'server':
      raise checks.FieldError('labels_at', 'server', f'{self.name} protects '
                              'the labels of clients; give clients.')
    if network.is_coupled(task):
      raise checks.FieldError('norm', task.model.norm, f'{self.name} cannot '
                              'bound what a row does under it; give none or '
                              'group.')

  def steps_of(self, task: Task, shard: Shard) -> jax.Array:
    """Returns the private steps that a client alone would take, int32[]."""
    usual = batching.num_steps(task, shard, 'labeled')
    return jnp.where(usual > 0, self.steps or usual, 0)

  def budget(self, task: Task, federation: Federation, *,
             learns_others: bool = True) -> Budget:
    """Solves for the noise and tabulates epsilon, on the host.

    A row is on one client, so only that client's steps spend its epsilon. All
    clients take as many steps as the one that would take most. The client with
    the fewest rows draws each of them most often and has the largest epsilon,
    so the table is made for it, as if it took part in every round. A round's
    private steps are taken only if the budget has room for all of them.

    Args:
      task: its labeled batch is the expected size of a step.
      federation: the clients' rows; of a stream, those of every task.
      learns_others: whether unlabeled rows are learnt, without noise.

    Raises:
      ValueError: if a labeled row is elsewhere too, or the budget is too small
        for a single round.
    """
    shards = by_task(federation)
    _check_alone(self.name, shards, learns_others)
    counts = shards.num_labeled[shards.num_labeled > 0]
    fewest = int(counts.min()) if counts.size else 1
    rate = min(1.0, task.labeled_batch / fewest)
    steps = 0  # A finished run is read back without labels: only shapes matter.
    if counts.size:
      with jax.ensure_compile_time_eval():  # Also where shapes are traced.
        steps = int(np.max(jax.vmap(jax.vmap(
            lambda shard: self.steps_of(task, shard)))(shards)))
    planned = task.horizon(self.asked)
    sigma = self.noise_multiplier
    if sigma is None:
      sigma = privacy.noise_multiplier(
          self.epsilon, rate, planned * steps, delta=self.delta,
          accountant=self.accountant)
    table = privacy.spending(
        sigma, rate, steps, planned, delta=self.delta,
        accountant=self.accountant)
    allowed = int(np.flatnonzero(table <= np.float32(self.epsilon))[-1])
    if steps and not allowed:
      raise ValueError(
          f'epsilon={self.epsilon:g} does not hold the first round of {steps} '
          f'private steps with noise_multiplier={sigma:g}, so no label would '
          'be used; give a larger noise_multiplier, or leave it out.')
    return Budget(Terms(jnp.int32(allowed), jnp.int32(steps),
                        jnp.float32(sigma)), jnp.asarray(table))


def by_task(federation: Federation) -> Any:
  """Returns the clients' shards on the host, [T, N, ...]; T is 1 by default."""
  if federation.stream is not None:
    return jax.tree.map(np.asarray, federation.stream)
  return jax.tree.map(lambda x: np.asarray(x)[None], federation.clients)


def _check_alone(name: str, shards: Any, learns_others: bool) -> None:
  """Refuses labeled rows that are elsewhere too, where these are learnt."""
  def held(rows: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Returns a column of task, client and row for each row that is held."""
    real = np.arange(rows.shape[-1]) < counts[..., None]
    return np.stack([*np.nonzero(real)[:2], rows[real]])
  labeled = held(shards.labeled, shards.num_labeled)
  by_client = np.unique(labeled[1:], axis=1)
  if (np.unique(labeled, axis=1).shape != labeled.shape
      or np.unique(by_client[1]).size < by_client.shape[1]):
    raise ValueError(f'{name} accounts for labeled rows that one client holds '
                     'once, but one is there several times.')
  others = held(shards.unlabeled, shards.num_unlabeled)[2]
  if learns_others and np.intersect1d(labeled[2], others).size:
    raise ValueError(f'{name} adds noise to what labeled rows teach, but a '
                     'labeled row is among the unlabeled ones too.')


class Sampling(NamedTuple):
  """How a client samples its labeled rows, each by itself."""

  rate: jax.Array  # float32[], the chance of a row to enter a step.
  capacity: int  # Places of a batch.
  expected: jax.Array  # float32[], mean number of rows of a step.

  @classmethod
  def of(cls, task: Task, shard: Shard) -> Sampling:
    """Follows from the labeled batch, the expected size of a step."""
    rate = jnp.minimum(
        1, task.labeled_batch / jnp.maximum(shard.num_labeled, 1))
    capacity = min(shard.labeled.shape[0],
                   privacy.poisson_capacity(task.labeled_batch))
    return cls(rate, capacity, jnp.maximum(rate * shard.num_labeled, 1))

  def draw(self, examples: Examples, shard: Shard, key: jax.Array) -> Batch:
    """Draws the batch of a step."""
    places, mask = privacy.poisson_rows(
        key, shard.num_labeled, self.rate, width=shard.labeled.shape[0],
        capacity=self.capacity)
    return batching.gather(examples, shard.labeled[places], mask)


def noisy_means(plan: Plan, norms: Mapping[str, float],
                gradient: Callable[[PyTree], Mapping[str, PyTree]],
                rows: PyTree, mask: jax.Array, noise: jax.Array,
                expected: jax.Array, keys: Mapping[str, jax.Array]
                ) -> dict[str, PyTree]:
  """Computes the clipped gradients' mean with noise, by network.

  Args:
    plan: its clipping norm C; the noise of every network is sigma C.
    norms: C_p of each network; their squares sum to C^2.
    gradient: one row of `rows`, without its leading axis -> gradients by
      network.
    rows: pytree of [B, ...].
    mask: float32[B], 1 for a row that was drawn.
    noise: float32[], sigma.
    expected: float32[], what the sums are divided by.
    keys: of the noise, by network.
  """
  sums = privacy.clipped_sum(gradient, rows, mask, clip_norm=norms,
                             microbatch=plan.microbatch)
  return {name: tree.scale(privacy.gaussian(
      keys[name], part, noise * plan.clip_norm), 1 / expected)
          for name, part in sums.items()}
