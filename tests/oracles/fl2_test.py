"""(FL)^2 computes what its authors' code did; see `make_fl2`.

Two things differ by intent. Running variances are unbiased there, as PyTorch's
are, and biased here. They only label rows; for that the network has theirs. And
PyTorch adds 1e-6 to the norm of a gradient that it clips.
"""
from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax

from fedjax_ssl import losses, methods
from fedjax_ssl.core import tree
from fedjax_ssl.core.types import Client, Variables
from fedjax_ssl.methods import fl2
from fedjax_ssl.methods.parts import assemble
from fedjax_ssl.testing import keys
from tests.oracles import ours

STORED = ours.stored('fl2')
ROWS, CLIENTS = int(STORED['rows']), int(STORED['clients'])
# Of a batch that statistics are taken of: PyTorch's variance over ours.
UNBIASED = ROWS / (ROWS - 1)
PLACES = {'w0': ('first', 'kernel'), 'b0': ('first', 'bias'),
          'scale': ('norm', 'scale'), 'bias': ('norm', 'bias'),
          'w1': ('last', 'kernel'), 'b1': ('last', 'bias')}


def _nested(weights):
  """Parameters under names that tell biases from weights."""
  out: dict[str, dict[str, jax.Array]] = {}
  for name, (layer, kind) in PLACES.items():
    out.setdefault(layer, {})[kind] = weights[name]
  return out


def _flat(params):
  return {name: params[layer][kind]
          for name, (layer, kind) in PLACES.items()}


def _named(vector):
  """Parts of a vector as `make_fl2` stores them, by name."""
  names = [*PLACES, 'mean', 'variance']
  ends = np.cumsum([STORED[name].size for name in names])
  parts = np.split(vector, ends[ends < vector.size])
  return {name: part.reshape(STORED[name].shape)
          for name, part in zip(names, parts, strict=False)}


def _variables(vector):
  found = _named(vector)
  return jax.tree.map(jnp.asarray, Variables(_nested(found), {
      'mean': found['mean'], 'variance': found['variance'] / UNBIASED}))


def _model():
  small = ours.perceptron(STORED, 'static')

  def init(key):
    params, stats = small.init(key)
    return Variables(_nested(params), stats)

  def apply(variables, inputs):
    params, stats = variables
    wider = {**stats, 'variance': stats['variance'] * UNBIASED}
    return small.apply(Variables(_flat(params), wider), inputs)

  def apply_train(variables, *rest):
    return small.apply_train(
        Variables(_flat(variables.params), variables.stats), *rest)

  return small._replace(init=init, apply=apply, apply_train=apply_train,
                        features_train=None, head=None)


def _view(place):
  return lambda key, views: jnp.roll(views, -place, axis=1)


def _clipped():
  """PyTorch's clipping to norm 1."""
  def update(gradient, state, params=None):
    del params
    norm = optax.tree.norm(gradient)
    return tree.scale(gradient, jnp.minimum(1 / (norm + 1e-6), 1)), state
  return optax.GradientTransformation(
      lambda params: optax.EmptyState(), update)


def _made(knobs='', **changes):
  """The method at the stored settings, and its federation."""
  data = ours.federation(
      STORED['inputs'], STORED['labels'], STORED['b1'].size,
      *[(0, ROWS)] * CLIENTS, server=ROWS)
  given = {'model': _model(), 'labels_at': 'server', 'cohort_size': CLIENTS,
           'weak': _view(1), 'strong': _view(2), 'labeled_batch': ROWS,
           'unlabeled_batch': int(STORED['batch']),
           'local_epochs': int(STORED['epochs']),
           'optimizer': ours.descent(STORED, 'nesterov')}
  return methods.make(f'fl2(rho={STORED["rho"]}{knobs})', ours.task(
      STORED, 0, **{**given, **changes})), data


def _first(method, data):
  """The state in which the first clients train: after the warm-up."""
  state = method.init(keys.key(0), data)
  server = state.server._replace(own=state.server.own._replace(
      model=_variables(STORED['received'])))
  return state._replace(server=server)


