"""SteadyMatch: its average, what it reduces to, and a round by hand."""
from __future__ import annotations

from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from tests import toy
from tests.by_hand import softmax
from tests.methods import averaging_test
from tests.methods.updates import change, same, UNKNOWN, update
from tests.thorough import wider


def _rounds(text, count, place='clients', **changes):
  """The states before the first round and after each."""
  federation, _ = toy.federation(place)
  method = methods.make(text, toy.task(labels_at=place, **changes))
  run = jax.jit(method.round)
  states = [method.init(toy.key(0), federation)]
  for i in range(count):
    states.append(run(states[-1], federation, jnp.int32(i), toy.key(i))[0])
  return [state.server for state in states]


@pytest.mark.parametrize('place', ['clients', *wider('server')])
@pytest.mark.parametrize('decay, shares', [
    (1., (1/3, 1/3, 1/3)), (.5, (.25, .25, .5)), (.25, (.0625, .1875, .75))])
def test_the_teacher_is_a_mean_of_the_models_after_rounds(decay, shares, place):
  """The plain one at first; the model drawn at the start is not in it."""
  records = _rounds(f'steadymatch(decay={decay})', 4, place)
  models = [record.model for record in records]
  for i in (0, 1):  # As in the first round, then the model that it made.
    chex.assert_trees_all_equal(records[i + 1].teacher, models[i])
  want = jax.tree.map(
      lambda *x: sum(share * y for share, y in zip(shares, x, strict=True)),
      *models[1:4])
  chex.assert_trees_all_close(records[4].teacher, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize('model', ['conv', *wider('linear')])
@pytest.mark.parametrize('knobs, other', [
    ('local_share=1.0', 'fixmatch(threshold=0.4'),
    ('local_share=0.0, decay=0.0', "fixmatch(labeler='global', threshold=0.4")])
def test_it_reduces_to_one_labeler(model, knobs, other):
  """Where the weak view is the plain row."""
  changes = {'weak': same, 'model': model, 'local_steps': 6}
  a, b, c = (change(text, **changes) for text in (
      f'steadymatch(threshold=0.4, {knobs})', f"{other}, weighting='uniform')",
      'steadymatch(threshold=0.4, decay=0.0)'))
  np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-5)
  assert not np.allclose(a, c, atol=1e-4)


def test_the_average_is_sent_only_where_it_labels():
  for knobs in ('decay=0.0', 'local_share=1.0'):
    assert not hasattr(_rounds(f'steadymatch({knobs})', 0)[0], 'teacher')


@pytest.mark.parametrize('place', ['clients', *wider('server')])
def test_without_unlabeled_rows_it_is_the_supervised_part(place):
  if place == 'clients':
    a, b = (update(text, model='conv', weak=same).message for text in (
        'steadymatch(unlabeled_weight=0.0)', 'fixmatch(threshold=1.1)'))
  else:  # Which trains after the clients, with another key.
    a, b = (averaging_test.one_round(
        f'steadymatch({knob})', 'conv', place)[1].server.model
            for knob in ('unlabeled_weight=0.0', 'threshold=1.1'))
  chex.assert_trees_all_close(a, b, rtol=1e-5, atol=1e-7)


ONCE: dict[str, Any] = {
    'local_steps': 1, 'optimizer': lambda round_: optax.sgd(.5)}
SLOWED = 'steadymatch(threshold=0.0, unlabeled_rate={})'


def test_clients_without_labels_take_smaller_steps():
  """Only where others have labels."""
  full, half, none = (change(SLOWED.format(rate), UNKNOWN, **ONCE)
                      for rate in (1.0, .5, 0.0))
  np.testing.assert_allclose(full, 2 * half, rtol=1e-4, atol=1e-7)
  assert np.abs(full).max() > 0 and np.abs(none).max() == 0
  a, b = (change(SLOWED.format(rate), **ONCE) for rate in (1.0, 0.0))
  np.testing.assert_array_equal(a, b)
  a, b = (change(SLOWED.format(rate), UNKNOWN, place='server', **ONCE)
          for rate in (1.0, 0.0))
  np.testing.assert_array_equal(a, b)


def test_passes_are_counted():
  """Two labelers forward on a batch of 4; its strong view both ways."""
  metrics = update(SLOWED.format(1.0), UNKNOWN, **ONCE).metrics
  assert metrics['forward_passes'] == 3 * 4
  assert metrics['backward_passes'] == 4


