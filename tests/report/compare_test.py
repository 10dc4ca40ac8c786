"""Reports compare: names, facets, differences, clients, and charts' numbers."""
from __future__ import annotations

import csv
import html
import io
import json
import pathlib
import re
import shutil
import subprocess
import xml.etree.ElementTree as ET

from hypothesis import given, settings, strategies
import numpy as np
import pytest

from fedjax_ssl.report import (
  charts,
  clients,
  interactive,
  names,
  page,
  pairs,
  series,
  stored_runs,
  study,
  tables,
)
from tests.report import fake

CHROMIUM = next(filter(None, map(shutil.which, (
    'chromium', 'chromium-browser', 'google-chrome'))), None)
_WORDS = strategies.text(max_size=60)
_CONFIGS = strategies.lists(strategies.fixed_dictionaries({
    'method': strategies.sampled_from(
        ['fedavg', 'uda', 'fixmatch(threshold=0.9)', 'fixmatch', 'no (method']),
    'alpha': strategies.sampled_from([0.1, 1.0]),
    'dataset': _WORDS, 'labels': strategies.sampled_from(['few', 'all'])}),
                            min_size=1, max_size=12)


def plan(*flags, folders=None) -> names.Plan:
  return names.plan(
      [{'flags': {'labels': 'few'} | f, 'origin': {}, 'facts': {}}
       for f in flags],
      folders or [(f'folder{i}',) for i in range(len(flags))])


def grid(root: pathlib.Path, methods=('fedavg', 'fixmatch'), alphas=(.1, 1.0),
         seeds=(0, 1, 2)) -> list[stored_runs.ReportedRun]:
  """Runs that rise towards 100 %, so that a deviation would pass it."""
  folders = []
  for k, method in enumerate(methods):
    for alpha in alphas:
      for s in seeds:
        best = [.9, 1.0, .95][s] - .1 * (k == 0)
        rows = [fake.row(r, best * r / 20, mask_rate=[0, .5, 0][s],
                         per_class_accuracy=[best, 0, 1, None])
                for r in (0, 5, 10, 20)]
        folders.append(fake.write(
            root / f'{method}__alpha={alpha}__seed={s}', rows,
            fake.config([s], method=method, alpha=alpha)))
  return stored_runs.load(folders)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  return grid(tmp_path_factory.mktemp('grid'))


@pytest.fixture(scope='module')
def drawn(runs):
  return series.all_charts(runs, stored_runs.compared(runs))


def test_names_hold_what_differs():
  assert plan({'method': 'fixmatch'}, {'method': 'uda'}).names == [
      'fixmatch', 'uda']
  same = {'method': 'uda', 'momentum': 0.9}
  assert plan(same | {'alpha': .1}, same | {'alpha': 1.0}).names == [
      'alpha=0.1', 'alpha=1']
  assert plan({'method': 'fixmatch(threshold=0.9)'},
              {'method': 'fixmatch(threshold=0.8)'}, {'method': 'fixmatch'}
              ).names == ['threshold=0.9', 'threshold=0.8', 'fixmatch']
  assert plan({'method': 'fedavg'}, {'method': 'fedavg', 'labels': 'all'},
              {'method': 'uda'}).names == [
                  'labels only (lower bound)', 'all labels (upper bound)',
                  'uda']


def test_an_edited_method_is_told_by_its_code():
  def made(code, **flags):
    flags = {'labels': 'few', 'method': '/a/mine.py:f(k=2)', **flags}
    return {'flags': flags, 'origin': {},
            'facts': {'code': {'mine.py': code} if code else None}}
  before, after = made('0123456789', x=1), made('abcdefghij', x=2)
  folders = [('a',), ('b',)]
  found = names.plan([before | {'flags': after['flags']}, after], folders)
  assert found.names == ['code=01234567', 'code=abcdefgh']
  assert found.others == [] and found.peers == [(), ()]
  # A flag says more, and so does the method.
  assert names.plan([before, after], folders).names == ['x=1', 'x=2']
  found = names.plan([before, made(None, method='uda', x=1)], folders)
  assert found.names == ['f', 'uda'] and found.others == ['k']