def _updates(method, data, state):
  """What each client of the first round makes of the received model."""
  run, zero = jax.jit(method.client_update), jnp.int32(0)
  payload = assemble.Server(state.server.own.model)
  return [run(payload, Client(
      jnp.int32(i), tree.take(data.clients, i), tree.take(state.memory, i),
      data.train, data.validation, zero, zero), keys.key(1))
          for i in range(CLIENTS)]


def _bars(i):
  """Thresholds of all clients in a round."""
  shares = STORED['shares'][i]
  return STORED['overall'][i][:, None] * shares / shares.max(
      -1, keepdims=True)


def test_the_first_step_and_its_step_uphill():
  start, slope, uphill = (
      _nested(_named(STORED[name])) for name in (
          'received', 'slope', 'uphill'))
  with ours.in_order():
    step = fl2.ascent(*jax.tree.map(jnp.asarray, (start, slope)),
                      rho=float(STORED['rho']))
    ours.close(_flat(step), _flat(uphill), 1e-8)
    method, data = _made(
        ', clip_norm=1e999', optimizer=lambda round_: optax.sgd(1.0),
        local_steps=1)
    moved = _updates(method, data, _first(method, data))[0].message.params
    ours.close(_flat(tree.scale(moved, -1)), _named(STORED['gradient']),
               1e-8)


def test_clients_label_and_train_and_are_weighed():
  inputs = STORED['inputs'][ROWS:].reshape(CLIENTS, ROWS, -1, 6)
  with ours.in_order():
    method, data = _made()
    state = _first(method, data)
    updates = _updates(method, data, state)
    for i, update in enumerate(updates):
      labels, accepted = method.pseudo_label(
          state.server, update.memory, jnp.asarray(inputs[i, :, 1:]))
      np.testing.assert_array_equal(
          np.where(accepted, labels, -1), STORED['chosen'][0, i])
      logits = method.predict(state.server, jnp.asarray(inputs[i, :, 1:]))
      labels, accepted = losses.pseudo_label(logits, threshold=0.95)
      np.testing.assert_array_equal(
          np.where(accepted, labels, -1), STORED['sure'][0, i])
      ours.close(update.memory.own.thresholds, _bars(0)[i], 1e-7)
      found = ours.means(update.metrics)
      ours.close(found['train_loss'], STORED['train_loss'][i], 1e-6)
      ours.close(found['sharpness_loss'], STORED['sharpness_loss'][i], 1e-6)
      after = tree.add(state.server.own.model.params, update.message.params)
      ours.close(_flat(after), _named(STORED['trained'][i]), 1e-6)
    weights = np.array([update.weight for update in updates])
  ours.close(weights / weights.sum(), STORED['weights'], 1e-7)
  assert np.ptp(STORED['weights']) > 0.05


def test_rounds():
  """The warm-up, both momenta, fine-tuning, and statistics of all rows."""
  plain = ours.descent(STORED, 'nesterov')
  with ours.in_order():
    method, data = _made(
        ', clip_norm=1e999',
        optimizer=lambda round_: optax.chain(_clipped(), plain(round_)))
    state = jax.jit(method.init)(keys.key(0), data)
    run = jax.jit(method.round)
    for i, after in enumerate(STORED['after']):
      state, metrics = run(state, data, jnp.int32(i), keys.key(i))
      assert metrics['mask_rate'].total == (STORED['chosen'][i] >= 0).sum()
      ours.close(state.memory.own.thresholds, _bars(i))
      model, theirs = state.server.own.model, _named(after)
      ours.close({**_flat(model.params), 'mean': model.stats['mean'],
                  'variance': model.stats['variance'] * UNBIASED}, theirs,
                 5e-6)


def test_what_is_stored_says_something():
  """Both masks differ, and change; some batches have no sure row."""
  chosen, sure = STORED['chosen'] >= 0, STORED['sure'] >= 0
  assert (chosen & ~sure).any((1, 2)).all()
  assert (sure & ~chosen).any() and (~chosen).any((1, 2)).all()
  assert not sure[0, 2].any() and sure[1, 2].any()
  assert not np.allclose(STORED['uphill'], 0)
