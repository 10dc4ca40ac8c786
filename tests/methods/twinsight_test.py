"""Twin-sight: its two losses, and what each client's rows teach whom."""
from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import losses, methods
from fedjax_ssl.core import optimizers
from fedjax_ssl.core.types import Client
from fedjax_ssl.methods import twinsight
from tests import toy
from tests.methods.updates import same
from tests.thorough import wider

KEY = toy.key(4)
OFF = 'instance_weight=0.0, neighbourhood_weight=0.0, unlabeled_weight=0.0'
SMALL = 'hidden=6, size=5'
# Clients of the toy federation: with labels alone, without any, with both.
KNOWN, UNKNOWN, BOTH = 1, 2, 0


def _draw(*shape, key=0):
  return np.asarray(jax.random.normal(toy.key(key), shape), np.float64)


def _cosines(x):
  x = x / np.linalg.norm(x, axis=-1, keepdims=True)
  return x @ x.T


def test_instances_against_a_loop():
  first, second = _draw(5, 4), _draw(5, 4, key=1)
  mask, heat = np.array([1, 1, 0, 1, 1.]), .3
  real = [*np.flatnonzero(mask), *(5 + np.flatnonzero(mask))]
  e = np.exp(_cosines(np.concatenate([first, second])) / heat)
  want = [-np.log(e[i, (i + 5) % 10] / sum(e[i, j] for j in real if j != i))
          for i in real]
  got = twinsight.instances(first, second, mask, temperature=heat)
  np.testing.assert_allclose(got, np.mean(want), rtol=1e-5)


def test_instances_of_one_row_or_none_teach_nothing():
  """Also of zeros, whose cosines have a slope all the same."""
  for mask in ([0., 1.], [0., 0.]):
    for z in (_draw(2, 3), np.zeros((2, 3))):
      value, slope = jax.value_and_grad(twinsight.instances)(
          jnp.asarray(z, jnp.float32), _draw(2, 3, key=1), jnp.array(mask))
      assert value == 0
      chex.assert_trees_all_equal(slope, jnp.zeros_like(slope))


def test_neighbourhoods_that_are_alike():
  """So they are for any length of the features, and however they are turned."""
  features = _draw(6, 4)
  turn, _ = np.linalg.qr(_draw(4, 4, key=1))
  mask = jnp.array([1, 1, 1, 1, 0, 1.])
  assert twinsight.neighbourhood(features, features, mask) == 0
  for other in (features, 3 * features, features @ turn,
                np.concatenate([features, np.zeros((6, 2))], -1)):
    assert twinsight.neighbourhood(features, other, mask) < 1e-9
  other = np.where(mask[:, None] > 0, features, 7 * _draw(6, 4, key=3))
  assert twinsight.neighbourhood(features, other, mask) < 1e-9
  assert twinsight.neighbourhood(features, features[:, ::-1] ** 2, mask) > .05


def test_neighbourhoods_against_their_matrices():
  a, b = _draw(7, 3), _draw(7, 5, key=1)
  mask = np.array([1, 0, 1, 1, 1, 0, 1.])
  gap = np.square(_cosines(b) - _cosines(a))[np.outer(mask, mask) > 0].sum()
  for divisor, by in (('pairs', 25), ('xor', 5 ^ 2)):
    got = twinsight.neighbourhood(a, b, mask, divisor=divisor)
    np.testing.assert_allclose(got, gap / by, rtol=1e-5)


@pytest.mark.parametrize('rows, ratio', [(64, 64 * 64 / 66), (2, 4.), (3, 9.)])
def test_the_code_divides_by_less(rows, ratio):
  a, b = _draw(rows, 3), _draw(rows, 3, key=1)
  paper, code = (twinsight.neighbourhood(a, b, jnp.ones(rows), divisor=x)
                 for x in ('pairs', 'xor'))
  np.testing.assert_allclose(code, ratio * paper, rtol=1e-4)


@pytest.mark.parametrize('width', [1, 4])
def test_rows_of_length_one(width):
  x = 10 * _draw(5, width)
  np.testing.assert_allclose(np.linalg.norm(losses.unit_rows(x), axis=-1), 1,
                             rtol=1e-5)
  np.testing.assert_array_equal(losses.unit_rows(0 * x), 0 * x)


@functools.lru_cache
def _made(text, model, **changes):
  """The method, its first state, and one client's compiled round."""
  plain = optimizers.make('sgd', learning_rate=.1, momentum=.5)
  method = methods.make(text, toy.task(
      model, **{'optimizer': plain, 'weak': same, **changes}))
  assert method.client_update is not None
  state = method.init(KEY, toy.federation()[0])
  return state, jax.jit(method.client_update)


def _update(text, who, model='linear', **changes):
  """(the start, what a client sends and reports) of a round."""
  federation, _ = toy.federation()
  state, client_update = _made(text, model, **changes)
  client = Client(
      jnp.int32(who), jax.tree.map(lambda x: x[who], federation.clients),
      jax.tree.map(lambda x: x[who], state.memory), federation.train,
      federation.validation, jnp.int32(0), jnp.int32(0))
  return state.server.model, client_update(state.server, client, KEY)


def _trains(update, forward, backward):
  """Every row goes so often through the client's networks."""
  for name, passes in (('forward_passes', forward),
                       ('backward_passes', backward)):
    np.testing.assert_allclose(update.metrics[name],
                               passes * update.metrics['rows_used'])


