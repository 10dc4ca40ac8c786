r"""FedSSL-DP: agents with labels train one after another, with noise.

Fan et al., Private Semi-Supervised Federated Learning, IJCAI 2022, algorithm
2. As printed it adds noise to the generator only. The classifier and the
discriminator learn from the same labels without noise, and shape the
generator's later gradients: then NO network released has a formal guarantee,
and the epsilon is nominal. With noise on all three networks, epsilon is a
guarantee for each labeled row of each agent: neighbouring data sets differ by
one row, and the numbers of rows are public. It covers the networks of every
round. It does not cover what else a simulation shows, which must stay secret:
its seed, from which the noise can be drawn again, and metrics of the labeled
rows, such as `labeled_accuracy`.
"""
from __future__ import annotations

from collections.abc import Callable
import functools
import math
from typing import Any, NamedTuple

import jax
from jax import lax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl import privacy
from fedjax_ssl.core import checks, sampling, tree
from fedjax_ssl.core.local_training import descend
from fedjax_ssl.core.types import Cohort, Federation, PyTree, Task
from fedjax_ssl.data import batching
from fedjax_ssl.methods.fedssl import gmixup

SCOPES = ('generator', 'all')
PARTS = ('model', 'generator', 'discriminator')


class Budget(NamedTuple):
  """The privacy budget, and how much of it is spent; steps are per agent."""

  rounds: jax.Array  # int32[], private rounds so far: those that used labels.
  allowed: jax.Array  # int32[], private rounds that stay within the budget.
  steps: jax.Array  # int32[], private steps of an agent in a private round.
  noise: jax.Array  # float32[], noise multiplier sigma.
  epsilons: jax.Array  # float32[T + 1], after 0 to T private rounds.

  @property
  def steps_now(self) -> jax.Array:
    """Returns the private steps of an agent in the coming round, int32[]."""
    return jnp.where(self.rounds < self.allowed, self.steps, 0)

  @property
  def spent(self) -> jax.Array:
    """Returns the epsilon spent so far, float32[]."""
    return self.epsilons[jnp.minimum(self.rounds, self.epsilons.shape[0] - 1)]

  def next(self) -> Budget:
    """Returns the budget after a round."""
    return self._replace(rounds=jnp.minimum(self.rounds + 1, self.allowed))


class Plan(NamedTuple):
  """The knobs of privacy; see `fedssl.fedssl`."""

  scope: str
  epsilon: float
  delta: float
  clip_norm: float
  noise_multiplier: float | None
  microbatch: int
  accountant: str
  steps: int

  def check(self, task: Task) -> None:
    """Raises ValueError, naming the knob, for what cannot be private."""
    if self.scope not in SCOPES:
      raise ValueError(f'dp_scope is {self.scope!r}; allowed are None, '
                       f'{", ".join(map(repr, SCOPES))}.')
    task.horizon(f'dp_scope={self.scope!r}')
    if self.accountant not in privacy.ACCOUNTANTS:
      raise ValueError(f'accountant is {self.accountant!r}; allowed are '
                       f'{", ".join(privacy.ACCOUNTANTS)}.')
    if task.labels_at == 'server':
      raise checks.FieldError('labels_at', 'server', 'dp_scope protects the '
                              'labels of agents; give clients.')
    if task.model.norm in ('batch', 'static'):
      raise checks.FieldError('norm', task.model.norm, 'dp_scope cannot bound '
                              'what a row does under it; give none or group.')

  @property
  def clip_norms(self) -> dict[str, float]:
    """Returns C_p of each network; for those with noise squares sum to C^2."""
    if self.scope == 'generator':
      return {**dict.fromkeys(PARTS, math.inf), 'generator': self.clip_norm}
    return dict.fromkeys(PARTS, self.clip_norm / math.sqrt(len(PARTS)))

  def budget(self, task: Task, federation: Federation) -> Budget:
    """Solves for the noise and tabulates epsilon, on the host.

    A row is on one client, so only that client's steps spend its epsilon. The
    client with the fewest rows draws each of them most often and has the
    largest epsilon, so the table is made for it. A round's private steps are
    taken only if the budget has room for all of them.
    """
    first = _num_holders(federation)
    counts = np.asarray(federation.clients.num_labeled)
    if counts[first:].any():
      raise ValueError(
          f"dp_scope takes labels of the first {first} clients, and client "
          f"{first + int(np.argmax(counts[first:] > 0))} holds some; give "
          "labels='few'.")
    if task.cohort_size < federation.num_clients:
      raise checks.FieldError(
          'cohort_size', task.cohort_size, 'dp_scope takes all '
          f'{federation.num_clients} clients in every round.')
    shards = jax.tree.map(np.asarray, federation.clients)
    holders = counts[counts > 0]
    fewest = int(holders.min()) if holders.size else 1
    rate = min(1.0, task.labeled_batch / fewest)
    # A finished run is read back without labels; then only shapes matter.
    steps = self.steps if holders.size else 0
    if holders.size and not steps:
      with jax.ensure_compile_time_eval():  # Also where shapes are traced.
        steps = int(np.max(jax.vmap(lambda shard: batching.num_steps(
            task, shard, 'labeled'))(shards)))
    planned = task.horizon(f'dp_scope={self.scope!r}')
    total = planned * steps
    sigma = self.noise_multiplier
    if sigma is None:
      sigma = privacy.noise_multiplier(
          self.epsilon, rate, total, delta=self.delta,
          accountant=self.accountant)
    table = privacy.spending(
        sigma, rate, steps, planned, delta=self.delta,
        accountant=self.accountant)
    within = np.flatnonzero(table <= np.float32(self.epsilon))
    return Budget(jnp.int32(0), jnp.int32(within[-1]), jnp.int32(steps),
                  jnp.float32(sigma), jnp.asarray(table))


