"""Rows of a bench and the data that they were run on."""
from __future__ import annotations

import json
import pathlib
import shutil

import numpy as np
import pytest

from fedjax_ssl import data
from fedjax_ssl.cli.sweep import cells, grid
from fedjax_ssl.running import job
from tests.bench.made_up import BED, COUNT
from tests.cli.bench_trainer import (
  CHANGED,
  edit,
  on_data,
  rows,
  started,
  without,
)


def test_runs_stay_when_their_data_are_elsewhere(bench, out, tmp_path):
  """Nor does it matter whether their folder is named, or was a flag once."""
  asked = 'clients', 'fixmatch'
  assert bench(*asked, f'--data_dir={tmp_path}', *CHANGED)[0] == 0
  there = started(out)
  said = bench(*asked, '--status', *CHANGED)[1]
  assert f'{COUNT}/{COUNT} tried' in said and 'final 2/2' in said
  for place in out, tmp_path:
    assert bench(*asked, f'--data_dir={place}', '--status', *CHANGED)[1] == said
    assert bench(*asked, f'--data_dir={place}', *CHANGED)[0] == 0
    for file in (out / '.sweep').glob('clients__*.json'):
      record = json.loads(file.read_text())
      cell = grid.Cell(file.stem, '', (*record['args'], '--data_dir=x'),
                       BED.skews['strong']['setting'] if '__strong' in file.stem
                       else BED.setting)
      file.write_text(json.dumps({
          **record, 'args': cell.args, 'fingerprint': cells.fingerprint(cell)}))
  assert started(out) == there


def test_data_of_ones_own_are_those_of_the_runs(bench, out, tmp_path):
  """A registered set, and texts as vectors."""
  (tmp_path / 'register.py').write_text(
      'import numpy as np\nfrom fedjax_ssl import data\n'
      '@data.register_dataset("bench_own")\n'
      'def bench_own():\n'
      '  return 2 * [np.zeros((4, 2, 2), np.uint8), np.array([0, 1, 0, 1])]\n')
  (tmp_path / 'texts.csv').write_text('text,label\n' + ''.join(
      f'no {i} here,{i % 2}\n' for i in range(40)))
  np.savez(tmp_path / 'vectors.npz', words=np.array(['no', 'here']),
           vectors=np.ones((2, 4), np.float32))
  for number, (flags, loaded) in enumerate((
      ([f'--import={tmp_path}/register.py', '--dataset=bench_own',
        '--split=official'], lambda: data.load('bench_own')),
      (['--dataset=texts', f'--embeddings={tmp_path}/vectors.npz',
        '--split=official'], lambda: data.load(
            'texts', tmp_path, embeddings=tmp_path / 'vectors.npz')))):
    folder = tmp_path / f'out{number}'
    call = ('clients', 'fixmatch', f'--out={folder}', f'--data_dir={tmp_path}',
            f'--configurations={COUNT}', '--', *flags)
    assert bench(*call)[0] == 0
    on_data(folder, job.data_hash(loaded()))
    assert bench(*call)[0] == 0


def test_refuses_rows_of_other_data(bench, out, tmp_path):
  """Than those of another table, of runs here, or than the data here."""
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  assert 'data' not in rows(out, 'mild')['fixmatch']
  bounds, row = (pathlib.Path(shutil.copy(
      out / 'clients.json', tmp_path / name)) for name in ('one', 'two'))
  without(bounds, 'fixmatch')
  edit(bounds, 'labels_only', data='a')
  stored = [f'--stored={file}' for file in (bounds, row)]
  edit(row, 'fixmatch', data='a')
  there = (f'--out={tmp_path}/there', '--status', *CHANGED)
  assert bench('clients', 'fixmatch', *stored, *there)[0] == 0
  edit(row, 'fixmatch', data='b')
  code, _, errors = bench('clients', 'fixmatch', *stored, *there)
  assert code == 2 and errors == (
      f'error: --stored={row}: the row fixmatch was run on other data than the '
      f'row labels_only of {bounds}: they cannot be compared.\n')
  on_data(out, 'c')
  code, _, errors = bench('clients', 'fixmatch', stored[1], *CHANGED)
  assert code == 2 and f'--stored={row}: the row fixmatch was' in errors
  code, _, errors = bench('clients', 'fixmatch', *CHANGED)
  assert code == 2 and 'was run on other data than' in errors
  here = job.data_hash(data.load('digits'))
  on_data(out, here)
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  assert {found['data'] for skew in BED.skews
          for found in rows(out, skew).values()} == {here}


@pytest.mark.thorough
def test_rows_taken_before_are_of_the_same_data_too(bench, out, tmp_path):
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  one, two = (pathlib.Path(shutil.copy(
      out / 'clients.json', tmp_path / name)) for name in ('one', 'two'))
  edit(one, 'fixmatch', data='a')
  edit(two, 'labels_only', data='b')
  without(two, 'fixmatch')
  there = (f'--out={tmp_path}/there', *CHANGED)
  assert bench('clients', 'fixmatch', f'--stored={one}', *there)[0] == 0
  code, _, errors = bench('clients', 'fixmatch', f'--stored={two}', *there)
  assert code == 2 and errors == (
      f'error: --stored={two}: the row labels_only was run on other data than '
      f'the row fixmatch of {tmp_path}/there/clients.json: they cannot be '
      'compared.\n')


def test_refuses_to_run_rows_beside_those_of_other_data(
    bench, out, tmp_path):
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  file = pathlib.Path(shutil.copy(out / 'clients.json', tmp_path))
  shutil.rmtree(out)
  call = ('clients', 'fedprox', f'--stored={file}', *CHANGED)
  edit(file, 'labels_only', data='b')
  code, _, errors = bench(*call)
  assert code == 2 and 'The row labels_only of' in errors
  assert len(errors.splitlines()) == 1 and not out.exists()
  edit(file, 'labels_only', data=job.data_hash(data.load('digits')))
  assert bench(*call)[0] == 0
