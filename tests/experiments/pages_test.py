"""The generated parts of the READMEs are what the files say now."""
from __future__ import annotations

import json
import shutil

import pages
import pytest

from tests.experiments import launcher


@pytest.fixture
def copy(root, tmp_path):
  """What the pages are made from, in a folder that may be changed."""
  shutil.copy(root / 'README.md', tmp_path)
  skip = shutil.ignore_patterns('__pycache__', 'benchmarks')
  shutil.copytree(root / 'experiments', tmp_path / 'experiments', ignore=skip)
  assert pages.main([], tmp_path) == 0
  return tmp_path


def test_the_pages_are_up_to_date(root, capsys):
  assert pages.main(['--check'], root) == 0, capsys.readouterr().err


def cell(final, **values):
  return {'table': 'feddure1', 'variant': '', 'row': 'FedAvg*',
          'columns': ['CIFAR-10 (DIR, DIR)'], 'flags': [], 'extra_flags': [],
          'flagfile': 'cifar_dirdir.fedavg_few.flags',
          'seeds': {str(i): {'final': f, 'metrics': {}, 'environment': {
              'commit': 'abcdef0123', 'devices': '1 x gpu'}}
                    for i, f in enumerate(final)}} | values


def store(copy, folder, result):
  file = (copy / 'experiments' / 'results' / 'tables' / folder
          / 'cifar_dirdir.fedavg_few.json')
  file.parent.mkdir(parents=True, exist_ok=True)
  file.write_text(json.dumps(result))


def test_a_new_result_shows_beside_the_papers(copy, capsys):
  assert '| 40.34 | not run yet |' in (
      copy / 'experiments' / 'README.md').read_text()
  store(copy, 'feddure1', cell([.4, .5]))
  assert pages.main(['--check'], copy) == 1
  said = capsys.readouterr().err
  assert 'README.md is not up to date: run python experiments/pages.py' in said
  assert pages.main([], copy) == 0
  text = (copy / 'README.md').read_text()
  line, = [x for x in text.splitlines() if x.startswith('| FedAvg* |')]
  assert '| 40.34 / 45.00 ± 7.07 |' in line and line.count('/ -') == 8
  assert 'commit abcdef0, 1 x gpu' in text and '`feddure1` (81' not in text
  assert '| 40.34 | 45.00 ± 7.07 |' in (
      copy / 'experiments' / 'README.md').read_text()
  assert pages.main(['--check'], copy) == 0


def test_a_variant_is_named_and_is_not_the_table(copy):
  store(copy, 'feddure1.short', cell(
      [.4], variant='short', extra_flags=['--num_rounds=9']))
  assert pages.main([], copy) == 0
  text = (copy / 'README.md').read_text()
  assert 'FedDure, Table 1, variant `short`' in text
  assert '--variant=short -- --num_rounds=9`' in text
  assert '`feddure1` (81 cells)' in text
  assert '| 40.34 | not run yet |' in (
      copy / 'experiments' / 'README.md').read_text()


def test_numbers_that_are_no_accuracy(copy):
  result = cell([.4], table='fedlabel3', flagfile='cross_device.flags')
  result['seeds']['0']['metrics'] = {'models_sent': 1.5}
  file = (copy / 'experiments' / 'results' / 'tables' / 'fedlabel3'
          / 'cross_device.fedlabel_cifar10.json')
  file.parent.mkdir(parents=True)
  file.write_text(json.dumps(result))
  pages.main([], copy)
  assert '| FedLabel | 2.00 / 1.50 |' in (
      copy / 'README.md').read_text()


def test_stored_numbers_in_doubt_have_a_mark(copy):
  result = cell([.4, .5])
  result['seeds']['1']['metrics'] = {'largest_weight': 3e9}
  store(copy, 'feddure1', result)
  file, *_ = sorted((copy / 'experiments' / 'results').glob('*.json'))
  study = json.loads(file.read_text())
  study['runs'][0]['verdict'] = [['guesses', 'not above the largest class']]
  file.write_text(json.dumps(study))
  pages.main([], copy)
  text = (copy / 'README.md').read_text()
  assert '| 40.34 / 45.00 ± 7.07 † |' in text
  assert ('`cifar_dirdir.fedavg_few`: † diverged in 1 of 2 seeds: largest '
          'weight 3e+09.') in text
  name = study['runs'][0]['run']
  assert f'`{name}`: ‡ not above the largest class.' in text


def test_every_setting_has_a_page(root):
  text = (root / 'experiments' / 'README.md').read_text()
  scripts = [p for p in launcher.EXPERIMENTS.glob('*.py')
             if 'common.main(' in p.read_text()
             and p.stem not in ('common', 'pages')]
  assert len(scripts) >= 4
  for script in scripts:
    page = text.split(f'\n## {script.stem}\n')[1].split('\n## ')[0]
    assert f'python experiments/{script.name}' in page, script
    assert 'Its own defaults: ' in page
    assert f'| `{script.name}` |' in (root / 'README.md').read_text()
  for file in (launcher.EXPERIMENTS / 'flagfiles').glob('*.flags'):
    assert f'`{file.name}`' in text


def test_what_and_the_papers_number_stand_whole(root):
  text = (root / 'experiments' / 'README.md').read_text()
  for line in (
      '`cross_device.fedlabel_cifar10.flags` | FedLabel on CIFAR-10: FedLabel '
      '(ICCV 2023, arXiv 2307.08809), Table 2 | 46.05 ± 1.09 |',
      '`cifar_batch_iid.fedavg_all_v3.flags` | FedAvg-SL, batch IID CIFAR-10, '
      'labels at clients: FedMatch (ICLR 2021, arXiv 2006.12097v3), Table 1 | '
      '58.60 |', '`agents_iid.fedavg_mnist_2s6q_10.flags` | Supervise on '
      'MNIST, N_S=2, N_Q=6, 0.17 % labels: FedSSL (IJCAI 2022), Table 2 | '
      'diverged |'):
    assert f'| {line}' in text


def test_a_new_setting_shows_up_by_itself(copy):
  (copy / 'experiments' / 'moons.py').write_text(
      '"""Two moons.\n\nA paper.\n\npython experiments/moons.py\n"""\n'
      'import common\ncommon.main(None, seeds=["0", "1"], num_clients=3)\n')
  assert pages.main(['--check'], copy) == 1
  pages.main([], copy)
  text = (copy / 'experiments' / 'README.md').read_text()
  assert '## moons\n\nTwo moons.\n\nA paper.\n\n```\npython' in text
  assert '`--seeds=0,1`, `--num_clients=3`' in text


def test_every_number_of_a_study_is_its_own(root):
  text = (root / 'README.md').read_text()
  for file in (root / 'experiments' / 'results').glob('*.json'):
    for run in json.loads(file.read_text())['runs']:
      mean = sum(100 * x for x in run['final']) / len(run['final'])
      line, = [x for x in text.splitlines() if x.startswith(
          f'| {run["run"]} | `{run["method"]}` | {run["labels"]} | '
          f'{len(run["seeds"])} | {run["rounds"]} |') and f'{mean:.2f}' in x]


@pytest.mark.parametrize('text', ['', '<!-- results: made by '
                                  'experiments/pages.py, do not edit -->'])
def test_lost_marks_are_named(copy, text, capsys):
  (copy / 'README.md').write_text(text)
  assert pages.main([], copy) == 2
  assert "'results'" in capsys.readouterr().err
