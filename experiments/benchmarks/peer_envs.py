"""The peers' virtual environments: what is in them, and whether they exist."""
from __future__ import annotations

import json
import pathlib
import sys
from typing import Any, NamedTuple

_TORCH = 'torch==2.13.0'


class Environment(NamedTuple):
  """How one is made.

  Attributes:
    requirements: installed together, with what they need.
    alone: installed after that without what they ask for, which is too old.
  """

  requirements: tuple[str, ...]
  alone: tuple[str, ...] = ()


# Versions that are known to work together. FedJAX asks for a jaxlib of its own
# time; it gets the JAX that we run ourselves.
ENVIRONMENTS = {
    'torch': Environment((_TORCH, 'numpy>=2,<3')),
    'fedjax': Environment(
        ('jax==0.10.2', 'numpy>=2,<3', 'optax==0.2.8', 'dm-haiku==0.0.17',
         'absl-py', 'msgpack', 'requests', 'scipy'), ('fedjax==0.0.17',)),
    'flower': Environment(('flwr[simulation]==1.41.0', _TORCH)),
    'pfl': Environment(('pfl==0.6.0', _TORCH)),
}
_MARK = 'made.json'


def interpreter(folder: pathlib.Path, name: str) -> pathlib.Path:
  """The Python of an environment."""
  where = ('Scripts', 'python.exe') if sys.platform == 'win32' else (
      'bin', 'python')
  return (folder / name).joinpath(*where)


def _marking(name: str) -> dict[str, Any]:
  made = ENVIRONMENTS[name]
  return {'requirements': list(made.requirements), 'alone': list(made.alone)}


def begin(folder: pathlib.Path, name: str) -> None:
  """Makes an environment's folder, marked as ours and unfinished."""
  (folder / name).mkdir(parents=True)
  (folder / name / _MARK).write_text('{}\n')


def is_ours(folder: pathlib.Path, name: str) -> bool:
  """Whether `begin` made what is there."""
  return (folder / name / _MARK).is_file() and not (folder / name).is_symlink()


def mark(folder: pathlib.Path, name: str) -> None:
  """Writes that an environment is complete."""
  (folder / name / _MARK).write_text(json.dumps(_marking(name)) + '\n')


def complaint(folder: pathlib.Path, name: str) -> str | None:
  """Why an environment cannot be used, or None if it can."""
  try:
    found = json.loads((folder / name / _MARK).read_text())
  except (OSError, ValueError):
    return 'missing'
  if not found:
    return 'unfinished'
  if found != _marking(name) or not interpreter(folder, name).exists():
    return 'of other versions'
  return None
