"""Every option of a run, once: name, type, default, range and help.

The flags of `fedjax-ssl train`, what `config.json` holds of them, and the
defaults and ranges of `TaskSpec` are made from `Config`; JAX is not needed to
read it. Options that exclude each other are refused here too.
"""
from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
import dataclasses
import os
import re
from typing import Any, NamedTuple

from fedjax_ssl.core import checks, conv_forms, imports, knobs, registry
from fedjax_ssl.core.checks import FieldError

LARGEST_SEED = checks.LARGEST_SEED
# Options of which one says how many rows are labeled.
HOW_MANY = frozenset(('labels_per_class', 'labeled_fraction'))
# Options that exclude each other.
RIVALS = (frozenset(('seed', 'seeds')), HOW_MANY)
_PATHS = 'workdir', 'data_dir', 'partition_file', 'embeddings'
_ANY = knobs.Bound()


class Option(NamedTuple):
  """What a run can be told.

  Attributes:
    name: of the flag, and in `config.json`.
    kind: of its value.
    default: where neither the user nor the setting says another; None: no
      value.
    help: for people.
    bound: of a number.
    choices: all words allowed, if they are few.
    optional: whether None is a value.
    may_change: whether a continued run may set it differently. None of these
      affects the model's bits, except seed_map (vmap rounds differently) and,
      with aggregation_order=fast, num_devices.
    per_process: may differ between the processes of a run.
    this_start: applies to this launch only; --eval_only does not read it from
      the stored config.
  """

  name: str
  kind: type
  default: Any
  help: str
  bound: knobs.Bound
  choices: Sequence[str]
  optional: bool
  may_change: bool
  per_process: bool
  this_start: bool


def _option(default: Any, text: str, bound: knobs.Bound = _ANY, *,
            choices: Sequence[str] = (), may_change: bool = False,
            per_process: bool = False, this_start: bool = False) -> Any:
  """A field of `Config`; see `Option`."""
  return dataclasses.field(default=default, metadata={
      'help': text, 'bound': bound, 'choices': choices,
      'may_change': may_change, 'per_process': per_process,
      'this_start': this_start})


def _whole(least: int, most: int = 2**31 - 1) -> knobs.Bound:
  return knobs.Bound(least, most, whole=True)


