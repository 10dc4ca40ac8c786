"""The semi-supervised losses against steps worked out by hand, and anchors."""
from __future__ import annotations

import dataclasses
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
from tests.methods.averaging_test import one_round
from tests.methods.baselines_test import weights
from tests.methods.updates import change, same, update
from tests.thorough import wider

# All rows of a client in one batch, one step, nothing drawn that matters.
WHOLE: dict[str, Any] = {
    'weak': same, 'strong': same, 'local_steps': 1, 'labeled_batch': 8,
    'unlabeled_batch': 12, 'cohort_size': toy.NUM_CLIENTS}
SGD = optax.sgd(0.5)


@pytest.mark.parametrize('text, labelings, views', [
    ('fedavg', None, 0), ('pseudo_label(num_views=3)', 3, 1),
    ("mixmatch(profile='original', num_views=2)", 2, 2),
    *wider(('fixmatch', 1, 1), ('uda', 1, 1))])
def test_passes_and_models_are_counted(text, labelings, views,
                                       model='linear'):
  """Per client and round: n_s labeled and n_u unlabeled rows, one step."""
  _, _, metrics = one_round(text, model, **WHOLE)
  took = [(n, 0 if labelings is None else m) for n, m in zip(
      toy.LABELED, toy.UNLABELED, strict=True) if n or (m and labelings)]
  known, unknown = np.mean(took, axis=0)
  np.testing.assert_allclose(
      metrics['forward_passes'], known + ((labelings or 0) + views) * unknown,
      rtol=1e-6)
  np.testing.assert_allclose(metrics['backward_passes'],
                             known + views * unknown, rtol=1e-6)
  # One down to each client, one up from those with rows.
  np.testing.assert_allclose(metrics['models_sent'],
                             1 + len(took) / toy.NUM_CLIENTS, rtol=1e-6)


@pytest.mark.parametrize('model, labelings', [('linear', 1), ('conv', 2)])
def test_weak_views_in_the_batch_are_counted(model, labelings):
  """As SAGE's: the received model labels them, the other one sees them."""
  test_passes_and_models_are_counted(
      "fixmatch(labeler='global', weak_in_batch=True)", labelings, 1, model)


def sgd(round_):
  del round_
  return SGD


def test_threshold_zero_without_augmentation_is_self_training():
  """Every client's step in NumPy: its own likeliest classes are the labels."""
  before, after, metrics = one_round(
      'fixmatch(threshold=0.0, keep_local=True)', optimizer=sgd, **WHOLE)
  federation, _ = toy.federation()
  layer, = before.server.model.params.values()
  w, b = (np.asarray(layer[k], np.float64) for k in ('kernel', 'bias'))
  images = np.asarray(federation.train.inputs)
  truth = np.asarray(federation.train.labels)

  def gradient(rows, labels):
    x = images[rows].reshape(len(rows), -1) / 255 - 0.4
    logits = x @ w + b
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    y = np.eye(toy.NUM_CLASSES)[logits.argmax(-1) if labels is None
                                else labels]
    return x.T @ (p - y) / len(rows), (p - y).mean(0)

  for i, (n, m) in enumerate(zip(toy.LABELED, toy.UNLABELED, strict=True)):
    step_w, step_b = np.zeros_like(w), np.zeros_like(b)
    shard = federation.clients
    for rows, labels in ((np.asarray(shard.labeled)[i, :n], truth),
                         (np.asarray(shard.unlabeled)[i, :m], None)):
      if len(rows):
        part = gradient(rows, None if labels is None else labels[rows])
        step_w, step_b = step_w + part[0], step_b + part[1]
    new, = tree.take(after.memory.model, i).params.values()
    np.testing.assert_allclose(new['kernel'], w - 0.5 * step_w, atol=1e-5)
    np.testing.assert_allclose(new['bias'], b - 0.5 * step_b, atol=1e-5)
  np.testing.assert_allclose(metrics['mask_rate'], 1)


@pytest.mark.parametrize('text', [
    'uda(tsa="none", threshold=1.0, {})', *wider(
        'fixmatch(threshold=1.1, {})',
        'pseudo_label(form="hard", threshold=1.1, {})')])
