"""Reports: every number is the runs' own, and the page stands by itself."""
from __future__ import annotations

import csv
import html
import json
import pathlib
import re
import shlex
import shutil
import subprocess
from typing import Any
import xml.etree.ElementTree as ET

import pytest

from fedjax_ssl.cli import report
from fedjax_ssl.papers import flags as paper_flags
from fedjax_ssl.report import charts, interactive, stored_runs, summary, tables
from fedjax_ssl.report import page as page_lib
from fedjax_ssl.report import study as study_lib
from tests.report import fake

CHROMIUM = next(filter(None, map(shutil.which, (
    'chromium', 'chromium-browser', 'google-chrome'))), None)

WIDTHS = (360, 1200)


def study(root: pathlib.Path, names=('fedavg', 'uda'), seeds=(0, 1)
          ) -> list[str]:
  """Runs of two methods, a folder a seed; seed s ends 10 s points higher."""
  folders = []
  for k, name in enumerate(names):
    for s in seeds:
      made = fake.config([s], 20, method=name)
      made['origin']['comments'] = ['A cell.', f'Paper: {70 + k}.25 % test.']
      rows = [fake.row(r, .4 + .1 * s + .01 * r + .05 * k)
              for r in (5, 10, 15, 20)]
      folders.append(fake.write(root / f'{name}__seed={s}', rows, made))
  return folders


@pytest.fixture
def runs(tmp_path):
  return stored_runs.load(study(tmp_path))


@pytest.fixture(scope='module')
def study_runs(tmp_path_factory):
  return stored_runs.load(study(tmp_path_factory.mktemp('study')))


@pytest.fixture(scope='module')
def page(study_runs) -> str:
  return page_of(study_runs, targets='.5', title='A title')


