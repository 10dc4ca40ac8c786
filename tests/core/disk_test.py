"""Files are written whole or not at all."""
from __future__ import annotations

import resource
import signal

import pytest

from fedjax_ssl.core import disk


def test_a_file_that_cannot_be_written_is_named_and_stays(tmp_path):
  """As on a full disk, of which the system's own error names no file."""
  file = tmp_path / 'run.flags'
  disk.replace(file, b'old')
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
  resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
  try:
    with pytest.raises(OSError) as failed:
      disk.replace(file, bytes(100))
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, before)
  assert failed.value.filename == str(file) and str(file) in str(failed.value)
  assert file.read_bytes() == b'old' and [*tmp_path.iterdir()] == [file]
