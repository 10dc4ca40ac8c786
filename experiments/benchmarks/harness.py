"""What the benchmarks share: devices, rounds to time, and the report."""
from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
import contextlib
import importlib.util
import json
import os
import pathlib
import statistics
import sys
import tempfile
import time
from typing import Any, NoReturn

from absl import app, flags
import jax
import numpy as np

import fedjax_ssl as fssl
from fedjax_ssl import models
from fedjax_ssl.core import checks, disk, sampling
from fedjax_ssl.running import huge_pages
from fedjax_ssl.training import client_rows, environment, offloaded, runner

FLAGS = flags.FLAGS

_BEGUN = time.monotonic()
# With its own number of repetitions a measurement begins no turn, but its
# first, that would end later than so many minutes after the script's start.
# Half a minute is for a turn that takes longer than expected.
_MINUTES = 8
_LIMIT = 60 * (_MINUTES - .5)
_turned: list[int] = []  # By each measurement since the last file.

flags.DEFINE_string('out', 'runs/benchmarks', 'Folder for the JSON file.')
flags.DEFINE_integer('repeats', 7, 'Timed repetitions; the median counts. If '
                     'not given, fewer where they would last over 8 minutes.',
                     lower_bound=1)
flags.DEFINE_integer('product_size', 2048, 'Rows of the square matrices whose '
                     'product is the limit.', lower_bound=1)
flags.DEFINE_integer('num_devices', 2, 'Devices at most: a CPU is divided into '
                     'so many, of accelerators the first ones are taken. Also '
                     'threads of PyTorch.', lower_bound=1)
flags.DEFINE_bool('quick', False, 'Tiny sizes, to see that all runs; says '
                  'nothing about speed. A flag that is given keeps its value.')


def run(main: Callable[[], None], quick: Mapping[str, Any] | None = None,
        *, as_programs: bool = False) -> None:
  """Runs a benchmark; what a user can mend is one line and exit code 2.

  Args:
    main: the benchmark.
    quick: see `shrink`.
    as_programs: whether it starts once more for huge pages, as the library's
      programs do.
  """
  if as_programs:
    huge_pages.begin_again()
  def checked(argv: Sequence[str]) -> None:
    if len(argv) > 1:
      raise ValueError(f'{argv[1]!r} is no flag; flags begin with --.')
    shrink(quick or {})
    for name in ('out', 'peers_dir'):  # A shell leaves the ~ of --out=~/x.
      if name in FLAGS:
        FLAGS[name].value = os.path.expanduser(str(FLAGS[name].value))
    _try_out()
    main()
  app.run(lambda argv: _in_a_line(checked, argv),
          flags_parser=lambda argv: _in_a_line(FLAGS, argv))


def _in_a_line(function: Callable[..., Any], argv: Sequence[str]) -> Any:
  try:
    with checks.marking('--'):
      return function(argv)
  except (ValueError, OSError, MemoryError, flags.Error,
          jax.errors.JaxRuntimeError) as error:
    _refuse(error)
  except (AssertionError, RuntimeError):
    try:
      environment.devices()
    except ValueError as error:
      _refuse(error)
    raise


def _refuse(error: Exception) -> NoReturn:
  print(f'error: {" ".join(str(error).split())}', file=sys.stderr)
  sys.exit(2)


def _try_out() -> None:
  """Raises ValueError if --out cannot be written, before all is measured.

  Rights do not tell: system folders refuse even root. Made ones are removed.
  """
  folder = pathlib.Path(FLAGS.out).absolute()
  new = [place for place in (folder, *folder.parents)
         if not os.path.lexists(place)]
  try:
    folder.mkdir(parents=True, exist_ok=True)
    tempfile.TemporaryFile(dir=folder).close()
  except OSError as error:
    raise ValueError(f'--out={FLAGS.out} cannot be written: '
                     f'{error.strerror or error}.') from None
  finally:
    for place in new:
      with contextlib.suppress(OSError):
        place.rmdir()


