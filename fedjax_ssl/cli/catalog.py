"""Lists what there is to choose from, read from registries and docstrings.

A method, model, view or partition that is registered shows up here by itself,
with its options, their defaults and its papers.
"""
from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
import inspect
import json
import os
import re
import sys
import textwrap
from typing import Any, NamedTuple

from fedjax_ssl import config, data, methods, models
from fedjax_ssl.cli import arguments
from fedjax_ssl.core import checks, imports, knobs, optimizers, registry
from fedjax_ssl.data import augment, datasets
from fedjax_ssl.methods.parts import aggregators, attacks, server_optimizers
from fedjax_ssl.report import printing
from fedjax_ssl.running import settings

_OURS = 'this library'
# Those to which installed packages add.
_REGISTRIES: tuple[registry.Registry[Any], ...] = (
    methods.METHODS, models.MODELS, aggregators.AGGREGATORS,
    augment.WEAK, augment.STRONG, datasets.DATASETS, settings.SETTINGS)
# Groups that also take `PLACE:NAME`, for what is registered nowhere.
_PLACED: dict[str, registry.Registry[Any]] = {
    'methods': methods.METHODS, 'models': models.MODELS,
    'weak': augment.WEAK, 'strong': augment.STRONG,
    'aggregators': aggregators.AGGREGATORS,
    'server_optimizers': server_optimizers.SERVER_OPTIMIZERS,
    'attacks': attacks.ATTACKS, 'lr_schedules': optimizers.SCHEDULES}

# What stands for a command of TeX; others stand for themselves, as `lambda`.
_SIGNS = {'ge': '>=', 'le': '<=', 'sim': '~', 'vee': 'or', 'cdot': '*',
          '|': '||', ',': '', 'lfloor': 'floor(', 'rfloor': ')'}


class Option(NamedTuple):
  """A knob, as in `fixmatch(threshold=0.9)`."""

  name: str
  kind: str  # Its annotation, '' without one.
  default: str  # As Python writes it; '' if it must be given.
  text: str


class Entry(NamedTuple):
  """One thing to choose."""

  name: str
  summary: str  # The first paragraph of its docstring.
  options: tuple[Option, ...]
  sources: tuple[str, ...]  # Papers, or where it comes from.
  text: str = ''  # What the docstring says between that and its sections.
  profiles: tuple[str, ...] = ()  # Variants, each with what it stands for.


class Group(NamedTuple):
  """Things of one kind."""

  flag: str  # How they are chosen.
  entries: tuple[Entry, ...]


def catalog() -> dict[str, Group]:
  """Returns all groups by name; a group's entries are sorted by name."""
  labels = {f.__name__: f for f in (
      data.choose_labeled, data.label_within, data.label_clients,
      data.label_mixed)}
  return {
      'methods': Group('--method=NAME(option=value)', _of(methods.METHODS)),
      'models': Group('--model=NAME(option=value)', _of(models.MODELS)),
      'datasets': Group('--dataset=NAME --data_dir=DIR; options are flags of '
                        'their own', tuple(_datasets())),
      'partitions': Group(
          'by the setting, fedjax_ssl.data.NAME(rng, labels, '
          'num_clients, option=value); --alpha sets alpha',
          _of(data.PARTITIONS)),
      'labels': Group(
          'by the setting, as fedjax_ssl.data.NAME; '
          '--labels_per_class, --labeled_fraction, --num_labeled_clients and '
          '--num_partly_labeled_clients set how many', _of(labels)),
      'streams': Group(
          'by the setting, as fedjax_ssl.data.NAME; '
          '--rounds_per_task sets how long a task lasts',
          _of({'deal_tasks': data.deal_tasks})),
      'settings': Group('fedjax-ssl train NAME', tuple(
          Entry(s.name, s.about, (), (s.source,))
          for s in settings.SETTINGS.values())),
      'weak': Group('--weak=NAME(option=value), --labeled_view=NAME(...)',
                    _of(augment.WEAK)),
      'strong': Group('--strong=NAME(option=value)', _of(augment.STRONG)),
      'aggregators': Group('--aggregator=NAME(option=value)',
                           _of(aggregators.AGGREGATORS)),
      'server_optimizers': Group(
          '--server_optimizer=NAME(option=value), --server_learning_rate=RATE',
          _of(server_optimizers.SERVER_OPTIMIZERS)),
      'attacks': Group('--attack=NAME(option=value)', _of(attacks.ATTACKS)),
      'lr_schedules': Group('--lr_schedule=NAME(option=value)',
                            _of(optimizers.SCHEDULES)),
  }


