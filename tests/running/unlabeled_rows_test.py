"""Data of which some rows have no label at all, which -1 says."""
from __future__ import annotations

import numpy as np
import pytest

import fedjax_ssl
from fedjax_ssl import config, data
from fedjax_ssl.running import partitions, runs, settings

DIGITS = data.load('digits')
TRUTH = np.asarray(DIGITS.train.labels)
# Ten rows of each class keep their labels.
LABELS = np.where(np.isin(np.arange(TRUTH.size), np.concatenate([
    np.flatnonzero(TRUTH == c)[:10] for c in range(10)])), TRUTH, -1)
KNOWN = LABELS >= 0
SET = DIGITS._replace(train=DIGITS.train._replace(
    labels=LABELS.astype(np.int32)))


def partition(setting, dataset=SET, **given):
  values = {**settings.defaults_of(setting), 'seed': 3, 'num_clients': 5,
            'cohort_size': 5, 'validation_fraction': 0.1, **given}
  options = runs.decided(
      settings.SETTINGS[setting], config.resolve(values, given), given, dataset)
  return next(iter(
      partitions.deal(settings.SETTINGS[setting], options, dataset).values()))


@pytest.mark.parametrize('setting, given', [
    ('own_data', {'labeled_fraction': 1.0, 'labels_per_class': None}),
    ('own_data', {'labels_per_class': 4}),
    ('digits_dirdir', {'labels_per_class': 8}),
    ('cifar_iid', {'labels_per_class': 5}),
    ('cross_device', {'labeled_fraction': 0.5, 'labels_per_class': None}),
    ('labeled_clients', {'num_labeled_clients': 2})])
def test_they_are_dealt_to_all_evenly_and_never_as_labeled(setting, given):
  found = partition(setting, **given)
  assert not found.validation[~KNOWN].any() and found.validation.any()
  assert (found.labeled[~KNOWN] == -1).all()
  first = given.get('num_labeled_clients', 0)  # They have labels only.
  sizes = np.bincount(found.unlabeled[~KNOWN], minlength=5)[first:]
  assert sizes.sum() == (~KNOWN).sum() and np.ptp(sizes) <= 1
  assert (found.labeled >= 0).any()


@pytest.mark.parametrize('labels_at', ['clients', 'server'])
def test_own_data_hide_no_known_label_unless_asked(labels_at):
  found = partition('own_data', labels_at=labels_at)
  known = KNOWN & ~found.validation
  np.testing.assert_array_equal(found.labeled >= 0, known)
  assert not (found.unlabeled[known] >= 0).any()
  few = partition('own_data', labels_at=labels_at, labels_per_class=4)
  assert (few.labeled >= 0).sum() == 40
  whole = partition('own_data', DIGITS, labels_at=labels_at)
  assert (whole.labeled >= 0).sum() == 100


def test_they_stay_with_the_clients_that_the_data_name():
  owner = (np.arange(TRUTH.size) % 7).astype(np.int32)
  named = SET._replace(owner=owner, client_names=tuple('abcdefg'))
  found = partition('own_data', named, num_clients=7, cohort_size=7,
                    labeled_fraction=1.0, labels_per_class=None,
                    partition='natural')
  np.testing.assert_array_equal(found.unlabeled[~KNOWN], owner[~KNOWN])


def test_with_all_labels_they_are_left_out():
  found = partition('cifar_iid', labels_per_class=5)
  made = data.federate(SET.train, None, SET.test, found, num_clients=5,
                       labels='all')
  assert int(np.sum(made.clients.num_labeled)) == (
      KNOWN & ~found.validation).sum()
  assert not np.sum(made.clients.num_unlabeled)


def test_a_stream_and_another_split_refuse_them():
  with pytest.raises(config.FieldError, match='a stream of tasks cannot deal'):
    partition('fmnist_streaming', labels_per_class=5, rounds_per_task=2)
  with pytest.raises(config.FieldError, match='split=80/20: the set has rows'):
    data.datasets._resplit(data.datasets.files.Source(
        {'train': SET.train, 'test': SET.test}), '80/20', 0)


def test_arrays_with_them_are_trained_on_and_their_guesses_not_judged():
  run = fedjax_ssl.fit(
      'fixmatch(threshold=0.0)',
      (SET.train.inputs, LABELS, SET.test.inputs, SET.test.labels), rounds=1,
      clients=4, labeled_fraction=1.0, model='linear', local_steps=2,
      progress=False, weak='none', strong='none')
  assert run.federations[0].clients.num_unlabeled.sum() == (~KNOWN).sum()
  assert np.isnan(run.metrics['pseudo_label_accuracy']).all()
  assert run.metrics['pseudo_label_rate'] == [1]
  assert run.metrics['accuracy'][0] > 0


def test_there_is_no_upper_bound_where_no_label_is_hidden():
  for given, bounds in (({'labeled_fraction': 1.0}, ['labels only']),
                        ({'labels_per_class': 2},
                         ['labels only', 'all labels'])):
    run = fedjax_ssl.fit(
        'fixmatch', (SET.train.inputs, LABELS, SET.test.inputs,
                     SET.test.labels), rounds=1, clients=3, bounds=True,
        model='linear', local_steps=1, progress=False, weak='none',
        strong='none', **given)
    assert [name.partition(' (')[0] for name in run.bounds] == bounds


def test_a_test_row_has_a_label():
  wrong = np.asarray(SET.test.labels).copy()
  wrong[3] = -1
  with pytest.raises(ValueError, match='test labels run from -1 to 9'):
    fedjax_ssl.fit('fixmatch', (SET.train.inputs, LABELS, SET.test.inputs,
                                wrong), rounds=1)
