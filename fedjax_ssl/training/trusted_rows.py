"""Rows of a run that may be shown, while it may still be running."""
from __future__ import annotations

from collections.abc import Mapping
import pathlib
import time
from typing import Any

from fedjax_ssl.training import checkpoint, workdir
from fedjax_ssl.training.checkpoint import manifest, sealed

# Looks at steps that a running process may replace at the same time.
_LOOKS = 3


def read(folder: pathlib.Path, name: str) -> bytes:
  """Reads the bytes of a file of rows that may be shown, without a lock.

  Rows after the newest sound checkpoint are not covered by a hash and will be
  cut off by the next start, so they are not returned. A file is not checked if
  the run has no checkpoint yet, or only those of a version that sealed nothing.

  Args:
    folder: of the run.
    name: of the file.

  Raises:
    SealError: if the file is not what the newest sound checkpoint vouches for,
      or that checkpoint is of another run.
  """
  first = ''
  for round_, metadata in _readable(folder):
    wanted = (metadata.get(sealed.FILES) or {}).get(name)
    if wanted is None:
      return sealed.content(folder / name) or b''
    try:
      return _held(folder, name, round_, metadata)
    except sealed.SealError as error:
      first = first or str(error)
      # A run that found this one damaged goes on from the one before it. Arrays
      # take a while to read, so they are looked at in this case alone.
      if checkpoint.Checkpoints(folder / sealed.STEPS).is_sound(round_):
        break
  if first:
    raise sealed.SealError(first)
  return sealed.content(folder / name) or b''


def _held(folder: pathlib.Path, name: str, round_: int,
          metadata: Mapping[str, Any]) -> bytes:
  """What a file held at a checkpoint, if it and the file are of this run."""
  if names := sealed.differing_facts(metadata, sealed.identity(_facts(folder))):
    raise sealed.SealError(
        f'{folder / sealed.STEPS / str(round_)} is a checkpoint of another '
        f'run: it differs in {names}.')
  held, reason = sealed.checked_bytes(
      name, metadata[sealed.FILES][name], sealed.content(folder / name), round_)
  if reason:
    raise sealed.SealError(sealed.refusal(folder, name, round_, reason))
  return held


def _readable(folder: pathlib.Path) -> list[tuple[int, dict[str, Any]]]:
  """As `sealed.headers`, looking again while a run replaces its steps.

  Raises:
    SealError: if there are steps and none can be read.
  """
  for look in range(_LOOKS):
    if found := list(sealed.headers(folder)):
      return found
    if not manifest.rounds(folder / sealed.STEPS):
      return []
    if look + 1 < _LOOKS:
      time.sleep(0.05)
  raise sealed.SealError(
      f'None of the checkpoints in {folder / sealed.STEPS} can be read; give '
      'the same command again, which starts over.')


def _facts(folder: pathlib.Path) -> dict[str, Any]:
  """Returns the facts that a run's configuration has; {} without one."""
  try:
    return workdir.read_config(folder)['facts']
  except workdir.WorkdirError:
    return {}
