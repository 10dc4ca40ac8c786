"""Several processes as one run: joined, given their devices, and ended."""
from __future__ import annotations

from collections.abc import Iterator
import contextlib
import os
import re
import sys
import traceback

import jax

from fedjax_ssl.config import Config, FieldError
from fedjax_ssl.core import checks, client_map
from fedjax_ssl.training import environment, processes

# By option, the environment variable that replaces it if it is left out.
_CLUSTER = {'coordinator_address': 'JAX_COORDINATOR_ADDRESS',
            'num_processes': 'JAX_NUM_PROCESSES',
            'process_id': 'JAX_PROCESS_ID'}
# How XLA is told a number of CPU devices by others.
_FORCED = 'xla_force_host_platform_device_count'
# More devices than these make no processor faster.
_MOST_CPU_DEVICES = 64


def cluster(options: Config) -> tuple[str, int, int] | None:
  """Finds the coordinator, the number of processes and this one's id.

  Returns:
    The three; None without --distributed, or if none of them is given, as on
    clusters that JAX knows.

  Raises:
    ValueError: for flags or variables that do not go together.
  """
  if not options.distributed:
    return None
  found = {name: getattr(options, name) for name in _CLUSTER}
  for name, variable in _CLUSTER.items():
    if found[name] is None:
      found[name] = os.environ.get(variable) or None
  given = {name: value for name, value in found.items() if value is not None}
  if not given:
    return None
  if missing := [name for name in _CLUSTER if name not in given]:
    raise FieldError(*next(iter(given.items())), f'needs {missing[0]}, or the '
                     f'variable {_CLUSTER[missing[0]]}, as well.')
  numbers = [str(given[name]) for name in ('num_processes', 'process_id')]
  if not all(n.isascii() and n.isdigit() for n in numbers) or not (
      int(numbers[1]) < int(numbers[0])):
    raise FieldError('num_processes', numbers[0], 'must be a whole number '
                     'above process_id, which counts from 0.',
                     process_id=numbers[1])
  address = str(given['coordinator_address'])
  # With another form JAX waits for minutes and then ends the process itself.
  match = re.fullmatch(r'(?:[\w.-]+|\[[\w:.%]+\]):(\d{1,5})', address)
  if not match or not 0 < int(match[1]) < 65536:
    raise FieldError('coordinator_address', address, 'must be HOST:PORT of '
                     'process 0, with a port from 1 to 65535.')
  return address, int(numbers[0]), int(numbers[1])


def join(options: Config) -> None:
  """Joins the other processes, before JAX looks for devices.

  Raises:
    ValueError: if nothing says where they are, or not all of them meet.
  """
  where = cluster(options)
  _count_cpu_devices(options, 1 if where is None else where[1])
  if not options.distributed:
    return
  # The loop handles signals itself, in agreement with the other processes.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(*where or ())
  except ValueError as error:
    raise ValueError(
        f'--distributed finds no cluster ({error}); outside of those that JAX '
        'knows, such as TPU pods and Slurm, give --coordinator_address, '
        '--num_processes and --process_id.') from error
  except RuntimeError as error:
    raise ValueError(
        f'--distributed: the processes did not all meet ({error}).') from error


def _count_cpu_devices(options: Config, num_processes: int) -> None:
  """Sets how many devices JAX makes of this process's CPU."""
  forced = re.search(rf'{_FORCED}=(\d+)', os.environ.get('XLA_FLAGS', ''))
  if forced and options.num_devices <= int(forced[1]) * num_processes:
    return
  cores = environment.cores()
  wanted = -(-(options.num_devices or min(
      cores * num_processes, options.cohort_size)) // num_processes)
  with contextlib.suppress(RuntimeError):  # JAX runs already, as in tests.
    jax.config.update('jax_num_cpu_devices',
                      min(wanted, max(_MOST_CPU_DEVICES, cores)))


def devices(wanted: int) -> list[jax.Device]:
  """Returns so many devices, the same number of each process; 0 is all.

  Raises:
    ValueError: if JAX cannot start, there are fewer, or it does not divide.
  """
  found, count = environment.devices(), processes.count()
  if wanted > len(found):
    kept = ('; a process keeps as many of a CPU as its first run asked for, '
            f'{max(_MOST_CPU_DEVICES, environment.cores())} at most'
            if found[0].platform == 'cpu' else '')
    raise FieldError('num_devices', wanted, 'must be at most the number of '
                     f'devices, {len(found)}{kept}.')
  if wanted % count:
    raise FieldError('num_devices', wanted,
                     f'must be a multiple of the {count} processes.')
  if not wanted:
    return found
  return [device for process in range(count) for device in [
      d for d in found if d.process_index == process][:wanted // count]]


@contextlib.contextmanager
def ending(distributed: bool) -> Iterator[None]:
  """Ends this process so that no other waits for it.

  Processes that end together tell each other, so that none of them counts as
  lost. A process that fails alone ends at once: in a regular end it would wait
  for the others, which wait for it. They notice a process that is gone.
  """
  try:
    yield
  except BaseException as error:
    if distributed and processes.count() > 1 and not isinstance(
        error, processes.AgreedError | processes.AgreedExit):
      _end_alone(error)
    raise
  finally:
    if distributed:
      jax.distributed.shutdown()


def _end_alone(error: BaseException) -> None:
  """Prints what happened and exits, without telling the other processes."""
  code: object = 1
  if isinstance(error, SystemExit):
    code = error.code
  elif isinstance(error, ValueError | OSError | MemoryError |
                  jax.errors.JaxRuntimeError):
    code = 2
    print(f'error: {checks.one_line(error)}\nProcess '
          f'{processes.index()} of {processes.count()} ends here; the loss of '
          'another one shows so too. The same commands continue from the '
          'newest checkpoint.', file=sys.stderr)
  else:
    traceback.print_exception(error)
  sys.stdout.flush()
  sys.stderr.flush()
  os._exit(code if isinstance(code, int) else int(code is not None))


def mesh(wanted: int) -> jax.sharding.Mesh | None:
  """Makes the mesh of devices along the clients; None for a single device."""
  found = devices(wanted)
  if len(found) == 1:
    return None
  return jax.make_mesh(
      (len(found),), (client_map.AXIS,), devices=found,
      axis_types=(jax.sharding.AxisType.Auto,))