def test_own_methods_are_called_by_their_names():
  """By the file too where two would be equal, and by folders if needed."""
  fast = '/data/me/mine/methods.py:fast'
  assert plan({'method': fast}, {'method': 'uda'}).names == ['fast', 'uda']
  assert plan({'method': f'{fast}(k=2)'}, {'method': f'{fast}(k=3)'}).names == [
      'k=2', 'k=3']
  assert plan({'method': fast}, {'method': 'fast'},
              {'method': '/data/me/other.py:fast'}).names == [
                  'methods.py:fast', 'fast', 'other.py:fast']
  assert plan({'method': '/a/x/mine.py:f'}, {'method': '/a/y/mine.py:f'}
              ).names == ['x/mine.py:f', 'y/mine.py:f']
  assert plan({'model': '/a/nets.py:net(width=3)', 'method': 'uda'},
              {'model': 'cnn', 'method': 'uda'}).names == [
                  'net(width=3)', 'cnn']
  # A method of that name is no bound.
  assert plan({'method': '/a/mine.py:fedavg'},
              {'method': 'uda', 'labels': 'all'}).names == [
                  'fedavg', 'uda, all labels']


def test_tables_call_own_methods_by_their_names_too(tmp_path):
  own = str(tmp_path / 'mine.py') + ':fast(k=2)'
  folders = [fake.write(tmp_path / name, [fake.row(20, .5)],
                        fake.config(method=method))
             for name, method in (('a', own), ('b', 'uda'))]
  grid = tables.main_table(stored_runs.load(folders))
  assert [row[:2] for row in grid.rows] == [
      ['fast', 'fast(k=2)'], ['uda', 'uda']]
  rows = study.read(folders)
  assert '| a | `fast(k=2)` |' in study.markdown(rows, '')
  assert rows[0]['method'] == own


def test_flags_that_differ_along_with_others_are_said_and_not_named():
  found = plan({'method': 'uda', 'momentum': .9, 'chunk_size': 1},
               {'method': 'fedavg', 'momentum': 0.0, 'chunk_size': 2})
  assert found.names == ['uda', 'fedavg'] and found.others == ['momentum']


@settings(max_examples=40)
@given(_CONFIGS)
def test_every_name_is_short_and_its_own(flags):
  found = plan(*flags)
  assert len(set(found.names)) == len(flags)
  assert all(0 < len(name) <= names.LONGEST for name in found.names)


def test_equal_flags_are_told_apart_by_folders():
  assert plan(*[{'method': 'uda'}] * 2, folders=[('a',), ('b',)]).names == [
      'a', 'b']
  assert plan(*[{'method': 'uda'}] * 2, folders=[
      ('a', 'x/a'), ('a', 'y/a')]).names == ['x/a', 'y/a']


def test_colours_are_methods_and_facets_the_second_factor():
  cells = [(m, a) for m in ('fedavg', 'uda') for a in (10.0, .5, 2.0)]
  flags = [{'method': m, 'alpha': a} for m, a in cells]
  found = plan(*flags)
  for look, (method, alpha) in zip(found.looks, cells):
    assert look.colour == ['fedavg', 'uda'].index(method)
    assert look.facet == f'alpha={alpha:g}'
    assert look.dash == [10.0, .5, 2.0].index(alpha)
  assert names.facets(found.looks) == ['alpha=0.5', 'alpha=2', 'alpha=10']
  # One run a value leaves nothing to compare in a facet.
  alone = plan(*flags[:3]).looks
  assert {look.facet for look in alone} == {''}
  assert len({look.colour for look in alone}) == 3


def test_traffic_is_averaged_at_the_rounds_that_all_seeds_have(tmp_path):
  def of_seed(seed, rounds):
    return [fake.row(r, r / 100, seed, bytes_up=(r - before) * 10**6,
                     bytes_down=0) for before, r in zip((0, *rounds), rounds)]
  runs = stored_runs.load([fake.write(
      tmp_path / 'run', [*of_seed(0, (10, 15, 20, 30)),
                         *of_seed(1, (10, 20, 30))], fake.config([0, 1]))])
  chart, = (c for c in series.all_charts(runs, stored_runs.compared(runs))
            if c.name == 'traffic')
  np.testing.assert_allclose(chart.lines[0].x, [10, 20, 30])
  np.testing.assert_allclose(chart.lines[0].values, 2 * [[10, 20, 30]])


def test_bands_stay_where_values_can_be(drawn):
  shares = [c for c in drawn if c.percent]
  assert {'accuracy', 'mask_rate', 'traffic', 'classes', 'clients'} <= {
      c.name for c in shares}
  clipped = 0
  for chart in drawn:
    for line in chart.lines:
      assert line.low is not None and line.high is not None
      known = np.isfinite(line.mean)
      std = line.values.std(axis=0, ddof=1)
      assert (line.low[known] >= 0).all()
      assert (line.low[known] <= line.mean[known]).all()
      assert (line.high[known] >= line.mean[known]).all()
      if chart.percent:
        assert (line.high[known] <= 100).all()
        clipped += ((line.mean + std)[known] > 100).sum()
      clipped += ((line.mean - std)[known] < 0).sum()
    low, high = series.limits(chart)
    assert 0 <= low < high and (high <= 100 or not chart.percent)
  assert clipped > 5


