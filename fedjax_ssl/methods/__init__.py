"""The methods by name."""
from __future__ import annotations

from collections.abc import Callable, Mapping
import dataclasses
import functools
import inspect
from typing import Any, NoReturn, TypeVar

import jax
import jax.numpy as jnp

from fedjax_ssl.core import blame, checks, optimizers, registry, rounds
from fedjax_ssl.core.types import Federation, Method, PyTree, State, Task
from fedjax_ssl.methods import (
  adamatch,
  cbafed,
  dpsgd,
  fed_consist,
  fedavg,
  fedcon,
  feddb,
  feddure,
  fedggp,
  fedirm,
  fedlabel,
  fedloke,
  fedmatch,
  fedprox,
  fedrgd,
  fedssl,
  fedtrinet,
  fixmatch,
  fl2,
  flexmatch,
  freematch,
  local,
  mixmatch,
  moon,
  pdcfed,
  proxyfl,
  pseudo_label,
  rscfed,
  sage,
  scaffold,
  semifl,
  softmatch,
  steadymatch,
  twinsight,
  uda,
)
from fedjax_ssl.methods.parts import aggregators

_Builder = TypeVar('_Builder', bound=Callable[..., Method])
_Any = TypeVar('_Any', bound=Callable[..., Any])

METHODS: registry.Registry[Callable[..., Method]] = registry.Registry(
    'method', {
    'adamatch': adamatch.adamatch,
    'cbafed': cbafed.cbafed,
    'dpsgd': dpsgd.dpsgd,
    'fed_consist': fed_consist.fed_consist,
    'fedavg': fedavg.fedavg,
    'fedcon': fedcon.fedcon,
    'feddb': feddb.feddb,
    'feddure': feddure.feddure,
    'fedggp': fedggp.fedggp,
    'fedirm': fedirm.fedirm,
    'fedlabel': fedlabel.fedlabel,
    'fedloke': fedloke.fedloke,
    'fedmatch': fedmatch.fedmatch,
    'fedprox': fedprox.fedprox,
    'fedrgd': fedrgd.fedrgd,
    'fedssl': fedssl.fedssl,
    'fedtrinet': fedtrinet.fedtrinet,
    'fixmatch': fixmatch.fixmatch,
    'fl2': fl2.fl2,
    'flexmatch': flexmatch.flexmatch,
    'freematch': freematch.freematch,
    'local': local.local,
    'mixmatch': mixmatch.mixmatch,
    'moon': moon.moon,
    'pdcfed': pdcfed.pdcfed,
    'proxyfl': proxyfl.proxyfl,
    'pseudo_label': pseudo_label.pseudo_label,
    'rscfed': rscfed.rscfed,
    'sage': sage.sage,
    'scaffold': scaffold.scaffold,
    'semifl': semifl.semifl,
    'softmatch': softmatch.softmatch,
    'steadymatch': steadymatch.steadymatch,
    'twinsight': twinsight.twinsight,
    'uda': uda.uda,
}, 'fedjax_ssl.methods')


def is_own(text: str) -> bool:
  """Returns whether a text names a method of a user's, not of this library."""
  return registry.is_own(text, METHODS)


def register(name: str) -> Callable[[_Builder], _Builder]:
  """Registers the decorated builder of a method under a name.

  ```python
  @methods.register('mine')
  def mine(task, *, weight: float = 0.1) -> Method:
  ```

  Its knobs are its keyword-only parameters, each with a default. Numbers may be
  anything unless `knobs.checked` bounds them. `core.registry.register` says
  which names are allowed.
  """
  return METHODS.register(name)


def register_aggregator(name: str) -> Callable[[_Any], _Any]:
  """Registers the decorated rule for `--aggregator`, or its builder.

  ```python
  @methods.register_aggregator('first')
  def first(*, weight: float = 1.0):
    return lambda stacked, weights: jax.tree.map(
        lambda x: weight * x[0], stacked)
  ```

  A rule is (updates stacked [S, ...], float32[S] weights) -> one update. A rule
  may be decorated itself, too; its keyword-only arguments are then the knobs.
  See `register`.
  """
  return aggregators.AGGREGATORS.register(name)


