"""Arguments that give a wrong number or an obscure error are refused."""
from __future__ import annotations

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from fedjax_ssl import losses
from fedjax_ssl.losses import adversarial

# As many rows as classes: there one kind of target broadcasts as the other.
Z = np.random.default_rng(0).normal(size=(3, 3)).astype(np.float32)
Y = np.array([0, 2, 1], np.int32)
HOT = np.eye(3, dtype=np.float32)[Y]
tsa = functools.partial(losses.tsa_cross_entropy, threshold=0.9)


def refused(function, *args, match):
  """Asserts one clear line, also where the arguments are traced."""
  for call in (function, functools.partial(jax.eval_shape, function)):
    with pytest.raises(ValueError, match=match) as error:
      call(*args)
    assert len(str(error.value).splitlines()) == 1


@pytest.mark.parametrize('loss', [
    losses.target_kl, losses.consistency, losses.squared_error])
def test_classes_are_no_distributions(loss):
  refused(loss, Z, Y, match=r'targets .*\(3,\).*int32.*allowed.*\(3, 3\)')
  refused(loss, Z, HOT.astype(int), match='targets .*allowed are floats')
  loss(Z, HOT)


@pytest.mark.parametrize('loss', [
    losses.accuracy, losses.relation_matrix, tsa])
def test_distributions_are_no_classes(loss):
  refused(loss, Z, HOT, match=r'labels .*\(3, 3\).*float32.*allowed.*\(3,\)')
  refused(loss, Z, Y.astype(np.float32), match='labels .*allowed are classes')
  loss(Z, Y)


def test_a_view_is_no_class():
  refused(losses.uda, Y, Z, match=r'strong_logits .*allowed .*\(3, 3\)')


@pytest.mark.parametrize('loss, target', [
    (losses.cross_entropy, Y), (losses.target_kl, HOT),
    (losses.consistency, HOT), (losses.accuracy, Y), (tsa, Y),
    (losses.uda, Z), (losses.relation_matrix, Y)])
@pytest.mark.parametrize('place', range(3))
def test_lists_are_refused_by_name(loss, target, place):
  args = [Z, target, np.ones(3, np.float32)]
  loss(*args)
  args[place] = args[place].tolist()
  name = ('logits', 'targets|labels|logits', 'mask')[place]
  with pytest.raises(ValueError, match=f'({name}) has type list; allowed'):
    loss(*args)


def test_the_message_names_what_is_allowed():
  want = re.escape('targets have shape (3,) and type int32; allowed are floats '
                   'of shape (3, 3), that of the logits.')
  refused(losses.consistency, Z, Y, match=f'^{want}')


@pytest.mark.parametrize('function', [
    losses.squared_distance, functools.partial(losses.proximal, mu=0.1),
    functools.partial(losses.mixup, 0.5)])
def test_trees_of_two_forms_are_refused_by_leaf(function):
  ones = {'w': np.ones((2, 3)), 'b': {'c': np.ones(3)}}
  refused(function, ones, ones | {'w': np.ones(3)},
          match=r"\w\['w'\] has shape \(3,\); allowed is \(2, 3\)")
  refused(function, ones, {'w': ones['w'], 'b': {}}, match=r"\['b'\]\['c'\]")
  refused(function, [np.ones(3)], (np.ones(3),), match='types of their nodes')


def test_blends_have_a_ratio_for_each_row():
  refused(losses.mixup, np.ones(2), np.ones((3, 2)), np.ones((3, 2)),
          match=r'lam has shape \(2,\); allowed is \(3,\)')


@pytest.mark.parametrize('function, args, match', [
    (losses.soft_pseudo_label, [(4, 3)], r'logits .*\(4, 3\).*\(K, B, C\)'),
    (losses.agreement_vote, [(4, 3), (4, 3)],
     r'helper_logits .*\(4, 3\).*\(H, 4, 3\)'),
    (losses.agreement_vote, [(4, 3), (2, 4, 5)], r'helper_logits .*\(H, 4, 3'),
    (lambda z, helpers, present: losses.agreement_vote(
        z, helpers, present=present), [(4, 3), (2, 4, 3), (3,)],
     r'present .*\(3,\).*\(2,\)'),
    (losses.inter_client_kl, [(4, 3), (4, 3)], r'helper_logits .*\(H, 4, 3\)'),
    (losses.blended_label, [(4, 3), (1, 3)], r'global_logits .*\(4, 3\)'),
    (lambda z, bar: losses.pseudo_label(z, threshold=bar), [(4, 3), (1,)],
     r'threshold .*\(1,\).*\(3,\)'),
    (lambda z, shares, seen: losses.fairness(z, shares, histogram=seen),
     [(4, 3), (4, 3), (3,)], r'shares .*\(4, 3\).*\(3,\)'),
    (lambda z, shares, seen: losses.fairness(z, shares, histogram=seen),
     [(4, 3), (3,), (1,)], r'histogram .*\(1,\).*\(3,\)'),
    (losses.relation_matching, [(3, 3), (1, 3)], r'target .*\(3, 3\)'),
    (adversarial.discriminator_loss, [(4,), (1,)], r'fake_logits .*\(4,\)'),
    (adversarial.generator_loss, [(4, 1), (4,)], r'fake_logits .*\(4,\)'),
    (adversarial.reconstruction, [(4, 2), (1, 2)], r'images .*\(4, 2\)')])
