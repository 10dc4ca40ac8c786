"""The settings of the papers, and two for a start, as data.

A setting says how rows are dealt and where the flags have other defaults than
`fedjax-ssl train` has by itself. `experiments/NAME.py` is the same as
`fedjax-ssl train NAME`.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
import dataclasses
import sys
from typing import Any, NamedTuple

from fedjax_ssl import config
from fedjax_ssl.core import checks, flagfile_lines, registry
from fedjax_ssl.running import dealing


class Setting(NamedTuple):
  """What distinguishes an experiment from others.

  Attributes:
    name: of the setting, as in `fedjax-ssl train NAME`.
    about: one sentence.
    source: where it is from, and its numbers.
    deal: how rows are dealt; see `dealing`.
    defaults: of flags, where the setting has its own.
    any_data: whether it is for data of any kind: then a folder of data sets
      is not enough, one of them must be named.
  """

  name: str
  about: str
  source: str
  deal: dealing.Deal
  defaults: Mapping[str, Any]
  any_data: bool = False

  def text(self) -> str:
    """Returns what --help says above the flags."""
    packed = self.defaults.get('dataset') == 'digits'  # It comes with us.
    return (f'{self.about}\n\n{self.source}\n\n'
            f'fedjax-ssl train {self.name}' + ' --data_dir=DIR' * (not packed)
            + ' --dataset=NAME' * self.any_data)


def defaults_of(name: str) -> dict[str, Any]:
  """Returns the values that all flags have in a setting if none is given."""
  return {**dataclasses.asdict(config.Config()), **SETTINGS[name].defaults}


def known_defaults(name: str) -> dict[str, Any]:
  """Returns `defaults_of` a setting; {} for one that is not registered."""
  return defaults_of(name) if name in SETTINGS else {}


def program(name: str, python: str = sys.executable) -> list[str]:
  """Returns the command that trains a setting, without flags."""
  # With -P files in the user's folder hide no modules, as for `fedjax-ssl`.
  return [python, '-P', '-m', 'fedjax_ssl', 'train', name]


_FEDDURE: dict[str, Any] = dict(
    dataset='cifar10', model='resnet9', method='fixmatch', optimizer='adam',
    learning_rate=5e-4, num_clients=100, cohort_size=5, labels_per_class=500,
    labeled_batch=10, unlabeled_batch=0, num_rounds=200,
    validation_fraction=0.02)
_FEDLABEL: dict[str, Any] = dict(
    norm='group', method='fedlabel', split='80/5/15', alpha=0.1,
    dirichlet='shares', learning_rate=0.1, local_steps=20, labeled_batch=64,
    unlabeled_batch=64, strong='ra_fedlabel', num_rounds=200)
_FEDSSL: dict[str, Any] = dict(
    dataset='mnist', model='cnn', method='fedssl', optimizer='adam',
    learning_rate=1e-3, num_clients=8, num_labeled_clients=2, cohort_size=8,
    labels_per_class=10, labeled_batch=64, unlabeled_batch=64, local_steps=50,
    num_rounds=100, validation_fraction=0.02)
_SAGE: dict[str, Any] = dict(
    dataset='cifar10', model='resnet8', norm='batch', method='sage',
    learning_rate=0.1, momentum=0.9, weight_decay=1e-4, alpha=0.1,
    num_clients=20, cohort_size=8, labels_per_class=500, labeled_batch=128,
    unlabeled_batch=256, local_steps=95, num_rounds=300,
    validation_fraction=0.02)
# The numbers of FedMatch's first version.
_FEDMATCH: dict[str, Any] = dict(
    model='alexnet', weak='flip_shift', strong="ra_mc(weak='flip_shift')",
    learning_rate=1e-4, momentum=0.9, labeled_batch=10, unlabeled_batch=50)

_ALL = (
    Setting(
        'agents_iid',
        'Agents with labels only and agents without any, dealt at random.',
        "The setting of FedSSL's Tables 1 to 3 (Fan et al., IJCAI 2022): of N "
        'agents the first --num_labeled_clients share the labels, the others '
        'all rows without.',
        dealing.agents('iid_random'), _FEDSSL),
    Setting(
        'agents_roundrobin',
        'Agents with labels only and agents without any, whole classes in '
        'turn.',
        "The non-IID setting of FedSSL's Tables 4 and 5 (Fan et al., IJCAI "
        '2022): class c is at labeled agent c mod N_S, and without labels at '
        'agent c mod N_Q.',
        dealing.agents('round_robin'), _FEDSSL),
    Setting(
        'cifar_batch_iid',
        'Batch IID: every client has equally many images of each class.',
        'Table 2 of FedMatch (first version, https://arxiv.org/abs/2006.12097)'
        ': 100 clients, 5 labels a class and client, 5 or 10 clients a round.',
        dealing.two_pools('iid_count', 'iid_count'),
        dict(_FEDMATCH, dataset='cifar10', split='54000/3000/3000',
             method='fedmatch', num_clients=100, cohort_size=5,
             labels_per_class=500, num_rounds=200)),
    Setting(
        'cifar_batch_noniid',
        "Batch non-IID: labels are even, one class dominates a client's other "
        'images.',
        'Table 1 of FedMatch (ICLR 2021, https://arxiv.org/abs/2006.12097): '
        '100 clients, 5 labels a class and client, 5 clients a round; '
        'unlabeled rows by the partition bimb.',
        dealing.two_pools('iid_count', 'bimb'),
        dict(dataset='cifar10', split='54000/3000/3000',
             model='resnet9_fedmatch',
             method="fedmatch(profile='v3code', threshold=0.85)", weak='none',
             labeled_view='none', strong='ra_heart', learning_rate=1e-3,
             momentum=0.0, num_clients=100, cohort_size=5,
             labels_per_class=500, labeled_batch=10, unlabeled_batch=100,
             num_rounds=200)),
    Setting(
        'cifar_dirdir',
        '(DIR, DIR): labels and unlabeled images both Dirichlet over the '
        'clients.',
        'The hardest setting of FedDure (AAAI 2024, '
        'https://arxiv.org/abs/2307.05358): 100 clients, 5 a round, 5 labels a '
        'class and client on average.',
        dealing.two_pools('dirichlet_capped', 'dirichlet_capped'), _FEDDURE),
    Setting(
        'cifar_iid',
        '(IID, IID): labels and unlabeled images dealt at random.',
        'The easiest setting of FedDure; see `cifar_dirdir`.',
        dealing.two_pools('iid_random', 'iid_random'), _FEDDURE),
    Setting(
        'cifar_iiddir',
        '(IID, DIR): labels dealt at random, unlabeled images Dirichlet.',
        'The middle setting of FedDure; see `cifar_dirdir`.',
        dealing.two_pools('iid_random', 'dirichlet_capped'), _FEDDURE),
    Setting(
        'cifar_iidshards',
        '(IID, shards): labels at random, images of two classes a client.',
        'The non-IID setting of SemiFL with "2 classes" '
        '(https://arxiv.org/abs/2106.01432), whose labels are at the server. '
        'Twice the number of clients must be a multiple of that of classes; '
        'both shards of a client may be of the same class.',
        dealing.two_pools('iid_random', 'shards'), _FEDDURE),
    Setting(
        'cifar_pairs',
        '(pairs, pairs): labels and images Dirichlet in pairs of clients.',
        'SAGE (CVPR 2025, https://arxiv.org/abs/2503.13227) and ProxyFL: 20 '
        'clients, 8 a round, a tenth of the images labeled.',
        dealing.two_pools('dirichlet_pairs', 'dirichlet_pairs'), _SAGE),
    Setting(
        'cross_device',
        'Cross-device: 100 clients, 10 a round, all rows dealt by one '
        'Dirichlet.',
        'The first setting of FedLabel (ICCV 2023, '
        'https://arxiv.org/abs/2307.08809): data cut 80/5/15 into train, '
        "validation and test, 20 % or 50 % of each client's rows labeled at "
        'random.',
        dealing.one_pool,
        dict(_FEDLABEL, dataset='cifar10', model='resnet34', num_clients=100,
             cohort_size=10, labeled_fraction=0.2)),
    Setting(
        'cross_silo',
        'Cross-silo: 5 or 10 hospitals with medical images, few labels.',
        'The second setting of FedLabel; see `cross_device`. OrganAMNIST and '
        "BloodMNIST are MedMNIST's own files organamnist.npz and "
        'bloodmnist.npz.',
        dealing.one_pool,
        dict(_FEDLABEL, dataset='organamnist', model='resnet18',
             num_clients=10, cohort_size=3, labeled_fraction=0.05)),
    Setting(
        'digits_dirdir',
        'Quickstart: real handwritten digits, labels and images skewed over '
        'clients.',
        '20 clients, 10 labels a class in all, Dirichlet(0.5) over labeled and '
        'over unlabeled rows: FixMatch between the labels-only and the '
        'all-labels bound.',
        dealing.two_pools('dirichlet_capped', 'dirichlet_capped'),
        # Every run takes the same 5 steps a client and round, labels or not,
        # so that the bounds differ in what they learn from and not in how
        # long. The rate is the best one of labels only. It falls, so that the
        # last accuracy depends less on chance.
        dict(dataset='digits', model='cnn', method='fixmatch(threshold=0.8)',
             strong='ra_mc(cutout=2)', bounds=True, num_clients=20,
             cohort_size=10, labels_per_class=10, local_steps=5,
             learning_rate=0.05, momentum=0.9, lr_schedule='fixmatch_cosine',
             num_rounds=150, eval_every=10, checkpoint_every=50,
             seeds=['0', '1', '2'])),
    Setting(
        'fmnist_streaming',
        'Streaming non-IID: clients meet their images in 10 tasks, the mix '
        'drifts.',
        'Table 1 of FedMatch (first version, https://arxiv.org/abs/2006.12097)'
        ': 10 clients, all of them in every round, 5 labels a class and '
        'client, or with --labels_at=server 50 a class there; 10 rounds a '
        'task.',
        dealing.in_tasks(dealing.two_pools('iid_count', 'iid_random'), 10),
        dict(_FEDMATCH, dataset='fashion_mnist', split='63000/3500/3500',
             method='fedmatch(keep_local=True)', num_clients=10,
             cohort_size=10, labels_per_class=50, num_rounds=100,
             rounds_per_task=10)),
    Setting(
        'labeled_clients',
        'Fully labeled, unlabeled and partially labeled clients, in any mix.',
        'The setting of FedIRM (https://arxiv.org/abs/2106.08600) and RSCFed '
        '(https://arxiv.org/abs/2203.13993): a capped Dirichlet partition, of '
        'which the first --num_labeled_clients clients know all their labels '
        'and the others none. With --num_labeled_clients=-1 every client knows '
        '--labeled_fraction of its own; with --num_partly_labeled_clients so '
        'many after the first ones do, as in FedGGp.',
        dealing.whole_clients,
        dict(dataset='fashion_mnist', model='cnn', method='rscfed',
             optimizer='sgd', learning_rate=0.03, momentum=0.9,
             weight_decay=5e-4, num_clients=10, num_labeled_clients=1,
             cohort_size=5, labeled_batch=64, unlabeled_batch=64,
             num_rounds=1000, validation_fraction=0.02)),
    Setting(
        'own_data',
        'Your own images or texts: modest defaults, with both bounds and a '
        'report.',
        '20 clients, 8 a round, all rows dealt by Dirichlet(0.3), or left with '
        'the clients that the data name; 10 labels a class in all. Network '
        'and views are chosen by the data.',
        dealing.own,
        # Unlabeled rows help only if the labels are what limits the model. So
        # there are few of them, a rate so low that drift is no limit, and
        # enough rounds. See experiments/results/own_data.md.
        dict(dataset='digits', model='auto', weak='auto', strong='auto',
             partition='auto', method='fixmatch(threshold=0.8)', bounds=True,
             report=True, num_clients=20, cohort_size=8, alpha=0.3,
             labels_per_class=10, local_steps=20, labeled_batch=10,
             unlabeled_batch=40, learning_rate=0.01, momentum=0.9,
             lr_schedule='cosine', num_rounds=120, eval_every=10,
             checkpoint_every=40), any_data=True),
)


def _adapt(given: Any) -> Setting:
  if not isinstance(given, Setting):
    raise ValueError(f'{given!r} is no Setting; decorate its deal function '
                     'with register.')
  return given


SETTINGS: registry.Registry[Setting] = registry.Registry(
    'setting', {s.name: s for s in _ALL}, 'fedjax_ssl.settings', _adapt)


def register(name: str, about: str = '', source: str = 'your own',
             **defaults: Any) -> Callable[[dealing.Deal], dealing.Deal]:
  """Decorates a way of dealing rows, to register it as a setting.

  ```python
  @register_setting('halves', 'Every second row has a label.', num_clients=10)
  def halves(rng, labels, pool, options):
    owner = rng.integers(0, options.num_clients, labels.size)
    owner = np.where(pool, owner, -1)  # Others are held out.
    is_labeled = np.arange(labels.size) % 2 == 0
    return np.where(is_labeled, owner, -1), np.where(is_labeled, -1, owner)
  ```

  `fedjax-ssl train halves --import=FILE.py` trains it. The function gets a
  numpy.random.Generator, the labels int[D], which rows may be dealt, bool[D],
  and the flags; it returns the clients that have a row with its label and
  without, int[D] each, -1 for none.

  Args:
    name: see `core.registry.register`.
    about: one sentence.
    source: where it is from.
    **defaults: of flags, where the setting has its own.

  Raises:
    ValueError: for a name that is refused, or an unknown flag.
  """
  for flag in defaults:
    checks.check(f'setting {name!r}: flag', flag, config.OPTIONS)

  def add(deal: dealing.Deal) -> dealing.Deal:
    SETTINGS.register(name)(Setting(name, about, source, deal, defaults))
    return deal
  return add


def find(name: str, places: Sequence[str] = ()) -> Setting:
  """Finds a setting; imports files and modules that may register it.

  Args:
    name: of the setting.
    places: what --import names, imported only if the name is unknown.

  Raises:
    ValueError: if there is none, or a place cannot be imported.
  """
  if name not in SETTINGS:
    for place in places:
      registry.import_place(place)
  found: Setting = registry.find(SETTINGS, name)
  return found


def names() -> list[str]:
  """Returns the names of all settings, those of packages too; loads none."""
  return [*dict.fromkeys((*SETTINGS, *SETTINGS.entry_points()))]


def is_known(name: str, stored: Mapping[str, Any]) -> bool:
  """Returns whether there is a setting of this name, which a stored run has.

  Args:
    name: of the setting; '' if a script of a user's own started the run.
    stored: the run's configuration; what the run imported is imported.

  Raises:
    ValueError: if something cannot be imported.
  """
  if not name:
    return False
  try:
    find(name, stored['flags'].get('imports') or ())
  except config.FieldError:
    raise
  except ValueError:
    if name in SETTINGS.entry_points():
      raise
    return False
  return True


def imported(words: Sequence[str]) -> list[str]:
  """Returns the values of --import, with lists split.

  Args:
    words: of a command; the flagfiles that they name are read too.

  Raises:
    ValueError: if one names nothing; and see `flagfile_lines.read`.
  """
  found: list[str] = []
  for some in (words, *(lines for _, lines in flagfile_lines.read(words))):
    for i, word in enumerate(some):
      flag, equals, value = word.strip().partition('=')
      if flag in ('--import', '-import'):
        value = value if equals else ''.join(some[i + 1:i + 2])
        if not (named := checks.words(value)):  # As of an unset variable.
          raise ValueError(f'--import={value} names nothing; name a file or a '
                           'module, or leave it out.')
        found += named
  return found
