"""What was written is on the disk, or gone."""
from __future__ import annotations

import os
import pathlib
import shutil
import time


def remove(partial: pathlib.Path) -> None:
  """Removes a step that failed, to which threads may still write."""
  for _ in range(20):
    shutil.rmtree(partial, ignore_errors=True)
    time.sleep(0.02)
    if not partial.exists():
      return


def flush(step: pathlib.Path) -> None:
  """Has the disk confirm every file and folder of a step."""
  for folder, _, files in os.walk(step):
    for path in [*(os.path.join(folder, f) for f in files), folder]:
      _flush_one(path)
  _flush_one(step.parent)


def _flush_one(path: str | os.PathLike[str]) -> None:
  """fsync of one file or folder, by name."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)
