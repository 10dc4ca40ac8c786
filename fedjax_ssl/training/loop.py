"""The loop that runs any method, without knowing which."""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import math
import signal
import threading
import time
import types
from typing import NamedTuple

from jax.sharding import Mesh
import numpy as np

from fedjax_ssl.core import checks, ending
from fedjax_ssl.core.types import Federation, Method, PyTree, State
from fedjax_ssl.data import federation as federation_lib
from fedjax_ssl.training import (
  client_rows,
  columns,
  environment,
  metrics,
  offloaded,
  processes,
  runner,
)
from fedjax_ssl.training.runner import Row

# One call of the compiled loop should take this many seconds: between calls
# progress is shown and signals are noticed. Results do not depend on it.
_CALL_SECONDS = 5.0
# A run that saves on its way does so after this many seconds at the latest: so
# much may be lost by a kill.
_SAVE_SECONDS = 300.0


class Stop(NamedTuple):
  """The round at which a stretch of rounds ends, and what is due then."""

  round: int
  evaluates: bool
  saves: bool


class Result(NamedTuple):
  """What `train` returns.

  Attributes:
    states: one State for each seed, in the order of the seeds.
    round: rounds done.
    interrupted: whether any process got a signal to end. The run then ended
      at `round`, which is saved and may be the last, and the caller should end
      too.
    metrics: by name, float64[rows] over the measured rows; with `round`, and
      `seed` if there are several; see `columns`.
  """

  states: list[State]
  round: int
  interrupted: bool
  metrics: dict[str, np.ndarray]

  def __repr__(self) -> str:
    return columns.text('Result', self.round, self.states, self.metrics)


class Observer(NamedTuple):
  """Functions that the loop calls with its results; each may be replaced.

  In a run of several processes each of them calls its own observer.

  Attributes:
    on_row: (Row) for every evaluated round and seed.
    on_save: (round, {seed: {'state', 'totals'}}) at a checkpoint; to keep the
      arrays, copy them: the next rounds reuse their memory.
    on_progress: (round) after each call.
    on_report: (Row) of those values of `method.report` that are of every
      round, for every seed, after each round that is not evaluated; never if
      there are none.
  """

  on_row: Callable[[Row], None] = lambda row: None
  on_save: Callable[[int, PyTree], None] = lambda round_, tree_: None
  on_progress: Callable[[int], None] = lambda round_: None
  on_report: Callable[[Row], None] = lambda row: None


