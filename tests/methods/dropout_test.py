"""Networks with dropout drop in training, whatever the method."""
from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl import methods
from tests import toy
from tests.thorough import wider

KEY = toy.key(1)
FEDSSL = 'fedssl(gan_width=4, noise_size=3{})'


@pytest.mark.parametrize('text, place, without', [
    ('fedmatch', 'clients', 0), ('fedmatch', 'server', 0),
    ('fedmatch(num_helpers=0)', 'clients', 1 / 3), ('rscfed', 'clients', 0),
    ('fedirm(max_entropy=1.0)', 'clients', 0),
    ('fed_consist', 'clients', 1 / 3), (FEDSSL.format(''), 'clients', 1 / 2),
    *wider((FEDSSL.format(', dp_scope="all", epsilon=1e6'), 'clients',
            1 / 2))])
def test_every_pass_that_learns_has_a_key(text, place, without):
  """The others only label rows: a share of the traced passes."""
  federation, _ = toy.federation(place)
  task, keys = toy.task(labels_at=place), []
  if 'dp_scope' in text:
    clients = federation.clients
    task = dataclasses.replace(task, cohort_size=federation.num_clients)
    federation = dataclasses.replace(
        federation, num_labeled_clients=4, clients=clients._replace(
            num_labeled=clients.num_labeled * (jnp.arange(
                len(clients.num_labeled)) < 4)))
  def apply_train(model, inputs, mask, key=None):
    keys.append(key)
    return task.model.apply_train(model, inputs, mask, key)
  method = methods.make(text, dataclasses.replace(
      task, model=task.model._replace(apply_train=apply_train)))
  jax.eval_shape(
      lambda state: method.round(state, federation, jnp.int32(0), KEY),
      method.init(KEY, federation))
  assert keys
  assert sum(key is None for key in keys) == pytest.approx(without * len(keys))
