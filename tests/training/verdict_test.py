"""A verdict finds what is broken, and leaves sound numbers alone."""
from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import methods
from fedjax_ssl.core import optimizers
from fedjax_ssl.core.types import Variables
from fedjax_ssl.report import verdict
from fedjax_ssl.training import evaluate, loop, metrics
from tests import toy
from tests.thorough import wider

SOUND = {'accuracy': 0.6, 'loss': 1.2, 'train_loss': 0.4, 'num_rejected': 0,
         'per_class_accuracy': [0.6] * 10, 'most_predicted': 0.2,
         'largest_class': 0.11, 'largest_weight': 3.0}
OLD = {k: SOUND[k] for k in ('accuracy', 'loss', 'per_class_accuracy')}


def kind(row):
  found = verdict.of(row)
  return found and found.kind


@pytest.mark.parametrize('row', [
    SOUND, OLD, {'accuracy': 0.1}, {'accuracy': None},
    SOUND | {'loss': 30.0, 'largest_weight': 500.0},
    SOUND | {'loss': 99.0, 'largest_weight': 9.9e3},
    # Some updates were left out, and nobody had labels: no sign of harm.
    SOUND | {'num_rejected': 3}, SOUND | {'train_loss': None},
    # A sound model where one class has nearly all examples.
    SOUND | {'most_predicted': 0.975, 'largest_class': 0.95,
             'accuracy': 0.98}])
def test_sound_rows_have_none(row):
  assert verdict.of(row) is None


@pytest.mark.parametrize('change, word', [
    ({'loss': None}, 'loss not finite'), ({'loss': 7.6e10}, 'loss 7.6e+10'),
    ({'largest_weight': None}, 'largest weight not finite'),
    ({'largest_weight': 2e9}, 'largest weight 2e+09'),
    ({'loss': 101.0}, 'loss 1e+02'),
    ({'largest_weight': 1.1e4}, 'largest weight 1.1e+04'),
    ({'num_rejected': 8, 'train_loss': None}, 'every update'),
    ({'num_rejected': 2, 'num_participants': 0.0}, 'every update')])
def test_diverged_rows(change, word):
  found = verdict.of(SOUND | change)
  assert found is not None
  assert found.kind == verdict.DIVERGED and word in found.reason


def test_one_class_is_said_and_not_called_diverged():
  """A run of six rounds and few labels does so too, and has not diverged."""
  found = verdict.of(SOUND | {'most_predicted': 0.9967})
  other = verdict.of(SOUND | {'most_predicted': 1.0})
  lost = verdict.of(SOUND | {'most_predicted': 1.0, 'loss': None})
  assert lost is not None and lost.kind == verdict.DIVERGED
  assert verdict.note([found]) == (
      '† predicts one class for 99.67 % of the rows')
  assert verdict.note([None, found, other]) == (
      '† predicts one class for 99.67 % of the rows, or a like share, in 2 of '
      '3 seeds')
  assert verdict.legend([[found], [None]]) == ['(† predicts one class)']
  assert verdict.legend([[found, lost]]) == [
      '(† diverged)', '(† predicts one class)']
  # As files of earlier versions have it.
  assert verdict.stored({'verdict': [
      ['diverged', 'one class predicted for 100 %']]}) == [other]


def test_one_class_for_all_is_seen_in_two_unequal_classes():
  """As of PneumoniaMNIST: 62.5 % of the test examples are of one class."""
  constant = {'accuracy': 0.625, 'loss': 0.7, 'largest_class': 0.625,
              'per_class_accuracy': [0.0, 1.0], 'most_predicted': 1.0}
  assert kind(constant) == verdict.ONE_CLASS
  old = {k: constant[k] for k in ('accuracy', 'loss', 'per_class_accuracy')}
  assert kind(old) == verdict.ONE_CLASS
  assert kind(constant | {'most_predicted': 0.9}) == verdict.GUESSES
  assert kind(constant | {'most_predicted': 0.9, 'accuracy': 0.7}) is None


@pytest.mark.parametrize('largest', [0.01, 0.1, 0.5, 0.99])
def test_guesses_end_where_the_largest_class_is_beaten(largest):
  row = SOUND | {'largest_class': largest, 'most_predicted': 0.0}
  assert largest < verdict.bar(largest) < 1
  for accuracy, want in ((largest, verdict.GUESSES),
                         (verdict.bar(largest), verdict.GUESSES),
                         (verdict.bar(largest) + 1e-6, None)):
    assert kind(row | {'accuracy': accuracy}) == want


def test_rows_of_one_class_have_no_larger_share_to_beat():
  assert kind(SOUND | {'largest_class': 1.0, 'accuracy': 1.0}) is None


def test_an_old_row_knows_its_classes_only():
  assert kind(OLD | {'accuracy': 0.15}) == verdict.GUESSES
  assert kind(OLD | {'accuracy': 0.16}) is None
  assert kind(OLD | {'loss': None}) == verdict.DIVERGED


def test_marks_and_notes_cover_all_seeds():
  bad, poor = (verdict.of(SOUND | c)
               for c in ({'loss': None}, {'accuracy': 0.1}))
  assert verdict.mark([None, None]) == verdict.note([None]) == ''
  assert verdict.mark([None, poor]) == '‡'
  assert verdict.mark([poor, bad]) == '†'
  assert verdict.marked('9.00', [poor]) == '9.00 ‡'
  assert verdict.note([bad]) == '† diverged: loss not finite'
  text = verdict.note([None, bad, poor])
  assert '† diverged in 1 of 3 seeds' in text
  assert 'points above the largest class' in text
  assert verdict.legend([[None], [poor]]) == [
      '(‡ hardly above the largest class)']


def test_stored_verdicts_come_back():
  bad = verdict.of(SOUND | {'loss': None})
  assert bad is not None
  assert verdict.stored({'verdict': [None, list(bad)]}) == [None, bad]
  found = verdict.stored({'diverged': [False, True]})
  assert verdict.mark(found) == '‡' and found[0] is None


def test_shares_and_weights_against_counting():
  logits = jnp.eye(3)[jnp.array([0, 0, 0, 2])]
  got = evaluate.scores(logits, jnp.array([1, 1, 0, 2]))
  np.testing.assert_allclose(got['most_predicted'], 3 / 4)
  np.testing.assert_allclose(got['largest_class'], 1 / 2)
  record = (Variables({'w': jnp.array([[1., -7.]]), 'b': jnp.array([99.])},
                      {'mean': jnp.array([1e9])}), jnp.int32(12), ())
  assert evaluate.largest_weight(record) == 7
  assert evaluate.largest_weight((jnp.int32(3), ())) == 0
  broken = record[0]._replace(params={'w': jnp.array([[1., np.nan]])})
  assert np.isnan(evaluate.largest_weight(broken))


@pytest.mark.parametrize('name, rate', [
    ('fixmatch(threshold=0.4)', 1e10),
    *wider(('local', 1e10), ('fixmatch(threshold=0.4)', 1e38))])
def test_a_hopeless_learning_rate_is_seen(name, rate, tmp_path):
  """Whether updates are kept, or overflow and are left out."""
  federation, _ = toy.federation()
  method = methods.make(name, toy.task(
      optimizer=optimizers.make('sgd', learning_rate=rate)))
  with metrics.MetricsWriter(tmp_path) as writer:
    def on_row(row):
      writer.write({'round': row.round, **row.values})
    fedjax_ssl.train(method, [federation], num_rounds=2, eval_every=2,
                     observer=loop.Observer(on_row))
  row, = metrics.read(tmp_path)
  assert kind(row) == verdict.DIVERGED, row
