"""Checks that a paper's file has the keys and types that `cells` explains."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_PART = {'use': list, 'flags': dict, 'words': dict, 'differs': list,
         'open': list, 'notes': list, 'unprinted': str, 'missing': str}
_PAPER = {**_PART, 'title': str, 'paper': str, 'runs': str, 'cells': str,
          'digits': int, 'headline': list, 'methods': dict, 'parts': dict,
          'tables': list}
_TABLE = {**_PART, 'name': str, 'title': str, 'source': str, 'unit': str,
          'runs': str, 'cells': str, 'first': list, 'first_columns': list,
          'columns': list, 'rows': list}
_COLUMN = {**_PART, 'title': str, 'setting': str, 'metric': str,
           'scale': (int, float)}
_ROW = {**_PART, 'title': str, 'method': str, 'values': list, 'std': list,
        'values_of': str, 'only': list}
_NAMES = {str: 'a text', list: 'a list', dict: 'a table', int: 'a number'}
_NUMBERS = ('values', 'std')


def check(book: Mapping[str, Any]) -> None:
  """Checks a paper's file.

  Raises:
    ValueError: if it does not fit, naming the place and the key.
  """
  _keys(book, 'the paper', _PAPER, ('title', 'paper', 'runs', 'tables'))
  for kind in ('methods', 'parts'):
    for name, part in book.get(kind, {}).items():
      if not (kind == 'methods' and isinstance(part, str)):
        _must(isinstance(part, dict), f'{kind}.{name} must be a table')
        _part(book, part, f'{kind}.{name}', _PART, ())
  for raw in book['tables']:
    _must(isinstance(raw, dict), 'tables must be tables')
    where = f'table {raw.get("name")!r}'
    _part(book, raw, where, _TABLE,
          ('name', 'title', 'source', 'columns', 'rows'))
    _must('cells' in raw or 'cells' in book, f"{where} lacks the key 'cells'")
    _table(book, raw, where)


def _table(book: Mapping[str, Any], raw: Mapping[str, Any], where: str) -> None:
  titles = {}
  for kind, known, needed in (
      ('row', _ROW, ('title', 'method')),
      ('column', _COLUMN, ('title', 'setting'))):
    parts = raw[f'{kind}s']
    _must(bool(parts) and all(isinstance(part, dict) for part in parts),
          f'{where}: {kind}s must be tables')
    for i, part in enumerate(parts, 1):
      _part(book, part, f'{where}, {kind} {part.get("title", i)!r}', known,
            needed)
    titles[kind] = [part['title'] for part in parts]
    _must(len(set(titles[kind])) == len(titles[kind]),
          f'{where}: a {kind} comes twice')
  for title in (*raw.get('first', []), *raw.get('first_columns', [])):
    _must(title in titles['row'] + titles['column'],
          f'{where}: {title!r} is first, and no row or column')
  for row in raw['rows']:
    here = f'{where}, row {row["title"]!r}'
    _must(row['method'] in book.get('methods', {}),
          f'{here}: method {row["method"]!r} is not in [methods]')
    for title in row.get('only', []):
      _must(title in titles['column'], f'{here}: {title!r} is no column')
    if 'values_of' in row:
      _borrowed(book, row, titles['column'], here)
    for key in _NUMBERS:
      _numbers(row.get(key), key, len(titles['column']), here)


def _borrowed(book: Mapping[str, Any], row: Mapping[str, Any],
              columns: list[str], where: str) -> None:
  source = row['values_of']
  _must('values' not in row, f'{where} has both values and values_of')
  found = {f'{t.get("name")}: {r.get("title")}': t for t in book['tables']
           for r in t.get('rows', []) if 'values_of' not in r}
  _must(source in found, f'{where}: there is no row {source!r} with values')
  there = [column.get('title') for column in found[source]['columns']]
  for title in row.get('only', columns):
    _must(title in there, f'{where}: {source!r} has no column {title!r}')


def _numbers(values: list[Any] | None, key: str, count: int, where: str
             ) -> None:
  if values is None:
    return
  _must(len(values) == count,
        f'{where} has {len(values)} {key} for {count} columns')
  for value in values:
    fine = isinstance(value, int | float) and not isinstance(value, bool)
    words = ('-', 'diverged', 'unprinted') if key == 'values' else ('-',)
    _must(fine or value in words, f'{where}: {value!r} in {key} is no number')


def _part(book: Mapping[str, Any], part: Mapping[str, Any], where: str,
          known: Mapping[str, Any], needed: tuple[str, ...]) -> None:
  _keys(part, where, known, needed)
  for name in part.get('use', ()):
    _must(name in book.get('parts', {}), f'{where}: {name!r} is not in [parts]')
  for name in _used(book, part, ()):
    _must(name is not None, f'{where} uses itself')


def _used(book: Mapping[str, Any], part: Mapping[str, Any],
          above: tuple[str, ...]) -> Iterator[str | None]:
  """Yields the names of all parts used; None where a part uses itself."""
  for name in part.get('use', ()):
    if name in above:
      yield None
      return
    yield name
    inner = book['parts'].get(name)
    if isinstance(inner, dict):
      yield from _used(book, inner, (*above, name))


def _keys(part: Mapping[str, Any], where: str, known: Mapping[str, Any],
          needed: tuple[str, ...]) -> None:
  for key in needed:
    _must(key in part, f'{where} lacks the key {key!r}')
  for key, value in part.items():
    _must(key in known, f'{where}: {key!r} is no key')
    kind = known[key]
    first = kind[0] if isinstance(kind, tuple) else kind
    _must(isinstance(value, kind) and not isinstance(value, bool),
          f'{where}: {key} = {value!r} must be {_NAMES[first]}')
    if kind is list and key not in ('tables', 'rows', 'columns', *_NUMBERS):
      _must(all(isinstance(text, str) for text in value),
            f'{where}: {key} = {value!r} must be texts')
    if key == 'words':
      _must(all(isinstance(text, str) for text in value.values()),
            f'{where}: words must be texts')


def _must(holds: bool, text: str) -> None:
  if not holds:
    raise ValueError(text)
