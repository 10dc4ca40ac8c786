"""The contract of all methods, for methods and rules of your own.

```python
from fedjax_ssl import testing

def test_mine():  # With pytest or without.
  testing.check_method(mine)
  testing.check_aggregator(my_rule)
```
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
import functools
from typing import Any

import jax

from fedjax_ssl import methods
from fedjax_ssl.core import checks
from fedjax_ssl.core.types import Method, PyTree, Task
from fedjax_ssl.methods.parts import aggregators
from fedjax_ssl.testing import contract, keys, rules, toy

__all__ = ('check_aggregator', 'check_method', 'contract', 'toy')


class Found(dict[str, str]):
  """For each 'LAW at PLACE' '' if it holds, else why it does not apply."""

  def __repr__(self) -> str:
    return '\n'.join(
        f'{where.replace("_", " ")}: '
        + (f'does not apply, {why}' if why else 'holds')
        for where, why in self.items())


def check_method(builder: str | Callable[..., Method], *,
                 places: Iterable[str] | None = None,
                 laws: Iterable[str] | None = None, **knobs: object
                 ) -> Found:
  """Holds a method to the laws of all methods, on a federation of 6 clients.

  It takes about a minute.

  Args:
    builder: (task, knobs) -> Method; or a name, with knobs if any, as
      --method takes it.
    places: where labels live: 'clients', 'server'; default: both, or clients
      alone if the builder refuses the other with a ValueError that names
      labels_at.
    laws: names of `contract.LAWS`; default: all.
    **knobs: of the builder.

  Returns:
    For each 'LAW at PLACE', '' if it holds, or why it does not apply; printed,
    a line for each.

  Raises:
    AssertionError: for the first law that does not hold; the message begins
      with its name.
    ValueError: if the builder refuses labels at clients, or for an unknown
      law or place.
  """
  make = (functools.partial(methods.make, builder) if isinstance(builder, str)
          else lambda task: builder(task, **knobs))
  if isinstance(builder, str) and knobs:
    raise ValueError('Give the knobs of a name in the text.')
  wanted = [*(contract.LAWS if laws is None else laws)]
  for law in wanted:
    checks.check('law', law, contract.LAWS)
  found = Found()
  for place in places_of(make) if places is None else places:
    checks.check('place', place, ('clients', 'server'))
    one = contract.CohortRunner(make, model_of(make, place), place)
    for law in wanted:
      where = f'{law} at {place}'
      found[where] = _held(contract.LAWS[law], one, where)
  return found


def check_aggregator(
    rule: str | Callable[[PyTree, jax.Array], PyTree], *,
    laws: Iterable[str] | None = None) -> Found:
  """Holds a rule to its law, and in FedAvg to the laws of all methods.

  Such as: equal updates do not add up, as in a sum; a slot of weight 0 and the
  order of the slots change nothing.

  Args:
    rule: (updates stacked [S, ...], float32[S] weights) -> one update; or a
      name, with knobs if any, as --aggregator takes it.
    laws: see `check_method`; also 'equal_updates_do_not_add_up'.

  Returns:
    See `check_method`.

  Raises:
    AssertionError: for the first law that does not hold; the message begins
      with its name.
    ValueError: for an unknown law or name, or a rule that gives anything but
      one update.
  """
  def fedavg(task: Task) -> Method:
    return methods.make('fedavg', task, aggregator=rule)
  own = rules.equal_updates_do_not_add_up
  wanted = [own.__name__, *contract.LAWS] if laws is None else [*laws]
  for law in wanted:
    checks.check('law', law, (own.__name__, *contract.LAWS))
  found = Found()
  if own.__name__ in wanted:
    found[own.__name__] = _held(own, aggregators.resolved(rule), own.__name__)
  return Found(found | check_method(
      fedavg, places=['clients'],
      laws=[law for law in wanted if law != own.__name__]))


def places_of(make: contract.Make) -> list[str]:
  """Returns where labels may live: both places, unless the method refuses."""
  try:
    make(toy.task(labels_at='server'))
  except ValueError as error:
    if 'labels_at' not in str(error):
      raise
    return ['clients']
  return ['clients', 'server']


def model_of(make: contract.Make, place: str) -> str:
  """Returns the network that a method is tried on, by its name in `toy.task`.

  Where clients have labels it is one that normalizes by batches, unless the
  method refuses that with a ValueError that names the norm. Else it is linear,
  unless the method has no use for a single layer and refuses it.
  """
  if place == 'clients':
    try:
      make(toy.task('conv'))
    except ValueError as error:
      if 'norm=' not in str(error):
        raise
      return 'linear'
    return 'conv'
  federation, _ = toy.federation(place)
  method = make(toy.task(labels_at=place))
  try:
    jax.eval_shape(lambda key: method.init(key, federation), keys.key(0))
  except ValueError:
    return 'conv'
  return 'linear'


def _held(law: Callable[[Any], None], one: Any, where: str) -> str:
  """'' if a law holds, or why it does not apply."""
  try:
    law(one)
  except contract.Skip as skip:
    return str(skip)
  except AssertionError as error:
    about = (law.__doc__ or '').splitlines()[0]
    raise AssertionError(f'{where.replace("_", " ")} does not hold ({about}) '
                         f'{error}') from error
  return ''