def test_labels_are_judged_by_the_mean_of_both_labelers():
  federation, _ = toy.federation()
  task = toy.task()
  method = methods.make('steadymatch(local_share=.1, threshold=0.0)', task)
  server = method.init(toy.key(6), federation).server
  server = server._replace(teacher=task.model.init(toy.key(1)))
  inputs = federation.train.inputs[:12]
  assert method.pseudo_label is not None
  labels, _ = method.pseudo_label(server, (), inputs)
  p, q = (jax.nn.softmax(task.apply(model, inputs))
          for model in (server.model, server.teacher))
  want = (.1 * p + .9 * q).argmax(-1)
  assert (want != (.9 * p + .1 * q).argmax(-1)).any()
  np.testing.assert_array_equal(labels, want)


def test_the_server_trains_on_its_labels_after_the_clients():
  """The model that predicts is one that has just seen them."""
  knobs = 'steadymatch(threshold=1.1)'
  before, after, metrics = averaging_test.one_round(knobs, place='server')
  assert metrics['server_loss'] > 0
  gap = tree.global_norm(tree.subtract(after.server.model,
                                       before.server.model))
  assert gap > 1e-3


def _step(w, teacher, known, y, unknown, *, threshold, share, weight):
  """The gradient for a linear model, by hand."""
  size = toy.NUM_CLASSES
  out = known.T @ (softmax(known @ w) - np.eye(size)[y]) / max(len(y), 1)
  q = share * softmax(unknown @ w) + (1 - share) * softmax(unknown @ teacher)
  used = q.max(-1) >= threshold
  strong = np.concatenate([1 - .8 - unknown[:, :-1], unknown[:, -1:]], 1)
  d = used[:, None] * (softmax(strong @ w) - np.eye(size)[q.argmax(-1)])
  return out + weight * strong.T @ d / max(len(unknown), 1)


def test_a_round_by_hand():
  """Full batches, plain descent, everyone takes part, a teacher far away."""
  rate, share, weight, threshold = .5, .3, 2., .45
  federation, _ = toy.federation()
  changes = {
      'weak': same, 'strong': lambda key, x: 255 - x, 'labeled_batch': 8,
      'unlabeled_batch': 12, 'local_steps': 3, 'cohort_size': toy.NUM_CLIENTS,
      'optimizer': lambda round_: optax.sgd(rate)}
  method = methods.make(
      f'steadymatch(threshold={threshold}, unlabeled_weight={weight}, '
      f'local_share={share}, decay=1.0)', toy.task(**changes))
  before = method.init(toy.key(0), federation)
  other = method.init(toy.key(5), federation).server.model
  before = before._replace(server=before.server._replace(teacher=other))
  # The third round: the teacher has half of its past.
  after, metrics = jax.jit(method.round)(
      before, federation, jnp.int32(2), toy.key(1))

  def numbers(model):
    layer = model.params['Dense_0']
    return np.concatenate([np.asarray(layer['kernel'], np.float64),
                           np.asarray(layer['bias'], np.float64)[None]])
  images = np.asarray(federation.train.inputs, np.float64).reshape(
      len(federation.train.labels), -1) / 255 - .4
  images = np.concatenate([images, np.ones((len(images), 1))], 1)
  labels = np.asarray(federation.train.labels)
  first = numbers(before.server.model)
  teacher, total = (first + numbers(other)) / 2, 0
  sizes = list(zip(toy.LABELED, toy.UNLABELED, strict=True))
  for i, (n, m) in enumerate(sizes):
    known = np.asarray(federation.clients.labeled)[i, :n]
    unknown = np.asarray(federation.clients.unlabeled)[i, :m]
    w = first
    for _ in range(3 if n + m else 0):
      w = w - rate * _step(w, teacher, images[known], labels[known],
                           images[unknown], threshold=threshold, share=share,
                           weight=weight)
    total = total + (w - first)
  want = first + total / sum(n + m > 0 for n, m in sizes)
  np.testing.assert_allclose(numbers(after.server.model), want, rtol=2e-3,
                             atol=1e-4)
  np.testing.assert_allclose(numbers(after.server.teacher), teacher, rtol=1e-5,
                             atol=1e-6)
  assert 0 < toy.means(metrics)['mask_rate'] < 1
