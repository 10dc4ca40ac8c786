"""Grids: flagfiles x overrides x seeds, as a small text.

    # Blank lines and comments are skipped.
    flagfile: experiments/flagfiles/feddure/cifar_dirdir.*.flags
    seeds: 0 1 2
    --num_rounds=20
    --learning_rate=0.1 | 0.03
    ---
    setting: digits_dirdir
    --bounds | --nobounds

A block is the product of its lines; `---` begins another block. Alternatives
are separated by ` | `; a line without alternatives may hold several flags, and
a value that holds a bar itself is quoted.
`flagfile:` takes several names and patterns; names with spaces or commas are
quoted as for a shell. A flagfile `a.b.flags` belongs to the setting `a`, or to
your own `a.py` one or two folders above it, unless `setting: NAME` or
`script: PATH` names another. Without `seeds:` a run has the seeds of its
flagfile or setting.
"""
from __future__ import annotations

from collections.abc import Iterable, Iterator
import dataclasses
import glob
import hashlib
import itertools
import math
import os
import pathlib
import re
import shlex

from fedjax_ssl import config
from fedjax_ssl.cli import places
from fedjax_ssl.running import settings

# Flags that the sweep itself sets or takes, and what to do instead. A run would
# ignore some of them: with `--dry_run` in a grid it would run for real.
_OPTION = 'it is an option of the sweep, not of a run'
_OURS = {'workdir': 'the sweep chooses the folders',
         'seed': 'use a line `seeds:`', 'seeds': 'use a line `seeds:`',
         'flagfile': 'use a line `flagfile:`',
         **dict.fromkeys(('dry_run', 'status', 'slots', 'retries', 'shard',
                          'out', 'python', 'env'), _OPTION)}
# Cells of a grid: each has a command, a name and files, all held in memory.
_MOST = 100_000
_LONGEST = 120  # Bytes of a folder's name; file systems end at 255.


class GridError(ValueError):
  """The grid cannot be read; the message says where and why."""


@dataclasses.dataclass(frozen=True)
class Cell:
  """One run.

  Attributes:
    name: of its folder; made from what differs, the same in every sweep.
    script: path of a program of the user's own; '' for a setting.
    args: its flags, the flagfile first; without --workdir.
    setting: its name for `fedjax-ssl train`; '' for a script.
    places: flags that say where things are; with others it is the same run.
    renamed: what this grid would name it, if the folder has an older name.
  """

  name: str
  script: str
  args: tuple[str, ...]
  setting: str = ''
  places: tuple[str, ...] = ()
  renamed: str = ''

  def program(self, python: str) -> list[str]:
    """Returns the command that runs it, without flags."""
    return (settings.program(self.setting, python) if self.setting
            else [python, self.script])


@dataclasses.dataclass
class _Block:
  """The lines between two `---`."""

  where: str
  setting: str = ''
  named_at: str = ''  # Where the setting is.
  script: str = ''
  flagfiles: list[str] = dataclasses.field(default_factory=list)
  seeds: list[int] = dataclasses.field(default_factory=list)
  axes: dict[str, list[str]] = dataclasses.field(default_factory=dict)


def parse(text: str, source: str = 'grid') -> list[Cell]:
  """Reads a grid.

  Args:
    text: see the module's docstring.
    source: file name for messages.

  Returns:
    The cells, in the order of the text. The last line varies fastest, and seeds
    slowest, so that all alternatives have a first result early.

  Raises:
    GridError: with file, line and reason.
  """
  blocks = [_Block(f'{source}:1')]
  for number, line in enumerate(text.splitlines(), 1):
    where = f'{source}:{number}'
    if re.search('[\0\ud800-\udfff]', line):
      raise GridError(f'{where}: {line!r} is no text.')
    line = line.strip()
    if not line or line.startswith('#'):
      continue
    if line == '---':
      blocks.append(_Block(where))
    else:
      _read(blocks[-1], line, where)
  total = sum(_size(block) for block in blocks)
  if total > _MOST:
    raise GridError(f'{source}: has {total} cells; {_MOST} is the most. Give '
                    'fewer alternatives, or several grids.')
  cells = [c for b in blocks
           if b.setting or b.script or b.flagfiles or b.axes or b.seeds
           for c in _product(b)]
  if not cells:
    raise GridError(f'{source}: names no flagfile and no setting.')
  seen: set[str] = set()
  for cell in cells:
    if cell.name in seen:
      raise GridError(f'{source}: {cell.name} comes twice.')
    seen.add(cell.name)
  return cells


def shard(cells: list[Cell], text: str) -> list[Cell]:
  """Returns the cells of one machine of several.

  Args:
    cells: all of them.
    text: 'i/n', i from 0 to n - 1; n machines together have every cell once.

  Raises:
    GridError: for another text.
  """
  match = re.fullmatch(r'(\d{1,9})/(\d{1,9})', text)
  if not match or not int(match[1]) < int(match[2]):
    raise GridError(f'--shard={text} must be i/n with i from 0 to n - 1, as '
                    'in 0/4.')
  return cells[int(match[1])::int(match[2])]


