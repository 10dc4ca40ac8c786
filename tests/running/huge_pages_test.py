"""Huge pages: when the program starts once more, and that it does it once."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedjax_ssl.running import huge_pages

ASKED = 'always [madvise] never'
ON = 'glibc.malloc.hugetlb=1'


@pytest.mark.parametrize('variable, modes, libc, expected', [
    ('', ASKED, 'glibc 2.36', ON),
    ('', ASKED, 'glibc 2.35', ON),
    ('glibc.malloc.check=0', ASKED, 'glibc 3.0', f'glibc.malloc.check=0:{ON}'),
    ('', ASKED, 'glibc 2.34', None),  # Does not know it.
    ('', ASKED, '', None),  # Another C library.
    ('', '[always] madvise never', 'glibc 2.36', None),  # All have them.
    ('', 'always madvise [never]', 'glibc 2.36', None),
    ('', '', 'glibc 2.36', None),
    ('glibc.malloc.hugetlb=0', ASKED, 'glibc 2.36', None)])
def test_they_are_asked_for_where_that_changes_something(
    variable, modes, libc, expected):
  environ = {'GLIBC_TUNABLES': variable} if variable else {}
  assert huge_pages.wanted(environ, modes, libc) == expected


# A system as `wanted` asks for, whatever this one is.
PROGRAM = f"""
import os, sys
from fedjax_ssl.running import huge_pages
huge_pages._modes, huge_pages._libc = lambda: {ASKED!r}, lambda: 'glibc 2.36'
print('start', os.getpid(), sys.argv[1:])
huge_pages.restart()
print(os.environ.get('GLIBC_TUNABLES'))
"""


def _said(text, options=('-c',), **variables):
  environ = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
  how = {} if '-c' in options else {'input': text}
  words = [*options, *([text] if '-c' in options else []), 'a word', '--flag=']
  return subprocess.run(
      [sys.executable, *words], env={**environ, **variables}, text=True,
      capture_output=True, check=True, **how).stdout.splitlines()


def test_a_program_starts_once_more_with_its_number_and_its_words():
  first, second, variable = _said(PROGRAM)
  assert first == second
  assert first.endswith("['a word', '--flag=']")
  assert variable == ON


def test_a_choice_of_the_users_stays():
  assert _said(PROGRAM, GLIBC_TUNABLES='glibc.malloc.hugetlb=0')[1:] == [
      'glibc.malloc.hugetlb=0']


def test_a_program_that_has_begun_goes_on():
  assert _said('import numpy\n' + PROGRAM)[1:] == ['None']


def test_a_program_from_standard_input_goes_on():
  assert _said(PROGRAM, options=('-',))[1:] == ['None']


def test_the_command_starts_once_more():
  """So nothing that it imports before has loaded NumPy."""
  said = _said(PROGRAM.replace('huge_pages.restart()', (
      'from fedjax_ssl import cli\n'
      'sys.argv = ["fedjax-ssl", "train"]\ncli.main()')))
  assert said[-1] == ON
  assert [line.split()[0] for line in said if line].count('start') == 2
