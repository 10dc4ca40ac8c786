"""The runs of a bed in a folder, and how far each row is."""
from __future__ import annotations

import dataclasses
import pathlib

from fedjax_ssl.bench import plan, records, standing
from fedjax_ssl.cli.sweep import cells as cells_lib
from fedjax_ssl.cli.sweep import grid
from fedjax_ssl.core import run_files


class Runs:
  """What a bench has run in its folder, and is to run there."""

  def __init__(self, bed: plan.Bed, out: pathlib.Path, configurations: int,
               changed: tuple[str, ...], data_dir: str | None):
    """Looks at nothing yet.

    Args:
      bed: of the runs.
      out: the folder.
      configurations: tried of each row.
      changed: flags that every run has besides the bed's.
      data_dir: as of `fedjax-ssl train`; None is its default.
    """
    self._bed, self._out, self._changed = bed, out, changed
    self._configurations, self._data_dir = configurations, data_dir

  def names(self) -> set[str]:
    """Returns the rows that have runs in the folder, by name."""
    return {file.parent.name.split('__')[1]
            for file in self._out.glob(
                f'{self._bed.name}__*/{run_files.CONFIG}')}

  def cell(self, run: plan.Run) -> grid.Cell:
    """Returns a run as a cell of a sweep."""
    cell = grid.Cell(run.name, '', (*run.flags, *self._changed), run.setting,
                     (f'--data_dir={self._data_dir}',)
                     if self._data_dir else ())
    # Benches used to count the folder of data among the flags of a run.
    was = cells_lib.record(self._out, cell).get('args')
    return dataclasses.replace(cell, args=(*cell.args, *(
        word for word in (was if isinstance(was, list) else [])
        if isinstance(word, str) and word.startswith('--data_dir='))))

  def done(self, run: plan.Run) -> bool:
    """Returns whether a run has come to its end."""
    return cells_lib.is_done(self._out, self.cell(run))

  def tries(self, entry: plan.Entry) -> list[plan.Configuration]:
    """Returns the configurations of a row that are tried."""
    return plan.configurations(entry, self._bed, self._configurations)

  def done_tries(self, entry: plan.Entry) -> list[plan.Configuration]:
    """Returns the configurations already run."""
    return [one for one in self.tries(entry)
            if self.done(plan.search_run(entry, self._bed, one))]

  def tried(self, entry: plan.Entry
            ) -> list[tuple[plan.Configuration, float]]:
    """Returns the configurations already run, with validation accuracy.

    Raises:
      ValueError: if the rows of one are damaged.
    """
    return [(one, standing.validation(
        self._out / plan.search_run(entry, self._bed, one).name))
            for one in self.done_tries(entry)]

  def finals(self, entry: plan.Entry, configuration: plan.Configuration
             ) -> list[plan.Run]:
    """Returns the runs of a configuration with the other seeds."""
    return [plan.final_run(entry, self._bed, skew, configuration)
            for skew in self._bed.skews]

  def first(self, entry: plan.Entry, stored: records.Record | None
            ) -> list[plan.Run]:
    """Returns the tries of a row, or the runs that repeat a stored one."""
    if stored is None:
      return [plan.search_run(entry, self._bed, one)
              for one in self.tries(entry)]
    return [run for best in [*stored.measured.values()][:1]
            for run in self.finals(entry, best.configuration)]

  def is_finished(self, entry: plan.Entry) -> bool:
    """Returns whether all runs of a row are done in the folder, and whole."""
    try:
      tried = self.tried(entry)
    except ValueError:
      return False
    return len(tried) == len(self.tries(entry)) and all(
        map(self.done, self.finals(entry, standing.choose(tried))))

  def progress(self, entry: plan.Entry) -> str:
    """Says how many tries are done, what they chose, and its final seeds."""
    tried, wanted = self.done_tries(entry), len(self.tries(entry))
    said = f'{len(tried)}/{wanted} tried'
    if len(tried) < wanted:
      return said
    try:
      best = standing.choose(self.tried(entry))
    except ValueError as error:
      return f'{said}, {error}'
    done = sum(map(self.done, self.finals(entry, best)))
    return (f'{said}, {choice(entry, best)}, '
            f'final {done}/{len(self._bed.skews)}')


def choice(entry: plan.Entry, configuration: plan.Configuration) -> str:
  """Returns a configuration as in `fixmatch(threshold=0.9) rate 0.01`."""
  return (f'{plan.method_of(entry, configuration)} rate '
          f'{configuration.learning_rate:g}')