def _read(block: _Block, line: str, where: str) -> None:
  if line.startswith('--'):
    for flag in _flags(line, where):
      name, values = _axis(flag, where)
      if name in block.axes:
        raise GridError(f'{where}: --{name} comes twice.')
      block.axes[name] = values
    return
  key, colon, value = (part.strip() for part in line.partition(':'))
  if key not in ('setting', 'script', 'flagfile', 'seeds') or not colon:
    raise GridError(f'{where}: {line!r} is none of `setting: NAME`, `script: '
                    'PATH`, `flagfile: PATH...`, `seeds: NUMBERS`, '
                    '`--flag=value | value` and `---`.')
  if not value:
    raise GridError(f'{where}: nothing after {key}:')
  if key in ('setting', 'script') and (block.setting or block.script):
    raise GridError(f'{where}: a block has one setting or script, and has '
                    f'{block.setting or block.script} already.')
  if key == 'setting':
    block.setting, block.named_at = value, where
  elif key == 'script':
    scripts = _find(value)
    known = re.fullmatch(r'experiments/(\w+)\.py', value)
    if not scripts and known and known[1] in settings.SETTINGS:
      block.setting = known[1]  # A copy without the repository's scripts.
      return
    if not scripts:
      raise GridError(f'{where}: there is no {value}.')
    if len(scripts) > 1:
      raise GridError(f'{where}: a block has one script, and {value} fits '
                      f'{", ".join(scripts)}.')
    block.script = scripts[0]
  elif key == 'flagfile':
    patterns = _words(value, where)
    if not patterns:
      raise GridError(f'{where}: {line!r} names no file.')
    for pattern in patterns:
      found = _find(pattern)
      if not found:
        raise GridError(f'{where}: no file fits {pattern}.')
      block.flagfiles += found
  else:
    if block.seeds:
      raise GridError(f'{where}: a block has one line `seeds:`, and has '
                      f'{", ".join(map(str, block.seeds))} already.')
    block.seeds = _seeds(value, where)


def _words(text: str, where: str) -> list[str]:
  """Splits a text at spaces and commas, with quotes as in a shell."""
  reader = shlex.shlex(text, posix=True)
  reader.whitespace += ','
  reader.whitespace_split, reader.commenters = True, ''
  try:
    return list(reader)
  except ValueError as error:
    raise GridError(f'{where}: {text}: {error}.') from error


def _find(pattern: str) -> list[str]:
  """Finds files that fit a pattern, here or else in the repository.

  A file of exactly that name comes before the pattern's matches.
  """
  for place in ('', str(places.repository() or '')):
    literal = os.path.join(place, pattern)
    found = [literal] if os.path.isfile(literal) else sorted(
        file for file in glob.glob(os.path.join(glob.escape(place), pattern))
        if os.path.isfile(file))
    if found:
      return found
  return []


def _seeds(text: str, where: str) -> list[int]:
  words = text.replace(',', ' ').split()
  if not words or not all(
      re.fullmatch(r'\d{1,10}', w) and int(w) <= config.LARGEST_SEED
      for w in words):
    raise GridError(f'{where}: seeds: {text[:80]} must be whole numbers from 0 '
                    f'to {config.LARGEST_SEED}.')
  seeds = [int(word) for word in words]
  if len(set(seeds)) < len(seeds):
    raise GridError(f'{where}: seeds: {text} has a seed twice.')
  return seeds


def _flags(line: str, where: str) -> list[str]:
  """Splits a line into flags, each with its value or its alternatives."""
  begins, ends = [0], []
  for match in re.finditer(r'\s+(?=--[A-Za-z_]\w*(?:[=\s]|$))', line):
    before = line[:match.start()]
    # In quotes or brackets it is part of a value; after a bar it is another
    # alternative of a flag that has no value.
    if not before.endswith('|') and before.count('(') == before.count(
        ')') and not any(before.count(quote) % 2 for quote in '\'"'):
      begins.append(match.end())
      ends.append(match.start())
  flags = [line[i:j] for i, j in zip(begins, [*ends, len(line)])]
  if ends and any(re.search(r'\s\|(\s|$)', flag) for flag in flags):
    raise GridError(f'{where}: {line!r} has several flags and alternatives; '
                    'give every flag a line of its own.')
  return flags


def _unquoted(value: str) -> str:
  """Removes the quotes that a shell would remove."""
  quote = value[:1]
  if quote and quote in '"\'' and value.count(quote) == 2 and (
      value.endswith(quote)):
    return value[1:-1]
  return value


