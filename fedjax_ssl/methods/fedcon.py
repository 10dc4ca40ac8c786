r"""FedCon: clients learn what two views have in common, the server the classes.

Long et al., FedCon: A Contrastive Framework for Federated Semi-Supervised
Learning, https://arxiv.org/abs/2109.04533. The authors' code is
zewei-long/fedcon-pytorch. Its paper was not at hand.

A network is a backbone f, all but its last layer, and this layer g. A client
receives the backbone and, by BYOL, minimises over two weak views
:math:`\alpha_1, \alpha_2` of its rows

  :math:`-\frac12 \left(\cos(h(f(\alpha_1(u))), f'(\alpha_2(u)))
  + \cos(h(f(\alpha_2(u))), f'(\alpha_1(u)))\right)`,

with a projector h of its own and a target f' that follows f,
:math:`f' \to 0.999 f' + 0.001 f` after each step. Both stay on the client; one
that is new draws its projector, and takes the received backbone as its target.
The optimizer is LARS. Backbones are averaged, all clients alike. Then the
server, which alone has labels and the last layer, minimises

  :math:`\frac12 (\ell(z_1, y) + \ell(z_2, y))
  + \frac w2 (KL[z'_2 \| z_1] + KL[z'_1 \| z_2])`,

with logits z of both views, z' those of a teacher, and w rising over rounds. It
trains once more before the first round.

'paper' and 'code' differ in three things. In 'paper' the teacher follows the
network, with the decay 0.9996 of the code's teacher, which there is never
asked: z' are the network's own logits. In 'code' LARS has no momentum, as its
0.9 is of what was never stored. And a client's rate is that of a schedule that
begins anew in each round: the first step has all of it, the second none, and
from there it rises to a tenth.

The code stores projector and target of a client under a wrong name, by which
one that comes again takes up those of whoever trained before it; here each has
its own. Its last layer is a network of two or three. Its teacher's decay rises
to 1 with a cosine over 20 of its rounds, and falls again over the next 20. It
draws other units in the teacher's pass where the network has dropout, and that
pass moves running statistics once more. It drops batches that are not full, and
has the server average what a client had after each of its epochs; with one
epoch that is the same.

FedSiam, https://arxiv.org/abs/2012.03292, is another method: its online network
learns from its own target's classes, and sends those layers that have moved
most.

Grill et al., BYOL, https://arxiv.org/abs/2006.07733. You et al., LARS,
https://arxiv.org/abs/1708.03888.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import (
  checks,
  client_weights,
  knobs,
  local_training,
  rounds,
  tree,
)
from fedjax_ssl.core.local_training import Aux, Learner, LossFn, Step
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Client,
  Context,
  Federation,
  Method,
  Metrics,
  Number,
  PyTree,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.data.batching import Pair
from fedjax_ssl.methods.parts import (
  all_statistics,
  assemble,
  averaging,
  network,
  objective,
)
from fedjax_ssl.models import last_layer, projector

_PROFILES: dict[str, dict[str, Any]] = {
    'paper': {'teacher_decay': 0.9996, 'restarts': False,
              'contrast_momentum': 0.9},
    'code': {'teacher_decay': 0.0, 'restarts': True,
             'contrast_momentum': 0.0}}
# Of LARS in the authors' code.
_WEIGHT_DECAY, _TRUST = 1.5e-6, 1e-3
_RISING = 10  # Rounds over which the schedule rises that begins anew in each.
_NORM = 'batch'  # Of the projector, whatever the network's.
_HIDDEN, _WIDENED = 12288, 8


class Server(NamedTuple):
  """The server's record."""

  model: Variables
  teacher: PyTree  # Its parameters; () where the network is its own.


class Memory(NamedTuple):
  """What stays on a client."""

  projector: Variables  # Zeros until it is drawn.
  target: PyTree  # Parameters of its backbone; they count once it `has_one`.
  has_one: jax.Array  # bool[]


