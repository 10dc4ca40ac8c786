r"""All that an accelerator should be asked, in the order of its worth.

Slices run one after another, each in a process of its own, until --minutes are
over; the next call goes on where this one stopped, also after a signal. A slice
that is done is not run again, unless its command has changed. Everything lies
under --out: tables, the runs' folders, and what was timed and compiled; what
--quick makes lies in the folder quick there.

python experiments/benchmarks/accelerator.py --dry_run
python experiments/benchmarks/accelerator.py --data_dir=DIR --out=runs/gpu
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
import contextlib
import hashlib
import json
import math
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
from typing import Any, NamedTuple

from absl import app, flags

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from fedjax_ssl.cli import child
from fedjax_ssl.core import disk

FLAGS = flags.FLAGS

flags.DEFINE_string('out', 'runs/accelerator', 'Folder of all results.')
flags.DEFINE_string('data_dir', None, 'Folder of cifar10.npz; without it, '
                    "slices that need it are left out: the environment's "
                    'FEDJAX_SSL_DATA by default.')
flags.DEFINE_float('minutes', 8, 'Of this call.', lower_bound=0.1)
flags.DEFINE_bool('dry_run', False, 'Print the plan and stop.')
flags.DEFINE_bool('quick', False, 'Tiny sizes, to see that all runs, on a CPU '
                  'too; says nothing about speed.')
flags.DEFINE_list('only', [], 'Names of slices; none: all.')

_BENCHMARKS = 'experiments/benchmarks'
_TABLE = 'experiments/flagfiles/feddure'
_DATA = 'cifar10.npz'
_VARIABLE = 'FEDJAX_SSL_DATA'
DONE = 'done.json'
CUT = 'cut_off.json'  # Of a slice that must begin anew.
# A run that is told to stop saves first.
_GRACE = 30
_STOPPED = 143
# By how names of slices begin.
_XLA_FLAGS = {
    # Else a GPU's kernels come without the names of instructions.
    'profile': '--xla_gpu_enable_command_buffer=',
    'bits_deterministic': '--xla_gpu_deterministic_ops=true'}
# Flags that name a folder of results, which may lie anywhere.
_FOLDERS = '--out=', '--workdir='


class OutError(Exception):
  """A file of --out cannot be used; the message names it and says why."""


class Slice(NamedTuple):
  """A part of the plan.

  Attributes:
    name: of the slice and its folder.
    about: what it answers.
    minutes: what it is expected to take on one H100; not measured.
    command: to run at the repository's root.
    resumes: whether a process that is cut off goes on later; else the slice
      starts only where there is time for all of it, and one that took longer
      comes last in later calls that are no longer.
    needs_data: whether it reads cifar10.npz.
  """

  name: str
  about: str
  minutes: float
  command: list[str]
  resumes: bool = False
  needs_data: bool = False


def plan() -> list[Slice]:
  """The slices, the most useful first."""
  more = [] if FLAGS.quick else [*_speed(100), *_speed(5)]  # As 20, then.
  return [*_speed(20), *_bits(), *_profiles(), *_skew(), *_methods(), *more,
          *_dtypes(), *_cells()]


def _script(name: str, *words: str) -> list[str]:
  return [f'{_BENCHMARKS}/{name}.py', *words, *['--quick'] * FLAGS.quick]


def _speed(clients: int) -> Iterator[Slice]:
  """Times rounds in chosen forms; grouped ones compile for a minute."""
  for model in ('resnet9', 'cnn(width=32)'):
    for dtype in ('float32', 'bfloat16'):
      name = f'speed_{model.partition("(")[0]}_{dtype}_{clients}'
      sizes = [] if FLAGS.quick else [
          f'--model={model}', '--side=32', f'--clients={clients}',
          '--product_size=8192', '--nolax']
      yield Slice(
          name, 'which convolution is fastest; rounds and images a second of '
          f'{clients} clients', 2, _script(
              'round_speed', *sizes, f'--compute_dtype={dtype}',
              f'--out={_folder(name)}'))


def _bits() -> Iterator[Slice]:
  for name, about in (('bits', ''), ('bits_deterministic', ', asked of XLA')):
    yield Slice(
        name, f'whether repeated and continued runs have the same bits{about}',
        4, _script('same_bits', f'--out={_folder(name)}'))


def _profiles() -> Iterator[Slice]:
  for method in ('fixmatch', 'feddure'):
    name = f'profile_{method}'
    sizes = [] if FLAGS.quick else ['--model=resnet9', '--steps=20']
    yield Slice(name, 'the three largest items of a round', 2, _script(
        'profile_round', *sizes, f'--method={method}', '--top=3',
        f'--out={_folder(name)}'))


def _skew() -> Iterator[Slice]:
  sizes = [] if FLAGS.quick else [
      '--model=resnet9', '--side=32', '--rows=500', '--batch=50',
      '--cohort_size=50', '--alphas=0.1,100', '--chunk_sizes=5,16']
  yield Slice('skew', 'what lanes gain where clients are unequal', 4, _script(
      'growth', '--study=alpha', '--num_devices=1', *sizes,
      f'--out={_folder("skew")}'))


def _train(name: str, setting: str, *words: str) -> list[str]:
  tiny = ['--dataset=digits', '--model=cnn(width=2)', '--num_rounds=2',
          '--num_clients=4', '--cohort_size=2', '--labels_per_class=4',
          '--local_steps=1', '--strong=ra_mc(cutout=2)', '--seeds=0',
          '--norm=auto', '--labeled_batch=4', '--unlabeled_batch=4',
          '--labeled_view=flip_crop', '--eval_every=1', '--checkpoint_every=1']
  if 'agents' in setting:
    tiny += ['--num_labeled_clients=2', '--cohort_size=4']
  command = ['-m', 'fedjax_ssl', 'train', setting, *words,
             *(tiny if FLAGS.quick else []), '--nobounds']
  return [*command,
          f'--workdir={_folder(name) / f"run_{_digest(command)}"}']


def _digest(words: Sequence[str]) -> str:
  """A name for the flags of a run, those in its flagfiles included.

  A run with other flags would refuse to go on in the same folder.
  """
  texts = [(ROOT / word.partition('=')[2]).read_text() if word.startswith(
      '--flagfile=') else word for word in words]
  return hashlib.sha256('\0'.join(texts).encode()).hexdigest()[:8]


def _methods() -> Iterator[Slice]:
  for method, setting in (('fixmatch', 'cifar_dirdir'),
                          ('feddure', 'cifar_dirdir'),
                          ('fedssl', 'agents_iid')):
    name = f'method_{method}'
    yield Slice(name, f'{method} on CIFAR-10, 50 rounds, one seed', 4, _train(
        name, setting, '--dataset=cifar10', f'--method={method}',
        '--num_rounds=50', '--eval_every=10', '--seeds=0'),
                resumes=True, needs_data=True)


def _dtypes() -> Iterator[Slice]:
  for dtype in ('float32', 'bfloat16'):
    name = f'accuracy_{dtype}'
    yield Slice(name, 'whether bfloat16 costs accuracy', 6, _train(
        name, 'cifar_dirdir', f'--flagfile={_TABLE}/cifar_dirdir.fedavg_all'
        '.flags', f'--compute_dtype={dtype}', '--num_rounds=100'),
                resumes=True, needs_data=True)


def _cells() -> Iterator[Slice]:
  """Cells of the papers' tables, those worth most a minute first.

  The worth is a judgement: how many of the others are read beside a cell. Both
  bounds are by all, the paper's own method and FixMatch by most.
  """
  cells = [
      # Name, minutes, worth.
      ('fedavg_few', 8, 8), ('fedavg_all', 15, 8), ('fixmatch', 25, 4),
      ('feddure', 60, 6), ('feddure_official', 40, 2), ('uda', 25, 1),
      ('fixmatch_fedprox', 30, 1), ('fedmatch', 40, 1)]
  for cell, minutes, _ in sorted(cells, key=lambda c: c[1] / c[2]):
    name = f'cell_{cell}'
    yield Slice(name, f'FedDure, Table 1, CIFAR-10 (DIR, DIR): {cell}, 3 '
                'seeds', minutes, _train(
                    name, 'cifar_dirdir',
                    f'--flagfile={_TABLE}/cifar_dirdir.{cell}.flags'),
                resumes=True, needs_data=True)


def _folder(name: str) -> pathlib.Path:
  out = pathlib.Path(os.path.expanduser(FLAGS.out)).absolute()
  return out / 'quick' / name if FLAGS.quick else out / name


def is_done(part: Slice) -> bool:
  """Whether an earlier call finished the slice, with the command of today."""
  return _stored(part, DONE) is not None


def in_turn(parts: Sequence[Slice]) -> list[Slice]:
  """Returns the slices that are left, those cut off in vain behind the others.

  Each of these took longer than a call of so many minutes, or more.
  """
  def in_vain(part: Slice) -> bool:
    minutes = (_stored(part, CUT) or {}).get('minutes')
    return isinstance(minutes, (int, float)) and FLAGS.minutes <= minutes
  return sorted((part for part in parts if not is_done(part)), key=in_vain)


def _stored(part: Slice, name: str) -> Mapping[str, Any] | None:
  """What an earlier call wrote of a slice; None if damaged or of another."""
  path = _folder(part.name) / name
  try:
    if not os.path.isfile(path):  # To read a pipe would never end.
      return None
    found = json.loads(path.read_text())
    same = _without_places(found['command']) == _without_places(part.command)
  except (OSError, ValueError, KeyError, TypeError, AttributeError,
          RecursionError):
    return None
  return found if same else None


def _without_places(command: Sequence[str]) -> list[str]:
  """A command without where its folders are: --out may have been moved."""
  return [f'{word.partition("=")[0]}={pathlib.Path(word).name}'
          if word.startswith(_FOLDERS) else word for word in command]


def _environment(part: Slice) -> dict[str, str]:
  cache = _folder('cache')
  given = {'XDG_CACHE_HOME': str(cache),
           'JAX_COMPILATION_CACHE_DIR': str(cache / 'xla')}
  for start, words in _XLA_FLAGS.items():
    if part.name.startswith(start):
      given['XLA_FLAGS'] = ' '.join(filter(None, [
          os.environ.get('XLA_FLAGS'), words]))
  if FLAGS.data_dir:
    given['FEDJAX_SSL_DATA'] = os.path.expanduser(FLAGS.data_dir)
  return {**os.environ, **given}


def run(part: Slice, seconds: float) -> int:
  """Runs a slice, at most so long; returns the exit code of its process.

  What it prints goes to log.txt in its folder; --out says where that is. The
  process ends before this function does, also where a signal ends that.

  Raises:
    OutError: if the folder cannot be written.
  """
  log = _folder(part.name) / 'log.txt'
  command = [sys.executable, *part.command]
  start = time.monotonic()
  with _blaming_out():
    log.parent.mkdir(parents=True, exist_ok=True)
    if log.exists() and not log.is_file():
      raise OutError(f'{log} is no file.')
    with open(log, 'a') as file:
      print(f'$ {shlex.join(command)}', file=file)
  with open(log, 'a') as file:
    process = subprocess.Popen(
        command, cwd=ROOT, env=_environment(part), stdin=subprocess.DEVNULL,
        stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
        preexec_fn=child.end_with_parent)
    try:
      code = process.wait(max(seconds, 1))
    except subprocess.TimeoutExpired:
      code = _STOPPED
    finally:
      _end(process)
  if code == 0 or (code == _STOPPED and not part.resumes):
    _write(log.with_name(CUT if code else DONE), {
        'command': part.command, 'seconds': time.monotonic() - start,
        'minutes': FLAGS.minutes})
  return code


def _end(process: subprocess.Popen) -> None:
  """Asks a process to save and end, then kills it and its children."""
  if process.poll() is not None:
    return
  for number in (signal.SIGTERM, signal.SIGKILL):
    with contextlib.suppress(ProcessLookupError):
      os.killpg(process.pid, number)
    with contextlib.suppress(subprocess.TimeoutExpired):
      process.wait(_GRACE)


def _write(path: pathlib.Path, value: Any) -> None:
  with _blaming_out():
    disk.replace(path, (json.dumps(value, indent=2) + '\n').encode())


@contextlib.contextmanager
def _blaming_out() -> Iterator[None]:
  """Turns errors of files into `OutError`."""
  try:
    yield
  except OSError as error:
    raise OutError(f'{error.filename or "a file"} cannot be written: '
                   f'{error.strerror or error}.') from error


def chosen(parts: Sequence[Slice]) -> list[Slice]:
  """Those of --only, or all whose data are there.

  Raises:
    ValueError: for a name that no slice has, and for one whose data are not
      there.
  """
  known = {part.name: part for part in parts}
  for name in FLAGS.only:
    if name not in known:
      raise ValueError(f'--only={name}: allowed: {", ".join(known)}.')
  lack = _lack()
  if lack and FLAGS.data_dir:
    raise ValueError(f'{lack}.')
  for name in FLAGS.only:
    if lack and known[name].needs_data:
      raise ValueError(f'--only={name} needs {_DATA}; {lack}.')
  return [part for part in parts if (not FLAGS.only or part.name in FLAGS.only)
          and not (lack and part.needs_data)]


def _lack() -> str:
  """Says why slices that need data cannot run; '' if they can."""
  if FLAGS.quick:
    return ''
  given, word = FLAGS.data_dir, '--data_dir'
  if not given:
    given, word = os.environ.get(_VARIABLE), _VARIABLE
  if not given:
    return f'neither --data_dir nor {_VARIABLE} names its folder'
  there = os.path.isfile(os.path.join(os.path.expanduser(given), _DATA))
  return '' if there else f'{word}={given} holds no {_DATA}'


def main(argv: Sequence[str]) -> int:
  """Prints the plan, or works on it; returns 0 where nothing failed."""
  try:
    if len(argv) > 1:
      raise ValueError(f'{argv[1]!r} is no flag; flags begin with --.')
    if not math.isfinite(FLAGS.minutes):  # absl lets NaN pass any bound.
      raise ValueError(f'--minutes={FLAGS.minutes}: must be finite.')
    every = plan()
    parts = chosen(every)
  except ValueError as error:
    print(f'error: {error}', file=sys.stderr)
    return 2
  if not FLAGS.only and len(parts) < len(every):
    names = [part.name for part in every if part not in parts]
    print(f'Left out, as {_lack()}: {", ".join(names)}.', flush=True)
  if FLAGS.dry_run:
    _print_plan(parts)
    return 0
  try:
    with child.ending_on_signals():
      return _work(parts)
  except OutError as error:
    print(f'error: --out={FLAGS.out}: {error}', file=sys.stderr)
    return 2
  except child.Ended as ended:
    print(f'Ended by {ended}; the same command continues.', file=sys.stderr)
    return 128 + ended.number


def _work(parts: Sequence[Slice]) -> int:
  """Runs the slices that there is time for; returns 1 if any failed."""
  end = time.monotonic() + 60 * FLAGS.minutes
  failed = []
  for part in in_turn(parts):
    left = end - time.monotonic() - _GRACE * (not FLAGS.quick)
    if left < (30 if part.resumes else 60 * part.minutes) * (not FLAGS.quick):
      print(f'{part.name}: left for the next call', flush=True)
      continue
    code = run(part, left)
    words = {0: 'done', _STOPPED: 'goes on in the next call' if part.resumes
             else 'cut off; it comes last in calls that are no longer'}
    print(f'{part.name}: {words.get(code, f"failed, exit {code}")}; '
          f'{_folder(part.name) / "log.txt"}', flush=True)
    failed += [part.name] * (code not in words)
  return 1 if failed else 0


def _print_plan(parts: Sequence[Slice]) -> None:
  print('Minutes are expected for one H100, and were not measured.')
  for part in parts:
    print(f'{"done" if is_done(part) else f"{part.minutes:g} min":>7}  '
          f'{part.name}: {part.about}')
    print(f'         python {shlex.join(part.command)}')
  left = sum(part.minutes for part in parts if not is_done(part))
  print(f'{left:g} minutes are left.')


if __name__ == '__main__':
  app.run(lambda argv: sys.exit(main(argv)))
