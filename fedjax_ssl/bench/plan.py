"""What the bench runs: beds, entries and the configurations of each entry.

`beds.toml` holds the beds, `entries.toml` the methods and what may be tuned.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import copy
import functools
import hashlib
import math
import pathlib
import re
import tomllib
from typing import Any, NamedTuple

import numpy as np

from fedjax_ssl.core import checks, imports, registry

# How many each entry may try; the first has all knobs at their defaults.
CONFIGURATIONS = 8
SEARCH_SEED = 1000  # Chooses configurations, and is used for nothing else.
SEEDS = (0, 1, 2)
# Seed of all draws. It was chosen: the smallest for which every threshold and
# every weight that most rows share comes with a rate of .005 or .01, and no
# draw is the default. At these rates FixMatch and labels only were best in
# bench_v1 and bench_v2.
_KEY = 22
FEW, ALL = 'labels_only', 'all_labels'  # Entries that are the bounds.
_HERE = pathlib.Path(__file__).parent


class Bed(NamedTuple):
  """Where all methods are compared.

  Attributes:
    name: 'clients', 'server', 'mixed' or 'agents'.
    about: where the labels are, in one sentence.
    setting: name of the setting that `fedjax-ssl train` takes.
    flags: those that every run has.
    rates: learning rates to choose from, the bed's own first.
    skews: name and flags of each partition that final seeds are run on, with
      a `setting` where it is another one; configurations are chosen on the
      first.
  """

  name: str
  about: str
  setting: str
  flags: Mapping[str, Any]
  rates: tuple[float, ...]
  skews: Mapping[str, Mapping[str, Any]]


class Entry(NamedTuple):
  """A row of the table.

  Attributes:
    name: of the row, in letters that file names may have.
    method: as --method has it, with the knobs that make this row.
    knobs: what may be tuned, each with the values to choose from, the default
      first.
    flags: those that this row has besides the bed's.
    beds: where it can be run.
    of: the row that this one is an ablation of; '' for a method.
    groups: how many groups of clients the method draws in a round. Each gets
      as many of the bed's cohort, rounded down; they may share clients.
  """

  name: str
  method: str
  knobs: Mapping[str, tuple[Any, ...]]
  flags: Mapping[str, Any]
  beds: tuple[str, ...]
  of: str
  groups: int = 1


class Configuration(NamedTuple):
  """One choice of all that an entry may tune.

  Attributes:
    number: 0 is the default.
    learning_rate: of a client's optimizer.
    knobs: of the method, besides those of the entry; {} leaves its defaults.
  """

  number: int
  learning_rate: float
  knobs: Mapping[str, Any]


class Run(NamedTuple):
  """One run of the program.

  Attributes:
    name: of its folder.
    setting: name of the setting that `fedjax-ssl train` takes.
    flags: in the order of the command line.
  """

  name: str
  setting: str
  flags: tuple[str, ...]


def beds() -> dict[str, Bed]:
  """Returns the beds of this version, by name."""
  return {name: Bed(name, raw['about'], raw['setting'], raw['flags'],
                    tuple(raw['rates']), raw['skews'])
          for name, raw in _toml('beds.toml').items()}


def entries() -> dict[str, Entry]:
  """Returns the rows, by name, the bounds first."""
  where = {name: bed.flags.get('labels_at', 'clients')
           for name, bed in beds().items()}
  return {name: Entry(name, raw['method'],
                      {k: tuple(v) for k, v in raw.get('knobs', {}).items()},
                      raw.get('flags', {}),
                      tuple(bed for bed, at in where.items()
                            if raw.get('labels_at', at) == at
                            and bed in raw.get('beds', where)),
                      raw.get('of', ''), raw.get('groups', 1))
          for name, raw in _toml('entries.toml').items()}


def own_entry(text: str) -> Entry:
  """Makes a row for a method that `entries.toml` does not have.

  Args:
    text: as --method has it, with any knobs. One with a list of values, as in
      `fixmatch(threshold=[0.9, 0.5])`, is tuned, the first being the default.
      Besides these only the rate is tuned.

  Raises:
    ValueError: if the text has another form.
  """
  named, given = registry.parse(text)
  placed = imports.split(named)
  called = placed.name if placed else named
  tuned = {knob: _choices(text, knob, values)
           for knob, values in given.items() if isinstance(values, list)}
  knobs = {**given, **{knob: values[0] for knob, values in tuned.items()}}
  # In one spelling, so that rows with equal knobs are one row. The name leaves
  # out the place.
  method = registry.written(called, knobs)
  if placed:
    try:
      method = f'{imports.absolute(placed.place)}:{method}'
    except ValueError as error:
      raise ValueError(f'ROW={text}: {error}') from error
  short = re.sub(r'[][]', '', registry.written(called, given))
  # Two together end the row's name in those of its runs.
  name = re.sub('__+', '_', re.sub(r'[^\w.=-]+', '_', short)).strip('_')
  groups = next((entry.groups for entry in entries().values()
                 if registry.parse(entry.method)[0] == named), 1)
  return Entry(name, method, tuned, {}, tuple(beds()), '', groups)


def _choices(text: str, knob: str, values: list[Any]) -> tuple[Any, ...]:
  """Returns the values to choose from; raises ValueError if they are none."""
  if (not values or not all(value is None or isinstance(
      value, str | int | float) for value in values)
      or len({*values}) < len(values)):
    raise ValueError(f'ROW={text}: {knob}={values} must list different '
                     'numbers, texts, True, False or None to choose from.')
  return tuple(values)


def shown(method: str) -> str:
  """Returns a method's text as tables have it, without a file's path.

  The name of a module stays, as it is the same on all machines.
  """
  placed = imports.split(method)
  return (imports.short(method) if placed and imports.is_file(placed.place)
          else method)


def space(entry: Entry, bed: Bed) -> dict[str, Any]:
  """Returns what a row is and what it is chosen from, as JSON has it.

  Rows with equal ones are the same row. A method in a file or module of one's
  own is its name, and the SHA-256 of the code as `code`; where a file lies does
  not count, nor does what the code imports.

  Raises:
    OSError: if such a file cannot be read.
    ValueError: if such a module cannot be imported.
  """
  found = {'method': shown(entry.method), 'flags': _own_flags(entry, bed),
           'learning_rate': list(bed.rates),
           'knobs': {name: list(values)
                     for name, values in entry.knobs.items()}}
  placed = imports.split(entry.method)
  if placed and imports.is_file(placed.place):
    found['code'] = hashlib.sha256(
        pathlib.Path(placed.place).expanduser().read_bytes()).hexdigest()
  elif placed and (code := imports.hashes([placed.place])):
    found['code'] = code[placed.place]
  return found


def differing(one: Mapping[str, Any], other: Mapping[str, Any]) -> list[str]:
  """Returns what two spaces differ in, in words."""
  return [key.replace('_', ' ') for key in {**one, **other}
          if one.get(key) != other.get(key)]


def from_space(name: str, given: Mapping[str, Any]) -> Entry:
  """Returns the row of a name that `space` describes."""
  return Entry(name, given['method'], {
      knob: tuple(values) for knob, values in given['knobs'].items()},
               dict(given['flags']), tuple(beds()), '')


def chosen(names: Sequence[str], bed: Bed) -> list[Entry]:
  """Returns the rows that are asked for, with both bounds before them.

  Args:
    names: of rows; or methods with knobs, which get a row of their own, see
      `own_entry`. If empty, all rows that the bed admits.
    bed: where they run.

  Raises:
    ValueError: for a row that is unknown, that has the name of another one,
      or that the bed does not admit.
  """
  known = entries()
  found = {name: known[name] for name in (FEW, ALL)}
  for name in names or [n for n, e in known.items() if bed.name in e.beds]:
    entry = known.get(name)
    if entry is None:
      if '(' not in name and imports.split(name) is None:
        checks.check('row', name, known)
      entry = own_entry(name)
      if (other := {**known, **found}.get(entry.name, entry)) != entry:
        raise ValueError(f'ROW={name} would have the name of the row '
                         f'{entry.name}, {other.method}; give it a knob, or '
                         'its function another name.')
    if bed.name not in entry.beds:
      raise ValueError(f'{name} is not for the bed {bed.name}, but for '
                       f'{", ".join(entry.beds)}.')
    found[entry.name] = entry
  return list(found.values())


def configurations(entry: Entry, bed: Bed, count: int = CONFIGURATIONS
                   ) -> list[Configuration]:
  """Draws the configurations of an entry on a bed; the same in every process.

  All rows draw the bed's rates in one order, and rows that have a knob with the
  same values draw these in one order. With draws of their own rows would differ
  by luck: a good rate would meet a good weight in one row and not in another. A
  row leaves out draws that are its default, and those that it has had.

  Args:
    entry: its knobs are drawn. Each value of a knob comes once before any comes
      again, like the cards of a deck.
    bed: its rates are drawn in the same way.
    count: at most so many; fewer if there are not so many choices.

  Returns:
    The default first, with the bed's own rate; then random ones, all different.
  """
  found = [Configuration(0, bed.rates[0], {})]
  axes = {'learning_rate': bed.rates, **entry.knobs}
  seen = {tuple(values[0] for values in axes.values())}
  size = math.prod(len(values) for values in axes.values())
  decks = {name: _cards(name, values) for name, values in axes.items()}
  while len(found) < min(count, size):
    drawn = {name: next(deck) for name, deck in decks.items()}
    if tuple(drawn.values()) not in seen:
      seen.add(tuple(drawn.values()))
      found.append(Configuration(
          len(found), drawn.pop('learning_rate'), drawn))
  return found


def _cards(name: str, values: Sequence[Any]) -> Iterator[Any]:
  """Deals the values of a knob for ever, whichever of them is the default."""
  cards = sorted(values, key=repr)
  rng = np.random.default_rng(
      list(hashlib.sha256(f'{_KEY}/{name}/{cards}'.encode()).digest()))
  while True:
    yield from (cards[i] for i in rng.permutation(len(cards)))


def search_run(entry: Entry, bed: Bed, configuration: Configuration) -> Run:
  """Returns the run that tries a configuration, on the first skew."""
  skew = next(iter(bed.skews))
  return _run(f'{entry.name}__try{configuration.number}', entry, bed, skew,
              configuration, (SEARCH_SEED,))


def final_run(entry: Entry, bed: Bed, skew: str, configuration: Configuration
              ) -> Run:
  """Returns the run of the final seeds with the chosen configuration."""
  return _run(f'{entry.name}__{skew}__final{configuration.number}', entry, bed,
              skew, configuration, SEEDS)


def _run(name: str, entry: Entry, bed: Bed, skew: str,
         configuration: Configuration, seeds: Sequence[int]) -> Run:
  special = dict(bed.skews[skew])
  setting = special.pop('setting', bed.setting)
  flags = {**bed.flags, **special, **_own_flags(entry, bed),
           'method': method_of(entry, configuration),
           'learning_rate': configuration.learning_rate,
           'seeds': ','.join(map(str, seeds))}
  return Run(f'{bed.name}__{name}', setting, tuple(
      f'--{flag}={value}' for flag, value in flags.items()))


def _own_flags(entry: Entry, bed: Bed) -> dict[str, Any]:
  """Returns what a row's runs have besides the flags of the bed."""
  if entry.groups == 1:
    return dict(entry.flags)
  return {**entry.flags,
          'cohort_size': bed.flags['cohort_size'] // entry.groups}


def method_of(entry: Entry, configuration: Configuration) -> str:
  """Returns the method as --method takes it, with a configuration's knobs."""
  name, knobs = registry.parse(entry.method)
  return registry.written(name, {**knobs, **configuration.knobs})


def methods_of(entry: Entry) -> list[str]:
  """Returns the method with each value that a knob may take, one at a time."""
  return [entry.method, *(
      method_of(entry, Configuration(0, 0.0, {knob: value}))
      for knob, values in entry.knobs.items() for value in values)]


def _toml(name: str) -> dict[str, Any]:
  return copy.deepcopy(_parsed(name))


@functools.cache
def _parsed(name: str) -> dict[str, Any]:
  return tomllib.loads((_HERE / name).read_text('utf-8'))