def variables(cache: pathlib.Path) -> dict[str, str]:
  """Returns the environment with a user's cache and no other for programs."""
  kept = {name: value for name, value in os.environ.items()
          if not name.startswith(('JAX_COMPILATION', 'JAX_PERSISTENT'))}
  return {**kept, 'XDG_CACHE_HOME': str(cache)}


def define_seconds(name: str, default: float, text: str) -> None:
  """Defines a flag of seconds, at least 1 and finite."""
  flags.DEFINE_float(name, default, text, lower_bound=1, upper_bound=1e6)
  flags.register_validator(name, lambda value: value == value,
                           message='must be a number')


def shrink(sizes: Mapping[str, Any]) -> None:
  """With --quick, gives flags that are not on the command line tiny values."""
  if FLAGS.quick:
    default({'repeats': 1, 'product_size': 64, **sizes})


def default(sizes: Mapping[str, Any]) -> None:
  """Gives flags that are not on the command line these values."""
  for name, value in sizes.items():
    if not FLAGS[name].present:
      FLAGS[name].value = value


def make_mesh() -> jax.sharding.Mesh | None:
  """Starts JAX with --num_devices devices; None stands for a single one."""
  jax.config.update('jax_num_cpu_devices', FLAGS.num_devices)
  devices = environment.devices()[:FLAGS.num_devices]
  if len(devices) == 1:
    return None
  return jax.make_mesh((len(devices),), ('clients',), devices=devices,
                       axis_types=(jax.sharding.AxisType.Auto,))


def examples(size: int, shape: tuple[int, ...], seed: int = 0,
             num_classes: int = 10) -> fssl.Examples:
  """Random pixels and labels: uint8[size, *shape], int32[size]."""
  rng = np.random.default_rng(seed)
  return fssl.Examples(
      rng.integers(0, 256, (size, *shape), np.uint8),
      rng.integers(0, num_classes, size).astype(np.int32))


def image_shape(model: str, side: int = 0) -> tuple[int, int, int]:
  """(H, W, channels) of a network's images: as it needs them, or 28x28x1.

  Args:
    model: its name.
    side: overrides height and width where positive.

  Raises:
    ValueError: for an unknown name.
  """
  channels, own = models.input_needs(model)
  return side or own or 28, side or own or 28, channels or 1


def federate(train: fssl.Examples, labeled: np.ndarray,
             unlabeled: np.ndarray | None = None, *, num_clients: int,
             num_classes: int = 10) -> fssl.Federation:
  """A federation by owners int32[D], -1 for nobody, with 8 test rows."""
  if unlabeled is None:
    unlabeled = np.full_like(labeled, -1)
  few = fssl.Examples(train.inputs[:8], train.labels[:8])
  dealt = fssl.data.Partition(labeled, unlabeled, np.zeros(labeled.size, bool))
  return fssl.data.federate(train, few, few, dealt, num_clients=num_clients,
                            num_classes=num_classes)


def two_pools(num_clients: int, labeled: int, unlabeled: int,
              shape: tuple[int, ...]) -> fssl.Federation:
  """Clients with so many labeled and so many unlabeled rows each."""
  owner = np.arange(num_clients, dtype=np.int32)
  owners = np.repeat(owner, labeled), np.repeat(owner, unlabeled)
  nobody = [np.full_like(x, -1) for x in owners]
  return federate(
      examples(sum(x.size for x in owners), shape),
      np.concatenate([owners[0], nobody[1]]),
      np.concatenate([nobody[0], owners[1]]), num_clients=num_clients)