def test_files_and_browser_get_the_same_numbers(drawn, runs):
  looks = stored_runs.compared(runs).looks
  for chart in drawn:
    rows = list(csv.DictReader(io.StringIO(series.comma_separated(chart))))
    assert len(rows) == sum(len(line.x) for line in chart.lines)
    for facet, lines in chart.facets.items():
      shown = [t for t in json.loads(interactive.figure(
          chart, lines, looks))['data'] if 'name' in t]
      for line, trace in zip(lines, shown, strict=True):
        mine = [r for r in rows if r['run'] == line.name == trace['name']
                and r['facet'] == facet]
        for i, row in enumerate(mine):
          assert float(row[chart.x_label]) == line.x[i]
          assert trace['x'][i] == pytest.approx(line.x[i], rel=1e-5)
          if row['mean'] == '':
            assert trace['y'][i] is None and np.isnan(line.mean[i])
            continue
          assert float(row['mean']) == line.mean[i]
          assert trace['y'][i] == pytest.approx(line.mean[i], rel=1e-5)
          values = [float(row[f'value {k + 1}']) for k in range(3)]
          assert np.mean(values) == pytest.approx(line.mean[i])


def test_classes_of_all_runs_are_in_one_chart(drawn, runs, tmp_path):
  chart = next(c for c in drawn if c.name == 'classes')
  assert chart.kind == 'bars'
  assert {line.name for line in chart.lines} == {run.name for run in runs}
  many = grid(tmp_path, [f'm{i}' for i in range(20)], (.1,), (0, 1, 2))
  chart = next(c for c in series.all_charts(many, stored_runs.compared(many))
               if c.name == 'classes')
  assert chart.kind == 'heat' and len(chart.facets['']) == 20
  trace, = json.loads(interactive.figure(
      chart, chart.lines, stored_runs.compared(many).looks))['data']
  assert len(trace['z']) == len(trace['y']) == 20


def test_charts_are_files_of_their_own(drawn, runs):
  looks = stored_runs.compared(runs).looks
  for chart in drawn:
    if chart.name not in ('accuracy', 'classes'):
      continue
    made = charts.files(chart, looks)
    assert made['pdf'].startswith(b'%PDF')
    text = ''.join(ET.fromstring(made['svg'].decode()).itertext())
    for run in runs:
      assert run.name in text
    assert 'alpha=0.1' in chart.facets and 'round' in text or 'class' in text


def test_pairs_are_of_the_same_seed(runs):
  first, _, other, _ = runs
  assert first.name == 'fedavg, alpha=0.1' and other.name.startswith('fixmatch')
  found = pairs.of_finals(other, first)
  assert (found.mean, found.pairs) == (pytest.approx(10), 3)
  # All pairs differ by the same, however far the seeds are apart.
  assert found.low == pytest.approx(10) and found.high == pytest.approx(10)
  back = pairs.of_finals(first, other)
  assert back.mean == pytest.approx(-10)
  assert pairs.interval([]).mean is pairs.interval([1.0]).low is None


def test_the_reference_has_the_same_other_flags(runs):
  plan_ = stored_runs.compared(runs)
  against = pairs.references(runs, plan_)
  assert [runs[i].name for i in against] == [
      'fedavg, alpha=0.1', 'fedavg, alpha=1'] * 2
  assert pairs.references(runs, plan_, 'fixmatch, alpha=1') == [3] * 4
  with pytest.raises(ValueError, match='--reference=no .*fedavg, alpha=0.1'):
    pairs.references(runs, plan_, 'no')


def test_without_labels_only_the_reference_is_the_first(tmp_path):
  """It is no bound, and stays it when a better one comes."""
  found = stored_runs.load([
      fake.write(tmp_path / 'a', [fake.row(20, .9)], fake.config(labels='all')),
      fake.write(tmp_path / 'b', [fake.row(20, .6)],
                 fake.config(method='uda')),
      fake.write(tmp_path / 'c', [fake.row(20, .8)],
                 fake.config(method='fixmatch'))])
  assert pairs.references(found, stored_runs.compared(found)) == [1] * 3


