from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from fedjax_ssl.core.types import Examples
from fedjax_ssl.data import federation, partition, streaming

N = 6
C = 4
D = 240
LABELS = np.random.default_rng(3).integers(0, C, D).astype(np.int32)
TRAIN = Examples(np.arange(D, dtype=np.uint8).reshape(D, 1, 1, 1), LABELS)
TEST = Examples(TRAIN.inputs[:20], LABELS[:20])


def _partition(seed=0, alpha=.5):
  rng = np.random.default_rng(seed)
  held = partition.choose_validation(rng, LABELS, fraction=.05)
  where = partition.choose_labeled(rng, LABELS, per_class=8, where=~held)
  return partition.make_partition(
      partition.iid_random(rng, LABELS, N, where=where),
      partition.dirichlet_capped(
          rng, LABELS, N, where=~where & ~held, alpha=alpha, min_size=1),
      held)


def _federate(dealt=None, **kwargs):
  return federation.federate(
      TRAIN, None, TEST, _partition() if dealt is None else dealt,
      num_clients=N, **kwargs)


def test_integers_of_any_width_say_whose_rows_are_whose():
  dealt = _partition()
  wide = dealt._replace(labeled=dealt.labeled.astype(np.int64),
                        unlabeled=dealt.unlabeled.tolist())
  for one, other in zip(_federate(dealt).clients, _federate(wide).clients,
                        strict=True):
    np.testing.assert_array_equal(one, other)
  with pytest.raises(ValueError, match="'labeled' must hold integers, not fl"):
    _federate(dealt._replace(labeled=dealt.labeled + .5))


def test_examples_are_examples():
  pair: Any = TEST.inputs, TEST.labels
  with pytest.raises(TypeError, match=r'^test must be Examples\(.* a tuple'):
    federation.federate(TRAIN, None, pair, _partition(), num_clients=N)


def _owner(rows, sizes):
  """The owner vector that a table stands for; fails on a row used twice."""
  owner = np.full(D, -1)
  for k in range(len(sizes)):
    assert (rows[k, sizes[k]:] == 0).all()
    for row in rows[k, :sizes[k]]:
      assert owner[row] == -1
      owner[row] = k
  return owner


def _owners(shard):
  return (_owner(shard.labeled, shard.num_labeled),
          _owner(shard.unlabeled, shard.num_unlabeled))


def test_tables_are_the_partition():
  dealt = _partition()
  got = _federate(dealt)
  labeled, unlabeled = _owners(got.clients)
  np.testing.assert_array_equal(labeled, dealt.labeled)
  np.testing.assert_array_equal(unlabeled, dealt.unlabeled)
  assert got.num_clients == N and got.num_classes == C
  assert got.server.num_labeled == 0 and got.server.labeled.shape == (1,)
  assert all(leaf.dtype == np.int32 for leaf in (*got.clients, *got.server))
  np.testing.assert_array_equal(
      got.validation.labels, LABELS[dealt.validation])
  np.testing.assert_array_equal(
      got.validation.inputs, TRAIN.inputs[dealt.validation])


def test_all_labels_moves_rows_and_changes_no_owner():
  dealt = _partition()
  got = _federate(dealt, labels='all')
  labeled, unlabeled = _owners(got.clients)
  np.testing.assert_array_equal(
      labeled, np.maximum(dealt.labeled, dealt.unlabeled))
  assert (unlabeled == -1).all() and got.clients.unlabeled.shape == (N, 1)


@pytest.mark.parametrize('owner', ['clients', 'server'])
def test_labels_at_the_server_keep_every_row(owner):
  dealt = _partition()
  if owner == 'server':
    dealt = dealt._replace(
        labeled=np.where(dealt.labeled >= 0, N, -1).astype(np.int32))
  got = _federate(dealt, labels_at='server')
  labeled, unlabeled = _owners(got.clients)
  assert (labeled == -1).all()
  np.testing.assert_array_equal(unlabeled, dealt.unlabeled)
  np.testing.assert_array_equal(
      got.server.labeled, np.flatnonzero(dealt.labeled >= 0))
  assert got.server.num_labeled == got.server.labeled.size