class Simulation:
  """Rounds of a method, through the program that `training.loop` runs.

  Args:
    spec: the task.
    federation: its data.
    mesh: devices, or None.
    num_seeds: runs of one program, all with the same federation.
    together: whether the seeds are under one vmap, or one after another.
    place: where what clients keep is between rounds.
  """

  def __init__(self, spec: fssl.TaskSpec, federation: fssl.Federation,
               mesh: jax.sharding.Mesh | None, *, num_seeds: int = 1,
               together: bool = False,
               place: client_rows.Place = client_rows.ON_DEVICES):
    self.task = fssl.make_task(spec, mesh)
    self.spec, self.federation = spec, federation
    self._method = fssl.make_method(spec.method, self.task)
    kind = runner.Together if together else runner.Sequential
    self._seeds = offloaded.runs(
        self._method, [federation] * num_seeds, list(range(num_seeds)), mesh,
        place, kind=kind)
    self._seeds.start(None)
    self._done = 0

  @property
  def model(self) -> Any:
    """The server's `Variables`."""
    return self._seeds.states[0].server.model

  @property
  def memory(self) -> Any:
    """What stays on the clients, leaves [N, ...]."""
    return self._seeds.states[0].memory

  def compile(self) -> None:
    """Compiles the rounds without running one."""
    self._seeds.advance(self._done, 0)

  def fill(self) -> None:
    """Gives each client a record away from the devices, as if it had trained.

    Nothing changes but where its first values are read from.
    """
    assert isinstance(self._seeds, offloaded.Offloaded)
    rows, = self._seeds.stores
    for client in range(self.federation.num_clients):
      ids = np.array([client], np.int32)
      rows.put(ids, rows.take(ids))

  def advance(self, count: int) -> None:
    """Runs `count` rounds to the end."""
    self._seeds.advance(self._done, count)
    self._done += count

  def cohort(self, round_: int) -> np.ndarray:
    """int32[S]: who takes part in a round."""
    key = jax.random.fold_in(runner.root_keys(0)[1], round_)
    for part in (0, 0):  # The first pass, and its sampler.
      key = jax.random.fold_in(key, part)
    sample = sampling.uniform(self.task.cohort_size)
    state = self._seeds.states[0]
    return np.asarray(sample(state, self.federation, key).ids[0])


def need_torch() -> None:
  """Raises ValueError where PyTorch is missing."""
  if not has_torch():
    raise ValueError('The comparison needs PyTorch: '
                     "pip install -e '.[bench]' in this repository's folder.")


def has_torch() -> bool:
  """Whether PyTorch is installed."""
  return importlib.util.find_spec('torch') is not None


def without_torch() -> str:
  """Why PyTorch's loops, which are on the CPU, are not timed; '' if they are.

  Starts the JAX backend if it has not been started.
  """
  if jax.default_backend() != 'cpu':
    return 'not timed: its loop is on the CPU'
  return '' if has_torch() else "missing: pip install -e '.[bench]'"


def numbers(name: str, kind: Callable[[str], Any] = int, least: float = 1
            ) -> list[Any]:
  """The numbers of a list flag, each once.

  Raises:
    ValueError: if there is none, or one is no number, or below `least`.
  """
  texts: list[str] = FLAGS[name].value or []
  try:
    found = list(dict.fromkeys(map(kind, texts)))
  except ValueError:
    found = []
  if not found or min(found) < least:
    whole = 'whole ' * (kind is int)
    raise ValueError(f'--{name}={",".join(texts)} must be {whole}numbers '
                     f'of at least {least:g}, separated by commas.')
  return found


def turns(flag: str = 'repeats',
          expected: Callable[[], float] | None = None) -> Iterator[int]:
  """Counts the turns of a measurement, and leaves out what lasts too long.

  Unless the flag is on the command line, no turn begins that would end nearly 8
  minutes or more after the script began. The first is always done. What is left
  out is said, and the number of turns goes into the file.

  Args:
    flag: that has the number of turns.
    expected: returns the seconds of the next turn; None is those of the last.
  """
  most, last = getattr(FLAGS, flag), 0.0
  _turned.append(0)
  for turn in range(most):
    begun = time.monotonic()
    after = begun + (expected() if turn and expected else last)
    if turn and after - _BEGUN > _LIMIT and not FLAGS[flag].present:
      print(f'{turn} of {most} turns, to end within {_MINUTES} minutes; '
            f'--{flag}={most} does all.')
      return
    _turned[-1] += 1
    yield turn
    last = time.monotonic() - begun