def brief(group: str, found: Group, width: int = 99) -> str:
  """Formats a group with one line for each entry."""
  lines = _head(group, found)
  for entry in found.entries:
    start = f'  {entry.name}   '
    lines.append(start + textwrap.shorten(
        _first_sentence(entry.summary), max(width - len(start), 20),
        placeholder=' ...'))
  return '\n'.join([*lines, ''])


def show(group: str, found: Group, width: int = 79, whole: bool = False
         ) -> str:
  """Formats a group with all options and sources.

  Args:
    group: its name.
    found: its entries.
    width: of a line.
    whole: whether to include all that docstrings say.
  """
  lines = _head(group, found)
  for entry in found.entries:
    lines += textwrap.wrap(f'  {entry.name}   {entry.summary}', width,
                           subsequent_indent='      ')
    if whole and entry.text:
      lines += ['', textwrap.indent(entry.text, '      '), '']
    for profile in entry.profiles if whole else ():
      lines += textwrap.wrap(f'      {profile}', width,
                             subsequent_indent='          ')
    for option in entry.options:
      kind = f': {option.kind}' if option.kind else ''
      default = f' = {option.default}' if option.default else ''
      lines += textwrap.wrap(
          f'      {option.name}{kind}{default}   {option.text}', width,
          subsequent_indent='          ')
    said = ' '.join(entry.text.split()) if whole else ''
    for source in (one for one in entry.sources if one not in said):
      lines += textwrap.wrap(f'      source: {source}', width,
                             subsequent_indent='          ',
                             break_long_words=False, break_on_hyphens=False)
    lines.append('')
  return '\n'.join(lines)


def _head(group: str, found: Group) -> list[str]:
  """Returns a group's name and flag, and an empty line."""
  return [*textwrap.wrap(f'{group}   {found.flag}', 79,
                         subsequent_indent='    '), '']


def _of(known: Mapping[str, Callable[..., Any]]) -> tuple[Entry, ...]:
  return tuple(_entry(name, known[name]) for name in sorted(known))


def _entry(name: str, function: Callable[..., Any]) -> Entry:
  text = inspect.getdoc(function) or ''
  place = sys.modules.get(function.__module__, sys.modules[__name__])
  named = re.match(r'See `(\w+)`', text)
  described = [text]
  if named and hasattr(place, named[1]):
    described.append(inspect.getdoc(getattr(place, named[1])) or '')
  return Entry(
      name, _first_paragraph(described[-1]),
      tuple(_options(function, described)),
      tuple(_sources(described, *_docs_above(place.__name__))) or (
          _home(function),),
      _body(described[-1]), tuple(_profiles(function)))


def _home(function: Callable[..., Any]) -> str:
  """Names the origin of a function that cites nothing."""
  module = function.__module__
  return (_OURS if module.partition('.')[0] == 'fedjax_ssl' else
          imports.path_of(module) or module)


def _body(text: str) -> str:
  """Returns a docstring's paragraphs after the first, up to its sections."""
  body = re.split(r'^(?:Args|Attributes|Returns|Raises|References):$',
                  text.partition('\n\n')[2], maxsplit=1, flags=re.MULTILINE)[0]
  return _without_tex(body).strip()


def _profiles(function: Callable[..., Any]) -> Iterator[str]:
  for name, values in knobs.profiles_of(function).items():
    said = ', '.join(f'{knob}={value!r}' for knob, value in values.items())
    yield f"profile='{name}': {said}"


def _docs_above(module: str) -> Iterator[str]:
  """Yields the docstrings of a module and of the packages around it."""
  while module.count('.') > 1:  # Not those of fedjax_ssl.methods and its like.
    yield inspect.getdoc(sys.modules[module]) or ''
    module = module.rpartition('.')[0]


def _first_sentence(text: str) -> str:
  """Returns a paragraph up to the first full stop before a capital letter."""
  return re.split(r'(?<=[.!?]) (?=[A-Z])', text, maxsplit=1)[0]


def _first_paragraph(text: str) -> str:
  """Returns the docstring's first paragraph, with plain formulas."""
  return _without_tex(' '.join(text.split('\n\n')[0].split()))


def _without_tex(text: str) -> str:
  r"""Writes formulas as plain text: `\lambda_u \ge 0` as `lambda_u >= 0`."""
  def plain(found: re.Match[str]) -> str:
    formula = re.sub(r'\\frac\{([^{}]*)\}\{([^{}]*)\}', r'\1 / \2', found[1])
    formula = re.sub(r'\\([a-z]+|\W)', lambda name: _SIGNS.get(
        name[1], name[1]), formula)
    return formula.replace('( ', '(').replace(' )', ')')
  return re.sub(r':math:`([^`]*)`', plain, text)


