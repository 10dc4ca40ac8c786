"""What the passes of a round tell about themselves when they are built."""
from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import contextvars
from typing import NamedTuple

import jax

from fedjax_ssl.core import sampling
from fedjax_ssl.core.types import Metrics, PyTree, Shard, Update

Work = Callable[[Shard], jax.Array]
ClientUpdate = Callable[..., Update]  # Of (payload, client, key).
# Of (server, updates, cohort, context, key).
Aggregate = Callable[..., tuple[PyTree, Metrics]]


class Noted(NamedTuple):
  """What the passes of a method have told."""

  works: list[Work]  # How many steps a client takes.
  samplers: list[sampling.Sampler]  # What draws the cohort.
  wrap: Callable[[ClientUpdate], ClientUpdate]  # What clients do instead.
  # What a server does instead with updates that it is handed one by one.
  wrap_aggregate: Callable[[Aggregate], Aggregate]


# Those that `passes` fills now, the innermost last; of each thread its own.
_NOTED: contextvars.ContextVar[tuple[Noted, ...]] = contextvars.ContextVar(
    'noted', default=())


@contextlib.contextmanager
def passes(wrap: Callable[[ClientUpdate], ClientUpdate] = lambda update: update,
           wrap_aggregate: Callable[[Aggregate], Aggregate] = lambda rule: rule
           ) -> Iterator[Noted]:
  """Collects the `work` and `sample` of each `client_pass` built in the block.

  Only they know a method's steps and cohorts. They run `wrap` of their clients
  and `wrap_aggregate` of their aggregations, but of those that need no more
  than the mean of the messages.
  """
  noted = Noted([], [], wrap, wrap_aggregate)
  token = _NOTED.set((*_NOTED.get(), noted))
  try:
    yield noted
  finally:
    _NOTED.reset(token)


def note(sample: sampling.Sampler, work: Work | None,
         client_update: ClientUpdate, aggregate: Aggregate | None
         ) -> tuple[ClientUpdate, Aggregate | None]:
  """Tells what a pass is built of; returns what it shall run in place of it."""
  for noted in _NOTED.get():
    noted.samplers.append(sample)
    client_update = noted.wrap(client_update)
    if aggregate is not None and not getattr(aggregate, 'is_linear', False):
      aggregate = noted.wrap_aggregate(aggregate)
    if work is not None:
      noted.works.append(work)
  return client_update, aggregate
