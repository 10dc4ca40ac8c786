"""The table in the results is what a run prints, and a drift is found."""
from __future__ import annotations

import pytest

from experiments import check_quickstart
from tests.report import fake

TABLE = """
| method | final accuracy, 3 seeds |
|---|---:|
| FixMatch on FedAvg | 94.00 ± 0.50 % |
| labels only, the lower bound | 91.00 ± 1.00 % |
| all labels, the upper bound | 96.00 ± 0.30 % |
"""


def finished(root, **means):
  """A run and its bounds, whose seeds are half a point apart."""
  means = {'FixMatch': .94, 'labels only': .91, 'all labels': .96} | means
  for name, place in check_quickstart.ROWS.items():
    rows = [fake.row(20, means[name] + .005 * s, s) for s in (-1, 0, 1)]
    folder = root / 'run' / place
    folder.mkdir(parents=True, exist_ok=True)
    fake.write(folder / 'made', rows)
    (folder / 'made' / 'metrics.jsonl').rename(folder / 'metrics.jsonl')
  return root / 'run'


def test_a_run_within_a_point_passes(tmp_path):
  ours = check_quickstart.measured(finished(tmp_path))
  assert [*ours['FixMatch']] == pytest.approx([94, .5])
  assert not check_quickstart.faults(ours, check_quickstart.printed(TABLE))


@pytest.mark.parametrize('means, words', [
    ({'FixMatch': .952}, ['FixMatch: the mean is 95.20']),
    ({'all labels': .90}, ['all labels: the mean']),
    ({'labels only': .9255, 'FixMatch': .9395},
     ['labels only: the mean', '1.40 points above'])])
def test_a_drift_is_found(tmp_path, means, words):
  found = check_quickstart.faults(
      check_quickstart.measured(finished(tmp_path, **means)),
      check_quickstart.printed(TABLE))
  assert len(found) == len(words)
  assert all(word in line for word, line in zip(words, found, strict=True))


def test_a_run_that_swings_is_found():
  page = check_quickstart.printed(TABLE)
  found = check_quickstart.faults({**page, 'FixMatch': (94.0, 1.5)}, page)
  assert len(found) == 1 and '1.50 points over seeds' in found[0]
  lost = check_quickstart.faults(
      {**page, 'FixMatch': (float('nan'), 0.5)}, page)
  assert len(lost) == 2


def test_a_row_that_is_lost_or_doubled_is_named():
  for broken in (TABLE.replace('| labels only', '| labels'), TABLE + TABLE):
    with pytest.raises(ValueError, match='one row'):
      check_quickstart.printed(broken)


def test_a_run_that_passes_is_drawn(tmp_path, monkeypatch, capsys):
  page, picture = tmp_path / 'page.md', tmp_path / 'picture.svg'
  page.write_text(TABLE)
  monkeypatch.setattr(check_quickstart, 'PAGE', page)
  args = [str(finished(tmp_path)), '--picture']
  assert check_quickstart.main(args, picture) == 0
  first = picture.read_bytes()
  assert b'<svg' in first and len(first) < 60 * 1024
  assert check_quickstart.main(args, picture) == 0
  assert picture.read_bytes() == first
  picture.unlink()
  page.write_text(TABLE.replace('94.00', '90.00'))
  assert check_quickstart.main(args, picture) == 1
  assert not picture.exists() and 'FixMatch' in capsys.readouterr().err


def test_a_folder_without_a_run_is_one_line(tmp_path, capsys):
  assert check_quickstart.main([str(tmp_path)]) == 2
  assert len(capsys.readouterr().err.splitlines()) == 1
  assert check_quickstart.main([]) == 2