def test_all_labels_with_labels_at_the_server():
  dealt = _partition()
  got = _federate(dealt, labels='all', labels_at='server')
  labeled, unlabeled = _owners(got.clients)
  np.testing.assert_array_equal(labeled, dealt.unlabeled)
  assert (unlabeled == -1).all()
  assert got.server.num_labeled == (dealt.labeled >= 0).sum()


def test_clients_without_rows_are_legal():
  nobody = np.full(D, -1, np.int32)
  got = _federate(partition.make_partition(nobody, nobody))
  assert got.clients.labeled.shape == (N, 1)
  assert not got.clients.num_labeled.any()
  assert not got.clients.num_unlabeled.any()
  assert federation.describe(got)['clients_without_rows'] == N


def test_given_validation_examples_are_kept():
  dealt = _partition()._replace(validation=np.zeros(D, bool))
  got = federation.federate(TRAIN, TEST, TEST, dealt, num_clients=N)
  np.testing.assert_array_equal(got.validation.labels, TEST.labels)


def _bad_server():
  dealt = _partition()
  return dealt._replace(labeled=np.where(
      dealt.labeled == 0, N, dealt.labeled).astype(np.int32))


def _in_task(task):
  dealt = _partition()
  return dealt._replace(tasks=np.where(
      dealt.unlabeled >= 0, task, -1).astype(np.int32))


@pytest.mark.parametrize('kwargs,match', [
    ({'labels': 'some'}, 'labels'), ({'labels_at': 'home'}, 'labels_at'),
    ({'num_classes': 3}, 'label 3'), ({'rounds_per_task': 5}, 'rounds_per_ta'),
    ({'dealt': _in_task(0)}, 'rounds_per_task'),
    ({'dealt': _partition()._replace(tasks=np.zeros(D, np.int32)),
      'rounds_per_task': 5}, "'tasks' must give a task"),
    ({'dealt': _in_task(D), 'rounds_per_task': 5}, f'names task {D}'),
    ({'num_labeled_clients': N + 1}, 'num_labeled_clients'),
    ({'num_labeled_clients': 2}, 'first 2'),
    ({'dealt': _bad_server()}, 'to the server'),
    ({'dealt': _partition()._replace(labeled=np.zeros(3, np.int32))}, '240')])
def test_bad_arguments(kwargs, match):
  with pytest.raises(ValueError, match=match):
    _federate(**kwargs)


def test_parts_must_fit():
  dealt = _partition()
  other = Examples(np.zeros((5, 2, 2, 1), np.uint8), LABELS[:5])
  with pytest.raises(ValueError, match='test has inputs'):
    federation.federate(TRAIN, None, other, dealt, num_clients=N)
  with pytest.raises(ValueError, match='5 inputs and 4 labels'):
    federation.federate(TRAIN, None, Examples(TEST.inputs[:5], LABELS[:4]),
                        dealt, num_clients=N)
  with pytest.raises(ValueError, match='given twice'):
    federation.federate(TRAIN, TEST, TEST, dealt, num_clients=N)


def test_labeled_clients_come_first():
  rng = np.random.default_rng(0)
  owner = partition.dirichlet_capped(rng, LABELS, N, min_size=1)
  dealt = partition.make_partition(*partition.label_clients(owner, 2))
  got = _federate(dealt, num_labeled_clients=2)
  assert got.num_labeled_clients == 2
  assert (got.clients.num_labeled[:2] > 0).all()
  assert not got.clients.num_labeled[2:].any()
  assert not got.clients.num_unlabeled[:2].any()


