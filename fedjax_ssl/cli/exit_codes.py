"""Exit codes of commands that end by an error."""
from __future__ import annotations

import errno

from fedjax_ssl.core import blame

# Of one that refuses its arguments or data: it would do so again.
REFUSED = 2
# Of one that met a fault which may be gone at another try.
MAY_PASS = 75

_PASSING = frozenset((
    errno.EAGAIN, errno.EBUSY, errno.EDQUOT, errno.EFBIG, errno.EIO,
    errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOSPC, errno.ESTALE,
    errno.ETIMEDOUT))


def of(error: BaseException) -> int:
  """Returns the exit code of a command that an error ends."""
  return MAY_PASS if _may_pass(error) else REFUSED


def _may_pass(error: BaseException) -> bool:
  """Returns whether a fault of the system, which may pass, is behind an error.

  Such are a full disk, too little memory, of a device as well, or a folder that
  another process holds. What `raise ... from None` hides is not behind it.
  """
  behind: BaseException | None = error
  while behind is not None:
    if getattr(behind, 'may_pass', False) or blame.is_full(behind) or (
        isinstance(behind, MemoryError)) or (
        isinstance(behind, OSError) and behind.errno in _PASSING):
      return True
    behind = (behind.__cause__ if behind.__suppress_context__
              else behind.__context__)
  return False
