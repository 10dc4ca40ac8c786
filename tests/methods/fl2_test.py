"""(FL)^2: its thresholds, its step uphill, what it reduces to, by hand."""
from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Client
from fedjax_ssl.methods import fl2
from fedjax_ssl.methods.parts import assemble, labeling
from tests import toy
from tests.by_hand import softmax
from tests.methods import alternate_rounds, updates
from tests.methods.alternate_rounds import RATE
from tests.methods.alternate_rounds import task as _task
from tests.thorough import wider

KEY = toy.key(6)
PLAIN = 'keep_momentum=False, warmup_passes=0, clip_norm=1e999'
_rounds = functools.partial(alternate_rounds.rounds, KEY)


def test_the_most_frequent_class_has_the_clients_threshold():
  table = jax.nn.softmax(3 * jax.random.normal(KEY, (7, 4))).at[5:].set(0)
  overall, bars = fl2.client_thresholds(table, 5)
  np.testing.assert_allclose(overall, table[:5].max(-1).mean(), rtol=1e-6)
  top = int(table.sum(0).argmax())
  np.testing.assert_allclose(bars[top], overall, rtol=1e-6)
  assert (jnp.delete(bars, top) < overall).all() and (bars > 0).all()
  np.testing.assert_allclose(
      bars / overall, table[:5].mean(0) / table[:5].mean(0).max(), rtol=1e-5)
  nobody = fl2.client_thresholds(0 * table, 0)
  chex.assert_trees_all_equal(nobody, (jnp.float32(0), jnp.zeros(4)))


@pytest.mark.parametrize('num_rows', [1, 2, 7])
def test_the_surest_row_reaches_its_threshold(num_rows):
  """No mean is above its largest entry: a client with rows keeps one."""
  table = jax.nn.softmax(3 * jax.random.normal(KEY, (7, 4)))
  table = table.at[num_rows:].set(0)
  _, bars = fl2.client_thresholds(table, num_rows)
  surest = table.max(-1).argmax()
  assert table[surest].max() >= bars[table[surest].argmax()] > 0


def test_the_step_uphill_has_its_length_where_it_is_measured():
  """|eps / T| = rho; biases by their gradient, weights by their own size."""
  params = {'a': {'kernel': jnp.array([[2.0, -0.5], [0.0, 1.0]]),
                  'bias': jnp.array([3.0, -1.0])},
            'b': {'scale': jnp.array([0.3])}}
  gradient = jax.tree.map(lambda x: jnp.cos(x) - 0.3, params)
  step = fl2.ascent(params, gradient, rho=0.7)
  units = {'a': {'kernel': abs(params['a']['kernel']) + 0.01,
                 'bias': jnp.ones(2)}, 'b': {'scale': jnp.array([0.31])}}
  np.testing.assert_allclose(tree.global_norm(
      jax.tree.map(jnp.divide, step, units)), 0.7, rtol=1e-5)
  ratio = jax.tree.map(lambda s, t, g: s / (t * t * g), step, units, gradient)
  flat = jnp.concatenate([x.ravel() for x in jax.tree.leaves(ratio)])
  np.testing.assert_allclose(flat, flat[0], rtol=1e-5)
  chex.assert_trees_all_equal(
      fl2.ascent(params, tree.zeros_like(gradient), rho=0.7),
      tree.zeros_like(params))


@pytest.mark.parametrize('model', ['linear', *wider('conv')])
def test_without_a_step_uphill_there_is_no_consistency(model):
  """The same rows, and the same batch statistics: both predict the same."""
  text = f'fl2(threshold=0, {PLAIN}, {{}})'
  _, still, metrics = _rounds(text.format('rho=0'), 1, _task(model))
  _, off, none = _rounds(text.format('sharpness_weight=0'), 1, _task(model))
  chex.assert_trees_all_close(still.server, off.server, rtol=1e-4, atol=1e-6)
  assert abs(toy.means(metrics)['sharpness_loss']) < 1e-6
  _, moved, found = _rounds(text.format('rho=1.0'), 1, _task(model))
  assert toy.means(found)['sharpness_loss'] > 1e-4
  gap = tree.subtract(moved.server.own.model, off.server.own.model)
  assert tree.global_norm(gap) > 1e-4
  assert found['forward_passes'].total > none['forward_passes'].total


def test_nobody_is_fixed_nothing_goes_uphill():
  """No row of h_b = 1: what is left are the client's own thresholds."""
  _, one, metrics = _rounds(f'fl2(threshold=1.1, {PLAIN})', 1, _task())
  _, other, _ = _rounds(f'fl2(sharpness_weight=0, {PLAIN})', 1, _task())
  chex.assert_trees_all_equal(one.server, other.server)
  assert toy.means(metrics)['sharpness_loss'] == 0
  assert 0 < toy.means(metrics)['mask_rate'] < 1


