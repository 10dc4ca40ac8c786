"""Tiled convolutions are timed in every form, and no result is lost."""
from __future__ import annotations

import json

from absl import flags
import pytest

from fedjax_ssl.ops import conv_geometry


@pytest.fixture
def script(bench, monkeypatch, tmp_path):
  """The script, with a folder for its results."""
  made = bench('conv_tiles')
  monkeypatch.setattr(made.harness, 'make_mesh', lambda: None)
  flags.FLAGS(['', f'--out={tmp_path}'])
  return made


def give(*words: str) -> None:
  """Parses more flags."""
  flags.FLAGS(['', *words])


def timed() -> dict[str, object]:
  forms = 'winograd 2', 'winograd 4', 'rowwise 2', 'rowwise 4'
  return {'seconds': dict.fromkeys(forms, 1.0), 'taken': forms[0],
          'over_fastest': 1.0, 'maps_over_weights': 2.0}


@pytest.mark.parametrize('words, text', [
    ('--channels=0', '--channels=0 must be whole numbers of at least 1'),
    ('--sides=', '--sides= must be whole numbers of at least 1'),
    ('--batches=1.5', '--batches=1.5 must be whole numbers of at least 1'),
    ('--most_entries=1', '--most_entries=1 leaves no layer; the smallest of '
     '--batches, --channels and --sides has 5120 entries')])
def test_what_cannot_be_timed_is_refused_and_harms_nothing(
    script, tmp_path, words, text):
  give(words)
  before = tmp_path / 'conv_tiles_3x3.json'
  before.write_text('of a run before')
  with pytest.raises(ValueError, match=text):
    script.main()
  assert [*tmp_path.iterdir()] == [before]
  assert before.read_text() == 'of a run before'


def test_a_run_of_some_layers_has_a_name_of_its_own(script):
  def name(*words):
    script.FLAGS.unparse_flags()
    for flag in ('kernel', 'batches', 'channels', 'sides', 'most_entries'):
      flags.FLAGS[flag].unparse()
    give(*words)
    return script.file_name()
  names = [name(), name('--kernel=5'), name('--sides=6'), name('--batches=6'),
           name('--sides=6,7'), name('--channels=6,7', '--sides=6'),
           name('--most_entries=6')]
  assert len(set(names)) == len(names)
  assert names[0] == 'conv_tiles_3x3' and names[2] == 'conv_tiles_3x3_sides-6'
  assert name('--batches=90,20') == names[0]
  assert name('--sides=7,06,7') == names[4]
  many = [name('--sides=' + ','.join(map(str, range(1, n)))) for n in (98, 99)]
  assert many[0] != many[1] and max(map(len, many)) < 100


def test_what_is_cut_off_keeps_layers_and_results(
    script, monkeypatch, tmp_path):
  seen: list[object] = []
  def measure(window, batch, channels, mesh):
    assert mesh is None
    if len(seen) == 2:
      raise KeyboardInterrupt
    seen.append((window.size[0], batch, channels))
    return timed()
  monkeypatch.setattr(script, 'measure', measure)
  give('--quick', '--sides=4,6,8', '--batches=2', '--channels=2')
  name = f'{script.file_name()}_quick.json'
  (tmp_path / name).write_text('of a run before')
  with pytest.raises(KeyboardInterrupt):
    script.main()
  part, = {path.name for path in tmp_path.iterdir()} - {name}
  assert '_unfinished' in part
  assert [row[1] for row in json.loads((tmp_path / part).read_text())[
      'table'][1:]] == ['4x4', '6x6']
  assert (tmp_path / name).read_text() == 'of a run before'
  seen.clear()
  monkeypatch.setattr(script, 'measure', lambda *_: timed())
  script.main()
  assert [path.name for path in tmp_path.iterdir()] == [name]
  assert len(json.loads((tmp_path / name).read_text())['table']) == 4


def test_every_form_is_timed_and_one_is_taken(script):
  give('--repeats=2', '--steps=1')
  found = script.measure(conv_geometry.window((4, 4), (5, 5), 1, 'SAME'), 2, 1,
                         None)
  assert set(found['seconds']) == {
      'winograd 2', 'winograd 4', 'rowwise 2', 'rowwise 4'}
  assert found['taken'] == 'rowwise 2' and found['over_fastest'] > 0
  assert found['maps_over_weights'] == 4
