"""Growth and start-up: the studies do as they say."""
from __future__ import annotations

import json
import os

from absl import flags
import numpy as np
import pytest


@pytest.fixture
def growth(bench, monkeypatch, tmp_path):
  """The script under --quick, on the devices that there are."""
  made, harness = bench('growth'), bench('harness')
  flags.FLAGS(['', '--quick', '--num_devices=1', f'--out={tmp_path}'])
  harness.shrink(made.QUICK)
  monkeypatch.setattr(harness, 'make_mesh', lambda: None)
  return made


def test_clients_grow_and_their_data_do_not(growth):
  few, many = growth.drawn(3), growth.drawn(500)
  assert few.train.inputs.shape == many.train.inputs.shape
  assert many.num_clients == 500
  assert (np.sort(many.clients.labeled, 1)[:, 1:]
          > np.sort(many.clients.labeled, 1)[:, :-1]).all()
  assert len(np.unique(many.clients.labeled)) > 90  # Of the pool's 100.


def test_sizes_must_be_numbers_in_range(growth):
  flags.FLAGS['num_clients'].value = ['30', '4', '30']
  assert growth.harness.numbers('num_clients') == [30, 4]
  for bad in (['x'], ['1.5'], ['0'], []):
    flags.FLAGS['num_clients'].value = bad
    with pytest.raises(ValueError, match='--num_clients='):
      growth.harness.numbers('num_clients')


def test_every_study_has_a_value_for_each_size_and_a_plot(growth, tmp_path):
  growth.main()
  for name, sizes in (('cohort', [2]), ('clients', [10, 100]),
                      ('alpha', [100]), ('seeds', [2])):
    saved = json.loads((tmp_path / f'growth_{name}_quick.json').read_text())
    assert {'machine', 'jax'} <= set(saved['environment'])
    assert saved['command']
    measured = saved['measured']
    assert measured['sizes'] == sizes
    for line, values in measured['lines'].items():
      assert len(values) == len(sizes)
      assert np.isfinite(values).all(), line
      assert line.startswith(('masked', '%')) or min(values) > 0, line
    picture = (tmp_path / f'growth_{name}_quick.png').read_bytes()
    assert picture.startswith(b'\x89PNG')


def test_teachers_of_all_clients_are_on_disk(growth):
  study = growth.kept(None)
  assert study.sizes == [10, 100]
  few, in_files = study.lines['MB']
  # Beside them the value that all begin with, in a file with some headers.
  assert few * 10 < in_files < few * 10.1 + 0.01
  assert min(min(values) for values in study.lines.values()) > 0


def test_unequal_clients_mask_more(growth):
  flags.FLAGS['alphas'].value = ['0.05', '100']
  flags.FLAGS['chunk_sizes'].value = ['0', '4']
  flags.FLAGS['cohort_size'].value = 20
  lines = growth.alpha(None).lines
  skewed, even = lines['masked, chunk all']
  assert skewed > even
  assert all(a <= b for a, b in zip(lines['masked, one by one'],
                                    lines['masked, chunk all'], strict=True))
  assert lines['masked, 4 lanes'][0] < lines['masked, chunk 4'][0]


def test_a_cold_start_knows_no_other_cache(bench, monkeypatch, tmp_path):
  startup = bench('startup')
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', 'somewhere')
  monkeypatch.setenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '9')
  made = startup.harness.variables(tmp_path)
  assert made['XDG_CACHE_HOME'] == str(tmp_path)
  assert made['PATH'] == os.environ['PATH']
  assert not [name for name in made
              if name.startswith(('JAX_COMPILATION', 'JAX_PERSISTENT'))]
  assert startup.cached(tmp_path) == (0, 0)


def test_a_start_without_a_cache_is_refused(bench, monkeypatch, tmp_path):
  startup = bench('startup')
  flags.FLAGS(['', '--repeats=1'])
  monkeypatch.setattr(startup, 'first_round', lambda cache, workdir: 1.0)
  with pytest.raises(ValueError, match='no compiled program'):
    startup.measure(tmp_path)
  folder = tmp_path / 'cache' / 'fedjax_ssl' / 'xla'
  folder.mkdir(parents=True)
  (folder / 'program').write_bytes(b'1234')
  assert startup.measure(tmp_path) == {
      'cold': 1.0, 'warm': [1.0], 'cache_files': 1, 'cache_bytes': 4}
