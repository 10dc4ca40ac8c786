"""The flags that every setting shares; JAX is not needed to read them."""
from __future__ import annotations

from collections.abc import Mapping
import importlib.util
import math
import os
import pathlib
import types
from typing import Any

from absl import flags

from fedjax_ssl.cli import errors
from fedjax_ssl.core import registry

FLAGS = flags.FLAGS

# Those of `core.optimizers`, which loads JAX.
OPTIMIZERS = ('sgd', 'nesterov', 'adam', 'adamw', 'rmsprop')
SCHEDULES = ('constant', 'cosine', 'fixmatch_cosine', 'linear', 'exponential',
             'warmup_cosine')

_STRINGS: dict[str, tuple[Any, str]] = {
    'method': ('fixmatch', 'Name, with overrides of defaults if any, as in '
               '"fixmatch(threshold=0.9)". `fedjax-ssl list methods` lists '
               'them.'),
    'profile': (None, 'Variant of a method that has several, such as "paper" '
                'or "official"; the same as its knob profile.'),
    'model': ('cnn', 'Network, with knobs if any, as in "cnn(width=16)".'),
    'dataset': ('digits', 'Data set: digits, or any name with a '
                '<data_dir>/<name>.npz, or a TensorFlow Datasets name.'),
    'data_dir': (None, 'Folder of the .npz files; default: the environment '
                 'variable FEDJAX_SSL_DATA.'),
    'embeddings': (None, 'Texts only: .npz of word vectors (words, vectors) or '
                   'of vectors made beforehand (texts, sha256), instead of '
                   'trained ones; see `fedjax-ssl embed-texts`.'),
    'split': ('official', 'official, or train/test or train/validation/test '
              'in percent or counts, from all examples merged.'),
    'partition_file': (None, 'Deal the rows as this file says; every run '
                       'writes such a file to its workdir.'),
    'weak': ('flip_crop', 'Weak augmentation.'),
    'labeled_view': (None, 'Augmentation of labeled rows, one of the weak '
                     'ones; default: --weak.'),
    'strong': ('ra_mc', 'Strong augmentation.'),
    'lr_schedule': ('constant', 'Factor on the learning rate over the rounds: '
                    + ', '.join(SCHEDULES) + '; knobs as in '
                    '"cosine(final=0.1)".'),
    'workdir': (None, 'Folder of the run; default: a new one under runs/. An '
                'old one is continued.'),
    'coordinator_address': (None, 'HOST:PORT of process 0, for --distributed '
                            'outside of clusters that JAX knows.'),
}
_INTEGERS: dict[str, tuple[Any, str, Any]] = {
    'partition_seed': (None, 'Seed of the partition; default: the seed of '
                       'the run.', 0),
    'num_clients': (20, 'Clients of the federation.', 1),
    'num_labeled_clients': (-1, 'The first so many clients hold labels; -1 '
                            'where the setting has no such rule.', -1),
    'cohort_size': (5, 'Clients drawn for a round, at most num_clients; of '
                    "rscfed, for each of its groups. 5 is FedDure's number "
                    'and stands where a setting has none of its own.', 1),
    'num_rounds': (100, 'Rounds.', 1),
    'schedule_rounds': (None, 'Rounds that schedules span; default: '
                        'num_rounds of the first start.', 1),
    'rounds_per_task': (0, 'Rounds before the next task, where the setting '
                        'is a stream of tasks; else 0.', 0),
    'labels_per_class': (None, 'Labeled examples of each class over all '
                         'clients together.', 1),
    'local_epochs': (1, 'Passes over its own rows that a client makes a '
                     'round.', 1),
    'local_steps': (0, 'If positive, steps a round instead of epochs.', 0),
    'labeled_batch': (10, 'Rows of a labeled batch.', 1),
    'unlabeled_batch': (50, "Rows of an unlabeled batch; 0 divides a client's "
                        'unlabeled rows over its labeled steps.', 0),
    'seed': (0, 'Seed of initial values and draws.', 0),
    'eval_every': (5, 'Rounds between evaluations; 0: at the end only.', 0),
    'checkpoint_every': (10, 'Rounds between checkpoints; 0: at the end '
                         'only.', 0),
    'chunk_size': (0, "Clients under one vmap; 0: a device's whole share.",
                   0),
    'num_devices': (0, 'Devices to split the clients over, of all processes '
                    'together; 0: every accelerator, or one for each CPU '
                    'core.', 0),
    'num_processes': (None, 'Processes of the run, with '
                      '--coordinator_address.', 1),
    'process_id': (None, 'Which of them this one is, from 0.', 0),
}
_FLOATS: dict[str, tuple[Any, str, Any, Any]] = {
    'validation_fraction': (0.05, 'Share of the training examples that the '
                            'server holds out.', 0.0, 0.9),
    'alpha': (0.5, 'Concentration of Dirichlet partitions: towards 0 one '
              'class a client, towards infinity equal mixes.', None, None),
    'labeled_fraction': (None, 'Labeled share of the examples, or of each '
                         "client's, instead of labels_per_class.", 0.0, 1.0),
    'learning_rate': (0.05, "Of a client's optimizer.", None, None),
    'momentum': (0.0, 'Of sgd, nesterov and rmsprop.', None, None),
    'weight_decay': (0.0, 'L2 term in the gradient; decoupled for adamw.',
                     None, None),
    'max_update_norm': (0.0, 'Leave out updates beyond this norm; 0: off.',
                        0.0, None),
}
_CHOICES: dict[str, tuple[Any, Any, str]] = {
    'labels': ('few', ('few', 'all'), 'few, or all: the upper bound.'),
    'labels_at': ('clients', ('clients', 'server'), 'Who holds the labels.'),
    'dirichlet': ('clients', ('clients', 'shares', 'capped'), 'Where all rows '
                  'are dealt in one pool: clients draw a class mix each, alpha '
                  'in total, and hold as many rows; they draw one, alpha for '
                  'each class, and classes are cut by its shares; or classes '
                  'are cut up, alpha for each client, capped at the mean.'),
    'optimizer': ('sgd', OPTIMIZERS, 'Optimizer of a client.'),
    'norm': ('auto', ('auto', 'none', 'batch', 'group', 'static'),
             "Normalization layers; auto: the model's own."),
    'seed_map': ('auto', ('auto', 'map', 'vmap'), 'Several seeds one after '
                 'another or in one program; auto: map on CPU.'),
    'client_map': ('auto', ('auto', 'map', 'vmap'), 'Clients one after '
                   'another or under vmap; auto: map on CPU.'),
    'conv_impl': ('auto', ('auto', 'lax', 'reordered', 'gemm', 'winograd'),
                  'Form of the convolutions; auto: by shape and backend.'),
    'aggregation_order': ('fixed', ('fixed', 'fast'), 'fixed: the same bits '
                          'on any number of devices.'),
    'compute_dtype': ('float32', ('float32', 'bfloat16'), "Of the networks' "
                      'arithmetic; parameters stay float32.'),
}
_BOOLEANS: dict[str, tuple[Any, str]] = {
    'bounds': (False, 'Also run fedavg with few and with all labels: the '
               'lower and the upper bound.'),
    'distributed': (False, 'One run over several processes, on one machine or '
                    'many; each is started with the same flags.'),
    'eval_only': (False, 'Evaluate the newest checkpoint of the workdir, with '
                  'the flags stored there, and stop.'),
    'pictures': (False, 'At every checkpoint draw what the method generates, '
                 'to <workdir>/pictures; of methods that generate images.'),
    'tensorboard': (False, 'Mirror metrics to <workdir>/tensorboard; needs '
                    'the extra [tensorboard].'),
}
# All that have a name and a default of their own; `seeds` has None.
_KINDS: tuple[Mapping[str, tuple[Any, ...]], ...] = (
    _STRINGS, _INTEGERS, _FLOATS, _CHOICES, _BOOLEANS)
