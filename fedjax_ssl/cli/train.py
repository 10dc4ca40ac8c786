"""`fedjax-ssl train`: reads and checks flags, starts JAX, makes the runs.

Flags are read here and nowhere else, before JAX is imported, so that a typo is
refused at once. All other modules receive the resulting `config.Config`.
"""
from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
import os
import pathlib
import signal
import sys
from typing import Any

from absl import app, flags, logging

from fedjax_ssl import config
from fedjax_ssl.cli import errors, exit_codes, flag_help, method_names
from fedjax_ssl.core import blame, checks, flagfile_lines, registry
from fedjax_ssl.running import settings, stopping, stored_options
from fedjax_ssl.running.settings import Setting

FLAGS = flags.FLAGS


def _define(option: config.Option) -> None:
  """Defines the flag of an option."""
  name, default, text, bound = (
      checks.flag(option.name), option.default, option.help, option.bound)
  if option.choices:
    flags.DEFINE_enum(name, default, option.choices, text)
  elif option.kind is bool:
    flags.DEFINE_bool(name, default, text)
  elif option.name == 'imports':  # The only one that may come twice.
    flags.DEFINE_multi_string(name, list(default), text)
  elif option.kind is tuple:
    flags.DEFINE_list(name, default, text)
  elif option.kind is int:
    flags.DEFINE_integer(name, default, text, lower_bound=int(bound.least),
                         upper_bound=int(bound.most))
  elif option.kind is float:
    flags.DEFINE_float(
        name, default, text,
        lower_bound=None if bound.above else float(bound.least),
        upper_bound=None if bound.below or bound.most == checks.MOST
        else float(bound.most))
  else:
    flags.DEFINE_string(name, default, text)


for _option in config.OPTIONS.values():
  _define(_option)


def begin(defaults: Mapping[str, Any]) -> None:
  """Gives all flags these defaults, by option, and makes none of them given."""
  for name, option in config.OPTIONS.items():
    flag = checks.flag(name)
    FLAGS[flag].unparse()  # What this process has read before.
    FLAGS.set_default(flag, defaults.get(name, option.default))


def main(setting: Setting, words: Sequence[str]) -> None:
  """Trains a setting, and ends the process as absl's programs do.

  Args:
    setting: how rows are dealt, and defaults of flags.
    words: flags.

  Raises:
    SystemExit: in any case, with the exit code; 0 if the run is at its end, or
      help was asked for.
  """
  begin(setting.defaults)
  for name in config.OPTIONS:  # For --helpfull and --help=true.
    FLAGS.register_key_flag_for_module(sys.argv[0], FLAGS[checks.flag(name)])
  main_module = sys.modules['__main__']
  if _is_ours(setting):  # absl shows it above the flags.
    main_module.__doc__ = setting.text()
  if flag_help.is_asked(words, FLAGS):
    _report_errors(_print_help, main_module.__doc__ or setting.text())
    sys.exit(0)
  with stopping.listening(), checks.marking('--'):
    app.run(lambda argv: _report_errors(_run, setting, argv, words),
            argv=[sys.argv[0], *words],
            flags_parser=_read_flags)


def options(setting: str = '', script: str = '') -> config.Config:
  """Returns what the flags say.

  Args:
    setting: its name; --eval_only refuses a stored run of another setting.
    script: path of the program, if the setting is a user's own.

  Raises:
    ValueError: for a value that a flag does not take, or flags that exclude
      each other.
  """
  found, given = values(), named()
  if FLAGS.eval_only and FLAGS.workdir:
    # Flags given explicitly are kept here and checked against the run later,
    # as at a restart.
    folder = os.path.expanduser(FLAGS.workdir)
    taken = {name: value for name, value in _stored(
        folder, setting, script).items()
             if name in found and name not in given
             and not config.OPTIONS[name].this_start}
    stored_options.check(folder, taken)
    found |= taken
  known = settings.SETTINGS.get(setting)
  if (known and known.any_data and not FLAGS.eval_only
      and 'dataset' not in given):
    _need_dataset(found['data_dir'])
  asked = config.resolve(found, given)
  if asked.trackers:
    from fedjax_ssl.training import trackers
    if lacking := trackers.lacking(asked.trackers):
      told = f'--track={",".join(asked.track)}' if asked.track else (
          '--tensorboard')
      raise ValueError(f'{told}: {lacking}')
  return asked


def _need_dataset(data_dir: str | None) -> None:
  """Refuses a folder of data sets of which none is named.

  Raises:
    FieldError: if there is a folder; the message lists its files.
  """
  if not data_dir:
    return  # A first look, at the default.
  from fedjax_ssl.data import datasets
  place = pathlib.Path(os.path.expanduser(data_dir))
  is_bucket = '://' in data_dir
  if place.is_file():
    reason = (f'is a file: give its folder, --data_dir={place.parent}, and its '
              f'name, --dataset={place.stem}.')
  elif (place / 'train').is_dir():
    place = place.resolve()
    reason = (f'is a data set: give the folder that it is in, --data_dir='
              f'{place.parent}, and its name, --dataset={place.name}.')
  elif not is_bucket and not place.is_dir():
    reason = 'is no folder.'
  else:
    names = () if is_bucket else datasets.in_folder(place)
    reason = 'which of its data sets? Give --dataset=NAME' + (
        f', one of {", ".join(names)}.' if names else '.' if is_bucket else
        '; it holds no .npz or .csv, and no folder with train/.')
  raise checks.FieldError('data_dir', data_dir, reason)


def named() -> set[str]:
  """Returns the options whose flags the command or its flagfile gives."""
  return {name for name in config.OPTIONS
          if FLAGS[checks.flag(name)].present}


