"""A signal ends an experiment wherever it is, in one line, with its code."""
from __future__ import annotations

import contextlib
import os
import pathlib
import random
import re
import shlex
import signal
import subprocess
import sys
import time

import pytest

from fedjax_ssl.running import settings
from fedjax_ssl.training import checkpoint
from tests.cli import launcher
from tests.thorough import wider

NUMBERS = [signal.SIGTERM, signal.SIGINT]
# Runs that would not end by themselves.
ARGS = (*launcher.SMALL, '--num_rounds=1000000', '--eval_every=0')
# The signal comes while something keeps the interpreter from a handler, or
# what a handler raises from the program.
HELD = {
    'collector': """
def hold():
  def callback(phase, info):
    gc.callbacks.remove(callback)
    os.kill(os.getpid(), NUMBER)
  gc.callbacks.append(callback)
  gc.collect()
""",
    'weak reference': """
def hold():
  class Thing: pass
  thing = Thing()
  watched = weakref.ref(thing, lambda _: os.kill(os.getpid(), NUMBER))
  del thing
""",
    'a long call into C': """
def hold():
  threading.Timer(0.3, os.kill, (os.getpid(), NUMBER)).start()
  hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)  # Minutes.
"""}
SCRIPT = """
import gc, hashlib, os, threading, weakref
from fedjax_ssl import cli
from fedjax_ssl.running import dealing, settings
NUMBER = {number}
{hold}
deal = dealing.two_pools('iid_count', 'iid_count')
def held(*args):
  hold()
  return deal(*args)
cli.run_setting(settings.Setting('held', '', '', held, dict(
    labels_per_class=10)))
"""


def line(number: int, folder: pathlib.Path | None = None) -> str:
  what = ('give the same command again' if folder is None else
          'the same command with '
          f'--workdir={shlex.quote(str(folder))} continues')
  return f'Stopped by {signal.Signals(number).name}; {what}.\n'


@pytest.mark.parametrize('number', NUMBERS)
@pytest.mark.parametrize('where', HELD)
def test_no_signal_is_swallowed(tmp_path, where, number):
  script = tmp_path / 'held.py'
  script.write_text(SCRIPT.format(number=int(number), hold=HELD[where]))
  started = launcher.start(tmp_path / 'run', *ARGS, script=script)
  code = started.wait(200)  # Else it would go on for longer, or for ever.
  assert (code, started.output()) == (128 + number, line(number))


def listens(started: launcher.Started) -> bool:
  """Whether handlers of all signals are in place, as the kernel tells."""
  file = pathlib.Path(f'/proc/{started.process.pid}/status')
  mask = re.search(r'SigCgt:\s*(\w+)', file.read_text())
  return mask is not None and all(
      int(mask[1], 16) >> number - 1 & 1 for number in NUMBERS)


@pytest.mark.skipif(sys.platform != 'linux', reason='no /proc')
@pytest.mark.parametrize('which', [[0, 5, 6], *wider([1, 2, 3, 4, 7])])
def test_random_moments(tmp_path, which):
  draw = random.Random(which[0])
  for i in which:
    number, folder = NUMBERS[i % 2], tmp_path / str(i)
    started = launcher.start(folder, *ARGS)
    # The last ones come when the run has said what it trains, or later.
    while not (started.output() if i > 5 else listens(started)):
      time.sleep(0.002)
    time.sleep(draw.uniform(0, 1))
    assert started.running
    os.kill(started.process.pid or 0, number)
    code, said = started.wait(), started.output()
    saved = checkpoint.Checkpoints(folder / 'checkpoints').latest()
    if saved is None:
      assert code == 128 + number and said.endswith(
          (line(number),) * (i < 6) + (line(number, folder),)), said
    else:
      assert code == 0 and f'Stopped at round {saved}; ' in said
      assert 'Stopped by' not in said
    assert 'Traceback' not in said and 'Results' not in said


