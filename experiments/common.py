"""What every experiment does after it has dealt the rows: check, train, report.

An experiment is a function `deal(rng, labels, pool) -> (labeled, unlabeled)`
or `(labeled, unlabeled, tasks)`: owners int32[D], -1 for nobody, of the rows
in `pool` bool[D]; see `fedjax_ssl.data.partition`.
"""
from __future__ import annotations

import stopping  # isort: split

from collections.abc import Callable, Sequence
import contextlib
import os
import pathlib
import signal
import sys
import time
from typing import Any

from absl import app, flags, logging
import cluster
import jax
import messages
import numpy as np
import printing
import run_one
import settings

from fedjax_ssl import data
from fedjax_ssl.training import environment, processes

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
  given = {name: FLAGS[name].value
           for name in ('labels_per_class', 'labeled_fraction')
           if FLAGS[name].value is not None}
  if len(given) != 1:
    raise ValueError(
        'Give one of --labels_per_class and --labeled_fraction, not '
        f'{FLAGS.labels_per_class} and {FLAGS.labeled_fraction}.')
  (name, value), = given.items()
  try:
    return data.choose_labeled(
        rng, labels, per_class=FLAGS.labels_per_class,
        fraction=FLAGS.labeled_fraction, where=pool)
  except ValueError as error:
    raise ValueError(f'--{name}={value}: {error}.') from error


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


def one_pool(rng: np.random.Generator, labels: np.ndarray, pool: np.ndarray
             ) -> tuple[np.ndarray, np.ndarray]:
  """Deals all rows, then labels --labeled_fraction of each client's.

  FedLabel's setting; --dirichlet names the flavour of the partition.
  """
  if FLAGS.labeled_fraction is None or FLAGS.labels_per_class is not None:
    raise ValueError('Give --labeled_fraction, the labeled share of each '
                     "client's rows, and not --labels_per_class.")
  if FLAGS.labels_at == 'server':
    raise ValueError('This setting labels rows of clients; give '
                     '--labels_at=clients.')
  scheme = {'clients': data.dirichlet_clients,
            'shares': data.dirichlet_shares,
            'capped': data.dirichlet_capped}[FLAGS.dirichlet]
  owner = scheme(rng, labels, FLAGS.num_clients, alpha=FLAGS.alpha, where=pool)
  return data.label_within(rng, labels, owner,
                           fraction=FLAGS.labeled_fraction)


def agents(scheme: Callable[..., np.ndarray]) -> Deal:
  """Deals labels to the first agents and all other rows to the rest (FedSSL).

  Args:
    scheme: a partition of `fedjax_ssl.data`, for either kind of rows.

  Returns:
    The setting's `deal`; --num_labeled_clients says how many hold labels.
  """
  def deal(rng, labels, pool):
    holders, total = FLAGS.num_labeled_clients, FLAGS.num_clients
    if not 0 < holders < total:
      raise ValueError(f'--num_labeled_clients={holders} must be from 1 to '
                       f'{total - 1}, below --num_clients={total}.')
    labeled = choose_labeled(rng, labels, pool)
    try:
      return (scheme(rng, labels, holders, where=labeled),
              data.shift(scheme(rng, labels, total - holders,
                                where=pool & ~labeled), holders))
    except ValueError as error:
      reason = str(error).replace('num_clients=', 'agents=')
      raise ValueError(f'--num_labeled_clients={holders} of --num_clients='
                       f'{total}: {reason}.') from error
  return deal


def _scheme(scheme: Callable[..., np.ndarray], rng: np.random.Generator,
            labels: np.ndarray, where: np.ndarray, least: int) -> np.ndarray:
  if scheme is not data.dirichlet_capped:
    return scheme(rng, labels, FLAGS.num_clients, where=where)
  rows = int(where.sum())
  if FLAGS.num_clients * least > rows:
    raise ValueError(f'--num_clients={FLAGS.num_clients} is too many for '
                     f'{rows} rows to deal, at least {least} each.')
  return scheme(rng, labels, FLAGS.num_clients, where=where,
                alpha=FLAGS.alpha, min_size=least)


def main(deal: Deal, **defaults: Any) -> None:
  """Runs an experiment's script.

  Args:
    deal: see the module's docstring.
    **defaults: of flags, where the setting has its own.
  """
  for name, value in defaults.items():
    FLAGS.set_default(name, value)
  for name in settings.all_names():  # For --help.
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
  with stopping.listening():
    app.run(lambda argv: _report_errors(_run, deal, argv),
            flags_parser=lambda argv: _report_errors(FLAGS, argv))


def _report_errors(function: Callable[..., Any], *args: Any) -> Any:
  """Turns what a user can mend into one line and exit code 2.

  Faults that may pass by themselves, such as a full disk, have code 75, so that
  sweeps try them again.
  """
  try:
    return function(*args)
  except (ValueError, OSError, MemoryError, OverflowError,
          flags.Error) as error:
    if FLAGS.is_parsed() and FLAGS.verbosity > 0:
      raise
    print(f'error: {messages.line(error)}', file=sys.stderr)
    sys.exit(75 if messages.may_pass(error) else 2)
  except KeyboardInterrupt:
    stopping.end(signal.SIGINT)
    sys.exit(130)


