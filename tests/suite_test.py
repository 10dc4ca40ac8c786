"""What `conftest.py` adds to the suite, on a suite of its own."""
from __future__ import annotations

import os
import subprocess
import sys

_FIRST = """
import pytest
from tests import conftest

def test_first():
  assert 1 + 1 == 3, 'no sum'

@pytest.mark.thorough
def test_in_time():
  conftest._started -= 2000

@pytest.mark.thorough
def test_of_a_group_that_has_begun():
  pass
"""
_SECOND = """
import pytest

@pytest.mark.thorough
def test_too_late():
  pass

def test_last():
  pass
"""


def test_failures_are_told_at_once_and_thorough_tests_know_their_time(
    tmp_path, root):
  for name, text in (('a_test.py', _FIRST), ('b_test.py', _SECOND)):
    (tmp_path / name).write_text(text, encoding='utf-8')
  output = subprocess.run(
      [sys.executable, '-m', 'pytest', '-v', '-p', 'tests.conftest',
       '-p', 'no:cacheprovider', '-c', os.devnull, '-W', 'ignore',
       tmp_path / 'a_test.py', tmp_path / 'b_test.py'], cwd=root,
      capture_output=True, text=True, check=False,
      env={**os.environ, 'PYTHONPATH': str(root),
           'FEDJAX_SSL_THOROUGH_SECONDS': '1000'}).stdout
  assert 'no sum' in output.partition('test_last')[0]
  assert 'test_in_time PASSED' in output
  assert 'test_of_a_group_that_has_begun PASSED' in output
  assert 'test_too_late SKIPPED' in output
  assert 'test_last PASSED' in output
