"""A grid means the same cells everywhere, and bad text says where it is bad."""
from __future__ import annotations

import hashlib
from importlib import metadata
import pathlib

from hypothesis import given
from hypothesis import strategies as st
import pytest

from fedjax_ssl.cli import places
from fedjax_ssl.cli.sweep import cells as cells_lib
from fedjax_ssl.cli.sweep import grid

ROOT = pathlib.Path(__file__).resolve().parents[3]
DIGITS = 'script: experiments/digits_dirdir.py'
BAD = {
    'nothing': ('', 'no flagfile and no setting'),
    'only_seeds': ('seeds: 1', 'g.txt:1: the block names no flagfile'),
    'word': (f'{DIGITS}\nhello', "g.txt:2: 'hello' is none of"),
    'key': (f'{DIGITS}\nseed: 1', "'seed: 1' is none of"),
    'no_value': ('script:', 'g.txt:1: nothing after script'),
    'no_script': ('script: nowhere.py', 'there is no nowhere.py'),
    'two_scripts': (f'{DIGITS}\n{DIGITS}',
                    'g.txt:2: a block has one setting or script'),
    'no_flagfile': ('flagfile: no/*.flags', 'no file fits no/*.flags'),
    'seeds_word': (f'{DIGITS}\nseeds: a', 'seeds: a must be whole numbers'),
    'seeds_negative': (f'{DIGITS}\nseeds: -1', 'whole numbers from 0'),
    'seeds_twice': (f'{DIGITS}\nseeds: 1 1', 'a seed twice'),
    'seeds_lines': (f'{DIGITS}\nseeds: 0\nseeds: 1',
                    'g.txt:3: a block has one line `seeds:`, and has 0'),
    'seeds_comma': (f'{DIGITS}\nseeds: ,', 'seeds: , must be whole numbers'),
    'seeds_huge': (DIGITS + '\nseeds: ' + 5000 * '9', 'from 0 to 4294967295'),
    'flagfile_comma': (f'{DIGITS}\nflagfile: ,', 'names no file'),
    'null': (f'{DIGITS}\n--a=x\0y', "g.txt:2: '--a=x\\x00y' is no text"),
    'bytes': (f'{DIGITS}\n--a=\udcff', 'is no text'),
    'too_many': (DIGITS + ''.join(
        f'\n--{chr(97 + i)}=' + ' | '.join(map(str, range(16)))
        for i in range(6)), 'has 16777216 cells; 100000 is the most'),
    'flag': (f'{DIGITS}\n--=3', "'--=3' is not of the form"),
    'flag_spaces': (f'{DIGITS}\n--a b=3', 'not of the form'),
    'flag_twice': (f'{DIGITS}\n--a=1\n--a=2', 'g.txt:3: --a comes twice'),
    'value_twice': (f'{DIGITS}\n--a=1 | 1', '--a has the same value twice'),
    'value_empty': (f'{DIGITS}\n--a=1 | ', 'has no value'),
    'value_empty_inside': (f'{DIGITS}\n--a=1 | | 2', '--a= has no value'),
    'value_empty_first': (f'{DIGITS}\n--a= | 2', '--a= has no value'),
    'bare_empty': (f'{DIGITS}\n--a |', 'an empty alternative has no value'),
    'value_flag': (f'{DIGITS}\n--a=1 | --b=2', 'g.txt:2: --a has the value '
                   '--b=2, which looks like a flag'),
    'value_flag_first': (f'{DIGITS}\n--a=--b', 'looks like a flag'),
    'several_and_bars': (f'{DIGITS}\n--a=1 | 2 --b=3', 'has several flags and '
                         'alternatives; give every flag a line of its own'),
    'several_and_bars_behind': (f'{DIGITS}\n--a=1 --b=3 | 4', 'several flags'),
    'several_twice': (f'{DIGITS}\n--a=1 --b=2 --a=3', '--a comes twice'),
    'several_ours': (f'{DIGITS}\n--a=1 --seed=2', 'use a line `seeds:`'),
    'bare_ours': (f'{DIGITS}\n--a | --status', '--status is not for the grid'),
    'quote': ('flagfile: "a b', 'No closing quotation'),
    'setting': ('setting: digit_dirdir', 'g.txt:1: digit_dirdir is no setting; '
                'there are agents_iid'),
    'setting_twice': (f'{DIGITS}\nsetting: cifar_iid', 'one setting or script'),
    'scripts': ('script: experiments/*_dirdir.py', 'a block has one script, '
                'and experiments/*_dirdir.py fits '),
    'value_missing': (f'{DIGITS}\n--a=', 'has no value'),
    'bare': (f'{DIGITS}\n--a | b', 'b stands beside --a; give all'),
    'bare_and_not': (f'{DIGITS}\n--a | --a=true', '--a=true stands beside --a'),
    'workdir': (f'{DIGITS}\n--workdir=x', 'the sweep chooses the folders'),
    'seed': (f'{DIGITS}\n--seed=3', 'use a line `seeds:`'),
    'flagfile_flag': (f'{DIGITS}\n--flagfile=x', 'use a line `flagfile:`'),
    'cell_twice': (f'{DIGITS}\n---\n{DIGITS}', 'digits_dirdir comes twice'),
}


