"""Writing files so that each is whole on the disk, or not there at all."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
import contextlib
import errno
import fcntl
import itertools
import json
import os
import pathlib
import re
import secrets
import shutil
import time
from typing import Any

# A file that is being written: the number of the process, which another machine
# may have as well, and a random one, which earlier versions leave out.
_PARTIAL = re.compile(r'.+\.\d+(-[0-9a-f]{8})?\.partial')


def remove(partial: pathlib.Path) -> None:
  """Removes a step that failed, to which threads may still write."""
  for _ in range(20):
    shutil.rmtree(partial, ignore_errors=True)
    time.sleep(0.02)
    if not partial.exists():
      return


def fsync_tree(step: pathlib.Path) -> None:
  """Waits until every file and folder of a step is on the disk."""
  for folder, _, files in os.walk(step):
    for path in [*(os.path.join(folder, f) for f in files), folder]:
      fsync(path)
  fsync(step.parent)


def aside(path: pathlib.Path) -> pathlib.Path:
  """Returns a place beside a path that is free: `NAME.replaced-N`."""
  return next(place for number in itertools.count(1) if not (
      place := path.with_name(f'{path.name}.replaced-{number}')).exists())


def as_json(value: Any) -> str:
  """Writes a value as JSON, an item to a line, but a list of numbers on one."""
  # A text of JSON holds no line break, so this changes none.
  return re.sub(
      r'\[\n\s+([-+\w.,\s]+?)\n\s*\]',
      lambda found: f'[{" ".join(found[1].split())}]',
      json.dumps(value, indent=1)) + '\n'


def replace(file: pathlib.Path, data: bytes | bytearray) -> None:
  """Writes a whole file, or leaves the old one."""
  replace_all(file.parent, {file.name: data})


def replace_all(folder: pathlib.Path, files: Mapping[str, bytes | bytearray]
                ) -> None:
  """Writes several files beside their places, and moves them when all are.

  Raises:
    OSError: if one cannot be written; the old ones are as they were, unless
      a move itself failed.
  """
  if not folder.is_dir():  # Said of the folder, not of a file beside it.
    number = errno.ENOTDIR if folder.exists() else errno.ENOENT
    raise OSError(number, os.strerror(number), str(folder))
  # Another process, or a thread of this one, may write the same files.
  mark = f'{os.getpid()}-{secrets.token_hex(4)}'
  partials = {name: folder / f'{name}.{mark}.partial' for name in files}
  try:
    for name, data in files.items():
      if (folder / name).is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR),
                                str(folder / name))
      with _naming(folder / name), open(partials[name], 'wb') as stream:
        stream.write(data)
        stream.flush()
        os.fsync(stream.fileno())
    for name, partial in partials.items():
      os.replace(partial, folder / name)
  except BaseException:
    for partial in partials.values():
      with contextlib.suppress(OSError):
        partial.unlink()
    raise
  fsync(folder)


@contextlib.contextmanager
def writing(what: str | os.PathLike[str],
            kind: type[Exception] = ValueError) -> Iterator[None]:
  """Turns what the system refuses into `kind`, which says what is written."""
  try:
    yield
  except OSError as error:
    raise kind(f'{os.fspath(what)} cannot be written: '
               f'{error.strerror or error}.') from error


@contextlib.contextmanager
def _naming(file: pathlib.Path) -> Iterator[None]:
  """Names the file in errors of writing, as of a full disk, which name none."""
  try:
    yield
  except OSError as error:
    if error.errno is not None:
      error.filename = error.filename or str(file)
    raise


def remove_partials(folder: pathlib.Path) -> None:
  """Removes what killed processes were writing to a folder nobody else has.

  Only what `replace_all` names so; it takes no name away from other files.
  """
  for path in folder.glob('*.partial'):
    if _PARTIAL.fullmatch(path.name) and not path.is_symlink():
      with contextlib.suppress(OSError):
        path.unlink()


def try_lock(handle: int, *, shared: bool = False) -> bool:
  """Takes the lock of an open file; returns False if another process has it.

  Raises:
    OSError: if the file system cannot lock the file.
  """
  kind = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
  try:
    fcntl.flock(handle, kind | fcntl.LOCK_NB)
  except (BlockingIOError, PermissionError):  # The latter on some NFS.
    return False
  return True


@contextlib.contextmanager
def exclusive(file: pathlib.Path) -> Iterator[None]:
  """Keeps other processes out of the block; they wait for it at this file."""
  file.parent.mkdir(parents=True, exist_ok=True)
  with open(file, 'a', encoding='utf-8') as handle:
    fcntl.flock(handle, fcntl.LOCK_EX)
    yield


def fsync(path: str | os.PathLike[str]) -> None:
  """Calls fsync for one file or folder, by name."""
  descriptor = os.open(path, os.O_RDONLY)
  try:
    os.fsync(descriptor)
  finally:
    os.close(descriptor)


def texts(value: Any) -> list[str]:
  """Returns a list of texts that a file holds; raises ValueError for others."""
  if not isinstance(value, list) or not all(
      isinstance(each, str) for each in value):
    raise ValueError(f'{value!r:.40} is no list of texts')
  return value
