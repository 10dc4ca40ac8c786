"""The toy federation of `fedjax_ssl.testing`, and how tests evaluate it."""
from __future__ import annotations

from collections.abc import Callable

from fedjax_ssl.core.types import Method
from fedjax_ssl.testing.keys import key
from fedjax_ssl.testing.toy import (
  examples,
  federation,
  LABELED,
  means,
  NOBODY,
  NUM_CLASSES,
  NUM_CLIENTS,
  preprocess,
  shift,
  SIDE,
  task,
  UNLABELED,
)
from fedjax_ssl.training import evaluate

__all__ = ('LABELED', 'NOBODY', 'NUM_CLASSES', 'NUM_CLIENTS', 'SIDE',
           'UNLABELED', 'evaluation', 'examples', 'federation', 'key', 'means',
           'preprocess', 'shift', 'task')


def evaluation(method: Method) -> Callable[..., dict]:
  """(state, federation, probe) -> all metrics, to be compiled as one."""
  own, rest = evaluate.in_turn(method, None)
  return lambda state, federation, probe: rest(
      state, federation, probe, own(state, federation))
