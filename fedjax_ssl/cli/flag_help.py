"""The help of `fedjax-ssl train SETTING`: its flags by topic."""
from __future__ import annotations

from collections.abc import Iterator, Sequence
import re
import sys

from absl import flags

from fedjax_ssl import config
from fedjax_ssl.core import checks

# Every option of `config.OPTIONS` once, what most users set first.
TOPICS = {
    'Method and network': (
        'method', 'profile', 'model', 'norm', 'aggregator', 'imports'),
    'Data': (
        'dataset', 'data_dir', 'split', 'validation_fraction', 'embeddings'),
    'Who holds which rows': (
        'num_clients', 'alpha', 'labels_at', 'labels_per_class',
        'labeled_fraction', 'num_labeled_clients',
        'num_partly_labeled_clients', 'labels', 'dirichlet', 'min_size',
        'max_rows', 'partition', 'partition_file', 'partition_seed'),
    'Rounds and steps': (
        'num_rounds', 'cohort_size', 'local_epochs', 'local_steps',
        'labeled_batch', 'unlabeled_batch', 'rounds_per_task',
        'schedule_rounds'),
    'Optimizers': (
        'optimizer', 'learning_rate', 'lr_schedule', 'momentum',
        'weight_decay', 'server_optimizer', 'server_learning_rate'),
    'Views of the rows': ('weak', 'strong', 'labeled_view'),
    'Runs, folders and reports': (
        'workdir', 'seed', 'seeds', 'bounds', 'eval_every', 'checkpoint_every',
        'report', 'pictures', 'track', 'tensorboard', 'eval_only'),
    'Broken and hostile clients': ('max_update_norm', 'attack'),
    'Devices and memory': (
        'num_devices', 'client_map', 'chunk_size', 'seed_map', 'client_memory',
        'compute_dtype', 'conv_impl', 'aggregation_order'),
    'Several processes': (
        'distributed', 'coordinator_address', 'num_processes', 'process_id'),
}
WORDS = ('--help', '-help', '-h', '--h', '-?', '--?', '--helpshort',
         '-helpshort')
_REPEATED = re.compile(r';\s*repeat this option.*', re.DOTALL)  # By absl.


def is_asked(words: Sequence[str], values: flags.FlagValues) -> bool:
  """Returns whether one of the words of a command asks for help.

  Not if it is the value of the flag before it, or behind a lone --.
  """
  for before, word in zip(['', *words], words, strict=False):
    if word == '--':
      return False
    if word in WORDS and not takes_next(before, values):
      return True
  return False


def takes_next(word: str, values: flags.FlagValues) -> bool:
  """Returns whether a word is a flag whose value is the word after it."""
  name = word.lstrip('-')
  return word.startswith('-') and name in values and not values[name].boolean


def lines(values: flags.FlagValues) -> Iterator[str]:
  """Yields the flags of a run, topic by topic, with their defaults."""
  topics = {topic: [checks.flag(name) for name in names]
            for topic, names in TOPICS.items()}
  ours = {*map(checks.flag, config.OPTIONS)}
  topics['Of this program'] = [
      flag.name for flag in values.get_key_flags_for_module(sys.argv[0])
      if flag.name not in ours]
  for topic, names in topics.items():
    if names:
      yield ''
      yield f'{topic}:'
    for name in names:
      yield from _lines(values[name])
  yield ''
  yield flags.text_wrap(
      '--flagfile=FILE reads flags from a file, one a line. --verbosity=1 '
      'shows where an error is. --helpfull lists the flags of libraries, too.',
      80)


def _lines(flag: flags.Flag) -> Iterator[str]:
  said = '[no]' * flag.boolean + flag.name
  text = _REPEATED.sub('', str(flag.help))
  yield flags.text_wrap(f'--{said}: {text}', 80, '    ', '  ')
  if flag.default_as_str not in (None, "''", "'[]'"):
    yield f'    (default: {flag.default_as_str})'
