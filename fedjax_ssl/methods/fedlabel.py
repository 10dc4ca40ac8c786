"""FedLabel: the surer of the global and the local model labels each row.

Cho, Joshi, Dimitriadis, Local or Global: Selective Knowledge Assimilation for
Federated Learning with Limited Labels, ICCV 2023,
https://arxiv.org/abs/2307.08809. No code is public; where the paper is silent
the knobs say so.
"""
from __future__ import annotations

import dataclasses
import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import names, rounds, tree
from fedjax_ssl.core.types import (
  Array,
  Batch,
  Client,
  COUNTED,
  Federation,
  Method,
  Metrics,
  Number,
  Ratio,
  State,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods import base, say

CONFIDENCES = ('variance', 'entropy')
LABELERS = ('both', 'local', 'global')
DIVERGENCES = ('student_first', 'discarded_first')
_SUMMED = (*COUNTED, 'rows_used', 'rows_processed')


class Choice(NamedTuple):
  """Who labels each row, and how. All fields are constants."""

  labels: jax.Array  # int32[B]
  accepted: jax.Array  # float32[B], 1 where the label is used.
  from_local: jax.Array  # float32[B], 1 where the local model was chosen.
  discarded: jax.Array  # float32[B, C], logits of the model not chosen.
  agreed: jax.Array  # float32[B], 1 where that one has the same label.
  ratio: jax.Array  # float32[B], its confidence over that of the chosen one.


def confidence_score(logits: Array, kind: str = 'variance') -> jax.Array:
  r"""How sure a prediction is: 0 if uniform, more if surer.

  With p = softmax, 'variance' is :math:`\frac1C \sum_c (p_c - 1/C)^2` and
  'entropy' :math:`\log C - H(p)`: the negative entropy, shifted to begin at 0,
  as a ratio of negative numbers would grow where it has to fall.

  Args:
    logits: float[..., C].
    kind: 'variance' or 'entropy'.

  Returns:
    float32[...], at least 0.

  Raises:
    ValueError: for another kind.

  References:
    Cho et al., FedLabel, ICCV 2023, eq. 3 and Figure 11.
  """
  names.check('confidence', kind, CONFIDENCES)
  log_p = jax.nn.log_softmax(jnp.asarray(logits, jnp.float32))
  p, size = jnp.exp(log_p), logits.shape[-1]
  if kind == 'variance':
    return jnp.mean(jnp.square(p - 1 / size), -1)
  return jnp.maximum(jnp.sum(p * (log_p + jnp.log(size)), -1), 0)


def select(global_logits: Array, local_logits: Array, *,
           threshold: Number = 0.4, confidence: str = 'variance',
           labeler: str = 'both') -> Choice:
  r"""Lets the surer model label each row.

  :math:`s^* = \arg\max_s h(s)`, :math:`\hat y = \arg\max_c s^*_c` where
  :math:`\max_c s^*_c > \beta`; equal confidence is the global model's.

  Args:
    global_logits: float[B, C] of the model that the client received.
    local_logits: float[B, C] of that model after training on its labels.
    threshold: beta, strict; 0 accepts every row and 1 none.
    confidence: h, see `confidence_score`.
    labeler: 'both'; or 'local' or 'global', which labels alone: then nothing
      is discarded, so no two models agree.

  Returns:
    The Choice; its ratio is in [0, 1], and 1 where both are uniform.

  Raises:
    ValueError: for another confidence or labeler.

  References:
    Cho et al., FedLabel, ICCV 2023, eq. 3, 4 and 7 and Figure 2.
  """
  names.check('labeler', labeler, LABELERS)
  logits = [jax.lax.stop_gradient(jnp.asarray(x, jnp.float32))
            for x in (global_logits, local_logits)]
  ours, theirs = (confidence_score(x, confidence) for x in logits)
  local = {'both': theirs > ours, 'local': jnp.ones(ours.shape, bool),
           'global': jnp.zeros(ours.shape, bool)}[labeler]
  def pick(chosen, x, y):
    return jnp.where(chosen[:, None] if x.ndim > 1 else chosen, x, y)
  best, rest = pick(local, *logits[::-1]), pick(local, *logits)
  high, low = pick(local, theirs, ours), pick(local, ours, theirs)
  labels = best.argmax(-1).astype(jnp.int32)
  # A probability may be rounded to just above 1.
  accepted = jnp.minimum(jax.nn.softmax(best).max(-1), 1) > threshold
  agreed = (rest.argmax(-1) == labels) & (labeler == 'both')
  ratio = jnp.where(high > 0, low / jnp.where(high > 0, high, 1), 1)
  return Choice(labels, accepted.astype(jnp.float32),
                local.astype(jnp.float32), rest, agreed.astype(jnp.float32),
                jnp.clip(ratio, 0, 1))


def loss(choice: Choice, strong_logits: Array, clean_logits: Array,
         mask: Array, *, consistency: Number = 0.1,
         divergence: str = 'student_first') -> tuple[jax.Array, Metrics]:
  r"""FedLabel's loss on unlabeled rows, a mean over all real rows.

  :math:`1[accepted] (CE(\hat y, p(\psi(x))) + \lambda_k KL(p(x), s^{-*})
  1[agreed])` with :math:`\lambda_k = \lambda_0 h(s^{-*}) / h(s^*)`.

  Args:
    choice: what `select` returned.
    strong_logits: float[B, C] of the model in training, strong view.
    clean_logits: the same of the rows as they are.
    mask: float32[B]; a row that is not accepted costs 0 and still counts in
      the mean.
    consistency: lambda_0, the largest weight of the second term; 0 leaves the
      cross entropy.
    divergence: 'student_first', KL(student || discarded) as printed in
      equation 6; or 'discarded_first', KL(discarded || student).

  Returns:
    float32[] and the metrics 'mask_rate' (accepted), 'local_rate' (labeled by
    the local model, among the accepted), 'agreed_rate' (among the accepted)
    and 'consistency_loss', its second term.

  Raises:
    ValueError: for another divergence.

  References:
    Cho et al., FedLabel, ICCV 2023, eq. 5 to 8.
  """
  names.check('divergence', divergence, DIVERGENCES)
  real = jnp.asarray(mask, jnp.float32)
  total = real.sum()
  used = real * choice.accepted
  hard = losses.cross_entropy(strong_logits, choice.labels, used, total=total)
  shared = used * choice.agreed
  # Rows that do not count are replaced: their derivative must not be NaN.
  student, other = (jnp.where(shared[:, None] > 0, x, 0)
                    for x in (clean_logits, choice.discarded))
  pair = (student, other) if divergence == 'student_first' else (
      other, student)
  soft = jnp.asarray(consistency) * losses.masked_mean(
      choice.ratio * losses.kl_rows(*pair), shared, total=total)
  accepted = used.sum()
  return hard + soft, {
      'mask_rate': Ratio(accepted, total),
      'local_rate': Ratio((used * choice.from_local).sum(), accepted),
      'agreed_rate': Ratio(shared.sum(), accepted),
      'consistency_loss': Ratio(soft * total, total)}


def _add_deltas(model: Variables, local: Variables, unlabeled: Variables,
                uses: tuple[jax.Array, jax.Array]) -> Variables:
  """Both chains' steps added; their statistics averaged by rows used.

  The sum of two moves of a running variance could make it negative.
  """
  deltas = [tree.subtract(x, model) for x in (local, unlabeled)]
  share = uses[0] / jnp.maximum(uses[0] + uses[1], 1)
  stats = jax.tree.map(lambda x, y: share * x + (1 - share) * y,
                       deltas[0].stats, deltas[1].stats)
  return Variables(tree.add(deltas[0].params, deltas[1].params), stats)


def _merge(labeled: Metrics, unlabeled: Metrics) -> Metrics:
  """One client's metrics: work adds up, and so do the two losses."""
  metrics = {**labeled, **unlabeled}
  for name in (*_SUMMED, 'train_loss'):
    metrics[name] = labeled.get(name, 0) + unlabeled.get(name, 0)
  return metrics


def fedlabel(task: Task, *, threshold: float = 0.4, consistency: float = 0.1,
             confidence: str = 'variance', labeler: str = 'both',
             divergence: str = 'student_first',
             labeled_steps: int | None = None,
             unlabeled_steps: int | None = None, server: str = 'fedavg',
             mu: float = 0.01, weighting: str = 'used',
             keep_local: bool = False) -> Method:
  """Trains one model on labels, another on what the surer model says.

  From the received model w a client trains w_L on its labels, then w_U on its
  unlabeled rows, labeled by w or w_L, both frozen, whichever is surer of a
  row. It sends (w_L - w) + (w_U - w) and the number of rows used. Metrics of
  its own are those of `loss`.

  Args:
    task: the static choices; labels must be at the clients.
    threshold: beta; 0 uses every row, 1 none. Not stated; best from .3 to .5
      in Figure 10.
    consistency: lambda_0; 0 is off. Not stated.
    confidence: 'variance', or 'entropy'.
    labeler: 'both', or Figure 2's 'local' and 'global' alone, which have no
      consistency term.
    divergence: 'student_first' as printed, or 'discarded_first'.
    labeled_steps: tau, steps on labels; 0 leaves w_L at w, None takes the
      task's steps or epochs. Not stated; 5 is too few in Figure 8.
    unlabeled_steps: tau', the same for unlabeled rows.
    server: 'fedavg', or 'fedprox', whose pull acts on w_L only.
    mu: weight of FedProx's term; ignored by 'fedavg'.
    weighting: clients count by rows 'used', r_k: every visit of a labeled row
      and of an accepted one, which depends on the round; or by the 'examples'
      they hold, or 'uniform'.
    keep_local: keep each client's last w_L, to report local accuracy.

  Returns:
    The method; evaluation judges the pseudo-labels of the global model.

  Raises:
    ValueError: for an unknown choice, a number out of range, or labels at the
      server.
  """
  if task.labels_at == 'server':
    raise ValueError("fedlabel needs labels_at='clients': without labels a "
                     'client has no local model to choose.')
  names.check('confidence', confidence, CONFIDENCES)
  names.check('labeler', labeler, LABELERS)
  names.check('divergence', divergence, DIVERGENCES)
  names.check('server', server, ('fedavg', 'fedprox'))
  names.check('weighting', weighting, ('used', 'examples', 'uniform'))
  if not 0 <= threshold <= 1:
    raise ValueError(f'threshold must be in [0, 1], not {threshold}.')
  for name, value in (('consistency', consistency), ('mu', mu),
                      ('labeled_steps', labeled_steps),
                      ('unlabeled_steps', unlabeled_steps)):
    if value is not None and not 0 <= value < float('inf'):
      raise ValueError(f'{name} must be at least 0, not {value}.')
  labelings = 2 if labeler == 'both' else 1

  def steps_of(steps):
    """The task with a chain's own number of steps, if it has one."""
    return dataclasses.replace(task, local_steps=steps) if steps else task

  chains = {'labeled': (steps_of(labeled_steps), labeled_steps != 0),
            'unlabeled': (steps_of(unlabeled_steps), unlabeled_steps != 0)}

  def supervised(model, anchor, batch, key):
    value, (stats, _) = base.supervised(task)(model, anchor, batch, key)
    return value, (stats, {'labeled_loss': base.over_rows(
        value, batch.labeled)})

  def on_unlabeled(local, model, anchor, batch, key):
    rows: Batch = batch.unlabeled
    # One labeler is both of the two, and is computed once.
    experts = {'both': (anchor, local), 'local': (local,),
               'global': (anchor,)}[labeler]
    said = [task.apply(expert, rows.inputs) for expert in experts]
    choice = select(said[0], said[-1], threshold=threshold,
                    confidence=confidence, labeler=labeler)
    # Rows that are not accepted stay out of batch statistics as well.
    kept = rows._replace(mask=rows.mask * choice.accepted)
    views = [base.strongly(task, kept, key)]
    with_clean = labeler == 'both' and consistency > 0
    if with_clean:
      views.append(kept)
    logits, stats = base.forward(task, model, *views, key=key)
    value, metrics = loss(choice, logits[0], logits[-1], rows.mask,
                          consistency=consistency if with_clean else 0.0,
                          divergence=divergence)
    return value, (stats, {
        **metrics, **batching.passes(batch, labelings, len(views)),
        'unlabeled_loss': base.over_rows(value, rows)})

  def init(key: jax.Array, federation: Federation) -> State:
    model = jax.jit(task.model.init)(key)
    memory = tree.repeat(model, federation.num_clients) if keep_local else ()
    return State(base.Server(model), memory, jnp.int32(0))

  def chain(name, loss_fn, model, client, key):
    """A chain's model and metrics; the model as it was without steps."""
    own_task, trains = chains[name]
    if not trains:
      return model, {}
    trained, metrics, _ = base.train_locally(
        own_task, base.with_server_rule(
            task, loss_fn, server if name == 'labeled' else 'fedavg', mu),
        model, client.train, client.shard, client.round, key, name)
    return trained, metrics

  def client_update(payload: base.Server, client: Client, key) -> Update:
    model = payload.model
    keys = jax.random.split(key)
    local, known = chain('labeled', supervised, model, client, keys[0])
    other, unknown = chain(
        'unlabeled', functools.partial(on_unlabeled, local), model, client,
        keys[1])
    zero = jnp.float32(0)
    uses = (known.get('rows_used', zero),
            unknown['mask_rate'].total if unknown else zero)
    # Without accepted rows only momentum or weight decay could move it.
    other = tree.where(uses[1] > 0, other, model)
    held = say.rows_used(client.shard, 'both').astype(jnp.float32)
    weight = {'used': uses[0] + uses[1], 'examples': held,
              'uniform': (held > 0).astype(jnp.float32)}[weighting]
    memory = client.memory
    if keep_local:
      memory = tree.where(uses[0] > 0, local, memory)
    return Update(_add_deltas(model, local, other, uses), weight, memory,
                  _merge(known, unknown))

  @aggregation.linear
  def finish(record, mean, cohort, context, key):
    del cohort, context, key
    return record._replace(model=Variables(
        optax.apply_updates(record.model.params, mean.params),
        tree.add(record.model.stats, mean.stats))), {}

  def work(shard):
    return jnp.asarray(sum(
        batching.num_steps(own_task, shard, name)
        for name, (own_task, trains) in chains.items() if trains))

  passes = [rounds.client_pass(task, client_update, finish, work=work)]
  if task.model.norm == 'static':
    passes.append(base.statistics(task))
  return Method(
      init, rounds.chain(*passes), lambda s, x: task.apply(s.model, x),
      local_predict=(lambda s, row, x: task.apply(row, x))
      if keep_local else None,
      pseudo_label=base.confident_labels(task, threshold, strict=True),
      client_update=client_update, aggregate=finish)