@dataclasses.dataclass(frozen=True)
class Config:
  """What a run is told; `OPTIONS` says more of each field.

  Raises:
    FieldError: for a value that its option does not take.
  """

  method: str = _option(
      'fixmatch', 'Name, with overrides of defaults if any, as in '
      '"fixmatch(threshold=0.9)". `fedjax-ssl list methods` lists them. One of '
      'your own as FILE.py:NAME(...) or package.module:NAME(...).')
  profile: str | None = _option(
      None, 'Variant of a method that has several, such as "paper" or '
      '"official"; the same as its knob profile.')
  model: str = _option(
      'cnn', 'Network, with knobs if any, as in "cnn(width=16)"; a Flax module '
      'of your own as FILE.py:Net(...) or package.module:Net(...). auto: for '
      'images cnn, from 64x64 on of means over windows, as in "cnn(stride=2)"; '
      'for texts text_mean.')
  imports: tuple[str, ...] = _option(
      (), 'Files or modules to import first, for what they register; '
      'several with commas, or the flag again.', may_change=True,
      per_process=True)
  dataset: str = _option(
      'digits', 'Data set: digits, or the name of a .npz, a .csv or a folder '
      'of images in <data_dir>, or a TensorFlow Datasets name.')
  data_dir: str | None = _option(
      None, 'Folder of data sets; default: the environment variable '
      'FEDJAX_SSL_DATA.', may_change=True, per_process=True)
  embeddings: str | None = _option(
      None, 'Texts only: .npz of word vectors (words, vectors) or of vectors '
      'made beforehand (texts, sha256), instead of trained ones; see '
      '`fedjax-ssl embed-texts`.', may_change=True, per_process=True)
  split: str = _option(
      'official', 'official, or train/test or train/validation/test in percent '
      'or counts, from all examples merged.')
  partition_file: str | None = _option(
      None, 'Deal the rows as this file says; every run writes such a file to '
      'its workdir.', per_process=True)
  partition: str = _option(
      'setting', 'Which rows each client holds. setting: as the setting deals '
      'them; natural: as the data say (client_train, a column client, '
      'clients.csv), which also gives num_clients; auto: where they do.',
      choices=('setting', 'natural', 'auto'))
  weak: str = _option(
      'flip_crop', 'Weak augmentation. auto: flip_crop, none of texts.')
  labeled_view: str | None = _option(
      None, 'Augmentation of labeled rows, one of the weak ones; default: '
      '--weak.')
  strong: str = _option(
      'ra_mc', 'Strong augmentation. auto: ra_mc, token_dropout of texts.')
  lr_schedule: str = _option(
      'constant', 'Factor on the learning rate over the rounds, with knobs as '
      'in "cosine(final=0.1)"; `fedjax-ssl list lr_schedules` lists them.')
  workdir: str | None = _option(
      None, 'Folder of the run; default: a new one under runs/. An old one is '
      'continued.', may_change=True, per_process=True, this_start=True)
  coordinator_address: str | None = _option(
      None, 'HOST:PORT of process 0, for --distributed outside of clusters '
      'that JAX knows.', may_change=True, per_process=True, this_start=True)
  partition_seed: int | None = _option(
      None, 'Seed of the partition; default: the seed of the run.',
      _whole(0, LARGEST_SEED))
  num_clients: int = _option(
      20, 'Clients of the federation.', _whole(1))
  num_labeled_clients: int = _option(
      -1, 'The first so many clients hold labels; -1 where the setting has '
      'no such rule; in labeled_clients then every client knows '
      'labeled_fraction of its own.', _whole(-1))
  num_partly_labeled_clients: int = _option(
      0, 'Of labeled_clients: so many clients after the num_labeled_clients '
      'with all their labels know labeled_fraction of their own.', _whole(0))
  min_size: int | None = _option(
      None, 'Least rows that a capped Dirichlet partition deals to a client; '
      'default: 10. Of labeled rows dealt apart a fifth of the mean, if that '
      'is less.', _whole(0))
  max_rows: int = _option(
      0, 'Training rows that are dealt at most, drawn at random from all '
      'that are not held out; 0: all.', _whole(0))
  cohort_size: int = _option(
      5, 'Clients drawn for a round, at most num_clients; of rscfed, for '
      "each of its groups. The default is FedDure's, unless the setting has a "
      'number of its own.', _whole(1))
  num_rounds: int = _option(
      100, 'Rounds.', _whole(1), may_change=True)
  schedule_rounds: int | None = _option(
      None, 'Rounds that schedules span; default: num_rounds of the first '
      'start.', _whole(1))
  rounds_per_task: int = _option(
      0, 'Rounds before the next task, where the setting is a stream of '
      'tasks; else 0.', _whole(0))
  labels_per_class: int | None = _option(
      None, 'Labeled examples of each class over all clients together.',
      _whole(1))
  local_epochs: int = _option(
      1, 'Passes over its own rows that a client makes a round.',
      _whole(1, 10_000))
  local_steps: int = _option(
      0, 'If positive, steps a round instead of epochs.', _whole(0, 1_000_000))
  labeled_batch: int = _option(
      10, 'Rows of a labeled batch.', _whole(1, 2**16))
  unlabeled_batch: int = _option(
      50, "Rows of an unlabeled batch; 0 divides a client's unlabeled rows "
      'over its labeled steps.', _whole(0, 2**16))
  seed: int | None = _option(
      0, 'Seed of initial values and draws, instead of seeds.',
      _whole(0, LARGEST_SEED))
  eval_every: int = _option(
      5, 'Rounds between evaluations; 0: at the end only.', _whole(0),
      may_change=True)
  checkpoint_every: int = _option(
      10, 'Rounds between checkpoints, or five minutes if these are less; 0: '
      'at the end only.', _whole(0), may_change=True)
  chunk_size: int = _option(
      0, "Clients under one vmap, or lanes of a device; 0: a device's whole "
      'share, or what client_map=auto measures.', _whole(0))
  num_devices: int = _option(
      0, 'Devices to split the clients over, of all processes together; 0: '
      'every accelerator, or one for each CPU core.', _whole(0),
      may_change=True, this_start=True)
  num_processes: int | None = _option(
      None, 'Processes of the run, with --coordinator_address.', _whole(1),
      may_change=True, per_process=True, this_start=True)
  process_id: int | None = _option(
      None, 'Which of them this one is, from 0.', _whole(0), may_change=True,
      per_process=True, this_start=True)
  validation_fraction: float = _option(
      0.05, 'Share of the training examples that the server holds out.',
      knobs.Bound(0, 0.9))
  alpha: float = _option(
      0.5, 'Dirichlet concentration: near 0 a class is at one client, from 100 '
      'on nearly IID. A Dirichlet partition splits each class over the clients '
      'by a draw from Dir(alpha, ..., alpha); cross_device and cross_silo '
      'follow --dirichlet. It is refused where nothing reads it: in the other '
      'settings, and where the data name the clients.', knobs.RATE)
  labeled_fraction: float | None = _option(
      None, "Labeled share of the examples, or of each client's, instead of "
      'labels_per_class.', knobs.Bound(0, 1))
  learning_rate: float = _option(
      0.05, "Of a client's optimizer.", knobs.RATE)
  momentum: float = _option(
      0.0, 'Of sgd, nesterov and rmsprop.', knobs.MOMENTUM)
  weight_decay: float = _option(
      0.0, 'L2 term in the gradient; decoupled for adamw.', knobs.WEIGHT_DECAY)
  max_update_norm: float = _option(
      0.0, 'Leave out updates beyond this norm; 0: off.',
      knobs.Bound())
  labels: str = _option(
      'few', 'few, or all: the upper bound.', choices=('few', 'all'))
  labels_at: str = _option(
      'clients', 'Who holds the labels.', choices=('clients', 'server'))
  dirichlet: str = _option(
      'clients', 'How cross_device and cross_silo deal rows; no other setting '
      'reads it. clients: each client draws a class mix, alpha in total over '
      'the classes, and all hold equally many rows. shares: each client draws '
      'one from Dir(alpha, ..., alpha), and each class is divided in '
      'proportion to these. capped: each class is split over the clients by a '
      'draw from Dir(alpha, ..., alpha), without those that already hold the '
      'mean number of rows.',
      choices=('clients', 'shares', 'capped'))
  optimizer: str = _option(
      'sgd', 'Optimizer of a client.', choices=knobs.OPTIMIZERS)
  norm: str = _option(
      'auto', "Normalization layers; auto: the model's own.",
      choices=('auto', 'none', 'batch', 'group', 'static'))
  seed_map: str = _option(
      'auto', 'Several seeds one after another or in one program; auto: map on '
      'CPU.', choices=('auto', 'map', 'vmap'), may_change=True)
  client_map: str = _option(
      'auto', 'Clients one after another, under vmap, or in lanes: a vmap of '
      'chunk_size places, of which each takes its next client when one is '
      'done; auto: map on CPU, else vmap or measured.',
      choices=('auto', 'map', 'vmap', 'lanes'))
  client_memory: str = _option(
      'device', 'Where that is which clients keep between rounds, such as '
      "teachers or momenta: all on the devices; or on the host, or in files of "
      "the workdir, from where a round's clients bring theirs. The bits are "
      'the same. disk: a record for each client that has trained, up to three '
      'where all train between two checkpoints.',
      choices=('device', 'host', 'disk'))
  conv_impl: str = _option(
      'auto', 'Form of the convolutions: lax, reordered, gemm, taps or '
      'winograd. measure: the fastest of each layer, found by timing them at '
      'the start. auto: by rules on CPU and in short runs, else measure. '
      'Stored runs hold the form of each layer.')
  aggregation_order: str = _option(
      'fixed', 'fixed: the same bits on any number of devices; 1, 2, 4 and 8 '
      'exchange up to eight sums a round, others more. fast: one sum.',
      choices=('fixed', 'fast'))
  compute_dtype: str = _option(
      'float32', "Of the networks' arithmetic; parameters stay float32.",
      choices=('float32', 'bfloat16'))
  bounds: bool = _option(
      False, 'Also run fedavg with few and with all labels: the lower and the '
      'upper bound.', may_change=True)
  report: bool = _option(
      False, 'At the end write the page of a report on the run and its bounds '
      'to <workdir>/report.', may_change=True, this_start=True)
  distributed: bool = _option(
      False, 'One run over several processes, on one machine or many; each is '
      'started with the same flags.', may_change=True, this_start=True)
  eval_only: bool = _option(
      False, 'Evaluate the newest checkpoint of the workdir, with the flags '
      'stored there, and stop.', may_change=True, this_start=True)
  pictures: bool = _option(
      False, 'At every checkpoint, also those by the clock, draw what a '
      'method of generated images generates, to <workdir>/pictures.',
      may_change=True, this_start=True)
  tensorboard: bool = _option(
      False, 'Mirror metrics to <workdir>/tensorboard; needs the extra '
      '[tensorboard].', may_change=True, this_start=True)
  track: tuple[str, ...] | None = _option(
      None, 'Where to mirror metrics to: tensorboard, wandb, mlflow, or '
      'several, as in wandb,mlflow; each needs the extra of its name and reads '
      'its own environment variables.', may_change=True, this_start=True)
  seeds: tuple[int, ...] | None = _option(
      None, 'Several seeds, as in 0,1,2, instead of seed.')
  aggregator: str = _option(
      'mean', "Rule that makes one update of the clients', of methods that "
      'average, with knobs if any, as in "trimmed_mean(trim=.3)". '
      '`fedjax-ssl list aggregators` lists them.')
  server_optimizer: str = _option(
      'sgd', 'Takes the average of the updates as a gradient of the server, '
      'with knobs if any, as in "adam(tau=0.01)"; of methods that average. '
      '`fedjax-ssl list server_optimizers` lists them.')
  server_learning_rate: float | None = _option(
      None, 'Of server_optimizer; default: 1 of sgd and momentum, 0.01 of the '
      'others. sgd with 1 adds the average.', knobs.RATE)
  attack: str = _option(
      'none', 'What a share of the clients does to the others, with knobs if '
      'any, as in "sign_flip(share=.3)". `fedjax-ssl list attacks` lists them.')

  def __post_init__(self) -> None:
    for name in OPTIONS:
      check(name, getattr(self, name))

  @property
  def all_seeds(self) -> list[int]:
    """Returns the seeds of the run, one or several."""
    return [*(self.seeds or (self.seed or 0,))]

  @property
  def trackers(self) -> list[str]:
    """Returns where metrics are mirrored to, each once."""
    return [*dict.fromkeys([*['tensorboard'] * self.tensorboard,
                            *(self.track or ())])]

  @property
  def full_method(self) -> str:
    """Returns the method with the profile as one of its knobs."""
    if self.profile is None:
      return self.method
    name, given = registry.parse(self.method)
    return registry.written(name, {**given, 'profile': self.profile})


