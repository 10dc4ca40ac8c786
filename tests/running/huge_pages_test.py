"""Huge pages: when the program starts once more, and that it does it once."""
from __future__ import annotations

import os
import subprocess
import sys

import pytest

from fedjax_ssl import cli
from fedjax_ssl.cli import places
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
from fedjax_ssl import cli
from fedjax_ssl.cli import places
from fedjax_ssl.running import huge_pages
huge_pages._modes, huge_pages._libc = lambda: {ASKED!r}, lambda: 'glibc 2.36'
print('start', os.getpid(), sys.argv[1:])
huge_pages.restart()
print(os.environ.get('GLIBC_TUNABLES'))
"""


@pytest.fixture
def program(tmp_path):
  """A runner of a text as a file: what it prints, line by line."""
  def said(text, words=('a word', '--flag='), how=(), **variables):
    file = tmp_path / 'program.py'
    file.write_text(text)
    environ = {k: v for k, v in os.environ.items() if k != 'GLIBC_TUNABLES'}
    with file.open() as opened:
      return subprocess.run(
          [sys.executable, *(how or [str(file)]), *words], text=True,
          env={**environ, **variables}, capture_output=True, check=True,
          timeout=300, stdin=opened).stdout.splitlines()
  return said


def test_a_program_starts_once_more_with_its_number_and_its_words(program):
  first, second, variable = program(PROGRAM)
  assert first == second
  assert first.endswith("['a word', '--flag=']")
  assert variable == ON


def test_a_choice_of_the_users_stays(program):
  assert program(PROGRAM, GLIBC_TUNABLES='glibc.malloc.hugetlb=0')[1:] == [
      'glibc.malloc.hugetlb=0']


def test_a_program_that_has_begun_goes_on(program):
  assert program('import numpy\n' + PROGRAM)[1:] == ['None']


@pytest.mark.parametrize('how', [
    ['-'], ['/dev/stdin'], ['/proc/self/fd/0'], ['-c', PROGRAM]],
    ids=lambda how: how[0])
def test_a_program_that_is_in_no_file_goes_on(program, how):
  assert program(PROGRAM, how=how)[1:] == ['None']


WORKER = f"""
import multiprocessing, os, sys
from fedjax_ssl.running import huge_pages
huge_pages._modes, huge_pages._libc = lambda: {ASKED!r}, lambda: 'glibc 2.36'

def work():
  print('work', flush=True)
  huge_pages.restart()
  print(os.environ.get('GLIBC_TUNABLES'), flush=True)

if __name__ == '__main__':
  one = multiprocessing.get_context(sys.argv[1]).Process(target=work)
  one.start()
  one.join()
  sys.exit(one.exitcode)
"""


@pytest.mark.parametrize('way', ['fork', 'spawn'])
def test_a_process_that_works_for_another_goes_on(program, way):
  """It would become the whole program, or lose what it was asked to do."""
  assert program(WORKER, words=[way]) == ['work', 'None']


def test_the_command_starts_once_more(program):
  """So nothing that it imports before has loaded NumPy."""
  said = program(PROGRAM.replace('huge_pages.restart()', (
      'from fedjax_ssl import cli\n'
      'sys.argv[1:] = ["train"]\ncli.main()')))
  assert said[-1] == ON
  assert [line.split()[0] for line in said if line].count('start') == 2


@pytest.mark.parametrize('folder, starts_again', [
    ('experiments', True), ('.', False)])
def test_scripts_of_ours_start_once_more_and_of_users_not(
    monkeypatch, folder, starts_again):
  """What a script of a user's has done before would be done twice."""
  root = places.repository()
  assert root
  asked = []
  class Begun(Exception):
    pass
  def begin(may_restart):
    asked.append(may_restart)
    raise Begun
  monkeypatch.setattr(cli, '_begin', begin)
  monkeypatch.setattr(sys, 'argv', [str(root / folder / 'digits_dirdir.py')])
  with pytest.raises(Begun):
    cli.run_setting('digits_dirdir')
  assert asked == [starts_again]
