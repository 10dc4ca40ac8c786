"""A bench over a folder in which files were damaged."""
from __future__ import annotations

import json
import re
import shutil

from tests.cli.bench_trainer import CHANGED


def test_damage_to_one_row_stops_no_other(bench, out):
  """A damaged row is told in a line, and what the table has of it stays."""
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0
  table = (out / 'clients.json').read_bytes()
  final = next(out.glob('clients__fixmatch__mild__final*'))
  whole = (final / 'metrics.jsonl').read_bytes()
  (final / 'metrics.jsonl').write_bytes(b'garbage\n' + whole)
  (out / 'clients__fixmatch__try0' / 'config.json').write_bytes(b'')
  assert bench('clients', 'labels_only', *CHANGED)[0] == 0
  assert (out / 'clients.json').read_bytes() == table
  said = bench('clients', 'fixmatch', '--status')[1]
  assert 'fixmatch                 2/3 tried' in said
  for folder in (final, out / 'clients__fixmatch__try0'):
    shutil.rmtree(folder)
  assert bench('clients', 'fixmatch', *CHANGED)[0] == 0  # Run again.
  assert (out / 'clients.json').read_bytes() == table
  rows = out / 'clients__fixmatch__try1' / 'metrics.jsonl'
  rows.write_text(re.sub(r'("val_accuracy": )[^,}]*', r'\1"high"',
                         rows.read_text()))
  code, _, errors = bench('clients', 'fixmatch', 'fedprox', *CHANGED)
  assert code == 1 and errors.count('error: fixmatch: ') == 1
  assert errors.count('left out: fixmatch: ') == 1
  kept = json.loads((out / 'clients.json').read_text())['rows']['mild']
  assert {'fixmatch', 'fedprox'} < {row['row'] for row in kept}
  (out / 'changed.json').write_bytes(b'')
  code, _, errors = bench('clients', 'fixmatch', '--status')
  assert code == 2 and 'changed.json is damaged; remove it, and give' in errors
