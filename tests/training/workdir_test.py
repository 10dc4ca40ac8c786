"""One process, one configuration, and nothing changes on a refusal."""
import json
import os
import pathlib
import resource
import signal
import subprocess
import sys

import pytest

from fedjax_ssl.core import run_files
from fedjax_ssl.training import environment, workdir

REPOSITORY = pathlib.Path(__file__).parents[2]
FLAGS = {'method': 'fixmatch', 'num_rounds': 10, 'schedule_rounds': 10,
         'eval_every': 5, 'shape': (1, 2)}


def snapshot(folder: pathlib.Path) -> dict[str, bytes]:
  return {p.name: p.read_bytes() for p in folder.iterdir()
          if p.is_file() and p.name != run_files.LOCK}


def start(folder, allow=('num_rounds', 'eval_every'), **changes) -> dict:
  resumed = (folder / run_files.CONFIG).exists()
  with workdir.open_workdir(folder, FLAGS | changes, allow=allow) as opened:
    return workdir.read_config(opened.path)['flags'] | {'resumed': resumed}


def test_first_start_writes_the_configuration(tmp_path):
  folder = tmp_path / 'new' / 'run'
  assert not start(folder)['resumed']
  stored = workdir.read_config(folder)
  assert stored['flags'] == FLAGS | {'schedule_rounds': 10, 'shape': [1, 2]}
  assert {'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy',
          'python', 'fedjax_ssl', 'devices'} <= {*stored['environment']}


def test_the_same_start_again_changes_nothing(tmp_path):
  start(tmp_path)
  before = snapshot(tmp_path)
  assert start(tmp_path)['resumed']
  assert snapshot(tmp_path) == before


def test_other_flags_are_refused_and_named(tmp_path):
  start(tmp_path)
  before = snapshot(tmp_path)
  with pytest.raises(workdir.WorkdirError) as info:
    start(tmp_path, method='fedavg', shape=(1, 3), extra=None, eval_every=1)
  message = str(info.value)
  assert 'method fixmatch -> fedavg' in message
  assert 'shape [1, 2] -> [1, 3]' in message
  assert 'extra absent -> None' in message
  assert 'eval_every' not in message and '\n' not in message
  assert snapshot(tmp_path) == before


def test_a_flag_that_is_gone_is_named(tmp_path):
  start(tmp_path, extra=1)
  with pytest.raises(workdir.WorkdirError, match='extra 1 -> absent. This vers'
                     'ion has no extra; version .* made the run.'):
    start(tmp_path)


@pytest.mark.parametrize('name, what', [
    ('data_hash', 'a run on other data'), ('task', 'another run')])
def test_other_facts_are_named(tmp_path, name, what):
  with workdir.open_workdir(tmp_path, {}, facts={name: 'old'}):
    pass
  with pytest.raises(workdir.WorkdirError,
                     match=f'holds {what}: {name} old -> new'):
    workdir.open_workdir(tmp_path, {}, facts={name: 'new'})


def test_more_rounds_keep_the_horizon_of_the_first_start(tmp_path):
  start(tmp_path)
  got = start(tmp_path, num_rounds=30, eval_every=2)
  assert (got['num_rounds'], got['schedule_rounds'], got['eval_every']) == (
      30, 10, 2)
  stored = workdir.read_config(tmp_path)
  assert stored['restarts'] == [
      {'flags': {'num_rounds': 30, 'eval_every': 2}, 'environment': {}}]


@pytest.mark.parametrize('done, row, least', [
    (None, '', 1), (4, '', 5), (4, '{"round": 4}', 5), (10, '', 10),
    (4, '{"accuracy": 0.5}\n[]\n\\0', 5),
    (4, '{"round": 4, "accuracy": 0.5}', 4)])
def test_a_run_may_end_earlier_but_not_before_what_is_done(
    tmp_path, done, row, least):
  start(tmp_path)
  if done:
    (tmp_path / 'checkpoints' / str(done)).mkdir(parents=True)
    (tmp_path / run_files.ROWS).write_text(f'{row}\n')
  with pytest.raises(workdir.WorkdirError, match=(
      f'num_rounds 10 -> {least - 1}. Give num_rounds={least} or more')):
    start(tmp_path, num_rounds=least - 1)
  got = start(tmp_path, num_rounds=least)
  assert (got['num_rounds'], got['schedule_rounds']) == (least, 10)