def page_of(runs, **options) -> str:
  """The page that is written without plotly."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(interactive, 'library', lambda: '')
    patch.setattr(charts, 'files', lambda *unused: {})
    return str(page_lib.texts_of(
        runs, page_lib.Options(**options))['index.html'])


def cells(text: str) -> list[list[str]]:
  return [[c.strip() for c in line.strip('|').split('|')]
          for line in text.splitlines()]


def test_spent_epsilons_have_a_column(tmp_path):
  for name, method, spent, knobs in (
      ('a', 'dpsgd', 7.5, {'delta': 1e-5}),
      ('b', "fedssl(dp_scope='generator')", 2.0, {'delta': 1e-6}),
      ('c', 'fedavg', None, {}), ('d', 'fedssl', None, {'delta': 1e-5})):
    more: dict[str, Any] = {} if spent is None else {'epsilon': spent}
    config = fake.config(method=method)
    config['facts']['choices'] = {'method': {'text': method, 'knobs': knobs}}
    fake.write(tmp_path / name, [fake.row(20, .5, **more)], config)
  grid = tables.main_table(stored_runs.load(
      [tmp_path / name for name in 'abcd']))
  place = grid.columns.index('epsilon')
  assert [row[place] for row in grid.rows] == ['7.50', '2.00, nominal', '', '']
  assert grid.below == [f'{grid.rows[0][0]}: epsilon is at delta=1e-05.',
                        f'{grid.rows[1][0]}: epsilon is at delta=1e-06.']
  # Of one run its name is not said; an older one has not stored its choices.
  grid = tables.main_table(stored_runs.load([tmp_path / 'a']))
  assert grid.below == ['epsilon is at delta=1e-05.']
  fake.write(tmp_path / 'e', [fake.row(20, .5, epsilon=1.0)],
             fake.config(method='dpsgd'))
  grid = tables.main_table(stored_runs.load([tmp_path / 'e']))
  assert grid.below == ['the delta of epsilon is not stored.']


def test_seeds_of_one_cell_are_one_line(runs):
  assert [run.name for run in runs] == ['fedavg', 'uda']
  assert [list(run.numbers) for run in runs] == [[0, 1], [0, 1]]
  assert all(len(run.seeds) == 2 and run.rounds == 20 for run in runs)
  _, _, line, _ = cells(tables.markdown(tables.main_table(runs)))
  # Finals .6 and .7; four rows have no mean of five, and no column for it; the
  # best validation is final.
  assert line == ['fedavg', '2', '20', '65.00 ± 7.07', '65.00 ± 7.07', '70.25',
                  '0.02 ± 0.00', '0.2']


def test_order_of_folders_changes_no_number(tmp_path):
  folders = study(tmp_path)
  def numbers(runs):
    return {r.name: [stored_runs.outcome(s) for s in r.seeds] for r in runs}
  assert numbers(stored_runs.load(folders)) == numbers(
      stored_runs.load(folders[::-1]))


def test_the_same_run_twice_is_refused(tmp_path):
  folder = study(tmp_path)[0]
  assert len(stored_runs.load([folder, folder + '/'])) == 1
  shutil.copytree(folder, tmp_path / 'copy')
  with pytest.raises(ValueError, match='the same run'):
    stored_runs.load([folder, str(tmp_path / 'copy')])


def test_equal_names_are_told_apart(tmp_path):
  folders = []
  for part in 'ab':
    made = fake.config([0], alpha=1.0 if part == 'a' else 2.0)
    folders.append(fake.write(tmp_path / part / 'run', [fake.row(1, .5)], made))
  assert [r.name for r in stored_runs.load(folders)] == ['alpha=1', 'alpha=2']


def test_the_mean_of_the_last_ten_rounds_counts_rounds():
  rows = [fake.row(r, r / 100) for r in (80, 90, 91, 100)]
  assert stored_runs.last_rounds(rows) == pytest.approx(.955)
  assert stored_runs.last_rounds([fake.row(100, .5)]) == .5
  assert stored_runs.last_rounds([fake.row(9, .5) | {'accuracy': None}]) is None


def test_rounds_and_bytes_to_a_target(runs):
  first, second = runs[0].seeds
  assert stored_runs.reached(first, .5) == (10, 8000)
  assert stored_runs.reached(first, .61) is None
  table = tables.target_table(runs, [.5, .65, .9])
  line = [c if isinstance(c, str) else c.text() for c in table.rows[0]]
  assert line == ['fedavg', '7.5 ± 3.5', '0.01 ± 0.00', '1 of 2 seeds',
                  '1 of 2 seeds', 'not reached', 'not reached']
  assert stored_runs.default_target(runs) == pytest.approx(.6)


@pytest.mark.parametrize('line, text', [
    ('Paper: 39.95 % test accuracy, mean of 3 runs.', '39.95'),
    ('Paper: 46.05 +- 1.09 % test accuracy, mean of 3 runs.', '46.05 ± 1.09'),
    ('Paper: local 58.64 %, global 57.74 %, 60 % sent up.', '57.74'),
    ('A table. Paper: 76.6 % test accuracy.', '76.6'),
    ('Paper: local 61.57 %.', '61.57 local'),
    ('Paper: 82.06 % local accuracy, 14 % sent down.', '82.06 local'),
    ('Paper: diverged ("-"). Ours: not run yet.', 'diverged'),
    ('Paper: a curve; 10 % is another cell.', None), ('No number.', None)])
def test_the_papers_number_is_the_global_models(tmp_path, line, text):
  found = paper_flags.printed(['First.', line])
  assert (found is None) == (text is None)
  made = fake.config()
  made['origin']['comments'] = ['First.', line]
  run = stored_runs.read(fake.write(tmp_path / 'run', [
      fake.row(20, .5, local_accuracy=.25)], made))
  head, _, row, *_ = cells(tables.markdown(
      tables.main_table([run])))
  ours = dict(zip(head, row))
  assert ours.get('paper, %') == text
  assert ours['local models, %'] == '25.00'


def test_restarted_clocks_add_up():
  def of(*seconds, **more):
    return summary.elapsed([{'seconds': s, **more} for s in seconds])

  assert of(1, 5, 2, 4) == 9
  assert of() is None and of(None, 2, 4) is None
  first, second = ([{'seconds': s, 'since': since} for s in seconds]
                   for since, seconds in ((0, (20, 50)), (10, (60, 170))))
  assert summary.elapsed(first + second) == 220
  assert summary.elapsed(first) == 50
  # Begun by a version that did not write the round.
  assert summary.elapsed([{'seconds': 50}, *second]) == 220


def test_files_agree(tmp_path):
  out = tmp_path / 'out'
  assert report.main([*study(tmp_path / 'runs'), f'--out={out}',
                      '--target=.5']) == 0
  with open(out / 'table.csv', newline='') as file:
    rows = list(csv.DictReader(file))
  assert [r['run'] for r in rows] == ['fedavg', 'uda']
  assert float(rows[1]['final, %']) == pytest.approx(70)
  assert float(rows[1]['final, % std']) == pytest.approx(50**.5)
  assert '65.00 ± 7.07' in (out / 'table.md').read_text()
  tex = (out / 'table.tex').read_text()
  assert r'65.00 $\pm$ 7.07 &' in tex and r'final, \% &' in tex
  assert '65.00 ± 7.07' in html.unescape((out / 'index.html').read_text())
  assert (out / 'targets.csv').exists()


def test_names_are_escaped_everywhere(tmp_path):
  name = 'a<b>&"c|d_e%'
  run = stored_runs.read(fake.write(
      tmp_path / 'run', [fake.row(1, .5)], fake.config(method=name)), name)
  grid = tables.main_table([run])
  assert cells(tables.markdown(grid).replace('\\|', '/'))[2][0] == (
      'a<b>&"c/d_e%')
  assert r'a<b>\&"c|d\_e\%' in tables.latex(grid)
  page = page_of([run])
  assert '<b>' not in page and html.escape(name) in page


def test_the_page_is_one_file_of_sound_drawings(page):
  for wanted in ('accuracy against traffic', 'Accuracy in each class',
                 'Partitions', 'labeled', 'A title'):
    assert wanted in page
  drawings = re.findall(r'<svg.*?</svg>', page, re.DOTALL)
  assert len(drawings) >= 8
  for svg in drawings:
    ET.fromstring(svg)
  ids = re.findall(r'\bid="([^"]+)"', page)
  assert len(set(ids)) == len(ids)
  for use in re.findall(r'(?:href="#|url\(#)([^")]+)', page):
    assert use in ids
  # Nothing is fetched: names of namespaces and inlined pictures are no links.
  loads = re.findall(
      r'(?:src|href|data)="(?!#|data:)([^"]*)"|url\((?!#)([^)]*)', page)
  assert not loads and '@import' not in page and '<script' not in page


def test_the_page_has_the_command_of_all_seeds(tmp_path):
  folders = [fake.write(tmp_path / f'a_seed={s}', [fake.row(20, .5)],
                        fake.config([s], method='fixmatch(threshold=0.9)'))
             for s in (3, 4)]
  page = html.unescape(page_of(stored_runs.load(folders)))
  command = page.split('<pre>')[1].split('</pre>')[0]
  assert shlex.split(command) == [
      'fedjax-ssl', 'train', 'digits_dirdir', '--alpha=0.5', '--nobounds',
      '--dataset=digits', '--labels=few', '--method=fixmatch(threshold=0.9)',
      '--num_rounds=20', '--seeds=3,4']
  assert "'--method=fixmatch(threshold=0.9)'" in command


def test_runs_without_extras_still_report(tmp_path):
  made = fake.config()
  made['facts'] = {}
  rows = [{'round': r, 'accuracy': .5} for r in (1, 2)]
  run = stored_runs.read(fake.write(tmp_path / 'run', rows, made))
  page = page_of([run])
  assert 'Partitions' not in page and 'against traffic' not in page
  assert '<td class=n>50.00</td>' in page


@pytest.mark.parametrize('words, text', [
    (['nowhere'], 'holds no run'), (['--target=2'], '--target=2'),
    (['--target=a'], '--target=a')])
def test_what_cannot_be_reported_is_one_line(tmp_path, capsys, words, text):
  folder = [] if words == ['nowhere'] else study(tmp_path)
  out = tmp_path / 'out'
  assert report.main([*folder, *words, f'--out={out}']) == 2
  said = capsys.readouterr().err
  assert text in said and len(said.splitlines()) == 1 and not out.exists()


def test_logs_beside_runs_are_passed_over(tmp_path):
  folders = study(tmp_path)
  (tmp_path / 'a.log').write_text('x')
  assert report.main([*folders, str(tmp_path / 'a.log'),
                      f'--out={tmp_path / "out"}']) == 0
  named = (tmp_path / 'out' / 'table.csv').read_text()
  assert report.main([str(tmp_path), f'--out={tmp_path / "out"}']) == 0
  assert (tmp_path / 'out' / 'table.csv').read_text() == named


@pytest.mark.skipif(CHROMIUM is None, reason='chromium is not installed')
def test_a_browser_shows_it_without_a_network(page, tmp_path):
  """In frames of two widths only tables and flags may need to be scrolled."""
  outer = tmp_path / 'outer.html'
  frames = ''.join(
      f'<iframe style="width:{width}px;height:900px;border:0" '
      f'srcdoc="{html.escape(page)}"></iframe>' for width in WIDTHS)
  outer.write_text(f"""<!DOCTYPE html><meta charset="utf-8">{frames}
