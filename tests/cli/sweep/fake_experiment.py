"""Stands in for an experiment: the same files and manners, no training.

Appends a line to <workdir>/../starts for each start. The first start of a seed
that <workdir>/../holds names stays before its last round until it is told to
end.
"""
from __future__ import annotations

import json
import pathlib
import signal
import sys
import time


def main() -> None:
  flags = {'num_rounds': '2', 'seconds': '0', 'fail': '0', 'seeds': '0',
           'bounds': '', 'code': '3'}
  for arg in sys.argv[1:]:
    name, _, value = arg.removeprefix('--').partition('=')
    if name == 'flagfile':
      for line in pathlib.Path(value).read_text().splitlines():
        if line.startswith('--'):
          key, _, text = line[2:].partition('=')
          flags[key] = text
      continue
    flags[name] = value or 'yes'
  folder = pathlib.Path(flags['workdir'])
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder.parent / 'starts', 'a') as file:
    file.write(f'{folder.name}\n')
  starts = (folder.parent / 'starts').read_text().split().count(folder.name)
  signal.signal(signal.SIGTERM, lambda *unused: sys.exit(0))
  rounds = int(flags['num_rounds'])
  seeds = [int(s) for s in flags['seeds'].split(',')]
  (folder / 'config.json').write_text(json.dumps({'flags': {
      'num_rounds': rounds, 'seeds': seeds, 'bounds': bool(flags['bounds'])}}))
  rows = folder / 'metrics.jsonl'
  done = len(rows.read_text().splitlines()) // len(seeds) if (
      rows.exists()) else 0
  for round_ in range(done + 1, rounds + 1):
    time.sleep(float(flags['seconds']))
    holds = folder.parent / 'holds'
    if round_ == rounds and starts == 1 and holds.exists() and (
        flags['seeds'] in holds.read_text().split()):
      while True:  # One long sleep may begin just behind a signal.
        time.sleep(0.05)
    if starts <= int(flags['fail']):
      print('a first line')
      print(f'error: fell over in round {round_}', file=sys.stderr)
      sys.exit(int(flags['code']))
    with open(rows, 'a') as file:
      for seed in seeds:
        file.write(json.dumps({'round': round_, 'seed': seed}) + '\n')


if __name__ == '__main__':
  main()