def test_a_horizon_that_was_asked_for_stays(tmp_path):
  assert start(tmp_path, schedule_rounds=100)['schedule_rounds'] == 100
  assert start(tmp_path, schedule_rounds=100)['schedule_rounds'] == 100
  with pytest.raises(workdir.WorkdirError, match='schedule_rounds 100 -> 50'):
    start(tmp_path, schedule_rounds=50)


def test_another_machine_is_noted_not_refused(tmp_path, monkeypatch, caplog):
  start(tmp_path)
  now = environment.describe()
  monkeypatch.setattr(environment, 'describe', lambda: now | {'jax': '9.9'})
  start(tmp_path)
  assert f'jax {now["jax"]} -> 9.9' in caplog.text
  caplog.clear()
  start(tmp_path)
  assert not caplog.text
  assert workdir.read_config(tmp_path)['restarts'] == [
      {'flags': {}, 'environment': {'jax': '9.9'}}]


def test_a_finished_run_is_noted_only_if_a_round_is_trained(
    tmp_path, monkeypatch, caplog):
  """A round is, if the newest step turns out to be damaged."""
  start(tmp_path)
  (tmp_path / 'checkpoints' / '10').mkdir(parents=True)
  now = environment.describe()
  monkeypatch.setattr(environment, 'describe', lambda: now | {'jax': '9.9'})
  before = snapshot(tmp_path)
  with workdir.open_workdir(tmp_path, FLAGS | {'eval_every': 2},
                            allow=['eval_every']) as opened:
    assert snapshot(tmp_path) == before and not caplog.text
    opened.begin()
    opened.begin()
  stored = workdir.read_config(tmp_path)
  assert stored['flags']['eval_every'] == 2 and stored['restarts'] == [
      {'flags': {'eval_every': 2}, 'environment': {'jax': '9.9'}}]
  assert caplog.text.count('continues under other conditions') == 1
  start(tmp_path, ('bounds', 'eval_every'), bounds=True, eval_every=2)
  assert workdir.read_config(tmp_path)['flags']['bounds']


def test_a_run_names_all_that_it_was_on(tmp_path, monkeypatch):
  first = environment.describe() | {'commit': 'a' * 40, 'devices': '2 x cpu'}
  now = first
  monkeypatch.setattr(environment, 'describe', lambda: now)
  start(tmp_path)
  assert environment.throughout(workdir.read_config(tmp_path)) == first
  for changed in ({'devices': '1 x gpu'}, {'commit': 'b' * 40}, {},
                  {'devices': '2 x cpu'}):
    now = now | changed
    start(tmp_path)
  found = environment.throughout(workdir.read_config(tmp_path))
  assert found == first | {
      'commit': f'{"a" * 40}, then {"b" * 40}',
      'devices': '2 x cpu, then 1 x gpu, then 2 x cpu'}
  assert environment.commit(found) == 'aaaaaaa, then bbbbbbb'
  assert environment.commit({}) == 'unknown'


def test_facts_are_recorded_once(tmp_path):
  def tell(**facts):
    workdir.open_workdir(tmp_path, FLAGS, facts=facts).close()
  tell(partition_hash='abc')
  tell(partition_hash='abc', classes=10)
  before = snapshot(tmp_path)
  tell(classes=10)
  with pytest.raises(workdir.WorkdirError, match='partition_hash abc -> d'):
    tell(partition_hash='d', new=1)
  assert snapshot(tmp_path) == before
  assert workdir.read_config(tmp_path)['facts'] == {
      'partition_hash': 'abc', 'classes': 10}


def test_facts_that_differ_by_rounding_alone_are_those_of_the_first_start():
  mean = [0.3058024444990244, 0.5]
  known = {'task': {'mean': mean, 'old': 1}, 'hash': 'a'}
  now = {'task': {'mean': (0.30580244449902444, 0.5), 'new': 2}, 'hash': 'a'}
  assert workdir.as_known(known, now) == {
      'task': {'mean': mean, 'new': 2}, 'hash': 'a'}
  for other in ([0.3058024445, 0.5], [0.3058024444990244], 'b', None, 1):
    assert workdir.as_known(mean, other) == other


def test_second_opening_in_one_process_is_refused(tmp_path):
  with workdir.open_workdir(tmp_path, FLAGS):
    before = snapshot(tmp_path)
    with pytest.raises(workdir.WorkdirError, match=f'pid {os.getpid()} '):
      workdir.open_workdir(tmp_path, FLAGS)
    assert snapshot(tmp_path) == before
  assert start(tmp_path)['resumed']


