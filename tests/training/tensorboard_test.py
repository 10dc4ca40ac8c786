"""TensorBoard gets the rows' numbers."""
from __future__ import annotations

import pathlib
import struct

import pytest

from fedjax_ssl.training import metrics

pytest.importorskip('tensorboardX', reason='tensorboardX is not installed')


def events(folder: pathlib.Path) -> list[tuple[str, int, float]]:
  """(tag, round, value) of all event files, in the order of writing."""
  from tensorboardX.proto import event_pb2
  found = []
  for file in sorted((folder / 'tensorboard').glob('events.*')):
    data = file.read_bytes()
    while data:  # Length, its checksum, the event, its checksum.
      size, = struct.unpack('<Q', data[:8])
      event = event_pb2.Event.FromString(data[12:12 + size])
      data = data[size + 16:]
      found += [(v.tag, event.step, v.simple_value)
                for v in event.summary.value]
  return found


def test_numbers_arrive_by_seed(tmp_path):
  with metrics.MetricsWriter(tmp_path, track=['tensorboard']) as writer:
    for seed in (0, 1):
      writer.write({'round': 5, 'seed': seed, 'accuracy': .25 + seed / 2,
                    'loss': None, 'per_class_accuracy': [.1, .2]})
  assert events(tmp_path) == [('seed_0/accuracy', 5, .25),
                              ('seed_1/accuracy', 5, .75)]


def test_without_the_flag_there_is_no_folder(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write({'round': 5, 'accuracy': .25})
  assert not (tmp_path / 'tensorboard').exists()


def test_a_resume_doubles_no_event(tmp_path):
  rows = [{'round': r, 'accuracy': r / 8} for r in (1, 2, 3, 4)]
  with metrics.MetricsWriter(tmp_path, track=['tensorboard']) as writer:
    for row in rows[:3]:
      writer.write(row)
  with metrics.MetricsWriter(tmp_path, 1, track=['tensorboard']) as writer:
    for row in rows[1:]:
      writer.write(row)
  assert events(tmp_path) == [('accuracy', r, r / 8) for r in (1, 2, 3, 4)]


def test_a_board_of_an_older_version_goes_on(tmp_path):
  rows = [{'round': r, 'accuracy': r / 8} for r in (1, 2)]
  with metrics.MetricsWriter(tmp_path, track=['tensorboard']) as writer:
    writer.write(rows[0])
  (tmp_path / 'tracked_tensorboard.json').unlink()
  with metrics.MetricsWriter(tmp_path, 1, track=['tensorboard']) as writer:
    writer.write(rows[1])
  assert events(tmp_path) == [('accuracy', r, r / 8) for r in (1, 2)]
