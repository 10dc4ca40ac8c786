"""Tables that earlier benches have written, and which of their rows count."""
from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
import itertools
import os
import pathlib
import sys
from typing import NamedTuple

from fedjax_ssl.bench import plan, records
from fedjax_ssl.core import checks
from fedjax_ssl.report import printing


class Reader(NamedTuple):
  """Reads tables for one bench.

  Attributes:
    bed: what they must be of.
    most: configurations that their rows must have had at most.
    changed: flags that their runs must have had besides the bed's.
    known: the rows of this bench, by name.
  """

  bed: plan.Bed
  most: int
  changed: tuple[str, ...]
  known: Mapping[str, plan.Entry]

  def read(self, file: pathlib.Path, *, whole: bool = True, say: bool = True
           ) -> dict[str, records.Record]:
    """Reads the rows of a table that are what their names mean here.

    Args:
      file: the table.
      whole: whether to leave out rows that lack final seeds on any skew.
      say: whether to print a line for each row that does not count.

    Returns:
      The rows by name.

    Raises:
      FieldError: as `records.read`.
    """
    found = records.read(file, self.bed, self.most, self.changed,
                         whole=whole)
    return {name: record for name, record in found.items()
            if self._counts(name, record, file if say else None)}

  def _counts(self, name: str, record: records.Record,
              file: pathlib.Path | None = None) -> bool:
    """Whether a row is what its name means; says it of a file's if not."""
    keys = plan.differing(record.space, plan.space(
        self.known[name], self.bed)) if name in self.known else []
    if keys and file:
      say_lost(name, file, keys, 'here')
    return not keys

  def keep(self, file: pathlib.Path) -> None:
    """Copies a table of which a row does not count, so that no row is lost."""
    if not records.has_rows(file):
      return
    reason = 'has rows that do not count here.'
    try:
      found = records.read(file, self.bed, self.most, self.changed,
                           whole=False)
      if all(self._counts(*row) for row in found.items()):
        return
    except checks.FieldError as error:
      reason = error.reason
    text = file.read_bytes()
    for number in itertools.count():
      old = file.with_name(f'{file.name}.old{f".{number}" if number else ""}')
      if not old.exists():
        old.write_bytes(text)
        break
      if old.read_bytes() == text:  # A start before this one has copied it.
        break
    printing.say(f'{file} {reason} A copy is kept as {old}.', stream=sys.stderr)


def say_lost(name: str, file: pathlib.Path, keys: Sequence[str], than: str
             ) -> None:
  """Prints that a table's row is another one, and what they differ in."""
  printing.say(f'The row {name} of {file} does not count: other '
               f'{", ".join(keys)} than {than}.', stream=sys.stderr)


def last_two(file: pathlib.Path) -> str:
  """Returns a file's name after its folder's, which tells tables apart."""
  path = pathlib.Path(os.path.abspath(file))
  return '/'.join(part for part in path.parts[-2:] if part != path.anchor)


def check_data(file: pathlib.Path, name: str, hashes: Iterable[str],
               known: dict[str, tuple[str, str]], flag: str = 'stored'
               ) -> None:
  """Notes the data that a row was run on.

  Args:
    file: the table, or the folder of a run.
    name: of the row.
    hashes: of the data, where they are known.
    known: by the hash of data, a row that was run on them, and where it is;
      the row's are added.
    flag: that names the file.

  Raises:
    FieldError: if these rows were run on other data.
  """
  for digest in hashes:
    for other, (row, place) in known.items():
      if other != digest:
        raise checks.FieldError(
            flag, file, f'the row {name} was run on other data than the '
            f'row {row} of {place}: they cannot be compared.')
    known.setdefault(digest, (name, str(file)))
