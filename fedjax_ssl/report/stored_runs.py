"""Reads finished runs from files, groups them over seeds, sums them up."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
import dataclasses
import functools
import os
import pathlib
import re
from typing import Any

import numpy as np

from fedjax_ssl.core import bounds as bounds_lib
from fedjax_ssl.core import flag_kinds, run_files
from fedjax_ssl.papers import cells as papers
from fedjax_ssl.papers import flags as paper_flags
from fedjax_ssl.report import names, text, verdict
from fedjax_ssl.report import summary as summary_lib
from fedjax_ssl.training import command, metrics
from fedjax_ssl.training import workdir as workdir_lib

Row = Mapping[str, Any]
# Defaults of all flags of a setting, by its name; {} if they are not known.
Defaults = Callable[[str], Mapping[str, Any]]
TAIL_ROUNDS = 10
_LARGEST = 1e39  # Beyond the largest float32; all is measured in float32.
_MOST_ROUNDS = 2**31


@dataclasses.dataclass(frozen=True)
class ReportedRun:
  """One line of a report.

  Attributes:
    name: in tables and plots.
    folders: where its seeds are.
    config: `config.json` of the first folder.
    seeds: rows of each seed, oldest first.
    seconds: of the whole run, by the clock, summed over folders; None if some
      of these times are lost.
    paper: the paper's number, if a flagfile names one.
    numbers: the seeds themselves, in the order of `seeds`. All have rows up to
      the same round.
    planned: all seeds that the configuration asks for.
    changed: flags that are not as that flagfile has them; None if they could
      not be compared.
    federations: the stored description of each seed's federation; None for a
      seed that has another partition than the one described.
    folder_name: what its folders are called, without the seeds.
    unlike: a folder whose run has the same flags and is another one; see
      `load`.
    behind: seeds that are not as far as `numbers`, with their last rounds.
  """

  name: str
  folders: list[pathlib.Path]
  config: dict[str, Any]
  seeds: list[list[Row]]
  seconds: float | None
  paper: paper_flags.Printed | None = None
  numbers: tuple[int, ...] = ()
  planned: tuple[int, ...] = ()
  changed: tuple[str, ...] | None = ()
  federations: tuple[Any, ...] = ()
  folder_name: str = ''
  unlike: str = ''
  behind: tuple[tuple[int, int], ...] = ()

  @property
  def rounds(self) -> int:
    """The last round of every seed."""
    last: int = self.seeds[0][-1]['round']
    return last

  @property
  def num_rounds(self) -> int:
    """The round that the configuration asks for."""
    return self.config['flags'].get('num_rounds') or self.rounds

  @property
  def verdicts(self) -> list[verdict.Verdict | None]:
    """The verdict on each seed's last row."""
    return [verdict.of(rows[-1]) for rows in self.seeds]

  @property
  def few_rows(self) -> str:
    """Says how few rows chose its validation-selected numbers; else ''."""
    dealt = self.config['facts'].get('federation')
    return summary_lib.few_rows(self.seeds, dealt.get('num_validation')
                                if isinstance(dealt, dict) else None)

  def notes(self, paper: bool = True) -> list[str]:
    """Returns what a reader of its numbers must know.

    Args:
      paper: whether to add notes on verdicts and on the paper's number.
    """
    found = []
    lost = sorted({*self.planned} - {*self.numbers} - {*dict(self.behind)})
    if self.rounds < self.num_rounds:
      found.append(f'not finished, {self.rounds} of {self.num_rounds} rounds')
    if lost:
      found.append(f'not finished, {len(self.numbers)} of '
                   f'{len(self.planned)} seeds (no rows yet of '
                   f'{", ".join(map(str, lost))})')
    if self.behind:
      found.append('without seeds that are not as far (' + ', '.join(
          f'seed {s}: round {r}' for s, r in self.behind) + ')')
    if self.unlike:
      found.append(f'the flags are those of {self.unlike}, but they stood for '
                   'other data, other code or other defaults of knobs')
    if not paper:
      return found
    if said := verdict.note(self.verdicts):
      found.append(said)
    if self.paper is not None and self.changed is None:
      found.append("* the paper's number is of a flagfile that is not here to "
                   'be compared')
    elif self.paper is not None and self.changed:
      found.append("* the paper's number is of the flagfile, and this run has "
                   + ', '.join(self.changed))
    return found


