"""Where clients' memory cannot be is said before a run begins."""
from __future__ import annotations

import dataclasses
import shutil
from unittest import mock

import jax
import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.config import Config, FieldError
from fedjax_ssl.core import tree
from fedjax_ssl.running import client_memory
from fedjax_ssl.training import runner
from tests import toy


def check(folder, text, federation, has_begun=False, **options):
  method = methods.make(text, toy.task())
  client_memory.check(
      Config(method=text, client_memory='disk', num_rounds=2, **options),
      method, runner.state_shape(method, federation), [federation], folder,
      has_begun=has_begun)


def test_processes_and_streams_of_rates(tmp_path):
  federation, _ = toy.federation()
  stream = dataclasses.replace(
      federation, rounds_per_task=2,
      stream=jax.tree.map(lambda x: np.stack([x, x]), federation.clients))
  rates = "fixmatch(lr_decay='plateau')"
  check(tmp_path, rates, federation)
  with pytest.raises(FieldError,
                     match='client_memory=disk and distributed=True: '):
    check(tmp_path, rates, federation, distributed=True)
  with pytest.raises(FieldError, match='a round changes what all clients keep'):
    check(tmp_path, rates, stream, rounds_per_task=2)


def test_a_full_disk_refuses_new_runs_alone(tmp_path, monkeypatch):
  """One that has begun may need no more, as when it is evaluated."""
  federation, _ = toy.federation()
  monkeypatch.setattr(shutil, 'disk_usage', lambda path: mock.Mock(free=0))
  with pytest.raises(FieldError, match='0.0 KiB of disk'):
    check(tmp_path, 'scaffold', federation)
  check(tmp_path, 'scaffold', federation, has_begun=True)


def test_an_uneven_split_needs_a_copy_on_each_device(tmp_path, monkeypatch):
  """Then all devices together hold as many times what clients keep."""
  federation, _ = toy.federation()
  text = "fixmatch(server='local')"
  method = methods.make(text, toy.task())
  state = runner.state_shape(method, federation)
  total = tree.num_bytes(state.memory)
  monkeypatch.setattr(client_memory, 'memory', lambda devices: total + 1)

  def on(devices):
    client_memory.check(
        Config(method=text, num_clients=toy.NUM_CLIENTS, num_devices=devices),
        method, state, [federation], tmp_path, has_begun=False)

  for devices in range(1, toy.NUM_CLIENTS + 1):
    if toy.NUM_CLIENTS % devices == 0:
      on(devices)
    else:
      with pytest.raises(FieldError, match=f'a copy on each of {devices} dev'):
        on(devices)
