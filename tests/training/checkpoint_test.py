"""A step is restored bit for bit or not at all."""
from collections.abc import Callable, Iterator
import contextlib
import errno
import functools
import os
import pathlib
import resource
import shutil
import subprocess
import sys
import threading
import time
from typing import Any, NamedTuple

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fedjax_ssl.training import checkpoint, manifest

# What Orbax's threads leave behind must not reach the user.
pytestmark = pytest.mark.filterwarnings(
    'error::pytest.PytestUnraisableExceptionWarning')

REPOSITORY = pathlib.Path(__file__).parents[2]


class Server(NamedTuple):
  params: Any
  count: Any
  unused: Any = ()


class Carry(NamedTuple):
  server: Any
  memory: Any
  round: Any


def make_tree(round_: int) -> Carry:
  """A state with all that methods put into one; other numbers every round."""
  rng = np.random.default_rng(round_)
  kernel = rng.normal(size=(40, 30)).astype(np.float32)
  kernel[0, :3] = [np.nan, -0.0, np.inf]
  params = {'conv 1/w': kernel, 'half': rng.normal(size=5).astype(
      ml_dtypes.bfloat16), 'none': {}, 'no_rows': np.zeros((0, 3), np.float32)}
  memory = (rng.integers(0, 2, (6, 4)).astype(bool), [
      rng.integers(0, 2**32, 6, np.uint32), None, np.float32(round_)])
  return Carry(Server(params, np.int32(7 * round_)), memory, np.int32(round_))