def test_a_bound_and_a_run_in_doubt_are_not_the_best(tmp_path):
  found = stored_runs.load([
      fake.write(tmp_path / 'a', [fake.row(20, .6)], fake.config()),
      fake.write(tmp_path / 'b', [fake.row(20, .9)], fake.config(labels='all')),
      fake.write(tmp_path / 'c', [fake.row(20, .8, loss=1e9)],
                 fake.config(method='uda')),
      fake.write(tmp_path / 'd', [fake.row(20, .7)],
                 fake.config(method='fixmatch'))])
  best = pairs.best(found)
  assert best is not None and found[best].name == 'fixmatch'
  assert pairs.best(found[1:2]) == 0


def test_of_equals_the_first_is_the_best(tmp_path):
  found = stored_runs.load([
      fake.write(tmp_path / method, [fake.row(20, .6)],
                 fake.config(method=method)) for method in ('uda', 'fixmatch')])
  assert pairs.best(found) == 0


def test_the_best_row_is_bold_and_empty_columns_are_gone(runs):
  table = tables.main_table(runs)
  assert table.best is not None
  best = runs[table.best].name
  assert best.startswith('fixmatch')
  for line in tables.markdown(table).splitlines()[2:]:
    cells = [c.strip() for c in line.strip('|').split('|')]
    assert all(c.startswith('**') and c.endswith('**') for c in cells) == (
        cells[0].strip('*') == best), line
  for line in tables.latex(table).splitlines():
    assert (r'\textbf{' in line) == line.startswith(rf'\textbf{{{best}')
  assert tables.as_html(table).count('<tr class=best>') == 1
  for text in (tables.markdown(table), tables.latex(table),
               tables.as_html(table)):
    assert 'paper' not in text and 'method' not in text
  # Programs find the same columns always.
  assert 'paper, %' in tables.comma_separated(table)


def test_a_client_is_worth_its_own_classes():
  federation = {'labeled_classes': [[4, 0], [0, 2], [0, 0]],
                'unlabeled_classes': [[4, 0], [1, 1], [0, 0]]}
  mixes = clients.mixes(federation)
  assert mixes is not None
  np.testing.assert_allclose(mixes[:2], np.array([[1, 0], [.25, .75]]))
  assert np.isnan(mixes[2]).all()
  assert clients.mixes({}) is clients.mixes(None) is None
  assert clients.mixes({'labeled_classes': [[1], [1, 2]]}) is None


def test_client_accuracy_is_the_mean_of_recall_weighed_by_the_mix(tmp_path):
  made = fake.config()
  made['facts']['federation'] = {
      'labeled_classes': [[1, 0, 0], [1, 1, 0], [1, 0, 3], [0, 0, 2]],
      'unlabeled_classes': [[0, 0, 0]] * 4}
  def run(name, recall):
    return stored_runs.read(fake.write(tmp_path / name, [fake.row(
        20, .5, per_class_accuracy=recall)], made))
  good, bad = run('a', [.8, .4, None]), run('b', [.9, .1, None])
  # The class without test rows is left out, and a client of it alone too.
  np.testing.assert_allclose(clients.accuracies(good)[0], [.8, .6, .8, np.nan])
  gains = clients.against(clients.accuracies(bad), clients.accuracies(good),
                          clients.same_clients(bad, good))
  np.testing.assert_allclose(np.sort(gains), [-.1, .1, .1])
  assert clients.worst(np.array([.3, np.nan, .5])) == .3
  row = tables.client_table([good, bad], [0, 0]).rows[1]
  said = [c if isinstance(c, str) else c.text() for c in row]
  assert said == ['b', '1', '76.67', '50.00', '18.86', 'a', '66.7', '33.3']


def test_seeds_of_another_partition_have_no_clients(tmp_path):
  made = fake.config([0, 1, 2])
  made['facts']['partition_hash'] = {'0': 'p', '1': 'q', '2': 'p'}
  run = stored_runs.read(fake.write(
      tmp_path / 'run', [fake.row(20, .5, s) for s in (0, 1, 2)], made))
  assert list(clients.accuracies(run)) == [0, 2]


def test_no_name_ends_a_script_or_a_tag(tmp_path):
  name = 'a</script><b>'
  run = stored_runs.read(fake.write(tmp_path / 'run', [fake.row(1, .5)]), name)
  for chart in series.all_charts([run], stored_runs.compared([run])):
    text = interactive.figure(
        chart, chart.lines, stored_runs.compared([run]).looks)
    assert '<' not in text and json.loads(text)['data']


