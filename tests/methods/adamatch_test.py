"""AdaMatch: what it reduces to, its bar, and what the server tells."""
from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import losses, methods
from fedjax_ssl.core import tree
from fedjax_ssl.methods import adamatch
from tests import toy
from tests.methods import kept
from tests.methods.averaging_test import one_round
from tests.methods.updates import change, end, lowered, same, update
from tests.thorough import wider

USB = "adamatch(profile='usb', {})"


@pytest.mark.parametrize('model', ['linear', *wider('conv')])
def test_where_every_row_counts_it_is_fixmatch(model):
  a, b = (update(text, model=model).message for text in (
      USB.format('threshold=0.0, align=False'), 'fixmatch(threshold=0.0)'))
  chex.assert_trees_all_close(a, b, rtol=1e-5, atol=1e-7)


PLAIN = ('adamatch(unlabeled_weight=0.0, strong_labeled=False, '
         'interpolate=False)')


@pytest.mark.parametrize('text, place', [
    (USB.format('unlabeled_weight=0.0'), 'clients'), (PLAIN, 'server'), *wider(
        (USB.format('unlabeled_weight=0.0'), 'server'), (PLAIN, 'clients'))])
def test_without_unlabeled_rows_it_is_the_supervised_part(text, place):
  a, b = (end(x, 'conv', place) for x in (
      text, 'fixmatch(threshold=1.1)'))
  chex.assert_trees_all_equal(a, b)


@pytest.mark.parametrize('profile, knobs', [
    ('usb', "threshold=0.95, decay=0.999, form='hard', strong_labeled=False, "
     'interpolate=False, ramp=0.0'), *wider(
         ('code', "decay=0.999, window=128, form='hard', labeled_weight=0.5"))])
def test_a_profile_is_its_knobs(profile, knobs):
  a, b, c = (lowered(text, 'conv') for text in (
      f'adamatch({knobs})', f'adamatch(profile={profile!r})', 'adamatch'))
  assert a == b != c


def test_a_window_of_one_is_the_batch():
  a, b, c = (change(f'adamatch(threshold=0.2{knobs})') for knobs in (
      '', ', window=1', ', window=2'))
  np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
  assert not np.allclose(a, c, atol=1e-4)


def test_a_window_is_a_mean_of_the_last_batches():
  rows, real = jnp.array([[.9, .1], [.5, .5]]), jnp.ones(2)
  seen = adamatch.Seen(jnp.full((3, 2), .5), jnp.full(2, .5), jnp.zeros(()))
  for p in (rows, rows[::-1], rows[:, ::-1], rows):
    seen = adamatch.updated_averages(
        seen, (p, real), None, adamatch.LabeledSums(
            jnp.zeros(()), jnp.zeros(()), jnp.zeros(2)),
        threshold=.9, decay=.999)
  means = [p.mean(0) for p in (rows, rows[:, ::-1], rows)]
  np.testing.assert_allclose(seen.shares, means, rtol=1e-6)
  nobody = adamatch.updated_averages(
      seen, (rows, 0 * real), (rows, 0 * real), None, threshold=.9, decay=.999)
  np.testing.assert_array_equal(nobody.shares, seen.shares)


def test_a_server_that_saw_no_row_changes_no_target():
  """And the bar is FixMatch's own."""
  seen = adamatch.Seen(jnp.full(2, .5), jnp.array([.3, .7]), jnp.zeros(()))
  after = adamatch.updated_averages(
      seen, (jnp.full((1, 2), .5), jnp.ones(1)), None, adamatch.LabeledSums(
          jnp.zeros(()), jnp.zeros(()), jnp.zeros(2)), threshold=.9, decay=.5)
  np.testing.assert_array_equal(after.target, seen.target)
  np.testing.assert_allclose(after.bar, .9, rtol=1e-6)


def test_the_bar_follows_the_labeled_rows():
  """And is FixMatch's own at a client that has none."""
  federation, _ = toy.federation()
  rows = np.asarray(federation.clients.labeled)
  method = methods.make('adamatch(threshold=0.8)', toy.task())
  state = method.init(toy.key(0), federation)
  assert method.predict is not None
  p = np.asarray(jax.nn.softmax(method.predict(
      state.server, federation.train.inputs)))
  start = np.full(toy.NUM_CLASSES, 1 / toy.NUM_CLASSES)
  found = list(kept.of_one_batch('adamatch(threshold=0.8)'))
  for client, (now, _, ours) in enumerate(found):
    known = p[rows[client, :toy.LABELED[client]]]
    np.testing.assert_allclose(
        now.shares, ours.mean(0) if len(ours) else 0 * start, rtol=1e-5)
    if client == toy.NOBODY:  # It did not train.
      continue
    np.testing.assert_allclose(
        now.target, known.mean(0) if len(known) else start, rtol=1e-5)
    np.testing.assert_allclose(
        now.bar, .8 * (known.max(-1).mean() if len(known) else 1), rtol=1e-5)


