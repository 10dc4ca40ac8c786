"""Tiles by side and form: what is timed, and where it is kept."""
from __future__ import annotations

import json

from absl import flags
import pytest


@pytest.fixture
def script(bench, tmp_path):
  """The script under --quick."""
  made = bench('conv_tiles')
  flags.FLAGS(['', '--quick', f'--out={tmp_path}'])
  bench('harness').shrink(made.QUICK)
  return made


def test_every_form_is_timed_and_one_is_taken(script, tmp_path):
  script.main()
  (path,) = tmp_path.iterdir()
  saved = json.loads(path.read_text())
  assert saved['benchmark'] == path.stem
  (layer,) = saved['measured']['layers']
  assert set(layer['seconds']) == {
      'winograd 2', 'winograd 4', 'rowwise 2', 'rowwise 4'}
  assert min(layer['seconds'].values()) > 0
  assert layer['taken'] == 'winograd 2' and layer['over_fastest'] > 0
  # A tile of 4x4 in each of 2 rows, 2 channels in and 2 out.
  assert layer['maps_over_weights'] == 2 * (2 + 2) / (2 * 2)


def test_what_is_cut_off_or_partial_replaces_nothing(
    script, monkeypatch, tmp_path):
  for flag in ('channels', 'sides', 'batches'):
    flags.FLAGS[flag].value = flags.FLAGS[flag].default
  assert script.file_name(5) == 'conv_tiles_5x5'
  flags.FLAGS['channels'].value = ['16']
  flags.FLAGS['sides'].value = ['6', '7']
  flags.FLAGS['batches'].value = ['2']
  assert script.file_name(3) == 'conv_tiles_3x3_channels-16_sides-6-7_batches-2'
  def measure(window, batch, channels):
    if window.size == (7, 7):
      raise KeyboardInterrupt
    return {'maps_over_weights': 1.0, 'seconds': {}, 'taken': 'x',
            'over_fastest': 1.0}
  monkeypatch.setattr(script, 'measure', measure)
  with pytest.raises(KeyboardInterrupt):
    script.main()
  (path,) = tmp_path.iterdir()
  assert '_unfinished' in path.name
  assert len(json.loads(path.read_text())['measured']['layers']) == 1


def test_a_run_without_layers_is_refused(script, tmp_path):
  flags.FLAGS['most_entries'].value = 1
  with pytest.raises(ValueError, match='--most_entries=1 leaves no layer'):
    script.main()
  assert not list(tmp_path.iterdir())