def _options(function: Callable[..., Any], described: list[str]
             ) -> Iterator[Option]:
  texts: dict[str, str] = {}
  for text in described:
    texts |= {k: v for k, v in _arguments(text).items() if k not in texts}
  for parameter in knobs.names(function).values():
    empty = parameter.empty
    kind = parameter.annotation
    yield Option(
        parameter.name,
        '' if kind is empty else kind.__name__ if isinstance(kind, type)
        else str(kind),
        '' if parameter.default is empty else repr(parameter.default),
        texts.get(parameter.name, ''))


def _arguments(text: str) -> dict[str, str]:
  """Returns the texts of `Args:` and `Attributes:`, by name."""
  found: dict[str, str] = {}
  for section in re.findall(
      r'^(?:Args|Attributes):\n((?:[ ]+.*\n?|\n)+)', text, re.MULTILINE):
    name = ''
    for line in textwrap.dedent(section).splitlines():
      start = re.match(r'(\w[\w, ]*):\s*(.*)', line)
      if start:
        name, rest = start[1], start[2]
        for one in name.split(', '):
          found[one] = rest
      elif name:
        for one in name.split(', '):
          found[one] = f'{found[one]} {line.strip()}'.strip()
  return found


def _sources(described: list[str], *modules: str) -> list[str]:
  """Returns the papers that a docstring cites, or else its module's."""
  for texts in (described, *([text] for text in modules)):
    found = [' '.join(paragraph.split()) for text in texts
             for paragraph in _citing(text)]
    if found:
      return list(dict.fromkeys(found))
  return []


def _citing(text: str) -> Iterator[str]:
  """Yields a docstring's `References:`, or its paragraphs that name a paper."""
  section = re.search(r'^References:\n((?:[ ]+.*\n?)+)', text, re.MULTILINE)
  if section:
    yield section[1]
    return
  for paragraph in text.split('\n\n'):
    if re.search(r'https?://|\b(?:19[5-9]|20[0-3])\d\b', paragraph) and not (
        re.match(r'(Args|Returns|Raises|Attributes):', paragraph)):
      yield paragraph


def _datasets() -> Iterator[Entry]:
  """Yields what `fedjax_ssl.data.load` finds, files of the data folder too."""
  split = Option('split', 'str', "'official'", 'or train/test or '
                 'train/validation/test in percent or counts')
  yield Entry(
      'digits', 'Handwritten digits of 8x8, 1437 to train and 360 to test; '
      'comes with the library.', (split,),
      ('scikit-learn, from UCI, Optical Recognition of Handwritten Digits, '
       '1998',))
  vectors = Option('embeddings', 'str | None', 'None', 'a .npz of word vectors '
                   'instead of trained ones, see `fedjax-ssl embed-texts`')
  folder = os.environ.get(datasets.DATA_DIR)
  found = datasets.in_folder(folder) if folder else {}
  for name, builder in datasets.DATASETS.items():
    yield Entry(name, _first_paragraph(inspect.getdoc(builder) or ''), (split,),
                ('registered',))
  for name, file in found.items():
    texts = file.suffix == '.csv'
    yield Entry(name, f'{"Texts from" if texts else "From"} '
                f'{datasets.DATA_DIR}.',
                (split, vectors) if texts else (split,), (file.name,))
  yield Entry('NAME', 'Any DIR/NAME.npz with x_train, y_train, x_test and '
              'y_test, or with the arrays of MedMNIST.', (split,),
              ('your file',))
  yield Entry('NAME', 'Images of one size in DIR/NAME/train/CLASS/, '
              'train/unlabeled/, test/CLASS/, val/CLASS/; clients.csv.',
              (split,), ('your folder',))
  yield Entry('NAME', 'Texts: any DIR/NAME.csv with the columns text and '
              'label; one row in five is for the test.',
              (split, vectors), ('your file',))
  yield Entry('NAME or NAME/CONFIG', 'Any image set of TensorFlow Datasets '
              'that is prepared as array_record.', (split,),
              ('https://www.tensorflow.org/datasets/catalog',))


