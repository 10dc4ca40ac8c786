"""PyTorch's side of a comparison, in a process of its own.

Our side takes pages of 2 MB where our programs take them
(`fedjax_ssl.running.huge_pages`), which is a choice of the whole process.
PyTorch's has what its users get, which is what the C library takes by itself.
"""
from __future__ import annotations

import atexit
from collections.abc import Callable, Sequence
import itertools
from multiprocessing import connection
import os
import pathlib
import subprocess
import sys
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments.benchmarks import harness, peer_process
from fedjax_ssl.running import huge_pages

FLAGS = flags.FLAGS

flags.DEFINE_bool('torch_huge_pages', False, 'Time PyTorch with pages of 2 MB '
                  'as well; the fastest counts.')

_LAYOUTS = 'contiguous', 'channels_last'  # Keys of `torch_loop.LAYOUTS`.
_PATIENCE = 600.0  # Seconds for an answer.
_END = 5.0  # Seconds to end, once its pipe is closed.
_ROOT = pathlib.Path(__file__).resolve().parents[2]


class Loops:
  """PyTorch's rounds by layout and pages.

  Args:
    kind: module whose `Loop` trains, as 'torch_fixmatch'.
    ours: the rounds that it is compared with: it gets their network, initial
      weights and cohorts.
    data: the loop's arguments that follow the network.
    threads: of PyTorch.
    **choices: of the loop, but its layout.

  Attributes:
    runs: functions by name that train one more round each.

  Raises:
    ValueError: if a process cannot make its loop, on an accelerator, or if
      pages of 2 MB are asked for where the system does not give them on demand.
  """

  def __init__(self, kind: str, ours: harness.Simulation, data: Sequence[Any],
               *, threads: int, **choices: Any):
    if reason := harness.without_torch():
      raise ValueError(f'PyTorch is {reason}.')
    plain = huge_pages.without(os.environ)
    variables = {'': plain}
    if FLAGS.torch_huge_pages:
      variables[', 2 MB'] = huge = huge_pages.asking(plain)
      if huge == plain:
        raise ValueError('--torch_huge_pages: asking for pages of 2 MB changes '
                         'nothing on this system; leave it out.')
    params = jax.device_get(ours.model.params)
    found = [*map(_on_host, data)]
    processes = {
        f'PyTorch, {layout}{pages}': Apart(
            'experiments.benchmarks.torch_loop:made',
            (kind, threads, ours.spec.model, params, found,
             {**choices, 'layout': layout}), environ)
        for layout in _LAYOUTS for pages, environ in variables.items()}
    self._version = next(iter(processes.values())).version
    # Drawn before anything is timed; each turn has two rounds.
    cohorts = [ours.cohort(r) for r in range(2 * FLAGS.repeats)]
    self.runs: dict[str, Callable[[], None]] = {
        name: _rounds(process, cohorts) for name, process in processes.items()}

  def about(self) -> dict[str, Any]:
    """Returns what the report says of both sides."""
    return {'torch': self._version, 'our_pages': huge_pages.said(os.environ)}


class Apart:
  """Starts `torch_worker.py`, which ends with this process, or by `close`.

  Args:
    place: 'module:function' that returns a loop and PyTorch's version.
    arguments: of the function.
    environ: variables of the process.

  Attributes:
    version: PyTorch's.

  Raises:
    ValueError: if the function raises, or the process ends.
  """

  def __init__(self, place: str, arguments: tuple[Any, ...],
               environ: dict[str, str]):
    here, there = connection.Pipe()
    self._pipe: Any = here
    found = os.pathsep.join(
        [str(_ROOT), *filter(None, [environ.get('PYTHONPATH')])])
    self._process = subprocess.Popen(
        [sys.executable, '-m', 'experiments.benchmarks.torch_worker',
         str(there.fileno())], env={**environ, 'PYTHONPATH': found},
        pass_fds=[there.fileno()])
    there.close()
    atexit.register(self.close)
    self.version, error = self._ask((place, arguments))
    self._check(error)

  def advance(self, cohort: np.ndarray) -> None:
    """Trains a round, to the end."""
    self._check(self._ask(cohort))

  def close(self) -> None:
    """Ends it, in the middle of a round too."""
    self._pipe.close()
    try:
      self._process.wait(_END)
    except subprocess.TimeoutExpired:
      self._process.kill()
      self._process.wait()

  def _ask(self, value: Any) -> Any:
    try:
      self._pipe.send(value)
      if self._pipe.poll(_PATIENCE):
        return self._pipe.recv()
    except (EOFError, OSError):
      self.close()
      how = peer_process.ending(self._process.returncode)
      raise ValueError(f"PyTorch's process ended: {how}") from None
    self.close()
    raise ValueError(f"PyTorch's process: no answer in {_PATIENCE:.0f} s")

  def _check(self, error: str) -> None:
    if error:
      self.close()
      raise ValueError(f"PyTorch's process: {error}")


def _rounds(process: Apart, cohorts: Sequence[np.ndarray]
            ) -> Callable[[], None]:
  left = itertools.cycle(cohorts)
  return lambda: process.advance(next(left))


def _on_host(value: Any) -> Any:
  """Returns arrays that another process can read."""
  return ([np.asarray(x) for x in value] if isinstance(value, list)
          else np.asarray(value))
