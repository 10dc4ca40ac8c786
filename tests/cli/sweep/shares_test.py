"""Checks what runs side by side see of a machine's GPUs."""
from __future__ import annotations

import itertools

import pytest

from fedjax_ssl.cli.sweep import shares


@pytest.fixture(name='devices')
def made_up_devices(tmp_path):
  """A folder such as /dev of a machine with three GPUs."""
  for name in ('nvidia0', 'nvidia1', 'nvidia2', 'nvidiactl', 'nvidia-uvm'):
    (tmp_path / name).touch()
  return tmp_path


@pytest.mark.parametrize('num_slots', range(2, 9))
def test_all_are_used_and_no_memory_twice(devices, num_slots):
  """A GPU is of one slot, or of some with shares that leave the rest free."""
  told = [shares.gpus(slot, num_slots, {}, devices)
          for slot in range(num_slots)]
  names = [one['CUDA_VISIBLE_DEVICES'].split(',') for one in told]
  assert {*itertools.chain(*names)} == {'0', '1', '2'}
  for gpu in '012':
    on_it = [one for one, mine in zip(told, names, strict=True) if gpu in mine]
    taken = [float(one.get('XLA_CLIENT_MEM_FRACTION', .75)) for one in on_it]
    assert sum(taken) == pytest.approx(.75, abs=.005)
    assert len({*taken}) == 1
  counts = [sum(gpu in mine for mine in names) for gpu in '012']
  assert max(counts) - min(counts) <= 1


def test_users_are_believed(devices):
  """Of memory, GPUs and platform; an empty list is no GPU."""
  free = {'XLA_PYTHON_CLIENT_PREALLOCATE': 'false'}
  assert shares.gpus(3, 4, free, devices) == {'CUDA_VISIBLE_DEVICES': '0'}
  assert shares.gpus(1, 2, {'CUDA_VISIBLE_DEVICES': 'GPU-a,MIG-b'},
                     devices) == {'CUDA_VISIBLE_DEVICES': 'MIG-b'}
  for given in ({'CUDA_VISIBLE_DEVICES': ''}, {'CUDA_VISIBLE_DEVICES': '-1'},
                {'JAX_PLATFORMS': 'cpu'}):
    assert not shares.gpus(0, 2, given, devices)


def test_nothing_to_share(devices, tmp_path):
  assert not shares.gpus(0, 1, {}, devices)
  assert not shares.gpus(0, 2, {}, tmp_path / 'empty')
