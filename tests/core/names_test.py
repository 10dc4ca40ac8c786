"""Names with arguments: what is read, and what is refused in one line."""
from __future__ import annotations

import math

import pytest

from fedjax_ssl.core import checks, knobs, registry


def _thing(size: float, *, width: int = 3, rate: float = 0.5,
           keep: bool = False, kind: str = 'a', seed: int | None = None,
           shared: int = 0) -> tuple:
  return size, width, rate, keep, kind, seed, shared


def _build(text):
  return registry.build('thing', text, {'thing': _thing}, 2.0, shared=7)


def test_knobs_arrive_and_defaults_stay():
  assert _build('thing') == (2.0, 3, 0.5, False, 'a', None, 7)
  assert _build(' thing(width=4, rate=1, keep=True, kind="b", seed=2)') == (
      2.0, 4, 1, True, 'b', 2, 7)
  assert registry.parse('a(x=[1, -2.5], y=None)') == ('a', {
      'x': [1, -2.5],
      'y': None
  })
  for text in ('[inf, -inf]', '[1e999, -1e999]'):
    name, given = registry.parse(f'a(x={text})')
    assert given == {'x': [float('inf'), -float('inf')]}
    assert registry.parse(registry.written(name, given)) == (name, given)


@pytest.mark.parametrize('name, allowed, nearest', [
    ('fedprx', ['fedprox', 'prox'], ['fedprox']),
    ('fedprx', ['prox', 'fedprox'], ['fedprox']),
    ('prxo', ['fedprox', 'prox'], ['prox']), ('fedopt', ['fedggp'], []),
    ('Fed_Avg', ['fedavg', 'fedavg2'], ['fedavg']),
    ('fedbd', ['feddb', 'fedavg'], ['feddb'])])
def test_the_nearest_name(name, allowed, nearest):
  assert checks.nearest(name, allowed) == nearest


@pytest.mark.parametrize('text, words', [
    ('thin', ("Did you mean 'thing'", 'Allowed: thing')),
    ('thing(wide=1)', ("no knob 'wide'", 'width, rate, keep')),
    ('thing(shared=1)', ("no knob 'shared'",)),
    ('thing(width=2.5)', ('width of type int', '2.5')),
    ('thing(width=True)', ('width of type int', 'True')),
    ('thing(keep=1)', ('keep of type bool',)),
    ('thing(rate="x")', ('rate of type float',)),
    ('thing(kind=None)', ('kind of type str',)),
    ('thing(1)', ('not of the form',)),
    ('thing(width=open("x"))', ('literals',)),
    ('thing(rate=.5, kind=high)', (
        'knob kind=high: allowed are', 'words in quotes')),
    ('thing(width={[]: 1})', ('literals',)),
    ('thing(**{"width": 1})', ('not of the form',)),
    ('thing(width=1, width=2)', ('gives width twice',)),
    ('thing; import os', ('not of the form',))])
def test_all_else_is_refused(text, words):
  with pytest.raises(ValueError) as info:
    _build(text)
  assert '\n' not in str(info.value)
  for word in words:
    assert word in str(info.value)


def test_old_names_are_read_where_the_new_ones_are_known():
  new = registry.with_new_names
  assert new({'labeled_say': 3, 'mu': 0}, ['labeled_client_weight', 'mu']) == {
      'labeled_client_weight': 3, 'mu': 0}
  assert new({'labeled_weight': 3}, ['labeled_weight', 'mu']) == {
      'labeled_weight': 3}
  assert new({'labeled_say': 3}, ['mu']) == {'labeled_say': 3}
  with pytest.raises(ValueError, match='old name of labeled_client_weight'):
    new({'labeled_say': 3, 'labeled_client_weight': 2},
        ['labeled_client_weight'])


@pytest.mark.parametrize('value', [math.nan, math.inf, 1e39, -1.0])
def test_numbers_that_float32_does_not_hold_are_refused(value):
  for bound in (knobs.Bound(), knobs.Bound(above=True)):
    with pytest.raises(ValueError, match='knob must be .* finite in float32'):
      knobs.require('knob', value, bound)
    knobs.require('knob', 3.4e38, bound)
  knobs.require('knob', 0, knobs.Bound())


@pytest.mark.parametrize('value', [math.nan, math.inf, 2.5, 0])
def test_whole_numbers(value):
  with pytest.raises(ValueError, match=f'knob .*at least 1 .*not {value}'):
    knobs.require('knob', value, knobs.Bound(1, 2**31 - 1, whole=True))
  for fine in (1, 3.0):
    knobs.require('knob', fine, knobs.Bound(1, 2**31 - 1, whole=True))


@pytest.mark.parametrize('value', [1e-46, 0.0])
def test_above_0_means_in_float32_too(value):
  with pytest.raises(ValueError, match='above 0'):
    knobs.require('knob', value, knobs.Bound(above=True))


def test_a_refusal_by_the_thing_itself_names_the_text():
  def picky(*, size: int = 1) -> int:
    knobs.require('size', size, knobs.Bound(1))
    return size

  with pytest.raises(checks.FieldError) as info:
    registry.build('thing', 'picky(size=0)', {'picky': picky})
  assert (info.value.field, info.value.value) == ('thing', 'picky(size=0)')
  assert info.value.reason.startswith('size must')
  assert str(info.value).startswith('thing=picky(size=0): size must')
  with pytest.raises(ValueError, match="Did you mean 'size'"):
    registry.build('thing', 'picky(siez=0)', {'picky': picky})


def test_a_refusal_for_another_reason_keeps_all_fields():
  error = checks.FieldError('agents', 3, 'are too many', clients=2)
  error.rename('clients', 'num_clients')
  other = error.because('do not fit')
  assert str(other) == 'agents=3 and num_clients=2: do not fit'
  assert (other.field, other.value, other.reason) == (
      'agents', 3, 'do not fit')
