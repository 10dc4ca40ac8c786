r"""FedDure: two regulators decide how much a client trusts its pseudo-labels.

Bai et al., Combating Data Imbalances in Federated Semi-supervised Learning with
Dual Regulators, AAAI 2024, https://arxiv.org/abs/2307.05358. Equations are
numbered as there.

The step is in `bilevel`, its mathematics in `regulation`.

Profile 'paper' is equations (1) to (10). Profile 'official' is what the
released code trains, which is another method (see `meta_labels`): it has no
fine regulator (F-reg), and the reward has the opposite sign. Its batches differ
where the task's `unlabeled_batch` is 0: here the unlabeled rows are split
evenly over the steps of an epoch; in the code a batch has floor(n / steps) of
the n rows, or a quarter of that from 400 on, and the rest makes one more.

The paper leaves some points open. Here the virtual step (4) is plain gradient
descent; the steps (2), (5) and (10) use the client's optimizer, which starts
anew in each round; H depends on phi in (2) and (4); F-reg sees probabilities,
stays on its client and is never sent. In networks with batch statistics the
labeled, weak and strong rows go through the local model together, and through
C-reg one kind at a time; running statistics move once a step, with the local
model's pass.
"""
from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax

from fedjax_ssl import aggregation, losses
from fedjax_ssl.core import (
  checks,
  client_weights,
  knobs,
  local_training,
  tree,
)
from fedjax_ssl.core.types import (
  Client,
  Context,
  Federation,
  Method,
  Metrics,
  PyTree,
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
)
from fedjax_ssl.methods.parts import assemble, network


class Server(NamedTuple):
  """The server's record; a client's message holds the changes of its fields."""

  model: Variables
  coarse: PyTree = ()  # The regulators, if they are sent.
  fine: PyTree = ()


class _Memory(NamedTuple):
  """What stays on a client."""

  fine: PyTree  # () where it is not kept.
  model: PyTree  # Its last model; () where local models are not kept.


class _Settings(NamedTuple):
  """The knobs of `feddure`, resolved."""

  official: bool
  regulators: str
  averaged: str
  virtual_rate: float
  threshold: float
  detach: bool
  fine_input: str
  hidden: int
  keep_fine: bool
  schedule: meta_labels.Schedule
  weighting: str
  keep_local: bool

  @property
  def has_fine(self) -> bool:
    """Whether there is an F-reg."""
    return not self.official and self.regulators in ('both', 'fine')

  @property
  def has_coarse(self) -> bool:
    """Whether there is a C-reg."""
    return not self.official and self.regulators in ('both', 'coarse')

  @property
  def travels(self) -> bool:
    """Whether regulators are sent."""
    return self.averaged != 'no'

  @property
  def keeps(self) -> bool:
    """Whether F-reg stays on its client."""
    return self.has_fine and self.keep_fine and not self.travels


_OWN: dict[str, knobs.Bound | knobs.Word] = {
    **{knob: knobs.only('profile', 'official',
                       knobs.whole(least, knobs.STEPS))
       for knob, least in {'fine_tune_steps': 0, 'main_steps': 1,
                           'warmup_steps': 0, 'wait_steps': 0}.items()},
    'virtual_rate': knobs.only('profile', 'paper', knobs.Bound(cases=(
        knobs.at(0, 'the virtual step is none'),))),
    'hidden': knobs.only('profile', 'paper', knobs.BOUNDS['hidden']),
    **{knob: knobs.only('profile', 'paper', knobs.word(*words))
       for knob, words in {'detach': (), 'fine_input': regulation.FORMS,
                           'keep_fine': ()}.items()},
    'regulators': knobs.word(*REGULATORS),
    'averaged': knobs.word('no', 'last', 'all')}


# What a knob that is None stands for.
_PROFILES = {'paper': {'threshold': 0.95}, 'official': {'threshold': 0.6}}


