"""Too little memory of a device is said in one line, with what takes less."""
import jax
import pytest

from fedjax_ssl import config
from fedjax_ssl.cli import train
from fedjax_ssl.core import blame


def _raise(error):
  raise error


def test_a_full_device_is_one_line(capsys):
  error = jax.errors.JaxRuntimeError(
      'RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9 bytes.\n'
      'Rest of a long report')
  with pytest.raises(SystemExit) as ended:
    train._report_errors(_raise, error)
  assert ended.value.code == 75  # A sweep tries again.
  said, = capsys.readouterr().err.splitlines()
  assert said.startswith('error: The memory of a device is full (RESOURCE_')
  assert 'allocate 9 bytes.)' in said and 'Rest' not in said
  named = [word.partition('=')[0].strip('(),.') for word in said.split()
           if word.strip('(').startswith('--')]
  assert named and all(word[2:] in config.OPTIONS for word in named)


@pytest.mark.parametrize('error, said', [
    (MemoryError(), 'The memory is full.'),
    (MemoryError('no 9 bytes'), 'The memory is full (no 9 bytes).')])
def test_a_full_memory_is_one_line(capsys, error, said):
  with pytest.raises(SystemExit) as ended:
    train._report_errors(_raise, error)
  assert ended.value.code == 75
  assert capsys.readouterr().err == f'error: {said}\n'


@pytest.mark.parametrize('error', [
    jax.errors.JaxRuntimeError('INTERNAL: a fault'),
    jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Received message larger '
                               'than max'),
    RuntimeError('RESOURCE_EXHAUSTED: Out of memory'), NotImplementedError(),
    RecursionError()])
def test_other_faults_show_where_they_are(error):
  assert not blame.is_full(error)
  with pytest.raises(type(error)):
    train._report_errors(_raise, error)
