"""A flag replaces its rival of a flagfile that stands before it."""
from __future__ import annotations

import pytest

from fedjax_ssl.cli import train
from fedjax_ssl.cli.sweep import asked
from fedjax_ssl.core.checks import FieldError
from fedjax_ssl.running import settings

LINES = '--seeds=3,5\n--labels_per_class=5\n'


@pytest.fixture
def options(tmp_path):
  """Reads words, of which FILE names a flagfile of `LINES`."""
  setting = settings.SETTINGS['digits_dirdir']
  file = tmp_path / 'a.flags'
  file.write_text(LINES)
  (tmp_path / 'b.flags').write_text(f'--flagfile={file}\n')

  def read(*words: str, name: str = 'a.flags'):
    train.begin(setting.defaults)
    given = [word.replace('FILE', str(tmp_path / name)) for word in words]
    train._read_flags(['train', *given])
    return train.options()
  yield read
  train.begin(setting.defaults)


@pytest.mark.parametrize('name', ['a.flags', 'b.flags'])
@pytest.mark.parametrize('words', [
    ['--flagfile=FILE'], ['--flagfile', 'FILE']])
def test_one_that_is_typed_later_counts(options, words, name):
  found = options(*words, name=name)
  assert (found.seeds, found.labels_per_class) == ((3, 5), 5)
  found = options(*words, '--seed=4', '--labeled_fraction=0.25', name=name)
  assert (found.seed, found.seeds) == (4, None)
  assert (found.labeled_fraction, found.labels_per_class) == (0.25, None)
  found = options(*words, '-seed', '4', name=name)
  assert (found.seed, found.seeds, found.labels_per_class) == (4, None, 5)


@pytest.mark.parametrize('words', [
    ['--seed=4', '--flagfile=FILE'],
    ['--flagfile=FILE', '--workdir', '--seed=4', '--seed=4', '--flagfile=FILE'],
    ['--flagfile=FILE', '--seed=4', '--seeds=5,6'],
    ['--seed=4', '--flagfile=FILE', '--seeds=5,6']])
def test_all_else_is_refused(options, words):
  with pytest.raises(FieldError, match='seed=4 and seeds=.*one of them'):
    options(*words)


def test_a_sweep_reads_flags_as_its_runs_do(tmp_path):
  (tmp_path / 'a.flags').write_text(LINES)
  found, given = asked.options('digits_dirdir', [
      f'--flagfile={tmp_path}/a.flags', '--seed=4', '--labeled_fraction=0.25'])
  assert (found.seed, found.labeled_fraction) == (4, 0.25)
  assert not given & {'seeds', 'labels_per_class'}