def values() -> dict[str, Any]:
  """Returns what the flags say, by option."""
  return {name: FLAGS[checks.flag(name)].value for name in config.OPTIONS}


def _stored(workdir: str, setting: str, script: str) -> dict[str, Any]:
  """Returns the flags of the run in the folder."""
  from fedjax_ssl.training import command, own_code
  from fedjax_ssl.training import workdir as workdir_lib
  found = own_code.found_again(workdir_lib.read_config(workdir), workdir)
  was = command.program_of(found)
  if was and pathlib.Path(was).name != pathlib.Path(script or setting).name:
    raise ValueError(f'--workdir={workdir} is a run of {was}, not of '
                     f'{script or setting}; `fedjax-ssl evaluate {workdir}` '
                     'evaluates it.')
  return found['flags']


def _is_ours(setting: Setting) -> bool:
  return settings.SETTINGS.get(setting.name) is setting


def _print_help(about: str) -> None:
  """Prints what a setting is about, and its flags."""
  print(flags.text_wrap(about.strip(), 80), *flag_help.lines(FLAGS), sep='\n',
        flush=True)


def _read_flags(argv: Sequence[str]) -> Any:
  """Reads the flags; ends the process if they are wrong or ask for help."""
  try:
    return _report_errors(_parse, argv)
  except SystemExit as ended:
    if ended.code == 1:  # absl exits like this after it has printed the help.
      sys.exit(0)
    raise


def _parse(argv: Sequence[str]) -> Any:
  """Reads the flags; a wrong one says where a flagfile has it."""
  # absl leaves out a file without a name, and does not name one of no text.
  for _ in flagfile_lines.read(argv):
    pass
  try:
    return read(argv)
  except (flags.UnrecognizedFlagError, flags.IllegalFlagValueError) as error:
    if place := errors.place(error, argv):
      error.add_note(place)
    raise


def read(argv: Sequence[str]) -> list[str]:
  """Sets the flags to what a command says.

  A flag of the command replaces its rival of a flagfile before it.

  Args:
    argv: the program and its words.

  Returns:
    The program, and words that are no flags.

  Raises:
    absl.flags.Error: for an unknown flag, or a value that one does not take.
  """
  # Here and not by absl, as a pipe can be read only once.
  words = FLAGS.read_flags_from_files(argv[1:], force_gnu=False)
  left = FLAGS([argv[0], *words])
  for pair in config.RIVALS:
    typed = [name for name in _names(argv[1:]) if name in pair]
    found = [name for name in _names(words) if name in pair]
    of_files = collections.Counter(found) - collections.Counter(typed)
    if typed and {*typed} == {*found[-1:]} and typed[0] not in of_files:
      for other in of_files:
        FLAGS[other].unparse()
  return left


def _names(words: Sequence[str]) -> list[str]:
  """Returns the names of the flags among words, in their order."""
  found = []
  for before, word in zip(['', *words], words, strict=False):
    if word == '--':
      break
    if word.startswith('-') and not flag_help.takes_next(before, FLAGS):
      found.append(word.lstrip('-').partition('=')[0])
  return found


def _report_errors(function: Callable[..., Any], *args: Any) -> Any:
  """Turns what a user can mend into one line, and the exit code that fits."""
  try:
    return function(*args)
  except BrokenPipeError:  # The reader of the output has closed it.
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    sys.exit(0)
  except (ValueError, OSError, MemoryError, OverflowError, RuntimeError,
          flags.Error) as error:
    if isinstance(error, RuntimeError) and not blame.is_full(error) or (
        FLAGS.is_parsed() and FLAGS.verbosity > 0):
      raise
    print(f'error: {errors.line(error, values())}{_by_default(error)}',
          file=sys.stderr)
    sys.exit(exit_codes.of(error))
  except KeyboardInterrupt:
    stopping.end(signal.SIGINT)


def _by_default(error: BaseException) -> str:
  """Says that nobody gave the flag that an error is about, or nothing."""
  field = getattr(error, 'field', '')
  if field not in config.OPTIONS or not FLAGS.is_parsed() or (
      FLAGS.eval_only or field in named()
      or getattr(error, 'value', None) != values()[field]):
    return ''
  return f' (--{checks.flag(field)} has its default.)'


def _run(setting: Setting, argv: Sequence[str], words: Sequence[str]) -> None:
  """Checks the flags, then trains."""
  if len(argv) > 1:
    raise ValueError(f'{argv[1]!r} is no flag; flags begin with --.')
  script = '' if _is_ours(setting) else sys.argv[0]
  told = options(setting.name, script)
  if not told.imports and 'fedjax_ssl.methods' not in sys.modules:
    method_names.check(told.method)  # Others may have registered.
  from fedjax_ssl.running import devices, runs
  from fedjax_ssl.training import command, environment, processes
  logging.use_absl_handler()
  if FLAGS.verbosity <= 0:
    logging.set_verbosity(logging.WARNING)
  devices.join(told)
  environment.keep_programs()
  environment.devices()  # Starts JAX, or says why not.
  with devices.ending(told.distributed):
    processes.together(lambda: devices.devices(told.num_devices))
    for place in told.imports:
      registry.import_place(place)
    folders = runs.train(setting, told, command.origin(
        words, setting='' if script else setting.name, script=script),
        # The data decide nothing of a stored run any more.
        given={*config.OPTIONS} if told.eval_only else named())
    if told.report and folders and processes.is_first():
      from fedjax_ssl.cli import report
      from fedjax_ssl.report import printing
      page = report.write(folders, folders[0] / 'report',
                          title=f'{setting.name}: {told.dataset}')
      printing.say(f'Report: {page}')