def test_a_bar_out_of_reach_is_fedavg_on_clients_with_labels(text):
  mine, fedavg = (update(x, **WHOLE).message
                  for x in (text.format('unlabeled_weight=1.0'), 'fedavg'))
  chex.assert_trees_all_close(mine, fedavg, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize('text', [
    'fixmatch()', 'fedggp()', *wider(
        'uda()', 'flexmatch()', 'freematch(fairness_weight=0.0)',
        'softmatch()', 'pseudo_label()', 'mixmatch(alpha=0.0)', 'sage()',
        'pdcfed(entropy_weight=0.0, clip_norm=1e6)', 'steadymatch()',
        'fed_consist()', 'adamatch(strong_labeled=False)')])
def test_rows_without_a_weight_change_no_bit(text):
  """In a model without batch statistics, which such rows would be part of."""
  off = text.replace(')', ', unlabeled_weight=0.0)').replace('(, ', '(')
  mine, fedavg = (update(x, **{**WHOLE, 'local_steps': 3}).message
                  for x in (off, 'fedavg'))
  chex.assert_trees_all_equal(mine, fedavg)


@pytest.mark.parametrize('text', [
    'mixmatch(alpha=0.0, unlabeled_weight=0.0)',
    *wider('uda(tsa="none", threshold=1.0)',
           'flexmatch(unlabeled_weight=0.0)',
           'pseudo_label(unlabeled_weight=0.0)')])
def test_labels_at_the_server_alone_are_fedavg_of_the_server(text):
  """Clients whose loss is off leave what the server's own epoch made."""
  mine = one_round(text, place='server', weak=same)[1]
  alone = one_round('fedavg', place='server', weak=same)[1]
  np.testing.assert_allclose(weights(mine), weights(alone), rtol=1e-5,
                             atol=1e-7)


def test_the_server_learns_from_blends_too():
  text = 'mixmatch(alpha={}, unlabeled_weight=0.0)'
  plain, blended = (weights(one_round(text.format(alpha), place='server',
                                      weak=same)[1]) for alpha in (0.0, 0.75))
  assert not np.allclose(plain, blended, atol=1e-4)


@pytest.mark.parametrize('profile, crosses', [
    ('fedssl', False), ('original', True)])
def test_only_the_original_mixes_across_the_two_kinds(profile, crosses):
  """Do pixels of unlabeled rows reach the loss on labeled ones?"""
  federation, hidden = toy.federation()
  inputs = jnp.where(jnp.asarray(hidden)[:, None, None, None],
                     255 - federation.train.inputs, federation.train.inputs)
  task = toy.task(**WHOLE)
  method = methods.make(
      f'mixmatch(profile="{profile}", unlabeled_weight=0.0)', task)
  state = method.init(toy.key(0), federation)
  run = jax.jit(method.round)
  first, second = (weights(run(state, data, jnp.int32(0), toy.key(1))[0])
         for data in (federation, with_inputs(federation, inputs)))
  assert np.allclose(first, second, rtol=1e-6, atol=1e-7) != crosses


def with_inputs(federation, inputs):
  """The federation with other pixels."""
  return dataclasses.replace(
      federation, train=federation.train._replace(inputs=inputs))


def test_every_view_counts_the_same_in_the_original():
  """Without draws, K equal views are one."""
  text = 'mixmatch(profile="original", alpha=0.0, ramp=0.0, num_views={})'
  one, three = (change(text.format(k), **WHOLE) for k in (1, 3))
  np.testing.assert_allclose(one, three, rtol=1e-5, atol=1e-7)


def test_the_ramp_is_a_share_of_the_final_weight():
  """Round 1 of 8, one step: a quarter of the run is over at its end."""
  def moved(weight, ramp):
    return change(f'mixmatch(profile="original", unlabeled_weight={weight}, '
                  f'ramp={ramp})', round_=1, **WHOLE)
  np.testing.assert_allclose(moved(8.0, 1.0), moved(2.0, 0.0), rtol=1e-5,
                             atol=1e-7)