def test_labels_have_the_classes_of_the_labeled_rows():
  """Where those are predicted already, alignment changes nothing."""
  shares = jnp.array([.5, .3, .2])
  def trained(knobs, **set_):
    return change(USB.format(f'decay=1.0, threshold=0.0{knobs}'), kept=set_,
                  local_steps=2)
  off, agree, first = (
      trained(', align=False'), trained('', shares=shares, target=shares),
      trained('', shares=shares, target=jnp.array([1., 0, 0])))
  np.testing.assert_allclose(off, agree, rtol=1e-4, atol=1e-6)
  assert not np.allclose(off, first, atol=1e-3)
  federation, _ = toy.federation()
  method = methods.make(USB.format('threshold=0.5'), toy.task())
  state = method.init(toy.key(0), federation)
  assert method.pseudo_label is not None
  for target, alone in (([1., 0, 0], True), (shares, False)):
    row = tree.take(state.memory, 0)
    row = row._replace(kept=row.kept._replace(
        shares=shares, target=jnp.array(target)))
    labels, sure = method.pseudo_label(state.server, row,
                                       federation.train.inputs)
    assert (not np.any(labels)) == alone and np.all(sure) == alone


def test_the_server_tells_what_it_saw_of_its_labels():
  """Means over its epochs; clients take their bar and classes from them."""
  before, after, metrics = one_round(
      USB.format('threshold=0.5'), place='server', weak=same, local_epochs=2)
  told = after.server.told
  assert told.rows == 2 * sum(toy.LABELED)
  np.testing.assert_allclose(told.shares.sum(), told.rows, rtol=1e-5)
  assert tree.global_norm(before.server.told) == 0
  np.testing.assert_allclose(metrics['bar'], .5 * told.confidence / told.rows,
                             rtol=1e-5)
  seen = after.memory.kept
  trained = np.asarray(jnp.abs(seen.shares).sum(-1)) > 0
  assert trained.any()
  np.testing.assert_allclose(
      seen.target[trained], np.tile(told.shares / told.rows,
                                    (trained.sum(), 1)), rtol=1e-5)
  # The next round begins anew.
  federation, _ = toy.federation('server')
  task = toy.task(labels_at='server', weak=same, local_epochs=2)
  again, _ = jax.jit(methods.make(USB.format('threshold=0.5'), task).round)(
      after, federation, jnp.int32(1), toy.key(5))
  assert again.server.told.rows == told.rows
  assert again.server.told.confidence > told.confidence


def test_the_unlabeled_loss_gains_weight_over_half_of_the_run():
  def moved(round_, knobs):
    return change(f'adamatch({knobs})', round_=round_, local_steps=1,
                  schedule_rounds=8)
  # A step counts once it is done: the second round of eight ends at a quarter.
  share = float(losses.ramp_up(2, 4, shape='cosine'))
  np.testing.assert_allclose(
      moved(1, ''), moved(1, f'ramp=0.0, unlabeled_weight={share}'),
      rtol=1e-5, atol=1e-7)
  np.testing.assert_allclose(moved(3, ''), moved(3, 'ramp=0.0'),
                             rtol=1e-5, atol=1e-7)


def test_logits_are_blends_only_where_rows_share_a_batch():
  text = 'adamatch(interpolate={})'
  a, b = (update(text.format(x)).message for x in (True, False))
  chex.assert_trees_all_equal(a, b)
  # The statistics of a step are those of the joint batch: after one, the same.
  a, b = (update(text.format(x), model='conv', local_steps=1).message
          for x in (True, False))
  chex.assert_trees_all_close(a.stats, b.stats, rtol=1e-5, atol=1e-7)
  assert tree.global_norm(tree.subtract(a.params, b.params)) > 1e-5


@pytest.mark.parametrize('model, knobs, known', [
    ('linear', '', 2), ('conv', '', 4), *wider(
        ('conv', ', strong_labeled=False', 2), ('conv', ", profile='usb'", 1))])
def test_passes_of_labeled_rows_are_counted(model, knobs, known):
  metrics = update(f'adamatch(threshold=0.5{knobs})', model=model,
                   local_steps=1, labeled_batch=8, unlabeled_batch=12).metrics
  np.testing.assert_allclose(metrics['backward_passes'],
                             known * toy.LABELED[0] + toy.UNLABELED[0])
