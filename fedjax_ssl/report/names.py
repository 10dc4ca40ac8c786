"""What differs between runs: short names, colours, dashes and facets."""
from __future__ import annotations

import collections
from collections.abc import Container, Iterable, Mapping, Sequence, Set
import pathlib
from typing import Any, NamedTuple

from fedjax_ssl.core import bounds as bounds_lib
from fedjax_ssl.core import flag_kinds, imports, registry
from fedjax_ssl.training import command

PLAIN = 'fedavg'  # The method of bounds.
LONGEST = 48  # Characters of a name.
_LONGEST_VALUE = 24
_MOST_FACETS = 12
_CODE = 'code'  # No flag: digests of a user's own files.
_DIGITS = 8  # Of a digest, in a name.
# Their values are named without the flag, as they explain themselves.
_BARE = ('method', 'model', 'dataset', 'setting')
# Where several flags tell runs apart equally well, these are named.
_TELLING = ('labels', 'dataset', 'alpha', 'labels_per_class',
            'labeled_fraction', 'num_clients', 'cohort_size', 'model',
            'learning_rate', 'local_epochs')

# Flags that name code, but for the method's.
_BESIDE = frozenset(imports.TEXTS) - {'method'}

Config = Mapping[str, Any]
Parts = dict[str, str]  # Of one run, by flag or knob.


class Look(NamedTuple):
  """How a run is drawn.

  Attributes:
    colour: index of the method, or of what else differs first.
    dash: index of the other factors.
    facet: which of the small charts it is in, as in `alpha=0.1`.
  """

  colour: int
  dash: int
  facet: str


class Plan(NamedTuple):
  """What differs between runs.

  Attributes:
    names: of each run, unique, of at most `LONGEST` characters.
    looks: of each run.
    peers: of each run, its values of the chosen flags but method and labels;
      runs in which these are equal are compared with each other first.
    others: flags that differ too, but are in no name.
  """

  names: list[str]
  looks: list[Look]
  peers: list[tuple[str, ...]]
  others: list[str]


def plan(configs: Sequence[Config], folders: Sequence[Sequence[str]],
         free: Sequence[str] = (), bounds: Container[int] = ()) -> Plan:
  """Finds the few flags and knobs that tell runs apart.

  Args:
    configs: `config.json` of each.
    folders: names for each, shortest first, for runs that no flags tell apart.
    free: flags that are not looked at.
    bounds: indices of runs that are the bounds of another one; they are named
      so though no run has other labels.
  """
  texts = [_parts(config, free) for config in configs]
  keys = sorted({key for parts in texts for key in parts}, key=_rank)
  varying = [key for key in keys if len({p.get(key) for p in texts}) > 1]
  chosen = _chosen(texts, varying)
  words = {key: short(parts[key] for parts in texts if key in parts)
           for key in imports.TEXTS}
  seen = [{key: words[key][text] if key in words else text
           for key, text in parts.items()} for parts in texts]
  names = [_name(parts, chosen, own, i in bounds)
           for i, (parts, own) in enumerate(zip(texts, seen))]
  if len(configs) == 1:
    names = [_cut(folders[0][0], LONGEST)]
  return Plan(
      _distinct(names, folders), _looks(seen, chosen),
      [tuple(parts.get(k, '') for k in chosen
             if k not in ('method', 'labels', _CODE)) for parts in texts],
      [k for k in varying
       if k not in chosen and k not in {*flag_kinds.NOT_THE_CELL, _CODE}])


def setting_of(config: Config) -> tuple[tuple[str, str], ...]:
  """Returns what runs must share for their methods to be compared.

  That is program, data and all flags but those that are tuned or choose the
  method, with the code of the files that these name.

  Raises:
    ValueError: if the configuration is damaged.
  """
  others = {'method', 'profile', 'imports', *flag_kinds.TUNED,
            *flag_kinds.NOT_THE_CELL}
  beside = _files(config, _BESIDE - {*flag_kinds.TUNED})
  return (('program', command.program_of(config)),
          ('data', str(config['facts'].get('data_hash'))),
          *(code for code in _code(config) if code[0] in beside),
          *sorted((name, _text(value))
                  for name, value in config['flags'].items()
                  if name not in others))