def test_what_a_killed_process_was_writing_is_removed(tmp_path):
  start(tmp_path)
  before = snapshot(tmp_path)
  (tmp_path / f'{run_files.CONFIG}.123.partial').write_text('{"fla')
  start(tmp_path)
  assert snapshot(tmp_path) == before


def test_nothing_else_is_removed(tmp_path):
  start(tmp_path)
  (tmp_path / 'film.partial').write_text('mine')
  (tmp_path / 'a.1.partial').symlink_to('film.partial')
  (tmp_path / 'b.1.partial').mkdir()
  before = snapshot(tmp_path)
  start(tmp_path)
  assert snapshot(tmp_path) == before
  # Nor anything by a start that is refused.
  (tmp_path / 'c.1.partial').write_text('')
  before = snapshot(tmp_path)
  with pytest.raises(workdir.WorkdirError):
    start(tmp_path, method='fedavg')
  assert snapshot(tmp_path) == before


def test_a_refusal_frees_the_lock(tmp_path):
  start(tmp_path)
  for _ in range(2):
    with pytest.raises(workdir.WorkdirError, match='method'):
      start(tmp_path, method='uda')
  assert start(tmp_path)['resumed']


_HOLD = """
import sys, time
from fedjax_ssl.training import workdir
from tests.training import workdir_test
opened = workdir.open_workdir(sys.argv[1], workdir_test.FLAGS)
print('open', flush=True)
time.sleep(60)
"""


def test_two_processes(tmp_path):
  holder = subprocess.Popen(
      [sys.executable, '-c', _HOLD, str(tmp_path)], stdout=subprocess.PIPE,
      cwd=REPOSITORY, env=os.environ | {'PYTHONPATH': str(REPOSITORY)})
  try:
    assert holder.stdout is not None
    assert holder.stdout.readline() == b'open\n'
    with pytest.raises(workdir.WorkdirError, match=f'pid {holder.pid} '):
      start(tmp_path)
  finally:
    holder.send_signal(signal.SIGKILL)
    holder.communicate()
  assert start(tmp_path)['resumed']


@pytest.mark.parametrize('path', ['file', 'file/run'])
def test_a_file_in_the_way(tmp_path, path):
  (tmp_path / 'file').write_text('mine')
  with pytest.raises(workdir.WorkdirError, match='workdir=.*is a file') as info:
    start(tmp_path / path)
  assert '\n' not in str(info.value)
  assert (tmp_path / 'file').read_text() == 'mine'


@pytest.mark.parametrize('error, text', [
    ('EROFS', 'read-only'), ('EACCES', 'permission'), ('ENOSPC', 'full')])
def test_what_the_system_refuses(tmp_path, monkeypatch, error, text):
  import errno

  def refuse(*unused):
    raise OSError(getattr(errno, error), 'no')

  monkeypatch.setattr(os, 'fsync', refuse)
  with pytest.raises(workdir.WorkdirError, match=text):
    start(tmp_path)
  monkeypatch.undo()
  assert not start(tmp_path)['resumed']


@pytest.mark.parametrize('error', ['EROFS', 'EACCES'])
def test_a_finished_run_is_opened_where_nothing_can_be_written(
    tmp_path, monkeypatch, error):
  import errno
  start(tmp_path)
  usual = os.open
  def refuse(path, flags, *rest, **named):
    if flags & (os.O_WRONLY | os.O_RDWR) and str(path).startswith(
        str(tmp_path)):
      raise OSError(getattr(errno, error), 'no', str(path))
    return usual(path, flags, *rest, **named)
  monkeypatch.setattr(os, 'open', refuse)
  with pytest.raises(workdir.WorkdirError, match='cannot be used'):
    start(tmp_path)
  (tmp_path / 'checkpoints/10').mkdir(parents=True)
  before = snapshot(tmp_path)
  with workdir.open_workdir(tmp_path, FLAGS, allow=('num_rounds',)) as opened:
    assert opened.is_read_only
  for changes, words in (({'num_rounds': 11}, 'cannot be used'),
                         ({'method': 'fedavg'}, 'method fixmatch -> fedavg')):
    with pytest.raises(workdir.WorkdirError, match=words):
      start(tmp_path, **changes)
  assert snapshot(tmp_path) == before
  monkeypatch.undo()
  with workdir.open_workdir(tmp_path, FLAGS, allow=('num_rounds',)) as opened:
    assert not opened.is_read_only


def test_full_disk_leaves_no_half_configuration(tmp_path):
  soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
  resource.setrlimit(resource.RLIMIT_FSIZE, (100, hard))
  try:
    with pytest.raises(workdir.WorkdirError, match='workdir='):
      start(tmp_path)
  finally:
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
  assert not (tmp_path / run_files.CONFIG).exists()
  assert not start(tmp_path)['resumed']


