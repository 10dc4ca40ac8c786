r"""FedSSL-DP: agents with labels train one after another, with noise.

Fan et al., Private Semi-Supervised Federated Learning, IJCAI 2022, algorithm
2. As printed it adds noise to the generator only. The classifier and the
discriminator learn from the same labels without noise, and shape the
generator's later gradients: then NO network released has a formal guarantee,
and the epsilon is nominal. With noise on all three networks, or where the
classifier alone trains on labels, with noise, epsilon is the guarantee that
`parts.private_labels` describes.
"""
from __future__ import annotations

from collections.abc import Callable
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl.core import checks, local_training, sampling
from fedjax_ssl.core.local_training import descend
from fedjax_ssl.core.types import Cohort, Federation, PyTree, Task
from fedjax_ssl.data import batching
from fedjax_ssl.methods.fedssl import gmixup
from fedjax_ssl.methods.parts import private_labels

SCOPES = ('generator', 'classifier', 'all')
PARTS = ('model', 'generator', 'discriminator')


def norms(scope: str, clip_norm: float) -> dict[str, float]:
  """Returns C_p of each network that agents with labels train in a scope.

  For those with noise squares sum to C^2; infinity is no noise.
  """
  if scope == 'generator':
    return {**dict.fromkeys(PARTS, math.inf), 'generator': clip_norm}
  if scope == 'classifier':
    return {'model': clip_norm}
  return dict.fromkeys(PARTS, clip_norm / math.sqrt(len(PARTS)))


def budget(plan: private_labels.Plan, task: Task, federation: Federation
           ) -> private_labels.Budget:
  """Makes the budget of a federation; refuses one without such agents."""
  first = _num_holders(federation)
  counts = private_labels.by_task(federation).num_labeled.max(0)
  if counts[first:].any():
    raise ValueError(
        f"dp_scope takes labels of the first {first} clients, and client "
        f"{first + int(np.argmax(counts[first:] > 0))} holds some; give "
        "labels='few'.")
  if task.cohort_size < federation.num_clients:
    raise checks.FieldError(
        'cohort_size', task.cohort_size, 'dp_scope takes all '
        f'{federation.num_clients} clients in every round.')
  return plan.budget(task, federation)


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


def train(problem: gmixup.Problem, scope: str,
          plan: private_labels.Plan, nets: gmixup.Nets,
          optimizers: dict[str, optax.GradientTransformation], client: Any,
          steps: jax.Array, noise: jax.Array, key: jax.Array) -> gmixup.Nets:
  """Does the private steps of one agent on its labeled rows.

  A step draws its rows once, then updates D, then F and G together. The noise
  of all three has the same size, and their gradients are clipped to norms
  whose squares sum to C^2. So the step as a whole is one Gaussian mechanism of
  sensitivity C, although F and G are trained after D has moved. A network
  without noise follows the mean over the rows, as without privacy. If only G
  has noise, F and D then go on without G, up to the usual number of steps. If
  F alone learns from labels, G and D stay as they are here.

  Args:
    problem: what the costs of the networks depend on; the labeled batch of its
      task is the expected size of a step.
    scope: which networks have noise, one of `SCOPES`.
    plan: clipping.
    nets: where to begin.
    optimizers: by network.
    client: the agent.
    steps: int32[]; with 0 no labeled row is read.
    noise: float32[], sigma.
    key: PRNG key.

  Returns:
    The networks after the steps.
  """
  task, shard = problem.task, client.shard
  draws = private_labels.Sampling.of(task, shard)
  trained = norms(scope, plan.clip_norm)
  judges = problem.choices.use_real and 'discriminator' in trained

  def moved(carry, cost, parts, made, key):
    """Does a gradient step of the networks in `parts` on one cost."""
    nets, states = carry
    held = {'model': nets.model.params, 'generator': nets.generator,
            'discriminator': nets.discriminator}
    found = _gradients(plan, trained, cost, {k: held[k] for k in parts}, made,
                       noise, draws.expected, key)
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
    batch = draws.draw(client.train, shard, keys[0])
    made = gmixup.material(problem, carry[0].model, gmixup.Rows(
        batch.inputs, batch.labels, batch.mask, batch.mask,
        jnp.ones_like(batch.mask)), keys[1])
    if judges:
      nets = carry[0]
      carry = moved(carry, lambda some, made: gmixup.discriminator_cost(
          problem, some['discriminator'], nets, made),
                    ('discriminator',), made, keys[2])
    nets = carry[0]
    return moved(carry, lambda some, made: gmixup.joint_cost(
        problem, (some.get('model', nets.model.params),
                  some.get('generator', nets.generator)), nets, made)[0],
                 [p for p in parts if p in trained], made, keys[3])

  states = gmixup.start(nets, optimizers)
  carry = local_training.loop(0, steps, body, (nets, states))
  if scope == 'generator':  # In lanes these steps alone are shared.
    usual = batching.num_steps(task, shard, 'labeled')
    carry = local_training.loop(
        steps, jnp.where(steps > 0, usual, 0),
        functools.partial(body, parts=('model',)), carry)
  return carry[0]


def _gradients(plan: private_labels.Plan, trained: dict[str, float],
               cost: Callable[..., jax.Array], parts: dict[str, PyTree],
               made: gmixup.Material, noise: jax.Array, expected: jax.Array,
               key: jax.Array) -> dict[str, PyTree]:
  """Computes gradients of the networks in `parts`, by name.

  A network without noise has the gradient of the mean over the rows. A private
  one has the sum of clipped gradients of the rows, with noise, divided by the
  `expected` number of rows. `cost` is (parts, material) -> float32[].
  """
  noisy = {k: v for k, v in parts.items() if math.isfinite(trained[k])}
  plain = {k: v for k, v in parts.items() if k not in noisy}
  out = jax.grad(cost)(plain, made) if plain else {}
  if not noisy:
    return out
  keys = dict(zip(PARTS, jax.random.split(key, len(PARTS)), strict=True))
  return out | private_labels.noisy_means(
      plan, {k: trained[k] for k in noisy},
      lambda row: jax.grad(cost)(noisy, jax.tree.map(lambda x: x[None], row)),
      made._replace(mask=jnp.ones_like(made.mask)), made.mask, noise, expected,
      keys)
