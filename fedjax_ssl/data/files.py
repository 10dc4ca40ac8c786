"""Reads files that may be broken or hostile; refuses them in one line."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
import contextlib
import math
import os
import pathlib
import stat
from typing import IO
import zipfile

import numpy as np

from fedjax_ssl.core import checks

_KINDS = ((stat.S_ISDIR, 'a folder'), (stat.S_ISFIFO, 'a pipe'),
          (stat.S_ISCHR, 'a device'), (stat.S_ISBLK, 'a device'),
          (stat.S_ISSOCK, 'a socket'))
_MAGIC = b'\x93NUMPY'  # What an .npy file begins with.


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
  with _saying_why(), _archive(path) as archive:
    members = {info.filename.removesuffix('.npy'): info
               for info in archive.infolist()}
    wanted = {name: members[name] for name in choose(list(members))}
    # Before any is unpacked.
    _check_fits(sum(info.file_size for info in wanted.values()))
    found = {}
    for name, info in wanted.items():
      with archive.open(info) as file:
        found[name] = _array(file, info.file_size, repr(name))
    return found


def read_array(path: str | os.PathLike[str]) -> np.ndarray:
  """Reads an .npy file, or of an .npz file `x` or the only array.

  Raises:
    DataError: as `read_arrays`, and for an .npz file of several others.
  """
  if os.fspath(path).lower().endswith('.npz'):
    array, = read_arrays(path, _the_one).values()
    return array
  check_regular(path)
  with _saying_why(), open(path, 'rb') as file:
    size = os.path.getsize(path)
    _check_fits(size)
    return _array(file, size, 'it')


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


def _archive(path: str | os.PathLike[str]) -> zipfile.ZipFile:
  """Opens an .npz file."""
  try:
    return zipfile.ZipFile(path)
  except zipfile.BadZipFile as error:
    if isinstance(fault := error.__context__, OSError):
      raise fault from None
    raise DataError('truncated, or no .npz (zip) file') from None


def _array(file: IO[bytes], size: int, what: str) -> np.ndarray:
  """Reads an .npy file of `size` bytes; errors call the array `what`."""
  if file.read(len(_MAGIC)) != _MAGIC:
    raise DataError(f'{what} is no .npy array')
  file.seek(0)
  shape, dtype = _header(file)
  if dtype.hasobject:
    raise DataError(f'{what} is an array of Python objects, which are not '
                    'read; save numbers as such, and words by .astype(str)')
  # Else room would be made for it, which may lack, at each try.
  if math.prod(shape) * dtype.itemsize > size:
    raise DataError(f'cannot be read ({what} is cut off: of its shape {shape} '
                    f'there are {size} bytes)')
  file.seek(0)
  return np.lib.format.read_array(file, allow_pickle=False)


def _header(file: IO[bytes]) -> tuple[tuple[int, ...], np.dtype]:
  """Reads shape and dtype of an array."""
  is_first = np.lib.format.read_magic(file) == (1, 0)
  try:
    shape, _, dtype = (np.lib.format.read_array_header_1_0 if is_first else
                       np.lib.format.read_array_header_2_0)(file)
  except MemoryError:  # What Python says of a text that nests too deep.
    raise DataError('cannot be read (a header nests too deep)') from None
  return shape, dtype


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
