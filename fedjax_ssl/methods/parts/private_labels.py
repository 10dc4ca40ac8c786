"""Privacy of labeled rows: the plan, its budget, and gradients with noise.

A client samples its labeled rows, clips the gradient of each and adds noise;
see `fedjax_ssl.privacy`. Epsilon is a guarantee for each labeled row of each
client: neighbouring data sets differ by one row, and the numbers of rows are
public. It covers the networks of every round. It does not cover what else a
simulation shows, which must stay secret: its seed, from which the noise can be
drawn again, and metrics of the labeled rows, such as `labeled_accuracy`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from fedjax_ssl import privacy
from fedjax_ssl.core import checks, knobs, tree
from fedjax_ssl.core.types import Batch, Examples, PyTree, Shard, Task
from fedjax_ssl.data import batching


def bounds(needs: knobs.Needs | None = None, *, or_else: str = ''
           ) -> dict[str, knobs.Bound]:
  """Returns what the knobs of a `Plan` may be, for `knobs.checked`.

  Args:
    needs: another knob without which they do nothing.
    or_else: what to write for no privacy, after a refused epsilon.
  """
  # A network without a finite norm would get no noise.
  return {
      'epsilon': knobs.Bound(above=True, needs=needs,
                             advice=f'a budget is above 0{or_else}'),
      'delta': knobs.Bound(0, 1, above=True, below=True, needs=needs),
      'clip_norm': knobs.Bound(above=True, needs=needs),
      'noise_multiplier': knobs.Bound(needs=needs, cases=(
          knobs.at(0, 'no noise, no privacy'),)),
      'microbatch': knobs.Bound(0, 2**31 - 1, whole=True, needs=needs),
      'private_steps': knobs.Bound(0, 2**31 - 1, whole=True, needs=needs)}


class Budget(NamedTuple):
  """The privacy budget, and how much of it is spent; steps are per client."""

  rounds: jax.Array  # int32[], private rounds so far: those that used labels.
  allowed: jax.Array  # int32[], private rounds that stay within the budget.
  steps: jax.Array  # int32[], private steps of a client in a private round.
  noise: jax.Array  # float32[], noise multiplier sigma.
  epsilons: jax.Array  # float32[T + 1], after 0 to T private rounds.

  @property
  def steps_now(self) -> jax.Array:
    """Returns the private steps of a client in the coming round, int32[]."""
    return jnp.where(self.rounds < self.allowed, self.steps, 0)

  @property
  def spent(self) -> jax.Array:
    """Returns the epsilon spent so far, float32[]."""
    return self.epsilons[jnp.minimum(self.rounds, self.epsilons.shape[0] - 1)]

  def next(self) -> Budget:
    """Returns the budget after a round."""
    return self._replace(rounds=jnp.minimum(self.rounds + 1, self.allowed))


class Plan(NamedTuple):
  """The knobs of privacy; `dpsgd.dpsgd` explains them."""

  asked: str  # What asks for privacy, for messages: 'dp_scope', or a method.
  epsilon: float
  delta: float
  clip_norm: float
  noise_multiplier: float | None
  microbatch: int
  accountant: str
  steps: int

  def check(self, task: Task) -> None:
    """Raises ValueError, naming the option, for what cannot be private."""
    task.horizon(self.asked)
    if self.accountant not in privacy.ACCOUNTANTS:
      raise ValueError(f'accountant is {self.accountant!r}; allowed are '
                       f'{", ".join(privacy.ACCOUNTANTS)}.')
    name = self.asked.partition('=')[0]
    if task.labels_at == 'server':
      raise checks.FieldError('labels_at', 'server', f'{name} protects the '
                              'labels of clients; give clients.')
    if task.model.norm in ('batch', 'static'):
      raise checks.FieldError('norm', task.model.norm, f'{name} cannot bound '
                              'what a row does under it; give none or group.')

  def budget(self, task: Task, shards: Shard) -> Budget:
    """Solves for the noise and tabulates epsilon, on the host.

    A row is on one client, so only that client's steps spend its epsilon. The
    client with the fewest rows draws each of them most often and has the
    largest epsilon, so the table is made for it, as if it took part in every
    round. A round's private steps are taken only if the budget has room for
    all of them.

    Args:
      task: its labeled batch is the expected size of a step.
      shards: the clients' rows, [N, ...].
    """
    shards = jax.tree.map(np.asarray, shards)
    holders = shards.num_labeled[shards.num_labeled > 0]
    fewest = int(holders.min()) if holders.size else 1
    rate = min(1.0, task.labeled_batch / fewest)
    # A finished run is read back without labels; then only shapes matter.
    steps = self.steps if holders.size else 0
    if holders.size and not steps:
      with jax.ensure_compile_time_eval():  # Also where shapes are traced.
        steps = int(np.max(jax.vmap(lambda shard: batching.num_steps(
            task, shard, 'labeled'))(shards)))
    planned = task.horizon(self.asked)
    sigma = self.noise_multiplier
    if sigma is None:
      sigma = privacy.noise_multiplier(
          self.epsilon, rate, planned * steps, delta=self.delta,
          accountant=self.accountant)
    table = privacy.spending(
        sigma, rate, steps, planned, delta=self.delta,
        accountant=self.accountant)
    within = np.flatnonzero(table <= np.float32(self.epsilon))
    return Budget(jnp.int32(0), jnp.int32(within[-1]), jnp.int32(steps),
                  jnp.float32(sigma), jnp.asarray(table))


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
