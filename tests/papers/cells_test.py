"""Every published cell is a run: its flags are accepted, its numbers sound."""
from __future__ import annotations

import collections

from absl.testing import flagsaver
import pytest

from fedjax_ssl import config, methods, models
from fedjax_ssl.cli import train
from fedjax_ssl.core import choices
from fedjax_ssl.data import augment
from fedjax_ssl.papers import cells
from fedjax_ssl.running import runs, settings
from tests import toy

FLAGS = train.FLAGS
TABLES = cells.tables()
CELLS = {name: table.cells() for name, table in TABLES.items()}
# Deviations of a cell of which a run collapsed.
COLLAPSED = {
    'cifar_iiddir.semifl_server_svhn_250_alpha3': 40.1,
    'cifar_iid.semifl_server_svhn_250': 41.0,
    'cifar_iid.semifl_server_svhn_40': 13.3,
    'cifar_iid.fl2_server_fashion_40': 34.5}
# By their normalization.
TOYS = {'static': 'static', 'batch': 'conv'}
BOOK = """
title = "A paper"
paper = "Somebody, 2026"
runs = "3 runs"
cells = "{setting}.{method}{hard}"
words = {hard = "", knob = ""}
open = ["rounds"]

[flags]
dataset = "digits"
alpha = 0.5
seeds = "0,1"

[methods]
ours = {use = ["said"], flags = {method = "fixmatch{knob}"}}
base = "fedavg"

[parts]
said = {differs = ["all"]}
hard = {words = {hard = "_hard", knob = "(threshold=0.5)"}, flags = {alpha = 0.1}}
even = {flags = {alpha = ""}}

[[tables]]
name = "one"
title = "A table"
source = "Table 1"
first = ["Ours"]
first_columns = ["hard"]
columns = [
  {title = "easy", setting = "exp"},
  {title = "hard", setting = "exp", use = ["hard"]},
  {title = "hard, sent", setting = "exp", use = ["hard"], metric = "cost_up", scale = 1},
]
rows = [
  {title = "Base", method = "base", values = [20.0, "-", "-"], std = [1.0, "-", "-"]},
  {title = "Ours", method = "ours", values = [30.0, 40.0, 177.0]},
  {title = "Even", method = "base", use = ["even"], words = {hard = "_even"}, only = ["easy"]},
  {title = "Again", method = "base", values_of = "one: Ours", words = {hard = "_again"}, only = ["easy"]},
]
"""  # noqa: E501


@pytest.fixture
def book(tmp_path):
  """Writes a changed paper; returns its folder."""
  def write(old: str = '', new: str = ''):
    text = BOOK.replace(old, new, 1)
    assert not old or text != BOOK
    (tmp_path / 'paper.toml').write_text(text)
    return tmp_path
  return write


def test_flags_come_from_the_paper_to_the_row(book):
  table = cells.load('one', book())
  hard = next(c for c in table.cells() if c.name == 'exp.ours_hard')
  assert hard.flags == (
      '--dataset=digits', '--method=fixmatch(threshold=0.5)', '--alpha=0.1',
      '--seeds=0,1')
  assert (hard.differs, hard.open) == (('all',), ('rounds',))
  assert [n.value for n in hard.numbers] == [40.0, 177.0]  # One run fills both.
  even = next(c for c in table.cells() if c.name == 'exp.base_even')
  assert not even.flag('alpha') and even.flag('method') == 'fedavg'
  assert even.numbers[0].value == cells.UNPRINTED
  again = next(c for c in table.cells() if c.name == 'exp.base_again')
  assert again.numbers[0].value == 30.0
  assert [c.row for c in table.cells()] == [
      'Ours', 'Ours', 'Base', 'Even', 'Again']


@pytest.mark.parametrize('old, new, words', [
    ('title = "A paper"\n', '', "the paper lacks the key 'title'"),
    ('values = [20.0, "-", "-"]', 'values = [20.0]', '1 values for 3 columns'),
    ('values = [20.0,', 'values = ["?",', "'?' in values is no number"),
    ('values = [20.0,', 'values = [true,', 'True in values'),
    ('first = ["Ours"]', 'first = ["Mine"]', "'Mine' is first"),
    ('title = "Even"', 'title = "Base"', 'a row comes twice'),
    ('source =', 'sources =', "lacks the key 'source'"),
    ('method = "ours"', 'method = "our"', "method 'our' is not in [methods]"),
    ('use = ["even"]', 'use = ["odd"]', "'odd' is not in [parts]"),
    ('said = {', 'said = {use = ["said"], ', 'uses itself'),
    ('one: Ours', 'one: None', "no row 'one: None'"),
    ('std = [1.0, "-"', 'sdt = [1.0, "-"', "'sdt' is no key"),
    ('setting = "exp", use', 'set = "exp", use', "lacks the key 'setting'"),
    ('alpha = 0.1', 'alpha = "{low}"', "has no word 'low'"),
    ('fixmatch{knob}', 'fixmatch{0}', 'has bad braces'),
    ('fixmatch{knob}', 'fixmatch{knob', 'has bad braces'),
    ('fixmatch{knob}', 'fixmatch{knob.x}', 'has bad braces'),
    ('runs = "3 runs"', 'runs = 3', 'runs = 3 must be a text'),
    ('[[tables]]', '[[tables', 'paper.toml')])