def read(folder: str | os.PathLike[str], name: str = '',
         defaults: Defaults | None = None) -> ReportedRun:
  """Reads one workdir.

  Args:
    folder: the workdir.
    name: in tables; default: the folder's.
    defaults: with it a run is compared with its flagfiles in all flags, else
      in those that they name.

  Raises:
    ValueError: if it holds no run, or one without rows; the message names it.
  """
  path = pathlib.Path(folder)
  config = workdir_lib.read_config(path)
  seeds = summary_lib.by_seed(metrics.read(path))
  if not seeds:
    raise ValueError(f'{path} has no evaluated round yet.')
  try:
    times = metrics.read(path, metrics.TIMINGS)
    flags, made = config['flags'], command.origin_of(config)
    comments = made.get('comments', [])
    planned = [int(s) for s in run_files.seeds(flags)]
    _check(flags, seeds)
    seeds = _in_step(seeds)
    _meant(config['facts'], config['facts'])  # Raises if they are malformed.
    _known_knobs(config['facts'])
    for seed in seeds:
      outcome(seed)  # Raises if the rows cannot be summed up.
    title = name or text.plain(path.name)
    numbers = tuple(s[0].get('seed', planned[0]) for s in seeds)
    return ReportedRun(
        title, [path], config, seeds, summary_lib.elapsed(times),
        paper_flags.printed(comments), numbers, tuple(planned),
        _changed(config, defaults),
        _federations(config['facts'], planned[0], numbers), title)
  except KeyError as error:
    raise ValueError(f'{path} is damaged: {error} is missing.') from error
  except (AttributeError, LookupError, TypeError, ValueError) as error:
    raise ValueError(
        f'{path} is damaged: {str(error).rstrip(".")}.') from error


def _in_step(seeds: Sequence[list[Row]]) -> list[list[Row]]:
  """Cuts the seeds of a folder, which train in step, to one last round."""
  last = min((rows[-1]['round'] for rows in seeds), default=0)
  return [[row for row in rows if row['round'] <= last] for rows in seeds]


def _federations(facts: Mapping[str, Any], first: int, seeds: Sequence[int]
                 ) -> tuple[Any, ...]:
  """Returns the stored description for each seed that has its partition."""
  hashes = facts.get('partition_hash')
  hashes = hashes if isinstance(hashes, dict) else {}
  described = hashes.get(str(first))
  return tuple(
      facts.get('federation') if seed == first or (
          described is not None and hashes.get(str(seed)) == described)
      else None for seed in seeds)


def _check(flags: Mapping[str, Any], seeds: Sequence[Sequence[Row]]) -> None:
  """Raises ValueError for values that no run writes."""
  for name, kind in (('num_rounds', int), ('method', str)):
    if not isinstance(flags.get(name, kind()), kind):
      raise ValueError(f'{name}={flags[name]!r} in its configuration')
  for rows in seeds:
    metrics.validate_all(rows)
  for row in (row for rows in seeds for row in rows):
    for name, value in row.items():
      most = _MOST_ROUNDS if name == 'round' else _LARGEST
      for item in value if isinstance(value, list) else [value]:
        if abs(item or 0) > most:
          raise ValueError(f'{name} is beyond {most:g}')


