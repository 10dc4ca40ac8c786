r"""FedSSL and FedSSL-DP: MixUp across agents through a shared generator.

Fan, Hu and Huang, Private Semi-Supervised Federated Learning, IJCAI 2022; no
code was published. Classifier F, conditional generator G and discriminator D
are trained at every agent and averaged.

See `gmixup` for what they minimise and `private_agents` for the private variant
and what it guarantees.

The paper does not state the following, which we chose. The layers of G and D
are those of `models.gan`, and lambda blends their features by its own value.
Their optimizer is Adam with a first moment of 0.5, started anew every round as
F's is. G has one update a batch, which joins G-Reg and G-MixUp. The blends of
equation 6 are drawn as in equation 4. K, Z, alpha, the size of the noise, and
how F learns from real rows are knobs; so are formulas that can be read in two
ways.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import aggregation
from fedjax_ssl.core import (
    client_weights,
    knobs,
    local_training,
    rounds,
    tree,
)
from fedjax_ssl.core.types import (
  Array,
  Client,
  Context,
  Examples,
  Federation,
  Method,
  Metrics,
  PyTree,
  Shard,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.fedssl import gmixup, private_agents
from fedjax_ssl.methods.parts import assemble, network, private_labels
from fedjax_ssl.models import gan

_PICTURE_BLENDS = (1.0, 0.75, 0.5, 0.25, 0.0)


class Server(NamedTuple):
  """The server's record: three networks and, under privacy, the budget."""

  model: Variables
  generator: PyTree
  discriminator: PyTree
  budget: private_labels.Budget | None = None

  @property
  def nets(self) -> gmixup.Nets:
    """Returns the three networks, which are sent."""
    return gmixup.Nets(self.model, self.generator, self.discriminator)


class _Learner(NamedTuple):
  nets: gmixup.Nets
  opt_states: dict[str, PyTree]


class _ToAgent(NamedTuple):
  """The payload of an agent with labels under privacy."""

  nets: gmixup.Nets
  terms: private_labels.Terms


class _Settings(NamedTuple):
  """The knobs of `fedssl`, resolved."""

  problem: gmixup.Problem
  scope: str | None  # The networks that have noise; None without privacy.
  plan: private_labels.Plan | None  # None without privacy.
  streams: str  # The rows that clients use in the pass without noise.
  gan_rate: float
  packed: bool
  weighting: str
  labeled_client_weight: float

  def optimizers(self, round_: Array
                 ) -> dict[str, optax.GradientTransformation]:
    """Returns the optimizer of each network in a round."""
    return {'model': self.problem.task.optimizer(round_),
            **{name: optax.adam(self.gan_rate, b1=0.5)
               for name in ('generator', 'discriminator')}}


def step(
    problem: gmixup.Problem,
    optimizers: dict[str, optax.GradientTransformation]) -> local_training.Step:
  """Makes the step of one batch: D against the blends, then F and G together.

  Args:
    problem: what the costs of the three networks depend on.
    optimizers: 'model', 'generator', 'discriminator'.

  Returns:
    (learner, rows, key) -> (learner, metrics), for `core.local_training.train`.
  """
  def update(name, grads, params, states):
    params, state = local_training.descend(
        optimizers[name], grads, states[name], params)
    return params, {**states, name: state}

  def one(learner: _Learner, rows: gmixup.Rows, key):
    nets, states = learner
    made = gmixup.material(problem, nets.model, rows, key)
    metrics: Metrics = {}
    if problem.choices.use_real:
      loss, grads = jax.value_and_grad(gmixup.discriminator_cost, 1)(
          problem, nets.discriminator, nets, made)
      metrics['discriminator_loss'] = loss
      params, states = update(
          'discriminator', grads, nets.discriminator, states)
      nets = nets._replace(discriminator=params)
    (loss, (stats, more)), grads = jax.value_and_grad(
        gmixup.joint_cost, 1, has_aux=True)(
            problem, (nets.model.params, nets.generator), nets, made)
    params, states = update('model', grads[0], nets.model.params, states)
    generator, states = update('generator', grads[1], nets.generator, states)
    stats = network.next_stats(problem.task, nets.model.stats, stats)
    nets = nets._replace(model=Variables(params, stats), generator=generator)
    return _Learner(nets, states), {
        'train_loss': loss, **metrics, **more,
        **gmixup.passes(problem, rows)}
  return one


