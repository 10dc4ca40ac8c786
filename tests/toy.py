"""The toy federation of `fedjax_ssl.testing`, by the name that tests use."""
from __future__ import annotations

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

__all__ = ('LABELED', 'NOBODY', 'NUM_CLASSES', 'NUM_CLIENTS', 'SIDE',
           'UNLABELED', 'examples', 'federation', 'key', 'means', 'preprocess',
           'shift', 'task')
