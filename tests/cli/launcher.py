"""Starts experiments as processes of their own, in tenths of a second.

A server that has imported everything, and has not started JAX, is forked for
each of them: what is tested is what a user starts, but for the imports.
"""
from __future__ import annotations

import contextlib
import copy
import errno
import gc
import hashlib
import io
import json
import multiprocessing
import os
import pathlib
import resource
import runpy
import subprocess
import sys
import tempfile
import traceback
from typing import Any

import jax

from fedjax_ssl import cli

EXPERIMENTS = pathlib.Path(__file__).resolve().parents[2] / 'experiments'
DIGITS = EXPERIMENTS / 'digits_dirdir.py'
# A linear model on 6 clients: a round takes a hundredth of a second.
SMALL = (
    '--model=linear', '--nobounds', '--num_clients=6', '--cohort_size=3',
    '--local_steps=2', '--unlabeled_batch=20', '--strong=none',
    # Runs of other lengths are then the same as far as they go.
    '--lr_schedule=constant',
    '--method=fixmatch(threshold=0.3, keep_local=True)', '--seeds=0,1',
    # A third of the time goes into programs for several; see `ON_ALL`.
    '--num_devices=1')
# As most users start it.
ON_ALL = SMALL[:-1]

_context = multiprocessing.get_context('forkserver')
_context.set_forkserver_preload([
    'tests.cli.launcher', 'fedjax_ssl.cli.train', 'fedjax_ssl.running.runs',
    'orbax.checkpoint',
    'sklearn.datasets', 'matplotlib.figure', 'matplotlib.backends.backend_agg'])


def _run(script: str, args: list[str], logs: list[str], largest: int,
         place: str = '') -> None:
  """Runs a script with its output in `logs`; exits as it does.

  Without a script it is the command `fedjax-ssl`. A second log is for what goes
  to standard error.
  """
  if largest:
    resource.setrlimit(resource.RLIMIT_FSIZE, (largest, largest))
  if place:
    os.chdir(place)
  files = [os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for log in logs]
  os.dup2(files[0], 1)
  os.dup2(files[-1], 2)
  gc.freeze()  # What was forked stays; it need not be searched.
  if not largest:  # All need the same small programs, so those are kept too.
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
  sys.stdout = open(1, 'w', buffering=1, closefd=False)
  sys.stderr = open(2, 'w', buffering=1, closefd=False)
  sys.argv = [script, *args]
  code: Any = 0
  try:
    if script:
      runpy.run_path(script, run_name='__main__')
    else:
      code = cli.main()
  except SystemExit as error:
    code = error.code or 0
  except BaseException:
    traceback.print_exc()
    code = 1
  sys.stdout.flush()
  sys.stderr.flush()
  # As a script that ends, without what a forked copy would tear down.
  os._exit(code if isinstance(code, int) else 1)


class Full(io.StringIO):
  """An output on a disk without room."""
  name = '<full>'

  def flush(self) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class Started:
  """A running experiment."""

  def __init__(self, logs: list[pathlib.Path], args: list[str],
               script: pathlib.Path | None, largest: int = 0,
               place: str = ''):
    """Starts it; see `start` and `call`."""
    self._log = logs[0]
    self.process = _context.Process(
        target=_run, args=(str(script or ''), args, [*map(str, logs)], largest,
                           place),
        daemon=True)
    self.process.start()

  @property
  def running(self) -> bool:
    """Whether it has not ended."""
    return self.process.is_alive()

  def wait(self, timeout: float = 400) -> int:
    """Its exit code, negative for a signal."""
    self.process.join(timeout)
    if self.process.is_alive():
      self.process.kill()
      raise AssertionError(f'still running:\n{self.output()}')
    return int(self.process.exitcode or 0)

  def output(self) -> str:
    """What it has printed, errors included."""
    with contextlib.suppress(FileNotFoundError):
      return self._log.read_text()
    return ''


def start(workdir: pathlib.Path, *args: str,
          script: pathlib.Path = DIGITS, largest: int = 0) -> Started:
  """Starts an experiment.

  Args:
    workdir: its folder; `<workdir>.log` gets what it prints.
    *args: its other flags.
    script: which.
    largest: bytes that a file may hold, as on a disk that is full; 0 is any.
  """
  log = workdir.with_name(f'{workdir.name}.log')
  return Started([log], [f'--workdir={workdir}', *args], script, largest)


_HELD = """
import pathlib, time
from fedjax_ssl import cli
from fedjax_ssl.running import stopping
from fedjax_ssl.training import checkpoint, runner

go = pathlib.Path({go!r})
save, advance = checkpoint.Checkpoints.save, runner.Sequential.advance

def held_save(self, round_, *args):
  save(self, round_, *args)
  while round_ >= {round_} and not stopping._heard and not go.exists():
    time.sleep(0.01)

def held_advance(self, done, count):
  while not {round_} and not go.exists():
    time.sleep(0.01)
  advance(self, done, count)

checkpoint.Checkpoints.save = held_save
runner.Sequential.advance = held_advance
cli.run_setting({setting!r})
"""


def held(folder: pathlib.Path, round_: int) -> pathlib.Path:
  """Writes a script like `DIGITS` that waits once it has saved a round.

  A run of a few rounds could be over before a busy machine comes to what is to
  happen in it. It goes on when `folder` holds `go`, or when it hears a signal
  after which it has rounds to save.

  Args:
    folder: where to write.
    round_: which; 0 waits before the first one.
  """
  script = folder / 'held.py'
  script.write_text(_HELD.format(
      go=str(folder / 'go'), round_=round_, setting=DIGITS.stem))
  return script


def run(workdir: pathlib.Path, *args: str, script: pathlib.Path = DIGITS
        ) -> str:
  """Runs an experiment to its end; returns what it printed.

  Raises:
    AssertionError: if it exits non-zero.
  """
  started = start(workdir, *args, script=script)
  code = started.wait()
  assert code == 0, f'exit {code}:\n{started.output()}'
  return started.output()


def call(*args: str, place: str = '') -> subprocess.CompletedProcess[str]:
  """Runs `fedjax-ssl` with these words to its end, whatever its exit code.

  Args:
    *args: the words.
    place: the folder that it is started in; '' is this process's.
  """
  with tempfile.TemporaryDirectory() as folder:
    logs = [pathlib.Path(folder) / name for name in ('out', 'err')]
    code = Started(logs, [*args], None, place=place).wait()
    return subprocess.CompletedProcess(
        [*args], code, *(log.read_text() for log in logs))


def header(folder: pathlib.Path, round_: int) -> dict[str, Any]:
  """What a step says it holds, apart from the times that went before it.

  Every leaf's name, the hash of all bytes, the run's hashes, and those of
  metrics.jsonl.
  """
  said = json.loads((folder / 'checkpoints' / str(round_) / 'header'
                     / 'metadata').read_text())
  del said['sha256'], said['metadata']['files']['timings.jsonl']
  return said


def but_for_run(found: dict[str, Any]) -> dict[str, Any]:
  """The same of runs that began with other rounds: their schedules differ."""
  found = copy.deepcopy(found)
  del found['checkpoint']['metadata']['run']
  return found


def fingerprints(folder: pathlib.Path) -> dict[str, str]:
  """The hash of each file below a folder, by its path."""
  return {
      str(path.relative_to(folder)):
          hashlib.sha256(path.read_bytes()).hexdigest()
      for path in sorted(folder.rglob('*')) if path.is_file()}
