"""FedLoKe: what it reduces to, its local models, and a round by hand."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.methods import fedloke
from tests import toy
from tests.by_hand import softmax
from tests.methods.updates import (
  BOTH,
  change,
  KEY,
  KNOWN,
  same,
  UNKNOWN,
  update,
)
from tests.thorough import wider

PLAIN = 'ramp=0.0, max_gradient=1e999'


def test_labels_of_a_sure_teacher_by_hand():
  """Soft labels; a masked row counts nowhere, an unsure one in the mean."""
  p = np.array([[.99, .006, .004], [.5, .3, .2], [.98, .01, .01],
                [.999, .0005, .0005]])
  q = np.array([[.7, .2, .1], [.1, .8, .1], [.3, .3, .4], [.2, .5, .3]])
  mask = jnp.array([1., 1., 0., 1.])
  loss, sure = fedloke.distill(jnp.log(q), jnp.log(p), mask, max_entropy=.1)
  entropy = -np.sum(p * np.log(p), -1)
  np.testing.assert_array_equal(sure, entropy < .1)
  assert list(sure) == [1, 0, 0, 1]
  want = sum(np.sum(p[i] * np.log(p[i] / q[i])) for i in (0, 3)) / 3
  np.testing.assert_allclose(loss, want, rtol=1e-4)
  all_rows, _ = fedloke.distill(jnp.log(q), jnp.log(p), mask,
                                max_entropy=np.log(3) + 1e-3)
  more = np.sum(p[1] * np.log(p[1] / q[1])) / 3
  np.testing.assert_allclose(all_rows, want + more, rtol=1e-4)
  slope = jax.grad(lambda x: fedloke.distill(jnp.log(q), x, mask)[0])(
      jnp.log(p))
  np.testing.assert_array_equal(slope, 0)


@pytest.mark.parametrize('knob', [
    'max_entropy=0.0', *wider('unlabeled_weight=0.0')])
@pytest.mark.parametrize('model', ['linear', *wider('conv')])
def test_without_soft_labels_it_is_labels_only_on_strong_views(knob, model):
  """Equally many steps; unlabeled rows enter batch statistics all the same."""
  given = {'strong': same, 'weak': same, 'local_steps': 3, 'model': model,
           'labeled_batch': 8}
  a, b = (update(text, **given).message for text in (
      f'fedloke({PLAIN}, {knob})', 'fedavg'))
  assert tree.global_norm(a.params) > 1e-2
  chex.assert_trees_all_close(a.params, b.params, rtol=1e-5, atol=1e-6)


ALIKE = f'fedloke({PLAIN}, max_entropy=2.0, weighting="{{}}")'


@pytest.mark.parametrize('weighting', ['examples', *wider('uniform')])
def test_alike_views_and_models_train_alike(weighting):
  """In the first round: both start as the received model."""
  out = update(ALIKE.format(weighting), strong=same, weak=same)
  state = methods.make('fedloke', toy.task()).init(
      KEY, toy.federation()[0])
  moved = tree.subtract(out.memory, state.server.model)
  chex.assert_trees_all_close(moved, out.message, rtol=1e-4, atol=1e-6)
  rows = toy.LABELED[BOTH] + toy.UNLABELED[BOTH]
  assert out.weight == (rows if weighting == 'examples' else 1)


@pytest.mark.parametrize('client, forward, backward', [
    (KNOWN, 2, 2), (UNKNOWN, 4, 2)])
def test_passes_are_counted(client, forward, backward):
  """Of both models: one of a labeled row, weak and strong of the others."""
  rows = toy.LABELED[client] + toy.UNLABELED[client]
  metrics = update(ALIKE.format('examples'), client, strong=same,
                   weak=same).metrics
  assert metrics['forward_passes'] == forward * rows
  assert metrics['backward_passes'] == backward * rows


def test_labels_are_judged_by_the_local_model():
  federation, _ = toy.federation()
  task = toy.task()
  method = methods.make('fedloke(max_entropy=0.3)', task)
  server = method.init(KEY, federation).server
  local = tree.scale(task.model.init(toy.key(1)), 20.0)
  inputs = federation.train.inputs[:12]
  assert method.pseudo_label is not None
  labels, sure = method.pseudo_label(server, local, inputs)
  p, q = (softmax(task.apply(model, inputs))
          for model in (local, server.model))
  assert (p.argmax(-1) != q.argmax(-1)).any()
  np.testing.assert_array_equal(labels, p.argmax(-1))
  np.testing.assert_array_equal(sure, -(p * np.log(p)).sum(-1) < .3)
  assert 0 < sure.mean() < 1


def test_each_number_of_a_gradient_is_clipped():
  """One step of plain descent moves nothing further than the rate's share."""
  one = {'local_steps': 1, 'optimizer': lambda round_: optax.sgd(2.0)}
  free = change(f'fedloke({PLAIN})', **one)
  held = change('fedloke(ramp=0.0, max_gradient=0.01)', **one)
  assert abs(free).max() > .021
  np.testing.assert_allclose(held, np.clip(free, -.02, .02), atol=1e-6)