class _Settings(NamedTuple):
  """`fedcon`'s knobs, settled."""

  contrast_rate: float
  contrast_momentum: float
  target_decay: float
  teacher_decay: float
  restarts: bool
  consistency_weight: float
  ramp: float
  hidden: int | None
  at_clients: bool  # Whether labels are there.


def likeness(first: tuple[Array, Array], second: tuple[Array, Array],
             mask: Array) -> jax.Array:
  r"""Computes BYOL's :math:`-\frac12 (\cos(p_1, z_2) + \cos(p_2, z_1))`.

  Args:
    first: of a view what is predicted, p float[B, F], and the target's
      features z, constants for derivatives.
    second: the same of the other view.
    mask: float32[B].

  Returns:
    float32[], the mean over rows, from -1, where all is as predicted, to 1.
  """
  (p, z), (q, y) = (map(losses.unit_rows, view) for view in (first, second))
  y, z = jax.lax.stop_gradient((y, z))
  return -losses.masked_mean((p * y + q * z).sum(-1) / 2, mask)


def restarted(rate: float, steps: Number) -> optax.Schedule:
  """Makes the authors' schedule of rates, which begins anew in each round.

  Args:
    rate: the highest.
    steps: of an epoch of the client.

  Returns:
    (step int32[]) -> float32[].
  """
  def of(step: Array) -> jax.Array:
    last = jnp.maximum(_RISING * steps - 1, 1)
    return rate * jnp.where(
        step == 0, 1.0, jnp.minimum((step - 1) / last, 1.0))
  return of


@knobs.checked(
    _PROFILES,
    contrast_rate=knobs.Bound(cases=(knobs.at(0, 'clients learn nothing from '
                                              'rows without labels'),)),
    contrast_momentum=knobs.MOMENTUM,
    target_decay=knobs.Bound(0, 1, cases=(
        knobs.at(0, 'the target is the network itself'),
        knobs.at(1, 'targets stay where they start'))),
    teacher_decay=knobs.Bound(0, 1, cases=(
        knobs.at(0, 'the teacher is the network itself'),
        knobs.at(1, 'the teacher never moves'))),
    consistency_weight=knobs.Bound(cases=(
        knobs.at(0, 'consistency of the views of labeled rows is off'),)))
def fedcon(task: Task, *, profile: str = 'paper',
           contrast_rate: float = 0.3 * 10 / 256,
           contrast_momentum: float | None = None, target_decay: float = 0.999,
           teacher_decay: float | None = None, restarts: bool | None = None,
           consistency_weight: float = 1.0, ramp: float = 0.5,
           hidden: int | None = None) -> Method:
  """Trains by BYOL at the clients, which send all but the last layer.

  Meant for labels at the server, whose optimizer is the task's. With labels at
  the clients, which the paper does not have, these receive and send the last
  layer too and take a step on their labels, as the server does there, before
  each of BYOL; the network is its own teacher, and the server does not train.
  `contrastive_loss` is BYOL's.

  Args:
    task: the static choices. The network must say what its last layer reads
      and where it is.
    profile: 'paper' or 'code', see the module's docstring. It stands for
      `contrast_momentum`, `teacher_decay` and `restarts` where they are not
      given.
    contrast_rate: of LARS at the clients; the authors' 0.3 for 256 rows, times
      the 10 of a batch of the server.
    contrast_momentum: the same.
    target_decay: of a client's target in a step.
    teacher_decay: of the server's teacher in a step; 0 is the network itself.
      With 0.9996 it takes thousands of steps to follow, more than short runs
      have, and draws the network back to where it started.
    restarts: whether a client's rate begins anew in each round: all, none, and
      then up to a tenth.
    consistency_weight: of the server's two views, in the end; 0 is off.
    ramp: share of the run over which that rises; 0 is at once. The authors' is
      100 rounds, of 150 or 200.
    hidden: numbers between the projector's two layers; None is 8 times the
      features, at most the authors' 12288.

  Returns:
    The method; its server's record is `Server`, a client's memory `Memory`.

  Raises:
    ValueError: for an unknown profile, or a network that does not say what it
      must, or where the last layer is the only one and labels at the server.
  """
  chosen = checks.profile(_PROFILES, profile, teacher_decay=teacher_decay,
                          restarts=restarts,
                          contrast_momentum=contrast_momentum)
  last_layer.head(task.model)  # Refused where there is none.
  if ramp:
    task.horizon(f'ramp={ramp}')
  at_clients = task.labels_at == 'clients'
  if at_clients:
    chosen['teacher_decay'] = 0.0
  s = _Settings(
      contrast_rate, target_decay=target_decay, ramp=ramp, hidden=hidden,
      consistency_weight=consistency_weight, at_clients=at_clients, **chosen)
  streams = task.client_streams
  return assemble.assemble(
      task, init=functools.partial(_init, task, s),
      client_update=functools.partial(_client_update, task, s, streams),
      aggregate=aggregation.linear(functools.partial(_finish, task, s)),
      broadcast=lambda server, client_id, group: assemble.Server(
          _sent(task, s, server.model)),
      on_labels=functools.partial(_on_labels, task, s, 1), labels_last=True,
      opening=None if at_clients else rounds.server_pass(
          functools.partial(_on_labels, task, s, 0)),
      renew=all_statistics.if_static(task),
      work=lambda shard: batching.num_steps(task, shard, streams))