@pytest.mark.parametrize('labels', ['few', 'all'])
@pytest.mark.parametrize('labels_at', ['clients', 'server'])
def test_a_stream_meets_every_unlabeled_row_once(labels, labels_at):
  dealt = _partition()
  tasks = streaming.deal_tasks(
      np.random.default_rng(0), LABELS, dealt.unlabeled, num_tasks=3)
  got = _federate(dealt._replace(tasks=tasks), labels=labels,
                  labels_at=labels_at, rounds_per_task=5)
  whole = _owners(_federate(dealt, labels=labels, labels_at=labels_at).clients)
  for a, b in zip(whole, _owners(got.clients), strict=True):
    np.testing.assert_array_equal(a, b)
  own = dealt.labeled if labels_at == 'clients' else np.full(D, -1)
  seen = np.zeros(D, int)
  for t in range(3):
    now = got.at(np.int32(5 * t + 4)).clients
    assert now.labeled.shape[0] == N
    labeled, unlabeled = _owners(jax.tree.map(np.asarray, now))
    fresh = np.where(tasks == t, dealt.unlabeled, -1)
    np.testing.assert_array_equal(
        labeled, np.maximum(own, fresh) if labels == 'all' else own)
    np.testing.assert_array_equal(
        unlabeled, np.full(D, -1) if labels == 'all' else fresh)
    seen += tasks == t
  assert (seen == (dealt.unlabeled >= 0)).all()
  last = got.at(np.int32(10_000)).clients  # The last task stays.
  np.testing.assert_array_equal(last.labeled, now.labeled)
  np.testing.assert_array_equal(last.unlabeled, now.unlabeled)


def _with_stream():
  dealt = _partition()
  return _federate(dealt._replace(tasks=streaming.deal_tasks(
      np.random.default_rng(0), LABELS, dealt.unlabeled, num_tasks=3)),
                   rounds_per_task=5)


def _of_fewer(given):
  return dataclasses.replace(
      given, stream=jax.tree.map(lambda x: x[:, 1:], given.stream))


@pytest.mark.parametrize('broken, words', [
    (lambda given: dataclasses.replace(given, rounds_per_task=0),
     'rounds_per_task=0 must be positive with a stream'),
    (lambda given: dataclasses.replace(given, stream=None),
     'rounds_per_task=5 must be positive with a stream and 0 without'),
    (_of_fewer, f'it must be of tasks and of {N} clients')])
def test_a_stream_is_of_all_clients_and_has_a_pace(broken, words):
  given = _with_stream()
  federation.check(given)
  with pytest.raises(ValueError, match=words):
    federation.check(broken(given))


def test_a_stream_reveals_no_label_that_nobody_knows():
  dealt = _partition()
  unknown = np.flatnonzero(dealt.unlabeled >= 0)[::2]
  labels = LABELS.copy()
  labels[unknown] = -1
  tasks = streaming.deal_tasks(
      np.random.default_rng(0), LABELS, dealt.unlabeled, num_tasks=3)
  got = federation.federate(
      TRAIN._replace(labels=labels), None, TEST, dealt._replace(tasks=tasks),
      num_clients=N, num_classes=C, labels='all', rounds_per_task=5)
  federation.check(got)
  assert got.stream is not None
  for shard in (got.stream, got.clients):
    width = shard.labeled.shape[-1]
    real = np.arange(width) < np.asarray(shard.num_labeled)[..., None]
    assert (labels[np.asarray(shard.labeled)[real]] >= 0).all()


@pytest.mark.parametrize('labels_at', ['clients', 'server'])
def test_stacked_federations_are_the_single_ones(labels_at):
  singles = [_federate(_partition(seed, alpha), labels_at=labels_at)
             for seed, alpha in ((0, .2), (1, 5.0), (2, 1.0))]
  stacked = federation.stack(singles)
  assert stacked.train is TRAIN and stacked.num_clients == N
  assert len({s.clients.unlabeled.shape for s in singles}) > 1

  def digest(one):
    # Reads every table through its mask, as training does.
    shard = one.clients
    keep = (np.arange(shard.unlabeled.shape[-1])
            < shard.num_unlabeled[..., None])
    labeled = (np.arange(shard.labeled.shape[-1])
               < shard.num_labeled[..., None])
    labels = jax.numpy.asarray(one.train.labels)
    return ((keep * (labels[shard.unlabeled] + 1)).sum(-1),
            (labeled * (labels[shard.labeled] + 1)).sum(-1),
            one.server.num_labeled, labels[one.server.labeled[:5]].sum(),
            one.validation.labels.sum())

  got = jax.vmap(digest, in_axes=(federation.seed_axes(stacked),))(stacked)
  for i, single in enumerate(singles):
    for a, b in zip(got, digest(single), strict=True):
      np.testing.assert_array_equal(a[i], b)


