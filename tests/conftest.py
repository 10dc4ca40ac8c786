"""What all tests share: the platform, the compilation cache, subprocesses."""
from __future__ import annotations

import collections
from collections.abc import Callable, Iterator
import functools
import gc
import itertools
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from typing import Any

import hypothesis
import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent

# Read by JAX when it is imported, which happens after this module; subprocesses
# inherit them.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('MPLBACKEND', 'agg')
# Tests spend their time in the compiler; no law depends on its optimizations.
# The newer way of emitting loops takes three times as long to compile. Programs
# in one piece save an eighth, and memory maps; no processor is idle here.
_FAST_TO_COMPILE = ('--xla_backend_optimization_level=0 '
                    '--xla_cpu_use_fusion_emitters=false '
                    '--xla_cpu_parallel_codegen_split_count=1')

# The same draws in every run: a failure of one run is a failure of the next. No
# time is a failure, which a busy machine could cause.
hypothesis.settings.register_profile(
    'reproducible', deadline=None, derandomize=True, database=None,
    suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile('reproducible')


# Groups of thorough tests that come later than that many seconds after the
# start of their worker are skipped; unset: none is.
_THOROUGH_SECONDS = 'FEDJAX_SSL_THOROUGH_SECONDS'
_started = time.monotonic()


def _accepted_flags() -> str:
  """`_FAST_TO_COMPILE` if this XLA knows it, for it ends at an unknown flag."""
  probe = subprocess.run(
      [sys.executable, '-c', 'import jax; jax.devices()'],
      env={**os.environ, 'XLA_FLAGS': _FAST_TO_COMPILE}, capture_output=True,
      check=False)
  return '' if probe.returncode else _FAST_TO_COMPILE


def pytest_configure(config: pytest.Config) -> None:
  """Gives the workers one compilation cache, which lasts for this run only.

  Kept longer it could serve programs of another processor, and hide that a
  program no longer compiles. Who names a cache keeps it.
  """
  if hasattr(config, 'workerinput'):  # Workers inherit what follows.
    return
  if 'XLA_FLAGS' not in os.environ:
    os.environ['XLA_FLAGS'] = _accepted_flags()
  if 'JAX_COMPILATION_CACHE_DIR' in os.environ:
    return
  folder = tempfile.mkdtemp(prefix='fedjax_ssl_cache_')
  os.environ['JAX_COMPILATION_CACHE_DIR'] = folder
  os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0.05'
  config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
  """Tests that share programs stay on one worker (--dist loadgroup).

  xdist's own groups change names of tests in a way that pytest 9.2 ignores.
  """
  if config.getvalue('dist') != 'loadgroup':
    return None
  config.option.loadscopereorder = False  # See `pytest_collection_modifyitems`.
  from xdist.scheduler import LoadScopeScheduling

  class Scheduling(LoadScopeScheduling):  # type: ignore[misc]

    def _split_scope(self, nodeid: str) -> str:
      return _group(nodeid)
  return Scheduling(config, log)


# Parts of the names of the contract's tests that are no method.
_PLAIN = ('linear', 'conv', 'clients', 'server')


def _group(nodeid: str) -> str:
  """A test's file; of the contracts, which are the longest, a part of it."""
  file, _, rest = nodeid.partition('::')
  if file.endswith('program_test.py'):
    # The process that a test's name ends with.
    return f'{file} {re.findall(r"[0-9]*(?=]?$)", rest)[0]}'
  if not file.endswith('contract_test.py'):
    return file
  parts = rest.partition('[')[2].rstrip(']').partition('(')[0].split('-')
  return file + ' ' + ' '.join(p for p in parts if p not in _PLAIN)


# Tests that run programs and tools.
_PROGRAMS = ('tests/cli/', 'tests/programs/', 'tests/report/',
             'tests/methods/program_test.py',
             'tests/training/devices_test.py',
             'tests/training/round_hlo_test.py')


# Tests of scripts that measure, of what pip installs, and of the pages of
# results, which lint compares. Flags that a script lacks are found without.
_RARE = tuple(f'tests/programs/{name}_test.py' for name in (
    'accelerator', 'benchmarks', 'conv_layers', 'conv_tiles', 'growth',
    'installed', 'pages', 'peers', 'processes', 'profile', 'torch'))


# Laws of one method each, on whole rounds; those of all are its contract.
_LAWS = 'tests/methods/'


# Files of laws of methods whose oracle has another name.
_ORACLES = {'baselines': 'fixmatch', 'fedmatch_cost': 'fedmatch',
            'mean_teacher': 'fedirm'}

# Methods whose authors' code is another method than the default profile, or has
# only a part of it: what privacy promises is held by laws alone.
_ELSEWHERE = ('feddure', 'dpsgd')


@functools.cache
def _oracle_of(name: str) -> bool:
  return (ROOT / 'tests' / 'oracles' / f'{_ORACLES.get(name, name)}_test.py'
          ).exists()


def _has_oracle(nodeid: str) -> bool:
  """Whether a law is of a method that is held against its authors' code.

  The contract and the oracle of such a method are run by default; its other
  laws, on whole rounds, are thorough.
  """
  name = pathlib.PurePosixPath(nodeid.partition('::')[0]).name
  name = name.removesuffix('_test.py')
  return name not in _ELSEWHERE and _oracle_of(name)


# What comes first: groups of half a minute, of processors or of waiting; those
# that start many processes, which takes a worker the longer the larger it is;
# and those of checkpoints, which collect garbage.
_LONG = ('methods/program_test', 'bench_test', 'kill_test', 'sweep_test',
         'devices_test', 'training/checkpoint', 'distributed_test',
         'paper_', 'defaults_test', 'repeat_test', 'cloud_test', 'page_test',
         'python_errors_test', 'round_hlo_test', 'private_agents_test',
         'contract_test.py fedssl', 'contract_test', 'baselines_test')


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config,
                                  items: list[pytest.Item]) -> None:
  """Workers begin with long groups, then those of many tests.

  Else a group of few tests that take long would be the last, and run alone.
  First of all, tests of programs and of single methods get their marks, which
  -m chooses by.
  """
  for item in items:
    if item.nodeid.startswith(_PROGRAMS):
      item.add_marker('programs')
    elif item.nodeid.startswith(_LAWS) and 'contract_test' not in item.nodeid:
      item.add_marker('laws')
      if _has_oracle(item.nodeid):
        item.add_marker('thorough')
    if item.nodeid.startswith(_RARE):
      item.add_marker('thorough')
  if not hasattr(config, 'workerinput'):
    return
  groups = [_group(item.nodeid) for item in items]
  sizes = collections.Counter(groups)
  def place(group: str) -> tuple[int, int, str]:
    rank = next((i for i, name in enumerate(_LONG) if name in group),
                len(_LONG))
    return rank, -sizes[group], group
  items.sort(key=lambda item: place(_group(item.nodeid)))