@pytest.mark.parametrize('brings', ['--import=mine.py', 'flagfile: '])
def test_code_of_ones_own_may_bring_the_setting(tmp_path, brings):
  if brings == 'flagfile: ':
    (tmp_path / 'a.flags').touch()
    brings += str(tmp_path / 'a.flags')
  cell, = grid.parse(f'setting: brought\n{brings}', 'g.txt')
  assert cell.setting == 'brought'


def test_settings_of_packages_are_told(monkeypatch):
  monkeypatch.setattr(metadata, 'entry_points', lambda group: [
      metadata.EntryPoint('theirs', 'package:setting', group)])
  cell, = grid.parse('setting: theirs', 'g.txt')
  assert cell.setting == 'theirs'
  with pytest.raises(grid.GridError, match='there are agents_iid, .*, theirs'):
    grid.parse('setting: thiers', 'g.txt')


@pytest.mark.parametrize('name', BAD)
def test_bad_text_is_one_line_that_names_the_place(name):
  text, words = BAD[name]
  with pytest.raises(grid.GridError) as info:
    grid.parse(text, 'g.txt')
  assert words in str(info.value) and '\n' not in str(info.value)


@pytest.mark.parametrize('option', [
    'dry_run', 'status', 'slots=2', 'retries=0', 'shard=0/2', 'out=x',
    'python=p', 'env=A=b'])
def test_options_of_the_sweep_are_not_flags_of_a_run(option):
  with pytest.raises(grid.GridError, match='an option of the sweep'):
    grid.parse(f'{DIGITS}\n--{option}')


@pytest.mark.parametrize('line', [
    '--a=b|c', '--a=b |c', '--a=b| c', '--a=b || c', '--a=b(x=1|2)',
    '--a=b(x=1|2) | c', '--a=1 | b|c', "--a=b(x='1'|'2')", '--a|--noa'])
def test_a_bar_without_spaces_is_refused(line):
  with pytest.raises(grid.GridError) as info:
    grid.parse(f'{DIGITS}\n{line}', 'g.txt')
  said = str(info.value)
  assert said.startswith('g.txt:2: --a') and 'are separated by ` | `' in said
  assert 'bar without spaces' in said and '\n' not in said


@pytest.mark.parametrize('line, args', [
    ("--a=b(x='1|2')", "--a=b(x='1|2')"), ('--a="b|c"', '--a=b|c'),
    ("--a='b|c'", '--a=b|c'), ('--a="it\'s|c"', "--a=it's|c")])
def test_a_bar_in_quotes_is_part_of_a_value(line, args):
  cell, = grid.parse(f'{DIGITS}\n{line}')
  assert cell.args == (args,)