# JAX cuts larger seeds to 32 bits, and two runs would be one.
_LARGEST_SEED = 2**32 - 1
# May differ when a run is continued: they change no bit of the model, but for
# seed_map, whose vmap rounds otherwise.
FREE = ('num_rounds', 'eval_every', 'checkpoint_every', 'data_dir', 'workdir',
        'embeddings', 'pictures', 'seed_map', 'num_devices', 'eval_only',
        'bounds', 'tensorboard', 'distributed', 'coordinator_address',
        'num_processes', 'process_id')
# May differ between the processes of a run.
OWN = ('coordinator_address', 'data_dir', 'embeddings', 'num_processes',
       'partition_file', 'process_id', 'workdir')
# Not taken from a run's folder when it is evaluated: about this process.
_OF_PROCESS = ('workdir', 'eval_only', 'num_devices', 'tensorboard',
               'pictures', 'distributed', 'coordinator_address',
               'num_processes', 'process_id')


def define() -> None:
  """Defines every shared flag."""
  for name, (default, text) in _STRINGS.items():
    flags.DEFINE_string(name, default, text)
  for name, (default, text, least) in _INTEGERS.items():
    flags.DEFINE_integer(
        name, default, text, lower_bound=least,
        upper_bound=_LARGEST_SEED if 'seed' in name else 2**31 - 1)
  for name, (default, text, least, most) in _FLOATS.items():
    flags.DEFINE_float(name, default, text, lower_bound=least,
                       upper_bound=most)
    flags.register_validator(
        name, lambda value: value is None or math.isfinite(value),
        message='must be a finite number')
  flags.register_validator('alpha', lambda value: value > 0,
                           message='must be above 0')
  for name, (default, allowed, text) in _CHOICES.items():
    flags.DEFINE_enum(name, default, allowed, text)
  for name, (default, text) in _BOOLEANS.items():
    flags.DEFINE_bool(name, default, text)
  flags.DEFINE_list('seeds', None, 'Several seeds, as in 0,1,2, instead of '
                    'seed.')