def _backbone(task: Task, model: Variables) -> Variables:
  """All but the last layer of a model."""
  return model._replace(params=last_layer.without(
      model.params, last_layer.place(task.model)))


def _sent(task: Task, s: _Settings, model: Variables) -> Variables:
  """Returns the part of the server's model that travels."""
  return model if s.at_clients else _backbone(task, model)


def _mine(task: Task, s: _Settings, model: Variables) -> PyTree:
  """Returns the backbone's parameters in what a client has."""
  return (_backbone(task, model) if s.at_clients else model).params


def _with_last(task: Task, backbone: PyTree, params: PyTree) -> PyTree:
  """Returns the backbone with the last layer of other parameters."""
  place = last_layer.place(task.model)
  return last_layer.put(backbone, place, last_layer.at(params, place))


def _features(task: Task, backbone: Variables, view: Batch, key: jax.Array
              ) -> tuple[jax.Array, PyTree]:
  """float32[B, F] in training, and the statistics after the batch."""
  found, _, after = network.forward_with_features(
      task, backbone._replace(params=last_layer.filled(
          task.model, backbone.params)), view, key=key)
  return found, after


def _init(task: Task, s: _Settings, key: jax.Array, federation: Federation
          ) -> tuple[Server, Memory]:
  model = assemble.new_model(task, key)
  backbone = _backbone(task, model).params
  if not s.at_clients and not jax.tree.leaves(backbone):
    raise ValueError('the last layer is all that the model has, and clients '
                     'would have nothing to send; give another model.')
  kernel = last_layer.at(model.params, last_layer.head(task.model))
  width, size = kernel.shape[0], federation.num_clients
  # One for all until they train: a projector may be larger than the network.
  none = tree.zeros_like(jax.eval_shape(functools.partial(
      _projector, width, s.hidden or min(_WIDENED * width, _HIDDEN),
      kernel.dtype), key))
  return (Server(model, model.params if s.teacher_decay else ()),
          Memory(tree.repeat(none, size), tree.repeat(backbone, size),
                 jnp.zeros(size, bool)))


def _projector(width: int, hidden: int, dtype: Any, key: jax.Array
               ) -> Variables:
  return projector.init(key, jax.ShapeDtypeStruct((1, width), dtype),
                        hidden=hidden, size=width, norm=_NORM)


