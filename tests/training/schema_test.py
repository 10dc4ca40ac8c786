"""Every method's rows fit the schema, and every name in them is explained."""
from __future__ import annotations

import inspect
import re
import sys

import numpy as np
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core.types import SUMMED
from fedjax_ssl.training import loop, metrics
from tests import toy
from tests.methods import contract_test

# Rows hold these whatever the method.
ALWAYS = {'round', 'accuracy', 'loss', 'per_class_accuracy', 'val_accuracy',
          'val_loss', 'bytes_up', 'bytes_down', 'num_rejected',
          'num_participants', 'masked_share'}


def documented() -> set[str]:
  """Names in the table of the metrics' docstring."""
  table = [line for line in (metrics.__doc__ or '').splitlines()
           if line.startswith('| ')]
  cells = [line.split('|')[1] for line in table[1:]]
  return {name.strip() for cell in cells for name in cell.split(',')}


def own_words(name: str) -> str:
  """All docstrings of a method's module and of the package it is part of."""
  function = methods.METHODS[name]
  modules = [sys.modules[function.__module__]]
  modules += [m for m in vars(modules[0]).values() if inspect.ismodule(m)
              and m.__name__.startswith('fedjax_ssl.methods.')]
  texts = []
  for module in modules:
    texts.append(module.__doc__ or '')
    texts += [inspect.getdoc(f) or '' for f in vars(module).values()
              if inspect.isfunction(f) or inspect.isclass(f)]
  return '\n'.join(texts)


def rows_of(name: str, place: str) -> list[metrics.Row]:
  """Rows of two rounds, as a run would write them."""
  federation, _ = toy.federation(place)
  method = methods.make(name, toy.task(labels_at=place))
  found: list[metrics.Row] = []
  loop.train(method, [federation], num_rounds=2, seeds=[3], eval_every=1,
             observer=loop.Observer(lambda row: found.append(
                 metrics.to_plain({'round': row.round, **row.values}))))
  return found


def test_the_table_itself():
  names = documented()
  assert set(metrics.ORDER) <= names | {'seed'}
  assert set(metrics.SHARES) | set(metrics.COUNTS) | set(SUMMED) <= names
  assert names >= ALWAYS


@pytest.mark.parametrize('name', methods.METHODS)
def test_rows_fit_the_schema(name, tmp_path):
  place = contract_test._places(name)[-1]
  rows = rows_of(name, place)
  assert [row['round'] for row in rows] == [1, 2]
  for row in rows:
    metrics.validate(row)
    assert set(row) >= ALWAYS - (
        {'accuracy', 'loss', 'per_class_accuracy', 'val_accuracy', 'val_loss'}
        if 'accuracy' not in row else set())
    assert len(row['per_class_accuracy']) == toy.NUM_CLASSES
    known = [v for v in row['per_class_accuracy'] if v is not None]
    assert known and np.mean(known) >= 0
    assert row['bytes_up'] >= 0 and row['bytes_down'] >= 0
    unknown = [n for n in row if n not in documented()
               and not re.search(rf'\b{n}\b', own_words(name))]
    assert not unknown, (
        f'{unknown} of {name}: explain them in the table of '
        f'fedjax_ssl/training/metrics.py or in the docstring of {name}')
  # The same names in every row, so that tables and plots have no holes.
  assert set(rows[0]) == set(rows[1])
  with metrics.MetricsWriter(tmp_path) as writer:
    for row in rows:
      writer.write(row)
  assert metrics.read(tmp_path) == rows
