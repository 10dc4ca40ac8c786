"""A save that dies at any moment leaves a sound step."""
from collections.abc import Callable, Iterator
import errno
import functools
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from fedjax_ssl.training import checkpoint
from tests.thorough import wider
from tests.training.steps import (
  assert_restores,
  assert_same_bits,
  make_tree,
  REPOSITORY,
  restore,
)

# What Orbax's threads leave behind must not reach the user.
pytestmark = pytest.mark.filterwarnings(
    'error::pytest.PytestUnraisableExceptionWarning')


class Killed(BaseException):
  """Stands for the end of the process."""


class _Bomb:
  """Fails the n-th write, rename, creation or removal, and all later ones."""

  CREATES = ('os.mkdir', 'os.rename', 'os.truncate')
  REMOVES = ('os.remove', 'os.rmdir', 'shutil.rmtree')

  def __init__(self):
    self.left: int | None = None
    self.full = False  # A full disk refuses to create but not to remove.
    sys.addaudithook(self)

  def __call__(self, event: str, args: tuple[Any, ...]) -> None:
    if self.left is None:
      return
    if (event in self.CREATES or event in self.REMOVES and not self.full
        or event == 'open' and isinstance(args[2], int)
        and args[2] & (os.O_WRONLY | os.O_RDWR)):
      self.left -= 1
      if self.left <= 0:
        raise OSError(errno.ENOSPC, 'full') if self.full else Killed


@pytest.fixture(scope='module')
def bomb() -> Iterator[_Bomb]:
  bomb = _Bomb()
  yield bomb
  bomb.left = None


def survive(save: Callable[[], None], bomb: _Bomb, n: int) -> bool:
  """Whether the save got through before its n-th change of the disk."""
  bomb.left = n
  try:
    save()
    return True
  except Killed:
    return False
  finally:
    bomb.left, bomb.full = None, False


def wait_for_ends() -> None:
  """Until only threads are left that do not keep the process from ending."""
  until = time.monotonic() + 200  # One that waits does so for five minutes.
  while lasting := [t for t in threading.enumerate()
                    if not t.daemon and t is not threading.main_thread()]:
    assert time.monotonic() < until, lasting
    time.sleep(0.01)


@pytest.mark.parametrize('first', [1, *wider(2, 3)])
def test_crash_at_every_change_of_the_disk(two_steps, tmp_path, bomb, first):
  """At every third one; together they are all."""
  for n in range(first, 200, 3):
    folder = pathlib.Path(shutil.copytree(two_steps, tmp_path / str(n)))
    steps = checkpoint.Checkpoints(folder)
    if survive(functools.partial(steps.save, 3, make_tree(3)), bomb, n):
      break
    wait_for_ends()  # Of Orbax's threads, which a real death would end.
    found = assert_restores(folder, 2, 3)
    checkpoint.Checkpoints(folder).save(found + 1, make_tree(found + 1))
    assert_restores(folder, found + 1)
  assert 10 < n < 197


def test_disk_that_is_full_at_any_change(folder, bomb):
  for n in range(1, 100):
    steps = checkpoint.Checkpoints(folder)
    bomb.full = True
    try:
      if survive(functools.partial(steps.save, 3, make_tree(3)), bomb, n):
        break
    except checkpoint.CheckpointError as error:
      assert 'full' in str(error)
    # A thread that waits would keep the process from ending.
    wait_for_ends()
    assert_restores(folder, 2)
  assert 10 < n < 99
  assert_restores(folder, 3)


_SAVE_FOR_EVER = """
import os, signal, sys, time
from fedjax_ssl.training import checkpoint
from tests.training import steps as test
import orbax.checkpoint
for victim, life in enumerate(map(float, sys.argv[2:])):
  folder = f'{sys.argv[1]}/{victim}'
  os.mkdir(folder)
  child = os.fork()
  if child == 0:
    steps = checkpoint.Checkpoints(folder + '/checkpoints')
    for round_ in range(1, 10**6):
      steps.save(round_, test.make_tree(round_))
      with open(folder + '/done', 'w') as file:
        file.write(str(round_))
  while not os.path.exists(folder + '/done'):
    time.sleep(.005)
  time.sleep(life)
  os.kill(child, signal.SIGKILL)
  os.waitpid(child, 0)
"""


def test_sigkill_at_any_moment(tmp_path):
  lives = [0.003, 0.031, 0.05, 0.062, 0.087, 0.11]
  subprocess.run(
      [sys.executable, '-c', _SAVE_FOR_EVER, str(tmp_path), *map(str, lives)],
      check=True, timeout=600, cwd=REPOSITORY,
      env=os.environ | {'PYTHONPATH': str(REPOSITORY),
                        'JAX_PLATFORMS': 'cpu'})
  for victim in range(len(lives)):
    folder = tmp_path / str(victim) / 'checkpoints'
    # The kill may fall between the emptying and the writing of `done`.
    done = int((tmp_path / str(victim) / 'done').read_text() or 1)
    result = restore(folder)
    assert result is not None
    assert result[0] in (done, done + 1) or done == 1
    assert_same_bits(result[1], make_tree(result[0]))
    checkpoint.Checkpoints(folder).save(
        result[0] + 1, make_tree(result[0] + 1))
    assert_restores(folder, result[0] + 1)


_WRITE_UNTIL_THE_LIMIT = """
import os, resource, signal, sys
from fedjax_ssl.training import checkpoint
from tests.training import steps as test
import orbax.checkpoint
for size in map(int, sys.argv[2:]):
  child = os.fork()
  if child == 0:
    signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
    checkpoint.Checkpoints(f'{sys.argv[1]}/{size}').save(3, test.make_tree(3))
    os._exit(0)
  status = os.waitpid(child, 0)[1]
  assert os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXFSZ
"""


def test_death_in_the_middle_of_a_write(two_steps, tmp_path):
  """Also of writes below Python, which the bomb does not see."""
  sizes = [0, 200, 600, 2000, 4000]
  for size in sizes:
    shutil.copytree(two_steps, tmp_path / str(size))
  subprocess.run(
      [sys.executable, '-c', _WRITE_UNTIL_THE_LIMIT, str(tmp_path),
       *map(str, sizes)],
      check=True, timeout=600, cwd=REPOSITORY,
      env=os.environ | {'PYTHONPATH': str(REPOSITORY),
                        'JAX_PLATFORMS': 'cpu'})
  for size in sizes:
    folder = tmp_path / str(size)
    assert_restores(folder, 2)
    checkpoint.Checkpoints(folder).save(3, make_tree(3))
    assert_restores(folder, 3)


def test_orbax_is_silent(folder, caplog, capfd):
  caplog.set_level('INFO')
  steps = checkpoint.Checkpoints(folder)
  steps.save(3, make_tree(3))
  steps.restore(make_tree(0))
  assert caplog.text == ''
  assert capfd.readouterr() == ('', '')