def _begun(memory: Memory, backbone: PyTree, key: jax.Array) -> Memory:
  """Returns what a client has before it trains; a new one begins."""
  kernel = memory.projector.params['Dense_0']['kernel']
  width, hidden = kernel.shape
  # Once for a client, but in every round under vmap.
  top = jax.lax.cond(
      (kernel != 0).any(), lambda: memory.projector,
      lambda: _projector(width, hidden, kernel.dtype, key))
  return memory._replace(projector=top, target=tree.where(
      memory.has_one, memory.target, backbone))


def _weight_of(task: Task, s: _Settings, round_: Array) -> jax.Array:
  """float32[]: w of a round."""
  if not s.ramp:
    return jnp.float32(s.consistency_weight)
  return s.consistency_weight * losses.ramp_up(
      round_, s.ramp * task.horizon(f'ramp={s.ramp}'))


def _of_labels(task: Task, s: _Settings, round_: Array) -> LossFn:
  """Makes the loss of labeled rows; it keeps a teacher's parameters."""
  weight = _weight_of(task, s, round_)

  def loss_fn(model, given, batch, key):
    rows, keys = batch.labeled, [*jax.random.split(key)]
    views = [network.labeled_view(task, rows, k) for k in keys]
    stats, logits = model.stats, []
    for view, k in zip(views, keys, strict=True):
      (found,), stats = network.forward(
          task, model._replace(stats=stats), view, key=k)
      logits.append(found)
    teacher, told = (), logits
    if s.teacher_decay:
      teacher = given.memory
      told = [network.forward(
          task, model._replace(params=teacher), view, key=k)[0][0]
              for view, k in zip(views, keys, strict=True)]
      teacher = aggregation.ema(teacher, jax.lax.stop_gradient(model.params),
                                s.teacher_decay)
    told = jax.lax.stop_gradient(told)
    loss = sum(losses.cross_entropy(x, rows.labels, rows.mask)[0]
               for x in logits) / 2
    apart = losses.kl_rows(told[1], logits[0]) + losses.kl_rows(
        told[0], logits[1])
    loss += weight * losses.masked_mean(apart, rows.mask) / 2
    return loss, Aux(stats, {}, teacher)
  return loss_fn


def _on_labels(task: Task, s: _Settings, ahead: int, record: Server,
               context: Context, key: jax.Array) -> tuple[Server, Metrics]:
  """Trains on labels; the round counts from the training that opens."""
  round_ = context.round + ahead
  model, teacher, metrics = averaging.train_on_server_labels(
      task, averaging.keeping_stats(task, _of_labels(task, s, round_)),
      record.model, context, key, first=record.teacher, last=record.teacher)
  return Server(model, teacher), metrics


def _finish(task: Task, s: _Settings, server: Server, mean: Variables,
            cohort: Any, context: Any, key: Any) -> tuple[Server, Metrics]:
  del cohort, context, key
  model = assemble.added(_sent(task, s, server.model), mean)
  if not s.at_clients:
    model = model._replace(params=_with_last(
        task, model.params, server.model.params))
  return server._replace(model=model), {}


def _client_update(task: Task, s: _Settings, streams: str,
                   payload: assemble.Server, client: Client, key: jax.Array
                   ) -> Update:
  order_key, step_key = jax.random.split(key)
  memory: Memory = client.memory
  received = payload.model
  backbone = _mine(task, s, received)
  made = batching.batches(task, client.train, client.shard, order_key, streams,
                          client.round)
  lars = _lars(s, restarted(
      s.contrast_rate, made.num_steps // task.epochs_a_round
  ) if s.restarts else s.contrast_rate)
  optimizer = task.optimizer(client.round)
  kept = _begun(memory, backbone, jax.random.fold_in(key, 2))
  states = (optimizer.init(received.params) if s.at_clients else (),
            lars.init((backbone, kept.projector.params)))
  learner, metrics = local_training.train(
      _step(task, s, optimizer, lars, client.round),
      Learner(received, states, kept), made, step_key)
  learns = client.shard.num_unlabeled > 0
  after = learner.memory._replace(has_one=memory.has_one | learns)
  return Update(
      tree.subtract(learner.model, received), client_weights.client_weight(
          client.shard, streams, weighting='uniform'),
      tree.where(learns, after, memory), metrics)