def test_a_page_with_plotly_is_one_small_file_that_loads_nothing(
    runs, monkeypatch):
  pytest.importorskip('plotly', reason='plotly is not installed')
  monkeypatch.setattr(charts, 'files', lambda *unused: {})
  text = str(page.texts_of(runs, page.Options())['index.html'])
  assert len(text.encode()) < 6e6
  own = text.replace(interactive.library(), '')
  assert len(own) < len(text) - 1e6
  assert not re.search(r'(?:src|href|data)="(?!#|data:)|@import|fetch\(', own)
  for data in re.findall(r'json">(.*?)</script>', own, re.DOTALL):
    assert json.loads(data)['data']
  # Its own buttons would offer to send the chart to a server.
  assert 'modeBarButtons:' in own and 'Cloud' not in own


def test_a_page_of_many_long_runs_stays_small(monkeypatch, tmp_path):
  monkeypatch.setattr(charts, 'files', lambda *unused: {})
  monkeypatch.setattr(interactive, 'library', lambda: 'plotly')
  rows = [[fake.row(r, .5 + r / 1e4 + s / 7, train_loss=r / 7)
           for r in range(1, 301)] for s in (0, 1)]
  runs = stored_runs.load([
      fake.write(tmp_path / f'{s}_{i}', rows[s], fake.config([s], alpha=i + .5))
      for i in range(40) for s in (0, 1)])
  text = str(page.texts_of(runs, page.Options())['index.html'])
  assert len(text) < 1.1e6
  chart = series.all_charts(runs, stored_runs.compared(runs))[0]
  looks = stored_runs.compared(runs).looks
  shown = json.loads(interactive.figure(chart, chart.lines, looks, 30))['data']
  for trace in shown:
    assert len(trace['x']) == 30 and (trace['x'][0], trace['x'][-1]) == (1, 300)
    assert all(x in chart.lines[0].x for x in trace['x'])
  assert series.comma_separated(chart).count('\n') == 1 + 40 * 300


@pytest.mark.skipif(CHROMIUM is None, reason='chromium is not installed')
def test_a_browser_switches_runs_and_scales(runs, monkeypatch, tmp_path):
  """Without a network; charts fit the narrowest screen of the two."""
  pytest.importorskip('plotly', reason='plotly is not installed')
  monkeypatch.setattr(charts, 'files', lambda *unused: {})
  text = str(page.texts_of(runs, page.Options())['index.html'])
  file = tmp_path / 'index.html'
  file.write_text(text.replace('</body>', """<pre id="out"></pre><script>
setTimeout(() => {
  document.querySelector('.key input').click();
  document.querySelectorAll('.switches input')[1].click();
  setTimeout(() => {
    const seen = plots.map(p => ({
      drawn: p.querySelectorAll('.main-svg').length, type: p.layout.yaxis.type,
      wide: p.querySelector('.main-svg').getBoundingClientRect().width
            - p.getBoundingClientRect().width,
      hidden: p.data.filter(t => t.meta === 0).map(t => t.visible),
      shown: p.data.filter(t => t.meta === 2).map(t => t.visible)}));
    document.getElementById('out').textContent =
        'MEASURED ' + JSON.stringify(seen) + ' END';
  }, 1500);
}, 1500);
</script></body>"""))
  assert CHROMIUM
  done = subprocess.run(
      [CHROMIUM, '--headless', '--no-sandbox', '--disable-gpu',
       '--host-resolver-rules=MAP * ~NOTFOUND', '--window-size=500,1000',
       f'--user-data-dir={tmp_path / "profile"}',
       '--virtual-time-budget=20000', '--dump-dom', file.as_uri()],
      capture_output=True, text=True, timeout=300, check=False)
  found = re.search(r'MEASURED (\[.*?\]) END', done.stdout)
  assert found, done.stderr[-2000:]
  plots = json.loads(html.unescape(found[1]))
  assert len(plots) > 8
  for plot in plots:
    assert plot['drawn'] and plot['wide'] <= 1
    assert plot['type'] == 'log'
    assert set(plot['hidden']) <= {False} and set(plot['shown']) <= {True}
  assert any(plot['hidden'] for plot in plots)
  assert any(plot['shown'] for plot in plots)


def test_without_plotly_the_page_has_still_drawings(runs, monkeypatch):
  monkeypatch.setattr(charts, 'files', lambda *unused: {})
  monkeypatch.setattr(interactive, 'library', lambda: '')
  text = str(page.texts_of(runs, page.Options())['index.html'])
  assert '<script' not in text and text.count('<figure>') > 8
