"""DP-SGD on the clients' labels; the rows without labels need no noise.

Abadi et al., Deep Learning with Differential Privacy, CCS 2016,
https://arxiv.org/abs/1607.00133, at every client of a round, averaged as in
FedAvg.

What learns from a private model and from rows without labels alone has the same
guarantee, so it costs none of the budget. Hence a round may go on with
FixMatch, Sohn et al., NeurIPS 2020, https://arxiv.org/abs/2001.07685, whose
labels the model makes itself. Labels only and semi-supervised learning are then
compared under the same accounting.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl.core import (
  client_weights,
  knobs,
  local_training,
  rounds,
  sampling,
  tree,
)
from fedjax_ssl.core.local_training import descend, LossFn
from fedjax_ssl.core.types import (
  Client,
  Federation,
  Method,
  PyTree,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.parts import (
  assemble,
  averaging,
  objective,
  private_labels,
)

UNLABELED = ('unused', 'fixmatch')


class Server(NamedTuple):
  """The server's record."""

  model: Variables
  budget: private_labels.Budget


class _ToClient(NamedTuple):
  """The payload of a client that learns from its labels."""

  model: Variables
  terms: private_labels.Terms


_LEARNT = knobs.weight('what unlabeled rows teach')


@knobs.checked(
    **private_labels.bounds(), unlabeled=knobs.word(*UNLABELED),
    **{knob: knobs.only('unlabeled', 'fixmatch', bound) for knob, bound in {
        'threshold': knobs.CONFIDENCE, 'unlabeled_weight': _LEARNT,
        'unlabeled_rate': _LEARNT}.items()})
def dpsgd(task: Task, *, epsilon: float = 8.0, delta: float = 1e-5,
          clip_norm: float = 1.0, noise_multiplier: float | None = None,
          microbatch: int = 0, accountant: str = 'rdp', private_steps: int = 0,
          unlabeled: str = 'unused', threshold: float = 0.95,
          unlabeled_weight: float = 1.0, unlabeled_rate: float = 1.0
          ) -> Method:
  """Minimises cross entropy on labeled rows by gradients with noise.

  All clients with labels count the same in the mean, and so do all with other
  rows in that of FixMatch.

  Args:
    task: the static choices. `labeled_batch` is the expected size of a sampled
      batch, of rate labeled_batch / rows.
    epsilon: the budget, above 0, of each labeled row: what is sent and released
      hardly tells whether it was there. Once a round would exceed it, labels
      are no longer used.
    delta: of the budget, in (0, 1).
    clip_norm: C, to which a row's gradient is clipped; above 0.
    noise_multiplier: sigma, above 0; None solves it from the budget, the
      sampling rate and the steps of all planned rounds, as if every client
      took part in each. The client with the fewest labels sets it for all.
    microbatch: rows whose gradients are held at a time; 0 is all.
    accountant: 'rdp', or 'pld', which is tighter and takes longer to start.
    private_steps: how many steps with noise a client takes in a round; 0 is as
      many as the client that would take most without privacy. Fewer steps need
      less noise each.
    unlabeled: 'unused', which is labels only; or 'fixmatch': after the mean
      over the clients with labels, a cohort of its own learns from its rows
      without, and the mean of that is added.
    threshold: of FixMatch, the confidence from which on a row counts.
    unlabeled_weight: of FixMatch's loss.
    unlabeled_rate: factor on the size of FixMatch's steps; gradients with
      noise often want a larger learning rate than those without.

  Returns:
    The method; its server record is `Server`.

  Raises:
    ValueError: for a number or name out of range, or a setting that privacy
      cannot have.
  """
  plan = private_labels.Plan('dpsgd', epsilon, delta, clip_norm,
                             noise_multiplier, microbatch, accountant,
                             private_steps)
  plan.check(task)
  shared: dict[str, Any] = {
      'init': functools.partial(_init, task, plan, unlabeled != 'unused'),
      'report': lambda server, round_: {
          'epsilon': server.budget.spent(round_)}}
  private: dict[str, Any] = {
      'client_update': functools.partial(_on_labels, task, plan),
      'broadcast': lambda server, client_id, group: _ToClient(
          server.model, server.budget.terms),
      'work': functools.partial(plan.steps_of, task)}
  if unlabeled == 'unused':
    return assemble.assemble(task, **private, **shared)
  labels = rounds.client_pass(task, aggregate=assemble.add_mean, **private,
                              sample=sampling.uniform(task.cohort_size))
  return assemble.assemble(
      task, before=[labels], client_update=functools.partial(
          _without_labels, task,
          objective.fixmatch(task, threshold, unlabeled_weight),
          unlabeled_rate),
      broadcast=lambda server, client_id, group: server.model,
      work=lambda shard: batching.num_steps(task, shard, 'unlabeled'),
      pseudo_label=assemble.confident_labels(task, threshold),
      **shared)


def _init(task: Task, plan: private_labels.Plan, learns_others: bool,
          key: jax.Array, federation: Federation) -> tuple[Server, PyTree]:
  budget = plan.budget(task, federation, learns_others=learns_others)
  return Server(assemble.new_model(task, key), budget), ()


def _on_labels(task: Task, plan: private_labels.Plan, payload: _ToClient,
               client: Client, key: jax.Array) -> Update:
  """Does the private steps of a client."""
  shard, model = client.shard, payload.model
  loss_fn = averaging.supervised(task)
  draws = private_labels.Sampling.of(task, shard)
  optimizer = task.optimizer(client.round)

  def step(t, carry):
    params, state = carry
    keys = jax.random.split(jax.random.fold_in(key, t), 3)
    batch = draws.draw(client.train, shard, keys[0])

    def gradient(row):
      raw, view = row
      alone = jax.tree.map(lambda x: x[None], raw)
      def loss(params):
        pair = batching.Pair(alone._replace(mask=jnp.ones(1)), None, None)
        return loss_fn(model._replace(params=params), None, pair, view)[0]
      return {'model': jax.grad(loss)(params)}
    found = private_labels.noisy_means(
        plan, {'model': plan.clip_norm}, gradient,
        (batch, jax.random.split(keys[1], len(batch.mask))), batch.mask,
        payload.terms.noise, draws.expected, {'model': keys[2]})
    return descend(optimizer, found['model'], state, params)

  steps = jnp.where(shard.num_labeled > 0,
                    payload.terms.steps_in(client.round), 0)
  params, _ = local_training.loop(0, steps, step, (
      model.params, optimizer.init(model.params)))
  weight = client_weights.client_weight(shard, 'labeled', weighting='uniform')
  # What the loss says of the rows, or how many were drawn, has no noise; how
  # many are expected is public.
  rows = draws.expected * steps
  metrics = {'rows_used': rows, 'rows_processed': jnp.float32(
      draws.capacity * steps), 'forward_passes': rows, 'backward_passes': rows}
  return Update(tree.subtract(model._replace(params=params), model), weight,
                client.memory, metrics)


def _without_labels(task: Task, loss_fn: LossFn, rate: float,
                    payload: Variables, client: Client, key: jax.Array
                    ) -> Update:
  """Trains on the rows of a client whose labels are hidden."""
  model, _, metrics = averaging.train_locally(
      task, loss_fn, payload, client.train, client.shard, client.round, key,
      'unlabeled', factor=jnp.float32(rate))
  weight = client_weights.client_weight(client.shard, 'unlabeled',
                                        weighting='uniform')
  return Update(tree.subtract(model, payload), weight, client.memory, metrics)
