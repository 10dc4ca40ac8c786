"""Clients in lanes get what they get one by one, in the fewest steps."""
from __future__ import annotations

import functools
from typing import NamedTuple

import chex
import jax
from jax import lax
from jax.extend import core
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import data, methods
from fedjax_ssl.core import lanes
from fedjax_ssl.core.common_expressions import merge_equal
from fedjax_ssl.testing import contract
from fedjax_ssl.training import runner
from tests import toy
from tests.thorough import wider

STEPS = np.array([7, 0, 3, 3, 5, 1, 0, 2], np.int32)


class Slot(NamedTuple):
  id: jax.Array
  steps: jax.Array


SLOTS = Slot(jnp.arange(STEPS.size), jnp.asarray(STEPS))


def body(shared, slot):
  """Counts up to 10 id + 2 shared + steps * shared, and what came before."""
  begun = slot.id * 10
  doubled = shared + shared
  with jax.named_scope(lanes.STEPS):
    end = lax.fori_loop(0, slot.steps, lambda t, x: x + shared, begun + doubled)
  return end, begun


@pytest.mark.parametrize('width', [1, 2, 3, 8, 20])
def test_every_client_ends_with_its_own_result(width):
  def take(out, made, place):
    ends, beguns, turns = out
    return (ends.at[place].set(made[0]), beguns.at[place].set(made[1]),
            turns.at[place].add(1))
  @jax.jit
  def run(shared, slots):
    one = lanes.cut(merge_equal(body), shared, jax.tree.map(
        lambda x: x[0], slots))
    nothing = jnp.zeros(STEPS.size, jnp.int32)
    return lanes.run(one, slots, width, take, (nothing,) * 3)
  ends, begun, turns = run(jnp.int32(2), SLOTS)
  np.testing.assert_array_equal(begun, 10 * np.arange(STEPS.size))
  np.testing.assert_array_equal(ends, begun + 4 + 2 * STEPS)
  np.testing.assert_array_equal(turns, 1)


@pytest.mark.parametrize('width', [1, 3])
def test_no_lane_waits_while_there_are_clients(width):
  """Every step of every lane, idle ones included, is seen from outside."""
  steps = []

  class Watched(lanes.Cut):

    def step(self, lane):
      jax.debug.callback(lambda t: steps.append(int(t)), lane.carry[0])
      return super().step(lane)

  first = jax.tree.map(lambda x: x[0], SLOTS)
  one = Watched(*lanes.cut(merge_equal(body), jnp.int32(2), first))
  jax.block_until_ready(lanes.run(
      one, SLOTS, width, lambda out, made, place: out, jnp.int32(0)))
  jax.effects_barrier()
  # And one step of nobody.
  assert len(steps) == width * (1 + lanes.longest(
      jnp.asarray(STEPS, jnp.float32), width))


def test_what_is_done_once_a_client_is_done_once():
  """Effects included, however many lanes there are."""
  seen = []

  def noisy(shared, slot):
    jax.debug.callback(lambda i: seen.append(int(i)), slot.id)
    with jax.named_scope(lanes.STEPS):
      end = lax.fori_loop(0, slot.steps, lambda t, x: x + shared, slot.id)
    jax.debug.callback(lambda i: seen.append(100 + int(i)), end - end + slot.id)
    return end

  first = jax.tree.map(lambda x: x[0], SLOTS)
  one = lanes.cut(merge_equal(noisy), jnp.int32(2), first)
  jax.block_until_ready(lanes.run(
      one, SLOTS, 3, lambda out, made, place: out + made, jnp.int32(0)))
  jax.effects_barrier()
  assert sorted(seen) == [*range(8), *range(100, 108)]


def test_what_no_client_decides_is_computed_outside_of_the_lanes():
  def teacher(shared, slot):
    strong = jnp.sin(shared)  # As a received model, read in every step.
    with jax.named_scope(lanes.STEPS):
      return lax.fori_loop(0, slot.steps, lambda t, x: x + strong,
                           jnp.float32(0) + slot.id)
  one = lanes.cut(merge_equal(teacher), jnp.float32(1), jax.tree.map(
      lambda x: x[0], SLOTS))
  lane = one.start(jax.tree.map(lambda x: x[2], SLOTS))
  assert not [x for x in lane.constants if x.dtype == jnp.float32]
  np.testing.assert_allclose(one.step(lane).carry[-1], 2 + np.sin(1))


def test_a_computation_without_a_loop_is_one_without_steps():
  one = lanes.cut(merge_equal(lambda shared, slot: shared + slot.id),
                  jnp.int32(5), jax.tree.map(lambda x: x[0], SLOTS))
  assert one.loop is None
  out = lanes.run(one, SLOTS, 3, lambda out, made, place: out.at[place].set(
      made), jnp.zeros(len(STEPS), jnp.int32))
  np.testing.assert_array_equal(out, SLOTS.id + 5)


@pytest.mark.parametrize('width, longest', [
    (1, 21), (2, 11), (3, 8), (8, 7), (20, 7)])
