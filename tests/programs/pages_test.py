"""Pages of results are made from what the files say."""
from __future__ import annotations

import json
import re
import shutil

import pytest

from experiments import pages
from fedjax_ssl.papers import cells as papers
from fedjax_ssl.running import dealing, settings

STUDY = 'fmnist_feddure_200.json'  # A stored one.


@pytest.fixture
def copy(root, tmp_path):
  """What the pages are made from, in a folder that may be changed."""
  skip = shutil.ignore_patterns('__pycache__', 'benchmarks')
  shutil.copytree(root / 'experiments', tmp_path / 'experiments', ignore=skip)
  # The tests make its cells.
  tables = tmp_path / 'experiments' / 'results' / 'tables'
  shutil.rmtree(tables / 'feddure1', ignore_errors=True)
  (tables / 'feddure1.md').unlink(missing_ok=True)
  shutil.copy(root / 'README.md', tmp_path)
  assert pages.main([], tmp_path) == 0
  return tmp_path


def flags_of(name):
  return next(cell.flags for table in papers.tables().values()
              for cell in table.cells() if cell.name == name)


def cell(final, **values):
  return {'table': 'feddure1', 'variant': '', 'row': 'FedAvg*',
          'columns': ['CIFAR-10 (DIR, DIR)'], 'extra_flags': [],
          'flags': flags_of('cifar_dirdir.fedavg_few'),
          'cell': 'cifar_dirdir.fedavg_few',
          'seeds': {str(i): {'final': f, 'metrics': {}, 'environment': {
              'commit': 'abcdef0123', 'devices': '1 x gpu'}}
                    for i, f in enumerate(final)}} | values


def store(copy, folder, result):
  file = (copy / 'experiments' / 'results' / 'tables' / folder
          / 'cifar_dirdir.fedavg_few.json')
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(json.dumps(result))


def page(copy, name='tables/feddure1'):
  return (copy / 'experiments' / 'results' / f'{name}.md').read_text()


def test_a_new_result_shows_beside_the_papers(copy, capsys):
  store(copy, 'feddure1', cell([.4, .5]))
  assert pages.main(['--check'], copy) == 1
  said = capsys.readouterr().err
  assert ('results/tables/feddure1.md is not up to date: run python '
          'experiments/pages.py') in said
  assert pages.main([], copy) == 0
  text = page(copy)
  assert text.startswith('# FedDure, Table 1\n')
  # Columns without any number of ours are left out, rows are not.
  assert '\n| | CIFAR-10 (DIR, DIR) |\n' in text
  assert '\n| FedAvg* | 40.34 / 45.00 ± 7.07 |\n' in text
  assert '\n| FedAvg-SL | 58.38 / - |\n' in text
  assert 'commit abcdef0, 1 x gpu' in text
  assert '(tables/feddure1.md)' in page(copy, 'README')
  assert pages.main(['--check'], copy) == 0


def test_words_around_a_table_stay(copy):
  store(copy, 'feddure1', cell([.4]))
  pages.main([], copy)
  file = copy / 'experiments' / 'results' / 'tables' / 'feddure1.md'
  file.write_text(file.read_text().replace('Table 1', 'again') + '\nGood.\n')
  store(copy, 'feddure1', cell([.5]))
  pages.main([], copy)
  text = page(copy)
  assert '/ 50.00 |' in text and '/ 40.00 |' not in text
  assert text.startswith('# FedDure, again\n') and text.endswith('\nGood.\n')


def test_a_new_study_gets_a_page_unless_it_has_one(copy):
  here = copy / 'experiments' / 'results'
  old = (here / STUDY).read_text()
  for name in ('new', 'made'):
    (here / f'{name}.json').write_text(
        json.dumps(json.loads(old) | {'note': 'Why?'}))
  (here / 'made.md').write_text('As results.py writes it.\n')
  pages.main([], copy)
  assert page(copy, 'new').startswith('# Why?\n')
  assert '| run | method |' in page(copy, 'new')
  assert page(copy, 'made') == 'As results.py writes it.\n'


def test_a_result_of_other_flags_is_stale(copy):
  store(copy, 'feddure1', cell([.4], flags=['--method=fedavg']))
  assert pages.main([], copy) == 0
  assert '| 40.34 / stale |' in page(copy)


def test_a_variant_is_named_and_is_not_the_table(copy):
  store(copy, 'feddure1.short', cell(
      [.4], variant='short', extra_flags=['--num_rounds=9']))
  assert pages.main([], copy) == 0
  text = page(copy, 'tables/feddure1.short')
  assert 'FedDure, Table 1, variant `short`' in text
  assert '--variant=short -- --num_rounds=9`' in text
  assert '/ 40.00 |' in text and '/ - |' not in text  # What was run, alone.