@knobs.checked(_PROFILES, **_OWN)
def feddure(task: Task, *, profile: str = 'paper', regulators: str = 'both',
            averaged: str = 'no', virtual_rate: float = 5e-4,
            threshold: float | None = None, detach: bool = False,
            fine_input: str = 'probabilities', hidden: int = 128,
            keep_fine: bool = True, fine_tune_steps: int = 5,
            main_steps: int = 5, warmup_steps: int = 10, wait_steps: int = 2,
            weighting: str = 'examples', keep_local: bool = False) -> Method:
  """Runs FedDure on a FedAvg server; only the local model is sent.

  Args:
    task: the static choices; labels must be at the clients.
    profile: 'paper', equations (1) to (10), or 'official', what the released
      code trains: meta pseudo-labels without a fine regulator, there by Adam at
      6e-4 for CIFAR-10 and 5e-4 for CINIC-10. 'paper' ignores the four numbers
      of steps. 'official' ignores `virtual_rate`, `detach`, `fine_input`,
      `hidden` and `keep_fine`, and has no ablations.
    regulators: rows of Table 2: 'both' is FedDure; 'fine' or 'coarse' has one
      of them; 'maml' and 'none' are FixMatch with and without a look-ahead.
    averaged: which regulators a round begins with. 'no': the received model as
      C-reg, and the client's own F-reg. Else those that clients ended with,
      averaged over the 'last' round or over 'all' rounds (Avg F-reg and Avg
      C-reg of Table 2); they are then sent, too.
    virtual_rate: eta_s of the virtual step (4), the paper's 0.0005. The other
      two rates are the task's; the paper has one number for all three.
    threshold: of confidence, where one is used. None is 0.95 for 'paper', as
      the paper leaves it open, and 0.6 for 'official'.
    detach: whether the weights H are constants for C-reg's gradient.
    fine_input: what F-reg sees: 'probabilities' or 'logits'.
    hidden: units of F-reg; the paper's 128.
    keep_fine: F-reg stays on its client from round to round; else each round
      draws a new one.
    fine_tune_steps: for 'official', as are the next three: supervised steps of
      each client in a round, however many rows it has; 5 for CIFAR-10, 100 for
      CINIC-10.
    main_steps: the steps that follow, 1 or more; 5, or 10 for CINIC-10.
    warmup_steps: in each round the learning rate rises over these steps, and
      then falls like half a cosine; 10, or 100 for CINIC-10.
    wait_steps: first main steps, in which the student does not move; 2, or 0
      for CINIC-10.
    weighting: 'examples' counts labeled and unlabeled rows; or 'uniform'.
    keep_local: keep each client's last model, to report local accuracy.

  Returns:
    The method; its server record is `Server`.

  Raises:
    ValueError: for an unknown choice or a number out of range, choices that
      exclude each other, or labels at the server.
  """
  chosen = checks.profile(_PROFILES, profile, threshold=threshold)
  official = profile == 'official'
  s = _Settings(
      official, regulators, averaged, virtual_rate, chosen['threshold'], detach,
      fine_input, hidden, keep_fine, meta_labels.Schedule(
          fine_tune_steps, main_steps, warmup_steps, wait_steps), weighting,
      keep_local)
  _check(task, s)
  return assemble.assemble(
      task, init=functools.partial(_init, task, s),
      client_update=functools.partial(_client_update, task, s),
      aggregate=aggregation.linear(functools.partial(_finish, s)),
      work=functools.partial(meta_labels.num_steps, s.schedule) if official
      else functools.partial(batching.num_steps, task),
      local_model=(lambda row: row.model) if keep_local else None,
      pseudo_label=functools.partial(_pseudo_label, task, s))


def _check(task: Task, s: _Settings) -> None:
  """Refuses choices that exclude each other."""
  checks.labels_at_clients(task.labels_at,
                           'the regulators learn from their labels')
  if s.official and (s.regulators, s.averaged) != ('both', 'no'):
    raise ValueError("profile='official' has no ablations; give "
                     "profile='paper' with regulators and averaged.")
  if s.official and s.schedule.wait > s.schedule.main:
    raise ValueError(f'wait_steps={s.schedule.wait} is more than main_steps='
                     f'{s.schedule.main}; give at most as many.')
  if s.travels and s.regulators in ('maml', 'none'):
    raise ValueError(f'regulators={s.regulators!r} has none to average; give '
                     "averaged='no'.")