def data_parts(configs: Sequence[Config]) -> list[int]:
  """Parts runs by their data: returns the number of each one's part, from 0.

  Other vectors of the same texts are no other data.
  """
  keys = [_data_of(config) for config in configs]
  # Hashes of the data by their name, and by name and vectors.
  named = collections.defaultdict[Any, set[str]](set)
  alike = collections.defaultdict[Any, set[str]](set)
  for name, vectors, digest in keys:
    if digest:
      named[name].add(digest)
      alike[name, vectors].add(digest)
  # Under such a name, runs whose data are not known are a part of their own.
  several = {name for (name, _), some in alike.items() if len(some) > 1}
  found = [digest if name in several else min(named[name], default=name)
           for name, _, digest in keys]
  order = [*dict.fromkeys(found)]
  return [order.index(part) for part in found]


def _data_of(config: Config) -> tuple[Any, Any, str]:
  """Name and split of a run's data, their vectors, and their hash or ''."""
  flags = config.get('flags') or {}
  return ((flags.get('dataset'), flags.get('split')), flags.get('embeddings'),
          (config.get('facts') or {}).get('data_hash') or '')


def method_of(config: Config) -> str:
  """Returns a method without its knobs; another profile or code is another."""
  name, knobs = registry.parse(config['flags'].get('method', ''))
  if name == PLAIN:
    return name
  own = {k: v for k, v in knobs.items() if k == 'profile'}
  beside = _files(config, _BESIDE) - _files(config, {'method'})
  return ' '.join([registry.written(name, own), *(
      digest for file, digest in _code(config) if file not in beside)])


def _code(config: Config) -> list[tuple[str, str]]:
  """Returns the digests of a run's own code, by file name or module."""
  return sorted((config['facts'].get('code') or {}).items())


def _files(config: Config, flags: Set[str]) -> set[str]:
  """Returns the files and modules that some flags name."""
  return {imports.name_of(place) for place in imports.places(
      str(config['flags'].get(name) or '') for name in flags)}


def short(texts: Iterable[str]) -> dict[str, str]:
  """Shortens what names the user's files, as `~/mine.py:fast(k=2)`.

  Args:
    texts: of methods, networks and the like.

  Returns:
    By text what people call it: without its place, as `fast(k=2)`. Where two of
    them would be equal, with the file's name, or as much of its path as it
    takes.
  """
  kept = [*dict.fromkeys(texts)]
  found = {text: _ending(text, 0) for text in kept}
  for parts in range(1, max((text.count('/') for text in kept), default=0) + 2):
    count = collections.Counter(found.values())
    found = {text: word if count[word] == 1 else _ending(text, parts)
             for text, word in found.items()}
  return found


def _ending(text: str, parts: int) -> str:
  """Returns a text with this many parts of its file's path."""
  placed = imports.split(text)
  if placed is None or not parts:
    return imports.short(text)
  return placed._replace(place='/'.join(placed.place.split('/')[-parts:])).text


def _parts(config: Config, free: Sequence[str]) -> Parts:
  """Returns a text for each flag and each knob of a run's method."""
  flags = config['flags']
  parts = {name: _text(value) for name, value in flags.items()
           if name not in free}
  if code := _code(config):  # Of files that were edited between two runs.
    parts[_CODE] = ' '.join(digest[:_DIGITS] for _, digest in code)
  try:  # A damaged method or origin is not used to tell runs apart.
    parts['setting'] = pathlib.Path(command.program_of(config)).stem
    method, knobs = registry.parse(flags.get('method', ''))
  except ValueError:
    return parts
  for name, value in knobs.items():
    parts[name if name not in parts or name == 'profile' else
          f'{method}.{name}'] = _text(value)
  return parts | {'method': method}


def _text(value: Any) -> str:
  if isinstance(value, list):
    return ','.join(map(str, value))
  return f'{value:g}' if isinstance(value, float) else str(value)


def _rank(key: str) -> tuple[int, int, str]:
  """Ranks flags for the order of naming; technical ones come last."""
  known = _TELLING.index(key) if key in _TELLING else len(_TELLING)
  if key == _CODE:
    return 2, 0, ''
  return (0 if key == 'method' else 2 if key in flag_kinds.NOT_THE_CELL else 1,
          known, key)


