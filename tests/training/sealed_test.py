"""Rows are those that a checkpoint was saved with, or they are refused."""
from __future__ import annotations

from collections.abc import Callable
import json
import os
import pathlib
import random
import shutil

import numpy as np
import pytest

from fedjax_ssl.training import checkpoint, metrics
from fedjax_ssl.training.checkpoint import sealed

ROUNDS, SAVES = 10, (3, 6)
STOPPED = 8
SEEDS = (0, 1)


@pytest.fixture(scope='module', autouse=True)
def hurry():
  """The disk need not confirm anything here."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(os, 'fsync', lambda file: None)
    yield


def write(folder: pathlib.Path, first: int, last: int,
          done: int | None = None, saves: tuple[int, ...] = ()) -> None:
  """Measures rounds `first` to `last` as a run does, from a checkpoint."""
  steps = checkpoint.Checkpoints(folder / 'checkpoints')
  seals = None if done is None else steps.metadata(done)[sealed.FILES]
  with metrics.MetricsWriter(folder, done, seals=seals) as writer:
    for round_ in range(first, last + 1):
      for seed in SEEDS:
        values = np.random.default_rng([round_, seed]).random(4, np.float32)
        writer.write({'round': round_, 'seed': seed, 'accuracy': values[0],
                      'labeled_accuracy': values[1], 'own': values[2:]},
                     {'seconds': round_ / 4})
      if round_ in saves:
        steps.save(round_, {'x': np.int32(round_)},
                   {sealed.FILES: writer.seals()})


@pytest.fixture(scope='module')
def straight(tmp_path_factory) -> bytes:
  folder = tmp_path_factory.mktemp('straight')
  write(folder, 1, ROUNDS)
  return (folder / metrics.METRICS).read_bytes()


@pytest.fixture(scope='module')
def stopped(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('stopped')
  write(folder, 1, STOPPED, saves=SAVES)
  return folder


@pytest.fixture
def folder(stopped, tmp_path) -> pathlib.Path:
  return pathlib.Path(shutil.copytree(stopped, tmp_path / 'run'))


def rows_to(data: bytes, round_: int) -> bytes:
  return b''.join(data.splitlines(keepends=True)[:round_ * len(SEEDS)])


def flip(lines: list[bytes], i: int, draw: random.Random) -> None:
  places = [k for k, c in enumerate(lines[i]) if chr(c).isdigit()]
  k = draw.choice(places)
  other = draw.choice([c for c in b'0123456789' if c != lines[i][k]])
  lines[i] = lines[i][:k] + bytes([other]) + lines[i][k + 1:]


def remove(lines, i, draw):
  del lines[i]


def empty(lines, i, draw):
  lines[i] = b'\n'


def double(lines, i, draw):
  lines.insert(i, lines[i])


def shorten(lines, i, draw):
  lines[i] = lines[i][:draw.randrange(1, len(lines[i]) - 1)] + draw.choice(
      (b'', b'\n'))


DAMAGES: list[Callable] = [flip, remove, empty, double, shorten]


@pytest.mark.parametrize('seed', range(100))
def test_damage_is_healed_exactly_or_refused(stopped, tmp_path, straight,
                                             seed):
  draw = random.Random(seed)
  folder = pathlib.Path(shutil.copytree(stopped, tmp_path / 'run'))
  file = folder / metrics.METRICS
  lines = file.read_bytes().splitlines(keepends=True)
  row = draw.randrange(len(lines))
  DAMAGES[seed % len(DAMAGES)](lines, row, draw)
  damaged = b''.join(lines)
  file.write_bytes(damaged)
  vouched = rows_to(straight, SAVES[-1])
  if damaged.startswith(vouched):
    assert metrics.read(folder) == list(map(json.loads, vouched.splitlines()))
    write(folder, SAVES[-1] + 1, ROUNDS, SAVES[-1])
    assert file.read_bytes() == straight
    return
  assert row < SAVES[-1] * len(SEEDS)
  with pytest.raises(sealed.SealError) as unread:
    metrics.read(folder)
  with pytest.raises(metrics.MetricsError) as refused:
    write(folder, SAVES[-1] + 1, ROUNDS, SAVES[-1])
  assert str(unread.value) == str(refused.value)
  assert '\n' not in str(refused.value) and str(file) in str(refused.value)
  assert file.read_bytes() == damaged
  # What the message says leads to the bytes of the run without damage.
  steps = folder / 'checkpoints'
  if damaged.startswith(rows_to(straight, SAVES[0])):
    assert f'remove {steps / "6"} and give' in str(refused.value)
    assert 'from round 3.' in str(refused.value)
    shutil.rmtree(steps / '6')
    write(folder, SAVES[0] + 1, ROUNDS, SAVES[0])
  else:
    assert f'remove {steps} and give' in str(refused.value)
    shutil.rmtree(steps)
    write(folder, 1, ROUNDS)
  assert file.read_bytes() == straight


@pytest.mark.parametrize('change, words', [
    (lambda f: f.unlink(), 'is missing or empty'),
    (lambda f: f.write_bytes(b''), 'is missing or empty'),
    (lambda f: f.write_bytes(f.read_bytes()[:50]), 'ends after 50 of'),
    (lambda f: f.write_bytes(b'x' + f.read_bytes()[1:]), 'has other content')])
def test_a_file_that_is_not_the_one_is_named(folder, change, words):
  change(folder / metrics.METRICS)
  with pytest.raises(metrics.MetricsError, match=words):
    write(folder, 7, ROUNDS, 6)
  with pytest.raises(sealed.SealError, match=words):
    metrics.read(folder)


def test_lines_that_are_no_rows_are_dropped(folder, straight, caplog):
  file = folder / metrics.METRICS
  lines = file.read_bytes().splitlines(keepends=True)
  file.write_bytes(b''.join([lines[0], b'\n', *lines[1:4], b'[1\n',
                             *lines[4:]]))
  write(folder, 7, ROUNDS, 6)
  assert file.read_bytes() == straight
  assert 'Line 2' in caplog.text and 'Line 6' in caplog.text


def test_nothing_is_cut_before_both_files_are_checked(folder):
  for name in (metrics.METRICS, metrics.TIMINGS):
    file = folder / name
    before = {f.name: f.read_bytes() for f in folder.glob('*.jsonl')}
    file.write_bytes(b'x' + before[name][1:])
    damaged = {f.name: f.read_bytes() for f in folder.glob('*.jsonl')}
    with pytest.raises(metrics.MetricsError, match=name):
      write(folder, 7, ROUNDS, 6)
    assert damaged == {f.name: f.read_bytes() for f in folder.glob('*.jsonl')}
    file.write_bytes(before[name])


def test_a_run_can_do_without_its_times(folder, straight, caplog):
  file = folder / metrics.TIMINGS
  times = file.read_bytes()
  file.write_bytes(times.replace(b'0.5', b'0.6'))
  with pytest.raises(metrics.MetricsError, match='or remove it'):
    write(folder, 7, ROUNDS, 6)
  file.unlink()
  lost = {'round': 6, 'seconds': None}
  assert metrics.read(folder, metrics.TIMINGS) == [lost]
  for last in (8, ROUNDS):  # Stopped once more before the next checkpoint.
    write(folder, 7, last, 6)
    assert metrics.read(folder, metrics.TIMINGS) == [lost]
  assert 'times up to round 6 are unknown' in caplog.text
  assert file.read_bytes().splitlines()[1:] == times.splitlines()[12:16] + [
      b'{"round": 9, "seed": 0, "seconds": 2.25}',
      b'{"round": 9, "seed": 1, "seconds": 2.25}',
      b'{"round": 10, "seed": 0, "seconds": 2.5}',
      b'{"round": 10, "seed": 1, "seconds": 2.5}']
  assert (folder / metrics.METRICS).read_bytes() == straight


def spoil(folder: pathlib.Path, how: str) -> None:
  file = folder / metrics.METRICS
  data = file.read_bytes()
  if how == 'removed':
    file.unlink()
  elif how == 'emptied':
    file.write_bytes(b'')
  elif how == 'flipped':
    file.write_bytes(data.replace(b'accuracy": 0.', b'accuracy": 1.', 1))
  elif how == 'added to':
    file.write_bytes(data + b'{"round": 99, "accuracy": 1.0}\n')
  else:  # Replaced by a copy, which is no damage.
    shutil.copy(file, file.with_suffix('.copy'))
    file.with_suffix('.copy').replace(file)


@pytest.mark.parametrize('how', [
    'removed', 'emptied', 'flipped', 'added to', 'copied'])
def test_what_happens_to_it_meanwhile_is_mended_at_a_save(
    tmp_path, straight, caplog, how):
  with metrics.MetricsWriter(tmp_path) as writer:
    for line in straight.splitlines():
      row = json.loads(line)
      del row['forgetting']
      if row['round'] == 5 and row['seed'] == 0:
        spoil(tmp_path, how)
      if row['round'] == 7 and row['seed'] == 0:
        seal = writer.seals()[metrics.METRICS]
        assert (tmp_path / metrics.METRICS).read_bytes() == (
            rows_to(straight, 6))
      writer.write(row)
  assert (tmp_path / metrics.METRICS).read_bytes() == straight
  assert seal == sealed.seal(rows_to(straight, 6))
  assert ('written anew' in caplog.text) == (how != 'copied')


def test_a_folder_that_goes_away_ends_the_run(tmp_path):
  folder = tmp_path / 'run'
  folder.mkdir()
  with metrics.MetricsWriter(folder) as writer:
    writer.write({'round': 1, 'accuracy': 0.5})
    shutil.rmtree(folder)
    with pytest.raises(metrics.MetricsError, match='cannot be written'):
      writer.seals()


def test_steps_of_an_earlier_version_are_believed(folder):
  shutil.rmtree(folder / 'checkpoints')
  steps = checkpoint.Checkpoints(folder / 'checkpoints')
  steps.save(6, {'x': np.int32(6)}, {'seeds': [0]})
  assert len(metrics.read(folder)) == STOPPED * len(SEEDS)
  with metrics.MetricsWriter(folder, 6, seals=None) as writer:
    steps.save(7, {'x': np.int32(7)}, {sealed.FILES: writer.seals()})
  assert [r['round'] for r in metrics.read(folder)][-1] == 6


def test_steps_that_nobody_can_read_vouch_for_nothing(folder):
  for header in folder.glob('checkpoints/*/header/metadata'):
    header.write_text('{')
  with pytest.raises(sealed.SealError, match='None of the checkpoints'):
    metrics.read(folder)


def test_hashes_of_what_makes_a_run():
  facts = {'task': {'shape': (2, 3), 'rates': {1: .5}}, 'data': 'a'}
  flags = {'alpha': .5, 'num_rounds': 3, 'list': (1,)}
  one = sealed.identity(facts, flags, ('num_rounds',))
  facts_read, flags_read = json.loads(
      json.dumps([facts, flags | {'num_rounds': 9}]))
  assert one == sealed.identity(facts_read, flags_read, ['num_rounds'])
  said = {sealed.RUN: one}
  assert sealed.differing_facts(said, one) == ''
  assert sealed.differing_facts(said, sealed.identity(facts)) == ''
  assert sealed.differing_facts(said, sealed.identity(
      facts | {'data': 'b', 'new': 1})) == 'data'
  assert sealed.differing_facts(said, sealed.identity(
      facts, flags | {'alpha': 1}, ('num_rounds',))) == 'flags'


def test_a_step_of_another_run_is_refused(tmp_path, caplog):
  tree = {'x': np.int32(1)}
  one, other = ({'data': 'a', 'flags': 'c'}, {'data': 'b', 'flags': 'c'})
  checkpoint.Checkpoints(tmp_path, run=one).save(3, tree, {'seeds': [0]})
  steps = checkpoint.Checkpoints(tmp_path, run=other)
  with pytest.raises(checkpoint.CheckpointError,
                     match='another run: it differs in data') as refused:
    steps.restore(tree)
  assert '\n' not in str(refused.value) and str(tmp_path) in str(refused.value)
  for run in (one, {'flags': 'c'}, None):
    assert checkpoint.Checkpoints(tmp_path, run=run).restore(tree) == (3, tree)
  assert caplog.text == ''
  checkpoint.Checkpoints(tmp_path).save(4, tree)  # As by an earlier version.
  assert steps.restore(tree) == (4, tree)
  assert len(caplog.records) == 1 and 'earlier version' in caplog.text


def break_leaves(step: pathlib.Path) -> None:
  """Damages a step's arrays; its header stays as it was."""
  for file in step.glob('state/**/*'):
    if file.is_file():
      file.write_bytes(bytes(255 - b for b in file.read_bytes()))


def test_rows_are_those_of_the_newest_sound_step(folder, straight):
  """A run that finds a step damaged goes on from the one before it."""
  file = folder / metrics.METRICS
  older = rows_to(straight, SAVES[0])
  file.write_bytes(older + rows_to(straight, SAVES[0] + 1)[len(older):])
  with pytest.raises(sealed.SealError, match='ends after'):
    metrics.read(folder)  # The newest is sound.
  break_leaves(folder / 'checkpoints' / str(SAVES[1]))
  assert metrics.read(folder) == list(map(json.loads, older.splitlines()))
  assert metrics.read(folder, metrics.TIMINGS)
  # Rows that agree with no sound step are refused as ever.
  file.write_bytes(b'x' + older[1:])
  with pytest.raises(sealed.SealError, match='metrics'):
    metrics.read(folder)