def pytest_collection_finish() -> None:
  """What has been imported stays: nobody needs to look for garbage in it.

  Tracing makes many objects that live until their program is compiled; to look
  through them every 700 takes a tenth of the time.
  """
  gc.collect()
  gc.freeze()
  gc.set_threshold(50_000, 10, 50)
  _hear_hangups()


def _hear_hangups() -> None:
  """Has programs that tests start hear a hangup, though `nohup` runs the suite.

  They ignore what this process ignores, but not what it catches.
  """
  if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, lambda number, frame: None)


# Linux ends a process that has more memory maps than this by default; every
# compiled program holds some, and a worker compiles thousands.
_MAPS = 65_530
# Reading their list takes a hundredth of a second, too long for every test.
_torn_down = itertools.count()


class _AtOnce:
  """Prints a failure when it happens: a suite may be ended before its end."""

  def __init__(self, terminal: Any):
    self._terminal = terminal

  def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
    """Prints the name of a test that failed, and the last lines of why."""
    if report.failed:
      why = '\n'.join(report.longreprtext.splitlines()[-20:])
      self._terminal.write_line(f'\nFAILED {report.nodeid}\n{why}')


@pytest.hookimpl(trylast=True)
def pytest_sessionstart(session: pytest.Session) -> None:
  """Has the process that prints say at once what failed."""
  plugins = session.config.pluginmanager
  if (terminal := plugins.get_plugin('terminalreporter')) is not None:
    plugins.register(_AtOnce(terminal))


@functools.cache
def _comes_too_late(group: str) -> bool:
  """Whether the first thorough test of a group has come after the limit.

  The others share what it has made, and are run if it was.
  """
  del group
  limit = float(os.environ.get(_THOROUGH_SECONDS) or 'inf')
  return time.monotonic() - _started > limit


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
  """Skips a thorough test for which there is no time left."""
  if item.get_closest_marker('thorough') and (
      _comes_too_late(_group(item.nodeid))):
    pytest.skip(f'no time left, see {_THOROUGH_SECONDS}')