def test_padding_to_common_widths_changes_no_row():
  singles = [_federate(_partition(seed, .2)) for seed in range(3)]
  padded = federation.pad_widths(singles)
  assert len({p.clients.unlabeled.shape for p in padded}) == 1
  for a, b in zip(singles, padded, strict=True):
    for x, y in zip(_owners(a.clients), _owners(b.clients), strict=True):
      np.testing.assert_array_equal(x, y)


def test_padding_leaves_full_tables_as_they_are_and_fills_up_empty_ones():
  one = _federate()
  again, = federation.pad_widths([one])
  assert again.clients.unlabeled is one.clients.unlabeled
  empty = dataclasses.replace(one, clients=one.clients._replace(
      unlabeled=one.clients.unlabeled[:, :0],
      num_unlabeled=np.zeros_like(one.clients.num_unlabeled)))
  padded, = federation.pad_widths([empty])
  assert padded.clients.unlabeled.shape == (len(one.clients.unlabeled), 1)
  assert padded.clients.labeled is one.clients.labeled


def test_stack_refuses_other_data_and_settings():
  one = _federate()
  other = dataclasses.replace(one, train=Examples(TRAIN.inputs.copy(), LABELS))
  with pytest.raises(ValueError, match='federation 1 differs'):
    federation.stack([one, other])
  with pytest.raises(ValueError, match='federation 1 differs'):
    federation.stack([one, dataclasses.replace(one, num_classes=9)])
  with pytest.raises(ValueError, match='at least one'):
    federation.stack([])


def test_describe_counts_what_was_dealt():
  dealt = _partition()
  got = _federate(dealt)
  numbers = json.loads(json.dumps(federation.describe(got)))
  labeled, unlabeled = federation.class_counts(got)
  for name, owner, counts in (('labeled', dealt.labeled, labeled),
                              ('unlabeled', dealt.unlabeled, unlabeled)):
    want = np.zeros((N, C), int)
    np.add.at(want, (owner[owner >= 0], LABELS[owner >= 0]), 1)
    np.testing.assert_array_equal(counts, want)
    assert numbers[f'{name}_classes'] == want.tolist()
    sizes = want.sum(1)
    assert numbers[name] == {
        'total': sizes.sum(), 'min': sizes.min(), 'mean': sizes.mean(),
        'max': sizes.max()}
  assert numbers['num_validation'] == dealt.validation.sum()
  assert numbers['server_labeled'] == 0 and numbers['num_tasks'] == 1


def test_a_hundred_thousand_clients_hold_index_tables_only():
  rng = np.random.default_rng(0)
  labels = rng.integers(0, 10, 1_000_000).astype(np.int32)
  train = Examples(np.zeros((labels.size, 1, 1, 1), np.uint8), labels)
  owner = partition.iid_random(rng, labels, 100_000)
  dealt = partition.make_partition(np.full_like(owner, -1), owner)
  test = Examples(train.inputs[:1], labels[:1])
  got = federation.federate(train, test, test, dealt, num_clients=100_000)
  assert got.train is train
  assert got.clients.unlabeled.shape == (100_000, 10)
  np.testing.assert_array_equal(
      np.sort(got.clients.unlabeled, axis=None), np.arange(1_000_000))
  assert 'labeled_classes' not in federation.describe(got)