def test_the_busiest_lane(width, longest):
  """Of two lanes one takes 7, 1, 0, 2 steps, the other 0, 3, 3, 5."""
  assert lanes.longest(jnp.asarray(STEPS, jnp.float32), width) == longest


@functools.lru_cache
def two_rounds(text, **changes):
  one = contract.CohortRunner(
      functools.partial(methods.make, text), 'linear', 'clients', **changes)
  return one.rounds(2)


@pytest.mark.parametrize('text', [
    'scaffold', *wider('dpsgd', 'feddure', 'fedmatch', 'fedssl', 'fedtrinet',
                       'fixmatch', 'fl2', 'flexmatch', 'local', 'rscfed',
                       'semifl')])
def test_lanes_make_what_clients_make_one_by_one(text):
  """Of fewer masked rows than chunks of the same size."""
  alone, (state, totals), (_, chunks) = (
      two_rounds(text, **changes) for changes in (
          {}, {'client_map': 'lanes', 'chunk_size': 2},
          {'client_map': 'vmap', 'chunk_size': 2}))
  def masked(totals):
    return float(totals.sums['masked_share'].total)
  assert masked(totals) <= masked(chunks)
  def others(totals):
    return {name: value for name, value in totals.sums.items()
            if name != 'masked_share'}
  chex.assert_trees_all_close(
      (state, others(totals)), (alone[0], others(alone[1])),
      rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize('text', ['fixmatch', *wider(
    'feddure', 'fedssl', 'local', 'rscfed', 'scaffold')])
def test_a_single_lane_makes_the_bits_of_one_by_one(text):
  alone, lane = (two_rounds(text, **changes) for changes in (
      {}, {'client_map': 'lanes', 'chunk_size': 1}))
  chex.assert_trees_all_equal(alone[0], lane[0])


def loops(eqns):
  """The loops over local steps, also inside of branches and other loops."""
  for eqn in eqns:
    if lanes.STEPS in str(eqn.source_info.name_stack).split('/') and (
        eqn.primitive.name == 'while'):
      yield eqn
    else:
      for jaxpr in core.jaxprs_in_params(eqn.params):
        yield from loops(jaxpr.eqns)


def size(eqn):
  """Of how many operations something is made."""
  return 1 + sum(size(inner) for jaxpr in core.jaxprs_in_params(eqn.params)
                 for inner in jaxpr.eqns)


@pytest.mark.parametrize('text', wider(
    *sorted(set(methods.METHODS) - {'fedtrinet'})))
def test_lanes_share_the_loop_in_which_clients_train(text, monkeypatch):
  """Not one that labels rows. FedTriNet's is inside of a branch."""
  cuts, cut = [], lanes.cut
  def kept(*args):
    cuts.append(cut(*args))
    return cuts[-1]
  monkeypatch.setattr(lanes, 'cut', kept)
  federation = toy.federation('clients')[0]
  method = methods.make(text, toy.task(client_map='lanes', chunk_size=2))
  runner.totals_shape(method, federation, runner.state_shape(
      method, federation))
  assert any(one.loop is not None for one in cuts)
  for one in cuts:
    behind = [*loops(one.after)]
    assert not behind or size(one.loop) > max(map(size, behind))


_DEVICES = """
from tests.core import lanes_test
lanes_test.compare_devices()
"""


def compare_devices():
  """One and two devices, with a sum over the clients and with another rule."""
  mesh = jax.make_mesh((2,), ('clients',), axis_types=(
      jax.sharding.AxisType.Auto,))
  for text, order in (('fixmatch', 'fixed'), ('rscfed', 'fixed'),
                      ('fixmatch', 'fast')):
    one, two = (two_rounds(
        text, client_map='lanes', chunk_size=2, aggregation_order=order,
        mesh=mesh) for mesh in (None, mesh))
    states = jax.device_get((one[0], two[0]))
    if order == 'fixed':
      chex.assert_trees_all_equal(*states)
    chex.assert_trees_all_close(*states, rtol=2e-4, atol=2e-5)


@pytest.mark.thorough
def test_two_devices_agree_with_one(run_python):
  run_python(_DEVICES, devices=2)


def test_skewed_clients_mask_less_than_a_tenth():
  """Of a capped Dirichlet draw of 0.1, 500 rows a client on average."""
  labels = np.repeat(np.arange(10, dtype=np.int32), 15_000)
  rows = np.bincount(data.dirichlet_capped(
      np.random.default_rng(0), labels, 300, alpha=.1, min_size=0))
  steps = -np.sort(-np.ceil(rows / 10))
  assert steps[0] > 5 * steps.mean()
  for width in (5, 8, 16, 32):
    busy = float(lanes.longest(jnp.asarray(steps, jnp.float32), width))
    assert rows.sum() > .9 * 10 * width * busy
    chunks = np.append(steps, np.zeros(-len(steps) % width)).reshape(-1, width)
    assert busy < chunks.max(1).sum()