def assert_same_bits(got: Any, want: Any) -> None:
  chex.assert_trees_all_equal_structs(got, want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    a, b = np.asarray(a), np.asarray(b)
    assert (a.dtype, a.shape) == (b.dtype, b.shape)
    assert a.tobytes() == b.tobytes()


def files(folder: pathlib.Path) -> dict[str, bytes]:
  return {str(p.relative_to(folder)): p.read_bytes()
          for p in sorted(folder.rglob('*')) if p.is_file()}


@pytest.fixture(scope='module')
def two_steps(tmp_path_factory) -> pathlib.Path:
  """A folder with rounds 1 and 2; copy it, do not change it."""
  folder = tmp_path_factory.mktemp('two') / 'checkpoints'
  steps = checkpoint.Checkpoints(folder)
  steps.save(1, make_tree(1))
  steps.save(2, make_tree(2))
  return folder


@pytest.fixture
def folder(two_steps: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(two_steps, tmp_path / 'checkpoints'))


def restore(folder: pathlib.Path) -> tuple[int, Any] | None:
  """What a new process would find."""
  return checkpoint.Checkpoints(folder).restore(make_tree(0))


def assert_restores(folder: pathlib.Path, *rounds: int) -> int:
  """The newest sound step is one of these, with its own bits."""
  result = restore(folder)
  assert result is not None
  assert result[0] in rounds
  assert_same_bits(result[1], make_tree(result[0]))
  return result[0]


def test_restores_the_newest_step_bit_for_bit(folder):
  assert checkpoint.Checkpoints(folder).latest() == 2
  assert_restores(folder, 2)


def test_nothing_saved_is_none(tmp_path):
  steps = checkpoint.Checkpoints(tmp_path / 'missing')
  assert steps.latest() is None
  assert steps.restore(make_tree(0)) is None
  assert not (tmp_path / 'missing').exists()


def test_device_arrays_return_to_where_the_template_is(tmp_path):
  device = jax.devices()[0]
  tree = {'free': jnp.arange(3), 'pinned': jax.device_put(
      jnp.arange(4.0), device), 'host': np.arange(5), 'number': 3}
  steps = checkpoint.Checkpoints(tmp_path)
  steps.save(0, tree)
  abstract = jax.ShapeDtypeStruct(
      (4,), np.float32, sharding=tree['pinned'].sharding)
  result = steps.restore(tree | {'pinned': abstract})
  assert result is not None
  assert_same_bits(result[1], tree)
  assert isinstance(result[1]['host'], np.ndarray)
  assert isinstance(result[1]['free'], jax.Array)
  assert not result[1]['free'].committed
  assert result[1]['pinned'].sharding == tree['pinned'].sharding
  assert result[1]['pinned'].committed


@pytest.mark.parametrize('tree', [(), {'a': {}}, np.zeros((0, 2), np.float16),
                                  np.float32(3)])
def test_degenerate_trees(tmp_path, tree):
  steps = checkpoint.Checkpoints(tmp_path)
  steps.save(4, tree)
  result = steps.restore(tree)
  assert result is not None
  assert_same_bits(result[1], tree)


def test_metadata_returns(tmp_path):
  steps = checkpoint.Checkpoints(tmp_path)
  steps.save(3, make_tree(3), {'method': 'fedavg', 'seeds': [1, 2]})
  assert steps.metadata(3) == {'method': 'fedavg', 'seeds': [1, 2]}
  with pytest.raises(checkpoint.CheckpointError, match='9'):
    steps.metadata(9)


@pytest.mark.parametrize('name, change', [
    ('server.count', lambda t: t._replace(
        server=t.server._replace(count=np.int64(0)))),
    ('server.params.half', lambda t: t._replace(server=t.server._replace(
        params=t.server.params | {'half': np.zeros(6, ml_dtypes.bfloat16)}))),
    ('server.unused.extra', lambda t: t._replace(
        server=t.server._replace(unused={'extra': np.zeros(2)}))),
    ('memory.0', lambda t: t._replace(memory=())),
])
def test_another_template_is_refused_by_name(folder, name, change):
  before = files(folder)
  with pytest.raises(checkpoint.CheckpointError, match=f"'{name}'"):
    checkpoint.Checkpoints(folder).restore(change(make_tree(0)))
  assert files(folder) == before


@pytest.mark.parametrize('leaf', [
    np.array(['text']), np.array([object()]), jax.random.key(0)])
def test_only_numbers_are_saved(tmp_path, leaf):
  with pytest.raises(checkpoint.CheckpointError, match='bad'):
    checkpoint.Checkpoints(tmp_path).save(0, {'bad': leaf})
  assert not list(tmp_path.iterdir())


def test_names_that_coincide_are_refused(tmp_path):
  tree = {'a.b': np.zeros(1), 'a': {'b': np.ones(1)}}
  with pytest.raises(checkpoint.CheckpointError, match=r'a\.b'):
    checkpoint.Checkpoints(tmp_path).save(0, tree)


def test_only_the_newest_steps_stay(folder):
  steps = checkpoint.Checkpoints(folder, keep=2)
  steps.save(5, make_tree(5))
  assert steps.rounds() == [2, 5]
  checkpoint.Checkpoints(folder, keep=1).save(6, make_tree(6))
  assert steps.rounds() == [6]
  with pytest.raises(ValueError, match='keep=0'):
    checkpoint.Checkpoints(folder, keep=0)


def _truncate(data: bytes) -> bytes:
  return data[:len(data) // 2]


def _garbage(data: bytes) -> bytes:
  return np.random.default_rng(0).bytes(max(len(data), 16))


def _flip(data: bytes) -> bytes:
  middle = len(data) // 2
  return data[:middle] + bytes([data[middle] ^ 64]) + data[middle + 1:]


@pytest.mark.parametrize('damage', [_truncate, _garbage, _flip, None])
def test_damage_to_any_file_of_the_newest_step(two_steps, tmp_path, caplog,
                                               damage):
  results = set()
  for number, name in enumerate(files(two_steps / '2')):
    folder = pathlib.Path(shutil.copytree(two_steps, tmp_path / str(number)))
    file = folder / '2' / name
    if damage is None:
      file.unlink()
    else:
      file.write_bytes(damage(file.read_bytes()))
    before = files(folder)
    caplog.clear()
    got = assert_restores(folder, 1, 2)
    assert ('damaged' in caplog.text) == (got == 1), name
    assert files(folder) == before
    results.add(got)
  assert 1 in results


def test_content_is_checked_against_its_hash(folder, monkeypatch):
  read = manifest.named

  def one_bit_off(tree):
    for name, leaf in read(tree):
      if name == 'memory.0':
        leaf = ~np.asarray(leaf)
      yield name, leaf

  steps = checkpoint.Checkpoints(folder)
  header = steps._read_header(folder / '2')
  steps._read_leaves(folder / '2', header)
  monkeypatch.setattr(manifest, 'named', one_bit_off)
  with pytest.raises(checkpoint._StepError, match='hash'):
    steps._read_leaves(folder / '2', header)


@pytest.mark.parametrize('name', [
    '3.orbax-checkpoint-tmp', '2.replaced-1', '007', 'notes', '-1'])
def test_other_folders_are_no_steps(folder, name):
  shutil.copytree(folder / '1', folder / name)
  assert checkpoint.Checkpoints(folder).rounds() == [1, 2]
  assert_restores(folder, 2)
  checkpoint.Checkpoints(folder).save(4, make_tree(4))
  assert (folder / name).exists()


def test_a_step_under_another_round_is_damaged(folder, caplog):
  shutil.copytree(folder / '1', folder / '3')
  assert_restores(folder, 2)
  assert 'round 1' in caplog.text


def test_no_sound_step_is_none_and_says_so(folder, caplog):
  for round_ in (1, 2):
    (folder / str(round_) / 'header' / 'metadata').write_text('{')
  before = files(folder)
  assert restore(folder) is None
  assert 'starting at round 0' in caplog.text
  assert files(folder) == before


def test_saving_over_a_damaged_step_keeps_it_aside(folder):
  (folder / '2' / 'header' / 'metadata').write_text('{')
  damaged = files(folder / '2')
  checkpoint.Checkpoints(folder).save(2, make_tree(2))
  assert_restores(folder, 2)
  assert files(folder / '2.replaced-1') == damaged


def test_damaged_later_steps_do_not_push_out_sound_ones(folder):
  for round_ in (8, 9):
    shutil.copytree(folder / '1', folder / str(round_))
  steps = checkpoint.Checkpoints(folder)
  for round_ in (3, 4):
    steps.save(round_, make_tree(round_))
  assert steps.rounds() == [3, 4, 8, 9]
  assert_restores(folder, 4)


def test_saving_the_same_again_changes_nothing(folder):
  before = files(folder)
  checkpoint.Checkpoints(folder).save(2, make_tree(2))
  assert files(folder) == before


@contextlib.contextmanager
def file_size_limit(size: int) -> Iterator[None]:
  """Writes beyond `size` bytes of a file fail, as on a full disk."""
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
  try:
    yield
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize('size', [0, 100, 300, 1000, 3000])
def test_full_disk(folder, size):
  before = files(folder)
  steps = checkpoint.Checkpoints(folder)
  with file_size_limit(size):
    with pytest.raises(checkpoint.CheckpointError, match='save round 3'):
      steps.save(3, make_tree(3))
  assert files(folder) == before
  assert_restores(folder, 2)
  steps.save(3, make_tree(3))  # There is room again.
  assert_restores(folder, 3)


def test_folder_that_cannot_be_made(tmp_path):
  (tmp_path / 'file').write_text('')
  steps = checkpoint.Checkpoints(tmp_path / 'file' / 'checkpoints')
  assert steps.restore(make_tree(0)) is None
  with pytest.raises(checkpoint.CheckpointError, match='save round 1') as info:
    steps.save(1, make_tree(1))
  assert '\n' not in str(info.value)


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


def wait_for_threads(folder: pathlib.Path) -> None:
  """Until Orbax's threads, which a real death would end, write no more."""
  before = None
  while before != (before := sorted(map(str, folder.rglob('*')))):
    time.sleep(0.02)


def test_crash_at_every_change_of_the_disk(two_steps, tmp_path, bomb):
  for n in range(1, 200):
    folder = pathlib.Path(shutil.copytree(two_steps, tmp_path / str(n)))
    steps = checkpoint.Checkpoints(folder)
    if survive(functools.partial(steps.save, 3, make_tree(3)), bomb, n):
      break
    wait_for_threads(folder)
    found = assert_restores(folder, 2, 3)
    checkpoint.Checkpoints(folder).save(found + 1, make_tree(found + 1))
    assert_restores(folder, found + 1)
  assert 10 < n < 199


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
    assert all(t.daemon or t is threading.main_thread()
               for t in threading.enumerate())
    assert_restores(folder, 2)
  assert 10 < n < 99
  assert_restores(folder, 3)


_SAVE_FOR_EVER = """
import os, signal, sys, time
from fedjax_ssl.training import checkpoint
from tests.training import checkpoint_test as test
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
      check=True, timeout=60, cwd=REPOSITORY,
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
from tests.training import checkpoint_test as test
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
      check=True, timeout=60, cwd=REPOSITORY,
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