def test_the_best_round_stands_in_brackets_where_all_seeds_know_it(copy):
  result = cell([.4, .5])
  result['seeds']['0']['best'] = .45
  store(copy, 'feddure1', result)
  pages.main([], copy)
  assert 'brackets' not in page(copy)
  result['seeds']['1']['best'] = .55
  store(copy, 'feddure1', result)
  pages.main([], copy)
  assert '| FedAvg* | 40.34 / 45.00 ± 7.07 (50.0) |' in page(copy)
  assert 'in brackets' in page(copy)


def test_numbers_that_are_no_accuracy(copy):
  name = 'cross_device.fedlabel_cifar10'
  result = cell([.4], table='fedlabel3', cell=name,
                flags=flags_of(name))
  result['seeds']['0']['metrics'] = {'models_sent': 1.5}
  file = (copy / 'experiments' / 'results' / 'tables' / 'fedlabel3'
          / f'{name}.json')
  file.parent.mkdir(parents=True)
  file.write_text(json.dumps(result))
  pages.main([], copy)
  assert '| FedLabel | 2.00 / 1.50 |' in page(copy, 'tables/fedlabel3')


def test_stored_numbers_in_doubt_have_a_mark(copy):
  result = cell([.4, .5])
  result['seeds']['1']['metrics'] = {'largest_weight': 3e9}
  store(copy, 'feddure1', result)
  file = copy / 'experiments' / 'results' / STUDY
  study = json.loads(file.read_text())
  study['runs'][0]['verdict'] = [['guesses', 'not above the largest class']]
  file.write_text(json.dumps(study))
  pages.main([], copy)
  text = page(copy)
  assert '| 40.34 / 45.00 ± 7.07 † |' in text
  assert ('`cifar_dirdir.fedavg_few`: † diverged in 1 of 2 seeds: largest '
          'weight 3e+09.') in text
  name = study['runs'][0]['run']
  assert f'`{name}`: ‡ not above the largest class.' in page(copy, file.stem)


def test_a_new_setting_shows_up_by_itself(copy, monkeypatch):
  monkeypatch.setattr(settings, 'SETTINGS', {
      **settings.SETTINGS, 'moons': settings.Setting(
          'moons', 'Two moons.', 'A paper.', dealing.one_pool,
          {'seeds': ['0', '1'], 'num_clients': 3})})
  (copy / 'experiments' / 'moons.py').write_text(
      '"""Two moons.\n\nA paper.\n\npython experiments/moons.py\n"""\n'
      "from fedjax_ssl import cli\nif __name__ == '__main__':\n"
      "  cli.run_setting('moons')\n")
  assert pages.main(['--check'], copy) == 1
  pages.main([], copy)
  text = (copy / 'experiments' / 'README.md').read_text()
  assert '| `moons` | Two moons. |' in text


def _other_space(stored):
  stored['tuned']['uda']['space']['flags'] = {'cohort_size': 3}


def _other_row(stored):
  stored['tuned']['old'] = stored['tuned'].pop('uda')
  for rows in stored['rows'].values():
    for row in rows:
      row['row'] = {'uda': 'old'}.get(row['row'], row['row'])


def _no_bound(stored):
  del stored['tuned']['all_labels']
  stored['rows'] = {skew: [row for row in rows if row['row'] != 'all_labels']
                    for skew, rows in stored['rows'].items()}


@pytest.mark.parametrize('change, said', [
    (_other_space, 'the row uda of'),
    (_other_row, 'has a row old that no bench has'),
    (_no_bound, 'has no row all_labels')])
def test_a_bench_that_is_not_todays_is_refused(copy, capsys, change, said):
  file = copy / 'experiments' / 'results' / f'{pages._BENCH}{pages._FIRST}.json'
  stored = json.loads(file.read_text())
  change(stored)
  file.write_text(json.dumps(stored))
  assert pages.main([], copy) == 2
  assert said in capsys.readouterr().err


def test_the_table_of_all_beds_has_the_gaps_of_their_pages(root):
  text = (root / 'experiments' / 'results' / 'README.md').read_text()
  table = text.partition('<!-- beds: ')[2].split('\n\n')[1]
  head, _, *rows = [[cell.strip() for cell in line.split('|')[1:-1]]
                    for line in table.splitlines()]
  places: dict = {name: [] for name in head[1:]}
  for name, *cells in rows:
    for place, cell in zip(places, cells, strict=True):
      if cell:
        places[place].append((name, cell))
  for place, found in places.items():
    bed, skew = place.replace('`', '').split(', ')
    page_ = root / 'experiments' / 'results' / f'{pages._BENCH}{bed}.md'
    part = page_.read_text().partition(f'## {skew}\n')[2].partition('## ')[0]
    # A star leads to a note on the row's runs.
    there = dict(re.findall(
        r'^\| \d+ \(.*?\) \| (`.*?`)(?: \\\*)? \| .*? \| (.*?) \|', part,
        re.MULTILINE))
    assert {name: cell.strip('*') for name, cell in found} == there
    bold = [float(cell.strip('*% ')) for _, cell in found if '*' in cell]
    assert bold and max(bold) == max(
        float(cell.rstrip('% ')) for cell in there.values())