@pytest.mark.parametrize('line, args', [
    ('--a=1 --b=2', ['--a=1', '--b=2']),
    ('--a   --nob --c=x y', ['--a', '--nob', '--c=x y']),
    ("--a=f(x='1 --b=2', y=3) --c=4", ["--a=f(x='1 --b=2', y=3)", '--c=4']),
    ('--a=f(x=1, --b=2) --c', ['--a=f(x=1, --b=2)', '--c']),
    ('--a=-1 -b', ['--a=-1 -b'])])
def test_flags_on_one_line_are_arguments_of_their_own(line, args):
  cell, = grid.parse(f'{DIGITS}\n{line}')
  assert cell.args == tuple(args)
  # They are as if each had a line of its own, name and all.
  apart = '\n'.join(args)
  assert grid.parse(f'{DIGITS}\n{apart}\n--z=1 | 2') == grid.parse(
      f'{DIGITS}\n{line}\n--z=1 | 2')


@pytest.mark.parametrize('folder', ['a b', 'a,b', '[ab]', '*', "it's"])
def test_files_with_odd_names_are_found(tmp_path, monkeypatch, folder):
  script = tmp_path / folder / 'mine.py'
  flagfile = tmp_path / folder / 'flagfiles' / 'mine.x.flags'
  for file in (script, flagfile, tmp_path / 'a' / 'mine.py'):
    file.parent.mkdir(parents=True, exist_ok=True)
    file.touch()
  for file in (flagfile, flagfile.with_name('mine.*.flags')):
    if file == flagfile or folder[0] not in '[*':
      cell, = grid.parse(f'flagfile: "{file}"')
      assert cell.args == (f'--flagfile={flagfile}',)
      assert cell.script == str(script)
  cell, = grid.parse(f'script: {script}')
  assert cell.script == str(script)
  # The same from the repository's root, wherever that is.
  monkeypatch.setattr(places, 'repository', lambda: tmp_path / folder)
  cell, = grid.parse('flagfile: flagfiles/*.flags')
  assert cell.args == (f'--flagfile={flagfile}',)


def test_the_product_in_order():
  cells = grid.parse(f"""# why
    {DIGITS}
    seeds: 0, 1
    --num_rounds=3
    --method=fixmatch(threshold=0.9) | fedavg
    --bounds | --nobounds""")
  assert len(cells) == 8 and len({c.name for c in cells}) == 8
  assert [c.args[-1] for c in cells] == ['--seeds=0'] * 4 + ['--seeds=1'] * 4
  first, *_, last = cells
  assert first.args == ('--num_rounds=3', '--method=fixmatch(threshold=0.9)',
                        '--bounds', '--seeds=0')
  assert last.name == 'digits_dirdir__method=fedavg__nobounds__seed=1'
  # What a shell would mistake is replaced, and then told apart by a hash.
  assert first.name.startswith(
      'digits_dirdir__method=fixmatch_threshold=0.9__bounds__seed=0__')
  assert not set(first.name) & set(' ()\'"|,/')


def test_a_cell_is_the_same_from_every_folder(tmp_path, monkeypatch):
  text = """flagfile: experiments/flagfiles/feddure/cifar_dirdir.uda.flags
    --method=uda(threshold=0.9) | fedavg
    seeds: 3
    --num_rounds="""
  monkeypatch.chdir(ROOT)
  here = grid.parse(f'{text}5')
  monkeypatch.chdir(tmp_path)
  there, longer = grid.parse(f'{text}5'), grid.parse(f'{text}9')
  assert [c.name for c in here] == [c.name for c in there] == [
      c.name for c in longer]
  marks = [cells_lib.fingerprint(c) for c in there]
  assert marks != [cells_lib.fingerprint(c) for c in longer]
  monkeypatch.chdir(ROOT)
  assert marks == [cells_lib.fingerprint(c) for c in here]