def _moved(update, name):
  """The largest change of a network's parameter, by path."""
  found = jax.tree_util.tree_leaves_with_path(update.message.params[name])
  return {jax.tree_util.keystr(path): float(np.abs(x).max())
          for path, x in found}


def test_without_pseudo_labels_rows_without_labels_leave_the_last_layer():
  """They reach the layers below, by the neighbourhood term alone."""
  text = f"twinsight(profile='code', {SMALL}"
  _, update = _update(f'{text})', UNKNOWN, 'conv')
  moved = _moved(update, 'supervised')
  assert [v for k, v in moved.items() if 'Dense' in k] == [0, 0]
  # A bias before a normalization moves nothing, but for rounding.
  below = [v for k, v in moved.items() if 'kernel' in k and 'Dense' not in k]
  assert below and min(below) > 1e-5
  assert 'mask_rate' not in update.metrics
  _trains(update, 4, 3)  # The statistics alone are those of both views.


def test_weight_decay_moves_a_last_layer_that_nobody_teaches():
  """As it does all parameters: by its own share in every step."""
  rate, decay = .1, .01
  start, update = _update(
      f"twinsight(profile='code', {SMALL})", UNKNOWN, local_steps=2,
      optimizer=optimizers.make('sgd', learning_rate=rate, momentum=0.0,
                                weight_decay=decay))
  left = (1 - rate * decay) ** 2 - 1
  layer, = start.params['supervised'].values()
  sent, = update.message.params['supervised'].values()
  for name in ('kernel', 'bias'):
    np.testing.assert_allclose(sent[name], left * layer[name], rtol=1e-3,
                               atol=1e-7)
  assert abs(left * layer['kernel']).max() > 1e-4


def test_pseudo_labels_teach_the_last_layer():
  text = 'twinsight({}, threshold=0.0, ' + SMALL + ')'
  sent = []
  for view in twinsight.LABEL_VIEWS:
    _, update = _update(text.format(f"label_view='{view}'"), UNKNOWN)
    assert min(_moved(update, 'supervised').values()) > 1e-3
    sent.append(update.message.params['supervised'])
    np.testing.assert_allclose(
        update.metrics['mask_rate'].total, update.metrics['mask_rate'].rows)
  gap = jax.tree.map(lambda x, y: float(np.abs(x - y).max()), *sent)
  assert max(jax.tree.leaves(gap)) > 1e-3


def test_views_that_no_loss_reads_are_not_derived():
  """The supervised network sees the strong one of a labeled row in vain."""
  for view, backward in (('weak', 4), ('strong', 3)):
    text = f"twinsight(label_view='{view}', {SMALL})"
    _trains(_update(text, UNKNOWN)[1], 4, backward)
  _trains(_update(text, KNOWN)[1], 4, 3)


@pytest.mark.parametrize('who', [KNOWN, *wider(BOTH)])
def test_without_its_losses_it_is_fedavg(who):
  plain, theirs = _update('fedavg', who, local_steps=3)
  start, mine = _update(f'twinsight({OFF}, {SMALL})', who, local_steps=3)
  chex.assert_trees_all_equal(start.params['supervised'], plain.params)
  chex.assert_trees_all_close(
      mine.message.params['supervised'], theirs.message.params, rtol=1e-5,
      atol=1e-7)
  for name in ('unsupervised', 'projector'):
    assert not any(_moved(mine, name).values())
  _trains(mine, 3, 3)


@pytest.mark.parametrize('who, narrow', [(KNOWN, 4), (UNKNOWN, 4),
                                         *wider((BOTH, 7))])
def test_rows_of_one_kind_have_a_step_for_themselves(who, narrow):
  """Where clients are mapped one by one; it costs less and changes nothing."""
  text = f'twinsight(threshold=0.4, {SMALL})'
  (_, one), (_, both) = (_update(text, who, client_map=x)
                         for x in ('map', 'vmap'))
  steps = 3  # Of 7 labeled rows by 3, and of 12 or 9 without by 4.
  assert one.metrics.pop('rows_processed') == steps * narrow
  assert both.metrics.pop('rows_processed') == steps * 7
  chex.assert_trees_all_close(one, both, rtol=2e-4, atol=1e-5)


def test_all_rows_of_a_client_are_told_apart_together():
  """Sums over 4 and 3 rows at most, of which both kinds are negatives."""
  _, update = _update(f'twinsight({SMALL}, temperature=1e6)', BOTH)
  ratio = update.metrics['contrastive_loss']
  # Every similarity is the same then: log of the 2 n - 1 others.
  known, unknown = [3, 1, 3], [4, 4, 1]
  rows = [sum(x) for x in zip(known, unknown, strict=True)]
  np.testing.assert_allclose(ratio.rows, sum(rows))
  np.testing.assert_allclose(
      ratio.total, sum(n * np.log(2 * n - 1) for n in rows), rtol=1e-4)


def test_the_twin_has_a_projector_for_its_last_layer():
  model = toy.task('conv').model
  params = twinsight.twins(model).init(KEY).params
  assert set(params['supervised']) - set(params['unsupervised']) == {'Dense_0'}
  width = params['supervised']['Dense_0']['kernel'].shape[0]
  sizes = [params['projector'][f'Dense_{i}']['kernel'].shape for i in (0, 1)]
  assert sizes == [(width, 8 * width), (8 * width, 4 * width)]
  nameless = model._replace(head=None)
  with pytest.raises(ValueError, match='head'):
    twinsight.twins(nameless)
