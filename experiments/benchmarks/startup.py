r"""Seconds to the first round of the quickstart, cold and warm.

Runs `experiments/digits_dirdir.py` as a user does, until it reports its first
round, and ends it: once with an empty user's cache directory, then again with
what the first run has left there. Nothing else turns the compilation cache on.

python experiments/benchmarks/startup.py
"""
from __future__ import annotations

import pathlib
import subprocess
import sys
import tempfile
import time
from typing import Any

from absl import flags

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from experiments.benchmarks import harness

FLAGS = flags.FLAGS

harness.define_seconds('timeout', 300, 'Seconds for one start.')

_SCRIPT = pathlib.Path(__file__).resolve().parents[1] / 'digits_dirdir.py'
_PATIENCE = 60.0


def first_round(cache: pathlib.Path, workdir: pathlib.Path) -> float:
  """Starts the quickstart; seconds until its first round is done.

  Raises:
    ValueError: if it ends before, or takes longer than --timeout.
  """
  begin = time.perf_counter()
  log = workdir.with_suffix('.log')
  with log.open('w') as file:
    process = subprocess.Popen(
        [sys.executable, str(_SCRIPT), f'--workdir={workdir}'],
        env=harness.variables(cache), stdout=file, stderr=file,
        cwd=_SCRIPT.parents[1])
    try:
      while (seconds := time.perf_counter() - begin) < FLAGS.timeout:
        ended = process.poll() is not None
        if ': round 1/' in log.read_text(errors='replace'):
          return seconds
        if ended:
          lines = log.read_text(errors='replace').strip().splitlines()
          raise ValueError(f'{_SCRIPT.name} ended before its first round: '
                           f'{lines[-1] if lines else process.returncode}')
        time.sleep(0.01)
    finally:
      process.terminate()  # It saves and ends.
      try:
        process.wait(_PATIENCE)
      except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
  raise ValueError(f'{_SCRIPT.name} needs longer than --timeout='
                   f'{FLAGS.timeout:g} for its first round.')


def cached(cache: pathlib.Path) -> tuple[int, int]:
  """Files and bytes of the compilation cache in a user's cache directory."""
  found = [p for p in (cache / 'fedjax_ssl' / 'xla').rglob('*') if p.is_file()]
  return len(found), sum(p.stat().st_size for p in found)


def measure(folder: pathlib.Path) -> dict[str, Any]:
  """Starts it warm, up to --repeats times, after one cold start.

  Raises:
    ValueError: also if the cold start leaves no compiled program behind.
  """
  cache = folder / 'cache'
  cold = first_round(cache, folder / 'cold')
  files, size = cached(cache)
  if not files:
    raise ValueError('The quickstart left no compiled program in the cache '
                     'directory of its user.')
  warm = [first_round(cache, folder / f'warm{i}')
          for i in harness.turns()]
  return {'cold': cold, 'warm': warm, 'cache_files': files,
          'cache_bytes': size}


def main() -> None:
  """Measures and reports."""
  with tempfile.TemporaryDirectory() as folder:
    found = measure(pathlib.Path(folder))
  warm = harness.medians({'warm': found['warm']})['warm']
  print(f'compilation cache: {found["cache_files"]} files, '
        f'{found["cache_bytes"] / 1e6:.1f} MB')
  harness.report(
      'startup', [['first round of the quickstart', 'seconds'],
                  ['cold', found['cold']], ['warm', warm]], found)


if __name__ == '__main__':
  harness.run(main)
