"""What every experiment does after it has dealt the rows: check, train, report.

An experiment is a function `deal(rng, labels, pool) -> (labeled, unlabeled)`
or `(labeled, unlabeled, tasks)`: owners int32[D], -1 for nobody, of the rows
in `pool` bool[D]; see `fedjax_ssl.data.partition`.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import os
import pathlib
import sys
import time
from typing import Any

from absl import app, flags, logging
import jax
import numpy as np
import run_one
import settings

from fedjax_ssl import data

FLAGS = flags.FLAGS
Deal = Callable[..., tuple[np.ndarray, ...]]

# Where bounds live below the workdir, by name in tables: (folder, flags).
BOUNDS = {
    'labels only (lower bound)': ('labels_few', 'few'),
    'all labels (upper bound)': ('labels_all', 'all'),
}

settings.define()


def choose_labeled(rng: np.random.Generator, labels: np.ndarray,
                   pool: np.ndarray) -> np.ndarray:
  """bool[D]: the labeled rows that the flags ask for."""
  if (FLAGS.labels_per_class is None) == (FLAGS.labeled_fraction is None):
    raise ValueError(
        'Give one of --labels_per_class and --labeled_fraction, not '
        f'{FLAGS.labels_per_class} and {FLAGS.labeled_fraction}.')
  return data.choose_labeled(
      rng, labels, per_class=FLAGS.labels_per_class,
      fraction=FLAGS.labeled_fraction, where=pool)


def two_pools(labeled_scheme: Callable[..., np.ndarray],
              unlabeled_scheme: Callable[..., np.ndarray]) -> Deal:
  """Deals labeled and unlabeled rows apart, as FedDure does.

  Args:
    labeled_scheme: a partition of `fedjax_ssl.data`; labels at the server
      are not dealt.
    unlabeled_scheme: the same for all other rows.

  Returns:
    The setting's `deal`.
  """
  def deal(rng, labels, pool):
    labeled = choose_labeled(rng, labels, pool)
    if FLAGS.labels_at == 'server':
      owner = np.where(labeled, FLAGS.num_clients, -1).astype(np.int32)
    else:
      least = data.labeled_min_size(int(labeled.sum()), FLAGS.num_clients)
      owner = _scheme(labeled_scheme, rng, labels, labeled, least)
    return owner, _scheme(unlabeled_scheme, rng, labels, pool & ~labeled, 10)
  return deal


def _scheme(scheme: Callable[..., np.ndarray], rng: np.random.Generator,
            labels: np.ndarray, where: np.ndarray, least: int) -> np.ndarray:
  knobs = {'alpha': FLAGS.alpha, 'min_size': least} if (
      scheme is data.dirichlet_capped) else {}
  return scheme(rng, labels, FLAGS.num_clients, where=where, **knobs)


def main(deal: Deal, **defaults: Any) -> None:
  """Runs an experiment's script.

  Args:
    deal: see the module's docstring.
    **defaults: of flags, where the setting has its own.
  """
  for name, value in defaults.items():
    FLAGS.set_default(name, value)
  app.run(lambda argv: _report_errors(_run, deal, argv),
          flags_parser=lambda argv: _report_errors(FLAGS, argv))


def _report_errors(function: Callable[..., Any], *args: Any) -> Any:
  """Turns what a user can mend into one line and exit code 2."""
  try:
    return function(*args)
  except (ValueError, flags.Error) as error:
    if FLAGS.is_parsed() and FLAGS.verbosity > 0:
      raise
    print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
    sys.exit(2)


def _run(deal: Deal, argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f'{argv[1]!r} is no flag; flags begin with --.')
  _prepare_jax()
  if FLAGS.eval_only and FLAGS.workdir is None:
    raise ValueError('--eval_only needs --workdir.')
  workdir = pathlib.Path(FLAGS.workdir or _new_workdir())
  seeds = settings.seeds()
  dataset = data.load(FLAGS.dataset, FLAGS.data_dir, split=FLAGS.split)
  deals = {seed: _partition(deal, dataset, seed) for seed in seeds}
  jobs = [(_label(), workdir, FLAGS.labels, settings.method())]
  if FLAGS.bounds:
    jobs += [(name, workdir / folder, labels, 'fedavg')
             for name, (folder, labels) in BOUNDS.items()]
  built = [run_one.build(dataset, deals, labels, method)
           for _, _, labels, method in jobs]
  runs = {}
  for (name, folder, labels, method), job in zip(jobs, built, strict=True):
    runs[name] = run_one.run(job, folder, name, {
        **settings.values(), 'labels': labels, 'method': method})
  _finish(workdir, runs)


def _label() -> str:
  return settings.method() + (
      ', all labels' if FLAGS.labels == 'all' else '')


def _finish(workdir: pathlib.Path, runs: dict[str, list[Any]]) -> None:
  """Prints the table and draws the curves."""
  from fedjax_ssl.training import report
  if FLAGS.eval_only:
    return
  try:
    report.plot_curves(runs, workdir / 'curves.png')
  except OSError as error:
    raise ValueError(f'{workdir}/curves.png cannot be written: '
                     f'{error.strerror}.') from error
  print(report.table(runs))
  print(f'Results: {workdir}')


def _new_workdir() -> str:
  name = pathlib.Path(sys.argv[0]).stem
  return os.path.join('runs', f'{name}_{time.strftime("%Y%m%d_%H%M%S")}_'
                      f'{os.getpid()}')


def _prepare_jax() -> None:
  """Devices, the compilation cache and a quiet log, before JAX starts."""
  logging.use_absl_handler()
  if FLAGS.verbosity <= 0:
    logging.set_verbosity(logging.WARNING)
  cores = len(os.sched_getaffinity(0)) if hasattr(
      os, 'sched_getaffinity') else os.cpu_count() or 1
  wanted = FLAGS.num_devices or min(cores, FLAGS.cohort_size)
  jax.config.update('jax_num_cpu_devices', wanted)
  if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    cache = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or
                         pathlib.Path.home() / '.cache')
    jax.config.update('jax_compilation_cache_dir',
                      str(cache / 'fedjax_ssl' / 'xla'))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
  found = len(jax.devices())
  if FLAGS.num_devices > found:
    raise ValueError(f'--num_devices={FLAGS.num_devices}, but there are '
                     f'{found} devices.')


def _partition(deal: Deal, dataset: data.Dataset, seed: int
               ) -> run_one.Dealt:
  """One seed's partition: from a file, or dealt."""
  labels = np.asarray(dataset.train.labels)
  if FLAGS.partition_file:
    partition = data.load_partition(
        FLAGS.partition_file, labels.size, FLAGS.num_clients, labels=labels)
    return run_one.Dealt(partition, None)
  if FLAGS.partition_seed is not None:
    seed = FLAGS.partition_seed
  rng = np.random.default_rng([seed, 0x5353])
  validation = np.zeros(labels.size, bool)
  if dataset.validation is None:
    validation = data.choose_validation(
        rng, labels, fraction=FLAGS.validation_fraction)
  labeled, unlabeled, *tasks = deal(rng, labels, ~validation)
  return run_one.Dealt(data.Partition(labeled, unlabeled, validation),
                       tasks[0] if tasks else None)
