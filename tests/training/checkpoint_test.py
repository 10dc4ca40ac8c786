"""A step is restored bit for bit or not at all."""
from collections.abc import Iterator
import contextlib
import pathlib
import resource
import shutil
import sys
import types
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fedjax_ssl.training import checkpoint
from fedjax_ssl.training.checkpoint import manifest
from tests.training.steps import (
  assert_restores,
  assert_same_bits,
  files,
  make_tree,
  restore,
)

# What Orbax's threads leave behind must not reach the user.
pytestmark = pytest.mark.filterwarnings(
    'error::pytest.PytestUnraisableExceptionWarning')


def test_restores_the_newest_step_bit_for_bit(folder):
  assert checkpoint.Checkpoints(folder).latest() == 2
  assert_restores(folder, 2)


def test_a_full_disk_is_called_so(tmp_path, monkeypatch):
  """TensorStore says it behind some hundred letters of other names."""
  writer = checkpoint.Checkpoints(tmp_path)
  def full(*unused):
    raise ValueError(f'RESOURCE_EXHAUSTED: {"x" * 300}: Failed to write 9 bytes'
                     ": No space left on device [os_error_code='28']")
  with monkeypatch.context() as patched:
    patched.setattr(writer, '_write', full)
    with pytest.raises(checkpoint.SaveError, match='the disk is full.$'):
      writer.save(1, make_tree(1))
  writer.save(1, make_tree(1))
  monkeypatch.setattr(writer, '_write', full)
  with pytest.raises(checkpoint.SaveError, match=(
      r'Cannot save round 2 in .*: the disk is full\. Earlier steps are kept')):
    writer.save(2, make_tree(2))
  assert writer.latest() == 1


def test_a_reader_finds_the_step_that_replaced_the_one_it_read(
    tmp_path, monkeypatch, caplog):
  writer, reader = (checkpoint.Checkpoints(tmp_path) for _ in range(2))
  writer.save(1, make_tree(1))
  read = reader._read_header
  def late(step):
    if step.name == '1':
      for round_ in (2, 3):  # The first is removed: two are kept.
        writer.save(round_, make_tree(round_))
    return read(step)
  monkeypatch.setattr(reader, '_read_header', late)
  result = reader.restore(make_tree(0))
  assert result is not None and result[0] == 3
  assert_same_bits(result[1], make_tree(3))
  assert 'damaged' not in caplog.text


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
  assert 'can be read' in caplog.text
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


def test_a_file_in_the_place_of_the_folder(tmp_path):
  """It is refused at once, and not as a fault that may pass."""
  (tmp_path / 'checkpoints').write_text('')
  with pytest.raises(checkpoint.CheckpointError, match='is no folder') as info:
    checkpoint.Checkpoints(tmp_path / 'checkpoints')
  assert not getattr(info.value, 'may_pass', False)


def test_what_comes_late_after_a_failure_is_not_reported(folder, monkeypatch):
  """A callback of the writer, on a processor with other work."""
  reported: list[Any] = []
  monkeypatch.setattr(sys, 'unraisablehook', reported.append)
  with file_size_limit(100), pytest.raises(checkpoint.CheckpointError):
    checkpoint.Checkpoints(folder).save(3, make_tree(3))
  reported.clear()
  for text in ('Event loop is closed', 'another'):
    sys.unraisablehook(types.SimpleNamespace(  # type: ignore[arg-type]
        exc_value=RuntimeError(text)))
  assert [str(one.exc_value) for one in reported] == ['another']