def _chosen(texts: Sequence[Parts], varying: Sequence[str]) -> list[str]:
  """Chooses method and labels, and few flags that tell the rest apart."""
  chosen = [key for key in ('method', 'labels') if key in varying]
  def groups(keys: Sequence[str]) -> int:
    return len({tuple(p.get(k) for k in keys) for p in texts})
  while groups(chosen) < len(texts):
    best = max((k for k in varying if k not in chosen),
               key=lambda k: groups([*chosen, k]), default=None)
    if best is None or groups([*chosen, best]) == groups(chosen):
      break
    chosen.append(best)
  return chosen


def _name(parts: Parts, chosen: Sequence[str], seen: Parts, bound: bool
          ) -> str:
  """Makes a name such as `fixmatch, alpha=0.1` of texts as people see them."""
  words = [_word(key, seen[key]) for key in chosen if key in parts]
  if ('labels' in chosen or bound) and parts.get('method') == PLAIN:
    words = [bounds_lib.NAMES.get(parts.get('labels', 'few'), PLAIN), *(
        _word(key, seen[key]) for key in chosen
        if key in parts and key not in ('method', 'labels'))]
  return _cut(', '.join(filter(None, words)) or (
      'few labels' if 'labels' in chosen else seen.get('method', '')), LONGEST)


def _word(key: str, value: str) -> str:
  if key == 'labels':
    return f'{value} labels' if value == 'all' else ''
  value = _cut(value, _LONGEST_VALUE)
  return value if key in _BARE else f'{key}={value}'


def _cut(text: str, longest: int) -> str:
  """Shortens a text to its beginning and its end."""
  if len(text) <= longest:
    return text
  end = longest // 3
  return text[:longest - end - 1] + '…' + text[-end:]


def _distinct(names: Sequence[str], folders: Sequence[Sequence[str]]
              ) -> list[str]:
  """Makes equal names different: by the folders, else by numbers."""
  for rank in range(max(map(len, folders), default=0)):
    count = collections.Counter(names)
    names = [name if count[name] == 1 else _cut(mine[rank], LONGEST)
             for name, mine in zip(names, folders, strict=True)]
    if len(set(names)) == len(names):
      return list(names)
  found: list[str] = []
  for name in names:
    number, new = 1, name
    while new in found:
      number += 1
      end = f' ({number})'
      new = _cut(name, LONGEST - len(end)) + end
    found.append(new)
  return found


def _looks(texts: Sequence[Parts], chosen: Sequence[str]) -> list[Look]:
  """Chooses colours by method, facets by a factor, dashes by what is left.

  The facets are of the first factor whose values have two runs or more each, so
  that there is something to compare in each facet.
  """
  first = [key for key in ('method', 'labels') if key in chosen] or [
      *chosen[:1]]
  rest = [key for key in chosen if key not in first]
  facet = next((k for k in rest if _compares(texts, k)), None)
  below = [key for key in rest if key != facet] or rest
  colours = _places([tuple(p.get(k, '') for k in first) for p in texts])
  dashes = _places([tuple(p.get(k, '') for k in below) for p in texts])
  return [Look(c, d, '' if facet is None else _word(facet, p.get(facet, '-')))
          for p, c, d in zip(texts, colours, dashes, strict=True)]


def _compares(texts: Sequence[Parts], key: str) -> bool:
  count = collections.Counter(p.get(key) for p in texts)
  return min(count.values()) > 1 and 1 < len(count) <= _MOST_FACETS


def _places(values: Sequence[Any]) -> list[int]:
  """Numbers values in the order in which they first appear."""
  order = {value: i for i, value in enumerate(dict.fromkeys(values))}
  return [order[value] for value in values]


def facets(looks: Sequence[Look]) -> list[str]:
  """Returns all facets, sorted; numbers by size."""
  def key(facet: str) -> tuple[str, float, str]:
    name, _, value = facet.rpartition('=')
    try:
      return name, float(value), ''
    except ValueError:
      return name, 0.0, facet
  return sorted({look.facet for look in looks}, key=key)