def _changed(config: Mapping[str, Any], defaults: Defaults | None
             ) -> tuple[str, ...] | None:
  """Finds flags that differ from the run's flagfiles and setting's defaults.

  None if a flagfile is not a known table cell; () if the run used no flagfile.
  """
  names = [pathlib.Path(name).stem
           for name in command.origin_of(config).get('flagfiles', [])]
  if not names:
    return ()
  cells = _cells()
  if not all(name in cells for name in names):
    return None
  return tuple(paper_flags.differences(
      config['flags'], [line for name in names for line in cells[name]],
      defaults(command.setting_of(config)) if defaults else {}))


@functools.cache
def _cells() -> dict[str, tuple[str, ...]]:
  """Returns the flags of all cells of the papers' tables by name."""
  return {cell.name: cell.flags for table in papers.tables().values()
          for cell in table.cells() if not cell.missing}


def load(folders: Sequence[str | os.PathLike[str]],
         left_out: list[str] | None = None,
         defaults: Defaults | None = None, repeats: bool = False
         ) -> list[ReportedRun]:
  """Reads workdirs; those that differ only in their seeds become one run.

  Those whose flags stood for other data, code or knobs stay apart.

  Args:
    folders: the workdirs.
    left_out: if given, each unreadable or duplicate folder adds a line here
      and is skipped; if None, the first such folder raises.
    defaults: see `read`.
    repeats: whether a folder that repeats a seed is a run of its own, and no
      duplicate.

  Raises:
    ValueError: see `read`; if none can be read; or if a seed comes twice.
  """
  groups: dict[str, list[ReportedRun]] = {}
  faults: list[str] = []
  for folder in dict.fromkeys(os.path.normpath(f) for f in folders):
    try:
      run = read(folder, defaults=defaults)
    except (ValueError, OSError) as error:
      if left_out is None:
        raise
      faults.append(text.of_error(error))
      continue
    key = repr([(k, v) for k, v in sorted(run.config['flags'].items())
                if k not in (*flag_kinds.OF_A_SEED, *flag_kinds.MACHINE)]
               + [command.program_of(run.config)])
    groups.setdefault(key, []).append(run)
  if not groups:
    raise ValueError(' '.join(faults) or 'No folder is named.')
  joined = [_joined(runs) for group in groups.values()
            for alike in _alike(group) for cell in _cells_of(alike)
            for runs in (_parted(cell, _share_no_seed) if repeats else
                         [_once(cell, left_out)])]
  if left_out is not None:
    left_out += faults
  return named(joined)


def _alike(runs: Sequence[ReportedRun]) -> list[list[ReportedRun]]:
  """Parts runs of equal flags where these stood for something else.

  That is so if the data have changed between them, a file of the user's own,
  or a default of a knob.
  """
  # Those that know most knobs first: the order of the folders must not count.
  parts = _parted(
      sorted(runs, key=lambda run: (-_known_knobs(run.config['facts']),
                                    str(run.folders[0]))),
      lambda one, run: _meant(one.config['facts'], run.config['facts']))
  places = {id(run): place for place, run in enumerate(runs)}
  parts = sorted((sorted(part, key=lambda run: places[id(run)])
                  for part in parts), key=lambda part: places[id(part[0])])
  return [[dataclasses.replace(run, unlike=str(parts[0][0].folders[0]))
           for run in part] if i else part for i, part in enumerate(parts)]


def _known_knobs(facts: Mapping[str, Any]) -> int:
  return sum(len(chosen['knobs'])
             for chosen in (facts.get('choices') or {}).values())