def _num_holders(federation: Federation) -> int:
  """Returns how many clients hold labels; they are the first ones."""
  size, total = federation.num_labeled_clients, federation.num_clients
  if not 0 < size < total:
    raise checks.FieldError(
        'num_labeled_clients', size, 'dp_scope takes clients with all their '
        f'labels in turn, then those without any: give 1 to {total - 1}, in a '
        'setting that has such clients.')
  return size


def in_turn(state: Any, federation: Federation, key: jax.Array) -> Cohort:
  """Samples the clients with labels in random order, each as its own group."""
  return sampling.one_by_one(sampling.labeled_clients(
      _num_holders(federation)))(state, federation, key)


def without_labels(state: Any, federation: Federation, key: jax.Array
                   ) -> Cohort:
  """Samples all other clients, in one group."""
  size = federation.num_clients - federation.num_labeled_clients
  return sampling.unlabeled_clients(size)(state, federation, key)


def train(task: Task, problem: gmixup.Problem, plan: Plan, nets: gmixup.Nets,
          optimizers: dict[str, optax.GradientTransformation], client: Any,
          steps: jax.Array, noise: jax.Array, key: jax.Array) -> gmixup.Nets:
  """Does the private steps of one agent on its labeled rows.

  A step draws its rows once, then updates D, then F and G together. The noise
  of all three has the same size, and their gradients are clipped to norms
  whose squares sum to C^2. So the step as a whole is one Gaussian mechanism of
  sensitivity C, although F and G are trained after D has moved. A network
  without noise follows the mean over the rows, as without privacy. If only G
  has noise, F and D then go on without G, up to the usual number of steps.

  Args:
    task: its labeled batch is the expected size of a step.
    problem: what the costs of the networks depend on.
    plan: scope and clipping.
    nets: where to begin.
    optimizers: by network.
    client: the agent.
    steps: int32[]; with 0 no labeled row is read.
    noise: float32[], sigma.
    key: PRNG key.

  Returns:
    The networks after the steps.
  """
  shard, width = client.shard, client.shard.labeled.shape[0]
  rate = jnp.minimum(1, task.labeled_batch / jnp.maximum(shard.num_labeled, 1))
  capacity = min(width, privacy.poisson_capacity(task.labeled_batch))
  expected = jnp.maximum(rate * shard.num_labeled, 1)

  def moved(carry, cost, parts, made, key):
    """Does a gradient step of the networks in `parts` on one cost."""
    nets, states = carry
    held = {'model': nets.model.params, 'generator': nets.generator,
            'discriminator': nets.discriminator}
    found = _gradients(plan, cost, {k: held[k] for k in parts}, made, noise,
                       expected, key)
    for name, part in found.items():
      held[name], state = descend(
          optimizers[name], part, states[name], held[name])
      states = {**states, name: state}
    return nets._replace(
        model=nets.model._replace(params=held['model']),
        generator=held['generator'],
        discriminator=held['discriminator']), states

  def body(t, carry, parts=('model', 'generator')):
    """Does step t: draws rows, updates D, then the networks in `parts`."""
    keys = jax.random.split(jax.random.fold_in(key, t), 4)
    places, mask = privacy.poisson_rows(
        keys[0], shard.num_labeled, rate, width=width, capacity=capacity)
    batch = batching.gather(client.train, shard.labeled[places], mask)
    made = gmixup.material(problem, carry[0].model, gmixup.Rows(
        batch.inputs, batch.labels, mask, mask, jnp.ones_like(mask)), keys[1])
    if problem.choices.use_real:
      nets = carry[0]
      carry = moved(carry, lambda some, made: gmixup.discriminator_cost(
          problem, some['discriminator'], nets, made),
                    ('discriminator',), made, keys[2])
    nets = carry[0]
    return moved(carry, lambda some, made: gmixup.joint_cost(
        problem, (some.get('model', nets.model.params),
                  some.get('generator', nets.generator)), nets, made)[0],
                 parts, made, keys[3])

  states = gmixup.start(nets, optimizers)
  carry = lax.fori_loop(0, steps, body, (nets, states))
  if plan.scope == 'generator':
    usual = batching.num_steps(task, shard, 'labeled')
    carry = lax.fori_loop(steps, jnp.where(steps > 0, usual, 0),
                          functools.partial(body, parts=('model',)), carry)
  return carry[0]


def _gradients(plan: Plan, cost: Callable[..., jax.Array],
               parts: dict[str, PyTree], made: gmixup.Material,
               noise: jax.Array, expected: jax.Array, key: jax.Array
               ) -> dict[str, PyTree]:
  """Computes gradients of the networks in `parts`, by name.

  A network without noise has the gradient of the mean over the rows. A private
  one has the sum of clipped gradients of the rows, with noise, divided by the
  `expected` number of rows. `cost` is (parts, material) -> float32[].
  """
  norms = plan.clip_norms
  noisy = {k: v for k, v in parts.items() if math.isfinite(norms[k])}
  plain = {k: v for k, v in parts.items() if k not in noisy}
  out = jax.grad(cost)(plain, made) if plain else {}
  if not noisy:
    return out
  sums = privacy.clipped_sum(
      lambda row: jax.grad(cost)(noisy, jax.tree.map(lambda x: x[None], row)),
      made._replace(mask=jnp.ones_like(made.mask)), made.mask,
      clip_norm={k: norms[k] for k in noisy}, microbatch=plan.microbatch)
  keys = dict(zip(PARTS, jax.random.split(key, len(PARTS)), strict=True))
  return out | {k: tree.scale(privacy.gaussian(
      keys[k], x, noise * plan.clip_norm), 1 / expected)
                for k, x in sums.items()}
