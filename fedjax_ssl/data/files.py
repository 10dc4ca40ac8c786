"""Reads files that may be broken or hostile; refuses them in one line."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import contextlib
import os
import pathlib
import stat
import zipfile

import numpy as np

from fedjax_ssl.core import checks

_KINDS = ((stat.S_ISDIR, 'a folder'), (stat.S_ISFIFO, 'a pipe'),
          (stat.S_ISCHR, 'a device'), (stat.S_ISBLK, 'a device'),
          (stat.S_ISSOCK, 'a socket'))


class DataError(ValueError):
  """The data are missing or broken; the message names file and fault."""


class DataNameError(DataError, checks.FieldError):
  """No data set can have such a name."""


def check_regular(path: str | os.PathLike[str]) -> None:
  """Raises DataError unless `path` is a plain file that may be read.

  A pipe would block.
  """
  try:
    mode = os.stat(path).st_mode
  except (OSError, ValueError) as error:
    reason = getattr(error, 'strerror', None) or error
    raise DataError(f'cannot be read ({reason})') from error
  if not stat.S_ISREG(mode):
    kind = next((words for test, words in _KINDS if test(mode)), 'none')
    raise DataError(f'must be a file, and is {kind}')
  try:
    with open(path, 'rb'):
      pass
  except OSError as error:
    raise DataError(f'cannot be read ({error.strerror})') from error


def read_arrays(path: str | os.PathLike[str],
                choose: Callable[[list[str]], Iterable[str]] = list
                ) -> dict[str, np.ndarray]:
  """Reads arrays of an .npz file; nothing is unpickled.

  Args:
    path: the file.
    choose: names of all arrays -> those to read.

  Returns:
    The arrays by name.

  Raises:
    DataError: whatever is wrong with the file; the message does not name it.
  """
  check_regular(path)
  if not zipfile.is_zipfile(path):
    raise DataError('truncated, or no .npz (zip) file')
  with _saying_why(), np.load(path, allow_pickle=False) as archive:
    wanted = list(choose(list(archive.files)))
    _check_size(archive, wanted)
    return {name: _member(archive, name) for name in wanted}


def read_array(path: str | os.PathLike[str]) -> np.ndarray:
  """Reads an .npy file, or of an .npz file `x` or the only array.

  Raises:
    DataError: as `read_arrays`, and for an .npz file of several others.
  """
  if os.fspath(path).lower().endswith('.npz'):
    array, = read_arrays(path, _the_one).values()
    return array
  check_regular(path)
  with _saying_why(), _refusing_objects('it'), np.errstate(over='ignore'):
    # Mapped first: a size that the file has not is refused, not made room for.
    _check_fits(np.lib.format.open_memmap(path, mode='r').nbytes)
    with open(path, 'rb') as file:  # A map ends the process if that fails.
      return np.lib.format.read_array(file, allow_pickle=False)


def _the_one(names: list[str]) -> list[str]:
  if 'x' not in names and len(names) != 1:
    raise DataError('it must have an array x, or one array only, not '
                    f'{", ".join(sorted(names)) or "none"}')
  return ['x'] if 'x' in names else names


@contextlib.contextmanager
def _saying_why() -> Iterator[None]:
  """Says in one line why a file of arrays cannot be read."""
  try:
    yield
  except DataError:
    raise
  # On damaged bytes the readers of zip and .npy raise nearly anything: errors
  # of syntax, tokens, recursion, memory, types, compression.
  except Exception as error:
    reason = checks.one_line(error)[:200]
    # A fault of the system may pass; that of a file stays.
    raise DataError(f'cannot be read ({reason})') from (
        error if isinstance(error, OSError | MemoryError) else None)


@contextlib.contextmanager
def _refusing_objects(what: str) -> Iterator[None]:
  """Says of an array of Python objects what to save in its place."""
  try:
    yield
  except ValueError as error:
    # What NumPy says where it reads such an array, and where it maps one.
    if not any(words in str(error) for words in (
        'allow_pickle', 'Python objects')):
      raise
    raise DataError(f'{what} is an array of Python objects, which are not '
                    'read; save numbers as such, and words by .astype(str)'
                    ) from None


def _member(archive: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
  """One array; the error says why a member is no array of numbers."""
  with _refusing_objects(repr(name)):
    array = archive[name]
  if not isinstance(array, np.ndarray):  # Bytes of a member of another kind.
    raise DataError(f'{name!r} is no .npy array')
  return array


def _check_size(archive: np.lib.npyio.NpzFile, wanted: list[str]) -> None:
  """Refuses arrays that would not fit in memory, before they are unpacked."""
  assert archive.zip is not None  # It is open.
  total = sum(info.file_size for info in archive.zip.infolist()
              if info.filename.removesuffix('.npy') in wanted)
  _check_fits(total)


def _check_fits(total: int) -> None:
  """Refuses arrays of so many bytes if they would not fit in memory."""
  most = memory()
  if total > most:
    raise DataError(f'its arrays need {total / 2**30:.1f} GiB, and this '
                    f'machine has {most / 2**30:.1f} GiB of memory')


def memory() -> int:
  """Returns how many bytes of memory this process may have at most."""
  try:
    most = os.sysconf('SC_PHYS_PAGES') * os.sysconf('SC_PAGE_SIZE')
  except (ValueError, OSError, AttributeError):
    most = 2**63 - 1
  try:  # The limit of a container.
    most = min(most, int(pathlib.Path('/sys/fs/cgroup/memory.max').read_text()))
  except (OSError, ValueError):
    pass
  return most