def test_a_cell_is_another_with_another_flagfile_inside(tmp_path):
  outer, inner = tmp_path / 'outer.flags', tmp_path / 'inner.flags'
  outer.write_text(f'--flagfile={inner}\n')
  def mark(text):
    inner.write_text(text)
    return cells_lib.fingerprint(grid.Cell(
        'x', '', (f'--flagfile={outer}',), 'digits_dirdir'))
  assert mark('--x=1\n') == mark('--x=1\n') != mark('--x=2\n')
  more = tmp_path / 'more.flags'
  outer.write_text(f'--flagfile={inner}\n--flagfile={more}\n')
  def marks(text, rest):
    more.write_text(rest)
    return mark(text)
  assert marks('--x=1', '0') != marks('--x=10', '')  # Where one ends counts.


def test_every_flagfile_finds_its_script():
  cells = grid.parse(
      'flagfile: experiments/flagfiles/*/*.flags\n---\n' + DIGITS)
  files = sorted((ROOT / 'experiments' / 'flagfiles').glob('*/*.flags'))
  assert len(cells) == len(files) + 1
  assert [c.name for c in cells[:-1]] == [f.stem for f in files]
  for cell in cells[:-1]:
    assert cell.setting == cell.name.split('.')[0] and not cell.script


def test_a_setting_is_the_cell_that_its_script_was():
  by_script, = grid.parse(DIGITS + '\n--x=1')
  by_name, = grid.parse('setting: digits_dirdir\n--x=1')
  assert by_name.name == by_script.name and not by_name.script
  # What sweeps stored before there were settings.
  assert cells_lib.fingerprint(by_name) == cells_lib.fingerprint(
      by_script) == hashlib.sha256(
          b'experiments/digits_dirdir.py\0--x=1').hexdigest()
  command = cells_lib.command('python', pathlib.Path('out'), by_name)
  assert command[:6] == [
      'python', '-P', '-m', 'fedjax_ssl', 'train', 'digits_dirdir']


def test_a_flagfile_elsewhere_belongs_to_a_setting(tmp_path):
  file = tmp_path / 'cifar_dirdir.mine.flags'
  file.touch()
  cell, = grid.parse(f'flagfile: {file}')
  assert cell.setting == 'cifar_dirdir' and not cell.script
  own = tmp_path.parent / 'cifar_dirdir.py'
  own.touch()
  cell, = grid.parse(f'flagfile: {file}')
  own.unlink()
  assert cell.script == str(own)


def test_a_flagfile_without_its_script(tmp_path):
  file = tmp_path / 'flagfiles' / 'unheard.of.flags'
  file.parent.mkdir()
  file.write_text('--num_rounds=1\n')
  with pytest.raises(grid.GridError, match='unheard.py, which does not exist'):
    grid.parse(f'flagfile: {file}')
  cell, = grid.parse(f'flagfile: {file}\n{DIGITS}')
  assert cell.script.endswith('digits_dirdir.py')


def test_letters_of_several_bytes_fit_a_folder():
  letter = '\u6f22'
  cells = grid.parse(f'{DIGITS}\n--x={letter * 110} | {letter * 111}')
  assert len({c.name for c in cells}) == 2
  assert max(len(c.name.encode()) for c in cells) < 140


def test_long_names_are_cut_and_still_differ():
  a, b = grid.parse(f'{DIGITS}\n--x={"a" * 300}1 | {"a" * 300}2')
  assert a.name != b.name and max(len(a.name), len(b.name)) < 140


@given(st.integers(1, 9))
def test_shards_are_a_partition(n):
  cells = grid.parse(f'{DIGITS}\nseeds: 0 1 2 3 4 5 6')
  parts = [grid.shard(cells, f'{i}/{n}') for i in range(n)]
  assert sorted(c.name for part in parts for c in part) == sorted(
      c.name for c in cells)


@pytest.mark.parametrize('text', ['1', '2/2', '-1/2', 'a/b', '0/0', '1/2/3'])
def test_bad_shards(text):
  with pytest.raises(grid.GridError, match='i/n'):
    grid.shard([], text)