def _parser() -> argparse.ArgumentParser:
  parser = arguments.Parser('list', 'Lists methods, models, data sets, '
      'partitions, labels, streams, views, settings, aggregators, optimizers '
      'of the server, attacks and schedules, a line for each. Of one entry it '
      'shows all there is to say: options, defaults and sources.')
  parser.add_argument('group', nargs='?', metavar='GROUP or NAME',
                      help='one kind only, as in methods; or an entry of any '
                      'kind, as in fixmatch; or a flag or a knob, as in alpha')
  parser.add_argument('name', nargs='?', help='one entry of that kind, or '
                      'one of your own, as in ./mine.py:mine')
  parser.add_argument('--all', action='store_true', help='options, defaults '
                      'and sources of all that is listed')
  parser.add_argument('--import', dest='imports', action='append', default=[],
                      metavar='FILE or MODULE', help='show what it registers '
                      'too')
  parser.add_argument('--json', action='store_true', help='for programs')
  return parser


def _chosen(groups: Mapping[str, Group], group: str | None, name: str | None
            ) -> dict[str, Group]:
  """Returns the part of the catalog that the arguments ask for.

  Raises:
    ValueError: if there is none; the message says what there is instead.
  """
  if group is None:
    return dict(groups)
  if placed := imports.split(name or group):
    if group not in _PLACED:
      known = name is not None and group in groups
      said = (f'{group} take no code of your own; give' if known else
              f'{name or group} needs its kind before it, as in `fedjax-ssl '
              f'list methods {name or group}`,')
      raise ValueError(f'{said} one of {", ".join(_PLACED)}.')
    function = registry.find(
        _PLACED[group], f'{placed.place}:{placed.name}', group)
    return {group: groups[group]._replace(
        entries=(_entry(placed.name, function),))}
  if group in groups and name is None:
    return {group: groups[group]}
  if group in groups:
    among, wanted = {group: groups[group]}, name
  elif name is None:
    among, wanted = dict(groups), group
  else:
    raise ValueError(f'{group!r} is no group.{checks.near(group, groups)} '
                     f'There are: {", ".join(groups)}.')
  found = {key: one._replace(entries=kept) for key, one in among.items()
           if (kept := tuple(e for e in one.entries if e.name == wanted))}
  if not found:
    names = [e.name for one in among.values() for e in one.entries]
    listed = names if group in groups else [*among]
    what = f'{group} has no {wanted!r}' if group in groups else (
        f'{wanted!r} is no group and no entry of any')
    flags = () if group in groups else map(checks.flag, config.OPTIONS)
    raise ValueError(
        f'{what}.{checks.near(str(wanted), {*names, *listed, *flags})} There '
        f'are: {", ".join(listed)}.')
  return found


def _explained(word: str, groups: Mapping[str, Group]) -> str:
  """Says what a flag does, and which entries have a knob of this name.

  Returns '' if it is neither.
  """
  lines = []
  for option in config.OPTIONS.values():
    if checks.flag(option.name) == word:
      default = '' if option.default in (None, ()) else (
          f' By default {option.default}, or as the setting says.')
      lines.append(f'The flag --{word}: {option.help}{default}')
  for kind, group in groups.items():
    found = [(e.name, option) for e in group.entries for option in e.options
             if option.name == word]
    if found:
      lines.append(f'A knob of {kind}, {group.flag}:')
      lines += [f'  {owner}: {option.text} ' + (
          f'By default {option.default}.' if option.default else '')
                for owner, option in found]
  return '\n'.join(textwrap.fill(line, 80, subsequent_indent='    ')
                   for line in lines)


@arguments.refusing
def main(argv: Sequence[str]) -> int:
  """Prints the catalog, or a part of it; returns the exit code."""
  args = _parser().parse_args(argv)
  for several in args.imports:
    for place in checks.words(several):
      registry.import_place(place)
  for known in _REGISTRIES:
    for line in known.load_entry_points():
      print(f'left out: {line}', file=sys.stderr)
  groups = catalog()
  text = '' if args.name or args.json or args.group in (None, *groups) else (
      _explained(args.group, groups))
  try:
    groups = _chosen(groups, args.group, args.name)
  except ValueError:
    if not text:
      raise
    printing.say(text)
    return 0
  # `_chosen` takes a first word that is no group for an entry.
  one = args.name is not None or args.group not in (None, *groups)
  whole = one and all(len(group.entries) == 1 for group in groups.values())
  if args.json:
    printing.say(json.dumps({
        name: [{**entry._asdict(),
                'options': [o._asdict() for o in entry.options]}
               for entry in group.entries]
        for name, group in groups.items()}, indent=1))
  elif one or args.all:
    parts = [show(*item, whole=whole) for item in groups.items()]
    printing.say('\n'.join([*parts, *([f'{text}\n'] if text else [])]), end='')
  else:
    printing.say('\n'.join(brief(*item) for item in groups.items())
                 + '\n`fedjax-ssl list NAME` shows the options and sources of '
                 'one, --all those of all.')
  return 0
