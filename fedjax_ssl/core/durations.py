"""Seconds as people read them, without JAX: a sweep only starts programs."""
from __future__ import annotations


def text(seconds: float) -> str:
  """Returns `45s`, `12m30s` or `3h05m`."""
  seconds = round(seconds)
  if seconds < 60:
    return f'{seconds}s'
  if seconds < 3600:
    return f'{seconds // 60}m{seconds % 60:02d}s'
  return f'{seconds // 3600}h{seconds % 3600 // 60:02d}m'
