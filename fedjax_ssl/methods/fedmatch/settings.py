"""The values of FedMatch's knobs, with those of the two profiles."""
from __future__ import annotations

import dataclasses
from typing import Any

from fedjax_ssl.core import checks, client_weights
from fedjax_ssl.core.types import Task
from fedjax_ssl.methods.fedmatch.local_step import Weights

# Values for labels at the clients; `AT_SERVER` has those that differ at the
# server. The paper's first version does not state over, l2_reduction, psi_init
# and psi_threshold. Its psi starts at 0 and has a small rate, so a threshold
# above 0 would stop weights that learn slowly: dense runs have none. Its
# equation 1 has helpers teach all rows; in both profiles they teach confident
# ones, as in the third version's code.
PROFILES: dict[str, dict[str, Any]] = {
    'v1': {
        'helper_choice': 'reliability', 'helper_interval': 1,
        'aggregation': 'reliability', 'over': 'batch', 'over_helpers': 'sum',
        'agreement_weight': 1.0, 'consistency_weight': 1.0, 'l2': 0.01,
        'l1': 0.0, 'l2_reduction': 'mean', 'psi_init': 0.0,
        'sending': 'values', 'psi_threshold': 0.0, 'delta_threshold': 5e-5,
        'patience': 3},
    'v3code': {
        'helper_choice': 'similarity', 'helper_interval': 10,
        'aggregation': 'uniform', 'over': 'confident', 'over_helpers': 'mean',
        'agreement_weight': 0.01, 'consistency_weight': 0.01, 'l2': 10.0,
        'l1': 1e-4, 'l2_reduction': 'sum', 'psi_init': 0.2,
        'sending': 'differences', 'psi_threshold': 5e-6,
        'delta_threshold': 5e-5, 'patience': 5},
}
AT_SERVER: dict[str, dict[str, Any]] = {
    'v1': {'delta_threshold': 1e-5},
    'v3code': {'psi_threshold': 1e-5, 'delta_threshold': 1e-5, 'l1': 1e-5,
               'patience': 20},
}
CHOICES = {
    'helper_choice': ('reliability', 'similarity'),
    'aggregation': ('reliability', 'uniform'), 'tie': ('lowest', 'local'),
    'over': ('batch', 'confident'), 'l2_reduction': ('mean', 'sum'),
    'learn': ('both', 'sigma', 'psi', 'undivided'),
    'sending': ('values', 'differences'),
    'lr_decay': ('clients', 'server', 'none')}


@dataclasses.dataclass(frozen=True)
class Settings:
  """A value for each knob of `fedmatch`, which explains them.

  Attributes:
    weights: settings of the losses.
    at_server: whether the labels are at the server.
  """

  weights: Weights
  at_server: bool
  helper_choice: str
  helper_interval: int
  aggregation: str
  labeled_client_weight: float
  learn: str
  psi_init: float
  density: float
  sending: str
  psi_threshold: float
  delta_threshold: float
  exact_down: bool
  lr_decay: str
  patience: int
  max_gib: float
  keep_local: bool

  @property
  def sends_sigma(self) -> bool:
    """Whether clients learn and send sigma."""
    return self.learn in ('both', 'sigma') and not self.at_server

  @property
  def sends_psi(self) -> bool:
    """Whether clients learn and send psi."""
    return self.learn != 'sigma'

  @property
  def undivided(self) -> bool:
    """Whether psi is the whole model, and sigma is 0."""
    return self.learn == 'undivided'

  @property
  def streams(self) -> str:
    """Returns the `streams` of `batching.batches` that clients use."""
    if self.undivided:
      return 'both'
    if not self.sends_sigma:
      return 'unlabeled'
    return 'both' if self.sends_psi else 'labeled'

  @property
  def bank(self) -> bool:
    """Whether the server keeps every client's last psi."""
    return self.helper_choice == 'similarity' and self.weights.num_helpers > 0

  @property
  def copies(self) -> bool:
    """Whether clients keep what they sent last."""
    return self.sending == 'differences'

  @property
  def judges(self) -> bool:
    """Whether each client's model is judged on the validation rows."""
    ranked = self.weights.num_helpers > 0 and not self.bank
    return (self.aggregation == 'reliability' or ranked
            or self.lr_decay == 'clients')

  @property
  def validates(self) -> bool:
    """Whether validation rows are needed at all."""
    return self.judges or self.lr_decay == 'server'


# Knobs of psi, and the values that switch them off; those with a default of
# their own, such as `threshold`, cannot be told from it.
_OF_PSI = {'psi_init': 0.0, 'density': 1.0, 'l1': 0.0, 'l2': 0.0,
           'agreement_weight': 0.0, 'consistency_weight': 0.0}


def settle(task: Task, **knobs: Any) -> Settings:
  """Fills in the profile and checks every value.

  Args:
    task: tells where the labels are.
    **knobs: those of `fedmatch`, `profile` among them; None is the profile's.

  Raises:
    ValueError: naming the first knob that does not fit.
  """
  profile = checks.check('profile', knobs['profile'], PROFILES)
  at_server = task.labels_at == 'server'
  chosen = {**PROFILES[profile], **(AT_SERVER[profile] if at_server else {})}
  v = {**chosen, **{k: x for k, x in knobs.items() if x is not None}}
  client_weights.check_factor(task, v['labeled_client_weight'])
  if at_server and v['learn'] == 'sigma':
    raise checks.FieldError('labels_at', 'server', "learn='sigma' leaves the "
                            "clients nothing to learn; give 'both' or 'psi'.")
  if v['learn'] == 'undivided':
    if at_server:
      raise checks.FieldError(
          'labels_at', 'server', "needs the two parts, and learn='undivided' "
          'has one; give clients.')
    # These relate two parts, or keep psi near 0; here psi is the whole model.
    for name in ('l2', 'l1', 'psi_init', 'psi_threshold'):
      if knobs.get(name):
        raise ValueError(f"learn='undivided' has no {name}, for there is one "
                         f'part only; leave {name}={knobs[name]} out.')
      v[name] = 0.0
    if v['density'] != 1:
      raise ValueError("learn='undivided' sends its one part whole; leave "
                       f'density={v["density"]} out.')
  if task.model.norm == 'static':
    raise checks.FieldError('norm', 'static', 'the statistics are not '
                            'recomputed here; give another norm.')
  alone = v['learn'] == 'sigma'
  for name, off in (_OF_PSI if alone else {}).items():
    if knobs.get(name) not in (None, off):
      checks.refuse_idle(ValueError(
          f"learn='sigma' leaves psi at 0, and {name}={knobs[name]} would do "
          'nothing; leave it out.'))
  weights = Weights(
      num_helpers=0 if alone else v['num_helpers'], threshold=v['threshold'],
      tie=v['tie'], over=v['over'], over_helpers=v['over_helpers'],
      labeled=v['labeled_weight'], agreement=v['agreement_weight'],
      consistency=v['consistency_weight'], l2=v['l2'], l1=v['l1'],
      l2_reduction=v['l2_reduction'])
  v['psi_init'] = 0.0 if alone else v['psi_init']
  plain = {f.name: v[f.name] for f in dataclasses.fields(Settings)
           if f.name in v}
  return Settings(weights=weights, at_server=at_server, **plain)
