"""The file after a resume is the file of a run that was never stopped."""
import json
import os
import pathlib
import resource
import sys

from hypothesis import given, settings
from hypothesis import strategies as st
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from fedjax_ssl.training import metrics


def make_row(round_: int, **more) -> dict:
  rng = np.random.default_rng(round_)
  return {'loss': rng.random(dtype=np.float32), 'round': np.int32(round_),
          'accuracy': jnp.float32(rng.random()), 'bytes_up': np.float32(3e9),
          'per_class_accuracy': np.array([0.5, np.nan], np.float32), **more}


def write(folder: pathlib.Path, rounds, resume_round=None) -> bytes:
  with metrics.MetricsWriter(folder, resume_round) as writer:
    for round_ in rounds:
      writer.write(make_row(round_), {'seconds': 0.5})
  return (folder / metrics.METRICS).read_bytes()


def test_rows_come_back(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    rows = [writer.write(make_row(r), {'seconds': 1.5}) for r in (0, 5)]
    assert metrics.read(tmp_path) == rows  # On the disk before the close.
  assert metrics.read(tmp_path / metrics.METRICS) == rows
  assert metrics.read(tmp_path, metrics.TIMINGS) == [
      {'round': 0, 'seconds': 1.5}, {'round': 5, 'seconds': 1.5}]
  assert list(rows[0]) == [
      'round', 'accuracy', 'loss', 'per_class_accuracy', 'bytes_up']
  assert rows[0]['bytes_up'] == 3_000_000_000
  assert rows[0]['per_class_accuracy'] == [0.5, None]


def test_no_file_is_no_rows(tmp_path):
  assert metrics.read(tmp_path) == []


@pytest.mark.parametrize('stopped, restored', [
    (stopped, restored) for stopped in (0, 2, 4)
    for restored in (None, *range(stopped + 1))])
def test_resume_equals_straight_run(tmp_path, stopped, restored):
  (tmp_path / 'straight').mkdir()
  want = write(tmp_path / 'straight', range(6))
  write(tmp_path, range(stopped + 1))
  first = 0 if restored is None else restored + 1
  assert write(tmp_path, range(first, 6), restored) == want
  assert len(metrics.read(tmp_path, metrics.TIMINGS)) == 6


def test_rows_beyond_a_round_are_kept_beside(tmp_path):
  assert metrics.keep_beyond(tmp_path, 0) == ''  # There are none.
  for number in (1, 2):
    data = write(tmp_path, range(number, 4))
    assert metrics.keep_beyond(tmp_path, 3) == ''
    name = metrics.keep_beyond(tmp_path, 2)
    assert name == f'{metrics.METRICS}.replaced-{number}'
    assert (tmp_path / name).read_bytes() == data


def test_a_line_cut_anywhere_is_dropped(tmp_path, caplog):
  want = write(tmp_path, range(4))
  start = len(b''.join(want.splitlines(keepends=True)[:3]))
  for end in range(start + 1, len(want)):
    (tmp_path / metrics.METRICS).write_bytes(want[:end])
    assert len(metrics.read(tmp_path)) == 3
    caplog.clear()
    assert write(tmp_path, [3], 2) == want
    assert 'Line 4' in caplog.text


@pytest.mark.parametrize('garbage, place', [(b'[1', 3), *(
    (line, place) for place in (0, 1, 3)
    for line in (b'\xff\x00\n', b'7\n', b'{}\n', b'{"round": "x"}\n', b'\n')
)])
def test_garbage_lines_go_and_rows_stay(tmp_path, garbage, place):
  want = write(tmp_path, range(3))
  lines = want.splitlines(keepends=True)
  lines.insert(place, garbage)
  (tmp_path / metrics.METRICS).write_bytes(b''.join(lines))
  assert [r['round'] for r in metrics.read(tmp_path)] == [0, 1, 2]
  assert write(tmp_path, [], 2) == want


def test_rows_of_several_seeds_are_cut_together(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    for round_ in (1, 2):
      for seed in (7, 8):
        writer.write(make_row(round_, seed=seed), {'seconds': 1})
  with metrics.MetricsWriter(tmp_path, 1):
    pass
  for name in (metrics.METRICS, metrics.TIMINGS):
    rows = metrics.read(tmp_path, name)
    assert [(r['round'], r['seed']) for r in rows] == [(1, 7), (1, 8)]


@settings(max_examples=50, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False))
def test_float32_returns_to_the_same_bits(number):
  number = np.float32(number)
  line = metrics.to_line(metrics.to_plain({'round': 1, 'loss': number}))
  got = np.float32(json.loads(line)['loss'])
  assert got.tobytes() == number.tobytes()


@pytest.mark.parametrize('convert', [
    np.float32, jnp.float32, lambda x: np.asarray(x, np.float32),
    lambda x: float(np.format_float_positional(np.float32(x)))])
def test_text_depends_on_the_value_alone(convert):
  assert metrics.to_line(metrics.to_plain(
      {'loss': convert(0.1), 'round': 1})) == '{"round": 1, "loss": 0.1}\n'


@pytest.mark.parametrize('value, want', [
    (np.nan, None), (np.inf, None), (-np.inf, None), (None, None),
    (np.uint32(7), 7), (ml_dtypes.bfloat16(0.5), 0.5),
    (np.zeros((2, 1)), [[0.0], [0.0]]), ([1, 2.5], [1, 2.5])])
def test_plain_values(value, want):
  assert metrics.to_plain({'own': value}) == {'own': want}


@pytest.mark.parametrize('row, name', [
    ({'accuracy': 0.5}, 'round'),
    ({'round': -1}, 'round'),
    ({'round': 1.5}, 'round'),
    ({'round': True}, 'round'),
    ({'round': 1, 'accuracy': 50.0}, 'accuracy'),
    ({'round': 1, 'per_class_accuracy': [0.5, -0.5]}, 'per_class_accuracy'),
    ({'round': 1, 'bytes_up': 0.5}, 'bytes_up'),
    ({'round': 1, 'bytes_up': np.nan}, 'bytes_up'),
    ({'round': 1, 'own': 'text'}, 'own'),
    ({'round': 1, 'own': np.array(['text'])}, 'own'),
])
def test_rows_outside_the_schema_are_refused(tmp_path, row, name):
  with metrics.MetricsWriter(tmp_path) as writer:
    with pytest.raises(metrics.MetricsError, match=name):
      writer.write(row)
  assert metrics.read(tmp_path) == []


def test_full_disk_leaves_whole_rows(tmp_path):
  size = len(write(tmp_path, [1]))
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  with metrics.MetricsWriter(tmp_path, 1) as writer:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
      with pytest.raises(metrics.MetricsError, match='metrics.jsonl'):
        writer.write(make_row(2))
    finally:
      resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert [r['round'] for r in metrics.read(tmp_path)] == [1]
  write(tmp_path, [2], 1)
  assert [r['round'] for r in metrics.read(tmp_path)] == [1, 2]


def test_folder_that_cannot_be_written(tmp_path):
  with pytest.raises(metrics.MetricsError, match='missing'):
    metrics.MetricsWriter(tmp_path / 'missing')


def test_tensorboard_names_its_extra(tmp_path, monkeypatch):
  monkeypatch.setitem(sys.modules, 'tensorboardX', None)
  with pytest.raises(metrics.MetricsError, match=r'\[tensorboard\]'):
    metrics.MetricsWriter(tmp_path, track=['tensorboard'])


def test_tensorboard_gets_the_numbers(tmp_path, monkeypatch):
  seen: list[object] = []

  class Board:
    def __init__(self, folder, purge_step, **unused):
      seen.append((os.path.basename(folder), purge_step))

    def add_scalar(self, *args):
      seen.append(args)

    def flush(self):
      pass

    def close(self):
      seen.append('closed')

  fake = type(sys)('tensorboardX')
  monkeypatch.setattr(fake, 'SummaryWriter', Board, raising=False)
  monkeypatch.setitem(sys.modules, 'tensorboardX', fake)
  with metrics.MetricsWriter(tmp_path, 4, track=['tensorboard']) as writer:
    writer.write({'round': 5, 'seed': 3, 'loss': 0.5, 'epsilon': None,
                  'per_class_accuracy': [1.0]})
  assert seen == [('tensorboard', 0), ('seed_3/loss', 0.5, 5), 'closed']


@pytest.mark.parametrize('stopped', [None, 1, 2])
def test_forgetting_is_below_the_best_so_far_also_after_a_resume(
    tmp_path, stopped):
  learnt = {'a': (.5, .75, .25, .75, .8), 'b': (.1, .0, .0, .2, .1)}
  def go(first, last, resume_round=None):
    with metrics.MetricsWriter(tmp_path, resume_round) as writer:
      for i in range(first, last):
        for seed, values in enumerate(learnt.values()):
          writer.write({'round': i, 'seed': seed, 'accuracy': .5,
                        'labeled_accuracy': np.float32(values[i])})
  if stopped is None:
    go(0, 5)
  else:
    go(0, stopped + 2)
    go(stopped + 1, 5, stopped)
  rows = metrics.read(tmp_path)
  got = [[row['forgetting'] for row in rows if row['seed'] == seed]
         for seed in (0, 1)]
  assert got == [[0, 0, .5, 0, 0], [0, .1, .1, 0, .1]]


def test_without_labeled_accuracy_there_is_no_forgetting(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    assert 'forgetting' not in writer.write(make_row(0))