_KINDS = {'str': str, 'int': int, 'float': float, 'bool': bool, 'tuple': tuple}
OPTIONS: dict[str, Option] = {
    field.name: Option(
        name=field.name, kind=_KINDS[re.findall(r'\w+', str(field.type))[0]],
        default=field.default, optional='None' in str(field.type),
        **field.metadata)
    for field in dataclasses.fields(Config)}
# May differ when a run is continued.
MAY_CHANGE = tuple(n for n, one in OPTIONS.items() if one.may_change)
# May differ between the processes of a run.
PER_PROCESS = tuple(n for n, one in OPTIONS.items() if one.per_process)
# Bounds of fields of `TaskSpec` that come from the data; rows have 32 bits.
_OF_DATA = {'num_classes': _whole(2, 2**20), 'unlabeled_capacity': _whole(0)}


def check(name: str, value: Any) -> None:
  """Checks the value of a field, of `Config` or of a `TaskSpec`.

  Raises:
    FieldError: for a value of another kind or out of range.
  """
  option = OPTIONS.get(name)
  if option is None or option.kind in (int, float):
    bound = _OF_DATA[name] if option is None else option.bound
    if value is None and option is not None and option.optional:
      return
    other = option and option.kind is int and isinstance(value, float)
    if allowed := 'a whole number' if other else knobs.fault(value, bound):
      kind = ', no text' if isinstance(value, str) else ''
      raise FieldError(name, value, f'must be {allowed}{kind}.')
  elif value is None and option.optional:
    return
  elif not isinstance(value, option.kind):
    raise FieldError(name, value, f'must be of type {option.kind.__name__}.')
  elif name == 'conv_impl':
    conv_forms.check(str(value))
  elif option.choices and value not in option.choices:
    raise FieldError(name, value, checks.unknown(str(value), option.choices))
  # A run's flagfile has one line for each option.
  elif isinstance(value, str) and name != 'workdir' and (
      len(f'{value}.'.splitlines()) > 1):
    raise FieldError(name, repr(value), 'must be one line.')


