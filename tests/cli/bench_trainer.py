"""A bench whose trainings are made up: the trainer, and its tables."""
from __future__ import annotations

import json
import pathlib

from tests.bench import made_up
from tests.bench.made_up import COUNT

# Stands for the interpreter: trains in no time, and the better the nearer the
# rate is to .05; fixmatch has 20 points more on test rows. Not started by its
# first line alone, in which no path may have a space.
TRAINER = """import hashlib, json, os, sys
if '--only_check_args' in sys.argv:
  sys.exit(0)
flags = dict(a[2:].split('=', 1) for a in sys.argv if a.startswith('--'))
seeds = [int(s) for s in flags['seeds'].split(',')]
method, folder = flags['method'], flags['workdir']
with open(os.path.join(os.path.dirname(folder), 'started'), 'a') as file:
  print(os.path.basename(folder), file=file)
if method.startswith('uda') and 'final' in folder or method.startswith('moon'):
  print('error: it fell over')
  sys.exit(1)
good = .7 - abs(float(flags['learning_rate']) - .05)
best = good + .2 * method.startswith('fixmatch') + .3 * (
    flags.get('labels') == 'all')
os.mkdir(folder)
with open(folder + '/metrics.jsonl', 'w') as file:
  for seed in seeds:
    for r in range(1, 11):
      print(json.dumps(dict(round=r, seed=seed, accuracy=best * r / 10,
                            loss=1.0, val_accuracy=good * r / 10)), file=file)
with open(folder + '/timings.jsonl', 'w') as file:
  print(json.dumps(dict(round=10, seconds=7.0)), file=file)
place = method.partition('.py:')[0] + '.py'
facts = {}
if os.path.exists(place):
  with open(place, 'rb') as file:
    facts['code'] = {'own.py': hashlib.sha256(file.read()).hexdigest()}
with open(folder + '/config.json', 'w') as file:
  json.dump(dict(flags=dict(method=method, seeds=seeds, num_rounds=10),
                 facts=facts, origin=dict(), environment=dict(commit='abc'),
                 restarts=[]), file)
"""


CHANGED = (f'--configurations={COUNT}', '--', *made_up.CHANGED)


def started(folder: pathlib.Path) -> list[str]:
  return (folder / 'started').read_text().split()


def rows(folder: pathlib.Path, skew: str) -> dict[str, dict]:
  stored = json.loads((folder / 'clients.json').read_text())
  return {row['row']: row for row in stored['rows'][skew]}


def edit(file: pathlib.Path, name: str, flags: dict | None = None, **values
          ) -> None:
  """Gives a row of a table other flags, and other values on all skews."""
  stored = json.loads(file.read_text())
  if flags:
    stored['tuned'][name]['space']['flags'] = flags
  for found in stored['rows'].values():
    for row in found:
      if row['row'] == name:
        row.update(values)
  file.write_text(json.dumps(stored))


def without(file: pathlib.Path, name: str) -> None:
  """Takes a row from a table."""
  stored = json.loads(file.read_text())
  del stored['tuned'][name]
  stored['rows'] = {skew: [row for row in found if row['row'] != name]
                    for skew, found in stored['rows'].items()}
  file.write_text(json.dumps(stored))


def on_data(folder: pathlib.Path, digest: str) -> None:
  """Has runs say that their data have this hash."""
  for file in folder.glob('clients__*/config.json'):
    config = json.loads(file.read_text())
    file.write_text(json.dumps(config | {'facts': {'data_hash': digest}}))