def make(text: str, task: Task, *,
         aggregator: str | Callable[[PyTree, jax.Array], PyTree] | None = None
         ) -> Method:
  """Makes a method from its name, with knobs if any: 'fixmatch(threshold=0.9)'.

  Args:
    text: name or name(knob=value, ...), values being Python literals.
    task: the static choices. If it leaves open how many rounds the schedules
      span, `train` fills that in; run in another way, a method that needs the
      number raises ValueError.
    aggregator: a rule in place of the mean of the clients' updates, see
      `Task.aggregator`, or the name of one, as in 'trimmed_mean(trim=.3)';
      None is the task's own.

  Raises:
    ValueError: for an unknown name or knob (the message lists the known ones),
      or for an aggregator if the method has an aggregation of its own, or the
      task a rule already.
    TypeError: for anything but a text and a task, in this order.
  """
  if not isinstance(text, str) or not isinstance(task, Task):
    raise TypeError("make_method takes a name and a task, as in "
                    "make_method('fixmatch', make_task(spec)), not "
                    f'{type(text).__name__} and {type(task).__name__}.')
  if aggregator is not None and task.aggregator is not None:
    # Of a stored run it is known only now that the method's own one is used.
    checks.refuse_idle(ValueError(
        'it brings an aggregator of its own, and the task has one already; '
        'leave aggregator out.'))
  if isinstance(aggregator, str):
    task = dataclasses.replace(task, aggregator=aggregators.make(aggregator))
  elif aggregator is not None:
    task = dataclasses.replace(task, aggregator=aggregator)
  made = _build(text, task)

  @functools.cache
  def spanning(rounds_: int) -> Method:
    longer = task.spanning(rounds_)
    optimizers.check_factors(longer.optimizer)
    return make(text, longer)

  # Traced once for all callers: for the shapes of the metrics, for each seed,
  # and in the loop over rounds, where `inline` leaves no call behind.
  def init(key: jax.Array, federation: Federation) -> State:
    rounds.check_fit(task, federation)
    return made.init(key, federation)

  return made._replace(
      init=init, round=jax.jit(made.round, inline=True),
      spanning=spanning if task.schedule_rounds is None else None)


def check_report(made: Method, server: PyTree) -> None:
  """Raises ValueError unless the method's report is a dict of numbers."""
  if made.report is None:
    return
  try:
    inspect.signature(made.report).bind(server, 0)
  except TypeError as error:
    raise ValueError(f'report must take (server, round): {error}') from error
  found: Any = jax.eval_shape(made.report, server, jnp.int32(0))
  wrong = '' if isinstance(found, Mapping) else type(found).__name__
  for name, value in () if wrong else found.items():
    if getattr(value, 'shape', None) != () or not isinstance(name, str):
      shape = getattr(value, 'shape', '')
      wrong = f'{name!r}' + (f' of shape {shape}' if shape else
                             f', a {type(value).__name__}')
  if wrong:
    raise ValueError('report must return numbers by name, '
                     f"{{'name': float32[]}}, not {wrong}")


def _build(text: str, task: Task) -> Method:
  """Builds the method.

  If it needs the number of rounds and the task lacks it, the method raises when
  it is run.
  """
  made: Method
  try:
    made = _checked(text, registry.build('method', text, METHODS, task))
  except checks.FieldError as error:
    if not isinstance(error.__cause__, checks.LengthError):
      raise
    reason = str(error)
    # `predict` is the same for any number of rounds.
    made = _checked(text, registry.build(
        'method', text, METHODS, task.spanning(1)))
    def refuse(*unused: object) -> NoReturn:
      raise ValueError(reason)
    made = made._replace(init=refuse, round=refuse, client_update=refuse)
  return made


def _checked(text: str, made: Any) -> Method:
  """Returns what a builder made; refuses anything but a method."""
  blame.check('method', text, made, isinstance(made, Method), 'Method')
  return made
