"""Makes flagfiles of cells, and checks those that are stored."""
from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
import pathlib
import textwrap

from fedjax_ssl.core import disk
from fedjax_ssl.papers import cells

ENDING = '.flags'
_COMMAND = '# python experiments/'  # How each tells what it is for.
_TEMPLATES = {'cost_up': '{} % sent up', 'cost_down': '{} % sent down',
              'models_sent': '{} models sent'}


def published(cell: cells.Cell) -> str:
  """Says what the paper has: `57.73 % test accuracy`, or that it prints none.

  If there are several, `global` stands before the global model's number and
  `local` before that of the clients' own models, as `flags.printed` reads them.
  """
  known = [n for n in cell.numbers if n.value != cells.UNPRINTED]
  if not known:
    return cell.unprinted
  if any(n.value == 'diverged' for n in known):
    return 'diverged'
  accuracies = [n for n in known if n.metric.endswith('accuracy')]
  texts = []
  for number in known:
    value = cell.table.text(number.value)
    if number in accuracies:
      value += '' if number.std is None else (
          f' +- {cell.table.text(number.std)}')
      local = number.metric != 'accuracy'
      texts.append(f'{"local" if local else "global"} {value} %'
                   if len(accuracies) > 1 else
                   f'{value} % {"local" if local else "test"} accuracy')
    else:
      texts.append(_TEMPLATES[number.metric].format(f'{number.value:g}'))
  return ', '.join(texts)


def text(cell: cells.Cell, folder: str = '') -> str:
  """Returns a cell as a flagfile; comments say what is known of it.

  Args:
    cell: the cell.
    folder: where the file will be, for the command that its comments show.
  """
  table = cell.table
  path = f'{folder}/{cell.name}' if folder else cell.name
  # Reports show the first line, so it is not broken.
  head = f'# {table.title}: {cell.row} | {cell.columns[0]}.'
  remarks = [
      f'{table.citation}.',
      f'Paper: {published(cell)}; {table.runs}.',
      *([f'Not as in the paper: {"; ".join(cell.differs)}.']
        if cell.differs else []),
      *([f'Not stated in the paper, ours: {"; ".join(cell.open)}.']
        if cell.open else []),
      *cell.notes]
  lines = [head, *(line for remark in remarks for line in textwrap.wrap(
      remark, 78, initial_indent='# ', subsequent_indent='# ',
      break_long_words=False, break_on_hyphens=False))]
  lines += [f'{_COMMAND}{cell.setting}.py --data_dir=DIR \\',
            f'#     --flagfile={path}{ENDING}', *cell.flags]
  return '\n'.join(lines) + '\n'


def write(chosen: Iterable[cells.Cell], folder: pathlib.Path) -> list[str]:
  """Writes a flagfile for each cell that can be run; returns their names."""
  wanted = {cell.name: cell for cell in chosen if not cell.missing}
  _write({folder / f'{name}{ENDING}': text(cell, folder.as_posix())
          for name, cell in wanted.items()})
  return [*wanted]


def _write(texts: Mapping[pathlib.Path, str]) -> None:
  """Writes flagfiles, and replaces flagfiles alone.

  Raises:
    ValueError: for a file of such a name that was not written here, in which
      case nothing is written.
  """
  for file in texts:
    old = file.read_text('utf-8', 'replace') if file.is_file() else ''
    if old and _COMMAND not in old:
      raise ValueError(f'{file} was not written by this command and stays; '
                       'give another folder.')
  for file, content in texts.items():
    file.parent.mkdir(parents=True, exist_ok=True)
    disk.replace(file, content.encode())


def _stored(folder: pathlib.Path, tables: pathlib.Path
            ) -> dict[pathlib.Path, str]:
  """Returns what the folder of the headline cells should hold."""
  return {folder / cell.table.paper / f'{cell.name}{ENDING}': text(
      cell, f'{folder.as_posix()}/{cell.table.paper}')
          for cell in cells.headline(tables)}


def write_headline(folder: pathlib.Path, tables: pathlib.Path = cells.TABLES
                   ) -> int:
  """Writes the headline cells, a folder for each paper; returns how many."""
  wanted = _stored(folder, tables)
  _write(wanted)
  return len(wanted)


def faults(folder: pathlib.Path, tables: pathlib.Path = cells.TABLES
           ) -> Iterator[str]:
  """Yields a line for each stored file that is not as the tables say."""
  wanted = _stored(folder, tables)
  for file, content in wanted.items():
    if not file.is_file():
      yield f'{file} is missing'
    elif file.read_bytes() != content.encode():
      yield f'{file} is not as the tables have it'
  for file in sorted({*folder.rglob(f'*{ENDING}')} - {*wanted}):
    yield f'{file} is no headline cell'