_PRIVATE = knobs.Needs(
    'dp_scope', private_agents.SCOPES, "write dp_scope='all' or 'classifier' "
    "for training that is private, or dp_scope='generator', which guarantees "
    'nothing')


@knobs.checked(
    **private_labels.bounds(_PRIVATE, or_else='; without privacy leave epsilon '
                            'and dp_scope out'),
    alpha=knobs.Bound(0, 1e6, above=True),
    gan_rate=knobs.Bound(above=True),
    gan_width=knobs.whole(1, 1024),
    noise_size=knobs.whole(1, 65536),
    sharpening=knobs.Bound(above=True),
    dp_scope=knobs.word(*private_agents.SCOPES),
    real_data=knobs.word('labeled', 'all', 'none'),
    condition=knobs.word('mixed', 'target'),
    rec_over=knobs.word('sum', 'mean'),
    generator_loss=knobs.word('non_saturating', 'saturating', 'hinge'))
def fedssl(task: Task, *, dp_scope: str | None = None, epsilon: float = 8.0,
           delta: float = 1e-5, clip_norm: float = 1.0,
           noise_multiplier: float | None = None, microbatch: int = 0,
           accountant: str = 'rdp', private_steps: int = 0,
           use_rec: bool = True, use_real: bool = True,
           real_data: str = 'labeled', condition: str = 'mixed',
           rec_over: str = 'sum',
           generator_loss: str = 'non_saturating', num_views: int = 2,
           sharpening: float = 2.0, alpha: float = 0.75,
           noise_size: int = 100, gan_width: int = 32,
           gan_rate: float = 2e-4, packed: bool = False,
           ramp: float = 0.0, labeled_client_weight: float = 3.0,
           weighting: str = 'uniform') -> Method:
  """Trains on blends that a generator shared by all agents makes.

  Without privacy all agents of a round train at once. With it, those with
  labels train first, one after another in a random order, each starting from
  the networks of the one before. Then all others train at once, and their mean
  change is added.

  Args:
    task: the static choices. Under privacy `labeled_batch` is the expected
      size of a sampled batch, of rate labeled_batch / rows.
    dp_scope: None; 'generator', noise on G alone as in the paper, whose
      epsilon is nominal and guarantees nothing; 'all', noise on F, G and D; or
      'classifier', ours: agents with labels train F alone, with noise, and G
      and D learn from the other agents. With the last two the networks are
      (epsilon, delta)-private in the labeled rows.
    epsilon: the budget, above 0; the paper has 4, 8 and 16. Once a round would
      exceed it, labels are no longer used. Refused without `dp_scope`, as are
      the next six: they would do nothing.
    delta: of the budget, in (0, 1).
    clip_norm: C, to which a labeled row's gradient is clipped; above 0.
    noise_multiplier: sigma, above 0; None solves it from the budget, the
      sampling rate and the steps of all planned rounds.
    microbatch: rows whose gradients are held at a time; 0 is all.
    accountant: 'rdp', or 'pld', which is tighter and takes longer to start.
    private_steps: how many steps with noise an agent with labels takes in a
      round; 0 is as many as without privacy. Fewer steps need less noise each.
      With noise on G alone, F and D take all the steps that they take without
      privacy.
    use_rec: the reconstruction of equation 7; False is an ablation, in which
      `rec_over` does nothing.
    use_real: the realism of equation 6; False is an ablation, in which D does
      not train, and `condition` and `generator_loss` do nothing.
    real_data: real rows from which F learns besides the blends, which the
      equations leave open: those with 'labeled' truth, our reading; 'all', the
      others by their pseudo-labels; or 'none', which is equations 4 and 5 alone
      and refused for trained word vectors: blends do not train them.
    condition: D judges a blend beside the 'mixed' label; or the 'target'
      class, as printed, which contradicts the reconstruction where lambda is
      near 1.
    rec_over: squared error as a 'sum' over pixels, as printed, or their
      'mean'.
    generator_loss: 'non_saturating', or 'saturating' as printed, or 'hinge',
      with which D has the hinge loss too.
    num_views: K weak views behind a pseudo-label, 1 to 64.
    sharpening: Z of equation 2; 1 leaves predictions as they are.
    alpha: of Beta(alpha, alpha), above 0; the paper has it in (0, 1).
    noise_size: numbers of noise, at least 1.
    gan_width: channels of the first layers of G and D.
    gan_rate: learning rate of G and D, above 0.
    packed: labeled and unlabeled rows share max(labeled_batch,
      unlabeled_batch) places, labeled ones first. Agents that hold only one
      kind then save the masked half; agents with both see fewer unlabeled rows.
    ramp: share of the run over which the weight of pseudo-labels in F's loss
      rises linearly to its full value; 0 is the full weight at once.
    labeled_client_weight: factor on the weight of an agent that holds labels,
      above 0. 3 makes both groups count the same, as in equation 1, in all
      settings of the paper, where N_Q = 3 N_S; 1 is one agent, one vote. It
      does nothing with `dp_scope`, where these agents take turns, or with
      labels at the server.
    weighting: agents of a group count alike ('uniform'), or by their
      'examples'; with a `labeled_client_weight` of 1 by these alone.

  Returns:
    The method; its server record is `Server`.

  Raises:
    ValueError: for a number or name out of range, or a setting that privacy
      cannot have.
  """
  if ramp:
    task.horizon(f'ramp={ramp}')
  plan = None
  if dp_scope is not None:
    plan = private_labels.Plan(
        f'dp_scope={dp_scope!r}', epsilon, delta, clip_norm, noise_multiplier,
        microbatch, accountant, private_steps)
    plan.check(task)
  problem = gmixup.Problem(task, gan.make(width=gan_width), gmixup.Choices(
      num_views, sharpening, alpha, noise_size, use_real, use_rec, real_data,
      condition, rec_over, generator_loss, ramp))
  streams = 'unlabeled' if plan else task.client_streams
  s = _Settings(problem, dp_scope, plan, streams, gan_rate, packed, weighting,
                labeled_client_weight)
  return assemble.assemble(
      task, init=functools.partial(_init, s),
      client_update=functools.partial(_client_update, s), aggregate=_add_mean,
      sample=private_agents.without_labels if plan else None,
      broadcast=lambda server, client_id, group: server.nets,
      work=lambda shard: batching.num_steps(task, shard, streams),
      on_labels=functools.partial(_on_labels, s),
      before=[_private_pass(s)] if plan else (),
      pseudo_label=assemble.confident_labels(task, 0.0),
      report=(lambda server, round_: {
          'epsilon': server.budget.spent(round_)}) if plan else None,
      pictures=functools.partial(_pictures, problem))


