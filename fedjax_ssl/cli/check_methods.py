"""Makes methods of one's own code before the bench runs anything.

Each is made in a process of its own: the bench starts processes, which does
not go together with JAX at work.
"""
from __future__ import annotations

from collections.abc import Iterable, Sequence
import json
import os
import subprocess
import sys

from fedjax_ssl.bench import plan
from fedjax_ssl.cli import bench_flags
from fedjax_ssl.core import checks, imports, registry
from fedjax_ssl.running import settings


def vouch(rows: Iterable[plan.Entry], bed: plan.Bed,
          changed: Sequence[str] = ()) -> None:
  """Makes the methods in files or modules.

  Args:
    rows: of the bench.
    bed: its flags decide what the methods are made for, images of 28 x 28
      pixels apart.
    changed: flags that all runs have besides. Those of the data are not read
      yet, so the network stays the bed's.

  Raises:
    ValueError: with the reason, for the first that cannot be made.
  """
  for entry in rows:
    if imports.split(entry.method) is None:
      continue
    done = subprocess.run(
        [sys.executable, '-P', '-m', __name__, bed.name, json.dumps(changed),
         *plan.methods_of(entry)],
        stdin=subprocess.DEVNULL, capture_output=True, text=True,
        # Where this process would find it.
        env={**os.environ, 'PYTHONPATH': os.pathsep.join(
            filter(None, sys.path))})
    if done.returncode:
      raise ValueError((done.stderr.strip().splitlines() or [entry.method])[-1])


def _make(bed: str, changed: str, *texts: str) -> None:
  """Makes methods as for runs on a bed."""
  from fedjax_ssl import methods, task
  others = json.loads(changed)
  for place in settings.imported(others):
    registry.import_place(place)
  flags = {**plan.beds()[bed].flags, **{
      k: v for k, v in bench_flags.pairs(others) if k in ('norm', 'labels_at')}}
  made = task.make_task(task.TaskSpec(
      10, (28, 28, 1), model=flags['model'], norm=flags['norm'],
      labels_at=flags.get('labels_at', 'clients')))
  for text in texts:
    try:
      methods.make(text, made)
    except checks.FieldError as error:
      if error.field != 'method':
        raise
      raise checks.FieldError('ROW', text, error.reason) from error.__cause__


if __name__ == '__main__':
  try:
    _make(*sys.argv[1:])
  except ValueError as error:
    at = f' (at {imports.where(error)})' if imports.where(error) else ''
    sys.exit(checks.one_line(error) + at)