def test_clients_that_are_equally_sure_count_the_same():
  """A model of zeros is as sure of every row; others are not."""
  federation, _ = toy.federation('server')
  made, equal = (methods.make(f'fl2(threshold=0, {PLAIN}{more})', _task())
                 for more in ('', ", weighting='uniform'"))
  first = made.init(KEY, federation)
  own = first.server.own
  zeros = first._replace(server=first.server._replace(own=own._replace(
      model=tree.zeros_like(own.model))))

  def distance(state):
    one, other = (jax.jit(m.round)(state, federation, jnp.int32(0), KEY)[0]
                  for m in (made, equal))
    return tree.global_norm(tree.subtract(one.server.own.model,
                                          other.server.own.model))
  assert distance(zeros) < 1e-6
  assert distance(first) > 1e-5


def test_without_any_row_the_server_trains_alone():
  text = f"fl2(thresholds='fixed', threshold=1.1, {PLAIN})"
  first, after, metrics = _rounds(text, 2, _task())
  _, alone, _ = _rounds('fedavg', 2, _task())
  chex.assert_trees_all_close(after.server.own.model, alone.server.model,
                              rtol=1e-5, atol=1e-6)
  assert metrics['num_participants'] == 0
  chex.assert_trees_all_equal((after.memory, after.server.added),
                              (first.memory, first.server.added))


@pytest.mark.thorough
def test_rounds_are_semifls():
  """With a fixed threshold and neither blends nor the rest: the same bits."""
  changes = {'strong': lambda key, x: 255 - x,
             'optimizer': lambda round_: optax.sgd(RATE, momentum=0.5)}
  one, other = (_rounds(text, 2, _task(**changes))[1] for text in (
      "fl2(thresholds='fixed', threshold=.45, sharpness_weight=0, "
      "weighting='uniform', warmup_passes=2)",
      'semifl(threshold=.45, mix_weight=0, warmup_passes=2)'))
  chex.assert_trees_all_equal(one.server, other.server)
  chex.assert_trees_all_equal(one.memory.own.opt_state, other.memory.own)
  assert tree.global_norm(one.memory.own.opt_state) > 0


def _downhill(x, d):
  """Gradients of weights and biases from those of logits."""
  return [x.T @ d, d.sum(0)]


def _step(model, x, y, sure, rho):
  """One step on W, with the gradient of the consistency at W + eps."""
  n, p = len(x), softmax(x @ model[0] + model[1])
  grads = _downhill(x, (p - y) / n)
  up = _downhill(x, sure[:, None] * (p - y) / max(sure.sum(), 1))
  units = [abs(model[0]) + 0.01, np.ones_like(model[1])]
  norm = np.sqrt(sum(((t * g)**2).sum() for t, g in zip(
      units, up, strict=True)))
  worse = [w + (rho * t * t * g / norm if norm else 0) for w, t, g in zip(
      model, units, up, strict=True)]
  q = softmax(x @ worse[0] + worse[1])
  more = _downhill(x, sure[:, None] * (q - p) / n)
  return [w - RATE * (a + b) for w, a, b in zip(
      model, grads, more, strict=True)]


def test_a_round_by_hand():
  """One step a client; those who are less sure count more."""
  federation, _ = toy.federation('server')
  tau, rho = 0.45, 0.8
  task = _task(strong=lambda key, x: 255 - x)
  first, after, metrics = _rounds(
      f'fl2(threshold={tau}, rho={rho}, {PLAIN})', 1, task)
  layer = first.server.own.model.params['Dense_0']
  start = [np.array(layer[k], np.float64) for k in ('kernel', 'bias')]
  eye = np.eye(toy.NUM_CLASSES)

  deltas, weights, bars, kept_share = [], [], [], []
  for i, n in enumerate(toy.UNLABELED):
    if not n:
      continue
    rows = np.asarray(federation.clients.unlabeled)[i, :n]
    raw = np.asarray(federation.train.inputs)[rows].reshape(n, -1)
    p = softmax((raw / 255 - 0.4) @ start[0] + start[1])
    top, labels = p.max(-1), p.argmax(-1)
    bar = p.mean(0) / p.mean(0).max() * top.mean()
    kept = top >= bar[labels]
    sure = (top >= tau)[kept].astype(float)
    x = (255 - raw[kept]) / 255 - 0.4
    end = _step(start, x, eye[labels[kept]], sure, rho)
    deltas.append([b - a for a, b in zip(start, end, strict=True)])
    weights.append(1 - top.mean())
    bars.append(bar)
    kept_share.append(sure.mean())
  assert 0 < np.mean(kept_share) < 1  # Both masks say something.
  share = np.array(weights) / sum(weights)
  assert share.std() > 1e-3
  middle = [p + sum(s * d[j] for s, d in zip(share, deltas, strict=True))
            for j, p in enumerate(start)]
  rows = np.asarray(federation.server.labeled)[:sum(toy.LABELED)]
  x = np.asarray(federation.train.inputs)[rows].reshape(
      len(rows), -1) / 255 - 0.4
  y = eye[np.asarray(federation.train.labels)[rows]]
  d = (softmax(x @ middle[0] + middle[1]) - y) / len(x)
  end = [w - RATE * g for w, g in zip(middle, _downhill(x, d), strict=True)]

  layer = after.server.own.model.params['Dense_0']
  np.testing.assert_allclose(layer['kernel'], end[0], rtol=1e-3, atol=1e-5)
  np.testing.assert_allclose(layer['bias'], end[1], rtol=1e-3, atol=1e-5)
  memory = after.memory.own.thresholds
  np.testing.assert_allclose(
      memory[np.array(toy.UNLABELED) > 0], bars, rtol=1e-4)
  np.testing.assert_allclose(memory[toy.NOBODY], tau)
  assert metrics['num_participants'] == len(bars)


