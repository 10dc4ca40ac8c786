"""`fedjax-ssl list` says all that can be chosen, and says it truly."""
from __future__ import annotations

import inspect
import json
import re
from typing import Any

import pytest

from fedjax_ssl import data, methods, models
from fedjax_ssl.cli import catalog
from fedjax_ssl.core import optimizers
from fedjax_ssl.data import augment
from fedjax_ssl.methods.parts import aggregators, attacks, server_optimizers

REGISTRIES: dict[str, dict[str, Any]] = {
    'methods': methods.METHODS, 'models': models.MODELS,
    'partitions': data.PARTITIONS, 'weak': augment.WEAK,
    'strong': augment.STRONG, 'aggregators': aggregators.AGGREGATORS,
    'server_optimizers': server_optimizers.SERVER_OPTIMIZERS,
    'attacks': attacks.ATTACKS, 'lr_schedules': optimizers.SCHEDULES}
GROUPS = catalog.catalog()
ENTRIES = [(group, entry) for group in REGISTRIES
           for entry in GROUPS[group].entries]
each = pytest.mark.parametrize(
    'group, entry', ENTRIES, ids=[f'{g}-{e.name}' for g, e in ENTRIES])


def test_everything_registered_is_listed():
  for group, registry in REGISTRIES.items():
    assert [e.name for e in GROUPS[group].entries] == sorted(registry)
  assert {*GROUPS} == {*REGISTRIES, 'datasets', 'labels', 'settings', 'streams'}
  stream, = GROUPS['streams'].entries
  assert [o.name for o in stream.options] == ['num_tasks']


@each
def test_options_are_those_that_the_parser_takes(group, entry):
  function = REGISTRIES[group][entry.name]
  knobs = {p.name: p for p in inspect.signature(function).parameters.values()
           if p.kind is p.KEYWORD_ONLY}
  filled = {'num_classes', 'choices', 'flip', 'where'}
  assert {o.name for o in entry.options} == {*knobs} - filled
  for option in entry.options:
    assert option.default == repr(knobs[option.name].default), option
    assert option.kind, f'{entry.name}({option.name}) has no annotation'


@each
def test_every_entry_and_option_is_explained(group, entry):
  assert entry.summary and not entry.summary.startswith('See `'), entry.name
  silent = [o.name for o in entry.options if not o.text]
  assert not silent, f'say in the docstring of {entry.name}: {silent}'
  assert entry.sources and all(entry.sources)


def test_formulas_are_plain():
  assert catalog._without_tex(
      r':math:`F_k(w) + \frac{\mu}{2} \|w - w^t\|^2`, :math:`x \ge \tau`'
  ) == 'F_k(w) + mu / 2 ||w - w^t||^2, x >= tau'
  texts = [text for group, entry in ENTRIES
           for text in (entry.summary, entry.text)]
  assert not [text for text in texts if re.search(r'\\[a-z]|:math:', text)]


def test_texts_name_nothing_internal():
  """In backticks stand entries and options, which the catalog explains."""
  for group in GROUPS.values():
    known = {e.name for e in group.entries}
    for entry in group.entries:
      options = {o.name for o in entry.options}
      for text in (entry.summary, *entry.sources,
                   *(o.text for o in entry.options)):
        named = {re.sub(r'\(.*', '', x) for x in re.findall(r'`(.*?)`', text)}
        commands = {x for x in named if x.startswith('fedjax-ssl ')}
        assert named - commands <= known | options, (entry.name, text)


@pytest.mark.parametrize('name', methods.METHODS)
def test_every_method_names_its_paper(name):
  entry, = [e for e in GROUPS['methods'].entries if e.name == name]
  assert re.search(r'\b(19|20)\d\d\b|https://', ' '.join(entry.sources)), (
      f'cite the paper of {name} in its module docstring')


def test_known_facts():
  found = {e.name: e for e in GROUPS['methods'].entries}
  options = {o.name: o for o in found['fixmatch'].options}
  assert options['threshold'].default == '0.95'
  assert options['threshold'].kind == 'float'
  assert options['threshold'].text.startswith('confidence tau')
  assert any('2001.07685' in s for s in found['fixmatch'].sources)
  models_ = {e.name: e for e in GROUPS['models'].entries}
  assert [o.name for o in models_['mlp'].options] == ['width', 'depth']
  assert 'hidden' in models_['mlp'].options[0].text  # From the class.
  assert models_['cnn'].sources == ('this library',)


def test_data_sets_of_the_folder_are_listed(monkeypatch, tmp_path):
  for name in ('mine.npz', 'both.npz', 'both.csv', 'words.csv', 'else.txt'):
    (tmp_path / name).write_bytes(b'')
  # `data.load` looks neither here, nor into names that it refuses.
  for name in ('digits.npz', '.hidden.npz', 'a name.csv'):
    (tmp_path / name).write_bytes(b'')
  (tmp_path / 'file').mkdir()
  (tmp_path / 'file' / 'train').write_bytes(b'')
  monkeypatch.setenv('FEDJAX_SSL_DATA', str(tmp_path))
  found = catalog.catalog()['datasets'].entries
  assert [e.name for e in found[:5]] == [
      'digits', 'both', 'mine', 'words', 'NAME']
  # As `data.load` looks: the file of arrays before that of texts.
  assert found[1].sources == ('both.npz',)
  assert 'embeddings' in {o.name for o in found[3].options}
  assert any('.csv' in e.summary for e in found[4:])
  monkeypatch.delenv('FEDJAX_SSL_DATA')
  assert [e.name for e in catalog.catalog()['datasets'].entries[:2]] == [
      'digits', 'NAME']


