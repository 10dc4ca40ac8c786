"""Finished runs as values: their files read, grouped over seeds, summed up."""
from __future__ import annotations

from collections.abc import Mapping, Sequence
import dataclasses
import os
import pathlib
import re
from typing import Any

import numpy as np

from fedjax_ssl.training import metrics, report
from fedjax_ssl.training import workdir as workdir_lib

Row = Mapping[str, Any]
TAIL_ROUNDS = 10
# Flags in which the seeds of one cell may differ.
_FREE = ('workdir', 'data_dir', 'seed', 'seeds', 'eval_only', 'bounds',
         'tensorboard', 'num_devices', 'seed_map')


@dataclasses.dataclass(frozen=True)
class Run:
  """One line of a report.

  Attributes:
    name: in tables and plots.
    folders: where its seeds are.
    config: `config.json` of the first folder.
    seeds: rows of each seed, oldest first.
    seconds: of the whole run, by the clock; the sum over folders.
    paper: the paper's number in percent, if a flagfile names one.
    source: first comment line of that flagfile.
  """

  name: str
  folders: list[pathlib.Path]
  config: dict[str, Any]
  seeds: list[list[Row]]
  seconds: float
  paper: float | None = None
  source: str = ''

  @property
  def rounds(self) -> int:
    """The last round that all seeds have."""
    return min(rows[-1]['round'] for rows in self.seeds)


def read(folder: str | os.PathLike[str], name: str = '') -> Run:
  """Reads one workdir.

  Raises:
    ValueError: if it holds no run, or one without rows; the message names it.
  """
  path = pathlib.Path(folder)
  config = workdir_lib.read_config(path)
  rows = metrics.read(path)
  if not rows:
    raise ValueError(f'{path} has no rows; let it finish first.')
  times = [t['seconds'] for t in metrics.read(path, metrics.TIMINGS)
           if 'seconds' in t]
  comments = config.get('origin', {}).get('comments', [])
  return Run(name or path.name, [path], config, report.by_seed(rows),
             _elapsed(times), _paper(comments), comments[0] if comments else '')


def load(folders: Sequence[str | os.PathLike[str]]) -> list[Run]:
  """Reads workdirs; those that differ in their seeds only become one run.

  Raises:
    ValueError: see `read`; or if a seed comes twice.
  """
  groups: dict[str, list[Run]] = {}
  for folder in dict.fromkeys(os.path.normpath(f) for f in folders):
    run = read(folder)
    key = repr([(k, v) for k, v in sorted(run.config['flags'].items())
                if k not in _FREE] + [run.config.get('origin', {}).get(
                    'script'), run.config['facts'].get('data_hash')])
    groups.setdefault(key, []).append(run)
  return _named([_joined(runs) for runs in groups.values()])


def _joined(runs: list[Run]) -> Run:
  first = runs[0]
  if len(runs) == 1:
    return first
  seeds = [s for run in runs for s in seeds_of(run)]
  if len(set(seeds)) < len(seeds):
    raise ValueError(f'{runs[0].folders[0]} and {runs[1].folders[0]} are the '
                     'same run, seeds included; name one of them.')
  name = re.sub(r'[-_.]*seeds?[=_]?\d*$', '', os.path.commonprefix(
      [run.name for run in runs])).rstrip('-_.') or first.name
  parent = first.folders[0].parent.name
  if name in ('', 'seed'):
    name = parent
  order = np.argsort(seeds)
  rows = [r for run in runs for r in run.seeds]
  return dataclasses.replace(
      first, name=name, folders=[f for run in runs for f in run.folders],
      seeds=[rows[i] for i in order], seconds=sum(r.seconds for r in runs))


def seeds_of(run: Run) -> list[int]:
  """The seeds, as the configuration names them."""
  flags = run.config['flags']
  return list(flags.get('seeds') or [flags.get('seed')])


def _named(runs: list[Run]) -> list[Run]:
  """Names made different: by the folder above, else by number."""
  named: list[Run] = []
  for run in runs:
    name = run.name
    if sum(r.name == name for r in runs) > 1:
      name = f'{run.folders[0].parent.name}/{name}'
    count = sum(r.name.split(' (')[0] == name for r in named)
    named.append(dataclasses.replace(
        run, name=f'{name} ({count + 1})' if count else name))
  return named


def _elapsed(seconds: Sequence[float]) -> float:
  """Clock time over restarts: the clock begins anew with each process."""
  total = last = 0.0
  for now in seconds:
    if now < last:
      total += last
    last = now
  return round(total + last, 1)


def _paper(comments: Sequence[str]) -> float | None:
  """The number of a flagfile's line `Paper: 39.95 % ...`."""
  for line in comments:
    match = re.search(r'\bPaper: (?:.*?\bglobal )?([\d.]+) ?%', line)
    if match:
      return float(match[1])
  return None


def last_rounds(rows: Sequence[Row], rounds: int = TAIL_ROUNDS
                ) -> float | None:
  """Mean test accuracy over the rows of the last `rounds` rounds."""
  recent = [r['accuracy'] for r in rows
            if r['round'] > rows[-1]['round'] - rounds]
  return None if any(v is None for v in recent) else float(np.mean(recent))


def outcome(rows: Sequence[Row]) -> dict[str, Any]:
  """What one seed came to, ready for JSON.

  Returns:
    final, last_10_rounds, selected (by validation accuracy): test accuracy.
    metrics: numbers of the last row; bytes and counts are sums over the run.
  """
  summary = report.summary(rows)
  last = {k: v for k, v in rows[-1].items()
          if k not in ('round', 'seed') and not isinstance(v, list)}
  last |= {k: summary[k] for k in ('bytes_up', 'bytes_down', 'num_rejected')
           if k in summary}
  return {'final': summary['final'], 'last_10_rounds': last_rounds(rows),
          'selected': summary['selected'], 'metrics': last}


def reached(rows: Sequence[Row], target: float) -> tuple[int, float] | None:
  """(round, bytes both ways by then) of the first row at the target."""
  sent = 0.0
  for row in rows:
    sent += (row.get('bytes_up') or 0) + (row.get('bytes_down') or 0)
    if row.get('accuracy') is not None and row['accuracy'] >= target:
      return int(row['round']), sent
  return None


def default_target(runs: Sequence[Run]) -> float:
  """The highest multiple of 5 % that every seed of every run reaches."""
  best = [max((r['accuracy'] for r in rows if r.get('accuracy') is not None),
              default=0.0) for run in runs for rows in run.seeds]
  return int(min(best) * 20 + 1e-9) / 20


def traffic(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
  """float64[R] bytes sent so far, both ways, and float64[R] accuracy."""
  sent = np.cumsum([(r.get('bytes_up') or 0) + (r.get('bytes_down') or 0)
                    for r in rows])
  accuracy = np.array([np.nan if r.get('accuracy') is None else r['accuracy']
                       for r in rows], np.float64)
  return sent, accuracy
