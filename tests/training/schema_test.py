"""Every method's rows fit the schema, and every name in them is explained.

That their values do, and that rows of labels at the clients fit, is in
`tests/methods/contract_test.py`.
"""
from __future__ import annotations

import functools
import inspect
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import methods, testing
from fedjax_ssl.core import run_files
from fedjax_ssl.core.types import Ratio, Variables
from fedjax_ssl.methods import fedssl
from fedjax_ssl.methods.parts import private_labels
from fedjax_ssl.training import evaluate, loop, metric_names, metrics, runner
from tests import toy

# Rows hold these whatever the method.
ALWAYS = {'accuracy', 'loss', 'per_class_accuracy', 'macro_precision',
          'macro_recall', 'auc', 'most_predicted', 'largest_class',
          'largest_weight', 'bytes_up', 'bytes_down', 'num_rejected',
          'num_participants', 'masked_share', 'models_sent', 'forward_passes',
          'backward_passes'}
# Where there is a global model.
GLOBAL = {'val_accuracy', 'val_loss'}


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


def with_scores(method: Any, state: Any, federation: Any,
                sums: dict[str, Any]) -> dict[str, Any]:
  """Shapes and dtypes of a row: sums over rounds, and what is evaluated."""
  scores = jax.eval_shape(toy.evaluation(method), state, federation,
                          evaluate.probe_of(federation))
  assert not set(sums) & set(scores)
  return {**sums, **scores}


def form_of(name: str, place: str) -> dict[str, Any]:
  """Shapes and dtypes of what a row is made from; nothing is compiled."""
  federation, _ = toy.federation(place)
  make = functools.partial(methods.make, name)
  method = make(toy.task(
      testing.model_of(make, place) if place == 'server' else 'linear',
      labels_at=place))
  state = method.init(toy.key(0), federation)
  totals = runner.totals_shape(method, federation, state)
  return with_scores(method, state, federation, totals.sums)


def test_the_table_itself():
  """Names are sorted, what adds up is counted, and heads tell the unit."""
  table = metric_names.METRICS
  assert set(table) >= ALWAYS | GLOBAL | {*metrics.BETWEEN, *run_files.SUMMED}
  assert {m.kind for m in table.values()} == {'count', 'number', 'share'}
  assert all(metric_names.kind(name) == 'count' for name in run_files.SUMMED)
  later = [name for name in table if name not in metric_names.ORDER]
  assert [*metric_names.ORDER, *later] == sorted(table, key=metric_names.rank)
  row = metrics.to_plain({'own': 2., 'auc': .5, 'round': 1, 'bytes_up': 3.})
  assert [*row.items()] == [
      ('round', 1), ('auc', .5), ('bytes_up', 3), ('own', 2.)]
  assert metric_names.title('local_rate') == 'local rate, %'
  assert metric_names.title('own_loss') == 'own loss'


def check(name: str, form: dict[str, Any]) -> None:
  """Raises for a row of a method, by `form_of`, that does not fit."""
  is_alone = methods.make(name, toy.task()).predict is None
  assert set(form) >= (ALWAYS if is_alone else ALWAYS | GLOBAL)
  for key, value in form.items():
    shape = (toy.NUM_CLASSES,) if key.startswith('per_class') else ()
    for leaf in jax.tree.leaves(value):
      assert leaf.shape == shape and leaf.dtype == jnp.float32, (key, leaf)
    if key in run_files.SUMMED:
      assert not isinstance(value, Ratio), f'{key} adds up over rounds'
  unknown = [n for n in form if n not in metric_names.METRICS and (
      n.endswith('_rate') or not re.search(rf'\b{n}\b', own_words(name)))]
  assert not unknown, (
      f'{unknown} of {name}: explain them in '
      f'fedjax_ssl/training/metric_names.py, shares there alone, or in the '
      f'docstring of {name}')


# Labels at the clients: with the contract, for which a round is traced anyhow.
@pytest.mark.thorough
@pytest.mark.parametrize('name', [
    name for name, make in methods.METHODS.items()
    if 'server' in testing.places_of(make)])
def test_rows_of_labels_at_the_server_fit_the_schema(name):
  check(name, form_of(name, 'server'))


def test_short_rows_hold_what_private_records_report():
  """Readers of accuracies know a short row by its names."""
  method = methods.make("fedssl(dp_scope='all')", toy.task())
  budget = private_labels.Budget(private_labels.Terms(
      allowed=jnp.int32(2), steps=jnp.int32(1), noise=jnp.float32(1)),
                                 epsilons=jnp.array([0., 3., 4.]))
  assert method.report is not None
  found = method.report(
      fedssl.Server(Variables({}, {}), {}, {}, budget), jnp.int32(1))
  assert set(found) == set(metrics.BETWEEN) and found['epsilon'] == 3
  assert metrics.is_short({'round': 1, 'seed': 0, **found})
  assert not metrics.is_short({'round': 1, 'accuracy': 0.5, **found})
  assert not metrics.is_short({'round': 1})


def test_a_run_writes_what_the_schema_says(tmp_path):
  federation, _ = toy.federation()
  method = methods.make('fixmatch(keep_local=True)', toy.task())
  with metrics.MetricsWriter(tmp_path) as writer:
    def on_row(row):
      writer.write({'round': row.round, **row.values})
    loop.train(method, [federation], num_rounds=2, seeds=[3], eval_every=1,
               observer=loop.Observer(on_row))
  rows = metrics.read(tmp_path)
  assert [row['round'] for row in rows] == [1, 2]
  assert set(rows[0]) == set(rows[1]) == set(form_of(
      'fixmatch(keep_local=True)', 'clients')) | {'round', 'forgetting'}
  known = [name for name in rows[0] if name in metric_names.ORDER]
  assert known == sorted(known, key=metric_names.ORDER.index)
  means = np.mean([v for v in rows[0]['per_class_accuracy'] if v is not None])
  assert 0 <= means <= 1 and rows[0]['bytes_up'] > 0