def test_the_program(capsys):
  assert catalog.main([]) == 0
  printed = capsys.readouterr().out
  for group, entry in ENTRIES:
    assert re.search(rf'^  {entry.name}   ', printed, re.MULTILINE), group
  assert max(map(len, printed.splitlines())) <= 100
  assert not re.search('threshold: float|source: ', printed)
  assert len(printed.splitlines()) < len(ENTRIES) + 100
  assert catalog.main(['methods']) == 0
  _, _, *lines, empty, hint = capsys.readouterr().out.splitlines()
  assert len(lines) == len(methods.METHODS) and not empty
  assert 'fedjax-ssl list NAME' in hint and '--all' in hint
  assert '  uda   Keeps the prediction of a clean view on a strong view.' in (
      lines)
  assert catalog.main(['streams']) == 0  # A group of one entry is a group.
  assert 'num_tasks' not in capsys.readouterr().out
  assert catalog.main(['methods', '--all']) == 0
  every = capsys.readouterr().out
  assert 'threshold: float = 0.95' in every and 'source: ' in every
  assert catalog.main(['methods', 'fixmatch']) == 0
  one = capsys.readouterr().out
  assert "labeler: str = 'local'" in one and 'flexmatch' not in one
  assert catalog.main(['uda']) == 0
  whole = capsys.readouterr().out
  assert "profile='fedmatch': tsa='exp'" in whole
  assert 'eta, which rises from 1/C to 1' in ' '.join(whole.split())
  assert 'threshold: float | None' in whole and 'fixmatch' not in whole
  assert catalog.main(['sign_flip']) == 0  # Named once.
  assert capsys.readouterr().out.count('1811.03761') == 1
  assert catalog.main(['umda']) == catalog.main(['mehtods', 'uda']) == 2
  errors = capsys.readouterr().err.splitlines()
  assert "Did you mean 'uda'?" in errors[0]
  assert "Did you mean 'methods'?" in errors[1] and len(errors) == 2
  assert catalog.main(['models', '--json']) == 0
  assert {e['name'] for e in json.loads(capsys.readouterr().out)['models']} == {
      *models.MODELS}
  assert catalog.main(['models', 'nothing']) == 2
  assert 'resnet9' in capsys.readouterr().err


def test_a_flag_or_a_knob_is_explained(capsys):
  assert catalog.main(['alpha']) == 0
  text = ' '.join(capsys.readouterr().out.split())
  assert text.startswith('The flag --alpha: Dirichlet concentration')
  assert 'By default 0.5' in text and ' mixmatch: of Beta(' in text
  assert catalog.main(['threshold']) == 0
  text = capsys.readouterr().out
  owners = re.findall(r'^  (\w+): ', text, re.MULTILINE)
  assert owners == [entry.name for entry in GROUPS['methods'].entries
                    if any(o.name == 'threshold' for o in entry.options)]
  # One that is an entry too follows it.
  assert catalog.main(['momentum']) == 0
  text = capsys.readouterr().out
  assert 0 < text.index('--server_optimizer=') < text.index('The flag --mom')


def test_code_of_ones_own(capsys, tmp_path):
  """A file's function is shown like a registered one."""
  file = tmp_path / 'mine.py'
  file.write_text('def mine(task, *, k: float = 0.5):\n'
                  '  """Does it.\n\n  Args:\n    k: how much.\n  """\n')
  assert catalog.main(['methods', f'{file}:mine']) == 0
  shown = capsys.readouterr().out
  assert '  mine   Does it.' in shown
  assert 'k: float = 0.5   how much.' in shown and str(file) in shown
  for words, said in (
      ([f'{file}:mine'], 'its kind before it, as in `fedjax-ssl list methods '),
      (['datasets', f'{file}:mine'],
       'datasets take no code of your own; give one of methods, models'),
      (['methods', f'{file}:min'], "Did you mean 'mine'?"),
      (['models', f'{tmp_path}/other.py:mine'], 'there is no file')):
    assert catalog.main(words) == 2
    line, = capsys.readouterr().err.splitlines()
    assert said in line


def test_a_line_ends_with_the_first_sentence():
  entries = [catalog.Entry('mine', f'Adds {word}. More of it.', (), ('x',))
             for word in ('i.e. a bit', 'much ' * 30)]
  *_, first, second = catalog.brief('methods', catalog.Group(
      '--method=NAME', tuple(entries))).splitlines()
  assert first == '  mine   Adds i.e. a bit.'
  assert second.endswith('much ...') and len(second) <= 99


def test_it_is_a_program(run_python):
  printed = run_python('import runpy, sys; '
                       'sys.argv = ["x", "list", "partitions"]; '
                       'runpy.run_module("fedjax_ssl", run_name="__main__")')
  assert 'dirichlet_capped' in printed
