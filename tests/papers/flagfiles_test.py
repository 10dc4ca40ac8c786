"""Flagfiles of cells say what the paper has, and are read back as they are."""
from __future__ import annotations

import pytest

from fedjax_ssl.papers import cells, flagfiles, flags

TABLES = cells.tables()


def test_a_flagfile_holds_the_cells_flags_and_number():
  """For all cells: what reports read of a file is the table's number."""
  compared = 0
  for table in TABLES.values():
    for cell in table.cells():
      lines = flagfiles.text(cell).splitlines()
      comments = [line for line in lines if line.startswith('#')]
      assert lines == [*comments, *cell.flags]
      said = flags.printed([line.lstrip('# ') for line in comments])
      wanted = [n for n in cell.numbers if n.metric.endswith('accuracy')
                and n.value != cells.UNPRINTED]
      if not wanted:
        assert said is None, cell.name
        continue
      number = next((n for n in wanted if n.metric == 'accuracy'), wanted[0])
      assert said, cell.name
      if number.value == 'diverged':
        assert (said.value, said.kind) == (None, 'diverged')
      else:
        assert (said.value, said.std) == (number.value, number.std), cell.name
        assert said.kind == ('' if number.metric == 'accuracy' else 'local')
      compared += 1
  assert compared > 400


@pytest.mark.parametrize('table, row, column, text', [
    ('feddure1', 'FedDure', 'CIFAR-10 (DIR, DIR)', '57.73 % test accuracy'),
    ('fedmatch1', 'FedMatch-Dense', 'standard, C',
     'local 63.61 +- 0.18 %, global 63.84 +- 0.01 %, 177 % sent up'),
    ('fedssl1', 'FedSSL', '(3, 9), 1 %', '65.3 % test accuracy'),
    ('fedssl4', 'Supervise', '(3, 9), .25 %', 'diverged'),
    ('fedlabel3', 'FedMatch', 'models', '4 models sent'),
    ('feddure_figure4', 'gamma 0.3', '(DIR, DIR)', 'a curve without numbers')])
def test_what_the_paper_has(table, row, column, text):
  cell, = TABLES[table].choose([row], [column])
  assert flagfiles.published(cell) == text
  assert f'# Paper: {text}' in flagfiles.text(cell)


def test_a_table_is_written_but_what_is_missing(tmp_path):
  chosen = [*TABLES['twinsight'].cells(), *(
      c for c in TABLES['fedmatch_v3_2'].cells() if c.missing)]
  names = flagfiles.write(chosen, tmp_path / 'new')
  assert {f.stem for f in (tmp_path / 'new').iterdir()} == {*names} == {
      c.name for c in chosen if not c.missing}
  assert len(names) < len(chosen)
  file = tmp_path / 'new' / 'labeled_clients.rscfed_4of10.flags'
  cell, = TABLES['twinsight'].choose(['RSCFed'], ['Fashion-MNIST'])
  text = file.read_text()
  assert [line for line in text.splitlines() if line and line[0] != '#'] == [
      *cell.flags]
  assert f'--flagfile={tmp_path}/new/labeled_clients.rscfed_4of10' in text
  assert "# Rates and batches are those of RSCFed's code" in text


def test_only_flagfiles_of_cells_are_replaced(tmp_path):
  chosen = [*TABLES['twinsight'].cells()]
  names = flagfiles.write(chosen, tmp_path)
  last = tmp_path / f'{names[-1]}.flags'
  first = tmp_path / f'{names[0]}.flags'
  whole = first.read_text()
  first.write_text(whole + '--seeds=7')
  last.write_text('--method=mine')
  with pytest.raises(ValueError, match='was not written by this command'):
    flagfiles.write(chosen, tmp_path)
  assert first.read_text() != whole and last.read_text() == '--method=mine'
  last.write_text('')  # As a full disk may have left it.
  assert flagfiles.write(chosen, tmp_path) == names
  assert first.read_text() == whole


def test_stored_files_that_differ_are_found(tmp_path):
  count = flagfiles.write_headline(tmp_path)
  assert count == len({*tmp_path.glob('*/*.flags')})
  assert not [*flagfiles.faults(tmp_path)]
  first, second, *_ = sorted(tmp_path.glob('feddure/*.flags'))
  first.write_text(first.read_text().replace('--seeds=0,1,2', '--seeds=0'))
  second.unlink()
  (tmp_path / 'mine.flags').write_text('')
  assert sorted(flagfiles.faults(tmp_path)) == sorted([
      f'{first} is not as the tables have it', f'{second} is missing',
      f'{tmp_path}/mine.flags is no headline cell'])