@pytest.mark.parametrize('number', NUMBERS)
def test_imports_are_interrupted_in_one_line(tmp_path, number):
  # A stand-in for a module that takes long to import.
  (tmp_path / 'absl').mkdir()
  (tmp_path / 'absl' / '__init__.py').write_text(
      'import os, time\n'
      f'os.kill(os.getpid(), {int(number)})\n'
      'time.sleep(600)\n')
  done = subprocess.run(
      [sys.executable, str(launcher.DIGITS)], capture_output=True, text=True,
      env={'PYTHONPATH': str(tmp_path)}, check=False, timeout=300)
  assert (done.returncode, done.stdout, done.stderr) == (
      128 + number, '', line(number))


def alone(body: str, before: str = '', **options
          ) -> subprocess.CompletedProcess[str]:
  """Runs a few lines that listen, in a process without JAX.

  They go on after `send` when all has been done that the signal leads to.
  """
  text = ('import os, signal, sys, time\n'
          'from fedjax_ssl.running import stopping\n'
          f'{before}\n'
          'def catch_up():\n'
          '  stopping._caught_up.clear()\n'
          '  os.write(stopping._pipes[0][1], bytes([stopping._MARK]))\n'
          '  stopping._caught_up.wait()\n'
          'def send(number):\n'
          '  os.kill(os.getpid(), number)\n'
          '  catch_up()\n'
          'with stopping.listening():\n'
          + ''.join(f'  {x}\n' for x in body.splitlines()))
  return subprocess.run(
      [sys.executable, '-c', text], cwd=launcher.EXPERIMENTS, text=True,
      check=False, timeout=300, stderr=subprocess.PIPE, **options)


TRAINING = 'with stopping.saving() as trained:\n  trained()\n  '


@pytest.mark.parametrize('body, code, said', [
    # The loop has saved for the first, and no other one is heard.
    (f'{TRAINING}send(15); send(15); sys.exit(0)', 0, ''),
    (f'{TRAINING}sys.exit(0)\nsend(15)', 0, ''),
    # Nobody waits for a save who asks twice from a keyboard.
    (f'{TRAINING}send(15); send(2); print("late", file=sys.stderr)', 130,
     line(2)),
    # One that came after the loop's last look.
    (f'{TRAINING}send(2)\nprint("late", file=sys.stderr)', 130, line(2)),
    (f'{TRAINING}pass\nsend(15)\nprint("late", file=sys.stderr)', 143,
     line(15)),
    # What fails in training fails as it would without a signal.
    (f'try:\n  {TRAINING.replace(chr(10), chr(10) + "  ")}send(15); 1 / 0\n'
     'except ZeroDivisionError:\n  sys.exit(2)', 2, ''),
])
def test_in_training_the_loop_is_left_to_save(body, code, said):
  done = alone(body)
  assert (done.returncode, done.stderr) == (code, said)


@pytest.mark.parametrize('first', [False, True])
def test_a_terminal_that_closes_lets_the_loop_save(tmp_path, first):
  """What is printed after that goes nowhere, and fails nothing.

  A shell sends the signal first, and the terminal closes a moment later.
  """
  saved = tmp_path / 'saved'
  text = ('import fcntl, pathlib, sys, termios, time\n'
          'from fedjax_ssl.running import stopping\n'
          'fcntl.ioctl(0, termios.TIOCSCTTY, 0)\n'
          'with stopping.listening(), stopping.saving() as trained:\n'
          '  trained()\n'
          '  print("ready", flush=True)\n'
          '  while not stopping._heard: time.sleep(0.01)\n'
          '  time.sleep(0.5)\n'
          '  print("on", flush=True)\n'
          '  print("on", file=sys.stderr)\n'
          f'  pathlib.Path({str(saved)!r}).touch()\n'
          '  sys.exit(0)\n')
  terminal, end = os.openpty()
  started = subprocess.Popen(
      [sys.executable, '-c', text], cwd=launcher.EXPERIMENTS, stdin=end,
      stdout=end, stderr=end, start_new_session=True)
  os.close(end)
  # A line may come in parts.
  with open(os.dup(terminal), 'rb', buffering=0) as output:
    said = output.readline()
  if first:
    started.send_signal(signal.SIGHUP)
    time.sleep(0.2)
  os.close(terminal)
  assert (said, started.wait(300), saved.exists()) == (b'ready\r\n', 0, True)


