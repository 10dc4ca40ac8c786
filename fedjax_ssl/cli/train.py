"""`fedjax-ssl train`: flags read and checked, JAX prepared, runs made.

Flags are read before JAX is imported, so that a typo is refused at once.
"""
from __future__ import annotations

from collections.abc import Callable, Sequence
import contextlib
import os
import pathlib
import signal
import sys
from typing import Any

from absl import app, logging
from absl import flags as absl_flags

from fedjax_ssl.cli import errors, flags, settings, stopping
from fedjax_ssl.cli.settings import Setting

FLAGS = flags.FLAGS

flags.define()


def main(setting: Setting, words: Sequence[str]) -> None:
  """Trains a setting; ends the process if it cannot, and if asked for help.

  Args:
    setting: how rows are dealt, and defaults of flags.
    words: flags.
  """
  for name, value in setting.defaults.items():
    FLAGS.set_default(name, value)
  for name in flags.all_names():  # For --help.
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[name])
  program = sys.modules['__main__']
  if _is_ours(setting) and not program.__doc__:
    program.__doc__ = setting.text()  # absl shows it above the flags.
  with stopping.listening():
    app.run(lambda argv: _report_errors(_run, setting, argv, words),
            argv=[sys.argv[0], *words],
            flags_parser=_read_flags)


def _is_ours(setting: Setting) -> bool:
  return settings.SETTINGS.get(setting.name) is setting


def _read_flags(argv: Sequence[str]) -> Any:
  """Reads the flags; ends the process if they are wrong or ask for help."""
  try:
    return _report_errors(FLAGS, argv)
  except SystemExit as ended:
    if ended.code == 1:  # So absl ends where it has printed the help.
      sys.exit(0)
    raise


def _report_errors(function: Callable[..., Any], *args: Any) -> Any:
  """Turns what a user can mend into one line and exit code 2.

  Faults that may pass by themselves, such as a full disk, have code 75, so that
  sweeps try them again.
  """
  try:
    return function(*args)
  except BrokenPipeError:  # Who reads the output has seen enough.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
  except (ValueError, OSError, MemoryError, OverflowError,
          absl_flags.Error) as error:
    if FLAGS.is_parsed() and FLAGS.verbosity > 0:
      raise
    print(f'error: {errors.line(error)}', file=sys.stderr)
    sys.exit(75 if errors.may_pass(error) else 2)
  except KeyboardInterrupt:
    stopping.end(signal.SIGINT)
    sys.exit(130)


def _run(setting: Setting, argv: Sequence[str], words: Sequence[str]) -> None:
  """Checks the flags, then trains."""
  if len(argv) > 1:
    raise ValueError(f'{argv[1]!r} is no flag; flags begin with --.')
  script = '' if _is_ours(setting) else sys.argv[0]
  flags.check(setting.name, script)
  from fedjax_ssl.cli import devices, runs
  from fedjax_ssl.report import command
  from fedjax_ssl.training import environment, processes
  devices.place()
  _prepare_jax()
  environment.devices()  # Starts JAX, or says why not.
  with devices.ending():
    processes.together(devices.devices)
    runs.train(setting, command.origin(
        words, setting='' if script else setting.name, script=script))


def _prepare_jax() -> None:
  """Devices, the compilation cache and a quiet log, before JAX starts."""
  import jax

  from fedjax_ssl.cli import devices
  logging.use_absl_handler()
  if FLAGS.verbosity <= 0:
    logging.set_verbosity(logging.WARNING)
  devices.join()
  if not os.environ.get('JAX_COMPILATION_CACHE_DIR'):
    with contextlib.suppress(RuntimeError):  # A user without a home.
      cache = pathlib.Path(os.environ.get('XDG_CACHE_HOME') or
                           pathlib.Path.home() / '.cache')
      jax.config.update('jax_compilation_cache_dir',
                        str(cache / 'fedjax_ssl' / 'xla'))
      jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.5)