def pytest_runtest_teardown(item: pytest.Item) -> None:
  """Forgets compiled programs long before their memory maps run out."""
  del item
  if next(_torn_down) % 8:
    return
  try:
    with open('/proc/self/maps', 'rb') as maps:
      held = sum(1 for _ in maps)
  except OSError:
    return
  if held > _MAPS // 3 and 'jax' in sys.modules:
    sys.modules['jax'].clear_caches()
    gc.collect()


@pytest.fixture(autouse=True)
def as_registered() -> Iterator[None]:
  """Takes back what a test registers, which others would find.

  A method that `fit` is given as a function is registered too.
  """
  from fedjax_ssl import task
  from fedjax_ssl.data import datasets
  from fedjax_ssl.running import settings
  known: tuple[dict[str, Any], ...] = (
      *task.REGISTRIES.values(), settings.SETTINGS, datasets.DATASETS)
  before = [dict(one) for one in known]
  yield
  for one, builders in zip(known, before, strict=True):
    one.clear()
    one.update(builders)


@pytest.fixture(scope='session')
def root() -> pathlib.Path:
  """The repository's root."""
  return ROOT


@pytest.fixture(scope='session')
def data_dir() -> pathlib.Path:
  """The folder of `<name>.npz` files that FEDJAX_SSL_DATA names."""
  folder = os.environ.get('FEDJAX_SSL_DATA')
  if not folder:
    pytest.skip('FEDJAX_SSL_DATA names no folder with real data sets')
  return pathlib.Path(folder)


@pytest.fixture(scope='session')
def run_python() -> Iterator[Callable[..., str]]:
  """Runs Python code in a process of its own; see `_run_python`."""
  yield _run_python


def _run_python(code: str, *args: str, devices: int = 1,
                env: dict[str, str] | None = None,
                timeout: float = 1200) -> str:
  """Runs `code` with `devices` CPU devices; returns its standard output.

  The number of devices is fixed when JAX starts, so that another number needs
  another process.

  Args:
    code: Python source.
    *args: become `sys.argv[1:]`.
    devices: CPU devices of that process, at least 1.
    env: variables added to this process's own.
    timeout: seconds after which the process is ended.

  Raises:
    AssertionError: if it exits non-zero; the message ends with its last lines.
  """
  variables = {
      **os.environ, 'JAX_NUM_CPU_DEVICES': str(devices),
      'PYTHONPATH': str(ROOT),
      **(env or {})}
  done = subprocess.run(
      [sys.executable, '-c', code, *args], cwd=ROOT, env=variables,
      stdin=subprocess.DEVNULL, capture_output=True, text=True,
      timeout=timeout, check=False)
  if done.returncode:
    raise AssertionError(
        f'exit {done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}')
  return done.stdout


# A product of XLA's own, forward and backward, with nothing of this library.
_PRODUCT = """
import hashlib
import jax
import jax.numpy as jnp
import numpy as np

def normal(*shape):
  return jnp.asarray(np.random.default_rng(0).standard_normal(shape), 'float32')

def both(kernel, x):
  y, pull = jax.vjp(lambda kernel, x: jnp.dot(x, kernel), kernel, x)
  return y, pull(jnp.sin(y))

for leaf in jax.tree.leaves(jax.jit(both)(normal(3136, 512), normal(5, 3136))):
  print(hashlib.sha256(np.asarray(leaf).tobytes()).hexdigest())
"""


@functools.cache
def _products_see_threads() -> bool:
  one, many = (_run_python(_PRODUCT, devices=n, env={'XLA_FLAGS': ''})
               for n in (1, 8))
  return one != many


@pytest.fixture(scope='session')
def same_bits() -> Callable[[Any, Any], None]:
  """Holds what one number of devices came to against another, to the bit.

  On some processors, such as those with AVX2 and no AVX-512, XLA's own products
  depend in the last bit on the number of threads, which no library above it
  can help. Only where they do is a difference expected.
  """
  def check(found: Any, other: Any) -> None:
    if found != other and _products_see_threads():
      pytest.xfail("XLA's products see the threads on this processor")
    assert found == other
  return check
