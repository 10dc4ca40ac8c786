"""What `conftest.py` adds to the suite, on a suite of its own."""
from __future__ import annotations

import os
import subprocess
import sys

_TESTS = """
import pytest

def test_first():
  assert 1 + 1 == 3, 'no sum'

@pytest.mark.thorough
def test_more():
  pass

def test_last():
  pass
"""


def test_failures_are_told_at_once_and_thorough_tests_know_their_time(
    tmp_path, root):
  (tmp_path / 'one_test.py').write_text(_TESTS, encoding='utf-8')
  output = subprocess.run(
      [sys.executable, '-m', 'pytest', '-v', '-p', 'tests.conftest',
       '-p', 'no:cacheprovider', '-c', os.devnull, '-W', 'ignore',
       tmp_path / 'one_test.py'], cwd=root, capture_output=True, text=True,
      check=False, env={**os.environ, 'PYTHONPATH': str(root),
                        'FEDJAX_SSL_THOROUGH_SECONDS': '0'}).stdout
  assert 'no sum' in output.partition('test_last')[0]
  assert 'test_more SKIPPED' in output
  assert '1 failed, 1 passed, 1 skipped' in output
