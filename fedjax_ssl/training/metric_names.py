"""The metrics that several methods or every row has: what each is, and where.

Methods add names of their own, which their docstrings explain. Values are
numbers, null, or lists of those. Means over rounds cover the rounds since the
previous row.
"""
from __future__ import annotations

from typing import NamedTuple


class Metric(NamedTuple):
  """A name in the rows.

  Attributes:
    name: as the rows have it.
    kind: 'share', from 0 to 1 and shown in percent; 'count', a whole number
      from 0 that is always known; or 'number'.
    meaning: with its unit.
  """

  name: str
  kind: str
  meaning: str


# Rows start with these, in this order; other names follow by alphabet.
_FIRST = (
    Metric('round', 'count',
           'rounds done when the row was measured; always there'),
    Metric('seed', 'count', 'of the row, if several run in one program'),
    Metric('accuracy', 'share', 'test examples the global model gets right'),
    Metric('loss', 'number', 'mean cross entropy on the test examples, nats'),
    Metric('per_class_accuracy', 'share',
           'accuracy for each class, list; null: no example'),
    Metric('macro_precision', 'share', 'right ones among the test examples '
           'predicted to be of a class, mean over the classes'),
    Metric('macro_recall', 'share',
           'right ones among those of a class, mean over the classes'),
    Metric('auc', 'share', 'area under the ROC curve of each class against the '
           'rest, mean over the classes, test examples; 0.5 is chance'),
    Metric('most_predicted', 'share', 'test examples that get the class '
           'predicted most; 1: one class for all'),
    Metric('largest_class', 'share', 'test examples in the largest class'),
    Metric('largest_weight', 'number', 'largest absolute number in the weights '
           'of all networks; null: not finite'),
    Metric('val_accuracy', 'share', "accuracy of the global model on the "
           "server's validation examples"),
    Metric('val_loss', 'number', 'mean cross entropy on them, nats'),
    Metric('local_accuracy', 'share', "mean over clients of their own models' "
           'accuracy on test examples, at most 2048'),
    Metric('labeled_accuracy', 'share', 'rows that are learnt from with their '
           'labels that the global model gets right; at most about 2048 rows'),
    Metric('forgetting', 'share',
           'highest labeled_accuracy so far less the present one'),
    Metric('train_loss', 'number',
           'what clients minimised, mean over clients and rounds'),
    Metric('labeled_loss', 'number',
           'its part of labeled rows, where a method has one'),
    Metric('unlabeled_loss', 'number', 'its part of the others'),
    Metric('server_loss', 'number', 'what the server minimised on its own '
           'labels; null: it had none, or its updates were rejected'),
    Metric('mask_rate', 'share',
           'unlabeled examples whose pseudo-label was used'),
    Metric('tsa_rate', 'share',
           "labeled examples that UDA's annealing lets through"),
    Metric('pseudo_label_accuracy', 'share', 'right ones among the '
           'pseudo-labels that the method would use on about 2048 unlabeled '
           'examples; null: none'),
    Metric('pseudo_label_rate', 'share',
           'those of these examples that it would use'),
    Metric('outvoted', 'share', 'FedMatch: confident examples whose label is '
           "not the own model's"),
    Metric('psi_density', 'share', 'FedMatch: psi that is not negligible'),
    Metric('client_val_accuracy', 'share', "FedMatch: accuracy on the server's "
           'validation examples, mean over the models as clients sent them'),
    Metric('bytes_up', 'count', 'sent by all clients with nonzero weight since '
           'the previous row, bytes; above 16 MB to 7 digits, over thousands '
           'of rounds between rows to 4'),
    Metric('bytes_down', 'count', 'the same to all clients that are drawn'),
    Metric('models_sent', 'number', 'models down and up per client and round, '
           "in units of one dense model; 2 is FedAvg's"),
    Metric('num_rejected', 'count', 'broken updates left out since the '
           "previous row, a server's own and broken means of updates included"),
    Metric('num_participants', 'number',
           'clients with nonzero weight, 0 where the result was broken; mean '
           'over rounds'),
    Metric('forward_passes', 'number', 'examples sent through the network, per '
           'client and round, in local training; of every network of the '
           'client'),
    Metric('backward_passes', 'number',
           'examples of the losses that are derived through it, counted '
           'alike; not those that batch statistics alone derive'),
    Metric('labeled_share', 'share',
           'clients with labels among those with nonzero weight'),
    Metric('masked_share', 'share', 'processed rows that are padding; not '
           'related to mask_rate'),
    Metric('epsilon', 'number', "privacy spent at that round, in every round's "
           "row, at the run's delta; null: unbounded; nominal, without a "
           "guarantee, under dp_scope='generator'"),
)
_OTHERS = (
    Metric('agreed_rate', 'share',
           'FedLabel: used examples on whose label both models agree'),
    Metric('contrastive_loss', 'number',
           "mean of FedCon's, MOON's, ProxyFL's or Twin-sight's contrastive "
           'term'),
    Metric('cost_down', 'number', 'FedMatch: numbers sent to a client, percent '
           'of one dense model; mean over clients and rounds'),
    Metric('cost_up', 'number', 'FedMatch: the same sent by a client'),
    Metric('discriminator_loss', 'number', "of FedSSL's discriminator"),
    Metric('local_mask_rate', 'share',
           "FedLoKe: unlabeled examples whose label of the local model's "
           'is used'),
    Metric('local_rate', 'share',
           'SAGE, FedLabel: the local model in the labels used'),
    Metric('mixup_loss', 'number',
           "of the classifier on FedSSL's or SemiFL's blends"),
    Metric('neighbourhood_loss', 'number',
           'Twin-sight: how differently its networks see which rows are near'),
    Metric('realism_loss', 'number', "of FedSSL's generator"),
    Metric('reconstruction', 'number',
           'FedSSL: squared error of unmixed blends'),
    Metric('relation_loss', 'number',
           "FedIRM's distance of class relations, over steps and rows"),
    Metric('reward', 'number', "FedDure's d: how much C-reg's labeled loss "
           'falls in a step, nats'),
    Metric('second_rate', 'share',
           'PDCFed: unlabeled examples in the second stage'),
    Metric('tail_rate', 'share',
           'FedGGp: unlabeled examples that learn a tail class beside'),
)
METRICS = {metric.name: metric for metric in (*_FIRST, *_OTHERS)}
ORDER = tuple(metric.name for metric in _FIRST)
_RANKS = {name: rank for rank, name in enumerate(ORDER)}


def kind(name: str) -> str:
  """Returns the kind of a metric; one that is not in the table is a number."""
  return METRICS[name].kind if name in METRICS else 'number'


def scale(name: str) -> int:
  """Returns what a metric is multiplied by to be shown, 100 for a share."""
  return 100 if kind(name) == 'share' else 1


def rank(name: str) -> tuple[int, str]:
  """Returns the key by which names are sorted in a row."""
  return _RANKS.get(name, len(_RANKS)), name


def title(name: str) -> str:
  """Returns the words and the unit over a column."""
  return name.replace('_', ' ') + (', %' if kind(name) == 'share' else '')