def test_the_weight_of_soft_labels_rises():
  """From nearly 0 in the first step to 1 at the ramp's end."""
  given = {'local_steps': 1, 'schedule_rounds': 10}
  def moves(ramp, max_entropy, round_=0):
    return change(f'fedloke(ramp={ramp}, max_entropy={max_entropy}, '
                  'max_gradient=1e999)', round_=round_, **given)
  none, whole = moves(1.0, 0.0), moves(0.0, 2.0)
  assert abs(whole - none).max() > 1e-3
  np.testing.assert_allclose(moves(1.0, 2.0) - none, (whole - none) / 10,
                             atol=1e-6)
  np.testing.assert_allclose(moves(1.0, 2.0, round_=9), whole, atol=1e-6)
  np.testing.assert_allclose(moves(0.4, 2.0, round_=4), whole, atol=1e-6)


def _step(own, other, known, y, unknown, weak, bar):
  """A model's gradient: `known` and `unknown` are the views that it sees."""
  size = toy.NUM_CLASSES
  out = known.T @ (softmax(known @ own) - np.eye(size)[y]) / max(len(y), 1)
  labels = softmax(weak @ other)
  sure = -np.sum(labels * np.log(labels), -1) < bar
  d = sure[:, None] * (softmax(unknown @ own) - labels)
  return out + unknown.T @ d / max(len(unknown), 1), sure


def test_two_rounds_by_hand():
  """Full batches of a linear model; local models start from both in round 2."""
  rate, bar, decay, steps = 1.5, 1.0, .7, 3
  federation, _ = toy.federation()
  method = methods.make(
      f'fedloke({PLAIN}, max_entropy={bar}, decay={decay})', toy.task(
          weak=same, strong=lambda key, x: 255 - x, labeled_batch=8,
          unlabeled_batch=12, local_steps=steps, cohort_size=toy.NUM_CLIENTS,
          optimizer=lambda round_: optax.sgd(rate)))
  state = method.init(toy.key(0), federation)

  def numbers(model):
    layer = model.params['Dense_0']
    return np.concatenate([np.asarray(layer['kernel'], np.float64),
                           np.asarray(layer['bias'], np.float64)[None]])
  def seen(pixels):
    x = pixels.reshape(len(pixels), -1) / 255 - .4
    return np.concatenate([x, np.ones((len(x), 1))], 1)
  pixels = np.asarray(federation.train.inputs, np.float64)
  weak, strong = seen(pixels), seen(255 - pixels)
  labels = np.asarray(federation.train.labels)
  sent, rates = numbers(state.server.model), []
  local = [sent] * toy.NUM_CLIENTS
  run = jax.jit(method.round)
  for round_ in range(2):
    state, metrics = run(state, federation, jnp.int32(round_),
                         toy.key(1 + round_))
    total, taught, count = 0, 0, 0
    for i, (n, m) in enumerate(zip(toy.LABELED, toy.UNLABELED, strict=True)):
      known = np.asarray(federation.clients.labeled)[i, :n]
      unknown = np.asarray(federation.clients.unlabeled)[i, :m]
      w, v = sent, decay * local[i] + (1 - decay) * sent
      for _ in range(steps if n + m else 0):
        a, sure = _step(w, v, strong[known], labels[known], strong[unknown],
                        weak[unknown], bar)
        b, _ = _step(v, w, weak[known], labels[known], strong[unknown],
                     weak[unknown], bar)
        w, v = w - rate * a, v - rate * b
        taught, count = taught + sure.sum(), count + m
      total = total + (n + m) * (w - sent)
      local[i] = v if n + m else local[i]
    sent = sent + total / (sum(toy.LABELED) + sum(toy.UNLABELED))
    np.testing.assert_allclose(numbers(state.server.model), sent, rtol=2e-3,
                               atol=2e-4)
    rates.append(toy.means(metrics)['mask_rate'])
    np.testing.assert_allclose(rates[-1], taught / count, atol=1e-6)
  for i, want in enumerate(local):
    row = jax.tree.map(lambda x, at=i: x[at], state.memory)
    np.testing.assert_allclose(numbers(row), want, rtol=2e-3, atol=2e-4)
  assert 0 < rates[-1] < 1


def test_labels_at_the_server_are_refused():
  with pytest.raises(ValueError, match='labels_at'):
    methods.make('fedloke', toy.task(labels_at='server'))


def test_static_statistics_of_a_local_model_are_the_received_ones():
  received = []
  def far(record):
    stats = jax.tree.map(lambda x: x + 3, record.model.stats)
    received.append(stats)
    return record._replace(model=record.model._replace(stats=stats))
  found = update('fedloke', BOTH, model='static', sent=far, local_steps=1)
  chex.assert_trees_all_equal(found.memory.stats, received[0])
