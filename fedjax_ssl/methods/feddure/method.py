r"""FedDure: two regulators decide how much a client trusts its pseudo-labels.

Bai et al., Combating Data Imbalances in Federated Semi-supervised Learning with
Dual Regulators, AAAI 2024, https://arxiv.org/abs/2307.05358. Equations are
numbered as there.

`bilevel` holds the step and `regulation` its mathematics.

Profile 'paper' is equations (1) to (10). Profile 'official' is what the
released code trains, which is another method (see `meta_labels`): it has no
fine regulator, and the reward enters with the opposite sign.

Readings of what the paper leaves open: the virtual step (4) is plain gradient
descent, the steps (2), (5) and (10) use the client's optimizer, fresh in each
round; H depends on phi in (2) and (4); F-reg sees probabilities; it stays on
the client, and is sent nowhere. Networks with batch statistics see the labeled,
weak and strong rows of the local model together, and those of C-reg apart;
running statistics move once a step, with the local model's pass.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import (
  checks,
  client_weights,
  knobs,
  local_training,
  rounds,
  tree,
)
from fedjax_ssl.core.types import (
  Client,
  Federation,
  Method,
  Metrics,
  PyTree,
  State,
  Task,
  Update,
  Variables,
)
from fedjax_ssl.data import batching
from fedjax_ssl.methods.feddure import meta_labels, regulation
from fedjax_ssl.methods.feddure.bilevel import (
  REGULATORS,
  Rules,
  start,
  step,
  Views,
)
from fedjax_ssl.methods.parts import averaging


class Server(NamedTuple):
  """The server's record, and with changes in place of numbers a message."""

  model: Variables
  coarse: PyTree = ()  # The regulators, where they travel.
  fine: PyTree = ()


class _Memory(NamedTuple):
  """What stays on a client."""

  fine: PyTree  # () where it is not kept.
  model: PyTree  # Its last model; () where local models are not kept.


def _only(profile: str, bound: knobs.Bound) -> knobs.Bound:
  return bound._replace(needs=knobs.Needs('profile', (profile,)))


_OWN: dict[str, knobs.Bound | knobs.Word] = {
    **{knob: _only('official', knobs.BOUNDS[knob])
       for knob in ('fine_tune_steps', 'main_steps', 'warmup_steps',
                    'wait_steps')},
    **{knob: _only('paper', knobs.BOUNDS[knob])
       for knob in ('virtual_rate', 'hidden')},
    **{knob: knobs.Word(knobs.Needs('profile', ('paper',)))
       for knob in ('detach', 'fine_input', 'keep_fine')}}


