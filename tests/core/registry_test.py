"""Names that others add: by decorators, files and installed packages."""
from __future__ import annotations

from importlib import metadata
import math
import pathlib
import sys
import types

import pytest

from fedjax_ssl.core import checks, imports, registry


def make(**builders) -> registry.Registry:
  return registry.Registry('thing', {'old': lambda: 'old', **builders},
                           'test.things')


def test_a_registered_name_is_built_with_its_knobs():
  known = make()

  @known.register('mine')
  def mine(given, *, weight: float = 1.0):
    return given, weight

  assert registry.build('thing', 'mine(weight=7)', known, 'x') == ('x', 7)
  assert mine('y') == ('y', 1.0)  # What is decorated stays as it is.
  with pytest.raises(checks.FieldError, match="has no knob 'wait'"):
    registry.build('thing', 'mine(wait=7)', known, 'x')


@pytest.mark.parametrize('knobs', [
    {}, {'one': 1.5, 'two': "it's", 'three': None, 'four': (1, [2]),
         'five': -math.inf, 'six': math.inf,
         'seven': (math.inf,), 'eight': ([-math.inf, 2.0], 'a')}])
def test_a_written_text_is_read_as_what_it_was_made_of(knobs):
  assert registry.parse(registry.written('name', knobs)) == ('name', knobs)


def test_any_dict_can_be_added_to():
  rules: dict = {}
  registry.register(rules, 'median')(max)
  assert rules == {'median': max}
  with pytest.raises(ValueError, match="name 'median' is registered already"):
    registry.register(rules, 'median')(min)


def test_a_name_that_is_taken_is_refused_with_its_place():
  known = make()
  known.register('mine')(lambda: 1)
  line = sys._getframe().f_lineno - 1
  with pytest.raises(ValueError) as info:
    known.register('mine')(lambda: 2)
  assert f'{__file__}:{line}' in str(info.value)
  assert known['mine']() == 1


def test_a_notebooks_cell_may_be_run_again():
  known = make()
  for value in (1, 2):
    def cell(value=value):
      return value
    cell.__module__ = '__main__'
    known.register('mine')(cell)
  assert known['mine']() == 2


@pytest.mark.parametrize('name, error', [
    ('a-b', ValueError), ('', ValueError), (max, TypeError)])
def test_what_is_no_name_is_refused(name, error):
  with pytest.raises(error):
    make().register(name)


@pytest.mark.parametrize('text, name, knobs', [
    ('/a b/x.py:net(width=8)', '/a b/x.py:net', {'width': 8}),
    ('pack.age:Net', 'pack.age:Net', {}),
    ("mc(weak='x.py:f(a=1)')", 'mc', {'weak': 'x.py:f(a=1)'}),
    ('runs (copy)/x.py:net(width=8)', 'runs (copy)/x.py:net', {'width': 8}),
    ("./x(1).py:f(a='b:c')", './x(1).py:f', {'a': 'b:c'})])
def test_a_place_may_stand_before_a_name(text, name, knobs):
  assert registry.parse(text) == (name, knobs)


def test_what_is_given_by_place_is_no_knob():
  def build(task, width: int = 3):
    return task, width
  assert registry.build('thing', 'new', make(new=build), 1) == (1, 3)
  with pytest.raises(checks.FieldError, match='width by its place.*"\\*" bef'):
    registry.build('thing', 'new(width=4)', make(new=build), 1)


def test_needed_knobs_are_asked_for():
  def build(*, width: int):
    return width
  with pytest.raises(checks.FieldError, match="thing 'new' needs width"):
    registry.build('thing', 'new', make(new=build))


def test_defaults_of_the_caller_are_knobs_all_the_same():
  """They are what the text may set, and what not all need to take."""
  known = make(new=lambda *, width=1: width, needs=lambda *, width: width)
  def build(text):
    return registry.build('thing', text, known, defaults={'width': 5})
  assert [build(x) for x in ('new', 'needs', 'new(width=2)', 'needs(width=2)',
                             'old')] == [5, 5, 2, 2, 'old']
  with pytest.raises(checks.FieldError, match='Allowed: width'):
    build('new(wide=2)')


def write(folder: pathlib.Path, value: int, name: str = 'mine.py'
          ) -> pathlib.Path:
  """A file that registers `mine`, in `KNOWN`."""
  folder.mkdir(exist_ok=True)
  file = folder / name
  file.write_text(
      'from tests.core import registry_test\n'
      "@registry_test.KNOWN.register('mine')\n"
      f'def _(): return {value}\n'
      f'def plain(): return {value + 10}\n')
  return file


KNOWN = make()


def test_versions_of_one_file_live_beside_each_other(tmp_path):
  """As runs of both are read back in one process."""
  old, new = (write(tmp_path / str(value), value) for value in (1, 2))
  def value(text):
    return registry.build('thing', text, KNOWN)
  assert value(f'{old}:mine') == 1 and value('mine') == 1
  assert value(f'{new}:mine') == 2 and value(f'{old}:mine') == 1
  assert value(f'{new}:plain') == 12
  registry.import_place(str(new))
  assert value('mine') == 2
  registry.import_place(str(old))
  assert value('mine') == 1
  other = write(tmp_path, 3, 'other.py')
  with pytest.raises(ValueError, match='registered already, by .*mine.py:2'):
    imports.load(str(other))


def test_a_file_that_failed_is_imported_when_it_is_mended(tmp_path):
  file = tmp_path / 'mended.py'
  text = ('from tests.core import registry_test\n'
          "@registry_test.KNOWN.register('late')\n"
          'def late(): return 5\n')
  file.write_text(text + 'nothing\n')
  with pytest.raises(ValueError, match=f"'nothing'.*{file}:4"):
    imports.load(str(file))
  file.write_text(text)
  assert registry.build('thing', f'{file}:late', KNOWN) == 5


def test_a_file_finds_those_beside_it(tmp_path, monkeypatch):
  monkeypatch.setattr(sys, 'path', [*sys.path])
  (tmp_path / 'beside_plug.py').write_text('VALUE = 3\n')
  (tmp_path / 'a.py').write_text('import beside_plug\n'
                                 'def get(): return beside_plug.VALUE\n')
  assert registry.build('thing', f'{tmp_path}/a.py:get', make()) == 3
  assert sys.path[-1] == str(tmp_path)  # Behind all that is installed.


class Point:
  """An entry point as `importlib.metadata` has it."""

  def __init__(self, name, value):
    self.name, self.value = name, 'package:thing'
    self.dist = types.SimpleNamespace(name='their-package')
    self._value = value

  def load(self):
    if isinstance(self._value, Exception):
      raise self._value
    return self._value


def test_entry_points_are_loaded_when_a_name_is_not_found(monkeypatch):
  asked = []
  def entry_points(group):
    asked.append(group)
    return [Point('theirs', lambda: 'theirs'),
            Point('broken', ImportError('no libfoo'))]
  monkeypatch.setattr(metadata, 'entry_points', entry_points)
  known = make()
  assert registry.build('thing', 'old', known) == 'old' and not asked
  assert registry.build('thing', 'theirs', known) == 'theirs'
  assert {*asked} == {'test.things'} and 'theirs' in known
  with pytest.raises(checks.FieldError, match=(
      "'broken' of the package their-package cannot be loaded from "
      'package:thing: ImportError: no libfoo')):
    registry.build('thing', 'broken', known)
  with pytest.raises(checks.FieldError, match='Allowed: broken, old, theirs'):
    registry.build('thing', 'oldd', known)
  left_out = [*known.load_entry_points()]
  assert len(left_out) == 1 and 'their-package' in left_out[0]
