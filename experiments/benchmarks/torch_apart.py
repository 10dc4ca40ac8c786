"""A loop of PyTorch in a process of its own, started as its users start it.

Our side takes pages of 2 MB, as our programs do, and that is a choice of the
whole process.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
import contextlib
import importlib
import multiprocessing
import os
from typing import Any

from absl import flags
import jax
import numpy as np

from experiments.benchmarks import harness

FLAGS = flags.FLAGS

flags.DEFINE_bool('torch_huge_pages', False, 'Time PyTorch with pages of 2 MB '
                  'as well.')

# What multiprocessing starts reads its variables from this process.
_TUNABLES = 'GLIBC_TUNABLES'
_LAYOUTS = 'contiguous', 'channels_last'  # Keys of `torch_loop.LAYOUTS`.
_HUGE = 'glibc.malloc.hugetlb=1'


def loops(kind: str, ours: harness.Simulation, data: Sequence[Any], *,
          threads: int, **choices: Any) -> dict[str, Callable[[], None]]:
  """Functions that train one more round of ours, by layout and pages.

  Args:
    kind: module whose `Loop` it is, as 'torch_fixmatch'.
    ours: whose network, weights and cohorts it gets.
    data: the loop's arguments that follow the network.
    threads: of PyTorch.
    **choices: of the loop, but its layout.
  """
  kinds = {'': '', **({', 2 MB': _HUGE} if FLAGS.torch_huge_pages else {})}
  return {f'PyTorch, {layout}{pages}': Apart(
      kind, ours, data, threads, {**choices, 'layout': layout}, huge).advance
      for layout in _LAYOUTS for pages, huge in kinds.items()}


def tunables() -> str:
  """The C library's tunables on our side, for the report."""
  return os.environ.get(_TUNABLES, '')


class Apart:
  """Starts the process, which ends with this one; see `loops`.

  Raises:
    ValueError: if it cannot make the loop.
  """

  def __init__(self, kind: str, ours: harness.Simulation, data: Sequence[Any],
               threads: int, choices: dict[str, Any], pages: str):
    self._ours, self._round = ours, 0
    context = multiprocessing.get_context('spawn')
    self._pipe, there = context.Pipe()
    process = context.Process(target=_serve, daemon=True, args=(
        there, threads, kind, ours.spec.model,
        jax.device_get(ours.model.params), [*map(_plain, data)], choices))
    with _variables(pages):
      process.start()
    there.close()
    self._wait()

  def advance(self) -> None:
    """Trains a round, to the end."""
    self._pipe.send(self._ours.cohort(self._round))
    self._round += 1
    self._wait()

  def _wait(self) -> None:
    try:
      error = self._pipe.recv()
    except EOFError:
      error = 'it ended'
    if error:
      raise ValueError(f"PyTorch's process: {error}")


def _plain(value: Any) -> Any:
  """Arrays on the host, which another process can read."""
  return ([np.asarray(x) for x in value] if isinstance(value, list)
          else np.asarray(value))


@contextlib.contextmanager
def _variables(pages: str) -> Iterator[None]:
  before = os.environ.get(_TUNABLES)
  try:
    os.environ[_TUNABLES] = pages
    yield
  finally:
    del os.environ[_TUNABLES]
    if before is not None:
      os.environ[_TUNABLES] = before


def _serve(pipe: Any, threads: int, kind: str, model: str, params: Any,
           data: Sequence[Any], choices: dict[str, Any]) -> None:
  """Trains a round for each cohort that comes; answers '' or an error."""
  try:
    import torch

    from experiments.benchmarks import torch_loop
    torch.set_num_threads(threads)
    make = importlib.import_module(f'experiments.benchmarks.{kind}').Loop
    loop = make(torch_loop.network_of(model, params, data[0].shape[1]), *data,
                **choices)
    pipe.send('')
    while True:
      loop.round(pipe.recv())
      pipe.send('')
  except EOFError:
    return
  except Exception as error:  # It is told in the other process.
    pipe.send(f'{type(error).__name__}: {error}')
