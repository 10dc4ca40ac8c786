"""Every option of a run, once: name, type, default, range and help.

The flags of `fedjax-ssl train` are made from it, and what `config.json` holds
of them; JAX is not needed to read it.
"""
from __future__ import annotations

from collections.abc import Sequence
import math
from typing import Any, NamedTuple

# JAX cuts larger seeds to 32 bits, and two runs would be one.
LARGEST_SEED = 2**32 - 1
# Those of `core.optimizers`, which loads JAX.
OPTIMIZERS = ('sgd', 'nesterov', 'adam', 'adamw', 'rmsprop')
SCHEDULES = ('constant', 'cosine', 'fixmatch_cosine', 'linear', 'exponential',
             'warmup_cosine')


class Option(NamedTuple):
  """What a run can be told.

  Attributes:
    name: of the flag, and in `config.json`.
    kind: of its value; a list is one of words.
    default: where neither the user nor the setting says another; None: no
      value.
    help: for people.
    least: the smallest number allowed.
    most: the largest one.
    above: a number that is too small itself.
    choices: all words allowed, if they are few.
    may_change: when a run is continued. Such options change no bit of the
      model, but for seed_map, whose vmap rounds otherwise.
    per_process: may differ between the processes of a run.
    this_start: is about one start of the program, so that the evaluation of a
      stored run does not take it from there.
  """

  name: str
  kind: type
  default: Any
  help: str
  least: float | None = None
  most: float | None = None
  above: float | None = None
  choices: Sequence[str] = ()
  may_change: bool = False
  per_process: bool = False
  this_start: bool = False

  def fault(self, value: Any) -> str:
    """Returns what a number must be and is not; '' if nothing is wrong."""
    if value is None or self.kind is not float:
      return ''
    if not math.isfinite(value):
      return 'must be a finite number'
    if self.above is not None and not value > self.above:
      return f'must be above {self.above:g}'
    return ''


