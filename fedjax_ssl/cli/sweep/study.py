"""What a folder holds of other grids: cells renamed, and runs that differ.

A cell is named by what varies in its grid. So an edited grid may give the same
run another name, or another run the same name.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import json
import pathlib
from typing import Any

from absl import flags

from fedjax_ssl import config
from fedjax_ssl.cli.sweep import asked, grid
from fedjax_ssl.cli.sweep import cells as cells_lib
from fedjax_ssl.core import imports, registry, run_files
from fedjax_ssl.running import settings
from fedjax_ssl.training import changes as changes_lib

_SHOWN = 5  # Folders that a line names.
# What a run may decide by itself, or take from what it has stored.
_OPEN = (None, 'auto', 'measure')
# Options that data may decide where nobody gives them.
_BY_DATA = ('partition', 'num_clients', 'cohort_size', 'labels_per_class',
            'labeled_fraction')
# Compared in other words: `all_seeds`, and the method with its profile.
_APART = ('seed', 'seeds', 'profile', 'num_rounds')


def recognised(out: pathlib.Path, cells: Sequence[grid.Cell]
               ) -> list[grid.Cell]:
  """Gives cells the folders that runs of just their flags have already.

  Args:
    out: folder of all runs.
    cells: all of a grid, not those of a shard.

  Returns:
    The cells in their order. One has an older name if the folder holds a run
    under it that was started with the same flags, and none under the cell's
    own. No two cells have one folder.
  """
  older = _older(out, {cell.name for cell in cells})
  taken: set[str] = set()
  found = []
  for cell in cells:
    words = {cells_lib.normal(arg): arg for arg in cell.args}
    same = older.get(frozenset(words), [])
    if same and not cells_lib.is_held(out, cell) and (
        cells_lib.record(out, cell).get('fingerprint')
        != cells_lib.fingerprint(cell)):
      for name, order in same:
        # The order of flags does not matter, but is part of the fingerprint.
        old = dataclasses.replace(
            cell, name=name, renamed=cell.name,
            args=tuple(words[word] for word in order))
        if name not in taken and cells_lib.record(out, old).get(
            'fingerprint') == cells_lib.fingerprint(old):
          cell = old
          taken.add(name)
          break
    found.append(cell)
  return found


def _older(out: pathlib.Path, own: Collection[str]
           ) -> dict[frozenset[str], list[tuple[str, list[str]]]]:
  """Lists the runs of a folder that have other names than a grid's cells.

  Returns:
    By their flags: name and flags in their order, finished runs first.
  """
  found: dict[frozenset[str], list[tuple[str, list[str]]]] = {}
  for file in sorted(out.glob('.sweep/*.json')):
    cell = grid.Cell(file.name.removesuffix('.json'), '', ())
    stored = cells_lib.record(out, cell)
    was = stored.get('args')
    if cell.name in own or not isinstance(was, list) or not (
        run_files.holds_run(cells_lib.folder(out, cell))):
      continue
    order = [cells_lib.normal(str(word)) for word in was]
    same = found.setdefault(frozenset(order), [])
    same.insert(0 if stored.get('state') == 'done' else len(same),
                (cell.name, order))
  return found


def notes(out: pathlib.Path, cells: Sequence[grid.Cell]) -> list[str]:
  """Returns a line on folders with older names, and one on other folders.

  Args:
    out: folder of all runs.
    cells: what `recognised` returned.
  """
  lines = []
  if renamed := [cell for cell in cells if cell.renamed]:
    what = ('1 cell has its run' if len(renamed) == 1 else
            f'{len(renamed)} cells have their runs')
    lines.append(f'{what} under the name of an earlier grid, such as '
                 f'{renamed[0].renamed} in {renamed[0].name}.')
  names = {cell.name for cell in cells}
  others = [name for file in sorted(out.glob(f'*/{run_files.CONFIG}'))
            if (name := file.parent.name) not in names]
  if others:
    more = len(others) - _SHOWN
    what = ('1 folder belongs' if len(others) == 1 else
            f'{len(others)} folders belong')
    lines.append(f'{what} to no cell of this grid: '
                 + ', '.join(others[:_SHOWN])
                 + (f' and {more} more.' if more > 0 else '.'))
  return lines


def check(out: pathlib.Path, cells: Sequence[grid.Cell]) -> None:
  """Refuses cells whose folders hold runs that cannot go on with their flags.

  Args:
    out: folder of all runs.
    cells: those that will run.

  Raises:
    grid.GridError: for all of them together; it names the first.
  """
  found = [(cell, differs) for cell in cells
           if (differs := conflict(out, cell))]
  if found:
    cell, differs = found[0]
    what = ('1 cell has a run' if len(found) == 1 else
            f'{len(found)} cells have runs')
    raise grid.GridError(
        f'--out={out}: {what} there with other flags, which cannot go on with '
        f'these: {cell.name} ({differs})'
        + (', ...' if len(found) > 1 else '') + '; give another --out.')


def conflict(out: pathlib.Path, cell: grid.Cell) -> str:
  """Says which flags keep a cell from going on with the run in its folder.

  Only what is certain to be refused counts. So a script of the user's own,
  whose defaults nobody knows here, has no conflict.

  Returns:
    'labels_per_class 10 -> 5', or the like; '' if there is none.
  """
  setting, record = asked.setting_of(cell), cells_lib.record(out, cell)
  same = record.get('fingerprint') == cells_lib.fingerprint(cell)
  # A sweep that was killed has left no record of the run that it had begun. A
  # setting of the user's own is read by its runs alone.
  if setting not in settings.SETTINGS or (
      same and record.get('state') != 'failed'):
    return ''
  folder = cells_lib.folder(out, cell)
  stored = cells_lib.config_of(folder, 'flags')
  if not stored:
    return ''
  try:
    options, given = asked.options(setting, [*cell.args, *cell.places])
    differs = _refused(setting, options, given, stored, _knobs(
        cells_lib.config_of(folder, 'facts')))
    rounds = stored.get('num_rounds')
    if isinstance(rounds, int) and options.num_rounds < rounds:
      from fedjax_ssl.training import workdir  # It imports JAX.
      if options.num_rounds < workdir.least_rounds(folder, rounds):
        differs['num_rounds'] = rounds, options.num_rounds
  except (ValueError, TypeError, AttributeError, OSError, flags.Error):
    return ''  # Wrong flags, or a damaged file; others say so.
  return changes_lib.listed(differs)


def _knobs(facts: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
  """Returns all knobs that the texts of a stored run stood for, by option."""
  return {name: dict(chosen['knobs'])
          for name, chosen in dict(facts.get('choices') or {}).items()
          if isinstance(chosen, dict) and 'knobs' in chosen}


def _refused(setting: str, options: config.Config, given: frozenset[str],
             stored: Mapping[str, Any], knobs: Mapping[str, Mapping[str, Any]]
             ) -> changes_lib.Changes:
  """Returns the options that differ from a stored run's and may not."""
  by_data = settings.SETTINGS[setting].any_data or (
      options.partition != 'setting')
  found: changes_lib.Changes = {}
  for name, now in vars(options).items():
    if name in config.MAY_CHANGE or name in _APART or name not in stored or (
        now in _OPEN or name == 'chunk_size' and not now) or (
            by_data and name in _BY_DATA and name not in given):
      continue
    was = stored[name]
    if name in imports.TEXTS:
      text = options.full_method if name == 'method' else now
      if _is_other(text, str(was), knobs.get(name, {})):
        found[name] = was, now
    elif now != was:
      found[name] = was, now
  seeds = run_files.seeds(stored)
  if options.all_seeds != seeds:
    found['seeds'] = seeds, options.all_seeds
  return found


def _is_other(now: str, was: str, stored: Mapping[str, Any]) -> bool:
  """Returns whether a text surely asks for something else than a stored one.

  Args:
    now: a name, with knobs if any.
    was: the stored one.
    stored: all knobs that it stood for.
  """
  name, knobs = registry.parse(imports.short(now))
  if name != registry.parse(imports.short(was))[0]:
    return True
  plain = json.loads(json.dumps(knobs))
  # None may stand for a profile's value, and a text may have knobs in turn.
  return any(knob in stored and value is not None and '(' not in str(value)
             and value != stored[knob] for knob, value in plain.items())
