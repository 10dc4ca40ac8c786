"""Learning rates that fall: what the knob reduces to, and who slows down."""
from __future__ import annotations

import dataclasses

import chex
import jax
import jax.numpy as jnp
import pytest

from fedjax_ssl import methods
from fedjax_ssl.core import tree
from fedjax_ssl.methods.parts import plateau
from tests import toy
from tests.thorough import wider

KEY = toy.key(2)
PLATEAU = "fedavg(lr_decay='plateau', keep_local=True)"


def made(text, **changes):
  method = methods.make(text, toy.task(cohort_size=toy.NUM_CLIENTS, **changes))
  return method, jax.jit(method.round)


def test_a_rate_falls_for_whom_the_loss_does_not():
  federation, _ = toy.federation()
  method, run = made(PLATEAU)
  plain, run_plain = made('fedavg')
  state = method.init(toy.key(0), federation)
  want = plain.init(toy.key(0), federation)
  after, _ = run(state, federation, jnp.int32(0), KEY)
  want, _ = run_plain(want, federation, jnp.int32(0), KEY)
  chex.assert_trees_all_close(after.server.model, want.server.model,
                              rtol=1e-5, atol=1e-6)  # The first is the same.
  # Nothing is below 0: after three epochs those with rows divide by 3.
  rate = state.memory.rate
  stuck = state._replace(memory=state.memory._replace(rate=rate._replace(
      best=jnp.zeros_like(rate.best), waited=rate.waited + 2)))
  after, _ = run(stuck, federation, jnp.int32(0), KEY)
  busy = jnp.array(toy.LABELED) > 0
  chex.assert_trees_all_close(after.memory.rate.factor,
                              jnp.where(busy, 1 / 3, 1.0))
  # At rate 0 nobody moves.
  asleep = state._replace(memory=state.memory._replace(rate=rate._replace(
      factor=jnp.zeros_like(rate.factor))))
  after, _ = run(asleep, federation, jnp.int32(0), KEY)
  chex.assert_trees_all_close(after.server.model, state.server.model)
  first = tree.take(after.memory, 0)
  chex.assert_shape(method.local_predict(
      after.server, first, federation.test.inputs), (20, toy.NUM_CLASSES))


@pytest.mark.parametrize('changes, waited', [
    ({'local_epochs': 2}, 2), ({'local_epochs': 2, 'local_steps': 3}, 1)])
def test_steps_in_place_of_epochs_count_as_one(changes, waited):
  task = toy.task(**changes)
  model = methods.make('fedavg', task).init(
      KEY, toy.federation()[0]).server.model
  rate = plateau.full_rate()._replace(best=jnp.float32(0))
  found = plateau.after(task, rate, model, toy.federation()[0].validation,
                        jnp.bool_(True))
  assert found.waited == waited and found.factor == 1


def test_the_server_has_a_rate_for_its_labels():
  federation, _ = toy.federation('server')
  method, run = made("fixmatch(threshold=1.1, lr_decay='plateau')",
                     labels_at='server')
  state = method.init(toy.key(0), federation)
  rate = state.server.rate
  asleep = state._replace(server=state.server._replace(rate=rate._replace(
      factor=jnp.float32(0), best=jnp.float32(0))))
  after, metrics = run(asleep, federation, jnp.int32(0), KEY)
  chex.assert_trees_all_close(after.server.model, state.server.model)
  assert int(after.server.rate.waited) == 1
  assert 'server_loss' in metrics
  after, _ = run(state, federation, jnp.int32(0), KEY)
  assert tree.global_norm(tree.subtract(
      after.server.model.params, state.server.model.params)) > 0
  assert after.server.rate.best < 10
  # Without labels, or if its own training is rejected, it does not age.
  nothing = dataclasses.replace(federation, server=federation.server._replace(
      num_labeled=jnp.zeros_like(federation.server.num_labeled)))
  lost = asleep._replace(server=asleep.server._replace(model=jax.tree.map(
      lambda x: x * jnp.nan, state.server.model)))
  for start, told, rejected in ((asleep, nothing, 0), (lost, federation, 1)):
    after, metrics = run(start, told, jnp.int32(0), KEY)
    chex.assert_trees_all_equal(after.server.rate, start.server.rate)
    assert metrics['server_loss'] == (0, 0)
    assert int(metrics['num_rejected'] >= 1) == rejected


def test_who_is_alone_slows_down_too():
  federation, _ = toy.federation()
  method, run = made("local(lr_decay='plateau')")
  state = method.init(toy.key(0), federation)
  after, _ = run(state, federation, jnp.int32(0), KEY)
  assert (after.memory.rate.best < 10).sum() == sum(
      rows > 0 for rows in toy.LABELED)


def test_what_cannot_be_is_refused():
  with pytest.raises(ValueError, match='lr_decay'):
    methods.make("fedavg(lr_decay='cosine')", toy.task())
  federation, _ = toy.federation()
  none = dataclasses.replace(federation, validation=jax.tree.map(
      lambda x: x[:0], federation.validation))
  with pytest.raises(ValueError, match='validation'):
    methods.make(PLATEAU, toy.task()).init(KEY, none)


@pytest.mark.parametrize('text', [
    PLATEAU, 'fedmatch', *wider("fedmatch(lr_decay='server')")])
def test_each_task_of_a_stream_starts_at_the_full_rate(text):
  plain, _ = toy.federation()
  federation = dataclasses.replace(plain, rounds_per_task=2, stream=(
      jax.tree.map(lambda x: jnp.stack([x] * 3), plain.clients)))
  method, run = made(text)
  state = method.init(toy.key(0), federation)
  def rate(state):
    return (state.server if 'server' in text else state.memory).rate
  def slow(state):
    low = jax.tree.map(lambda x: x * 0 + 1, rate(state))._replace(
        factor=rate(state).factor / 9, best=rate(state).best * 0)
    if 'server' in text:
      return state._replace(server=state.server._replace(rate=low))
    return state._replace(memory=state.memory._replace(rate=low))
  for round_, begins in ((1, False), (2, True), (4, True), (6, False)):
    after, _ = run(slow(state), federation.at(jnp.int32(round_)),
                   jnp.int32(round_), KEY)
    chex.assert_trees_all_close(rate(after).factor, jnp.full_like(
        rate(after).factor, 1.0 if begins else 1 / 9))