_ALL = (
    Option('method', str, 'fixmatch',
           'Name, with overrides of defaults if any, as in '
           '"fixmatch(threshold=0.9)". `fedjax-ssl list methods` lists them.'),
    Option('profile', str, None,
           'Variant of a method that has several, such as "paper" or '
           '"official"; the same as its knob profile.'),
    Option('model', str, 'cnn',
           'Network, with knobs if any, as in "cnn(width=16)".'),
    Option('dataset', str, 'digits',
           'Data set: digits, or any name with a <data_dir>/<name>.npz, or a '
           'TensorFlow Datasets name.'),
    Option('data_dir', str, None,
           'Folder of the .npz files; default: the environment variable '
           'FEDJAX_SSL_DATA.', may_change=True, per_process=True),
    Option('embeddings', str, None,
           'Texts only: .npz of word vectors (words, vectors) or of vectors '
           'made beforehand (texts, sha256), instead of trained ones; see '
           '`fedjax-ssl embed-texts`.', may_change=True, per_process=True),
    Option('split', str, 'official',
           'official, or train/test or train/validation/test in percent or '
           'counts, from all examples merged.'),
    Option('partition_file', str, None,
           'Deal the rows as this file says; every run writes such a file to '
           'its workdir.', per_process=True),
    Option('weak', str, 'flip_crop',
           'Weak augmentation.'),
    Option('labeled_view', str, None,
           'Augmentation of labeled rows, one of the weak ones; default: '
           '--weak.'),
    Option('strong', str, 'ra_mc',
           'Strong augmentation.'),
    Option('lr_schedule', str, 'constant',
           'Factor on the learning rate over the rounds: '
           + ', '.join(SCHEDULES) + '; knobs as in "cosine(final=0.1)".'),
    Option('workdir', str, None,
           'Folder of the run; default: a new one under runs/. An old one is '
           'continued.', may_change=True, per_process=True, this_start=True),
    Option('coordinator_address', str, None,
           'HOST:PORT of process 0, for --distributed outside of clusters '
           'that JAX knows.', may_change=True, per_process=True,
           this_start=True),
    Option('partition_seed', int, None,
           'Seed of the partition; default: the seed of the run.',
           least=0, most=LARGEST_SEED),
    Option('num_clients', int, 20,
           'Clients of the federation.', least=1),
    Option('num_labeled_clients', int, -1,
           'The first so many clients hold labels; -1 where the setting has '
           'no such rule.', least=-1),
    Option('cohort_size', int, 5,
           'Clients drawn for a round, at most num_clients; of rscfed, for '
           "each of its groups. 5 is FedDure's number and stands where a "
           'setting has none of its own.', least=1),
    Option('num_rounds', int, 100,
           'Rounds.', least=1, may_change=True),
    Option('schedule_rounds', int, None,
           'Rounds that schedules span; default: num_rounds of the first '
           'start.', least=1),
    Option('rounds_per_task', int, 0,
           'Rounds before the next task, where the setting is a stream of '
           'tasks; else 0.', least=0),
    Option('labels_per_class', int, None,
           'Labeled examples of each class over all clients together.',
           least=1),
    Option('local_epochs', int, 1,
           'Passes over its own rows that a client makes a round.',
           least=1),
    Option('local_steps', int, 0,
           'If positive, steps a round instead of epochs.',
           least=0),
    Option('labeled_batch', int, 10,
           'Rows of a labeled batch.', least=1),
    Option('unlabeled_batch', int, 50,
           "Rows of an unlabeled batch; 0 divides a client's unlabeled rows "
           'over its labeled steps.', least=0),
    Option('seed', int, 0,
           'Seed of initial values and draws.', least=0, most=LARGEST_SEED),
    Option('eval_every', int, 5,
           'Rounds between evaluations; 0: at the end only.',
           least=0, may_change=True),
    Option('checkpoint_every', int, 10,
           'Rounds between checkpoints; 0: at the end only.',
           least=0, may_change=True),
    Option('chunk_size', int, 0,
           "Clients under one vmap; 0: a device's whole share.",
           least=0),
    Option('num_devices', int, 0,
           'Devices to split the clients over, of all processes together; 0: '
           'every accelerator, or one for each CPU core.',
           least=0, may_change=True, this_start=True),
    Option('num_processes', int, None,
           'Processes of the run, with --coordinator_address.',
           least=1, may_change=True, per_process=True, this_start=True),
    Option('process_id', int, None,
           'Which of them this one is, from 0.',
           least=0, may_change=True, per_process=True, this_start=True),
    Option('validation_fraction', float, 0.05,
           'Share of the training examples that the server holds out.',
           least=0.0, most=0.9),
    Option('alpha', float, 0.5,
           'Concentration of Dirichlet partitions. Where each class is cut up '
           'over the clients, as in most settings, it is that of each client, '
           'and 1 makes all cuts equally likely; with --dirichlet=clients a '
           "client's total over the C classes, alpha / C each; with "
           '--dirichlet=shares that of each class. Towards 0 a class goes to '
           'one client and some clients may get no rows; towards infinity all '
           "have the data's mix.", above=0.0),
    Option('labeled_fraction', float, None,
           "Labeled share of the examples, or of each client's, instead of "
           'labels_per_class.', least=0.0, most=1.0),
    Option('learning_rate', float, 0.05,
           "Of a client's optimizer."),
    Option('momentum', float, 0.0,
           'Of sgd, nesterov and rmsprop.'),
    Option('weight_decay', float, 0.0,
           'L2 term in the gradient; decoupled for adamw.'),
    Option('max_update_norm', float, 0.0,
           'Leave out updates beyond this norm; 0: off.', least=0.0),
    Option('labels', str, 'few',
           'few, or all: the upper bound.', choices=('few', 'all')),
    Option('labels_at', str, 'clients',
           'Who holds the labels.', choices=('clients', 'server')),
    Option('dirichlet', str, 'clients',
           'Where all rows are dealt in one pool: clients draw a class mix '
           'each, alpha in total, and hold as many rows; they draw one, alpha'
           ' for each class, and classes are cut by its shares; or classes '
           'are cut up, alpha for each client, capped at the mean.',
           choices=('clients', 'shares', 'capped')),
    Option('optimizer', str, 'sgd',
           'Optimizer of a client.',
           choices=OPTIMIZERS),
    Option('norm', str, 'auto',
           "Normalization layers; auto: the model's own.",
           choices=('auto', 'none', 'batch', 'group', 'static')),
    Option('seed_map', str, 'auto',
           'Several seeds one after another or in one program; auto: map on '
           'CPU.', choices=('auto', 'map', 'vmap'), may_change=True),
    Option('client_map', str, 'auto',
           'Clients one after another or under vmap; auto: map on CPU.',
           choices=('auto', 'map', 'vmap')),
    Option('conv_impl', str, 'auto',
           'Form of the convolutions; auto: by shape and backend.',
           choices=('auto', 'lax', 'reordered', 'gemm', 'winograd')),
    Option('aggregation_order', str, 'fixed',
           'fixed: the same bits on any number of devices.',
           choices=('fixed', 'fast')),
    Option('compute_dtype', str, 'float32',
           "Of the networks' arithmetic; parameters stay float32.",
           choices=('float32', 'bfloat16')),
    Option('bounds', bool, False,
           'Also run fedavg with few and with all labels: the lower and the '
           'upper bound.', may_change=True),
    Option('distributed', bool, False,
           'One run over several processes, on one machine or many; each is '
           'started with the same flags.', may_change=True, this_start=True),
    Option('eval_only', bool, False,
           'Evaluate the newest checkpoint of the workdir, with the flags '
           'stored there, and stop.', may_change=True, this_start=True),
    Option('pictures', bool, False,
           'At every checkpoint draw what the method generates, to '
           '<workdir>/pictures; of methods that generate images.',
           may_change=True, this_start=True),
    Option('tensorboard', bool, False,
           'Mirror metrics to <workdir>/tensorboard; needs the extra '
           '[tensorboard].', may_change=True, this_start=True),
    Option('track', list, None,
           'Where to mirror metrics to: tensorboard, wandb, mlflow, or '
           'several, as in wandb,mlflow; each needs the extra of its name and '
           'reads its own environment variables.', may_change=True,
           this_start=True),
    Option('seeds', list, None,
           'Several seeds, as in 0,1,2, instead of seed.'),
)
OPTIONS: dict[str, Option] = {option.name: option for option in _ALL}