@pytest.mark.parametrize('trace', ['metrics.jsonl', 'checkpoints'])
def test_results_without_configuration_are_refused(tmp_path, trace):
  if '.' in trace:
    (tmp_path / trace).write_text('{}')
  else:
    (tmp_path / trace).mkdir()
  with pytest.raises(workdir.WorkdirError, match=trace):
    start(tmp_path)
  assert [p.name for p in tmp_path.iterdir()] == [trace]


@pytest.mark.parametrize('exists', [True, False])
def test_a_lock_that_leads_elsewhere_is_not_followed(tmp_path, exists):
  target, folder = tmp_path / 'target', tmp_path / 'run'
  if exists:
    target.write_text('mine')
  folder.mkdir()
  (folder / run_files.LOCK).symlink_to(target)
  with pytest.raises(workdir.WorkdirError, match='lock is a symbolic link'
                     ) as info:
    start(folder)
  assert '\n' not in str(info.value)
  assert target.exists() == exists
  assert not exists or target.read_text() == 'mine'
  assert [p.name for p in folder.iterdir()] == [run_files.LOCK]


def test_other_files_do_not_matter(tmp_path):
  (tmp_path / 'notes.txt').write_text('mine')
  assert not start(tmp_path)['resumed']
  assert (tmp_path / 'notes.txt').read_text() == 'mine'


@pytest.mark.parametrize('text', ['', '{', '[]', '{"flags": 1}'])
def test_a_damaged_configuration_is_refused_and_kept(tmp_path, text):
  (tmp_path / run_files.CONFIG).write_text(text)
  with pytest.raises(workdir.WorkdirError, match='damaged'):
    start(tmp_path)
  assert (tmp_path / run_files.CONFIG).read_text() == text


@pytest.mark.parametrize('changes, said', [
    ({'flags': None}, '`flags` is no object'),
    ({'facts': [1]}, '`facts` is no object'),
    ({'environment': 'ab'}, '`environment` is no object'),
    ({'restarts': None}, '`restarts` is no list'),
    ({'restarts': [3]}, 'a restart is no object'),
    ({'restarts': [{'environment': []}]}, '`environment` of a restart is no'),
    ({'facts': {'code': 'x'}}, '`code` is no object'),
    ({'facts': {'code': None}}, '`code` is no object'),
    ({'facts': {'code': {'mine.py': 1}}}, '`code` has values that are no t'),
    ({'facts': {'choices': []}}, '`choices` is no object'),
    ({'facts': {'choices': {'method': 3}}}, '`method` of `choices` is no ob'),
    ({'flags': {'imports': -1}}, '`imports` is no list of texts'),
    ({'flags': {'imports': [[]]}}, '`imports` is no list of texts')])
def test_a_damaged_configuration_says_where(tmp_path, changes, said):
  file = tmp_path / run_files.CONFIG
  file.write_text(json.dumps({'flags': {}, 'facts': {}, 'environment': {},
                              'restarts': []} | changes))
  with pytest.raises(workdir.WorkdirError) as error:
    workdir.read_config(tmp_path)
  assert str(error.value).startswith(f'{file} is damaged: {said}')


def test_a_lock_that_is_a_folder_is_named(tmp_path):
  (tmp_path / run_files.LOCK).mkdir()
  with pytest.raises(workdir.WorkdirError, match='lock: Is a directory'):
    start(tmp_path)


def test_a_name_that_is_no_text_is_refused_before_training(tmp_path):
  with pytest.raises(workdir.WorkdirError, match='is not UTF-8') as caught:
    workdir.open_workdir(os.fsdecode(os.fsencode(tmp_path) + b'/\xff'), FLAGS)
  assert str(caught.value).isascii() and not [*tmp_path.iterdir()]


def test_bucket_addresses_are_refused():
  with pytest.raises(workdir.WorkdirError, match='gs://'):
    workdir.open_workdir('gs://bucket/run', FLAGS)
  assert not os.path.exists('gs:')


def test_configuration_must_be_json(tmp_path):
  with pytest.raises(workdir.WorkdirError, match='JSON'):
    start(tmp_path, bad=object())


def test_reading_without_a_run(tmp_path):
  with pytest.raises(workdir.WorkdirError, match='holds no run'):
    workdir.read_config(tmp_path)


def test_environment_is_json_and_stable():
  assert json.loads(json.dumps(environment.describe())) == (
      environment.describe())