def resolve(values: Mapping[str, Any], given: Collection[str] = ()) -> Config:
  """Returns the options that flags ask for.

  Args:
    values: by name; seeds as words or numbers. A missing option has its
      default.
    given: names that the user gave; defaults that exclude them are dropped.

  Raises:
    FieldError: for a value that an option does not take, or options that
      exclude each other.
  """
  values = {**values}
  for name in _PATHS:
    if values.get(name):  # A shell leaves the ~ of --workdir=~/x alone.
      values[name] = os.path.expanduser(str(values[name]))
  values = _placed(values)
  if 'seed' in given:
    if 'seeds' in given and values['seeds']:
      raise FieldError('seed', values['seed'], 'give one of them.',
                       seeds=','.join(map(str, values['seeds'])))
    values['seeds'] = None
  if values.get('seeds') is not None:
    values['seeds'] = _numbers(values['seeds'])
  if (track := values.get('track')) is not None:
    values['track'] = (checks.words(track) if isinstance(track, str) else
                       tuple(track)) or None
  if len(one := HOW_MANY.intersection(given)) == 1:
    values[[*HOW_MANY - one][0]] = None
  if values.get('optimizer') in knobs.OWN_MOMENTUM and 'momentum' not in given:
    values['momentum'] = 0.0
  if values.get('partition_file') and 'partition' not in given:
    values['partition'] = 'setting'
  options = Config(**values)
  if options.partition == 'setting':  # Others get num_clients from the data.
    options = with_cohort(options, given)
  _check_together(options)
  return options