def test_shapes_that_broadcast_are_refused(function, args, match):
  arrays = [np.full(shape, 0.25, np.float32) for shape in args]
  refused(function, *arrays, match=match)


@pytest.mark.parametrize('function, name, value, allowed', [
    (functools.partial(losses.cross_entropy, Z, Y), 'label_smoothing', 2.0,
     '0 to 1'),
    (functools.partial(losses.uda, Z, Z), 'temperature', 0, 'above 0'),
    (functools.partial(losses.relation_matrix, Z, Y), 'temperature', -2.0,
     'above 0'),
    (functools.partial(losses.sharpen, HOT), 'temperature', -1.0, '0 or more'),
    (functools.partial(losses.sharpen, HOT), 'exponent', np.float32(-1),
     '0 or more'),
    (functools.partial(losses.soft_pseudo_label, Z[None]), 'temperature',
     float('nan'), '0 or more'),
    (functools.partial(losses.blended_label, Z, Z), 'half_gap', -0.1,
     'above 0'),
    (functools.partial(losses.mixup_ratio, jax.random.key(0)), 'alpha', 0.0,
     'above 0 and finite'),
    (functools.partial(losses.mixup_ratio, jax.random.key(0)), 'alpha', np.inf,
     'above 0 and finite'),
    (functools.partial(losses.mixup, a=Z, b=Z), 'lam', 2.0, '0 to 1'),
    (functools.partial(losses.tsa_threshold, 0, num_classes=10), 'num_steps',
     0, 'above 0'),
    (functools.partial(losses.freematch_thresholds, shares=HOT[0]),
     'confidence', -1.0, '0 to 1'),
    (functools.partial(losses.softmatch_weights, Z[0], 0.5), 'variance', -1.0,
     '0 or more'),
    (functools.partial(losses.flexmatch_thresholds, HOT[0]), 'threshold', -0.5,
     '0 or more'),
    (functools.partial(losses.proximal, Z, Z), 'mu', -0.1, '0 or more')])
def test_numbers_that_turn_a_loss_around_are_refused(
    function, name, value, allowed):
  refused(lambda: function(**{name: value}),
          match=f'{name} is .*; allowed is {allowed}')
  # One that JAX holds is not read.
  jax.eval_shape(lambda x: function(**{name: x}), np.float32(value))


@pytest.mark.parametrize('dtype', ['float16', 'bfloat16', 'float32'])
@pytest.mark.parametrize('scale', [300.0, 1.0, 1e-2])
def test_unit_rows_have_length_one_in_every_type(dtype, scale):
  rows = jnp.asarray([[3, 4, 0], [0, 0, 0], [-1, 1, 1]], dtype) * scale
  unit = losses.unit_rows(rows)
  assert unit.dtype == rows.dtype
  np.testing.assert_allclose(np.linalg.norm(
      np.asarray(unit, np.float32), axis=-1), [1, 0, 1], atol=5e-3)


def test_rows_and_weights_of_other_shapes_are_refused():
  column = np.ones((3, 1), np.float32)
  refused(lambda z: losses.rows.reduced(z, np.ones(3), reduction='none'),
          column, match=r'mask has shape \(3,\); allowed is \(3, 1\)')
  refused(lambda z: adversarial.generator_loss(z, weight=column), Z[0],
          match=r'weight has shape \(3, 1\); allowed is \(3,\)')
  refused(lambda z: adversarial.discriminator_loss(z, z, fake_weight=column),
          Z[0], match='fake_weight has shape')
  images = np.zeros((4, 2, 2, 1), np.float32)
  refused(lambda z: adversarial.reconstruction(z, images, np.ones(1)), images,
          match=r'mask has shape \(1,\); allowed is \(4,\)')
  refused(lambda z: adversarial.fake_condition(.5, z, HOT), Z[:, :2],
          match=r'target has shape \(3, 3\); allowed is \(3, 2\)')
  with pytest.raises(ValueError, match='mask has type list; allowed are array'):
    losses.masked_mean(Z[0], [1, 0, 1])  # type: ignore[arg-type]


def test_whole_pixels_do_not_wrap_round():
  black, white = np.zeros((1, 2, 2, 1), np.uint8), np.ones((1, 2, 2, 1), 'u1')
  loss, _ = adversarial.reconstruction(black, white)
  assert loss == 4


def test_a_class_that_is_ruled_out_has_no_relation():
  logits = np.array([[0, 1, -np.inf], [1, 0, -np.inf]], np.float32)
  def relation(z):
    return losses.relation_matrix(z, np.array([0, 1]))
  matrix = np.asarray(relation(logits))
  one = np.exp(.5) / (1 + np.exp(.5))
  np.testing.assert_allclose(
      matrix, [[1 - one, one, 0], [one, 1 - one, 0], [1 / 3] * 3], rtol=1e-5)
  assert np.isfinite(jax.grad(lambda z: relation(z)[0, 1])(logits)).all()
