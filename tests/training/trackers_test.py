"""Trackers get each row once, however often a run is stopped."""
from __future__ import annotations

import json
import logging
import pathlib
import struct
from typing import Any

import pytest

from fedjax_ssl.training import metrics, trackers


def rows(*rounds: int, seeds=(0, 1)) -> list[dict[str, Any]]:
  return [{'round': r, 'seed': s, 'accuracy': (r + s) / 16, 'loss': None,
           'per_class_accuracy': [.1]} for r in rounds for s in seeds]


def train(folder: pathlib.Path, found, last=None, track=('place',)) -> None:
  """Writes rows as a run does that was restored at a round."""
  with metrics.MetricsWriter(folder, last, track=track,
                             config={'alpha': .5}) as writer:
    for row in found:
      writer.write(row)


@pytest.fixture
def place(monkeypatch):
  """A tracker that remembers; rows that fail are told by round."""
  found: dict[str, Any] = {'rows': {}, 'known': [], 'broken': set()}

  class Fake:

    def __init__(self, where):
      self.run = where.run
      found['known'].append(where.known)
      found['config'] = where.config

    def write(self, row):
      if row['round'] in found['broken']:
        raise OSError('no network')
      found['rows'].setdefault(self.run, []).append(
          (row['round'], row['seed']))

    def close(self):
      pass
  monkeypatch.setitem(trackers.PACKAGES, 'place', 'json')
  monkeypatch.setitem(trackers._OPEN, 'place', Fake)
  return found


EACH = [(r, s) for r in (1, 2, 3, 4) for s in (0, 1)]


@pytest.mark.parametrize('last', [1, 2])
def test_rows_that_are_measured_again_are_not_sent_again(tmp_path, place, last):
  train(tmp_path, rows(1, 2, 3)[:-1])  # Stopped between two seeds.
  train(tmp_path, rows(*range(last + 1, 5)), last)
  sent, = place['rows'].values()
  assert sent == EACH and place['known'] == [False, True]
  assert place['config'] == {'alpha': .5}


def test_what_did_not_arrive_is_sent_when_the_run_goes_on(
    tmp_path, place, caplog):
  place['broken'] = {2}
  with caplog.at_level(logging.WARNING, 'absl'):
    train(tmp_path, rows(1, 2, 3))
  assert len([x for x in caplog.messages if 'no network' in x]) == 1
  assert len(metrics.read(tmp_path)) == 6
  place['broken'] = set()
  train(tmp_path, rows(4), 3)
  sent, = place['rows'].values()
  assert sent == EACH


def test_a_tracker_that_comes_later_gets_all_rows(tmp_path, place):
  train(tmp_path, rows(1, 2), track=())
  train(tmp_path, rows(3, 4), 2)
  assert list(place['rows'].values()) == [EACH]


def test_a_run_that_starts_over_is_another_one_there(tmp_path, place):
  train(tmp_path, rows(1, 2))
  train(tmp_path, rows(1, 2, 3, 4))
  first, second = place['rows'].values()
  assert (first, second) == (EACH[:4], EACH)
  assert place['known'] == [False, False]


def test_a_damaged_position_begins_anew(tmp_path, place):
  train(tmp_path, rows(1, 2))
  (tmp_path / 'tracked_place.json').write_text('{"run": 1')
  train(tmp_path, rows(3, 4), 2)
  assert list(place['rows'].values()) == [EACH[:4], EACH]


def test_an_unknown_tracker_and_a_missing_package_are_named(
    tmp_path, monkeypatch):
  with pytest.raises(metrics.MetricsError, match="'aim' is none of tensorb"):
    train(tmp_path, [], track=['aim'])
  monkeypatch.setitem(trackers.PACKAGES, 'wandb', 'no_such_package')
  with pytest.raises(metrics.MetricsError, match=r"-e '\.\[wandb\]'"):
    train(tmp_path, [], track=['wandb'])
  assert not list(tmp_path.iterdir())


def histories(file: pathlib.Path) -> list[tuple[int, str, float]]:
  """(step, name, value) of a run of wandb: LevelDB's log of messages."""
  from wandb.proto import wandb_internal_pb2
  data, found, whole = file.read_bytes()[7:], [], b''
  while len(data) >= 7:  # Checksum, size, kind; then its bytes.
    _, size, kind = struct.unpack('<IHB', data[:7])
    whole += data[7:7 + size]
    data = data[7 + size:]
    if kind not in (1, 4):
      continue
    record = wandb_internal_pb2.Record.FromString(whole)
    whole = b''
    if record.WhichOneof('record_type') == 'history':
      step = record.history.step.num
      found += [(step, item.key or '/'.join(item.nested_key),
                 json.loads(item.value_json))
                for item in record.history.item]
  return [x for x in found if not x[1].startswith('_')]


def wanted() -> list[tuple[int, str, float]]:
  return sorted((r, f'seed_{s}/accuracy', (r + s) / 16) for r, s in EACH)


def test_wandb_has_each_row_once(tmp_path, monkeypatch):
  pytest.importorskip('wandb', reason='wandb is not installed')
  monkeypatch.setenv('WANDB_MODE', 'offline')
  train(tmp_path, rows(1, 2, 3), track=['wandb'])
  train(tmp_path, rows(2, 3, 4), 1, track=['wandb'])
  files = sorted(tmp_path.glob('wandb/offline-run-*/run-*.wandb'))
  assert len({file.name for file in files}) == 1  # One run, in two parts.
  assert sorted(sum(map(histories, files), [])) == wanted()


def test_mlflow_has_each_row_once(tmp_path, monkeypatch):
  mlflow = pytest.importorskip('mlflow', reason='mlflow is not installed')
  monkeypatch.delenv('MLFLOW_TRACKING_URI', raising=False)
  train(tmp_path, rows(1, 2, 3), track=['mlflow'])
  train(tmp_path, rows(2, 3, 4), 1, track=['mlflow'])
  client = mlflow.MlflowClient(f'sqlite:///{tmp_path}/mlflow.db')
  experiment = client.get_experiment_by_name('fedjax_ssl')
  run, = client.search_runs([experiment.experiment_id])
  assert run.data.params == {'alpha': '0.5'} and run.info.status == 'FINISHED'
  found = [(m.step, name, m.value) for name in run.data.metrics
           for m in client.get_metric_history(run.info.run_id, name)]
  assert sorted(found) == wanted()
