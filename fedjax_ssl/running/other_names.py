"""What other programs call our options and knobs, with _, - or neither."""
from __future__ import annotations

from fedjax_ssl.core import checks

# How alike a word and the option or knob that it may mean are at least.
NEAR = 0.84

_OURS = {
    **dict.fromkeys(('batch_size', 'bs'), ('labeled_batch', 'unlabeled_batch')),
    **dict.fromkeys(('clients_per_round', 'num_participants', 'participation',
                     'fraction_fit', 'sample_clients'), ('cohort_size',)),
    **dict.fromkeys(('dirichlet_alpha', 'dir_alpha'), ('alpha',)),
    **dict.fromkeys(('num_labels', 'num_labeled', 'n_labeled', 'n_labels'),
                    ('labels_per_class', 'labeled_fraction')),
    **dict.fromkeys(('global_rounds', 'comm_rounds', 'communication_rounds'),
                    ('num_rounds',)),
    **dict.fromkeys(('local_ep', 'num_epochs'), ('local_epochs',)),
    **dict.fromkeys(('gpu', 'gpus', 'device'), ('num_devices',)),
    **dict.fromkeys(('save_dir', 'save_path', 'output_dir', 'out_dir', 'logdir',
                     'log_dir', 'checkpoint_dir', 'resume'), ('workdir',)),
    **dict.fromkeys(('wandb', 'use_wandb', 'mlflow'), ('track',))}
_KNOBS = {
    **dict.fromkeys(('tau', 'p_cutoff', 'confidence_threshold'), 'threshold'),
    **dict.fromkeys(('dp_epsilon', 'target_epsilon'), 'epsilon'),
    **dict.fromkeys(('lambda_u', 'ulb_loss_ratio'), 'unlabeled_weight')}


_OURS = {checks.folded(word): names for word, names in _OURS.items()}
_KNOBS = {checks.folded(word): name for word, name in _KNOBS.items()}


def ours(word: str) -> tuple[str, ...]:
  """Returns the options that a word of another program may mean, or ()."""
  return _OURS.get(checks.folded(word), ())


def knob(word: str) -> str:
  """Returns the knob that a word of another program means; else the word."""
  return _KNOBS.get(checks.folded(word), word)