@knobs.checked(**_OWN)
def feddure(task: Task, *, profile: str = 'paper', regulators: str = 'both',
            averaged: str = 'no', virtual_rate: float = 5e-4,
            threshold: float | None = None, detach: bool = False,
            fine_input: str = 'probabilities', hidden: int = 128,
            keep_fine: bool = True, fine_tune_steps: int = 5,
            main_steps: int = 5, warmup_steps: int = 10, wait_steps: int = 2,
            weighting: str = 'examples', keep_local: bool = False) -> Method:
  """FedDure on a FedAvg server; only the local model is sent.

  Args:
    task: the static choices; labels must be at the clients.
    profile: 'paper', equations (1) to (10), or 'official', what the released
      code trains: meta pseudo-labels without a fine regulator. The former
      ignores the four numbers of steps, the latter all knobs between
      `averaged` and `keep_fine` but the threshold.
    regulators: rows of Table 2: 'both' is FedDure; 'fine' or 'coarse' has one
      of them; 'maml' and 'none' are FixMatch with and without a look-ahead.
    averaged: 'no'; or a round begins with the regulators that the clients of
      earlier rounds ended with, averaged over the 'last' round or over 'all'
      of them, in place of the received model and the client's own F-reg
      (Avg F-reg and Avg C-reg of Table 2). They are then sent too.
    virtual_rate: eta_s of the virtual step (4), the paper's 0.0005. The other
      two rates are the task's; the paper has one number for all three.
    threshold: of confidence, where one is used. None is 0.95 in the paper's
      profile, which leaves it open, and 0.6 in the official one.
    detach: the weights H are constants for C-reg's gradient.
    fine_input: what F-reg sees: 'probabilities' or 'logits'.
    hidden: units of F-reg; the paper's 128.
    keep_fine: F-reg stays on its client from round to round; else each round
      draws a new one.
    fine_tune_steps: of the official profile: supervised steps of each client
      in a round, whatever its rows are; 5 for CIFAR-10, 100 for CINIC-10.
    main_steps: the steps that follow; 5, or 10 for CINIC-10.
    warmup_steps: over which the learning rate rises in each round, before it
      falls like half a cosine; 10, or 100 for CINIC-10.
    wait_steps: in which C-reg rests; 2, or 0 for CINIC-10.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    keep_local: keep each client's last model, to report local accuracy.

  Returns:
    The method; its server record is `Server`.

  Raises:
    ValueError: for an unknown choice or a number out of range, choices that
      exclude each other, or labels at the server.
  """
  checks.check('profile', profile, ('paper', 'official'))
  checks.check('regulators', regulators, REGULATORS)
  checks.check('averaged', averaged, ('no', 'last', 'all'))
  checks.check('fine_input', fine_input, regulation.FORMS)
  checks.check('weighting', weighting, client_weights.WEIGHTINGS)
  if task.labels_at == 'server':
    raise ValueError("feddure needs labels_at='clients': its regulators learn "
                     "from each client's labels.")
  official = profile == 'official'
  if official and (regulators, averaged) != ('both', 'no'):
    raise ValueError("profile='official' has no ablations; give "
                     "profile='paper' with regulators and averaged.")
  if official and wait_steps > main_steps:
    raise ValueError(f'wait_steps={wait_steps} is more than main_steps='
                     f'{main_steps}; give at most as many.')
  if averaged != 'no' and regulators in ('maml', 'none'):
    raise ValueError(f'regulators={regulators!r} has none to average; give '
                     "averaged='no'.")
  if threshold is None:
    threshold = 0.6 if official else 0.95
  has_fine = not official and regulators in ('both', 'fine')
  has_coarse = not official and regulators in ('both', 'coarse')
  travels = averaged != 'no'
  keeps = has_fine and keep_fine and not travels
  schedule = meta_labels.Schedule(
      fine_tune_steps, main_steps, warmup_steps, wait_steps)
  new_fine = functools.partial(
      regulation.init_fine, num_classes=task.num_classes, hidden=hidden)
  knobs: dict[str, Any] = {
      'which': regulators, 'virtual_rate': virtual_rate,
      'threshold': threshold, 'detach': detach, 'form': fine_input,
      'joint': task.model.norm in ('batch', 'static')}

  def init(key: jax.Array, federation: Federation) -> State:
    model = jax.jit(task.model.init)(key)
    fine = new_fine(jax.random.fold_in(key, 1))
    def on_clients(numbers, kept):
      return tree.repeat(numbers, federation.num_clients) if kept else ()
    return State(
        Server(model, model.params if travels and has_coarse else (),
               fine if travels and has_fine else ()),
        _Memory(on_clients(fine, keeps), on_clients(model, keep_local)),
        jnp.int32(0))

  def paper_round(payload: Server, client: Client, key: jax.Array
                  ) -> tuple[Server, Metrics]:
    order_key, step_key = jax.random.split(key)
    fine = (payload.fine if travels else client.memory.fine if keeps
            else new_fine(jax.random.fold_in(key, 2)) if has_fine else ())
    coarse = (payload.coarse if travels else payload.model.params
              if has_coarse else ())
    rules = Rules(*[task.optimizer(client.round)] * 3)

    def one(carry, batch, key):
      weak, labeled, strong = meta_labels.views(task, batch, key)
      return step(task.apply_train, carry, Views(labeled, weak, strong),
                  rules=rules, key=jax.random.fold_in(key, 0xd0), **knobs)

    carry, metrics = local_training.train(
        one, start(payload.model, coarse, fine, rules),
        batching.batches(task, client.train, client.shard, order_key,
                         round_=client.round), step_key)
    return Server(*carry[:3]), metrics

  def official_round(payload: Server, client: Client, key: jax.Array
                     ) -> tuple[Server, Metrics]:
    learner, metrics = meta_labels.train(
        task, schedule, payload.model, client, key, threshold=threshold)
    return Server(learner.teacher), metrics

  def client_update(payload: Server, client: Client, key) -> Update:
    after, metrics = (official_round if official else paper_round)(
        payload, client, key)
    if task.model.norm == 'static':  # A pass of its own renews them.
      after = after._replace(model=after.model._replace(
          stats=payload.model.stats))
    weight = client_weights.of(client.shard, 'both', weighting=weighting)
    memory = _Memory(
        after.fine if keeps else (),
        tree.where(weight > 0, after.model, client.memory.model)
        if keep_local else ())
    sent = after if travels else Server(after.model)
    return Update(tree.subtract(sent, payload), weight, memory, metrics)

  @aggregation.linear
  def finish(record, mean, cohort, context, key):
    del cohort, key
    share = 1.0 if averaged == 'last' else 1 / (context.round + 1)
    return Server(tree.add(record.model, mean.model),
                  tree.add(record.coarse, tree.scale(mean.coarse, share)),
                  tree.add(record.fine, tree.scale(mean.fine, share))), {}

  def pseudo_label(record, memory, inputs):
    logits = task.apply(record.model, inputs)
    labels, weights = losses.pseudo_label(
        logits, threshold=0.0 if has_fine else threshold)
    if keeps or (has_fine and travels):
      weights = regulation.row_weights(
          memory.fine if keeps else record.fine, logits, form=fine_input)
    return labels, weights

  passes = [rounds.client_pass(
      task, client_update, finish,
      work=functools.partial(meta_labels.num_steps, schedule) if official
      else functools.partial(batching.num_steps, task))]
  if task.model.norm == 'static':
    passes.append(averaging.statistics(task))
  return Method(
      init, rounds.chain(*passes), lambda s, x: task.apply(s.model, x),
      local_predict=(lambda s, row, x: task.apply(row.model, x))
      if keep_local else None,
      pseudo_label=pseudo_label, client_update=client_update,
      aggregate=finish)