def _new_fine(task: Task, s: _Settings, key: jax.Array) -> regulation.Fine:
  return regulation.init_fine(key, task.num_classes, hidden=s.hidden)


def _init(task: Task, s: _Settings, key: jax.Array, federation: Federation
          ) -> tuple[Server, _Memory]:
  model = assemble.new_model(task, key)
  fine = _new_fine(task, s, jax.random.fold_in(key, 1))
  def on_clients(numbers, kept):
    return tree.repeat(numbers, federation.num_clients) if kept else ()
  return (Server(model, model.params if s.travels and s.has_coarse else (),
                 fine if s.travels and s.has_fine else ()),
          _Memory(on_clients(fine, s.keeps), on_clients(model, s.keep_local)))


def _client_update(task: Task, s: _Settings, payload: Server, client: Client,
                   key: jax.Array) -> Update:
  after, metrics = (_official_round if s.official else _paper_round)(
      task, s, payload, client, key)
  after = after._replace(model=after.model._replace(stats=network.next_stats(
      task, payload.model.stats, after.model.stats)))
  weight = client_weights.client_weight(client.shard, 'both',
                                        weighting=s.weighting)
  memory = _Memory(
      after.fine if s.keeps else (),
      tree.where(weight > 0, after.model, client.memory.model)
      if s.keep_local else ())
  sent = after if s.travels else Server(after.model)
  return Update(tree.subtract(sent, payload), weight, memory, metrics)


def _paper_round(task: Task, s: _Settings, payload: Server, client: Client,
                 key: jax.Array) -> tuple[Server, Metrics]:
  """Does equations (1) to (10) over the client's batches."""
  order_key, step_key = jax.random.split(key)
  if s.travels:
    coarse, fine = payload.coarse, payload.fine
  else:
    coarse = payload.model.params if s.has_coarse else ()
    if s.keeps:
      fine = client.memory.fine
    elif s.has_fine:
      fine = _new_fine(task, s, jax.random.fold_in(key, 2))
    else:
      fine = ()
  rules = Rules(*[task.optimizer(client.round)] * 3)

  def one(carry, batch, key):
    return step(task.apply_train, carry, network.views(task, batch, key),
                rules=rules, which=s.regulators, virtual_rate=s.virtual_rate,
                threshold=s.threshold, detach=s.detach, form=s.fine_input,
                joint=network.is_coupled(task), key=network.dropout_key(key))

  carry, metrics = local_training.train(
      one, start(payload.model, coarse, fine, rules),
      batching.batches(task, client.train, client.shard, order_key,
                       round_=client.round), step_key)
  return Server(*carry[:3]), metrics


def _official_round(task: Task, s: _Settings, payload: Server, client: Client,
                    key: jax.Array) -> tuple[Server, Metrics]:
  """Does what the released code trains."""
  learner, metrics = meta_labels.train(
      task, s.schedule, payload.model, client, key, threshold=s.threshold)
  return Server(learner.teacher), metrics


def _finish(s: _Settings, record: Server, mean: Server, cohort: Any,
            context: Context, key: Any) -> tuple[Server, Metrics]:
  del cohort, key
  share = 1.0 if s.averaged == 'last' else 1 / (context.round + 1)
  return Server(tree.add(record.model, mean.model),
                tree.add(record.coarse, tree.scale(mean.coarse, share)),
                tree.add(record.fine, tree.scale(mean.fine, share))), {}


def _pseudo_label(task: Task, s: _Settings, record: Server, memory: _Memory,
                  inputs: jax.Array) -> tuple[jax.Array, jax.Array]:
  logits = task.apply(record.model, inputs)
  labels, weights = losses.pseudo_label(
      logits, threshold=0.0 if s.has_fine else s.threshold)
  if s.keeps or (s.has_fine and s.travels):
    weights = regulation.row_weights(
        memory.fine if s.keeps else record.fine, logits, form=s.fine_input)
  return labels, weights
