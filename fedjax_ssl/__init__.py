"""Federated semi-supervised learning in JAX."""
from __future__ import annotations

import importlib
from typing import Any

__version__ = '0.1.0'

_MODULES = ('aggregation', 'core', 'data', 'losses', 'methods', 'models',
            'task', 'training')
_NAMES = {'load': 'task', 'TaskSpec': 'task', 'make_task': 'task',
          'template': 'task', 'METHODS': 'methods', 'MODELS': 'models'}


def __getattr__(name: str) -> Any:
  if name in _MODULES:
    return importlib.import_module(f'fedjax_ssl.{name}')
  if name in _NAMES:
    return getattr(importlib.import_module(f'fedjax_ssl.{_NAMES[name]}'), name)
  raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