def _placed(values: Mapping[str, Any]) -> dict[str, Any]:
  """The values, with absolute paths where texts or --import name files."""
  placed = {**values}
  for name in imports.TEXTS:
    if found := imports.split(str(values.get(name) or '')):
      placed[name] = found._replace(
          place=_whole_place(name, values[name], found.place)).text
  placed['imports'] = tuple(dict.fromkeys(
      _whole_place('imports', word, word)
      for word in checks.words(values.get('imports'))))
  return placed


def _whole_place(name: str, value: str, place: str) -> str:
  try:
    return imports.absolute(place)
  except ValueError as error:
    raise FieldError(name, value, str(error)) from error


def _numbers(given: Sequence[Any]) -> tuple[int, ...]:
  """Different seeds, from words or numbers."""
  given = given.split(',') if isinstance(given, str) else given
  try:
    found = checks.seeds(
        int(word) if isinstance(word, str) else word for word in given)
  except ValueError:
    found = None
  if not found or len({*found}) < len(found):
    raise FieldError('seeds', ','.join(map(str, given)), 'must be different '
                     f'whole numbers from 0 to {LARGEST_SEED}, separated by '
                     'commas.')
  return found


def _check_together(options: Config) -> None:
  """Refuses options that exclude each other, whatever the setting and data."""
  for name in _PATHS:
    if getattr(options, name) == '':  # As of a variable that is not set.
      raise FieldError(name, '', 'is empty; give a place or leave it out.')
  if '://' in (options.workdir or ''):
    raise FieldError('workdir', options.workdir,
                     'is no local folder; mount it first.')
  if options.eval_only and options.workdir is None:
    raise FieldError('eval_only', True, 'needs a workdir.')
  for name in ('coordinator_address', 'num_processes', 'process_id'):
    if getattr(options, name) is not None and not options.distributed:
      raise FieldError(name, getattr(options, name), 'needs distributed.')
  if options.partition != 'setting' and options.partition_file:
    raise FieldError('partition', options.partition, 'the file says whose row '
                     'is whose; give one of them.',
                     partition_file=options.partition_file)
  if options.partition_file and options.max_rows:
    raise FieldError('max_rows', options.max_rows, 'the file says which rows '
                     'are dealt; leave it out.',
                     partition_file=options.partition_file)
  if options.profile is not None:
    _check_profile(options.method, options.profile)


def with_cohort(options: Config, given: Collection[str]) -> Config:
  """Returns the options; a cohort that nobody gave has at most all clients.

  Raises:
    FieldError: for a given one of more.
  """
  size, most = options.cohort_size, options.num_clients
  if size > most and 'cohort_size' in given:
    raise FieldError('cohort_size', size, 'a round has at most all clients.',
                     num_clients=most)
  return dataclasses.replace(options, cohort_size=min(size, most))


def _check_profile(method: str, profile: str) -> None:
  from fedjax_ssl import methods
  try:
    name, given = registry.parse(method)
  except ValueError as error:
    raise FieldError('method', method, str(error)) from error
  known = [other for other, build in methods.METHODS.items()
           if 'profile' in knobs.names(build)]
  if name in methods.METHODS and name not in known:
    raise FieldError('profile', profile, 'the method has none; leave it out, '
                     f'or give one of {", ".join(known)}.', method=name)
  if given.get('profile', profile) != profile:
    raise FieldError('profile', profile, 'the text of the method has another; '
                     'leave one of the two out.', method=method)