<pre id="out"></pre><script>
onload = event => {{
  document.getElementById('out').textContent = 'MEASURED ' + JSON.stringify(
      [...document.querySelectorAll('iframe')].map(f => {{
    const d = f.contentDocument, right = x => x.getBoundingClientRect().right;
    const drawings = [...d.querySelectorAll('figure svg')];
    return {{
      title: d.title, scroll: d.documentElement.scrollWidth,
      drawings: drawings.length, rows: d.querySelectorAll('tbody tr').length,
      small: drawings.filter(s => s.getBoundingClientRect().width < 280).length,
      outside: [...d.body.querySelectorAll('*')].filter(
          x => !x.closest('.wide, pre') && right(x) > f.clientWidth + 1).length
    }};
  }})) + ' END';
}};</script>""")
  assert CHROMIUM
  done = subprocess.run(
      [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu',
       '--host-resolver-rules=MAP * ~NOTFOUND', '--window-size=1400,1000',
       f'--user-data-dir={tmp_path / "profile"}',
       '--virtual-time-budget=5000', '--dump-dom', outer.as_uri()],
      capture_output=True, text=True, timeout=300, check=False)
  found = re.search(r'MEASURED (\[.*?\]) END', done.stdout)
  assert found, done.stderr[-2000:]
  for width, seen in zip(WIDTHS, json.loads(html.unescape(found[1]))):
    assert seen['title'] == 'A title' and seen['scroll'] <= width
    assert seen['drawings'] >= 7 and seen['rows'] == 7
    assert seen['small'] == seen['outside'] == 0, width


def test_every_table_means_over_the_same_rows(tmp_path):
  rows = [fake.row(r, r / 100) for r in range(10, 100, 10)]
  folder = fake.write(tmp_path / 'run', rows)
  tail = f'last {summary.TAIL} evaluations'
  grid = tables.main_table([stored_runs.read(folder)])
  place = [name.startswith(tail) for name in grid.columns].index(True)
  value = grid.rows[0][place]
  assert isinstance(value, tables.Value)
  want = sum(r['accuracy'] for r in rows[-summary.TAIL:]) / summary.TAIL
  assert value.mean == pytest.approx(100 * want)
  study_row, = study_lib.read(folder)
  assert study_row['tail'] == [pytest.approx(want)]
  for text in (study_lib.markdown([study_row], ''),
               summary.table({'run': stored_runs.read(folder).seeds})):
    assert tail in text and f'{100 * want:.2f}' in text


def test_four_evaluations_have_no_mean_of_the_last_five(tmp_path):
  """The one before the first round is none of them."""
  rows = [fake.row(r, r / 100) for r in range(0, 50, 10)]
  run = stored_runs.read(fake.write(tmp_path / 'run', rows))
  grid = tables.main_table([run])
  cell, = [cell for name, cell in zip(grid.columns, grid.rows[0])
           if name.startswith('last 5')]
  assert isinstance(cell, tables.Value) and cell.text() == '-'
  head, _, line, *_ = summary.table({'run': run.seeds}).splitlines()
  cells = dict(zip((x.strip() for x in head.split('|')),
                   (x.strip() for x in line.split('|'))))
  assert (cells['final'], cells['last 5 evaluations']) == ('40.00', '-')
  assert study_lib.read(str(run.folders[0]))[0]['tail'] == [None]
  later = [*rows, fake.row(50, .5)]
  assert summary.summary(later)['tail'] == pytest.approx(.3)