def _init(s: _Settings, key: jax.Array, federation: Federation
          ) -> tuple[Server, PyTree]:
  task, networks, choices = s.problem
  budget = (None if s.plan is None
            else private_agents.budget(s.plan, task, federation))
  first = jnp.asarray(federation.train.inputs[:1])
  gmixup.check(s.problem, first)

  def make(key):
    keys = jax.random.split(key)
    model = task.model.init(keys[0])
    return gmixup.Nets(model, *networks.init(
        keys[1], gmixup.continuous(s.problem, model, first), task.num_classes,
        choices.noise_size))
  nets = jax.jit(make)(key)
  return Server(nets.model, nets.generator, nets.discriminator, budget), ()


def _train(s: _Settings, nets: gmixup.Nets, examples: Examples, shard: Shard,
           round_: Array, key: jax.Array, streams: str
           ) -> tuple[gmixup.Nets, Metrics]:
  """Trains for the local epochs of an agent, or the server, without noise."""
  task = s.problem.task
  order_key, step_key = jax.random.split(key)
  made = batching.batches(task, examples, shard, order_key, streams, round_)
  size = max(task.labeled_batch, made.width - task.labeled_batch)
  size = size if s.packed and streams == 'both' else made.width

  def following(cursor, t):
    cursor, pair, _ = made.next(cursor, t)
    rows = gmixup.merge(pair, size)
    return cursor, rows, rows.mask.sum()
  optimizers = s.optimizers(round_)
  learner, metrics = local_training.train(
      step(s.problem, optimizers),
      _Learner(nets, gmixup.start(nets, optimizers)),
      made._replace(width=size, next=following), step_key)
  return learner.nets, metrics