def test_a_terminal_that_stays_is_told_of_a_hangup():
  text = ('import os, time\nfrom fedjax_ssl.running import stopping\n'
          'stopping.listen()\nos.kill(os.getpid(), 1)\ntime.sleep(600)\n')
  terminal, end = os.openpty()
  started = subprocess.Popen(
      [sys.executable, '-c', text], cwd=launcher.EXPERIMENTS, stdin=end,
      stdout=end, stderr=end, start_new_session=True)
  code = started.wait(300)
  os.close(end)
  said = b''
  with contextlib.suppress(OSError):  # So Linux says that this was all.
    while part := os.read(terminal, 1000):
      said += part
  os.close(terminal)
  assert (code, said.decode().replace('\r', '')) == (129, line(signal.SIGHUP))


@pytest.mark.parametrize('before, code, said', [
    ('SIG_DFL', 129, line(signal.SIGHUP)), ('SIG_IGN', 0, '')])
def test_nohup_lets_a_terminal_close(before, code, said):
  done = alone('send(1)', before=f'signal.signal(1, signal.{before})')
  assert (done.returncode, done.stderr) == (code, said)


def test_children_have_signals_of_their_own():
  done = alone(
      'source, sink = os.pipe()\n'
      'child = os.fork()\n'
      'if not child: os.write(sink, b"."); time.sleep(600)\n'
      'os.read(source, 1)\n'
      'os.kill(child, 15)\n'
      'code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])\n'
      'catch_up()\nos._exit(7 if code == -15 else 1)')
  assert (done.returncode, done.stderr) == (7, '')


def test_nobody_has_to_read():
  source, sink = os.pipe()
  done = alone('os.set_blocking(1, False)\n'
               'try:\n'
               '  while True: os.write(1, bytes(4096))\n'
               'except BlockingIOError: pass\n'
               'os.set_blocking(1, True)\n'
               'os.dup2(1, 2)\n'
               'send(15)', stdout=sink)
  os.close(source)
  os.close(sink)
  assert done.returncode == 143


def test_what_was_set_before_comes_back():
  text = ('import signal\nbefore = signal.getsignal(2)\n'
          'from fedjax_ssl.running import stopping\n'
          'import os\n'
          'source, sink = os.pipe()\n'
          'os.set_blocking(sink, False)\n'
          'for own in (-1, sink):  # An event loop has one.\n'
          '  signal.set_wakeup_fd(own)\n'
          '  with stopping.listening():\n'
          '    assert signal.getsignal(15) != signal.SIG_DFL\n'
          '  assert signal.getsignal(15) == signal.SIG_DFL\n'
          '  assert signal.getsignal(2) == before\n'
          '  assert signal.set_wakeup_fd(-1) == own\n')
  subprocess.run([sys.executable, '-c', text], cwd=launcher.EXPERIMENTS,
                 check=True)


def test_every_experiment_hears_before_it_imports():
  scripts = [s for s in launcher.EXPERIMENTS.glob('*.py')
             if 'cli.run_setting(' in s.read_text()
             and s.stem in settings.SETTINGS]
  assert {s.stem for s in scripts} == {*settings.SETTINGS}
  for script in scripts:
    found = re.findall(r'^(?:import|from) .*', script.read_text(), re.M)
    assert found == ['from fedjax_ssl import cli'], script
  loaded = subprocess.run(
      [sys.executable, '-c', 'import sys\nfrom fedjax_ssl import cli\n'
       'from fedjax_ssl.running import stopping\n'
       'print(*{m.partition(".")[0] for m in sys.modules} & '
       '{"absl", "numpy", "jax"})'], capture_output=True, text=True, check=True)
  assert not loaded.stdout.strip()