def all_names() -> list[str]:
  """The names of the shared flags."""
  return [*_STRINGS, *_INTEGERS, *_FLOATS, *_CHOICES, *_BOOLEANS, 'seeds']


def values() -> dict[str, Any]:
  """The shared flags' values, as JSON can hold them."""
  return {name: FLAGS[name].value for name in all_names()}


def options() -> Any:
  """Returns the shared flags' values as attributes, for ways to deal rows."""
  return types.SimpleNamespace(**values())


def defaults() -> dict[str, Any]:
  """Returns the shared flags' own defaults."""
  return {**{name: row[0] for kind in _KINDS for name, row in kind.items()},
          'seeds': None}


def check(setting: str = '', script: str = '') -> None:
  """Settles flags that exclude each other.

  A flag on the command line or in a flagfile beats a setting's default.

  Args:
    setting: its name, with which --eval_only is compared.
    script: path of the program, if the setting is a user's own.

  Raises:
    ValueError: if they cannot be settled.
  """
  for name in ('workdir', 'data_dir', 'partition_file', 'embeddings'):
    if FLAGS[name].value:  # A shell leaves the ~ of --workdir=~/x alone.
      FLAGS[name].value = os.path.expanduser(str(FLAGS[name].value))
  if FLAGS.eval_only:
    if FLAGS.workdir is None:
      raise ValueError('--eval_only needs --workdir.')
    _take_stored(FLAGS.workdir, setting, script)
  if FLAGS.profile is not None:
    errors.check_profile(FLAGS.method, FLAGS.profile)
  _check_conflicts()
  _check_texts()
  seeds()


def _check_conflicts() -> None:
  """Settles flags of which one is to be given."""
  if FLAGS['seed'].present:
    if FLAGS['seeds'].present and FLAGS.seeds:
      raise ValueError(f'Give one of --seed and --seeds, not {FLAGS.seed} and '
                       f'{",".join(FLAGS.seeds)}.')
    FLAGS['seeds'].value = None
  if FLAGS['labeled_fraction'].present and not (
      FLAGS['labels_per_class'].present):
    FLAGS['labels_per_class'].value = None


def _check_texts() -> None:
  """Refuses texts that no run can take."""
  for name in _STRINGS:  # run.flags has a line for each.
    if name != 'workdir' and len((FLAGS[name].value or '').splitlines()) > 1:
      raise ValueError(f'--{name}={FLAGS[name].value!r} must be one line.')
  if FLAGS.workdir == '':
    raise ValueError('--workdir= is empty; name a folder or leave it out.')
  if FLAGS.workdir and '://' in FLAGS.workdir:
    raise ValueError(f'--workdir={FLAGS.workdir} is no local folder; mount it '
                     'first.')
  if FLAGS.tensorboard and importlib.util.find_spec('tensorboardX') is None:
    raise ValueError('--tensorboard needs the package tensorboardX: '
                     "pip install -e '.[tensorboard]' in this repository's "
                     'folder.')


def _take_stored(workdir: str, setting: str, script: str) -> None:
  """Flags that are not given become those of the run in the folder.

  Those that are given stay, and are compared with the run's like at a restart.
  """
  from fedjax_ssl.report import command
  from fedjax_ssl.training import workdir as workdir_lib
  config = workdir_lib.read_config(workdir)
  stored = config['flags']
  was = command.program_of(config)
  if was and pathlib.Path(was).name != pathlib.Path(script or setting).name:
    raise ValueError(f'--workdir={workdir} is a run of {was}, not of '
                     f'{script or setting}; `fedjax-ssl evaluate {workdir}` '
                     'evaluates it.')
  for name in all_names():
    if name in stored and name not in _OF_PROCESS and not FLAGS[name].present:
      value = stored[name]
      FLAGS[name].value = [*map(str, value)] if name == 'seeds' else value


def seeds() -> list[int]:
  """The seeds of the run, from --seeds or --seed."""
  if not FLAGS.seeds:
    return [FLAGS.seed]
  try:
    found = [int(text) for text in FLAGS.seeds]
  except ValueError:
    found = [-1]
  if min(found) < 0 or max(found) > _LARGEST_SEED or (
      len(set(found)) < len(found)):
    raise ValueError(f'--seeds={",".join(FLAGS.seeds)} must be different '
                     f'whole numbers from 0 to {_LARGEST_SEED}, separated by '
                     'commas.')
  return found


def method() -> str:
  """--method with --profile as one of its knobs."""
  if FLAGS.profile is None:
    return FLAGS.method
  name, knobs = registry.parse(FLAGS.method)
  knobs = {**knobs, 'profile': FLAGS.profile}
  return f'{name}({", ".join(f"{k}={v!r}" for k, v in knobs.items())})'