def _lars(s: _Settings, rate: optax.ScalarOrSchedule
          ) -> optax.GradientTransformation:
  """Makes the authors' LARS, which has plain descent for biases and norms."""
  def wide(params: PyTree) -> PyTree:
    return jax.tree.map(lambda x: x.ndim > 1, params)
  return optax.lars(
      rate, weight_decay=_WEIGHT_DECAY, weight_decay_mask=wide,
      trust_coefficient=_TRUST, trust_ratio_mask=wide,
      momentum=s.contrast_momentum)


def _step(task: Task, s: _Settings, optimizer: optax.GradientTransformation,
          lars: optax.GradientTransformation, round_: Array) -> Step:
  """A step on labels, where the client has such a stream, then one of BYOL.

  A kind of rows that the batch does not have moves nothing.
  """
  of_labels = averaging.keeping_stats(task, _of_labels(task, s, round_))

  def one(learner: Learner, batch: Pair, key: jax.Array) -> Any:
    keys = jax.random.split(key)
    labeled_loss = None
    if s.at_clients:
      assert batch.labeled is not None
      step = local_training.gradient_step(of_labels, optimizer)
      after, told = step(Learner(
          learner.model, learner.opt_state[0]), batch, keys[0])
      known = batch.labeled.mask.sum() > 0
      model, state = tree.where(known, (after.model, after.opt_state),
                                (learner.model, learner.opt_state[0]))
      learner = learner._replace(
          model=model, opt_state=(state, learner.opt_state[1]))
      labeled_loss = told['train_loss']
    rows = batch.unlabeled
    assert rows is not None
    moved, loss = _contrasted(task, s, learner, rows, lars, keys[1])
    learner = tree.where(rows.mask.sum() > 0, moved, learner)
    total, metrics = objective.total(
        batch, loss, labeled_loss, labelings=2, views=2, labeled_views=2)
    del metrics['mask_rate']  # Rows have no labels.
    return learner, {
        'train_loss': total, 'contrastive_loss': network.over_rows(loss, rows),
        **metrics}
  return one


def _contrasted(task: Task, s: _Settings, learner: Learner, rows: Batch,
                lars: optax.GradientTransformation, key: jax.Array
                ) -> tuple[Learner, jax.Array]:
  """Returns the learner after a step of BYOL, and its loss."""
  model, memory = learner.model, learner.memory
  keys = [*jax.random.split(key)]
  views = [network.weakly(task, rows, k) for k in keys]

  targets = [_features(
      task, Variables(memory.target, model.stats), view, k)[0]
             for view, k in zip(views, keys, strict=True)]

  def loss_of(trained: Any) -> tuple[jax.Array, Any]:
    stats, top = model.stats, memory.projector.stats
    predicted = []
    for view, k in zip(views, keys, strict=True):
      found, stats = _features(
          task, Variables(trained[0], stats), view, k)
      out, top = projector.project(
          Variables(trained[1], top), found, rows.mask, norm=_NORM)
      predicted.append(out)
    first, second = zip(predicted, targets, strict=True)
    return likeness(first, second, rows.mask), (stats, top)

  trained = (_mine(task, s, model), memory.projector.params)
  (loss, (stats, top)), gradient = jax.value_and_grad(
      loss_of, has_aux=True)(trained)
  (backbone, of_top), state = local_training.descend(
      lars, gradient, learner.opt_state[1], trained)
  params = (_with_last(task, backbone, model.params) if s.at_clients
            else backbone)
  target = aggregation.ema(memory.target, backbone, s.target_decay)
  return Learner(
      Variables(params, network.next_stats(task, model.stats, stats)),
      (learner.opt_state[0], state),
      Memory(Variables(of_top, top), target, memory.has_one)), loss