def _axis(line: str, where: str) -> tuple[str, list[str]]:
  """Returns the flag's name and its alternatives, each a whole argument."""
  # The space after a bar may be the one before the next bar: `a | | b` has an
  # empty alternative.
  first, *rest = (part.strip() for part in re.split(r'\s+\|(?=\s|$)', line))
  flag = first.partition('=')[0]
  for part in (first, *(f'{flag}={other}' for other in rest)):
    if '|' in re.sub(r'"[^"]*"|\'[^\']*\'', '', part):
      raise GridError(f'{where}: {part} has a bar without spaces around it; '
                      'alternatives are separated by ` | `, and a value that '
                      'holds a bar is quoted.')
  match = re.fullmatch(r'--([A-Za-z_]\w*)(=.*)?', first)
  if not match:
    raise GridError(f'{where}: {first!r} is not of the form --flag=value.')
  name = match[1]
  bare = match[2] is None
  for used in [name, *(r.removeprefix('--') for r in rest if bare)]:
    if used in _OURS:
      raise GridError(f'{where}: --{used} is not for the grid: {_OURS[used]}.')
  if bare:
    values = [first, *rest]
    bad = [v for v in values if not re.fullmatch(r'--\w+', v)]
    if bad and bad[0]:
      raise GridError(f'{where}: {bad[0]} stands beside {first}; give all '
                      'alternatives with a value, or none.')
    name = name.removeprefix('no')
  else:
    given = [_unquoted(v) for v in (match[2][1:].strip(), *rest)]
    values = [f'--{name}={v}' for v in given]
    bad = [v for v in values if v.endswith(f'{name}=')]
    for value in given:
      if value.startswith('--'):
        raise GridError(f'{where}: --{name} has the value {value}, which looks '
                        'like a flag; give every flag a line of its own.')
  if bad:
    raise GridError(f'{where}: {bad[0] or "an empty alternative"} has no '
                    'value.')
  if len(set(values)) < len(values):
    raise GridError(f'{where}: --{name} has the same value twice.')
  return name, values


def _size(block: _Block) -> int:
  """Counts the cells of a block, without making them."""
  return math.prod([len(block.seeds) or 1, len(block.flagfiles) or 1,
                    *map(len, block.axes.values())])


def _product(block: _Block) -> Iterator[Cell]:
  if not block.setting and not block.script and not block.flagfiles:
    raise GridError(f'{block.where}: the block names no flagfile and no '
                    'setting.')
  # What brings code of its own may bring the setting too; `train` then looks.
  if block.setting and block.setting not in settings.SETTINGS and not (
      'import' in block.axes or block.flagfiles
      or block.setting in (known := settings.names())):
    raise GridError(f'{block.named_at}: {block.setting} is no setting; there '
                    f'are {", ".join(known)}. One of your own '
                    'needs a line --import=FILE.py.')
  seeds = [[f'--seeds={seed}'] for seed in block.seeds] or [[]]
  files = [[f'--flagfile={file}'] for file in block.flagfiles] or [[]]
  axes: list[str]
  for seed, file, axes in (
      (s, f, [*a]) for s, f in itertools.product(seeds, files)
      for a in itertools.product(*block.axes.values())):
    setting, script = block.setting, block.script
    if not setting and not script:
      setting, script = _owner(file[0].partition('=')[2], block.where)
    varied = [value for value, all_ in zip(axes, block.axes.values())
              if len(all_) > 1]
    base = pathlib.Path(file[0] if file else setting or script).stem
    args = (*file, *axes, *seed)
    yield Cell(_name(base, [*varied, *seed]), script, args, setting)


def _owner(flagfile: str, where: str) -> tuple[str, str]:
  """Finds the setting or the script of a flagfile; the other one is ''."""
  path = pathlib.Path(flagfile)
  name = path.name.split('.')[0]
  above, root = path.parent.parent, places.repository()
  for folder in (above, above.parent):
    if (folder / f'{name}.py').exists() and not (
        root and name in settings.SETTINGS
        and folder.resolve() == root / 'experiments'):
      return '', str(folder / f'{name}.py')
  if name in settings.SETTINGS:
    return name, ''
  raise GridError(f'{where}: {flagfile} belongs to {above / name}.py, which '
                  'does not exist; name one with `setting:` or `script:`.')


def _name(base: str, varied: Iterable[str]) -> str:
  """Names a cell by what differs, in letters that any shell and disk takes."""
  parts = [base, *(v.removeprefix('--').replace('seeds=', 'seed=')
                   for v in varied)]
  plain = '__'.join(parts)
  name = '__'.join(re.sub(r'[^\w.=+-]+', '_', p).strip('_') for p in parts)
  if len(name.encode()) > _LONGEST:  # By bytes; names of ASCII are cut below.
    name = name.encode()[:_LONGEST].decode(errors='ignore')
  if name == plain and len(name) <= _LONGEST:
    return name
  # A hash of what differs only. So it is the same in every folder, and stays
  # when lines that all cells share are added or edited.
  digest = hashlib.sha256(plain.encode()).hexdigest()[:8]
  return f'{name[:_LONGEST].rstrip("_")}__{digest}'