def test_a_client_with_labels_alone_counts_by_these():
  """Else it would be the least sure of all, and count most."""
  federation, _ = toy.federation()
  weights = []
  for i in (updates.KNOWN, updates.BOTH):
    received: list[assemble.Server] = []
    def sent(record, received=received):
      received.append(assemble.Server(record.own.model))
      return received[0]
    found = updates.whole('fl2', i, sent=sent).weight
    rows = (federation.clients.labeled[i][:toy.LABELED[i]]
            if i == updates.KNOWN
            else federation.clients.unlabeled[i][:toy.UNLABELED[i]])
    p = jax.nn.softmax(toy.task().apply(received[0].model,
                                        federation.train.inputs[rows]))
    np.testing.assert_allclose(found, 1 - p.max(-1).mean(), rtol=1e-5)
    weights.append(float(found))
  assert weights[0] < 0.9


@pytest.mark.parametrize('text, passes', [
    ('fl2', (2, 3)), ('fl2(sharpness_weight=0.0)', (1, 1))])
def test_passes_are_counted(text, passes):
  """All rows forward to label them; those kept once, and again uphill."""
  metrics = updates.whole(
      text, updates.UNKNOWN,
      sent=lambda record: assemble.Server(record.own.model)).metrics
  kept = metrics['mask_rate'].total
  assert 0 < kept < toy.UNLABELED[updates.UNKNOWN]
  forward, backward = passes
  assert metrics['forward_passes'] == (
      toy.UNLABELED[updates.UNKNOWN] + forward * kept)
  assert metrics['backward_passes'] == backward * kept


def test_labels_are_judged_by_the_clients_thresholds():
  for bar, weight in ((0.0, 1), (1.1, 0)):
    bars = jnp.full(toy.NUM_CLASSES, bar)
    _, found = updates.judged('fl2', lambda row, bars=bars: row._replace(
        own=row.own._replace(thresholds=bars)))
    np.testing.assert_array_equal(found, weight)


@pytest.mark.parametrize('kind, rows', [('labeled', toy.LABELED),
                                        ('unlabeled', toy.UNLABELED)])
def test_a_row_is_as_sure_as_it_is_once(kind, rows):
  """Also where unlabeled rows are split over the steps of the labels."""
  federation, _ = toy.federation()
  task = toy.task(unlabeled_batch=0, unlabeled_capacity=5)
  for i in (updates.KNOWN, updates.BOTH):
    client = Client(
        jnp.int32(i), jax.tree.map(lambda x, i=i: x[i], federation.clients),
        (), federation.train, federation.validation, jnp.int32(0), jnp.int32(0))
    total, count = labeling.confidence_sum(
        task, lambda inputs, key: jnp.zeros((len(inputs), 4)), client, KEY,
        kind=kind, wanted=jnp.bool_(True))
    assert count == rows[i]
    np.testing.assert_allclose(total, rows[i] / 4, rtol=1e-6)


def test_clients_that_are_sure_of_every_row_count_the_same():
  """A little, as weights of 0 would leave all of them out."""
  def sharp(record):
    return assemble.Server(tree.scale(record.own.model, 1e9))
  weights = [updates.whole('fl2', i, sent=sharp).weight
             for i in (updates.KNOWN, updates.BOTH)]
  np.testing.assert_allclose(weights, 1e-8, rtol=1e-6)


def test_without_a_weight_unlabeled_rows_change_no_bit():
  """Clients that learn nothing are as good as none."""
  text = f'fl2(sharpness_weight=0, {PLAIN}, {{}})'
  one, other = (_rounds(text.format(knobs), 1, _task())[1] for knobs in (
      'unlabeled_weight=0', "thresholds='fixed', threshold=1.1"))
  chex.assert_trees_all_equal(one.server, other.server)


@pytest.mark.parametrize('text', ["fl2(thresholds='all')",
                                  "fl2(weighting='examples')"])
def test_unknown_words_are_refused(text):
  with pytest.raises(ValueError, match='Allowed'):
    methods.make(text, _task())
