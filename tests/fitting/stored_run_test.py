"""What `fit` takes from a folder, and what it says of a run there."""
from __future__ import annotations

import tempfile
from typing import Any

import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl.training import environment

SHORT: dict[str, Any] = {
    'model': 'linear', 'weak': 'none', 'strong': 'none', 'cohort_size': 2,
    'labels_per_class': 2, 'progress': False}


def test_a_folder_is_enough_to_go_on(monkeypatch, tmp_path):
  first = fedjax_ssl.fit('fixmatch(threshold=0.5)', 'digits', rounds=1,
                         clients=3, workdir=tmp_path, bounds=True,
                         labels='all', **SHORT)
  monkeypatch.setattr(environment, 'describe', lambda: {'devices': 'others'})
  config = (tmp_path / 'config.json').read_bytes()
  again = fedjax_ssl.fit(workdir=tmp_path, progress=False)
  assert again.options == first.options and again.round == 1
  assert (tmp_path / 'config.json').read_bytes() == config  # It is only read.
  np.testing.assert_array_equal(again.metrics['accuracy'],
                                first.metrics['accuracy'])
  assert len(again.bounds) == 2 and [*again.bounds] == [*first.bounds]
  loaded: Any = fedjax_ssl.load(tmp_path)
  for measured in ('metrics', 'class_metrics'):
    there, here = getattr(loaded, measured), getattr(first, measured)
    assert here.keys() == there.keys()
    for name, values in here.items():
      np.testing.assert_array_equal(there[name], values, name)
  with pytest.raises(AttributeError, match="no 'plot'; what fedjax_ssl.fit"):
    loaded.plot()
  assert not hasattr(loaded, 'other')


def test_without_a_method_it_is_the_settings():
  run = fedjax_ssl.fit(dataset='digits', rounds=1, clients=3, **SHORT)
  assert run.options.method == 'fixmatch(threshold=0.8)'


def test_data_that_a_run_was_given_are_given_again(tmp_path):
  rng = np.random.default_rng(0)
  y = np.arange(40) % 4
  x = rng.integers(0, 256, (40, 8, 8), dtype=np.uint8)
  names = np.array(['cy', 'anna', 'bo', 'di'])[np.arange(40) // 10]
  data: dict[str, Any] = {
      'x_train': x, 'y_train': y, 'x_test': x[:8], 'y_test': y[:8],
      'client_train': names}
  run = fedjax_ssl.fit('fedavg', data, rounds=1, workdir=tmp_path, **SHORT)
  table = run.per_client()
  assert table['name'].tolist() == ['anna', 'bo', 'cy', 'di']
  held = (table['rows'][table['name'] == 'cy'], len(run.federations[0].clients
                                                   .num_labeled))
  assert held[0] <= 10 and held[1] == 4
  with pytest.raises(ValueError, match=r'was given its data \(arrays\)'):
    fedjax_ssl.fit(workdir=tmp_path, progress=False)
  again = fedjax_ssl.fit(None, data, workdir=tmp_path, progress=False)
  assert again.options.method == 'fedavg'


def test_the_setting_that_dealt_given_data_is_remembered(tmp_path):
  x = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
  y = np.arange(60) % 4
  arrays = x, y, x[:8], y[:8]
  given = {**SHORT, 'labels_per_class': 3, 'clients': 3}
  first = fedjax_ssl.fit('fedavg', arrays, setting='cifar_iid', rounds=1,
                         workdir=tmp_path, **given)
  again = fedjax_ssl.fit(None, arrays, workdir=tmp_path, progress=False)
  assert again.options == first.options and again.round == 1


def test_other_data_that_cannot_be_dealt_so_are_named(tmp_path):
  x = np.random.default_rng(0).integers(0, 256, (60, 8, 8), dtype=np.uint8)
  y = np.arange(60) % 4
  fedjax_ssl.fit('fedavg', (x, y, x[:8], y[:8]), clients=3, rounds=1,
                 workdir=tmp_path, **SHORT)
  few = x[:6], y[:6], x[:8], y[:8]
  with pytest.raises(ValueError, match='^min_size=.*other data, .* dealt as'):
    fedjax_ssl.fit(None, few, workdir=tmp_path, progress=False)


def test_a_refused_call_leaves_no_folder(monkeypatch, tmp_path):
  monkeypatch.setattr(tempfile, 'tempdir', str(tmp_path))
  with pytest.raises(ValueError, match='^rounds=-3') as refused:
    fedjax_ssl.fit('fixmatch', 'digits', rounds=-3)
  assert refused.tb and not [*tmp_path.iterdir()]  # Whatever keeps the error.


def test_a_folder_without_a_run_begins_none(tmp_path):
  with pytest.raises(ValueError, match='holds no run; to begin one there'):
    fedjax_ssl.fit(workdir=tmp_path / 'other')
  assert not (tmp_path / 'other').exists()


def test_a_named_data_set_that_was_given_is_given_again(tmp_path):
  """And hints are of the stored method."""
  named = fedjax_ssl.data.load('digits')._replace(name='mine')
  fedjax_ssl.fit('fedprox', named, rounds=1, clients=3, workdir=tmp_path,
                 **SHORT)
  with pytest.raises(TypeError, match=r"method='fedprox\(mu=0.5"):
    fedjax_ssl.fit(workdir=tmp_path, mu=0.5)
  with pytest.raises(ValueError, match=r'was given its data \(mine\)'):
    fedjax_ssl.fit(workdir=tmp_path)


def test_what_belongs_to_the_data_is_no_option():
  with pytest.raises(TypeError, match="of the data's: .*'client_train': ...}"):
    fedjax_ssl.fit('fedavg', 'digits', client_train=[0, 1])
