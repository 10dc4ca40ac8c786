"""Where clients' memory cannot be is said before a run begins."""
from __future__ import annotations

import dataclasses

import pytest

from fedjax_ssl import methods
from fedjax_ssl import task as task_lib
from fedjax_ssl.config import Config, FieldError
from fedjax_ssl.running import client_memory
from tests import toy


def check(folder, text, federation, **options):
  method = methods.make(text, toy.task())
  client_memory.check(
      Config(method=text, client_memory='disk', num_rounds=2, **options),
      method, task_lib.template(method, federation), [federation], folder)


def test_processes_and_streams_of_rates(tmp_path):
  federation, _ = toy.federation()
  stream = dataclasses.replace(
      federation, stream=federation.clients, rounds_per_task=2)
  rates = "fixmatch(lr_decay='plateau')"
  check(tmp_path, rates, federation)
  with pytest.raises(FieldError,
                     match='client_memory=disk and distributed=True: '):
    check(tmp_path, rates, federation, distributed=True)
  with pytest.raises(FieldError, match='and rounds_per_task=2: the learning r'):
    check(tmp_path, rates, stream, rounds_per_task=2)
