"""Folders of finished runs, made by hand, and an experiment that makes them."""
from __future__ import annotations

import json
import pathlib
import signal
import sys
import time
from typing import Any

CLASSES = 4


def config(seeds=(0,), num_rounds: int = 20, partition: str = 'p0', **flags
           ) -> dict[str, Any]:
  """What `config.json` holds."""
  counts = [[(3 * i + c) % 7 for c in range(CLASSES)] for i in range(5)]
  return {
      'flags': {'method': 'fedavg', 'labels': 'few', 'seeds': list(seeds),
                'seed': None, 'num_rounds': num_rounds, 'bounds': False,
                'alpha': 0.5, 'dataset': 'digits'} | flags,
      'facts': {'data_hash': 'd', 'partition_hash': {'0': partition},
                'federation': {
                    'num_clients': 5, 'num_classes': CLASSES,
                    'labeled_classes': counts,
                    'unlabeled_classes': [[9 * n for n in r] for r in counts]}},
      'origin': {'script': 'experiments/digits_dirdir.py', 'flagfiles': [],
                 'comments': []},
      'environment': {'commit': 'abc', 'devices': '1 x cpu (cpu)'},
      'restarts': []}


def row(round_: int, accuracy: float, seed: int | None = None, **values
        ) -> dict[str, Any]:
  """A row of `metrics.jsonl`."""
  where = {'round': round_} | ({} if seed is None else {'seed': seed})
  return where | {
      'accuracy': accuracy, 'loss': 2 - accuracy, 'val_accuracy': accuracy,
      'per_class_accuracy': [accuracy] * (CLASSES - 1) + [None],
      'bytes_up': 1000, 'bytes_down': 3000} | values


def write(folder: pathlib.Path, rows: list[dict[str, Any]],
          made: dict[str, Any] | None = None, seconds: float = 7.0) -> str:
  """Writes a run's files; returns the folder."""
  folder.mkdir(parents=True)
  (folder / 'config.json').write_text(json.dumps(made or config()))
  (folder / 'metrics.jsonl').write_text(
      ''.join(json.dumps(r) + '\n' for r in rows))
  (folder / 'timings.jsonl').write_text(''.join(json.dumps(
      {'round': r['round'], 'seconds': seconds * (i + 1) / len(rows)}) + '\n'
      for i, r in enumerate(rows)))
  return str(folder)


def main() -> None:
  """An experiment: a row a round, `--seconds` each; continues and saves.

  The first start of a folder that `holds` beside the script names stays before
  its last round until it is told to end.
  """
  flags: dict[str, Any] = {
      'num_rounds': '3', 'seconds': '0', 'method': 'fedavg'}
  def take(words):
    for word in words:
      name, _, value = word.removeprefix('--').partition('=')
      if name == 'flagfile':
        take(line for line in pathlib.Path(value).read_text().splitlines()
             if line.startswith('--'))
      else:
        flags[name] = value
  take(sys.argv[1:])
  if flags['method'] == 'fixmatch':
    print('error: it fell over')
    sys.exit(1)
  signal.signal(signal.SIGTERM, lambda *unused: sys.exit(0))
  folder = pathlib.Path(flags['workdir'])
  folder.mkdir(parents=True, exist_ok=True)
  with open(folder / 'starts', 'a') as file:
    file.write('x')
  seed = int(flags['seeds'])
  made = config([seed], int(flags['num_rounds']))
  made['flags'] |= {k: v for k, v in flags.items() if k in ('method', 'alpha')}
  (folder / 'config.json').write_text(json.dumps(made))
  rows = folder / 'metrics.jsonl'
  done = len(rows.read_text().splitlines()) if rows.exists() else 0
  for round_ in range(done + 1, int(flags['num_rounds']) + 1):
    time.sleep(float(flags['seconds']))
    holds = pathlib.Path(__file__).with_name('holds')
    if round_ == int(flags['num_rounds']) and holds.exists() and (
        '/'.join(folder.parts[-2:]) == holds.read_text()
        and (folder / 'starts').read_text() == 'x'):
      while True:  # One long sleep may begin just behind a signal.
        time.sleep(0.05)
    with open(rows, 'a') as file:
      file.write(json.dumps(row(round_, 0.5 + seed / 10)) + '\n')


if __name__ == '__main__':
  main()