def _run(deal: Deal, argv: Sequence[str]) -> None:
  if len(argv) > 1:
    raise ValueError(f'{argv[1]!r} is no flag; flags begin with --.')
  settings.check()
  cluster.place()
  _prepare_jax()
  environment.devices()  # Starts JAX, or says why not.
  with cluster.ending():
    processes.together(cluster.devices)
    _run_jobs(deal)


def _run_jobs(deal: Deal) -> None:
  is_new = FLAGS.workdir is None
  if is_new:
    FLAGS['workdir'].value = processes.once(_new_workdir)
  workdir = pathlib.Path(FLAGS.workdir)
  wanted = processes.once(lambda: _wanted(workdir))
  horizon = processes.once(run_one.schedule_rounds)
  jobs = processes.together(lambda: _build(deal, wanted, horizon))
  for job in jobs:
    processes.check_same(
        {k: v for k, v in job.config.items() if k not in settings.OWN}, 'flags')
    processes.check_same(job.facts, 'data')
  if FLAGS.eval_only:
    for job in jobs:
      run_one.evaluate(job)
    return
  runs = {}
  with contextlib.ExitStack() as stack:
    # All folders first: a refusal comes before hours of work, and no second
    # process gets between two runs.
    places = [stack.enter_context(run_one.open_folder(job)) for job in jobs]
    if is_new and processes.is_first():
      print(f'Working in {workdir}', file=sys.stderr)
    for job, place in zip(jobs, places, strict=True):
      runs[job.name] = run_one.run(job, place)
    processes.once(lambda: _finish(workdir, runs))


def _build(deal: Deal, wanted: Sequence[Sequence[str]], horizon: int
           ) -> list[run_one.Job]:
  """The jobs, of which none has touched its folder."""
  dataset = data.load(FLAGS.dataset, FLAGS.data_dir, split=FLAGS.split,
                      embeddings=FLAGS.embeddings)
  settings.check_sizes(dataset)
  deals = {seed: _partition(deal, dataset, seed) for seed in settings.seeds()}
  return [run_one.build(dataset, deals, name, pathlib.Path(folder), labels,
                        method, horizon)
          for name, folder, labels, method in wanted]


def _wanted(workdir: pathlib.Path) -> list[tuple[str, str, str, str]]:
  """(name, folder, labels, method) of the run and of the bounds it needs."""
  name = settings.method() + (', all labels' if FLAGS.labels == 'all' else '')
  wanted = [(name, str(workdir), FLAGS.labels, settings.method())]
  if FLAGS.bounds:
    wanted += [(name, str(workdir / folder), labels, 'fedavg')
               for name, (folder, labels) in BOUNDS.items()
               if not FLAGS.eval_only or (workdir / folder).exists()]
  return wanted


def _finish(workdir: pathlib.Path, runs: dict[str, list[Any]]) -> None:
  """Prints the table and draws the curves, if they are not drawn already."""
  from fedjax_ssl.training import report
  printing.say(report.table(runs))
  printing.say(f'Results: {workdir}')
  chart, drawn = workdir / 'curves.png', workdir / 'curves.partial.png'
  try:
    report.plot_curves(runs, drawn)
    if chart.exists() and chart.read_bytes() == drawn.read_bytes():
      drawn.unlink()
    else:
      drawn.replace(chart)
  except OSError as error:
    raise ValueError(f'{chart} cannot be written: '
                     f'{error.strerror or error}.') from error


def _new_workdir() -> str:
  name = pathlib.Path(sys.argv[0]).stem
  return os.path.join('runs', f'{name}_{time.strftime("%Y%m%d_%H%M%S")}_'
                      f'{os.getpid()}')


def _prepare_jax() -> None:
  """Devices, the compilation cache and a quiet log, before JAX starts."""
  logging.use_absl_handler()
  if FLAGS.verbosity <= 0:
    logging.set_verbosity(logging.WARNING)
  cluster.join()
  if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    with contextlib.suppress(RuntimeError):  # A user without a home.
      cache = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or
                           pathlib.Path.home() / '.cache')
      jax.config.update('jax_compilation_cache_dir',
                        str(cache / 'fedjax_ssl' / 'xla'))
      jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)


def _partition(deal: Deal, dataset: data.Dataset, seed: int
               ) -> data.Partition:
  """One seed's partition: from a file, or dealt."""
  labels = np.asarray(dataset.train.labels)
  if FLAGS.partition_file:
    return data.load_partition(
        FLAGS.partition_file, labels.size, FLAGS.num_clients, labels=labels)
  if FLAGS.partition_seed is not None:
    seed = FLAGS.partition_seed
  rng = np.random.default_rng([seed, 0x5353])
  validation = np.zeros(labels.size, bool)
  if dataset.validation is None:
    validation = data.choose_validation(
        rng, labels, fraction=FLAGS.validation_fraction)
  labeled, unlabeled, *tasks = deal(rng, labels, ~validation)
  return data.Partition(labeled, unlabeled, validation, *tasks)