def test_bad_files_are_named_in_one_line(book, old, new, words):
  with pytest.raises(ValueError) as caught:
    cells.load('one', book(old, new)).cells()
  assert words in str(caught.value)
  assert len(str(caught.value).splitlines()) == 1


def test_what_is_misspelled_has_neighbours(book):
  table = cells.load('one', book())
  with pytest.raises(ValueError, match="--row=our is not in one; near: 'Ours'"):
    table.choose(['our'])
  with pytest.raises(ValueError, match="--column=Hard .*near: 'hard'"):
    table.choose([], ['Hard'])
  with pytest.raises(ValueError, match="near: 'hard', 'hard, sent'"):
    table.choose([], ['har'])
  with pytest.raises(ValueError, match="there are 'Base', 'Ours', 'Even'"):
    table.choose(['xyz'])
  with pytest.raises(ValueError, match="--table=won does not exist; near: 'on"):
    cells.load('won', book())
  assert [c.name for c in table.choose([], ['hard, sent'])] == ['exp.ours_hard']


@pytest.mark.parametrize('name', TABLES)
def test_rows_and_columns_are_complete(name):
  """And numbers are what they can be."""
  table = TABLES[name]
  filled = sum(len(cell.columns) for cell in CELLS[name])
  places = [(i, j) for i in range(len(table.rows))
            for j in range(len(table.columns))]
  assert filled == sum(table.value(i, j)[0] != cells.NONE for i, j in places)
  for cell in CELLS[name]:
    for number in cell.numbers:
      if not isinstance(number.value, str):
        # Costs are in percent of a model one way, and two are sent at most.
        most = 100 if number.metric.endswith('accuracy') else 200
        assert 0 < number.value <= most, (cell.name, number)
      assert number.std is None or (
          not isinstance(number.value, str)
          and (0 <= number.std < 12 or number.std == COLLAPSED.get(cell.name)))


def test_cells_of_one_name_are_one_run():
  flags = collections.defaultdict(set)
  for found in CELLS.values():
    for cell in found:
      flags[cell.name].add((cell.setting, frozenset(cell.flags)))
  assert not {name for name, runs in flags.items() if len(runs) > 1}
  assert len(flags) > 600


def test_the_headline_is_short_and_each_pattern_finds_a_cell():
  names = [cell.name for cell in cells.headline()]
  assert 40 < len(names) <= 80
  assert len({*names}) == len(names)
  assert {'cifar_dirdir.feddure', 'cifar_dirdir.fixmatch'} <= {*names}


def test_what_trains_is_that_of_the_paper_and_not_of_the_setting():
  """A setting may have defaults of its own, of another paper."""
  plain = {name: option.default for name, option in config.OPTIONS.items()}
  for found in CELLS.values():
    for cell in found:
      if not cell.missing:
        told = {flag.removeprefix('--').split('=')[0] for flag in cell.flags}
        taken = {name for name, value in
                 settings.SETTINGS[cell.setting].defaults.items()
                 if value != plain[name]} - told
        # Labels that are counted as a share are not counted by class as well.
        assert taken <= ({'labels_per_class'} if 'labeled_fraction' in told
                         else set()), cell.name


@pytest.mark.parametrize('paper', cells.papers())
def test_every_cell_can_be_run(paper):
  """The program takes its flags, and they name what there is."""
  made = set()
  for name, table in TABLES.items():
    for cell in CELLS[name] if table.paper == paper else ():
      if cell.missing:
        continue
      with flagsaver.flagsaver():
        for flag, value in settings.SETTINGS[cell.setting].defaults.items():
          FLAGS.set_default(flag, value)
        FLAGS(['script', *cell.flags])
        told = train.options()
        runs.check_read(settings.SETTINGS[cell.setting], told)
        assert FLAGS.cohort_size <= FLAGS.num_clients, cell.name
        assert told.all_seeds == cell.seeds() == [*range(len(cell.seeds()))]
        choices.resolved(FLAGS.model, models.MODELS)
        assert FLAGS['dataset'].present
        what = told.full_method, told.norm, told.labels_at
        if what not in made:
          made.add(what)
          methods.make(told.full_method, toy.task(
              TOYS.get(told.norm, 'linear'), labels_at=told.labels_at))
          augment.make_weak(FLAGS.weak)
          augment.make_weak(FLAGS.labeled_view or FLAGS.weak)
          augment.make_strong(FLAGS.strong)
  assert made
