"""What a run ran on: versions, commit, devices."""
from __future__ import annotations

from collections.abc import Mapping
import functools
from importlib import metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

from fedjax_ssl import __version__

# Between values of one run.
_THEN = ', then '
_PACKAGES = (
    'jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'numpy')


def devices() -> list[jax.Device]:
  """Returns `jax.devices()`.

  Raises:
    ValueError: if JAX cannot start on them.
  """
  try:
    return jax.devices()
  except (AssertionError, RuntimeError) as error:
    # jaxlib's message is empty if no plug-in of that name is installed.
    raise ValueError(
        f'JAX cannot start with JAX_PLATFORMS='
        f'{os.environ.get("JAX_PLATFORMS", "")}: '
        f'{str(error) or "no such devices here"}') from error


def keep_programs() -> None:
  """Makes JAX keep compiled programs for other processes.

  A folder that the user has named, by JAX_COMPILATION_CACHE_DIR or in code, is
  left as it is; an empty name means that no programs are kept. Nor are they
  where the user's cache folder cannot be made.
  """
  if jax.config.values['jax_compilation_cache_dir'] is not None:
    return
  folder = cache()
  if folder is None:
    return
  try:
    (folder / 'xla').mkdir(parents=True, exist_ok=True)
  except OSError:  # JAX would warn at every program.
    return
  jax.config.update('jax_compilation_cache_dir', str(folder / 'xla'))
  least = 'jax_persistent_cache_min_compile_time_secs'
  jax.config.update(least, min(0.5, jax.config.values[least]))


def cache() -> pathlib.Path | None:
  """Returns the user's cache folder of the library; None without a home."""
  try:
    return pathlib.Path(os.environ.get('XDG_CACHE_HOME') or
                        pathlib.Path.home() / '.cache') / 'fedjax_ssl'
  except RuntimeError:
    return None


def describe() -> dict[str, Any]:
  """Describes versions, git state, devices and machine as JSON values.

  It starts the JAX backend if that has not been started.
  """
  device = devices()[0]
  return {
      'python': platform.python_version(),
      'fedjax_ssl': __version__,
      **{name: _version(name) for name in _PACKAGES},
      **git_state(),
      'devices': f'{jax.device_count()} x {device.platform} '
                 f'({device.device_kind})',
      'processes': jax.process_count(),
      'machine': f'{platform.system()} {platform.machine()}, '
                 f'{os.cpu_count()} x {_processor()}',
  }


def throughout(config: Mapping[str, Any]) -> dict[str, Any]:
  """Describes what a run was on from its start to its end.

  Args:
    config: what the run's `config.json` holds.

  Returns:
    What `describe` returned when it started. Where the run was continued with
    another value, it reads `before, then after`.
  """
  found = {**config['environment']}
  now = {**found}
  for restart in config['restarts']:
    for name, value in restart['environment'].items():
      if now.get(name) != value:
        found[name] = f'{found.get(name, "unknown")}{_THEN}{value}'
        now[name] = value
  return found


def commit(described: Mapping[str, Any]) -> str:
  """Names the commits of an environment by seven digits each."""
  return _THEN.join(word[:7] for word in str(
      described.get('commit', 'unknown')).split(_THEN))


def cores() -> int:
  """Counts the cores that this process may run on."""
  if hasattr(os, 'sched_getaffinity'):
    return len(os.sched_getaffinity(0))
  return os.cpu_count() or 1


@functools.cache
def git_state() -> dict[str, Any]:
  """Returns the commit, and whether tracked files differ; {} without git."""
  folder = pathlib.Path(__file__).parent

  def git(*words: str) -> str:
    return subprocess.run(
        ['git', '-C', str(folder), *words], capture_output=True, text=True,
        check=True, timeout=10).stdout.strip()

  try:
    # An installed copy inside somebody's repository is not at its commit.
    git('ls-files', '--error-unmatch', pathlib.Path(__file__).name)
    return {'commit': git('rev-parse', 'HEAD'),
            'uncommitted_changes': bool(git('status', '--porcelain', '-uno'))}
  except (OSError, subprocess.SubprocessError):
    return {}


def _version(name: str) -> str | None:
  try:
    return metadata.version(name)
  except metadata.PackageNotFoundError:
    return None


def _processor() -> str:
  try:
    with open('/proc/cpuinfo') as lines:
      for line in lines:
        if line.startswith('model name'):
          return line.split(':', 1)[1].strip()
  except OSError:
    pass
  return platform.processor() or 'CPU'
