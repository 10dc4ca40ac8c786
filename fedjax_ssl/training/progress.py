"""Progress: a bar on a terminal or in a notebook, elsewhere lines."""
from __future__ import annotations

from collections.abc import Callable, Iterator
import contextlib
import sys
import threading
import time
from typing import Any, TextIO

import jax

from fedjax_ssl.core import durations

# What JAX does once for a program, before it runs: traces, lowers, compiles.
_ONCE = '/jax/core/compile/'
_LONG = 20.0  # Seconds without a round, after which a run says that it lives.


class Compilation:
  """Seconds that compilation has taken so far, whenever it happened.

  A run compiles in its first round, but also at its first evaluation, its
  first checkpoint, and where a bound begins.
  """

  def __init__(self) -> None:
    """Starts at 0; see `listening`."""
    self._spans: list[tuple[float, float]] = []

  def hear(self, event: str, start_time: float, end_time: float,
           **unused: str | int) -> None:
    """Adds a stretch of time that JAX reports at its end."""
    if not event.startswith(_ONCE):
      return
    # The stretch of a function that is traced within another is reported first.
    while self._spans and self._spans[-1][1] > start_time:
      start_time = min(start_time, self._spans.pop()[0])
    self._spans.append((start_time, end_time))

  def seconds(self) -> float:
    """Returns the length of all stretches, overlaps counted once."""
    return sum(end - start for start, end in self._spans)

  @contextlib.contextmanager
  def listening(self) -> Iterator[Compilation]:
    """Listens to all compilation inside the block."""
    jax.monitoring.register_event_time_span_listener(self.hear)
    try:
      yield self
    finally:
      jax.monitoring.unregister_event_time_span_listener(self.hear)


class Progress:
  """Says how far a run is, how fast it goes and when it will be done."""

  def __init__(self, name: str, total: int, *, start: int = 0,
               interval: float = 10.0, stream: TextIO | None = None,
               clock: Callable[[], float] = time.monotonic,
               compiled: Callable[[], float] = lambda: 0.0):
    """Starts the clock, and says that the rounds are compiled now.

    Args:
      name: what runs, as in `digits_dirdir.fixmatch`.
      total: rounds of the run.
      start: rounds done by an earlier process.
      interval: least seconds between two log lines; 0 logs every update.
      stream: standard error by default. A terminal and a notebook get a bar,
        anything else lines.
      clock: seconds, from any origin.
      compiled: seconds of these that went into compilation, which the speed
        leaves out.
    """
    self._name = name
    self._total = total
    self._round = start
    self._interval = interval
    self._clock = clock
    self._compiled = compiled
    self._first: tuple[int, float] | None = None
    self._rate: float | None = None
    self._logged: float | None = None
    self._accuracy: float | None = None
    self._stream = stream or sys.stderr
    self._bar = _bar(name, total, start, self._stream)
    self._waiting = threading.Timer(_LONG, self._say_that_it_lives)
    self._waiting.daemon = True
    if start >= total:
      return  # All rounds are done.
    self._say('compiling')
    self._waiting.start()

  def _say(self, text: str) -> None:
    """Says what comes before the first round."""
    if self._bar is not None:
      self._bar.set_postfix_str(text)
      return
    # A reader that is gone ends the run at a round, and not here.
    with contextlib.suppress(OSError, ValueError):
      print(f'{self._name}: {text}', file=self._stream, flush=True)

  def _say_that_it_lives(self) -> None:
    if self._first is None:
      self._say('still compiling, or in a long round')

  def update(self, round_: int, accuracy: float | None = None) -> None:
    """Shows a state of the run.

    Args:
      round_: rounds done.
      accuracy: newest test accuracy in [0, 1]; None keeps the last.
    """
    self._waiting.cancel()
    now = self._clock()
    worked = now - self._compiled()
    if self._first is None:
      self._first = round_, worked
    elif round_ > self._first[0]:
      self._rate = max(worked - self._first[1], 0.0) / (round_ - self._first[0])
    if accuracy is not None:
      self._accuracy = float(accuracy)
    done, self._round = round_ - self._round, round_
    if self._bar is not None:
      self._bar.set_postfix_str(self._tail(), refresh=False)
      self._bar.update(done)
    elif (self._logged is None or round_ >= self._total
          or now - self._logged >= self._interval):
      self._logged = now
      print(f'{self._name}: round {round_}/{self._total}, {self._tail()}',
            file=self._stream, flush=True)

  def close(self) -> None:
    """Ends the bar."""
    self._waiting.cancel()
    if self._bar is not None:
      self._bar.close()

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *unused: object) -> None:
    self.close()

  def _tail(self) -> str:
    parts = [f'compiled in {durations.text(self._compiled())}'
             if self._rate is None else f'{self._rate:.3g} s/round']
    if self._rate is not None:
      left = max(self._total - self._round, 0)
      parts.append(f'{durations.text(self._rate * left)} left')
    if self._accuracy is not None:
      parts.append(f'accuracy {self._accuracy:.4f}')
    return ', '.join(parts)


def _in_notebook() -> bool:
  """Returns whether a notebook's kernel runs this, which has no terminal."""
  shell = getattr(sys.modules.get('IPython'), 'get_ipython', lambda: None)()
  return type(shell).__name__ in ('ZMQInteractiveShell', 'Shell')


def _bar(name: str, total: int, start: int, stream: TextIO) -> Any:
  if not stream.isatty() and not (stream is sys.stderr and _in_notebook()):
    return None
  from tqdm import auto
  # tqdm's own rate counts the compilation.
  return auto.tqdm(
      desc=name, total=total, initial=start, file=stream,
      dynamic_ncols=True,
      bar_format='{desc} {n_fmt}/{total_fmt} |{bar}| {postfix}')