def interleave(runs: Mapping[str, Callable[[], None]]
               ) -> dict[str, list[float]]:
  """Seconds of each function, called in turn so that all see the same noise.

  Each timed call follows another one of the same function, as rounds follow
  each other in a run; the first after another system's turn is slower.

  Args:
    runs: functions by name.

  Returns:
    Seconds by name, float[R] each, one for each of `turns`.
  """
  seconds: dict[str, list[float]] = {name: [] for name in runs}
  def expected() -> float:  # Without compilation, unlike the first turn.
    return (1 + (len(runs) > 1)) * sum(s[-1] for s in seconds.values())
  for turn in turns(expected=expected):
    for name, function in runs.items():
      if not turn or len(runs) > 1:
        function()
      start = time.perf_counter()
      function()
      seconds[name].append(time.perf_counter() - start)
  return seconds


def medians(seconds: Mapping[str, Sequence[float]]) -> dict[str, float]:
  """The median of each list."""
  return {name: statistics.median(values) for name, values in seconds.items()}


def paired(seconds: Mapping[str, Sequence[float]], one: str, other: str
           ) -> float:
  """The median, over the turns, of one's seconds over the other's.

  A machine that slows down between turns does not move it.
  """
  return statistics.median(a / b for a, b in zip(
      seconds[one], seconds[other], strict=True))


def over_fastest(seconds: Mapping[str, Sequence[float]], one: str,
                 others: Iterable[str]) -> float:
  """The largest `paired`: one's time over that of the fastest other."""
  return max(paired(seconds, one, other) for other in others)


def quartiles(seconds: Mapping[str, Sequence[float]], one: str,
              others: Iterable[str]) -> list[float]:
  """Returns quartiles of the turns, of which `over_fastest` has the median."""
  other = max(others, key=lambda name: paired(seconds, one, name))
  ratios = [a / b for a, b in zip(seconds[one], seconds[other], strict=True)]
  return [float(x) for x in np.quantile(ratios, [.25, .75])]


def report(name: str, table: Sequence[Sequence[Any]], measured: dict[str, Any],
           ratio: float | None = None) -> pathlib.Path:
  """Prints a table and the ratio, and saves both.

  Args:
    name: of the file.
    table: rows of cells, the header first.
    measured: goes into the file.
    ratio: seconds of ours over PyTorch's; printed last.
  """
  cells = [[_cell(c) for c in row] for row in table]
  widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
  for row in cells:
    first, *rest = (c.rjust(w) for c, w in zip(row, widths, strict=True))
    print('  '.join([first.strip().ljust(widths[0]), *rest]))
  path = save(name, table, measured, ratio)
  print(f'Written: {path}')
  if ratio is not None:
    low, high = measured.get('quartiles', (ratio, ratio))
    between = f', of the turns {low:.3f} to {high:.3f}' if low < high else ''
    print(f'ratio ours/pytorch: {ratio:.3f}{between}')
  return path


def save(name: str, table: Sequence[Sequence[Any]], measured: dict[str, Any],
         ratio: float | None = None) -> pathlib.Path:
  """Writes JSON with what it ran on; see `report`.

  The file is replaced at once, so that one that is there is whole. What --quick
  measures has a name of its own. `whole_seconds` are the script's so far,
  `turns` those of each measurement since the file before.
  """
  name += '_quick' * FLAGS.quick
  folder = pathlib.Path(FLAGS.out)
  folder.mkdir(parents=True, exist_ok=True)
  path = folder / f'{name}.json'
  load = list(os.getloadavg()) if hasattr(os, 'getloadavg') else None
  disk.replace(path, (json.dumps({
      'benchmark': name, 'command': sys.argv, 'load_average': load,
      'environment': {**environment.describe(),
                      'torch': measured.get('torch') or _torch_version(),
                      'usable_cpus': environment.cores()},
      'whole_seconds': round(time.monotonic() - _BEGUN),
      'turns': list(_turned), 'table': table,
      'measured': measured, 'ratio': ratio}, indent=2) + '\n').encode())
  _turned.clear()
  return path


def _cell(value: Any) -> str:
  return f'{value:.4g}' if isinstance(value, float) else str(value)


def _torch_version() -> str | None:
  torch = sys.modules.get('torch')
  return None if torch is None else str(torch.__version__)