def stops(start: int, end: int, eval_every: int, checkpoint_every: int
          ) -> Iterator[Stop]:
  """Yields where stretches of rounds end, after `start` and up to `end`."""
  round_ = start
  while round_ < end:
    nexts = [end]
    for every in (eval_every, checkpoint_every):
      if every:
        nexts.append((round_ // every + 1) * every)
    round_ = min(nexts)
    last = round_ == end
    yield Stop(round_,
               last or bool(eval_every) and round_ % eval_every == 0,
               last or bool(checkpoint_every)
               and round_ % checkpoint_every == 0)


@contextlib.contextmanager
def _listening() -> Iterator[threading.Event]:
  """Turns signals that end a program into a flag, read between calls."""
  heard = threading.Event()
  def hear(number: int, frame: types.FrameType | None) -> None:
    del frame
    if heard.is_set() and number == signal.SIGINT:
      raise KeyboardInterrupt
    heard.set()
  with ending.handled(hear):
    yield heard


def train(method: Method, federations: Federation | Sequence[Federation], *,
          num_rounds: int, seeds: Sequence[int] | None = None,
          eval_every: int = 1,
          checkpoint_every: int = 0, seed_map: str = 'auto',
          mesh: Mesh | None = None, saved: tuple[int, PyTree] | None = None,
          observer: Observer | None = None,
          place: client_rows.Place = client_rows.ON_DEVICES) -> Result:
  """Trains one method, for one seed or several.

  Args:
    method: any method.
    federations: one, or one for each seed.
    num_rounds: rounds in all, those before a resume included. Schedules and
      ramps also span this many, unless `TaskSpec.schedule_rounds` is set; set
      it if the run may be extended later.
    seeds: integers; each fixes the initial values and all draws of a run.
      None is 0, 1, ..., one for each federation.
    eval_every: rounds between rows; the last round always gets one; 0 is the
      last round only.
    checkpoint_every: rounds between saves, if these take less than five
      minutes; 0 saves at the end only.
    seed_map: 'map', one seed after another; 'vmap', all in one program;
      'auto', 'map' on CPU and 'vmap' elsewhere.
    mesh: devices to split the clients over, or None.
    saved: (round, tree) to continue from, as given to `on_save`.
    observer: its functions are called; None calls nothing.
    place: where the clients' memory is between rounds. If not on the devices,
      seeds go one after another.

  Returns:
    The states, the round reached, and what was measured.

  Raises:
    ValueError: for a number out of range, seeds that do not go with the
      federations, or a federation whose parts do not fit each other.
    TypeError: for something that is no method or no federation.
  """
  if isinstance(federations, Federation):
    federations = [federations]
  _check_kinds(method, federations, num_rounds)
  federations = federation_lib.pad_widths(federations)
  every = checks.whole_numbers((eval_every, checkpoint_every))
  if every is None or min(every) < 0:
    raise ValueError(f'eval_every={eval_every} and checkpoint_every='
                     f'{checkpoint_every} must be whole numbers from 0.')
  seeds = range(len(federations)) if seeds is None else seeds
  if (found := checks.seeds(seeds)) is None:
    raise ValueError(f'seeds {list(seeds)} must be whole numbers from 0 to '
                     f'{checks.LARGEST_SEED}.')
  seeds = found
  if len(set(seeds)) < len(seeds) or len(federations) != len(seeds):
    raise ValueError(f'{len(federations)} federations do not go with the '
                     f'seeds {list(seeds)}: one for each, all different.')
  observer = observer or Observer()
  if method.spanning is not None:
    method = method.spanning(max(int(num_rounds), 1))
  runs = offloaded.runs(method, federations, seeds, mesh, place, kind=(
      runner.Together if seeds_together(seed_map, len(seeds))
      else runner.Sequential))
  measured: list[metrics.Row] = []
  done, snapshot = saved if saved is not None else (0, None)
  runs.start(snapshot)
  pace, ends = math.inf, False
  tells = runs.reports_every_round()
  save = _Saver(runs, observer, checkpoint_every,
                -1 if saved is None else done)
  with _listening() as heard:
    for stop in stops(done, num_rounds, eval_every, checkpoint_every):
      while done < stop.round:
        ends, is_late, most = _agree(heard, save.is_late(), pace)
        if ends:
          break
        if is_late:
          save(done)
        count = 1 if tells else min(stop.round - done, most)
        tick = time.monotonic()
        runs.advance(done, count)
        pace = max((time.monotonic() - tick) / count, 1e-9)
        done += count
        observer.on_progress(done)
        if tells and not (done == stop.round and stop.evaluates):
          for row in runs.reports(done):
            observer.on_report(row)
      if done == stop.round and stop.evaluates:
        for row in runs.rows(done):
          measured.append(metrics.to_plain(row.by_name(len(seeds) > 1)))
          observer.on_row(row)
      if ends or stop.saves:
        save(done)
      if ends:
        break
    # A signal during the last rounds must not be lost.
    ends = ends or _agree(heard, False, pace)[0]
  return Result(runs.states, done, ends, columns.scalars(measured))


def seeds_together(seed_map: str, count: int) -> bool:
  """Returns whether `train` puts `count` seeds under one vmap.

  Raises:
    ValueError: for an unknown `seed_map`.
  """
  checks.check('seed_map', seed_map, ('auto', 'map', 'vmap'))
  if seed_map == 'auto':
    seed_map = 'map' if environment.devices()[0].platform == 'cpu' else 'vmap'
  return count > 1 and seed_map == 'vmap'


def _check_kinds(method: Method, federations: Sequence[Federation],
                 num_rounds: int) -> None:
  """Raises for arguments of another kind; the messages say what to give."""
  if not isinstance(method, Method):
    raise TypeError("train takes a Method, such as make_method('fixmatch', "
                    f'task), not {type(method).__name__} '
                    f'{method if isinstance(method, str) else ""}'.rstrip()
                    + '.')
  if not isinstance(federations, Sequence) or not federations or not all(
      isinstance(one, Federation) for one in federations):
    raise TypeError('train takes a Federation, as data.federate makes it, or a '
                    'list of them, one for each seed.')
  for federation in federations:
    federation_lib.check(federation)
  if len({one.stream is None for one in federations}) > 1:
    raise ValueError('Some federations have a stream and some have none; give '
                     'all of them one, or none.')
  rounds = checks.whole_numbers([num_rounds])
  if rounds is None or min(rounds) < 0:
    raise ValueError(f'num_rounds must be a whole number of at least 0, not '
                     f'{num_rounds!r}.')


class _Saver:
  """Saves a run, and knows when it did so last."""

  def __init__(self, runs: runner.Sequential, observer: Observer, every: int,
               round_: int):
    """Takes what to save, who keeps it, how often, and what is saved."""
    self._runs, self._observer, self._every = runs, observer, every
    self._round, self._since = round_, time.monotonic()

  def __call__(self, round_: int) -> None:
    """Saves a round, unless it is saved already."""
    if round_ != self._round:
      self._observer.on_save(round_, self._runs.snapshot())
      self._runs.kept()
      self._round = round_
    self._since = time.monotonic()

  def is_late(self) -> bool:
    """Returns whether too much would be lost by a kill."""
    return self._every > 0 and time.monotonic() > self._since + _SAVE_SECONDS


def _agree(heard: threading.Event, is_late: bool, pace: float
           ) -> tuple[bool, bool, int]:
  """Agrees, over processes, whether to end or to save, and on a call's rounds.

  Whether to save and the number of rounds are the first process's.
  """
  most = min(max(1, int(_CALL_SECONDS / pace)), 2**30)
  said = processes.gather((int(heard.is_set()), int(is_late), most))
  return bool(said[:, 0].any()), bool(said[0, 1]), int(said[0, 2])