def _client_update(s: _Settings, payload: gmixup.Nets, client: Client,
                   key: jax.Array) -> Update:
  nets, metrics = _train(s, payload, client.train, client.shard, client.round,
                         key, s.streams)
  weight = client_weights.client_weight(
      client.shard, s.streams, weighting=s.weighting,
      labeled_client_weight=s.labeled_client_weight)
  return Update(tree.subtract(nets, payload), weight, client.memory, metrics)


@aggregation.linear
def _add_mean(server: Server, mean: gmixup.Nets, cohort: Any, context: Any,
              key: Any) -> tuple[Server, Metrics]:
  del cohort, context, key
  return server._replace(**tree.add(server.nets, mean)._asdict()), {}


def _on_labels(s: _Settings, server: Server, context: Context, key: jax.Array
               ) -> tuple[Server, Metrics]:
  """Trains the server's networks on its own labels."""
  nets, metrics = _train(s, server.nets, context.train, context.shard,
                         context.round, key, 'labeled')
  nets, reported = local_training.keep_if_finite(nets, server.nets, metrics)
  return server._replace(**nets._asdict()), reported


def _private_pass(s: _Settings) -> rounds.Pass:
  """Makes the pass with noise, of agents in turn."""
  task, scope, plan = s.problem.task, s.scope, s.plan
  assert scope is not None and plan is not None

  def update(payload: _ToAgent, client: Client, key) -> Update:
    nets = private_agents.train(
        s.problem, scope, plan, payload.nets, s.optimizers(client.round),
        client, payload.terms.steps_in(client.round), payload.terms.noise, key)
    # No metrics: what a loss says of private rows would carry no noise.
    return Update(tree.subtract(nets, payload.nets),
                  jnp.asarray(client.shard.num_labeled > 0, jnp.float32),
                  client.memory, {})

  def to_agent(server, client_id, group):
    del client_id, group
    return _ToAgent(server.nets, server.budget.terms)

  return rounds.client_pass(task, update, _add_mean, relay=True,
                            sample=private_agents.in_turn, broadcast=to_agent)


def _pictures(problem: gmixup.Problem, server: Server, examples: Examples,
              key: jax.Array) -> jax.Array | None:
  """Draws blends towards each class: one class a row, one blend a column.

  The columns are a real image, then lambda of 1, .75, .5, .25 and 0, which is
  generated from noise and the class alone. A row's image is the first one of
  the next class, so that the first column shows all classes.
  """
  if examples.inputs.ndim != 4:
    return None
  classes, blends = problem.task.num_classes, jnp.array(_PICTURE_BLENDS)
  first = jnp.argmax(
      jnp.asarray(examples.labels)[None] == jnp.arange(classes)[:, None], 1)
  source = jnp.roll(first, -1)
  inputs = jnp.asarray(examples.inputs)[source]
  count = classes * blends.size
  def repeat(x):
    return jnp.repeat(x, blends.size, axis=0)
  wide = repeat(inputs)
  made = gmixup.Material(
      wide, gmixup.continuous(problem, server.model, wide),
      repeat(jax.nn.one_hot(jnp.asarray(examples.labels)[source], classes)),
      repeat(jnp.eye(classes)),
      jax.random.uniform(key, (count, problem.choices.noise_size)),
      jnp.tile(blends, classes), *[jnp.ones(count)] * 3)
  fakes, = gmixup.generate(problem, server.generator, made, made.lam)
  low, high = gmixup.limits(problem, wide) or (0.0, 1.0)
  wide_range = jnp.where(high > low, high - low, 1)
  shown = jnp.concatenate([
      gmixup.continuous(problem, server.model, inputs)[:, None],
      fakes.reshape(classes, blends.size, *fakes.shape[1:])], 1)
  return jnp.clip(jnp.round(
      255 * (shown - low) / wide_range), 0, 255).astype(jnp.uint8)
