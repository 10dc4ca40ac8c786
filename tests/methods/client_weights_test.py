"""How much a client counts, by itself and in the methods that average."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import aggregation, methods
from fedjax_ssl.core import checks, client_weights, tree
from fedjax_ssl.core.types import Client
from fedjax_ssl.methods.fedmatch.client import Payload
from tests import toy


@pytest.mark.parametrize('streams', ['both', 'labeled', 'unlabeled'])
@pytest.mark.parametrize('weighting', client_weights.WEIGHTINGS)
@pytest.mark.parametrize('factor', [1.0, 2.5])
def test_weights_of_all_clients(streams, weighting, factor):
  federation, _ = toy.federation()
  got = client_weights.client_weight(
      federation.clients, streams, weighting=weighting,
      labeled_client_weight=factor)
  for weight, labeled, unlabeled in zip(
      got, toy.LABELED, toy.UNLABELED, strict=True):
    rows = {'both': labeled + unlabeled, 'labeled': labeled,
            'unlabeled': unlabeled}[streams]
    count = rows if weighting == 'examples' else float(rows > 0)
    assert weight == (factor if labeled else 1) * count


def test_counts_without_their_weights_add_up():
  """In the weighted mean, whatever the weights; of a client with 0 not."""
  weights = jnp.array([.5, 0, 3, 20])
  counts = {'rows': jnp.array([4., 9, 1, 2]), 'of': jnp.ones((4, 2))}
  mean = aggregation.weighted_mean(
      jax.vmap(client_weights.unweighted)(counts, weights), weights)
  total = jax.tree.map(lambda x: x[jnp.array([0, 2, 3])].sum(0), counts)
  chex.assert_trees_all_close(mean, tree.scale(total, 1 / weights.sum()),
                              rtol=1e-6)


@pytest.mark.parametrize('text, received', [
    *[(f"{name}(weighting='uniform', labeled_client_weight=3.0)", None)
      for name in ('fixmatch', 'uda', 'flexmatch', 'freematch', 'softmatch',
                   'adamatch', 'sage', 'steadymatch')],
    ("pseudo_label(weighting='uniform', labeled_client_weight=3.0)", None),
    ("mixmatch(weighting='uniform', labeled_client_weight=3.0)", None),
    ('fedmatch(num_helpers=0, labeled_client_weight=3.0)', 'broadcast'),
    ('fedssl(gan_width=4)', 'nets')])
def test_agents_with_labels_count_three_times(text, received):
  """As FedSSL's groups of agents need to be equal; the work is not done."""
  federation, _ = toy.federation()
  method = methods.make(text, toy.task())
  state = method.init(toy.key(0), federation)
  update, payload = method.client_update, state.server
  assert update is not None
  if received == 'nets':
    payload = payload.nets
  elif received == 'broadcast':
    payload = Payload(payload.sigma, payload.psi, payload.stats, None, None)

  @jax.jit
  def weight(i):  # All but the weight is dead code to the compiler.
    client = Client(i, tree.take(federation.clients, i),
                    tree.take(state.memory, i), federation.train,
                    federation.validation, jnp.int32(0), jnp.int32(0))
    return update(payload, client, toy.key(1)).weight
  np.testing.assert_array_equal(
      [weight(jnp.int32(i)) for i in range(toy.NUM_CLIENTS)],
      [3 if labeled else float(unlabeled > 0) for labeled, unlabeled in
       zip(toy.LABELED, toy.UNLABELED, strict=True)])


@pytest.mark.parametrize('old', [
    'pseudo_label(labeled_say=-1.0)', 'fedmatch(labeled_say=-1.0)',
    'fed_consist(labeled_weight=-1.0)', 'fedirm(labeled_weight=-1.0)'])
def test_stored_texts_may_have_the_old_name(old):
  with pytest.raises(ValueError, match='labeled_client_weight must be'):
    methods.make(old, toy.task())
  methods.make(old.replace('-1.0', '3.0'), toy.task())


def test_the_weight_of_fedmatchs_labeled_loss_keeps_its_name():
  with pytest.raises(ValueError, match='labeled_weight must be'):
    methods.make('fedmatch(labeled_weight=-1.0)', toy.task())


@pytest.mark.parametrize('name', ['fixmatch', 'steadymatch', 'pseudo_label',
                                  'mixmatch', 'fedmatch', 'fedssl'])
@pytest.mark.parametrize('value', ['0.0', '-1.0', '1e999', '1e39'])
def test_refuses(name, value):
  with pytest.raises(ValueError, match='labeled_client_weight'):
    methods.make(f'{name}(labeled_client_weight={value})', toy.task())


@pytest.mark.parametrize('text', [
    'fixmatch({})', 'steadymatch({})', 'fedmatch({})',
    "mixmatch({}, server='fedprox')"])
def test_refuses_a_weight_of_clients_with_labels_where_none_has_any(text):
  task = toy.task(labels_at='server')
  methods.make(text.format('labeled_client_weight=1.0'), task)
  with pytest.raises(ValueError, match='labeled_client_weight=6 would do noth'):
    methods.make(text.format('labeled_client_weight=6.0'), task)


def test_a_stored_run_may_have_a_weight_that_does_nothing():
  """Versions before took it, and nobody can change the file."""
  with checks.stored():
    for text, task in (
        ('fixmatch(labeled_client_weight=6.0)', toy.task(labels_at='server')),
        ("fixmatch(server='local', labeled_client_weight=6.0)", toy.task()),
        ('pdcfed(passes=7)', toy.task(local_steps=5)),
        ("fedmatch(learn='sigma', density=0.5)", toy.task())):
      methods.make(text, task)


def test_refuses_a_weight_of_clients_with_labels_without_a_server():
  with pytest.raises(ValueError, match='labeled_client_weight=6 would do noth'):
    methods.make("fixmatch(server='local', labeled_client_weight=6.0)",
                 toy.task())