def test_our_own_method_stands_beside_the_best_published(root):
  """On the test set: it and the first other row of the bed's own table."""
  here = root / 'experiments' / 'results'
  text = (here / f'{pages._OURS[0]}.md').read_text()
  table = text.partition('<!-- beds: ')[2].split('\n\n')[1]
  head, _, *rows = [[cell.strip() for cell in line.split('|')[1:-1]]
                    for line in table.splitlines()]
  assert len(rows) == 4
  for link, row, _, *cells in rows:
    own = row.strip('`')
    there = (here / re.findall(r'\((.*?)\)', link)[0]).read_text()
    for title, cell in zip(head[3:], cells, strict=True):
      skew = title.removeprefix('test, ')
      part = there.partition(f'## {skew}\n')[2].partition('## ')[0]
      ranked = re.findall(r'^\| \d+ \(.*?\) \| `(.*?)` \| (.*?) \|', part,
                          re.MULTILINE)
      best, accuracy = next(row for row in ranked
                            if not row[0].startswith(pages._OURS[0]))
      ours = dict(ranked)[own]
      if [*dict(ranked)].index(own) < [*dict(ranked)].index(best):
        ours = f'**{ours}**'
      assert cell == f'{ours}, `{best}` {accuracy}'


def test_each_table_of_the_bench_is_of_the_bed_in_its_name(copy, capsys):
  here = copy / 'experiments' / 'results'
  stored = here / f'{pages._BENCH}{pages._FIRST}.json'
  (here / f'{pages._BENCH}attic.json').write_text(stored.read_text())
  assert pages.main([], copy) == 2
  assert "a bed 'attic'" in capsys.readouterr().err


@pytest.mark.parametrize('text, said', [
    ('{"runs": [', 'Expecting value'), ('{}', "'runs' is missing"),
    ('[]', 'it is no object of JSON'), ('{"runs": 3}', 'is not iterable'),
    ('{"runs": [3]}', ''), ('{"runs": [{}]}', ' is missing'),
    (100_000 * '[', 'recursion')])
def test_a_damaged_study_is_named(tmp_path, capsys, text, said):
  """Before anything else is read, so an empty repository will do."""
  file = tmp_path / 'experiments' / 'results' / 'private_labels.json'
  file.parent.mkdir(parents=True)
  file.write_text(text)
  assert pages.main(['--check'], tmp_path) == 2
  line, = capsys.readouterr().err.splitlines()
  assert line.startswith(f'error: {file} is damaged: ') and said in line
  with pytest.raises(ValueError, match='private_labels.json is damaged: '):
    pages.by_labels(file)


def test_a_damaged_timing_is_named(tmp_path, capsys):
  file = tmp_path / 'experiments/results/benchmarks/processes.json'
  file.parent.mkdir(parents=True)
  file.write_text('{"table": []}')
  assert pages.main(['--check'], tmp_path) == 2
  assert f'error: {file} is damaged: ' in capsys.readouterr().err


def test_runs_that_are_no_line_are_named(tmp_path):
  file = tmp_path / 'private_labels.json'
  file.write_text('{"runs": [{"run": "fixmatch", "final": [0.5]}]}')
  with pytest.raises(ValueError, match='private_labels.json is damaged: '):
    pages.by_labels(file)


@pytest.mark.parametrize('text', ['', '<!-- index: made by '
                                  'experiments/pages.py, do not edit -->'])
def test_lost_marks_are_named(copy, text, capsys):
  (copy / 'experiments' / 'results' / 'README.md').write_text(text)
  assert pages.main([], copy) == 2
  assert "'index'" in capsys.readouterr().err


def test_lines_over_labels(tmp_path):
  """One for each name before the labels; the same bytes for the same runs."""
  runs = [{'run': f'{name}_{labels}', 'final': final}
          for name, labels, final in (
              ('labels_only_eps8', 500, [.5, .7]),
              ('labels_only_eps8', 100, [.2]), ('fixmatch_eps8', 500, [.8]),
              ('labels_only_eps4', 500, [.4]))]
  file = tmp_path / 'private_labels.json'
  file.write_text(json.dumps({'runs': runs}))
  drawn = pages.by_labels(file).decode()
  for name in ('labels only eps8', 'fixmatch eps8', 'labels only eps4',
               '>100<', '>500<'):
    assert name in drawn, name
  assert pages.by_labels(file).decode() == drawn
  file.write_text(json.dumps({'runs': runs[:-1]}))
  assert 'labels only eps4' not in pages.by_labels(file).decode()