def _meant(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
  """Returns whether flags stood for the same, by the facts of two runs.

  What the version of one did not know yet is not compared.
  """
  codes = [dict(facts.get('code') or {}) for facts in (one, other)]
  if codes[0] != codes[1] or one.get('data_hash') != other.get('data_hash'):
    return False
  known, new = (facts.get('choices') or {} for facts in (one, other))
  return not any(
      name in new[field]['knobs'] and new[field]['knobs'][name] != value
      for field in set(known) & set(new)
      for name, value in known[field]['knobs'].items())


def _once(runs: list[ReportedRun], left_out: list[str] | None
          ) -> list[ReportedRun]:
  """Leaves out runs that repeat a seed of an earlier one; see `load`."""
  owners: dict[int, pathlib.Path] = {}
  kept = []
  for run in runs:
    if common := [s for s in run.numbers if s in owners]:
      fault = (f'{owners[common[0]]} and {run.folders[0]} are the same run, '
               'seeds included; name one of them.')
      if left_out is None:
        raise ValueError(fault)
      left_out.append(fault)
      continue
    owners |= dict.fromkeys(run.numbers, run.folders[0])
    kept.append(run)
  return kept


def _cells_of(runs: Sequence[ReportedRun]) -> list[list[ReportedRun]]:
  """Parts runs that are compared as they use a machine in different ways.

  Those of which none repeats a seed are seeds of one cell, whatever each of
  them was run on.
  """
  ways: dict[str, list[ReportedRun]] = {}
  for run in runs:
    flags = run.config['flags']
    ways.setdefault(repr([flags.get(k) for k in flag_kinds.MACHINE]),
                    []).append(run)
  if len(ways) > 1:
    seeds = [set().union(*(run.numbers for run in way))
             for way in ways.values()]
    if len(set().union(*seeds)) == sum(map(len, seeds)):
      return [[*runs]]
  return [*ways.values()]


def _parted(runs: Iterable[ReportedRun],
            go_together: Callable[[ReportedRun, ReportedRun], bool]
            ) -> list[list[ReportedRun]]:
  """Parts runs: each joins the first part with all of which it goes."""
  parts: list[list[ReportedRun]] = []
  for run in runs:
    part = next((part for part in parts
                 if all(go_together(one, run) for one in part)), None)
    if part is None:
      parts.append([run])
    else:
      part.append(run)
  return parts


def _share_no_seed(one: ReportedRun, other: ReportedRun) -> bool:
  return not {*one.numbers} & {*other.numbers}


def _joined(runs: list[ReportedRun]) -> ReportedRun:
  """Joins several runs into one of all their seeds that are as far as any."""
  if len(runs) == 1:
    return runs[0]
  planned = tuple(sorted({s for run in runs for s in run.planned}))
  most = max(run.rounds for run in runs)
  behind = sorted((seed, run.rounds) for run in runs if run.rounds < most
                  for seed in run.numbers)
  runs = [run for run in runs if run.rounds == most]
  first = runs[0]
  seeds = [s for run in runs for s in run.numbers]
  name = re.sub(r'[-_.]*seeds?[=_]?\d*$', '', os.path.commonprefix(
      [run.name for run in runs])).rstrip('-_.') or first.name
  parent = first.folders[0].parent.name
  if name in ('', 'seed'):
    name = parent
  order = np.argsort(seeds)
  rows = [r for run in runs for r in run.seeds]
  known = [f for run in runs for f in run.federations]
  return dataclasses.replace(
      first, name=name, folder_name=name,
      federations=tuple(known[i] for i in order),
      folders=[f for run in runs for f in run.folders],
      seeds=[rows[i] for i in order],
      seconds=_total([r.seconds for r in runs]),
      numbers=tuple(seeds[i] for i in order),
      planned=planned, behind=tuple(behind),
      changed=_united([run.changed for run in runs]))


def _united(changes: Sequence[tuple[str, ...] | None]
            ) -> tuple[str, ...] | None:
  """Unites what the runs changed; None if that of one is not known."""
  found: dict[str, None] = {}
  for change in changes:
    if change is None:
      return None
    found |= dict.fromkeys(change)
  return tuple(found)


def compared(runs: Sequence[ReportedRun]) -> names.Plan:
  """Finds what differs between runs: their names and how they are drawn."""
  places = {folder for run in runs for folder in run.folders}
  bounds = [i for i, run in enumerate(runs) if all(
      folder.name == bounds_lib.folder(run.config['flags'].get('labels'))
      and folder.parent in places for folder in run.folders)]
  return names.plan(
      [run.config for run in runs],
      [(title := run.folder_name,
        f'{text.plain(run.folders[0].parent.name)}/{title}')
       for run in runs], flag_kinds.OF_A_SEED, bounds)


def named(runs: Sequence[ReportedRun]) -> list[ReportedRun]:
  """Gives runs short names, all different, by what tells them apart."""
  return [dataclasses.replace(run, name=name)
          for run, name in zip(runs, compared(runs).names, strict=True)]


def _total(seconds: Sequence[float | None]) -> float | None:
  known = [s for s in seconds if s is not None]
  return sum(known) if len(known) == len(seconds) else None


def last_rounds(rows: Sequence[Row]) -> float | None:
  """Computes the mean test accuracy in the rows of the last 10 rounds."""
  recent = [r['accuracy'] for r in rows
            if r['round'] > rows[-1]['round'] - TAIL_ROUNDS]
  return None if any(v is None for v in recent) else float(np.mean(recent))


def outcome(rows: Sequence[Row]) -> dict[str, Any]:
  """Sums up one seed, ready for JSON.

  Returns:
    final, tail, selected, best: see `summary.summary`; last_10_rounds: the mean
    test accuracy over the last 10 rounds, stored with the papers' tables.
    metrics: numbers of the last row. bytes_up, bytes_down and num_rejected are
    sums over the run; cost_up and cost_down, in percent of one dense model, are
    means over the run's rounds and known wherever traffic was measured.
  """
  summary = summary_lib.summary(rows)
  last = {k: v for k, v in rows[-1].items()
          if k not in ('round', 'seed') and not isinstance(v, list)}
  last |= {k: summary[k] for k in run_files.SUMMED if k in summary}
  last |= {k: v for k in ('cost_up', 'cost_down')
           if (v := _cost(rows, k)) is not None}
  return {'final': summary['final'], 'tail': summary['tail'],
          'last_10_rounds': last_rounds(rows), 'best': summary['best'],
          'selected': summary['selected'], 'metrics': last}


def _cost(rows: Sequence[Row], name: str) -> float | None:
  """Averages a cost over all rounds, as FedMatch's tables do.

  If a row has no `name`, it is derived from bytes:
  100 * models_sent * (bytes one way) / (bytes both ways).
  """
  way = name.replace('cost', 'bytes')
  def value(row: Row) -> float | None:
    sent = _sent(row)
    if row.get(name) is None and sent and row.get('models_sent') is not None:
      return float(100 * row['models_sent'] * (row.get(way) or 0) / sent)
    return row.get(name)
  return summary_lib.over_rounds([(row['round'], value(row)) for row in rows])


def _sent(row: Row) -> float:
  """Returns the bytes of a row, both ways."""
  return (row.get('bytes_up') or 0) + (row.get('bytes_down') or 0)


def reached(rows: Sequence[Row], target: float) -> tuple[int, float] | None:
  """Returns (round, bytes both ways by then) of the first row at the target."""
  sent = 0.0
  for row in rows:
    sent += _sent(row)
    if row.get('accuracy') is not None and row['accuracy'] >= target:
      return int(row['round']), sent
  return None


def default_target(runs: Sequence[ReportedRun]) -> float:
  """Returns the highest multiple of 5 % that all seeds of all runs reach."""
  best = [max((r['accuracy'] for r in rows if r.get('accuracy') is not None),
              default=0.0) for run in runs for rows in run.seeds]
  return int(min(best) * 20 + 1e-9) / 20


def traffic(rows: Sequence[Row]) -> tuple[np.ndarray, np.ndarray]:
  """Returns bytes sent so far, both ways, and accuracy, float64[R] each."""
  sent = np.cumsum([_sent(row) for row in rows])
  return sent, summary_lib.column(rows, 'accuracy')
